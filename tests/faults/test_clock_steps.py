"""Steps of the wall clock and suspends do not move due times; steps are logged."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from coterie.clock import SystemClock, to_ms
from coterie.society import Society
from coterie.testing import FakeClock, ModelServer
from coterie.testing.model_server import Status
from tests.faults.harness import scaled_timeout

from .scenarios import make_home

YEAR = timedelta(days=365)


class Machine(FakeClock):
    """The system clock with readings that a test controls."""

    def __init__(self) -> None:
        super().__init__()
        self._set_by = self._slept = timedelta(0)
        self._system = SystemClock(wall_ns=self._wall_ns, boot_ns=self._boot_ns)

    def set_wall(self, by: timedelta) -> None:
        self._set_by += by

    def suspend(self, length: timedelta) -> None:
        """Advance the wall and boot clocks without running timers."""
        self._slept += length

    def now(self) -> datetime:
        return self._system.now()

    def wall_clock_step(self) -> timedelta | None:
        return self._system.wall_clock_step()

    def _boot_ns(self) -> int:
        return (to_ms(self._now) - 1_800_000_000_000 + self._slept // timedelta(milliseconds=1)) * 1_000_000

    def _wall_ns(self) -> int:
        return self._boot_ns() + 1_800_000_000_000_000_000 + self._set_by // timedelta(microseconds=1) * 1000


@pytest.fixture
async def machine() -> Machine:
    return Machine()


@pytest.fixture
async def society(tmp_path: Path, machine: Machine) -> AsyncIterator[Society]:
    make_home(tmp_path / "society")
    async with Society.open(tmp_path / "society", clock=machine, work=False) as opened:
        yield opened
        assert [violation async for violation in opened.store.violations()] == []


def steps_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "wall clock" in record.getMessage()]


@pytest.mark.parametrize(
    ("by", "shown"), [(timedelta(hours=1), "+3600"), (-timedelta(hours=1), "-3600"), (-YEAR, "-31536000")], ids=str
)
async def test_a_step_of_the_wall_clock_does_not_move_a_due_time_and_is_logged(
    by: timedelta, shown: str, society: Society, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "coterie")
    await society.send(to="ada", text="in ten minutes", delay_ms=600_000)
    await machine.advance(minutes=1)
    machine.set_wall(by)

    await machine.advance(minutes=9, milliseconds=-1)
    assert await society.waiting("ada") == [], "early"
    await machine.advance(milliseconds=1)
    assert [message.payload["text"] for message in await society.waiting("ada")] == ["in ten minutes"]
    (line,) = steps_logged(caplog)
    assert shown in line


async def test_a_strobing_wall_clock_moves_no_due_time(
    society: Society, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "coterie")
    for second in range(1, 21):
        await society.send(to="ada", text=str(second), delay_ms=second * 1000)
    for second in range(1, 21):
        machine.set_wall(timedelta(seconds=4.1 if second % 2 else -4.1))
        await machine.advance(milliseconds=999)
        assert len(await society.waiting("ada")) == second - 1, "early"
        await machine.advance(milliseconds=1)
        assert len(await society.waiting("ada")) == second, "late"
    assert len(steps_logged(caplog)) >= 10


async def test_small_corrections_of_the_wall_clock_are_not_logged(
    society: Society, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "coterie")
    for _ in range(10):
        machine.set_wall(timedelta(milliseconds=300))
        await machine.advance(seconds=1)
    assert steps_logged(caplog) == []


async def test_messages_due_during_a_suspend_are_delivered_within_a_second_of_the_resume(
    society: Society, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "coterie")
    await society.send(to="ada", text="in an hour", delay_ms=3_600_000)
    await society.send(to="ada", text="in three hours", delay_ms=3 * 3_600_000)
    await machine.advance(minutes=1)
    assert await society.waiting("ada") == []

    machine.suspend(timedelta(hours=2))
    await machine.advance(seconds=1)

    assert [message.payload["text"] for message in await society.waiting("ada")] == ["in an hour"]
    assert steps_logged(caplog) == [], "sleeping is no step"


async def test_after_a_restart_with_the_clock_a_year_back_times_do_not_go_back_and_delays_work(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "coterie")
    make_home(tmp_path / "society")
    async with Society.open(tmp_path / "society", clock=machine, work=False) as society:
        await society.send(to="ada", text="before")
    earlier = Machine()
    earlier.set_wall(-YEAR)
    earlier._system = SystemClock(wall_ns=earlier._wall_ns, boot_ns=earlier._boot_ns)

    async with Society.open(tmp_path / "society", clock=earlier, work=False) as society:
        await society.send(to="ada", text="after")
        await society.send(to="ada", text="delayed", delay_ms=5_000)
        await earlier.advance(milliseconds=4_999)
        assert await society.bus.delayed_count() == 1
        await earlier.advance(milliseconds=1)
        messages = await society.waiting("ada")
        assert [message.payload["text"] for message in messages] == ["before", "after", "delayed"]
        assert sorted(messages, key=lambda message: message.created_at) == list(messages)
        assert [violation async for violation in society.store.violations()] == []
    assert any("behind the last run" in record.getMessage() for record in caplog.records)


async def test_after_a_restart_with_the_clock_a_day_back_a_retry_is_not_a_day_late(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    async with ModelServer() as server:
        make_home(tmp_path / "society")
        services = [{"id": "main", "baseURL": server.base_url, "model": "m"}]
        (tmp_path / "society/llmservices.json").write_text(json.dumps({"services": services}))
        server.script(Status(503, headers={"Retry-After": "30"}), "here I am")
        async with Society.open(tmp_path / "society", clock=machine) as society, society.bus.watch() as watcher:
            await society.send(to="ada", text="are you there?")
            while (agent := await society.store.agent("ada")) is None or agent.state != "wait_retry":
                await anext(watcher)
        earlier = Machine()
        earlier.set_wall(-timedelta(days=1))
        earlier._system = SystemClock(wall_ns=earlier._wall_ns, boot_ns=earlier._boot_ns)

        async with Society.open(tmp_path / "society", clock=earlier) as society:
            async with asyncio.timeout(scaled_timeout(20)):
                while not any("the clock was set back" in record.getMessage() for record in caplog.records):
                    await society.store.agent("ada")  # the wait is shortened from now on, not from a later time
            await earlier.advance(seconds=28)
            assert len(server.requests) == 1, "early"
            await earlier.advance(seconds=5)
            async with asyncio.timeout(scaled_timeout(20)):
                assert (await anext(society.inbox())).payload["text"] == "here I am"
