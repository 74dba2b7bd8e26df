"""A copy of everything, as the file that the SQLite engine keeps: it can be looked at, and run, anywhere."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from coterie.stores.postgres.connection import PgConnection
from coterie.stores.sql.bulk import insert
from coterie.stores.sqlite.migrate import migrate

_TABLES = (
    "meta", "agents", "messages", "artifacts", "attachments", "events", "history", "plans", "calls", "roles",
    "llm_calls", "summaries",
)  # fmt: skip


def copy(db: PgConnection, target: Path) -> None:
    """Inside a transaction that sees one moment; on the disk when this returns."""
    with closing(sqlite3.connect(target, isolation_level=None)) as file:
        migrate(file)
        file.execute("BEGIN")
        for table in _TABLES:
            _copy(db, file, table)
        file.execute("DELETE FROM meta WHERE key = 'schema'")
        file.execute("COMMIT")
    with target.open("rb") as written:
        os.fsync(written.fileno())


def _copy(db: PgConnection, file: sqlite3.Connection, table: str) -> None:
    columns = ", ".join(column for _, column, *_ in file.execute(f"PRAGMA table_info({table})"))
    rows = db.execute("SELECT " + columns + " FROM " + table)
    while part := rows.fetchmany(1_000):
        insert(file, f"{table} ({columns})", part)
