"""What one message and its turn cost on PostgreSQL, counted between the store and the server."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from coterie.agents import Agent
from coterie.clock import SystemClock
from coterie.stores.postgres import PostgresStore
from coterie.turn import Rest
from tests.conftest import PEOPLE
from tests.engines import Postgres
from tests.faults.proxy import Proxy

from .steps import advance, ask, says
from .workers import ManualWorker

MESSAGES = 5
STATEMENTS, ROUND_TRIPS = 20, 6
"""At most, for one message and its turn."""


class CountingProxy(Proxy):
    """Counts the answers of the server: `C` ends a statement, `Z` a round trip."""

    def __init__(self, server: str) -> None:
        super().__init__(server)
        self.answers: Counter[bytes] = Counter()

    async def _forward_answers(
        self, upstream_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, loses_answer: asyncio.Event
    ) -> None:
        while kind := await upstream_reader.readexactly(1):
            length = await upstream_reader.readexactly(4)
            rest = await upstream_reader.readexactly(int.from_bytes(length) - 4)
            self.answers[kind] += 1
            writer.write(kind + length + rest)
            await writer.drain()


@pytest.mark.slow
async def test_one_message_and_its_turn_take_at_most_twenty_statements_and_six_round_trips(
    shared: Postgres, tmp_path: Path
) -> None:
    with CountingProxy(shared.server) as proxy:
        # sslmode: the answer to a request for encryption has no length
        url = f"{proxy.url(shared.url(tmp_path))}&sslmode=disable&gssencmode=disable"
        store = await PostgresStore.open(url, SystemClock())
        try:
            await store.add_agents([*PEOPLE, Agent(id="eve", name="Eve")])
            worker = ManualWorker("w")
            store.register_worker(worker)
            while store.counters.heartbeats < 2:  # the next one is ten seconds away
                await asyncio.sleep(0.01)
            await _converse(store, worker)
            before = proxy.answers.copy()
            for _ in range(MESSAGES):
                await _converse(store, worker)
            spent = proxy.answers - before
        finally:
            await store.close()
    print(spent)
    assert 0 < spent[b"C"] <= STATEMENTS * MESSAGES
    assert 0 < spent[b"Z"] <= ROUND_TRIPS * MESSAGES


async def _converse(store: PostgresStore, worker: ManualWorker) -> None:
    """A message of the person, the claim of the agent in the same transaction, and its answer."""
    await ask(store)
    claim = await advance(store, await worker.next(), says("yes"))
    assert isinstance(claim.action, Rest)
