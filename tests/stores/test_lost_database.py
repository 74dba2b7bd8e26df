"""Lost connections, refused writes and lost commit responses cost time, but no data."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg_pool.base import AttemptWithBackoff

from coterie.errors import StoreUnavailable
from coterie.stores.postgres import PostgresStore, connection, writer
from coterie.stores.postgres.connection import MAX_READERS, PgConnection
from coterie.stores.postgres.session import PostgresSession
from tests.engines import Postgres

from .processes import Opener, envelope, texts
from .steps import advance, ask, claim_agent, history_lines, says


class CutConnections:
    """Cuts the connection before or after the writer's COMMIT, `times` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int, *, after: bool) -> None:
        self._left, self._after, self._lock = times, after, threading.Lock()
        self.cuts = 0
        execute_now = PgConnection.execute_now

        def cut(db: PgConnection, sql: str) -> Any:
            if sql != "COMMIT" or threading.current_thread().name != "coterie-writer" or not self._take():
                return execute_now(db, sql)
            if self._after:
                execute_now(db, sql)
            db.close()
            raise psycopg.OperationalError("the connection was lost")

        monkeypatch.setattr(PgConnection, "execute_now", cut)

    def _take(self) -> bool:
        with self._lock:
            self._left -= 1
            self.cuts += self._left >= 0
            return self._left >= 0


@pytest.mark.parametrize("after", [True, False], ids=["committed", "not committed"])
async def test_the_outcome_of_a_commit_is_found_out_when_its_response_was_lost(
    process: Opener, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    store = await process()
    await ask(store, text="begin")
    claim = await claim_agent(store)
    cut = CutConnections(monkeypatch, 3, after=after)
    await asyncio.gather(*(store.send(envelope("user", "bob", str(n))) for n in range(5)))
    await advance(store, claim, says("the end"))
    await store.send(envelope("user", "bob", "5"))
    assert cut.cuts == 3
    assert await texts(store, "bob") == [str(n) for n in range(6)]
    assert await texts(store, "user") == ["the end"]
    assert await history_lines(store) == ["user: begin", "assistant: the end"]


async def test_a_lost_commit_is_not_confused_with_another_of_the_same_transaction_id(
    process: Opener, shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash the server reuses transaction ids that were not durable."""
    store = await process()
    with shared.behind(tmp_path) as db:
        (reused,) = db.execute("SELECT pg_current_xact_id()::text").fetchone()
    write_events = PostgresSession._write_events
    monkeypatch.setattr(
        PostgresSession, "_write_events", lambda session, batch: write_events(session, batch) and reused
    )
    cut = CutConnections(monkeypatch, 1, after=False)
    await store.send(envelope("user", "bob", "once"))
    assert (cut.cuts, await texts(store, "bob")) == (1, ["once"])


async def test_a_read_succeeds_though_all_idle_connections_are_broken(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    store = await process()
    all_connected = threading.Barrier(MAX_READERS, timeout=30)
    await asyncio.gather(*(store._read(lambda _: all_connected.wait()) for _ in range(MAX_READERS)))
    _kill_all(shared.url(tmp_path))
    assert len(await store.agents()) == 4


async def test_reads_succeed_soon_after_a_long_outage(
    process: Opener, shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "POOL_TIMEOUT_SECONDS", 0.3)
    store = await process()
    with monkeypatch.context() as outage:
        # The pause between two attempts of the pool doubles each time: this is the pause after a long outage.
        outage.setattr(AttemptWithBackoff, "INITIAL_DELAY", 1_000.0)
        outage.setattr(psycopg.Connection, "connect", _refuse)
        _kill_all(shared.url(tmp_path))
        with pytest.raises(StoreUnavailable, match="connection refused"):
            await store.agents()
    async with asyncio.timeout(10):
        while True:
            try:
                assert len(await store.agents()) == 4
                break
            except StoreUnavailable:
                continue


def _refuse(*_: object, **__: object) -> None:
    raise psycopg.OperationalError("connection refused")


@pytest.mark.slow
async def test_killed_database_sessions_lose_no_message(process: Opener, shared: Postgres, tmp_path: Path) -> None:
    stores = [await process() for _ in range(2)]
    ended = asyncio.Event()

    async def kill() -> None:
        while not ended.is_set():
            await asyncio.to_thread(_kill_all, shared.url(tmp_path))
            await asyncio.wait([asyncio.ensure_future(ended.wait())], timeout=0.05)

    killing = asyncio.create_task(kill())

    async def write(store: PostgresStore, name: str) -> None:
        for n in range(40):
            while True:
                try:
                    await store.send(envelope("user", "ada", f"{name} {n}", client_id=f"{name} {n}"))
                    break
                except StoreUnavailable:
                    continue

    await asyncio.gather(*map(write, stores, ("one", "two")))
    ended.set()
    await killing
    got = await texts(stores[0], "ada")
    for name in ("one", "two"):
        assert [text for text in got if text.startswith(name)] == [f"{name} {n}" for n in range(40)]


def _kill_all(url: str) -> None:
    """Terminate all database sessions of this test."""
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = current_setting('application_name') AND pid <> pg_backend_pid()"
        )


async def test_writes_wait_for_a_database_that_is_temporarily_read_only(
    process: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await process()
    begin = PostgresSession._begin
    left = 3

    def read_only(session: Any, *arguments: Any) -> None:
        nonlocal left
        begin(session, *arguments)
        if left:
            left -= 1
            session._db.execute_now("SET TRANSACTION READ ONLY")

    monkeypatch.setattr(PostgresSession, "_begin", read_only)
    await store.send(envelope("user", "ada"))
    assert (left, await texts(store, "ada")) == (0, ["hello"])


async def test_an_unreachable_database_raises_and_the_same_message_can_be_sent_later(
    process: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await process()
    monkeypatch.setattr(writer, "RETRY_BUDGET_SECONDS", 0.2)
    with monkeypatch.context() as gone:
        gone.setattr(store._writer, "_url", "postgresql://127.0.0.1:1/nothing")
        store._writer._disconnect()
        with pytest.raises(StoreUnavailable, match="is not reachable"):
            await store.send(envelope("user", "ada", client_id="c"))
        assert not store.is_healthy
    await store.send(envelope("user", "ada", client_id="c"))
    assert (await texts(store, "ada"), store.is_healthy) == (["hello"], True)


@asynccontextmanager
async def _locking(url: str, agent_id: str) -> AsyncIterator[None]:
    """Keep the agent's row locked meanwhile."""
    async with await psycopg.AsyncConnection.connect(url) as other:
        await other.execute("SELECT 1 FROM agents WHERE id = %s FOR UPDATE", (agent_id,))
        yield


async def test_a_write_waits_for_a_row_that_another_transaction_has_locked(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    store = await process()
    await ask(store)
    claim = await claim_agent(store)
    async with _locking(shared.url(tmp_path), "user"):
        # The answer goes to the person, whose row was not locked in advance.
        ending = asyncio.ensure_future(advance(store, claim, says("the end")))
        done, _ = await asyncio.wait([ending], timeout=0.3)
        assert not done
    await ending
    assert await texts(store, "user") == ["the end"]
