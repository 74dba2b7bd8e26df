"""A PostgreSQL that goes away, refuses or keeps a commit's answer to itself: it costs time, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from coterie.errors import StoreUnavailable
from coterie.stores.postgres import PostgresStore, writer
from coterie.stores.postgres.connection import PgConnection
from coterie.stores.postgres.session import BatchLedger
from tests.engines import Postgres

from .processes import Opener, letter, texts
from .steps import ask, go_on, says, take, told


class Saboteur:
    """Cuts the connection around the writer's COMMIT, so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int, *, after: bool) -> None:
        self._left, self._after, self._lock = times, after, threading.Lock()
        self.cuts = 0
        say = PgConnection.say

        def cut(db: PgConnection, sql: str) -> Any:
            if sql != "COMMIT" or threading.current_thread().name != "coterie-writer" or not self._cuts():
                return say(db, sql)
            if self._after:
                say(db, sql)
            db.close()
            raise psycopg.OperationalError("the connection was lost")

        monkeypatch.setattr(PgConnection, "say", cut)

    def _cuts(self) -> bool:
        with self._lock:
            self._left -= 1
            self.cuts += self._left >= 0
            return self._left >= 0


@pytest.mark.parametrize("after", [True, False], ids=["it was done", "it was not"])
async def test_what_became_of_a_commit_whose_answer_was_lost_is_found_out(
    process: Opener, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    store = await process()
    await ask(store, text="begin")
    claim = await take(store)
    sabotage = Saboteur(monkeypatch, 3, after=after)
    await asyncio.gather(*(store.send(letter("user", "bob", str(n))) for n in range(5)))
    await go_on(store, claim, says("the end"))
    await store.send(letter("user", "bob", "5"))
    assert sabotage.cuts == 3
    assert await texts(store, "bob") == [str(n) for n in range(6)]
    assert await texts(store, "user") == ["the end"]
    assert await told(store) == ["user: begin", "assistant: the end"]


async def test_a_lost_commit_is_not_taken_for_somebody_elses_of_the_same_number(
    process: Opener, shared: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that crashed gives out the numbers of what it forgot once more."""
    store = await process()
    with shared.behind(tmp_path) as db:
        (again,) = db.execute("SELECT pg_current_xact_id()::text").fetchone()
    close = BatchLedger._close
    monkeypatch.setattr(BatchLedger, "_close", lambda ledger: close(ledger) and again)
    sabotage = Saboteur(monkeypatch, 1, after=False)
    await store.send(letter("user", "bob", "once"))
    assert (sabotage.cuts, await texts(store, "bob")) == (1, ["once"])


@pytest.mark.slow
async def test_sessions_that_are_killed_again_and_again_cost_nothing_but_time(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
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
                    await store.send(letter("user", "ada", f"{name} {n}", client_id=f"{name} {n}"))
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
    """All sessions of this test."""
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = current_setting('application_name') AND pid <> pg_backend_pid()"
        )


async def test_a_database_that_only_reads_for_a_while_is_waited_for(
    process: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await process()
    begin = BatchLedger._begin
    left = 3

    def read_only(ledger: Any, *wanted: Any) -> None:
        nonlocal left
        begin(ledger, *wanted)
        if left:
            left -= 1
            ledger._db.say("SET TRANSACTION READ ONLY")

    monkeypatch.setattr(BatchLedger, "_begin", read_only)
    await store.send(letter("user", "ada"))
    assert (left, await texts(store, "ada")) == (0, ["hello"])


async def test_a_database_that_cannot_be_reached_is_told_of_and_the_same_letter_passes_later(
    process: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await process()
    monkeypatch.setattr(writer, "PATIENCE", 0.2)
    with monkeypatch.context() as gone:
        gone.setattr(store._writer, "_url", "postgresql://127.0.0.1:1/nothing")
        store._writer._hang_up()
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await store.send(letter("user", "ada", client_id="c"))
        assert not store.healthy
    await store.send(letter("user", "ada", client_id="c"))
    assert (await texts(store, "ada"), store.healthy) == (["hello"], True)


@asynccontextmanager
async def _holding(url: str, agent_id: str) -> AsyncIterator[None]:
    """Somebody has locked the agent's row, and is in no hurry."""
    async with await psycopg.AsyncConnection.connect(url) as other:
        await other.execute("SELECT 1 FROM agents WHERE id = %s FOR UPDATE", (agent_id,))
        yield


async def test_a_row_that_another_holds_is_waited_for_and_not_fought_over(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    store = await process()
    await ask(store)
    claim = await take(store)
    async with _holding(shared.url(tmp_path), "user"):
        # The answer goes to the person, which nobody could know beforehand.
        ending = asyncio.ensure_future(go_on(store, claim, says("the end")))
        done, _ = await asyncio.wait([ending], timeout=0.3)
        assert not done
    await ending
    assert await texts(store, "user") == ["the end"]
