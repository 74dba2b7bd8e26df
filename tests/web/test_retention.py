"""Deletion of old data in a running society: by age, by size, on request, and the size of the file over a year."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from coterie.agents import Agent
from coterie.artifact_service import ArtifactService
from coterie.config import StoreSettings
from coterie.messages import make_envelope
from coterie.retention import RetentionService
from coterie.retention_store import Pruned
from coterie.society import Society
from coterie.stores.blobs import FolderBlobStore
from coterie.stores.sql.jobs import Job, Result, split_batch
from coterie.stores.sql.retention import Pruner
from coterie.stores.sqlite import SqliteStore
from coterie.testing import FakeClock
from coterie.turn import Rules
from tests.engines import Postgres
from tests.pruning import pruned
from tests.stores.task_steps import said

RULES = replace(Rules(), max_withdrawals=0)
SUMMARISED_TURNS = 20


class Year:
    """A society on SQLite whose agents get and answer the same number of messages every day."""

    def __init__(self, store: SqliteStore, clock: FakeClock, agents: Sequence[str]) -> None:
        self.store, self._clock, self._agents = store, clock, agents
        self._turns = dict.fromkeys(agents, 0)

    async def live_day(self, messages: int) -> None:
        for number in range(messages):
            text = f"message {number} " + "with some words " * 12
            await asyncio.gather(
                *(self.store.send(make_envelope(sender="user", to=to, payload={"text": text})) for to in self._agents)
            )
            claims = await self.store.claim_ready("w", RULES, len(self._agents))
            await asyncio.gather(*(self._answer(claim) for claim in claims))
            await self._clock.advance(hours=24 / messages)

    async def _answer(self, claim: Any) -> None:
        self._turns[claim.agent_id] += 1
        if self._turns[claim.agent_id] % SUMMARISED_TURNS == 0:
            newest = claim.added_rows[0].seq
            claim = await self.store.summarise(claim, newest - 1, "what was said")
        await self.store.advance(claim, said("an answer " * 20), RULES)

    async def prune(self) -> None:
        await pruned(self.store, messages=timedelta(days=30))
        while await self.store.release_space():
            pass


async def live(folder: Path, clock: FakeClock, agents: int, messages: int, days: int) -> tuple[int, int]:
    """Return the size of the file after the first month and at the end."""
    ids = [f"a{number:03}" for number in range(agents)]
    store = await SqliteStore.open(folder, clock, durability="relaxed")
    try:
        await store.add_agents([Agent(id="user", name="You", kind="person"), *(Agent(id=one, name=one) for one in ids)])
        year, after_month = Year(store, clock, ids), 0
        for day in range(days):
            await year.live_day(messages)
            await year.prune()
            if day == 30:
                after_month = (await store.storage()).file_bytes
        assert [violation async for violation in store.violations()] == []
        return after_month, (await store.storage()).file_bytes
    finally:
        await store.close()


async def test_the_file_stops_growing_after_the_time_that_is_kept(tmp_path: Path, clock: FakeClock) -> None:
    after_month, at_the_end = await live(tmp_path, clock, agents=5, messages=2, days=80)
    assert at_the_end <= 1.5 * after_month


@pytest.mark.full
async def test_the_file_after_a_year_is_at_most_half_larger_than_after_a_month(
    tmp_path: Path, clock: FakeClock
) -> None:
    after_month, at_the_end = await live(tmp_path, clock, agents=50, messages=6, days=365)
    assert at_the_end <= 1.5 * after_month


async def test_a_society_deletes_old_data_every_hour_and_a_setting_changes_that(
    society: Society, clock: FakeClock, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await society.send(to="ada", text="withdrawn")
    (message,) = await society.store.waiting("ada")
    await society.bus.withdraw(message.id)
    await clock.jump(days=3)
    assert await society.store.message(message.id) is not None
    society.configuration.config = replace_store(society, keep_days=2)
    await clock.jump(hours=1)
    await clock.advance(seconds=1)
    assert await society.store.message(message.id) is None

    storage = (await client.get("/api/v1/storage")).json()
    assert storage["lastPrune"]["deleted"]["messages"] == 1
    assert (storage["keepDays"], storage["keepGb"], storage["canShrink"]) == (2, 0, True)
    assert storage["rows"]["messages"] == 0 and storage["oldest"] is None and storage["run"] is None


def replace_store(society: Society, **changed: Any) -> Any:
    from dataclasses import replace as change

    return change(society.config, store=change(society.config.store, **changed))


async def test_a_run_on_request_shows_its_progress(
    society: Society, clock: FakeClock, client: httpx.AsyncClient
) -> None:
    await society.send(to="ada", text="withdrawn")
    (message,) = await society.store.waiting("ada")
    await society.bus.withdraw(message.id)
    await clock.jump(days=2)
    society.configuration.config = replace_store(society, keep_days=1)
    assert (await client.get("/api/v1/storage/prune")).json()["running"] is False

    for dry_run in (True, False):
        assert await society.store.message(message.id) is not None
        started = await client.post("/api/v1/storage/prune", json={"dryRun": dry_run})
        assert (started.status_code, started.json()["running"], started.json()["dryRun"]) == (202, True, dry_run)
        again = await client.post("/api/v1/storage/prune", json={})
        assert (again.status_code, again.json()["code"]) == (409, "prune_running")
        while (run := (await client.get("/api/v1/storage/prune")).json())["running"]:
            await clock.advance(seconds=1)
        assert (run["deleted"]["messages"], run["keptDays"], run["error"]) == (1, 1, None)
    assert await society.store.message(message.id) is None
    assert (await client.post("/api/v1/storage/prune", json={"dryRun": 3})).status_code == 422


async def prune_all(service: RetentionService, clock: FakeClock) -> Pruned:
    """Run a deletion to its end; its pauses pass on the virtual clock, at most 100 seconds of it a second."""
    pruning = asyncio.create_task(service.prune())
    while not pruning.done():
        await clock.advance(seconds=1)
        await asyncio.wait([pruning], timeout=0.01)
    return await pruning


async def test_the_oldest_are_deleted_when_the_limit_of_the_size_is_reached(tmp_path: Path, clock: FakeClock) -> None:
    store = await SqliteStore.open(tmp_path / "data", clock)
    blobs = FolderBlobStore(tmp_path / "artifacts")
    artifacts = ArtifactService(store, blobs, clock, max_file_bytes=1_000)
    await store.add_agents([Agent(id="user", name="You", kind="person"), Agent(id="ada", name="Ada")])
    for number in range(400):
        await store.send(make_envelope(sender="ada", to="user", payload={"text": f"{number} " + "x" * 2_000}))
        await clock.advance(hours=6)
    size = (await store.storage()).used_bytes
    settings = StoreSettings(keep_gb=size / 2 / 1e9)
    service = RetentionService(store, artifacts, clock, lambda: settings, is_shared=False)
    deleted, after = await prune_all(service, clock), await store.storage()
    assert 150 <= deleted.messages <= 220
    assert 0.4 * size <= after.used_bytes <= 0.65 * size
    assert after.file_bytes <= 1.2 * after.used_bytes, "free pages were given back"
    left = [message.payload["text"].split()[0] for message in await store.waiting("user", 1_000)]
    assert left == [str(number) for number in range(deleted.messages, 400)], "the newest stay"

    settings = StoreSettings(keep_gb=1e-9)
    await prune_all(service, clock)
    assert len(await store.waiting("user", 1_000)) == 3, "those of the last day stay"
    await store.close()


async def test_a_stop_waits_for_one_read_and_not_for_those_after_it(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await SqliteStore.open(tmp_path / "data", clock)
    artifacts = ArtifactService(store, FolderBlobStore(tmp_path / "artifacts"), clock, max_file_bytes=1_000)
    service = RetentionService(store, artifacts, clock, lambda: StoreSettings(keep_days=1), is_shared=False)
    reads, second, ends = 0, asyncio.Event(), asyncio.Event()
    execute = Pruner.execute

    def with_slow_reads(pruner: Any, read: Any, write: Any) -> Any:
        async def slow(run: Any) -> Any:
            nonlocal reads
            reads += 1
            if reads == 2:
                second.set()
                await ends.wait()
            elif reads > 2:
                await asyncio.Event().wait()  # this read never ends
            return await read(run)

        return execute(pruner, slow, write)

    monkeypatch.setattr(Pruner, "execute", with_slow_reads)
    service.start_run()
    await second.wait()
    stopping = asyncio.create_task(service.stop())
    await asyncio.wait([stopping], timeout=0)
    ends.set()
    done, _ = await asyncio.wait([stopping], timeout=5)
    assert done, "the stop waits for the next read"
    assert reads == 2
    await store.close()


async def test_a_run_of_more_than_an_hour_is_not_joined_by_another_process(
    shared: Postgres, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [await shared.open(tmp_path, clock) for _ in range(2)]
    blobs = FolderBlobStore(tmp_path / "artifacts")
    services = [
        RetentionService(
            store, ArtifactService(store, blobs, clock, max_file_bytes=1), clock, StoreSettings, is_shared=True
        )
        for store in stores
    ]
    begun = 0

    async def execute(*_: Any) -> AsyncIterator[Pruned | None]:
        nonlocal begun
        begun += 1
        for _minute in range(61):
            await clock.wait(asyncio.Event(), timedelta(minutes=1))
            yield Pruned()

    monkeypatch.setattr(Pruner, "execute", execute)
    for service in services:
        service.start()
        await clock.advance(minutes=10)
    await clock.advance(minutes=80)
    assert begun == 1, "the second process is due at minute 70"
    assert (await stores[1].storage()).last_prune is None
    await clock.advance(minutes=25)
    assert (await stores[1].storage()).last_prune is not None
    await asyncio.gather(*(service.stop() for service in services))
    await asyncio.gather(*(store.close() for store in stores))


@pytest.mark.parametrize(("hours", "runs"), [(2, 1), (0, 0)])
async def test_the_clock_of_a_process_does_not_decide_whether_a_run_is_due(
    hours: int, runs: int, shared: Postgres, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, wrong = await shared.open(tmp_path, clock), FakeClock(clock.now() + timedelta(days=1 if runs == 0 else -1))
    artifacts = ArtifactService(store, FolderBlobStore(tmp_path / "artifacts"), wrong, max_file_bytes=1)
    service, begun = RetentionService(store, artifacts, wrong, StoreSettings, is_shared=True), list[Pruned]()

    async def execute(*_: Any) -> AsyncIterator[Pruned | None]:
        begun.append(Pruned())
        yield Pruned()

    monkeypatch.setattr(Pruner, "execute", execute)
    await store.record_prune(Pruned())
    await clock.advance(hours=hours)
    service.start()
    await wrong.advance(hours=1)
    await service.stop()
    assert len(begun) == runs
    await store.close()


async def test_the_claim_of_a_dead_process_expires_and_a_request_takes_it_over(
    shared: Postgres, tmp_path: Path, clock: FakeClock
) -> None:
    store = await shared.open(tmp_path, clock)
    assert await store.claim_prune("first") and await store.claim_prune("first")
    await clock.advance(minutes=4)
    assert not await store.claim_prune("second")
    assert await store.claim_prune("first"), "each renewal counts from its own time"
    await clock.advance(minutes=4)
    assert not await store.claim_prune("second")
    await clock.advance(minutes=2)
    assert await store.claim_prune("second") and not await store.claim_prune("first")
    assert await store.claim_prune("first", takes_over=True) and not await store.claim_prune("second")
    await store.record_prune(Pruned())
    assert await store.claim_prune("second")
    await store.close()


@pytest.mark.parametrize(("kept", "runs", "rounds"), [(1, 1, 5), pytest.param(150, 4, 10, marks=pytest.mark.full)])
async def test_the_size_stays_at_its_limit_though_the_oldest_messages_cannot_be_deleted(
    tmp_path: Path, clock: FakeClock, kept: int, runs: int, rounds: int
) -> None:
    store = await SqliteStore.open(tmp_path / "data", clock)
    artifacts = ArtifactService(store, FolderBlobStore(tmp_path / "artifacts"), clock, max_file_bytes=1_000)
    await store.add_agents([Agent(id="user", name="You", kind="person"), Agent(id="ada", name="Ada")])
    for _ in range(kept):
        await store.send(make_envelope(sender="user", to="ada", payload={"text": "kept"}))
        (claim,) = await store.claim_ready("w", RULES, 1)
        await store.advance(claim, said("an answer"), RULES)
    settings, sizes = StoreSettings(), list[float]()
    service = RetentionService(store, artifacts, clock, lambda: settings, is_shared=False)
    for _ in range(rounds):
        for number in range(400):
            await store.send(make_envelope(sender="ada", to="user", payload={"text": f"{number} " + "x" * 2_000}))
            await clock.advance(hours=6)
        if not sizes:
            settings = StoreSettings(keep_gb=(await store.storage()).used_bytes / 2 / 1e9)
        for _ in range(runs):
            await prune_all(service, clock)
        sizes.append((await store.storage()).used_bytes / settings.keep_gb / 1e9)
    await store.close()
    assert max(sizes) <= 1.3, sizes


async def test_a_deletion_shares_no_transaction_with_sends(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await SqliteStore.open(tmp_path, clock)
    await store.add_agents([Agent(id="user", name="You", kind="person"), Agent(id="ada", name="Ada")])
    old = await store.send(make_envelope(sender="ada", to="user", payload={"text": "old"}))
    await clock.advance(days=40)
    await store.mark_read("ada", old.message_id)
    transactions: list[list[bool]] = []

    def record(batch: list[Job]) -> list[list[Job]]:
        parts = split_batch([*batch[::-1]])
        transactions.extend([job.alone for job in part] for part in parts)
        return parts

    monkeypatch.setattr("coterie.stores.sqlite.writer.split_batch", record)
    sends = [store.send(make_envelope(sender="user", to="ada", payload={"text": str(n)})) for n in range(5)]
    await asyncio.gather(store.delete_artifacts(["none"], timedelta(0)), store.flush(), *sends)
    await pruned(store, messages=timedelta(days=30))
    assert all(len(part) == 1 for part in transactions if any(part))
    assert any(part == [True] for part in transactions)
    batch = [Job(lambda: Result(None), asyncio.Future(), alone=alone) for alone in (True, False, True, False)]
    assert split_batch(batch) == [[batch[1], batch[3]], [batch[0]], [batch[2]]]
    await store.close()


async def test_a_file_of_an_older_version_is_rewritten_so_that_it_can_shrink(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await SqliteStore.open(tmp_path, clock)
    await store.add_agents([Agent(id="user", name="You", kind="person"), Agent(id="ada", name="Ada")])
    for _ in range(300):
        await store.send(make_envelope(sender="ada", to="user", payload={"text": "x" * 3_000}))
    await store.close()
    with sqlite3.connect(tmp_path / "coterie.db") as db:
        db.execute("PRAGMA auto_vacuum = NONE")
        db.execute("VACUUM")
    db.close()

    monkeypatch.setattr("coterie.stores.sqlite.engine.SMALL_FILE_BYTES", 0)  # as for a large file
    store = await SqliteStore.open(tmp_path, clock)
    await clock.advance(days=40)
    await pruned(store, messages=timedelta(days=30))
    large = await store.storage()
    assert (large.can_shrink, await store.release_space()) == (False, False)
    await store.rewrite()
    small = await store.storage()
    assert small.can_shrink and small.file_bytes < large.file_bytes / 3
    await store.send(make_envelope(sender="ada", to="user", payload={"text": "it still works"}))
    await store.close()

    with sqlite3.connect(tmp_path / "coterie.db") as db:
        db.execute("PRAGMA auto_vacuum = NONE")
        db.execute("VACUUM")
    db.close()
    monkeypatch.undo()
    store = await SqliteStore.open(tmp_path, clock)
    assert (await store.storage()).can_shrink, "a small file is rewritten at the start"
    await store.close()
