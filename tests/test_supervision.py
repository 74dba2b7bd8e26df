"""Background work leaves the store to callers between its steps."""

from __future__ import annotations

import asyncio

import pytest

from coterie.supervision import Pace
from coterie.testing import FakeClock


@pytest.mark.parametrize(("writes", "paused_ms"), [(0, 6), (1, 100)])
async def test_background_work_pauses_longer_while_somebody_writes(writes: int, paused_ms: int) -> None:
    clock, count, ended = FakeClock(), 0, asyncio.Event()
    pace = Pace(clock, asyncio.Event(), lambda: count)

    async def work() -> None:
        await pace.pause()
        ended.set()

    await clock.advance(milliseconds=2)  # the step
    count += writes
    pausing = asyncio.create_task(work())
    await clock.advance(milliseconds=paused_ms - 1)
    assert not ended.is_set()
    await clock.advance(milliseconds=1)
    assert ended.is_set()
    await pausing


async def test_the_pause_ends_when_the_society_stops() -> None:
    clock, stopping = FakeClock(), asyncio.Event()
    pace = Pace(clock, stopping, lambda: 0)
    pausing = asyncio.create_task(pace.pause())
    stopping.set()
    assert await pausing
