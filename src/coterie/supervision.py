"""Background loops that survive errors, pauses of background work, and shutdown steps that all run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

from coterie.clock import Clock
from coterie.errors import StoreError

T = TypeVar("T")
log = logging.getLogger(__name__)

FIRST_PAUSE = timedelta(seconds=1)
LONGEST_PAUSE = timedelta(seconds=10)


async def supervise(
    name: str,
    work: Callable[[], Awaitable[object]],
    clock: Clock,
    *,
    stopping: asyncio.Event | None = None,
    first_pause: timedelta = FIRST_PAUSE,
) -> None:
    """Run `work` until it returns; log an exception, wait, and run it again.

    The pause doubles from `first_pause` up to ten seconds. It starts again at `first_pause` after a run longer than
    ten seconds. `stopping`: when it is set, an error ends the loop instead of a new run. Cancellation passes through.
    """
    never = asyncio.Event()
    pause = first_pause
    while True:
        began = clock.monotonic()
        try:
            await work()
            return
        except StoreError as error:
            log.error("%s failed and is tried again in %g s: %s", name, pause.total_seconds(), error)
        except Exception:
            log.exception("%s failed and is tried again in %g s", name, pause.total_seconds())
        if clock.monotonic() - began > LONGEST_PAUSE.total_seconds():
            pause = first_pause
        if await clock.wait(stopping or never, pause):
            return
        pause = max(first_pause, min(2 * pause, LONGEST_PAUSE))


IDLE_FACTOR, BUSY_FACTOR = 3, 50
"""A pause is this many times as long as the step before it: while no caller writes, and while one does."""
SHORTEST_STEP_PAUSE = timedelta(milliseconds=2)
LONGEST_STEP_PAUSE = timedelta(milliseconds=100)


class Pace:
    """Pauses between the steps of background work that writes to the store, so that callers hardly wait for it."""

    def __init__(self, clock: Clock, stopping: asyncio.Event, count_writes: Callable[[], int]) -> None:
        """`count_writes`: returns a number that changes with every transaction that a caller waits for."""
        self._clock, self._stopping, self._count_writes = clock, stopping, count_writes
        self.begin()

    def begin(self) -> None:
        """The next step begins now."""
        self._began, self._writes = self._clock.monotonic(), self._count_writes()

    async def pause(self, least: timedelta = SHORTEST_STEP_PAUSE) -> bool:
        """End a step, pause, begin the next one. True: the work has to stop."""
        took = timedelta(seconds=self._clock.monotonic() - self._began)
        pause = max(least, min(IDLE_FACTOR * took, LONGEST_STEP_PAUSE))
        if await self._clock.wait(self._stopping, pause):
            return True
        longer = min(BUSY_FACTOR * took, LONGEST_STEP_PAUSE) - pause
        is_busy = self._count_writes() != self._writes
        if is_busy and longer > timedelta(0) and await self._clock.wait(self._stopping, longer):
            return True
        self.begin()
        return False


class Shutdown:
    """Runs all steps of a stop, even if earlier ones failed. `finish` raises the first error.

    A cancellation counts as an error: it ends the current step, and the remaining steps still run.
    """

    def __init__(self) -> None:
        self._first: BaseException | None = None

    @property
    def failed(self) -> bool:
        return self._first is not None

    @property
    def cancelled(self) -> bool:
        return isinstance(self._first, asyncio.CancelledError)

    async def step(self, name: str, work: Callable[[], Awaitable[T]]) -> T | None:
        """The result of `work`; None if it failed."""
        try:
            return await work()
        except asyncio.CancelledError as error:
            self._first = error  # takes precedence: the caller must see its cancellation
        except BaseException as error:
            self._first = self._first or error
            log.error("a step of the stop failed: %s", name, exc_info=error)
        return None

    def finish(self) -> None:
        if self._first is not None:
            raise self._first
