"""Workers of agents, and the counters of every process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from coterie.admin.copy import StoreLocation, open_source
from coterie.agents import Agent
from coterie.errors import StoreUnusable
from coterie.slot_sharing import SlotGrant
from coterie.store import Worker, worker_name
from coterie.stores.postgres import PostgresStore
from coterie.stores.sql.store import SqlStore
from coterie.testing import FakeClock
from coterie.turn_store import Claim, Interruption, StaleClaim
from tests.conftest import PEOPLE
from tests.engines import EXPIRED, Engine, Postgres

from .steps import RULES, ask, claim_agent, says


class Idle:
    """A worker without slots: only the test claims agents."""

    rules = RULES
    running_turns, max_turns = 0, 1_000

    def __init__(self, worker: str) -> None:
        self.worker = worker

    def reserve_slot(self, agent_id: str, for_person: bool) -> bool:
        return False

    def release_slots(self, agent_ids: object) -> None: ...

    def start_turns(self, claims: object) -> None: ...

    def abandon_turns(self) -> None: ...

    def interrupt(self, interruption: Interruption) -> None: ...

    def wake(self) -> None: ...

    def reconcile_claims(self) -> None: ...


async def until(store: SqlStore, holds: Callable[[list[Worker]], bool]) -> list[Worker]:
    """Wait for heartbeats, which come a few times per lease."""
    async with asyncio.timeout(180):
        while not holds(found := list(await store.workers())):
            await asyncio.sleep(0.01)
    return found


async def test_an_agent_names_its_worker_until_the_turn_ends(engine: Engine, tmp_path: Path, clock: FakeClock) -> None:
    store = await engine.open(tmp_path / "data", clock)
    await store.add_agents(PEOPLE)
    store.register_worker(Idle("w"))
    await ask(store)
    assert await _held(store) == {}

    claim = await claim_agent(store)

    assert await _held(store) == {"ada": "w"}
    (worker,) = await until(store, lambda found: [one.claims for one in found] == [1] and found[0].id == "w")
    assert worker.name == worker_name()
    await store.advance(claim, says("done"), RULES)
    assert await _held(store) == {}
    await until(store, lambda found: [one.claims for one in found] == [0])
    await store.close()


async def _held(store: SqlStore) -> dict[str, str]:
    return {agent.id: agent.worker for agent in await store.agents() if agent.worker}


async def test_takeovers_fenced_writes_and_heartbeats_are_counted_for_each_process(
    shared: Postgres, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = timedelta(seconds=3)
    stores = []
    for name in ("north/1", "south/2"):
        monkeypatch.setattr("coterie.stores.postgres.cluster.worker_name", lambda name=name: name)
        stores.append(await PostgresStore.open(shared.url(tmp_path), clock, lease=lease))
    north, south = stores
    await north.add_agents([*PEOPLE, Agent(id="cyd", name="Cyd")])
    north.register_worker(Idle("n"))
    south.register_worker(Idle("s"))
    await ask(north)
    claim = await claim_agent(north, "n")
    with shared.behind(tmp_path) as db:
        db.execute(EXPIRED)

    taken = await claim_agent(south, "s")
    with pytest.raises(StaleClaim):
        await north.advance(claim, says("too late"), RULES)

    assert (claim.was_taken_over, taken.was_taken_over) == (False, True)
    found = await until(north, lambda ones: [(one.fenced, one.takeovers) for one in ones] == [(1, 0), (0, 1)])
    assert [(one.name, one.id, one.claims) for one in found] == [("north/1", "n", 0), ("south/2", "s", 1)]
    before = {one.name: one.heartbeats for one in found}
    await until(south, lambda ones: all(one.heartbeats > before[one.name] for one in ones))
    await south.close()
    assert [one.name for one in await north.workers()] == ["north/1"]
    await north.close()


async def test_a_process_lives_as_long_as_its_own_lease(shared: Postgres, tmp_path: Path, clock: FakeClock) -> None:
    url = shared.url(tmp_path)
    other = await PostgresStore.open(url, clock, lease=timedelta(hours=1))
    await until(other, lambda found: len(found) == 1)
    assert await other.request_slots("main", 1, 0, 1) == SlotGrant(1)
    with shared.behind(tmp_path) as db:
        db.execute("UPDATE processes SET seen_at = seen_at - 60000")

    store = await PostgresStore.open(url, clock, lease=timedelta(seconds=30))
    await until(store, lambda found: len(found) == 2)
    assert not await store.is_only_process()
    assert await store.request_slots("main", 1, 0, 1) == SlotGrant(0)
    await store.close()
    with (
        pytest.raises(StoreUnusable, match=r"a process runs the society .* gone after 3600 s"),
        open_source(StoreLocation.parse(url)),
    ):
        pass

    with shared.behind(tmp_path) as db:
        db.execute("UPDATE processes SET seen_at = seen_at - 3600000")
    with open_source(StoreLocation.parse(url)):
        pass
    await other.close()


async def test_a_released_or_own_turn_does_not_count_as_a_takeover(
    engine: Engine, tmp_path: Path, clock: FakeClock
) -> None:
    store = await engine.open(tmp_path / "data", clock)
    await store.add_agents(PEOPLE)
    await ask(store)
    claims: list[Claim] = [await claim_agent(store)]
    await store.release_claims("w", failed=True)
    claims.append(await claim_agent(store))
    await store.release_claims("w", failed=False)
    claims.append(await claim_agent(store, "another"))
    assert [claim.was_taken_over for claim in claims] == [False, False, False]
    assert store.counters.takeovers == 0
    await store.close()
