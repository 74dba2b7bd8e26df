"""A transaction that is undone and run again leaves nothing behind of its first run, in the database or in memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from coterie import failpoints
from coterie.failpoints import FailpointHit
from coterie.stores.postgres import PostgresStore
from coterie.stores.sql.connection import Connection
from coterie.turn import Ask, Rest
from tests.engines import Postgres

from .processes import Opener, letter
from .steps import RULES, Society, ask, says, state
from .workers import SOON, ManualWorker

_WAITS_FOR_US = "SELECT count(*) FROM pg_stat_activity WHERE pg_backend_pid() = ANY (pg_blocking_pids(pid))"


class Held:
    """The body of a job that keeps the writer busy, so that whatever is handed in meanwhile becomes one batch."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self, db: Any, post: Any) -> None:
        self.began.set()
        self.may_end.wait(SOON)


class TwoProcesses:
    """Two stores on one database, each with a worker that is handed the agents of its own mail."""

    def __init__(self, one: PostgresStore, other: PostgresStore) -> None:
        self.one, self.other = one, other
        self.first, self.second = ManualWorker("first"), ManualWorker("second")
        one.attend(self.first)
        other.attend(self.second)

    async def one_batch(self, send_to: str, then: Callable[[], Awaitable[Any]]) -> list[asyncio.Future[Any]]:
        """`one` writes a message and whatever `then` hands in, in this order and in one batch."""
        held = Held()
        jobs: list[asyncio.Future[Any]] = [asyncio.ensure_future(self.one._post(held))]
        await asyncio.to_thread(held.began.wait, SOON)
        jobs.append(asyncio.create_task(self.one.send(letter("user", send_to, "from one"))))
        for _ in range(2):
            await asyncio.sleep(0)  # messages are handed in at the end of the round in which they were sent
        jobs.append(asyncio.ensure_future(then()))
        await asyncio.sleep(0)
        held.may_end.set()
        return jobs

    async def assert_the_other_has_the_agent_alone(self, agent_id: str) -> None:
        claim = await self.second.next()
        assert self.first.claims.empty(), "two processes hold a claim with the same epoch and step"
        assert (self.first.reserved, self.second.reserved) == (0, 0)
        claim = await self.other.advance(claim, says("done"), RULES)
        assert claim.effect == Ask()  # the message of `one` came meanwhile
        assert (await self.other.advance(claim, says("done too"), RULES)).effect == Rest()
        assert await state(self.other, agent_id) == "idle"


@pytest.fixture
async def two(process: Opener) -> TwoProcesses:
    return TwoProcesses(await process(), await process())


async def test_a_batch_that_meets_a_lock_keeps_no_claim_of_its_undone_run(
    two: TwoProcesses, shared: Postgres, tmp_path: Path
) -> None:
    to_ada = await two.one.send(letter("user", "ada", "soon withdrawn", delay_ms=3_600_000))
    with shared.behind(tmp_path) as db:
        db.execute("BEGIN")
        db.execute("SELECT 1 FROM agents WHERE id = 'ada' FOR UPDATE").fetchone()
        # The batch claims bob, meets the lock on ada, is undone, and waits for ada before it takes bob again.
        jobs = await two.one_batch("bob", lambda: two.one.withdraw(to_ada.message_id, "user"))
        await until_somebody_waits_for(db)
        await two.other.send(letter("user", "bob", "from other"))
        db.execute("ROLLBACK")
    await asyncio.gather(*jobs)
    await two.assert_the_other_has_the_agent_alone("bob")


async def until_somebody_waits_for(db: Connection) -> None:
    async with asyncio.timeout(SOON):
        while not db.execute(_WAITS_FOR_US).fetchone()[0]:
            await asyncio.sleep(0.005)  # PostgreSQL tells nobody that a session began to wait


