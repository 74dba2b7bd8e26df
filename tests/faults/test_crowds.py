"""Many watchers that do not read, and many sends with one client id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coterie.bus import Watcher
from coterie.errors import Lagged
from coterie.society import Society
from coterie.store import Event
from coterie.testing import FakeClock

from .harness import scaled_timeout
from .scenarios import make_home
from .verifier import open_database


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_home(tmp_path / "society")
    return tmp_path / "society"


@pytest.fixture
async def society(home: Path, clock: FakeClock) -> AsyncIterator[Society]:
    async with Society.open(home, clock=clock, work=False) as opened:
        yield opened


async def read(watcher: Watcher, count: int) -> list[Event]:
    async with asyncio.timeout(scaled_timeout()):
        return [await anext(watcher) for _ in range(count)]


async def test_watchers_that_do_not_read_buffer_a_bounded_number_of_events_and_delay_no_other(society: Society) -> None:
    async with (
        society.bus.watch(queue=16) as stalled,
        society.bus.watch(queue=16) as stalled_too,
        society.bus.watch(queue=16) as reader,
    ):
        for number in range(100):
            sent = [await society.send(to="ada", text=f"{number} {n}") for n in range(5)]
            seen = await read(reader, 5)
            assert [event.subject for event in seen] == [receipt.message_id for receipt in sent]

        for watcher in (stalled, stalled_too):
            buffered = 0
            with pytest.raises(Lagged):
                async for _ in watcher:
                    buffered += 1
            assert buffered <= 16


async def test_a_lagging_watcher_gets_the_position_to_resume_from_and_misses_nothing(society: Society) -> None:
    async with society.bus.watch(queue=16) as slow, society.bus.watch(queue=1_000) as quick:
        sent = [(await society.send(to="ada", text=str(number))).message_id for number in range(200)]
        assert [event.subject for event in await read(quick, 200)] == sent

        got: list[str] = []
        with pytest.raises(Lagged) as lagged:
            async with asyncio.timeout(scaled_timeout()):
                async for event in slow:
                    got.append(event.subject)

    async with society.bus.watch(after=lagged.value.seq, queue=1_000) as again:
        rest = await read(again, 200 - len(got))
    assert got + [event.subject for event in rest] == sent


@pytest.mark.parametrize("delay_ms", [None, 60_000])
async def test_fifty_parallel_sends_with_one_client_id_store_one_message_and_get_one_receipt(
    delay_ms: int | None, society: Society, home: Path
) -> None:
    asks = [society.send(to="ada", text="once", client_id="same", delay_ms=delay_ms) for _ in range(50)]
    receipts = await asyncio.gather(*asks)
    receipts += [await society.send(to="ada", text="once", client_id="same", delay_ms=delay_ms)]

    assert all(receipt == receipts[0] for receipt in receipts)
    with open_database(home) as db:
        assert db.execute("SELECT count(*) FROM messages").fetchone() == (1,)
        assert db.execute("SELECT count(*) FROM events WHERE subject = ?", (receipts[0].message_id,)).fetchone() == (1,)


async def test_a_client_id_deduplicates_across_commits_and_restarts(home: Path, clock: FakeClock) -> None:
    receipts = []
    for _ in range(3):
        async with Society.open(home, clock=clock, work=False) as society:
            for _ in range(3):
                receipts.append(await society.send(to="ada", text="once", client_id="same", delay_ms=60_000))
        await clock.advance(seconds=1)

    assert all(receipt == receipts[0] for receipt in receipts)
    with open_database(home) as db:
        assert db.execute("SELECT count(*) FROM messages").fetchone() == (1,)
