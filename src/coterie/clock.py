"""The only door to the time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
LOOKS = 5
# Elapsed time that goes on while the machine sleeps; a reminder is not late because a lid was closed.
_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    def now(self) -> datetime:
        """The instant in UTC, in whole milliseconds. Steps of the machine's wall clock do not move it."""
        ...

    def monotonic(self) -> float:
        """Seconds since some fixed moment, for durations."""
        ...

    async def wait(self, event: asyncio.Event, timeout: timedelta) -> bool:
        """Until `event` is set (True) or `timeout` has passed (False). For loops that come back to wait again."""
        ...

    async def sleep(self, duration: timedelta) -> None: ...

    def stepped(self) -> timedelta | None:
        """How far the wall clock was set since the last call, when that is more than two seconds."""
        ...


def _boot_ns() -> int:
    return time.clock_gettime_ns(_BOOT)


class SystemClock:
    """The wall clock of the moment it was made, plus the time elapsed since."""

    def __init__(self, wall_ns: Callable[[], int] = time.time_ns, boot_ns: Callable[[], int] = _boot_ns) -> None:
        """`wall_ns`, `boot_ns`: the machine's clocks."""
        self._wall_ns, self._boot_ns = wall_ns, boot_ns
        self._boot_offset = self._seen_offset = self._offset()

    def now(self) -> datetime:
        return from_ms((self._boot_ns() + self._boot_offset) // 1_000_000)

    def monotonic(self) -> float:
        return time.monotonic()

    async def wait(self, event: asyncio.Event, timeout: timedelta) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout.total_seconds()):
                return await event.wait()
        return event.is_set()

    async def sleep(self, duration: timedelta) -> None:
        await asyncio.sleep(duration.total_seconds())

    def stepped(self) -> timedelta | None:
        offset = self._offset()
        step = timedelta(microseconds=(offset - self._seen_offset) // 1000)
        self._seen_offset = offset
        return step if abs(step) > timedelta(seconds=2) else None

    def _offset(self) -> int:
        """How far the wall clock is ahead of the boot clock.

        On a busy machine we may be put aside between two looks, so the quickest of several counts.
        """
        looks = [(self._boot_ns(), self._wall_ns(), self._boot_ns()) for _ in range(LOOKS)]
        before, wall, _ = min(looks, key=lambda look: look[2] - look[0])
        return wall - before


def to_ms(instant: datetime) -> int:
    return (instant - EPOCH) // _MS


def from_ms(milliseconds: int) -> datetime:
    try:
        return EPOCH + timedelta(0, 0, 0, milliseconds)  # by place, which takes half as long as by name
    except OverflowError:  # only damage writes such a time: one wild number must not hide the rows around it
        return datetime.max.replace(tzinfo=UTC) if milliseconds > 0 else datetime.min.replace(tzinfo=UTC)


def to_wire(instant: datetime | None) -> str | None:
    """RFC 3339, UTC, milliseconds: `2026-11-15T08:00:00.000Z`."""
    if instant is None:
        return None
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
