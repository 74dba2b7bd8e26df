"""A transaction that is rolled back and retried keeps nothing of its first run."""

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
from coterie.errors import Refused
from coterie.failpoints import FailpointHit
from coterie.stores.postgres import PostgresStore
from coterie.stores.sql.rows import Connection
from coterie.turn import AskModel, Rest
from tests.engines import Postgres

from .processes import Opener, envelope
from .steps import RULES, Society, ask, says, state
from .workers import TIMEOUT_SECONDS, ManualWorker

_WAITS_FOR_US = "SELECT count(*) FROM pg_stat_activity WHERE pg_backend_pid() = ANY (pg_blocking_pids(pid))"


class Held:
    """A job that keeps the writer busy, so that the jobs that follow become one batch."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self, db: Any, uow: Any) -> None:
        self.began.set()
        self.may_end.wait(TIMEOUT_SECONDS)


class TwoProcesses:
    """Two stores on one database, each with a worker for the agents that it wakes."""

    def __init__(self, one: PostgresStore, other: PostgresStore) -> None:
        self.one, self.other = one, other
        self.first, self.second = ManualWorker("first"), ManualWorker("second")
        one.register_worker(self.first)
        other.register_worker(self.second)

    async def one_batch(self, send_to: str, then: Callable[[], Awaitable[Any]]) -> list[asyncio.Future[Any]]:
        """`one` writes a message and the jobs of `then`, in this order and in one batch."""
        held = Held()
        jobs: list[asyncio.Future[Any]] = [asyncio.ensure_future(self.one._transact(held))]
        await asyncio.to_thread(held.began.wait, TIMEOUT_SECONDS)
        jobs.append(asyncio.create_task(self.one.send(envelope("user", send_to, "from one"))))
        for _ in range(2):
            await asyncio.sleep(0)  # a send is submitted at the end of its loop iteration
        jobs.append(asyncio.ensure_future(then()))
        await asyncio.sleep(0)
        held.may_end.set()
        return jobs

    async def assert_only_the_other_has_a_claim(self, agent_id: str) -> None:
        claim = await self.second.next()
        assert self.first.claims.empty(), "two processes hold a claim with the same epoch and step"
        assert (self.first.reserved, self.second.reserved) == (0, 0)
        claim = await self.other.advance(claim, says("done"), RULES)
        assert claim.action == AskModel()  # the message of `one` has arrived
        assert (await self.other.advance(claim, says("done too"), RULES)).action == Rest()
        assert await state(self.other, agent_id) == "idle"


@pytest.fixture
async def two(process: Opener) -> TwoProcesses:
    return TwoProcesses(await process(), await process())


async def test_a_batch_that_meets_a_lock_keeps_no_claim_of_its_rolled_back_run(
    two: TwoProcesses, shared: Postgres, tmp_path: Path
) -> None:
    to_ada = await two.one.send(envelope("user", "ada", "withdrawn", delay_ms=3_600_000))
    with shared.behind(tmp_path) as db:
        db.execute("BEGIN")
        db.execute("SELECT 1 FROM agents WHERE id = 'ada' FOR UPDATE").fetchone()
        # The batch claims bob, meets the lock on ada, is rolled back, and locks ada before it claims bob again.
        jobs = await two.one_batch("bob", lambda: two.one.withdraw(to_ada.message_id, "user"))
        await wait_for_blocked_session(db)
        await two.other.send(envelope("user", "bob", "from other"))
        db.execute("ROLLBACK")
    await asyncio.gather(*jobs)
    await two.assert_only_the_other_has_a_claim("bob")


async def wait_for_blocked_session(db: Connection) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not db.execute(_WAITS_FOR_US).fetchone()[0]:
            await asyncio.sleep(0.005)  # PostgreSQL sends no event when a session starts to wait


@pytest.mark.parametrize("error", [psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected])
async def test_a_batch_that_the_database_rolls_back_keeps_no_claim_of_that_run(
    two: TwoProcesses, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    rolled_back, may_run_again, runs = threading.Event(), threading.Event(), list[int]()

    def pause_before_the_next_run(_: float) -> None:
        rolled_back.set()
        may_run_again.wait(TIMEOUT_SECONDS)

    def fails_once(*_: Any) -> None:
        runs.append(1)
        if len(runs) == 1:
            raise error("injected")

    async def failing() -> None:
        await two.one._transact(fails_once)

    monkeypatch.setattr(
        "coterie.stores.postgres.writer.time",
        SimpleNamespace(sleep=pause_before_the_next_run, monotonic=time.monotonic),
    )
    jobs = await two.one_batch("bob", failing)
    await asyncio.to_thread(rolled_back.wait, TIMEOUT_SECONDS)
    await two.other.send(envelope("user", "bob", "from other"))
    may_run_again.set()
    await asyncio.gather(*jobs)
    assert len(runs) == 2
    await two.assert_only_the_other_has_a_claim("bob")


async def test_a_batch_that_cannot_be_written_starts_no_turn_and_releases_its_slots(store: Society) -> None:
    worker, held = ManualWorker("w"), Held()
    store.register_worker(worker)

    def fails(*_: Any) -> None:
        raise FailpointHit("an error of the engine: nothing of the batch is written")

    busy = store._transact(held)  # type: ignore[attr-defined]
    await asyncio.to_thread(held.began.wait, TIMEOUT_SECONDS)
    sending = asyncio.create_task(ask(store))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    failing = store._transact(fails)  # type: ignore[attr-defined]
    held.may_end.set()
    outcomes = await asyncio.gather(busy, sending, failing, return_exceptions=True)

    assert isinstance(outcomes[1], Exception) and isinstance(outcomes[2], Exception)
    assert worker.claims.empty() and worker.reserved == 0
    assert await state(store) == "idle"


async def test_a_refused_job_leaves_the_message_and_the_claim_of_its_batch(store: Society) -> None:
    worker, held = ManualWorker("w"), Held()
    store.register_worker(worker)

    def is_refused(_: Any, uow: Any) -> None:
        uow.accept(envelope("user", "bob", "undone"))
        uow.flush()
        raise Refused("not_yours", "too late")

    busy = store._transact(held)  # type: ignore[attr-defined]
    await asyncio.to_thread(held.began.wait, TIMEOUT_SECONDS)
    sending = asyncio.create_task(ask(store))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    refused = store._transact(is_refused, touches=["bob"])  # type: ignore[attr-defined]
    held.may_end.set()
    with pytest.raises(Refused):
        await refused
    await asyncio.gather(busy, sending)

    claim = await worker.next()
    assert worker.claims.empty() and worker.reserved == 0
    assert (await store.advance(claim, says("done"), RULES)).action == Rest()
    assert not await store.waiting("bob")
    assert [one.payload["text"] for one in await store.waiting("user")] == ["done"]


async def test_after_an_error_that_follows_the_commit_the_worker_reconciles_its_claims(
    store: Society,
) -> None:
    worker = ManualWorker("w")
    store.register_worker(worker)
    failpoints.arm("commit.after:1:raise")
    try:
        with pytest.raises(FailpointHit):
            await ask(store)
    finally:
        failpoints.arm("")
    assert await state(store) == "llm" and worker.claims.empty()
    assert worker.checks == 1

    await store.release_claims("w", failed=True)
    (claim,) = await store.claim_ready("w", RULES, 1)
    assert claim.action == AskModel()


async def test_a_message_whose_claim_fails_is_stored_and_its_slots_are_released(
    store: Society, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ManualWorker("w")
    store.register_worker(worker)

    def fails(*_: Any) -> None:
        raise ValueError("a turn that cannot begin")

    with monkeypatch.context() as broken:
        broken.setattr("coterie.stores.sql.claims.claim_woken_agent", fails)
        await ask(store)
    assert worker.claims.empty() and worker.reserved == 0
    (claim,) = await store.claim_ready("w", RULES, 1)
    assert claim.action == AskModel()


async def test_releasing_several_agents_never_waits_for_a_lock_while_holding_another(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    """Otherwise it deadlocks with batches, which lock in the order of ids."""
    store = await process()
    for agent_id in ("cyd", "bob", "ada"):
        await ask(store, agent_id)
    assert len(await store.claim_ready("w", RULES, 3)) == 3
    with shared.behind(tmp_path) as db:
        for locked in ("ada", "bob", "cyd"):
            db.execute("BEGIN")
            db.execute("SELECT 1 FROM agents WHERE id = ? FOR UPDATE", (locked,)).fetchone()
            releasing = asyncio.create_task(store.release_claims("w", failed=False))
            await wait_for_blocked_session(db)
            free = db.execute(
                "SELECT id FROM agents WHERE kind = 'agent' ORDER BY id FOR UPDATE SKIP LOCKED"
            ).fetchall()
            db.execute("ROLLBACK")
            await releasing
            # The repeated batch has locked the rows before the one it waits for, in the order of ids.
            assert {name for (name,) in free} >= {name for name in ("ada", "bob", "cyd") if name >= locked}
            assert len(await store.claim_ready("w", RULES, 3)) == 3
