"""A clock that a test controls."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

START = datetime(2030, 1, 1, tzinfo=UTC)


class FakeClock:
    """Stands still until `advance`, which returns when all tasks that it woke wait again.

    Time does not go on while a task that called `wait` is working, including its threads and disk access. So after
    `advance` everything due has happened, and tests need no sleeping.
    """

    def __init__(self, start: datetime = START) -> None:
        self._now = start
        self._timers: list[tuple[datetime, int, asyncio.Event]] = []
        self._count = itertools.count()
        self._waiting: dict[asyncio.Task[Any], tuple[asyncio.Event, asyncio.Event]] = {}
        self._working: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self._step: timedelta | None = None

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        return (self._now - START).total_seconds()

    def wall_clock_step(self) -> timedelta | None:
        step, self._step = self._step, None
        return step

    def step(self, **by: float) -> None:
        """Simulate a change of the machine's wall clock."""
        self._step = timedelta(**by)

    async def wait(self, event: asyncio.Event, timeout: timedelta) -> bool:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101
        fired = self._timer(timeout)
        self._waiting[task] = (event, fired)
        self._working.discard(task)
        self._changed.set()
        try:
            await _first(event, fired)
        finally:
            del self._waiting[task]
            self._working.add(task)
            task.add_done_callback(self._on_task_done)
        return event.is_set()

    async def sleep(self, duration: timedelta) -> None:
        await self._timer(duration).wait()

    async def advance(self, **by: float) -> None:
        """`advance(minutes=1)`: every timer on the way fires at its own time, in order."""
        until = self._now + timedelta(**by)
        await self._settle()
        while self._timers and self._timers[0][0] <= until:
            due, _, fired = heapq.heappop(self._timers)
            self._now = max(self._now, due)
            fired.set()
            await self._settle()
        self._now = until
        await self._settle()

    async def jump(self, **by: float) -> None:
        """Simulate a suspended machine: all timers on the way fire late, at the end."""
        await self._settle()
        self._now += timedelta(**by)
        await self.advance()

    def _timer(self, after: timedelta) -> asyncio.Event:
        fired = asyncio.Event()
        if after <= timedelta(0):
            fired.set()
            return fired
        heapq.heappush(self._timers, (self._now + after, next(self._count), fired))
        return fired

    async def _settle(self) -> None:
        await asyncio.sleep(0)  # let woken tasks register
        while self._working or any(event.is_set() or fired.is_set() for event, fired in self._waiting.values()):
            self._changed.clear()
            await self._changed.wait()
            await asyncio.sleep(0)

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._working.discard(task)
        self._changed.set()


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
