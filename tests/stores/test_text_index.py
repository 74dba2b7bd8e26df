"""Contract of every storage engine: a search finds the same with and without the text index, and deletions reach it."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from coterie.store import Page
from coterie.stores.sql import text_index
from coterie.stores.sqlite import SqliteStore
from coterie.testing import FakeClock
from coterie.text_indexer import TextIndexer
from tests.conftest import PEOPLE
from tests.engines import Engine
from tests.pruning import pruned

from .task_steps import Society
from .test_overview import say, texts

TEXTS = (
    "Über alles", "报告写好了", "back\\slash", "a report, 50%_off", "The REPORT is done", "Straße und Gasse",
    "ends in qz", "x", "", "C'est \"ça\"", "ﬁne ligature", "two\u3000wide words", "tab\tand\nline", "İstanbul",
    "Kelvin K", "emoji 👩‍🚀 flies", "ΣΊΣΥΦΟΣ", "a" * 40,
)  # fmt: skip
SEARCHES = (
    "report", "done report", "50%", "5_%", "%", "\\", "报告", "报", "好了", "了", "ÜBER", "über alles", "straße",
    "STRASSE", "qz", "q", "z", "x", "xy", "ça\"", "'", "fine", "ﬁ", "wide", "\u3000", "and line", "istanbul", "i̇",
    "kelvin k", "👩‍🚀", "🚀 fl", "σίσυφος", "ς", "a" * 30, "a" * 41, "report zeppelin", "zeppelin", "s d", "e in",
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Index every message, and let a search read none of the indexed ones first."""
    monkeypatch.setattr(text_index, "UNINDEXED_MESSAGES", 0)
    monkeypatch.setattr(text_index, "SCANNED_MESSAGES", 0)
    monkeypatch.setattr(text_index, "BATCH_MESSAGES", 7)


async def index_all(store: Society | SqliteStore, clock: FakeClock) -> None:
    await clock.advance(minutes=2)
    while await store.index_messages():
        pass


async def found(store: Society | SqliteStore, agent: str | None = None) -> dict[str, list[str]]:
    return {words: texts(await store.search(words, Page(), agent)) for words in SEARCHES}


def indexed(engine: Engine, folder: Path) -> list[int]:
    with engine.behind(folder / "data") as db:
        return [seq for (seq,) in db.execute("SELECT rowid FROM message_grams ORDER BY rowid").fetchall()]


async def violations(store: Society | SqliteStore) -> list[str]:
    return [line async for line in store.violations()]


async def test_a_search_finds_the_same_with_the_index_as_by_reading_all(store: Society, clock: FakeClock) -> None:
    for number, text in enumerate(TEXTS):
        await say(store, ("ada", "bob")[number % 2], "user", text)
    await say(store, "ada", "user", payload={"text": "", "other": "report"})
    unindexed = [await found(store, agent) for agent in (None, "ada", "bob", "user")]
    assert unindexed[0]["report"] == ["The REPORT is done", "a report, 50%_off"]
    assert unindexed[1] != unindexed[2]

    await index_all(store, clock)

    assert [await found(store, agent) for agent in (None, "ada", "bob", "user")] == unindexed
    assert await violations(store) == []
    await say(store, "ada", "user", "one more report")
    assert texts(await store.search("report", Page())) == ["one more report", *unindexed[0]["report"]]


async def test_an_indexed_search_goes_page_by_page(store: Society, clock: FakeClock) -> None:
    for number in range(30):
        await say(store, "ada", "user", f"word {number}")
    await index_all(store, clock)
    await say(store, "ada", "user", "word 30")
    pages, before = [], None
    while page := await store.search("word", Page(before=before, limit=8)):
        pages += texts(page)
        before = page[-1].seq
    assert pages == [f"word {number}" for number in range(30, -1, -1)]


@pytest.mark.parametrize("removed_entries", [2, 50])
async def test_an_entry_goes_with_its_message(
    removed_entries: int,
    store: Society,
    clock: FakeClock,
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_index, "REMOVED_ENTRIES", removed_entries)
    for text in ("first report", "second report", "third"):
        await say(store, "ada", "user", text)
    await say(store, "bob", "user", "report of bob")
    await index_all(store, clock)
    assert len(indexed(engine, tmp_path)) == 4

    await store.clear_thread("ada")

    assert len(indexed(engine, tmp_path)) == 1
    assert texts(await store.search("report", Page())) == ["report of bob"]
    assert await violations(store) == []

    await clock.advance(days=60)
    await pruned(store, messages=timedelta(days=30))
    assert indexed(engine, tmp_path) == []
    assert await store.search("report", Page()) == [] and await violations(store) == []