@pytest.mark.parametrize("error", [psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected])
async def test_a_batch_that_the_database_undoes_keeps_no_claim_of_its_undone_run(
    two: TwoProcesses, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    undone, may_run_again, runs = threading.Event(), threading.Event(), list[int]()

    def pause_before_the_next_run(_: float) -> None:
        undone.set()
        may_run_again.wait(SOON)

    def fails_once(*_: Any) -> None:
        runs.append(1)
        if len(runs) == 1:
            raise error("injected")

    async def failing() -> None:
        await two.one._post(fails_once)

    monkeypatch.setattr(
        "coterie.stores.postgres.writer.time",
        SimpleNamespace(sleep=pause_before_the_next_run, monotonic=time.monotonic),
    )
    jobs = await two.one_batch("bob", failing)
    await asyncio.to_thread(undone.wait, SOON)
    await two.other.send(letter("user", "bob", "from other"))
    may_run_again.set()
    await asyncio.gather(*jobs)
    assert len(runs) == 2
    await two.assert_the_other_has_the_agent_alone("bob")


async def test_a_batch_that_cannot_be_written_hands_over_no_claim_and_gives_back_its_places(store: Society) -> None:
    worker, held = ManualWorker("w"), Held()
    store.attend(worker)

    def fails(*_: Any) -> None:
        raise FailpointHit("the engine's own trouble: nothing of the batch is written")

    busy = store._post(held)  # type: ignore[attr-defined]
    await asyncio.to_thread(held.began.wait, SOON)
    sending = asyncio.create_task(ask(store))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    failing = store._post(fails)  # type: ignore[attr-defined]
    held.may_end.set()
    outcomes = await asyncio.gather(busy, sending, failing, return_exceptions=True)

    assert isinstance(outcomes[1], Exception) and isinstance(outcomes[2], Exception)
    assert worker.claims.empty() and worker.reserved == 0
    assert await state(store) == "idle"


async def test_after_an_error_behind_the_commit_the_worker_looks_for_claims_that_it_was_never_given(
    store: Society,
) -> None:
    worker = ManualWorker("w")
    store.attend(worker)
    failpoints.arm("commit.after:1:raise")
    try:
        with pytest.raises(FailpointHit):
            await ask(store)
    finally:
        failpoints.arm("")
    assert await state(store) == "llm" and worker.claims.empty()
    assert worker.checks == 1

    await store.release("w", failed=True)
    (claim,) = await store.claim("w", RULES, 1)
    assert claim.effect == Ask()


async def test_a_message_whose_claim_fails_is_stored_and_its_places_are_given_back(
    store: Society, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ManualWorker("w")
    store.attend(worker)

    def fails(*_: Any) -> None:
        raise ValueError("a turn that cannot begin")

    with monkeypatch.context() as broken:
        broken.setattr("coterie.stores.sql.claims.claim_ready", fails)
        await ask(store)
    assert worker.claims.empty() and worker.reserved == 0
    (claim,) = await store.claim("w", RULES, 1)
    assert claim.effect == Ask()


async def test_a_worker_that_lets_go_of_several_agents_waits_for_one_lock_while_it_holds_none(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    """Else it deadlocks with batches that take their locks in the order of ids."""
    store = await process()
    for agent_id in ("cyd", "bob", "ada"):
        await ask(store, agent_id)
    assert len(await store.claim("w", RULES, 3)) == 3
    with shared.behind(tmp_path) as db:
        for locked in ("ada", "bob", "cyd"):
            db.execute("BEGIN")
            db.execute("SELECT 1 FROM agents WHERE id = ? FOR UPDATE", (locked,)).fetchone()
            releasing = asyncio.create_task(store.release("w", failed=False))
            await until_somebody_waits_for(db)
            free = db.execute(
                "SELECT id FROM agents WHERE kind = 'agent' ORDER BY id FOR UPDATE SKIP LOCKED"
            ).fetchall()
            db.execute("ROLLBACK")
            await releasing
            # The batch that begins again has locked the rows before the one it waits for, in order.
            assert {name for (name,) in free} >= {name for name in ("ada", "bob", "cyd") if name >= locked}
            assert len(await store.claim("w", RULES, 3)) == 3
