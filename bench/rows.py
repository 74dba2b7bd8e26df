"""Writes the rows of a send with plain SQL: the same tables, indexes and pragmas, without Coterie."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from coterie.config import SocietyFolder
from coterie.ids import new_id
from coterie.stores.sql.migrations import migrate_sqlite
from coterie.stores.sql.rows import insert
from coterie.stores.sqlite.connection import open_writer
from coterie.stores.sqlite.engine import DATABASE

TEXT = "x" * 440
PAYLOAD = {"text": TEXT, "kind": "note", "topic": "benchmark"}
PAYLOAD_JSON = f'{{"text":"{TEXT}","kind":"note","topic":"benchmark"}}'
"""About 500 bytes."""

Row = tuple[Any, ...]
InsertMany = Callable[[sqlite3.Connection, str, Sequence[Row]], None]

_MESSAGES = (
    "messages (seq, id, sender, recipient, state, in_seq, created_at, deliver_at, delivered_at, queued, hops, option,"
    " in_reply_to, cause, replay_of, payload, thread)"
)
_EVENTS = "events (at, kind, subject)"
_COUNT = """
UPDATE agents SET next_in_seq = next_in_seq + ?1, waiting = waiting + ?1, waiting_bytes = waiting_bytes + ?1 * ?3,
                  delayed = delayed + ?2
WHERE id = ?4
"""
_MANY_DELAYED = """
WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < ?1)
INSERT INTO messages (seq, id, sender, recipient, thread, state, created_at, deliver_at, payload)
SELECT n, printf('%044x', n), 'user', 'agent-' || (n % ?2), 'agent-' || (n % ?2), 'delayed',
       ?3, ?3 + 86400000 + n * 7919 % 86400000, ?4
FROM number
"""


def agent_names(count: int) -> list[str]:
    return [f"agent-{number}" for number in range(count)]


def open_plain(path: Path, agents: int) -> sqlite3.Connection:
    """Create a database as the store does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    db = open_writer(path, "full")
    db.execute("PRAGMA wal_autocheckpoint = 1000")  # the default of SQLite; the store has its own thread for it
    migrate_sqlite(db)
    db.execute("BEGIN")
    db.execute("INSERT INTO agents (id, kind, name, created_at) VALUES ('user', 'person', 'You', 0)")
    db.executemany(
        "INSERT INTO agents (id, kind, name, created_at) VALUES (?, 'agent', ?, 0)",
        ((name, name) for name in agent_names(agents)),
    )
    db.execute("COMMIT")
    return db


def message_rows(count: int, agents: Sequence[str], *, delay_ms: int | None = None) -> list[Row]:
    now = time.time_ns() // 1_000_000
    return [_row(number, agents[number % len(agents)], number // len(agents), now, delay_ms) for number in range(count)]


def _row(number: int, to: str, place: int, now: int, delay_ms: int | None) -> Row:
    ends = (False, 0, None, None, None, None, PAYLOAD_JSON, to)
    if delay_ms is None:
        return (number + 1, new_id(), "user", to, "pending", place + 1, now, None, now, *ends)
    return (number + 1, new_id(), "user", to, "delayed", None, now, now + delay_ms, None, *ends)


def write(db: sqlite3.Connection, rows: Sequence[Row], batch: int, insert_many: InsertMany) -> float:
    """Rows per second, with one durable commit per batch."""
    start = time.perf_counter()
    for part in _parts(rows, batch):
        db.execute("BEGIN IMMEDIATE")
        insert_many(db, _MESSAGES, part)
        insert_many(db, _EVENTS, [(row[6], "message.created", row[1]) for row in part])
        db.executemany(_COUNT, _counts(part))
        db.execute("COMMIT")
    return len(rows) / (time.perf_counter() - start)


def make_society(folder: Path, agents: int, messages: Sequence[Row]) -> None:
    """Create a society with stored messages."""
    place = SocietyFolder(folder)
    place.create()
    db = open_plain(place.data / DATABASE, agents)
    write(db, messages, 10_000, many_rows_a_statement)
    db.close()


def add_delayed(folder: Path, count: int, agents: int = 100) -> None:
    """Add `count` delayed messages to existing agents, due in one to two days."""
    db = open_writer(SocietyFolder(folder).data / DATABASE, "relaxed")
    db.execute("BEGIN")
    db.execute(_MANY_DELAYED, (count, agents, time.time_ns() // 1_000_000, PAYLOAD_JSON))
    db.execute("UPDATE agents SET delayed = ? / ? WHERE kind = 'agent'", (count, agents))
    db.execute("COMMIT")
    db.close()


def row_by_row(db: sqlite3.Connection, into: str, rows: Sequence[Row]) -> None:
    db.executemany(f"INSERT INTO {into} VALUES ({', '.join('?' * len(rows[0]))})", rows)


many_rows_a_statement: InsertMany = insert


def _parts(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _counts(part: Sequence[Row]) -> list[Row]:
    delivered: dict[str, int] = {}
    delayed: dict[str, int] = {}
    for row in part:
        count = delivered if row[5] is not None else delayed
        count[row[3]] = count.get(row[3], 0) + 1
    size = len(PAYLOAD_JSON)
    return [(delivered.get(who, 0), delayed.get(who, 0), size, who) for who in delivered | delayed]
