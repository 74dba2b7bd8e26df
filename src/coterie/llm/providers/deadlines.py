"""Deadlines of a request to a model service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

T = TypeVar("T")
_MAX_CONNECT = timedelta(seconds=10)
_END_SECONDS = 0.1


class DeadlineExceeded(Exception):
    """The message names the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    connect: timedelta
    """For the TCP connection, and again for TLS; `first_byte` includes both."""
    first_byte: timedelta
    """From sending the request to the first byte of the response."""
    idle: timedelta
    """Between two chunks of the response."""
    total: timedelta

    @classmethod
    def from_total(cls, total: timedelta) -> Deadlines:
        """Derive all deadlines from the one configured timeout."""
        return cls(connect=min(_MAX_CONNECT, total / 5), first_byte=total / 2, idle=total / 4, total=total)


class DeadlineTimer:
    """Applies the deadlines to the awaits of one request.

    A slow caller does not use up the idle deadline: it runs only during `await_next`. Times are the event loop's, not
    the `Clock`'s, because the service is remote. One timer serves all awaits: a timer per chunk costs more than reading
    the chunk.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadlines = deadlines
        self._total_ends = self._loop.time() + deadlines.total.total_seconds()
        self._first_ends = self._loop.time() + deadlines.first_byte.total_seconds()
        self._idle = deadlines.idle.total_seconds()
        self._due = 0.0
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._timer:
            self._timer.cancel()

    async def await_first(self, step: Callable[[], Awaitable[T]]) -> T:
        """Await `step()` within the first-byte deadline; raise `DeadlineExceeded` after it."""
        return await self._await(step, self._first_ends)

    async def await_next(self, step: Callable[[], Awaitable[T]]) -> T:
        """Await `step()` within the idle deadline."""
        return await self._await(step, self._loop.time() + self._idle)

    async def await_end(self, step: Callable[[], Awaitable[T]]) -> T:
        """Await `step()` for at most 0.1 s: the end of a response that is already complete."""
        return await self._await(step, self._loop.time() + _END_SECONDS)

    async def _await(self, step: Callable[[], Awaitable[T]], due: float) -> T:
        self._due = due if due < self._total_ends else self._total_ends
        if self._due <= self._loop.time():
            raise DeadlineExceeded(self._reason())
        self._start_timer()
        task = self._task = asyncio.current_task()
        assert task is not None  # noqa: S101
        cancelling = task.cancelling()
        try:
            result = await step()
        except asyncio.CancelledError:
            if self._expired and task.uncancel() <= cancelling:
                raise DeadlineExceeded(self._reason()) from None
            raise
        finally:
            self._task = None
        if self._expired:  # the step suppressed the cancellation
            task.uncancel()
            raise DeadlineExceeded(self._reason())
        return result

    def _start_timer(self) -> None:
        # A timer set for an earlier time is kept; it restarts itself when it fires too early.
        if self._timer and self._timer.when() <= self._due:
            return
        if self._timer:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if self._due <= self._loop.time():
            self._expired = True
            self._task.cancel()
        else:
            self._start_timer()

    def _reason(self) -> str:
        if self._due == self._total_ends:
            return f"did not finish within {_seconds(self._deadlines.total)}"
        if self._due == self._first_ends:
            return f"did not begin to answer within {_seconds(self._deadlines.first_byte)}"
        return f"fell silent for {_seconds(self._deadlines.idle)} in the middle of its answer"


def _seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():g} s"
