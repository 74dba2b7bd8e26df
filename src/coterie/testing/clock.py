"""Time that a test moves."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

START = datetime(2030, 1, 1, tzinfo=UTC)


class FakeClock:
    """Stands still until `advance`, which returns when everything it woke has come back to wait.

    Loops that `wait` are followed: while one of them is at work, time does not go on. So after `advance` whatever was
    due has happened, threads and disk included, and a test needs no sleeping.
    """

    def __init__(self, start: datetime = START) -> None:
        self._now = start
        self._sleepers: list[tuple[datetime, int, asyncio.Event]] = []
        self._count = itertools.count()
        self._waiting: dict[asyncio.Task[Any], tuple[asyncio.Event, asyncio.Event]] = {}
        self._at_work: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self._step: timedelta | None = None

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        return (self._now - START).total_seconds()

    def stepped(self) -> timedelta | None:
        step, self._step = self._step, None
        return step

    def step(self, **by: float) -> None:
        """Somebody sets the machine's wall clock; the runtime must notice and not care."""
        self._step = timedelta(**by)

    async def wait(self, event: asyncio.Event, timeout: timedelta) -> bool:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101
        rang = self._alarm(timeout)
        self._waiting[task] = (event, rang)
        self._at_work.discard(task)
        self._changed.set()
        try:
            await _first(event, rang)
        finally:
            del self._waiting[task]
            self._at_work.add(task)
            task.add_done_callback(self._gone)
        return event.is_set()

    async def sleep(self, duration: timedelta) -> None:
        await self._alarm(duration).wait()

    async def advance(self, **by: float) -> None:
        """`advance(minutes=1)`: every alarm on the way rings at its own moment, in order."""
        until = self._now + timedelta(**by)
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= until:
            due, _, rang = heapq.heappop(self._sleepers)
            self._now = max(self._now, due)
            rang.set()
            await self._settle()
        self._now = until
        await self._settle()

    async def jump(self, **by: float) -> None:
        """As if the machine had slept: all alarms on the way ring late, at the end of it."""
        await self._settle()
        self._now += timedelta(**by)
        await self.advance()

    def _alarm(self, after: timedelta) -> asyncio.Event:
        rang = asyncio.Event()
        if after <= timedelta(0):
            rang.set()
            return rang
        heapq.heappush(self._sleepers, (self._now + after, next(self._count), rang))
        return rang

    async def _settle(self) -> None:
        await asyncio.sleep(0)  # whoever was woken just now gets to say so
        while self._at_work or any(event.is_set() or rang.is_set() for event, rang in self._waiting.values()):
            self._changed.clear()
            await self._changed.wait()
            await asyncio.sleep(0)

    def _gone(self, task: asyncio.Task[Any]) -> None:
        self._at_work.discard(task)
        self._changed.set()


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
