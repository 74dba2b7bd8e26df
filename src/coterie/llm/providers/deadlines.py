"""How long a service may take, held to the letter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

T = TypeVar("T")
_CONNECT = timedelta(seconds=10)
_SOON = 0.1


class Late(Exception):
    """A deadline has passed; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    connect: timedelta
    """For the connection, and again for its encryption; both fit into `first_byte`."""
    first_byte: timedelta
    """From asking to the first byte of the answer."""
    idle: timedelta
    """Between two pieces of the answer."""
    total: timedelta

    @classmethod
    def within(cls, total: timedelta) -> Deadlines:
        """The owner knows one number; a slow local model is given more of everything by raising it."""
        return cls(connect=min(_CONNECT, total / 5), first_byte=total / 2, idle=total / 4, total=total)


class Watch:
    """Holds the waits of one request to its deadlines.

    Time counts only while we wait for the service: a caller that thinks between two pieces makes no service late. It is
    the event loop's time and not the `Clock`'s, since the other end of a wire lives in real time. One timer serves all
    waits, because setting one for each piece of a stream costs more than reading the piece.
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
        self._rang = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._timer:
            self._timer.cancel()

    async def first(self, step: Callable[[], Awaitable[T]]) -> T:
        """What `step` gives, if it comes before the first byte is due; else `Late`."""
        return await self._wait(step, self._first_ends)

    async def next(self, step: Callable[[], Awaitable[T]]) -> T:
        return await self._wait(step, self._loop.time() + self._idle)

    async def soon(self, step: Callable[[], Awaitable[T]]) -> T:
        return await self._wait(step, self._loop.time() + _SOON)

    async def _wait(self, step: Callable[[], Awaitable[T]], due: float) -> T:
        self._due = due if due < self._total_ends else self._total_ends
        if self._due <= self._loop.time():
            raise Late(self._why())
        self._set()
        task = self._task = asyncio.current_task()
        assert task is not None  # noqa: S101
        cancelling = task.cancelling()
        try:
            result = await step()
        except asyncio.CancelledError:
            if self._rang and task.uncancel() <= cancelling:
                raise Late(self._why()) from None
            raise
        finally:
            self._task = None
        if self._rang:  # and the step took no notice
            task.uncancel()
            raise Late(self._why())
        return result

    def _set(self) -> None:
        # A timer that is set for an earlier moment finds out when it rings that it is not due yet.
        if self._timer and self._timer.when() <= self._due:
            return
        if self._timer:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if self._due <= self._loop.time():
            self._rang = True
            self._task.cancel()
        else:
            self._set()

    def _why(self) -> str:
        if self._due == self._total_ends:
            return f"did not finish within {_seconds(self._deadlines.total)}"
        if self._due == self._first_ends:
            return f"did not begin to answer within {_seconds(self._deadlines.first_byte)}"
        return f"fell silent for {_seconds(self._deadlines.idle)} in the middle of its answer"


def _seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():g} s"