async def test_the_entries_of_a_long_cleared_conversation_are_removed_in_steps(
    store: Society, clock: FakeClock, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_index, "REMOVED_ENTRIES", 4)
    for number in range(10):
        await say(store, "ada", "user", f"report {number}")
    await say(store, "bob", "user", "report of bob")
    await index_all(store, clock)

    with monkeypatch.context() as stopped:  # as if the process stopped after the first transaction
        stopped.setattr("coterie.stores.sqlite.engine.read_queued", lambda _: [])
        await store.clear_thread("ada")

    counts = [len(indexed(engine, tmp_path))]
    assert counts[0] == (11 if engine.name == "sqlite" else 1)
    while await store.index_messages():
        counts.append(len(indexed(engine, tmp_path)))
        assert texts(await store.search("report", Page())) == ["report of bob"]
        assert await violations(store) == []
    assert counts[-1] == 1 and all(before - after <= 4 for before, after in pairwise(counts))

    await say(store, "ada", "user", "report after it")
    await index_all(store, clock)
    assert texts(await store.search("report", Page())) == ["report after it", "report of bob"]


async def test_a_deleted_dead_letter_leaves_the_index(
    store: Society, clock: FakeClock, engine: Engine, tmp_path: Path
) -> None:
    late = [await say(store, "user", "bob", f"late {number}") for number in range(3)]
    await store.terminate("bob")
    await index_all(store, clock)
    before = len(indexed(engine, tmp_path))
    await store.delete_dead_letter(late[0])
    assert len(indexed(engine, tmp_path)) == before - 1
    await clock.advance(days=60)
    await pruned(store)
    assert len(indexed(engine, tmp_path)) == before - 3


async def test_verify_reports_an_index_that_differs_from_the_messages(
    clock: FakeClock, engine: Engine, tmp_path: Path
) -> None:
    store = await engine.open(tmp_path / "data", clock)
    await store.add_agents(PEOPLE)
    await say(store, "ada", "user", "report")
    await index_all(store, clock)
    await store.close()
    with engine.behind(tmp_path / "data") as db:
        db.execute("UPDATE meta SET value = '9' WHERE key = 'text_index_position'")
        db.execute("INSERT INTO message_grams (rowid, grams) VALUES (77, 'abc')")
    store = await engine.open(tmp_path / "data", clock)
    await say(store, "ada", "user", "never indexed")
    orphan, missing = await violations(store)
    assert "number 77" in orphan and "missing in the text index" in missing
    await store.close()


async def test_a_long_message_with_many_different_words_is_found(
    store: Society, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_index, "MAX_GRAMS", 10)
    await say(store, "ada", "user", "alpha beta gamma delta epsilon")
    await say(store, "ada", "user", "alpha")
    await index_all(store, clock)
    assert texts(await store.search("gamma", Page())) == ["alpha beta gamma delta epsilon"]
    assert len(await store.search("alpha", Page(), "ada")) == 2
    assert await store.search("gammas", Page()) == []


async def test_a_batch_ends_after_much_text(
    store: Society, monkeypatch: pytest.MonkeyPatch, engine: Engine, tmp_path: Path
) -> None:
    monkeypatch.setattr(text_index, "BATCH_CHARS", 150)
    for _ in range(3):
        await say(store, "ada", "user", "a" * 100)
    with engine.behind(tmp_path / "data") as db:
        batch = text_index.read_batch(db, 0)
    assert batch and len(batch.entries) == 2


async def test_few_new_messages_are_left_to_the_scan(
    store: Society, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, engine: Engine, tmp_path: Path
) -> None:
    monkeypatch.setattr(text_index, "UNINDEXED_MESSAGES", 5)
    for number in range(5):
        await say(store, "ada", "user", f"word {number}")
    await index_all(store, clock)
    assert indexed(engine, tmp_path) == []
    assert len(await store.search("word", Page())) == 5


async def test_a_backup_is_searched_like_its_source(store: Society, clock: FakeClock, tmp_path: Path) -> None:
    for text in TEXTS:
        await say(store, "ada", "user", text)
    await index_all(store, clock)
    expected = await found(store)
    (tmp_path / "copy").mkdir()
    await store.backup(tmp_path / "copy" / "coterie.db")
    copy = await SqliteStore.open(tmp_path / "copy", clock)
    try:
        for _ in range(2):  # as it was stored, and indexed again
            assert await found(copy) == expected
            await index_all(copy, clock)
            assert await violations(copy) == []
    finally:
        await copy.close()


async def test_messages_are_indexed_while_the_society_runs(
    store: Society, clock: FakeClock, engine: Engine, tmp_path: Path
) -> None:
    for number in range(20):
        await say(store, "ada", "user", f"word {number}")
    indexer = TextIndexer(store, clock)
    indexer.start()
    await clock.advance(minutes=3)
    assert len(indexed(engine, tmp_path)) == 20
    await say(store, "ada", "user", "word 20")
    await clock.advance(minutes=3)
    await indexer.stop()
    assert len(indexed(engine, tmp_path)) == 21
