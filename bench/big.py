"""A big society: what people look at, and the start, with two million messages and 100,000 agents.

`BIG_MESSAGES=200000 BIG_AGENTS=10000 BIG_ENGINES=sqlite python -m bench big` measures a smaller one, on one engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path

from bench.postgres import new_database, server
from bench.report import Report
from coterie.clock import SystemClock
from coterie.society import Society
from coterie.store import Page
from coterie.stores.sql.migrations import migrate_sqlite
from coterie.stores.sqlite.connection import open_writer
from coterie.stores.sqlite.engine import DATABASE
from coterie.stores.transfer import SqliteSource, transfer_rows

MESSAGES, AGENTS = int(os.environ.get("BIG_MESSAGES", 2_000_000)), int(os.environ.get("BIG_AGENTS", 100_000))
ENGINES = os.environ.get("BIG_ENGINES", "sqlite,postgres").split(",")
TARGET_MS, START_TARGET_MS = 100.0, 2_000.0
SAMPLES = 20
TALKER = "a000000"
"""The agent with the longest conversation: a twentieth of all messages, and a history of all of them."""

_NUMBERS = "WITH RECURSIVE number (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM number WHERE n + 1 < :count) "
_AGENT_OF = "CASE WHEN n / 2 % 20 = 0 THEN 'a000000' ELSE printf('a%06d', 1 + n / 2 % (:agents - 1)) END"
_PROFILE = """
json_object('id', printf('a%06d', n), 'name', 'Agent ' || n, 'service', NULL, 'prompt', 'You are agent ' || n,
            'description', '', 'tools', json_array('*'), 'made_by', 'bench')
