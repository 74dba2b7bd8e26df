"""The clock. All code reads the time and sleeps through `Clock`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol

UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
OFFSET_SAMPLES = 5
# Also counts while the machine is suspended, so that reminders are due on time after a resume.
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    def now(self) -> datetime:
        """The current UTC time in whole milliseconds. Not affected by steps of the wall clock."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary fixed moment. For durations."""
        ...

    async def wait(self, event: asyncio.Event, timeout: timedelta) -> bool:
        """Wait until `event` is set (True) or `timeout` has passed (False)."""
        ...

    async def sleep(self, duration: timedelta) -> None: ...

    def wall_clock_step(self) -> timedelta | None:
        """How far the wall clock was set since the last call; None if two seconds or less."""
        ...


def _boot_ns() -> int:
    return time.clock_gettime_ns(_BOOT_CLOCK)


class SystemClock:
    """The wall-clock time at construction plus the time elapsed since."""

    def __init__(self, wall_ns: Callable[[], int] = time.time_ns, boot_ns: Callable[[], int] = _boot_ns) -> None:
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

    def wall_clock_step(self) -> timedelta | None:
        offset = self._offset()
        step = timedelta(microseconds=(offset - self._seen_offset) // 1000)
        self._seen_offset = offset
        return step if abs(step) > timedelta(seconds=2) else None

    def _offset(self) -> int:
        """Nanoseconds by which the wall clock is ahead of the boot clock."""
        # The thread may be preempted between two readings: use the sample that took the least time.
        samples = [(self._boot_ns(), self._wall_ns(), self._boot_ns()) for _ in range(OFFSET_SAMPLES)]
        before, wall, _ = min(samples, key=lambda sample: sample[2] - sample[0])
        return wall - before


def to_ms(instant: datetime) -> int:
    return (instant - UNIX_EPOCH) // _MS


def from_ms(milliseconds: int) -> datetime:
    try:
        return UNIX_EPOCH + timedelta(0, 0, 0, milliseconds)  # positional: half the time of a keyword call
    except OverflowError:  # a corrupt row must not hide the rows around it
        return datetime.max.replace(tzinfo=UTC) if milliseconds > 0 else datetime.min.replace(tzinfo=UTC)


def to_rfc3339(instant: datetime | None) -> str | None:
    """RFC 3339 in UTC with milliseconds: `2026-11-15T08:00:00.000Z`."""
    if instant is None:
        return None
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
