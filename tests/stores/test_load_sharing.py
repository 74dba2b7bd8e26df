"""Several processes on PostgreSQL: a new turn goes to the process with the most free capacity."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coterie.agents import Agent
from coterie.messages import make_envelope
from coterie.stores.postgres.load_sharing import OWN_PREFERENCE, Load, WorkerLoads
from coterie.stores.sql.store import SqlStore
from coterie.testing import FakeClock
from tests.engines import Postgres

from .steps import RULES
from .workers import TIMEOUT_SECONDS, ManualWorker

NAMES = [f"agent-{number}" for number in range(6)]


class CountingWorker(ManualWorker):
    def __init__(self, worker: str, running: int = 0) -> None:
        super().__init__(worker)
        self.running_turns = running
        self.woken = asyncio.Event()

    def wake(self) -> None:
        self.woken.set()

    async def until_woken(self) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await self.woken.wait()


@asynccontextmanager
async def process(
    shared: Postgres, folder: Path, clock: FakeClock, worker: CountingWorker | None = None
) -> AsyncIterator[SqlStore]:
    """A process that knows all that were started before it."""
    store = await shared.open(folder, clock)
    if worker:
        store.register_worker(worker)
    try:
        await store.add_agents([Agent(id=name, name=name) for name in NAMES])
        async with asyncio.timeout(TIMEOUT_SECONDS):
            if worker:
                while worker.worker not in [known.id for known in await store.workers()]:
                    await asyncio.sleep(0.01)
            while not store.counters.heartbeats:
                await asyncio.sleep(0.01)
        if worker:
            await worker.until_woken()  # by the first LISTEN, after which every process looks for work
            worker.woken.clear()
            await store.claim_ready(worker.worker, RULES, 1)
        yield store
    finally:
        await store.close()


async def send(store: SqlStore, to: str) -> None:
    await store.send(make_envelope(sender="sender", to=to, payload={"text": "hello"}))


@pytest.mark.slow
async def test_a_busy_process_leaves_a_new_turn_to_an_idle_one(
    shared: Postgres, tmp_path: Path, clock: FakeClock
) -> None:
    idle, busy = CountingWorker("idle"), CountingWorker("busy", running=2 * OWN_PREFERENCE)
    async with process(shared, tmp_path, clock, idle) as other, process(shared, tmp_path, clock, busy) as store:
        await send(store, NAMES[0])
        await idle.until_woken()
        assert busy.claims.empty() and not busy.woken.is_set()
        assert await store.claim_ready("busy", RULES, 10) == []
        (claim,) = await other.claim_ready("idle", RULES, 10)
        assert claim.agent_id == NAMES[0]
        busy.running_turns = 0
        await send(store, NAMES[1])
        assert (await busy.next()).agent_id == NAMES[1]


@pytest.mark.slow
async def test_a_turn_that_its_process_does_not_claim_within_a_second_is_claimed_by_another(
    shared: Postgres, tmp_path: Path, clock: FakeClock
) -> None:
    idle, busy = CountingWorker("idle"), CountingWorker("busy", running=2 * OWN_PREFERENCE)
    async with process(shared, tmp_path, clock, idle), process(shared, tmp_path, clock, busy) as store:
        await send(store, NAMES[0])
        assert await store.claim_ready("busy", RULES, 10) == []
        await clock.advance(seconds=1)
        assert [claim.agent_id for claim in await store.claim_ready("busy", RULES, 10)] == [NAMES[0]]


@pytest.mark.slow
async def test_a_process_without_agents_distributes_new_turns_over_all_workers(
    shared: Postgres, tmp_path: Path, clock: FakeClock
) -> None:
    first, second = CountingWorker("first"), CountingWorker("second")
    async with (
        process(shared, tmp_path, clock, first) as one,
        process(shared, tmp_path, clock, second) as two,
        process(shared, tmp_path, clock) as door,
    ):
        await asyncio.gather(*(send(door, name) for name in NAMES))
        await first.until_woken()
        await second.until_woken()
        claims = [await one.claim_ready("first", RULES, 3), await two.claim_ready("second", RULES, 10)]
        assert sorted(claim.agent_id for part in claims for claim in part) == NAMES


def test_turns_are_assigned_by_free_capacity_and_not_by_running_turns() -> None:
    loads = WorkerLoads()
    loads.update("large", Load(10, 20))
    loads.update("small", Load(1, 4))
    assert loads.assign(7) == {"large"}
    assert loads.assign(1) == {"large"}  # 3 are free at both
    assert loads.assign(1) == {"small"}
    assert loads.assign(99) == {"large", "small"}
    assert loads.assign(1) == set()
    loads.update("small", Load(0, 0))
    assert len(loads) == 1
    assert loads.should_claim(Load(10, 20))
    loads.update("large", Load(0, 20))
    assert not loads.should_claim(Load(10, 20)) and loads.should_claim(Load(OWN_PREFERENCE - 1, 4))
