"""Very many messages due at once: delivered in order and in bounded batches, with other writes in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.bus import PROMOTE_BATCH
from coterie.society import Society
from coterie.testing import FakeClock

from .scenarios import make_home
from .verifier import find_violations, open_database

AT_ONCE = 500


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Disable logging: the test runner would keep a line for each of 100,000 deliveries."""
    logging.getLogger("coterie.bus").setLevel(logging.WARNING)
    yield
    logging.getLogger("coterie.bus").setLevel(logging.NOTSET)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_home(tmp_path / "society")
    return tmp_path / "society"


async def delay_many(society: Society, count: int, delay_ms: int) -> None:
    for start in range(0, count, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, count))
        await asyncio.gather(*(society.send(to="ada", text=str(n), delay_ms=delay_ms) for n in numbers))


async def none_delayed(society: Society) -> None:
    while await society.bus.delayed_count("ada"):
        pass


def assert_delivered_in_order(home: Path, count: int) -> None:
    with open_database(home) as db:
        assert find_violations(db) == []
        texts = db.execute(
            "SELECT json_extract(payload, '$.text') FROM messages WHERE recipient = 'ada' ORDER BY in_seq"
        ).fetchall()
    assert [int(text) for (text,) in texts] == list(range(count))


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.full)])
async def test_messages_due_in_one_millisecond_arrive_in_send_order_with_other_writes_between_batches(
    count: int, home: Path, clock: FakeClock
) -> None:
    async with Society.open(home, clock=clock, work=False) as society:
        await delay_many(society, count, delay_ms=60_000)
        assert await society.bus.delayed_count("ada") == count
        due = asyncio.create_task(clock.advance(minutes=1))

        # No reads between the sends: they would give further batches time to get ahead.
        all_delivered = asyncio.create_task(none_delayed(society))
        others = 0
        while not all_delivered.done():
            await society.send(to="bob", text="between batches")
            others += 1
        await due

    assert_delivered_in_order(home, count)
    with open_database(home) as db:
        kinds = db.execute(
            "SELECT kind FROM events WHERE seq > (SELECT max(seq) FROM events WHERE kind = 'delayed.scheduled')"
            " AND kind IN ('delayed.delivered', 'message.created') ORDER BY seq"
        ).fetchall()
    runs = longest_runs([kind for (kind,) in kinds], "delayed.delivered")
    assert others >= 2
    assert max(runs) <= 2 * PROMOTE_BATCH, "a send waited for more than one batch"


def longest_runs(kinds: list[str], kind: str) -> list[int]:
    runs, length = [0], 0
    for current in kinds:
        length = length + 1 if current == kind else 0
        runs.append(length)
    return runs


async def test_messages_due_while_stopped_are_delivered_at_the_start_in_order_of_due_time(
    home: Path, clock: FakeClock
) -> None:
    count = 3_000
    async with Society.open(home, clock=clock, work=False) as society:
        sends = (society.send(to="ada", text=str(n), delay_ms=60_000 + n // 10) for n in reversed(range(count)))
        await asyncio.gather(*sends)
        last = await society.send(to="ada", text=str(count), delay_ms=7_200_000)
    later = FakeClock(clock.now())
    await later.advance(hours=1)

    async with Society.open(home, clock=later, work=False) as society:
        await later.advance(milliseconds=1)
        assert await society.bus.delayed_count() == 1
        waiting = await society.waiting("ada")
        assert all(message.delivered_at and message.deliver_at for message in waiting)
        await society.bus.withdraw(last.message_id)

    with open_database(home) as db:
        assert find_violations(db) == []
        texts = [
            int(text)
            for (text,) in db.execute(
                "SELECT json_extract(payload, '$.text') FROM messages WHERE in_seq IS NOT NULL AND recipient = 'ada'"
                " ORDER BY in_seq"
            )
        ]
    # Due times rise with the number, ten to a millisecond; among equals the later number was sent first.
    assert texts == [n for tens in range(count // 10) for n in reversed(range(tens * 10, tens * 10 + 10))]
