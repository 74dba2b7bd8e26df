"""The system clock and the fake clock."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from coterie.clock import SystemClock, from_ms, to_ms, to_rfc3339
from coterie.testing import FakeClock


def test_instants_on_the_wire_are_rfc_3339_in_utc_with_milliseconds() -> None:
    assert to_rfc3339(datetime(2026, 1, 2, 3, 4, 5, 6000, tzinfo=UTC)) == "2026-01-02T03:04:05.006Z"
    assert to_rfc3339(datetime(2026, 1, 2, tzinfo=UTC)) == "2026-01-02T00:00:00.000Z"
    assert to_rfc3339(None) is None


@pytest.mark.parametrize("milliseconds", [0, 1, 999, 1_767_322_645_006, 4_102_444_800_123])
def test_an_instant_is_unchanged_after_a_round_trip_to_milliseconds(milliseconds: int) -> None:
    assert to_ms(from_ms(milliseconds)) == milliseconds


def test_the_clock_starts_at_the_wall_clock_and_never_at_a_fraction_of_a_millisecond() -> None:
    now = SystemClock().now()
    assert abs(now - datetime.now(UTC)) < timedelta(seconds=1)
    assert now.microsecond % 1000 == 0


class Machine:
    """A wall clock and a boot clock that a test sets, in nanoseconds."""

    def __init__(self) -> None:
        self.wall, self.boot = 1_900_000_000 * 10**9, 5 * 10**9

    def clock(self) -> SystemClock:
        return SystemClock(wall_ns=lambda: self.wall, boot_ns=lambda: self.boot)


@pytest.mark.parametrize("step", [3600, -3600, -365 * 86400, 2.5])
def test_a_step_of_the_wall_clock_moves_nothing_and_is_noticed_once(step: float) -> None:
    machine = Machine()
    clock = machine.clock()
    before = clock.now()
    machine.wall += int(step * 1e9)
    assert clock.now() == before
    assert clock.wall_clock_step() == timedelta(seconds=step)
    assert clock.wall_clock_step() is None


def test_a_wall_clock_that_is_slewed_gently_is_not_a_step() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall += 10**9
    assert clock.wall_clock_step() is None


def test_a_process_that_is_preempted_between_two_readings_does_not_misread_the_clock() -> None:
    machine, preemptions = Machine(), [17 * 10**6]

    def read_and_be_preempted() -> int:
        read, passed = machine.wall, preemptions.pop() if preemptions else 0
        machine.boot += passed
        machine.wall += passed
        return read

    clock = SystemClock(wall_ns=read_and_be_preempted, boot_ns=lambda: machine.boot)
    assert clock.now() == from_ms(machine.wall // 10**6)
    assert clock.wall_clock_step() is None


def test_time_goes_on_while_the_machine_sleeps() -> None:
    machine = Machine()
    clock = machine.clock()
    before = clock.now()
    machine.boot += 7200 * 10**9
    assert clock.now() - before == timedelta(hours=2)


async def test_waiting_ends_with_the_event_or_with_the_time() -> None:
    clock, event = SystemClock(), asyncio.Event()
    assert await clock.wait(event, timedelta(milliseconds=1)) is False
    event.set()
    assert await clock.wait(event, timedelta(hours=1)) is True


async def test_the_fake_clock_wakes_every_sleeper_at_its_own_time() -> None:
    clock, rang = FakeClock(), list[datetime]()

    async def sleeper(seconds: float) -> None:
        await clock.sleep(timedelta(seconds=seconds))
        rang.append(clock.now())

    tasks = [asyncio.create_task(sleeper(seconds)) for seconds in (3, 1, 2)]
    start = clock.now()
    await clock.advance(seconds=2.5)
    await asyncio.sleep(0)
    assert rang == [start + timedelta(seconds=1), start + timedelta(seconds=2)]
    await clock.advance(seconds=1)
    await asyncio.gather(*tasks)