"""
FILL = (
    "INSERT INTO agents (id, kind, name, created_at) VALUES ('user', 'person', 'You', 0) ON CONFLICT DO NOTHING",
    f"""
    INSERT INTO agents (id, kind, name, created_at, profile, turn_no)
    {_NUMBERS} SELECT printf('a%06d', n), 'agent', 'Agent ' || n, 0, {_PROFILE}, 1 FROM number
    """,
    # Even numbers: questions of the person. Odd ones: the answers.
    f"""
    INSERT INTO messages (seq, id, sender, recipient, state, in_seq, created_at, delivered_at, taken_at, payload,
                          thread, automatic, in_reply_to, task)
    {_NUMBERS}
    SELECT n + 1, printf('m%012d', n), CASE WHEN n % 2 = 0 THEN 'user' ELSE {_AGENT_OF} END,
           CASE WHEN n % 2 = 0 THEN {_AGENT_OF} ELSE 'user' END, 'taken', n + 1, :start + n * 10, :start + n * 10,
           :start + n * 10, json_object('text', 'Message ' || n || ' about the harvest of the northern fields'),
           {_AGENT_OF}, n % 2, CASE WHEN n % 2 = 1 THEN printf('m%012d', n - 1) END,
           CASE WHEN n % 2 = 1 THEN printf('m%012d', n - 1) END
      FROM number
    """,
    "UPDATE agents SET next_in_seq = :count + 1, taken_seq = :count",
    """
    INSERT INTO tasks (id, sender, agent, state, created_at, last_at, messages, turns, requests, input_tokens,
                       output_tokens, unpriced)
    SELECT id, 'user', recipient, 'done', created_at, created_at, 2, 1, 1, 100, 10, 1 FROM messages
     WHERE sender = 'user'
     ORDER BY seq
    """,
    """
    INSERT INTO turns (agent_id, turn_no, task, started_at, ended_at, outcome)
    SELECT agent, seq, id, created_at, created_at, 'done' FROM tasks
    """,
    """
    INSERT INTO llm_calls (agent_id, turn_no, step_no, service, input_tokens, output_tokens, outcome, at, task)
    SELECT agent, seq, 1, 'main', 100, 10, 'used', created_at, id FROM tasks
    """,
    """
    INSERT INTO history (agent_id, seq, turn_no, role, message_id, content)
    SELECT agent, 2 * row_number() OVER (PARTITION BY agent ORDER BY seq) - 1, seq, 'user', id, NULL FROM tasks
     UNION ALL
    SELECT agent, 2 * row_number() OVER (PARTITION BY agent ORDER BY seq), seq, 'assistant', NULL, 'Yes' FROM tasks
    """,
    """
    UPDATE agents SET next_hist_seq = 1 + counted.rows
      FROM (SELECT agent_id, count(*) AS rows FROM history GROUP BY agent_id) AS counted
     WHERE counted.agent_id = agents.id
    """,
    f"INSERT INTO events (at, kind, subject) {_NUMBERS} SELECT :start, 'message.created', 'm' FROM number LIMIT 1000",
    "INSERT INTO meta (key, value) VALUES ('pruned', '1') ON CONFLICT DO NOTHING",
)


def fill(path: Path, messages: int, agents: int) -> None:
    """Write a society with so many messages, all of them answered and read, into a new database."""
    path.parent.mkdir(parents=True, exist_ok=True)
    db = open_writer(path, "relaxed")
    migrate_sqlite(db)
    start = int(time.time() * 1000) - messages * 10 - 86_400_000
    with bulk_insert(db):
        for sql in FILL:
            count = agents if "INTO agents" in sql else messages
            db.execute(sql, {"count": count, "agents": agents, "start": start})
    db.close()
    with path.open("rb") as file:
        os.fsync(file.fileno())  # otherwise the first commit of the society would wait for it


@contextlib.contextmanager
def bulk_insert(db: sqlite3.Connection) -> Iterator[None]:
    """Make inserts of very many rows fast: without a log, and with indexes that are built at the end from sorted rows.

    A crash meanwhile destroys the file.
    """
    indexes = db.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND sql IS NOT NULL").fetchall()
    for pragma in ("journal_mode = OFF", "synchronous = OFF", "foreign_keys = OFF", "cache_size = -400000"):
        db.execute(f"PRAGMA {pragma}")
    db.execute("BEGIN")
    for name, _ in indexes:
        db.execute(f"DROP INDEX {name}")
    yield
    for _, sql in indexes:
        db.execute(sql)
    db.execute("COMMIT")
    for pragma in ("synchronous = NORMAL", "journal_mode = WAL"):
        db.execute(f"PRAGMA {pragma}")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def looks(society: Society) -> dict[str, Callable[[], Awaitable[object]]]:
    """What people look at, by name."""
    store, clock = society.store, SystemClock()
    return {
        "snapshot": store.snapshot,
        "history page": lambda: store.history(TALKER, 1_000, 50),
        "thread page": lambda: store.thread(TALKER, limit=50),
        "messages of an agent": lambda: store.messages(Page(), agent="a000007"),
        "tasks of an agent": lambda: store.tasks(Page(), agent="a000007"),
        "search without a hit": lambda: store.search("zeppelin", Page()),
        "search with hits": lambda: store.search("northern harvest", Page()),
        "search with old hits": lambda: store.search("message 1234 harvest", Page()),
        "search with one old hit": lambda: store.search(f"message {MESSAGES // 2 + 345} harvest", Page()),
        "search of two characters without a hit": lambda: store.search("qz", Page()),
        "search of two Chinese characters without a hit": lambda: store.search("报告", Page()),
        "search in one agent": lambda: store.search("harvest", Page(), "a000007"),
        "away": lambda: store.away(clock.now() - timedelta(days=1), 20),
        "agents page": lambda: store.agents("a000500", 50),
    }


def run() -> None:
    report = Report("big")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "society"
        began = time.perf_counter()
        fill(place / "data" / DATABASE, MESSAGES, AGENTS)
        report.line(f"fill {MESSAGES:,} messages, {AGENTS:,} agents", time.perf_counter() - began, "s")
        if "postgres" in ENGINES:
            with server(Path(folder, "server")) as url:
                _run_postgres(report, place, Path(folder, "shared"), new_database(url))
        if "sqlite" in ENGINES:
            asyncio.run(_measure(report, place, "sqlite"))


def _run_postgres(report: Report, source: Path, place: Path, url: str) -> None:
    from coterie.stores.postgres.transfer import PostgresTarget

    began = time.perf_counter()
    with (
        SqliteSource.open(source / "data" / DATABASE, source) as rows,
        PostgresTarget.create(url, None, "the database is not empty") as target,
    ):
        transfer_rows(rows, target)
    report.line("postgres: fill", time.perf_counter() - began, "s")
    place.mkdir()
    (place / "coterie.toml").write_text(f"[store]\nurl = {json.dumps(url)}\n")
    asyncio.run(_measure(report, place, "postgres"))


async def _measure(report: Report, place: Path, engine: str) -> None:
    # Nothing is started: a running society indexes once a minute, too, and one process at a time does it.
    async with Society.open_offline(place) as society:
        before, began = (await society.store.storage()).file_bytes, time.perf_counter()
        while await society.store.index_messages():
            pass
        report.line(f"{engine}: build the text index", time.perf_counter() - began, "s")
        after = (await society.store.storage()).file_bytes
        report.line(f"{engine}: size with the text index, compared to without", after / before, "x")
    began = time.perf_counter()
    async with Society.open(place) as society:
        report.line(f"{engine}: start", (time.perf_counter() - began) * 1000, "ms", at_most=START_TARGET_MS)
        for name, look in looks(society).items():
            report.line(f"{engine}: {name}, p95", await _p95(look), "ms", at_most=TARGET_MS)


async def _p95(look: Callable[[], Awaitable[object]]) -> float:
    took = []
    for _ in range(SAMPLES):
        began = time.perf_counter()
        await look()
        took.append((time.perf_counter() - began) * 1000)
        if sum(took) > 5_000:
            return max(took)
    return statistics.quantiles(took, n=20)[-1]
