"""Who works on which agent, and what every process has counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from coterie.agents import Agent
from coterie.store import Worker, name_of
from coterie.stores.postgres import PostgresStore
from coterie.stores.sql.store import SqlStore
from coterie.testing import FakeClock
from coterie.turn_store import Claim, StaleOwner
from tests.conftest import PEOPLE
from tests.engines import EXPIRED, Engine, Postgres

from .steps import RULES, ask, says, take


class Idle:
    """A worker that has no place for anybody: claims are what a test makes them."""

    rules = RULES

    def __init__(self, worker: str) -> None:
        self.worker = worker

    def reserve(self, agent_id: str, person: bool) -> bool:
        return False

    def give_back(self, places: int) -> None: ...

    def take(self, claims: object) -> None: ...

    def drop(self) -> None: ...

    def look(self) -> None: ...

    def check_claims(self) -> None: ...


async def until(store: SqlStore, holds: Callable[[list[Worker]], bool]) -> list[Worker]:
    """Signs of life come by themselves, a few times in a lease."""
    async with asyncio.timeout(30):
        while not holds(found := list(await store.workers())):
            await asyncio.sleep(0.01)
    return found


async def test_whoever_is_at_work_on_an_agent_is_named_until_the_turn_is_over(
    engine: Engine, tmp_path: Path, clock: FakeClock
) -> None:
    store = await engine.open(tmp_path / "data", clock)
    await store.add_agents(PEOPLE)
    store.attend(Idle("w"))
    await ask(store)
    assert await _held(store) == {}

    claim = await take(store)

    assert await _held(store) == {"ada": "w"}
    (worker,) = await until(store, lambda found: [one.claims for one in found] == [1] and found[0].id == "w")
    assert worker.name == name_of()
    assert worker.to_wire()["claims"] == 1
    await store.advance(claim, says("done"), RULES)
    assert await _held(store) == {}
    await until(store, lambda found: [one.claims for one in found] == [0])
    await store.close()


async def _held(store: SqlStore) -> dict[str, str]:
    return {agent.id: agent.worker for agent in await store.agents() if agent.worker}


async def test_takeovers_writes_that_came_too_late_and_signs_of_life_are_counted_for_each_process(
    shared: Postgres, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = timedelta(seconds=3)
    stores = []
    for name in ("north/1", "south/2"):
        monkeypatch.setattr("coterie.stores.postgres.cluster.name_of", lambda name=name: name)
        stores.append(await PostgresStore.open(shared.url(tmp_path), clock, lease=lease))
    north, south = stores
    await north.add_agents([*PEOPLE, Agent(id="cyd", name="Cyd")])
    north.attend(Idle("n"))
    south.attend(Idle("s"))
    await ask(north)
    claim = await take(north, "n")
    with shared.behind(tmp_path) as db:
        db.execute(EXPIRED)

    taken = await take(south, "s")
    with pytest.raises(StaleOwner):
        await north.advance(claim, says("too late"), RULES)

    assert (claim.taken_over, taken.taken_over) == (False, True)
    found = await until(north, lambda ones: [(one.fenced, one.takeovers) for one in ones] == [(1, 0), (0, 1)])
    assert [(one.name, one.id, one.claims) for one in found] == [("north/1", "n", 0), ("south/2", "s", 1)]
    before = {one.name: one.heartbeats for one in found}
    await until(south, lambda ones: all(one.heartbeats > before[one.name] for one in ones))
    await south.close()
    assert [one.name for one in await north.workers()] == ["north/1"]
    await north.close()


async def test_a_turn_that_was_let_go_or_is_ones_own_is_not_taken_over(
    engine: Engine, tmp_path: Path, clock: FakeClock
) -> None:
    store = await engine.open(tmp_path / "data", clock)
    await store.add_agents(PEOPLE)
    await ask(store)
    claims: list[Claim] = [await take(store)]
    await store.release("w", failed=True)
    claims.append(await take(store))
    await store.release("w", failed=False)
    claims.append(await take(store, "another"))
    assert [claim.taken_over for claim in claims] == [False, False, False]
    assert store.tally.takeovers == 0
    await store.close()
