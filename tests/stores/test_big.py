"""What people look at costs the same in a small and in a big society, counted in steps of SQLite's virtual machine."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.big import TALKER, fill

from coterie.errors import Refused
from coterie.store import Page
from coterie.stores.sql import claims, queries, task_queries
from coterie.stores.sql.text_index import read_batch, read_position
from coterie.stores.sqlite import SqliteStore
from coterie.stores.sqlite.connection import open_reader, open_writer
from coterie.stores.sqlite.search import index_batch, search
from coterie.testing import FakeClock
from tests.engines import Postgres

SMALL, BIG = (6_000, 1_200), (24_000, 4_800)
"""Messages and agents. Each agent has the same number of messages in both, but `TALKER` has a twentieth of all."""
AGENT = "a000007"
LOOKS: dict[str, Callable[[sqlite3.Connection], object]] = {
    "snapshot": queries.read_snapshot,
    "history": lambda db: queries.read_history(db, TALKER, 20, 50),
    "thread": lambda db: queries.read_thread(db, TALKER, None, None, None, 50),
    "older part of a thread": lambda db: queries.read_thread(db, TALKER, "m000000004000", None, None, 50),
    "messages": lambda db: queries.read_messages(db, Page(), None, None),
    "oldest messages": lambda db: queries.read_messages(db, Page(before=60), None, None),
    "messages of an agent": lambda db: queries.read_messages(db, Page(), AGENT, None),
    "messages of the person": lambda db: queries.read_messages(db, Page(before=60), "user", None),
    "dead letters": lambda db: queries.read_messages(db, Page(), None, "dead"),
    "tasks": lambda db: task_queries.read_tasks(db, Page(), None, None),
    "oldest tasks": lambda db: task_queries.read_tasks(db, Page(before=60), None, None),
    "tasks of an agent": lambda db: task_queries.read_tasks(db, Page(), None, AGENT),
    "working tasks": lambda db: task_queries.read_tasks(db, Page(), "working", None),
    "failed tasks": lambda db: task_queries.read_tasks(db, Page(), "failed", None),
    "task": lambda db: task_queries.read_tree(db, "m000000004000"),
    "away": lambda db: task_queries.read_away(db, 1 << 60, 20),
    "tool runs": lambda db: queries.read_runs(db, Page(), None),
    "oldest tool runs": lambda db: queries.read_runs(db, Page(before=2), None),
    "open questions": lambda db: queries.read_open_questions(db, None, 50),
    "unread": lambda db: queries.count_unread(db, [AGENT, TALKER]),
    "files": lambda db: queries.read_artifacts_before(db, None, 50),
    "profiles": lambda db: queries.read_profiles(db, [AGENT], ""),
}
TOLERANCE = 1.2


@pytest.fixture(scope="module")
def societies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("big")
    for name, (messages, agents) in (("small", SMALL), ("big", BIG)):
        fill(folder / name / "coterie.db", messages, agents)
        index(folder / name / "coterie.db")
    return folder / "small" / "coterie.db", folder / "big" / "coterie.db"


def index(path: Path) -> None:
    db = open_writer(path, "relaxed")
    db.execute("BEGIN")
    while batch := read_batch(db, read_position(db)):
        index_batch(db, batch)
    db.execute("COMMIT")
    db.close()


def count_steps(path: Path, look: Callable[[sqlite3.Connection], object]) -> int:
    db, steps = open_reader(path), 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    look(db)  # reads the schema
    db.set_progress_handler(count, 1)
    look(db)
    db.close()
    return steps


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_costs_the_same_in_a_society_of_four_times_the_size(name: str, societies: tuple[Path, Path]) -> None:
    small, big = (count_steps(path, LOOKS[name]) for path in societies)
    assert big <= small * TOLERANCE


@pytest.mark.parametrize("words", ["zeppelin", "qz", "报告", "HÄRVEST"])
def test_a_search_without_a_hit_costs_the_same_at_four_times_the_size(words: str, societies: tuple[Path, Path]) -> None:
    for agent in (None, AGENT):
        small, big = (count_steps(path, lambda db: search(db, words, Page(), agent)) for path in societies)  # noqa: B023
        assert big <= small * TOLERANCE


def test_a_search_does_not_look_up_grams_that_most_messages_have(societies: tuple[Path, Path]) -> None:
    db, statements = open_reader(societies[1]), list[str]()
    db.set_trace_callback(statements.append)
    (hit,) = search(db, "message 12345 harvest", Page(), None)
    db.close()
    assert hit.payload["text"].startswith("Message 12345 ")
    (look_up,) = [sql for sql in statements if "MATCH" in sql]
    assert '"123"' in look_up and '"har"' not in look_up


async def test_the_filled_society_keeps_every_invariant(societies: tuple[Path, Path], clock: FakeClock) -> None:
    store = await SqliteStore.open_read_only(societies[0].parent, clock)
    assert [violation async for violation in store.violations()] == []
    await store.close()


class Explained:
    """A PostgreSQL connection that keeps the plan of every statement."""

    def __init__(self, db: Any, explain: str = "EXPLAIN") -> None:
        self._db, self._explain, self.plans = db, explain, list[str]()

    def execute(self, sql: str, parameters: Any = ()) -> Any:
        self.plans += [line for (line,) in self._db.execute(f"{self._explain} {sql}", parameters).fetchall()]
        return self._db.execute(sql, parameters)


async def test_every_look_can_use_an_index_of_postgresql(shared: Postgres, tmp_path: Path, clock: FakeClock) -> None:
    store = await shared.open(tmp_path, clock)
    with shared.behind(tmp_path) as db:
        # A plan with this setting reads a table as a whole only if no index fits.
        db.execute("SET enable_seqscan = off")
        for name, look in LOOKS.items():
            explained: Any = Explained(db)
            with contextlib.suppress(Refused):
                look(explained)
            scans = [plan.strip() for plan in explained.plans if re.search(r"Seq Scan on (?!log|meta)", plan)]
            assert scans == [], name
    await store.close()


async def test_a_search_for_suspects_of_a_crash_reads_no_other_agents(
    shared: Postgres, tmp_path: Path, clock: FakeClock
) -> None:
    store = await shared.open(tmp_path, clock)
    with shared.behind(tmp_path) as db:
        db.execute("SET enable_seqscan = off")
        explained: Any = Explained(db, "EXPLAIN ANALYZE")
        explained.execute(claims.LOCK_SUSPECT, {"now": 1 << 60})
        scans = [plan for plan in explained.plans if "Seq Scan on agents" in plan]
        assert scans and all("never executed" in plan for plan in scans)
    await store.close()
