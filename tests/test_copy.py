"""Copying a society with running turns from one engine to the other and back."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coterie import Society
from coterie.admin.copy import StoreLocation, copy_society
from coterie.admin.inspect import Inspection
from coterie.errors import StoreOwned, StoreUnusable
from coterie.store_url import replace_store_url
from coterie.stores.postgres import PostgresStore, transfer
from coterie.stores.postgres.connection import CLOCK, owner_connection
from coterie.testing import FakeClock
from tests.agent.stage import Stage, each
from tests.busy_society import CHART, HOUR_MS, busy_society
from tests.engines import Postgres


@pytest.fixture
def url(postgres: str, tmp_path: Path) -> str:
    """An empty database."""
    return Postgres(postgres).url(tmp_path / "data")


def copy(source: object, target: object) -> Any:
    return copy_society(StoreLocation.parse(str(source)), StoreLocation.parse(str(target)), lambda _: None).transfer


async def copied(source: object, target: object) -> Any:
    return await asyncio.to_thread(copy, source, target)


def moved(folder: Path, url: str) -> None:
    file = folder / "coterie.toml"
    file.write_text(replace_store_url(file.read_text(), url))


def contents(folder: Path) -> dict[str, object]:
    """Every row of every table, the sequence counters, and every stored file."""
    with closing(sqlite3.connect(folder / "data" / "coterie.db")) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        rows: dict[str, object] = {table: sorted(db.execute(f"SELECT * FROM {table}"), key=repr) for table in tables}
    artifacts = folder / "data" / "artifacts"
    return rows | {path.name: path.read_bytes() for path in artifacts.rglob("*") if path.is_file()}


def count_wrongly(folder: Path, reminders: int) -> None:
    """Store a wrong count of messages of `ada` that an answer withdraws."""
    with closing(sqlite3.connect(folder / "data" / "coterie.db")) as db, db:
        db.execute("UPDATE agents SET reminders = ? WHERE id = 'ada'", (reminders,))


async def test_a_society_transferred_there_and_back_is_equal_row_by_row(url: str, tmp_path: Path) -> None:
    async with busy_society(tmp_path / "home"):
        there = await copied(tmp_path / "home", url)
        back = await copied(url, tmp_path / "back")

    assert there == back
    assert (there.artifacts, there.lost) == (2, ())
    before, after = contents(tmp_path / "home"), contents(tmp_path / "back")
    assert len(before["messages"]) > 5  # type: ignore[arg-type]
    assert before["tasks"] and before["turns"]
    assert after == before
    assert os.stat(tmp_path / "back" / "data" / "coterie.db").st_mode & 0o777 == 0o600


async def check_continues(folder: Path, server: Any) -> None:
    """Check that running turns finish and delayed messages stay delayed."""
    server.default = each(ada=["I was interrupted", "and now done"], bob=["it is done"], cyd=["here I am"], dan=[])
    async with Society.open(folder) as society:
        here = Stage(society, server)
        first = await here.heard(3)
        approval = next(one for one in first if "approval" in one.payload)
        await society.send(to="bob", text=approval.payload["quickReplies"][0], in_reply_to=approval.id, option=0)
        texts = [message.payload["text"] for message in await here.heard(6)]
        assert {"settled", "tea?", "here I am", "it is done"} <= set(texts)
        await here.state("ada", "idle")
        (later,) = await society.store.delayed("dan")
        assert later.payload["text"] == "think of it" and later.deliver_at is not None
        assert (later.deliver_at - later.created_at).total_seconds() * 1000 == HOUR_MS
        (question,) = await society.store.open_questions("dan")
        assert question.payload["quickReplies"] == ["yes", "no"]
        ((chart,),) = [
            m.payload["attachments"] for m in await society.store.thread("ada") if m.payload.get("attachments")
        ]
        assert await society.artifacts.read(chart["artifactRef"]) == CHART
        history = await society.store.history("ada")
        assert [row.role for row in history].count("tool") == 1
        assert [violation async for violation in society.store.violations()] == []
        await society.stop(quick=True)


async def test_a_society_copied_to_postgresql_and_back_continues_its_turns(url: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with busy_society(home) as server:
        events = _last_event(home)
        await copied(home, url)
        moved(home, url)
        await check_continues(home, server)
        # And back, into a new folder; the event log continues its numbering.
        moved(home, "sqlite")
        await copied(url, tmp_path / "back")
        for name in ("llmservices.json", "tools.py", "coterie.toml"):
            (tmp_path / "back" / name).write_text((home / name).read_text())
        server.default = each(dan=["tea it is"])
        async with Society.open(tmp_path / "back") as society:
            before = await society.store.last_event()
            assert before > events
            (question,) = await society.store.open_questions("dan")
            await society.send(to="dan", text="yes", in_reply_to=question.id, option=0)
            await Stage(society, server).until(lambda: _is_said(society, "tea it is"))
            assert await society.store.last_event() > before
            await society.stop(quick=True)


async def _is_said(society: Society, text: str) -> bool:
    return text in [message.payload["text"] for message in await society.store.waiting("user")]


def _last_event(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "data" / "coterie.db")) as db:
        return int(db.execute("SELECT max(seq) FROM events").fetchone()[0])


async def test_turns_cut_off_by_a_crash_continue_in_the_other_engine(url: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with busy_society(home) as server:
        with closing(sqlite3.connect(home / "data" / "coterie.db")) as db, db:  # as while a process runs it
            cut_off = "UPDATE agents SET runnable_at = NULL, worker = 'gone' WHERE state IN ('llm', 'tools')"
            assert db.execute(cut_off).rowcount > 0
        await copied(home, url)
        moved(home, url)
        await check_continues(home, server)


async def test_a_watcher_continues_at_its_position_in_the_copy(url: str, tmp_path: Path) -> None:
    async with busy_society(tmp_path / "home"):
        await copied(tmp_path / "home", url)
    async with Inspection.open(tmp_path / "home") as society:
        known, seen = society.store.info.log_id, await society.store.events(0)
    store = await PostgresStore.open(url, FakeClock())
    try:
        assert store.info.log_id == known
        assert await store.events(0) == seen and len(seen) > 20
    finally:
        await store.close()


async def test_sequence_numbers_of_deleted_rows_are_not_reused(url: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with busy_society(home):
        with closing(sqlite3.connect(home / "data" / "coterie.db")) as db, db:
            db.execute("UPDATE sqlite_sequence SET seq = 5000")
        await copied(home, url)
        moved(home, url)
        async with Society.open(home, work=False) as society:
            sent = await society.send(to="dan", text="hello")
            message = await society.store.message(sent.message_id)
            assert message is not None and message.seq == 5001
            await society.stop(quick=True)


async def test_a_running_society_is_not_copied(url: str, tmp_path: Path) -> None:
    async with busy_society(tmp_path / "home"):
        async with Society.open(tmp_path / "home", work=False) as society:
            with pytest.raises(StoreOwned, match=f"process {os.getpid()}"):
                await copied(tmp_path / "home", url)
            await society.stop(quick=True)
        await copied(tmp_path / "home", url)
    with owner_connection(url) as db:
        db.execute(f"INSERT INTO processes (id, seen_at) VALUES ('somebody', {CLOCK} - 29000)")
    with pytest.raises(StoreUnusable, match="a process runs the society in this database: stop them first"):
        await copied(url, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    with owner_connection(url) as db:
        db.execute("UPDATE processes SET seen_at = seen_at - 2000")  # it was killed and its lease has expired
    await copied(url, tmp_path / "back")


async def test_the_source_cannot_be_written_during_a_copy(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.stores.postgres import transfer

    async with busy_society(tmp_path / "home"):
        await copied(tmp_path / "home", url)
    refused: list[str] = []
    pieces = transfer.PostgresSource.read_blob

    def write_during_copy(self: transfer.PostgresSource, sha256: str) -> Any:
        try:
            with owner_connection(url) as db:
                db.execute_now("BEGIN; SET LOCAL lock_timeout = 50; UPDATE roles SET name = name")
        except StoreUnusable as error:
            refused.append(str(error))
        return pieces(self, sha256)

    monkeypatch.setattr(transfer.PostgresSource, "read_blob", write_during_copy)
    await copied(url, tmp_path / "back")
    assert len(refused) == 2 and "another program is writing" in refused[0]


async def test_a_target_that_holds_a_society_is_left_as_it_is(url: str, tmp_path: Path) -> None:
    async with busy_society(tmp_path / "home"), busy_society(tmp_path / "other"):
        await copied(tmp_path / "home", url)
        before = contents(tmp_path / "other")
        with pytest.raises(StoreUnusable, match="holds a society already: name a database that is empty"):
            await copied(tmp_path / "other", url)
        with pytest.raises(StoreUnusable, match="holds a society already"):
            await copied(url, url)
        with pytest.raises(StoreUnusable, match="holds a society with data already"):
            await copied(url, tmp_path / "other")
        assert contents(tmp_path / "other") == before


@pytest.mark.parametrize("there", ["postgres", "sqlite"])
async def test_a_copy_that_fails_in_its_last_step_leaves_no_data(there: str, url: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    target = url if there == "postgres" else str(tmp_path / "new")
    async with busy_society(home):
        before = contents(home)
        count_wrongly(home, 7)
        with pytest.raises(StoreUnusable, match=r"data is inconsistent \(T7 .*: ada"):
            await copied(home, target)
        assert not (tmp_path / "new").exists()
        count_wrongly(home, 0)
        await copied(home, target)
        assert contents(home) == before


@pytest.mark.parametrize("there", ["sqlite", "postgres"])
async def test_wrong_counts_of_mail_do_not_prevent_a_copy_and_are_right_in_it(
    there: str, url: str, tmp_path: Path
) -> None:
    home, target = tmp_path / "home", url if there == "postgres" else tmp_path / "new"
    async with busy_society(home):
        before = contents(home)
        with closing(sqlite3.connect(home / "data" / "coterie.db")) as db, db:
            db.execute("UPDATE agents SET waiting_bytes = waiting_bytes + 7, delayed = 9, waiting = waiting + 1")
        await copied(home, target)
        if there == "postgres":
            await copied(url, tmp_path / "new")
    assert contents(tmp_path / "new") == before


async def test_missing_bytes_are_reported_and_changed_ones_refused(url: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with busy_society(home):
        chart, loose = sorted(
            (path for path in (home / "data" / "artifacts").rglob("*") if path.is_file()),
            key=lambda path: -path.stat().st_size,
        )
        loose.unlink()
        good = chart.read_bytes()
        chart.write_bytes(b"?" + good[1:])
        with pytest.raises(StoreUnusable, match="holds other bytes than were stored"):
            await copied(home, url)
        chart.write_bytes(good)
        assert (await copied(home, url)).lost == (loose.name,)


async def test_artifact_bytes_in_a_shared_folder_are_copied(url: str, tmp_path: Path) -> None:
    async with busy_society(tmp_path / "home"):
        there = tmp_path / "there"
        there.mkdir()
        (there / "coterie.toml").write_text(replace_store_url('[store]\nartifacts = "../pool"\n', url))
        count_wrongly(tmp_path / "home", 7)
        with pytest.raises(StoreUnusable, match="data is inconsistent"):
            await copied(tmp_path / "home", there)
        assert not [path for path in (tmp_path / "pool").rglob("*") if path.is_file()]
        count_wrongly(tmp_path / "home", 0)
        await copied(tmp_path / "home", there)
        kept = {path.name for path in (tmp_path / "pool").rglob("*") if path.is_file()}
        await copied(there, tmp_path / "back")
    assert len(kept) == 2
    assert contents(tmp_path / "back") == contents(tmp_path / "home")
