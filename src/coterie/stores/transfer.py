"""Copy a whole society from one database into another: rows, sequence numbers and artifact bytes.

Ids and values stay the same, so the society continues where it stopped. `Source` and `Target` are the ports;
`SqliteSource` and `SqliteTarget` implement them here, PostgreSQL's in `stores/postgres/transfer.py`.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from coterie.errors import StoreUnusable
from coterie.stores.blobs import read_blob, write_blob
from coterie.stores.sql.invariants import INVARIANTS, RECOUNT_MAIL, describe_violation
from coterie.stores.sql.migrations import migrate_sqlite, schema_scripts, sqlite_version
from coterie.stores.sql.rows import Connection, insert
from coterie.stores.sql.text_index import POSITION
from coterie.stores.sqlite.connection import (
    DATABASE_ERRORS,
    PAGE_BYTES,
    open_reader,
    sqlite_errors,
    to_store_error,
)

TABLES = (
    "meta", "agents", "messages", "artifacts", "attachments", "events", "history", "history_artifacts",
    "plans", "calls", "roles", "llm_calls", "summaries", "schedules", "tasks", "turns", "keys", "push_configs",
)  # fmt: skip
"""Tables that both engines have, in foreign-key order."""
SEQUENCE_TABLES = ("messages", "plans", "tasks", "events")
"""Tables whose `seq` values a sequence assigns on PostgreSQL."""
AUTOINCREMENT_TABLES = ("messages", "plans")
"""Those whose values are never reused, even after their rows are deleted."""
ENGINE_META_KEYS = ("schema", "compatible_from", POSITION)
"""Keys of `meta` that describe the engine, not the society. They are not copied: the text index is built again."""
BATCH_ROWS = 1_000
OnProgress = Callable[[str], None]
"""Receives one line about the progress."""


class Source(Protocol):
    """A consistent snapshot of a society."""

    def columns(self, table: str) -> Sequence[str]: ...

    def count(self, table: str) -> int: ...

    def rows(self, table: str, columns: str) -> Iterator[Sequence[tuple[Any, ...]]]:
        """All rows of a table, in batches of `BATCH_ROWS`."""
        ...

    def last_sequence(self, table: str) -> int:
        """The highest sequence number ever assigned; 0 if none."""
        ...

    def read_blob(self, sha256: str) -> Iterator[bytes] | None:
        """Chunks of an artifact's bytes; None if they are missing."""
        ...


class Target(Protocol):
    """An empty database with an open transaction."""

    @property
    def db(self) -> Connection: ...

    def set_last_sequence(self, table: str, number: int) -> None: ...

    def write_blob(self, sha256: str, size: int, chunks: Iterator[bytes]) -> None: ...

    def finish(self) -> None:
        """Update what the engine derives from the rows. Call it after all rows are written."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    rows: Mapping[str, int]
    """Rows copied, by table."""
    artifacts: int
    """Blobs copied."""
    lost: tuple[str, ...]
    """Hashes of artifacts whose bytes were missing in the source."""


def transfer(source: Source, target: Target, on_progress: OnProgress) -> TransferResult:
    """Copy rows and artifact bytes. The caller commits the target."""
    rows = transfer_rows(source, target, on_progress)
    artifacts, lost = _transfer_blobs(source, target, on_progress)
    return TransferResult(rows=rows, artifacts=artifacts, lost=lost)


def transfer_rows(source: Source, target: Target, on_progress: OnProgress = lambda _: None) -> Mapping[str, int]:
    """Copy everything except artifact bytes, and count mail anew. Return the number of rows by table."""
    rows = {table: _transfer_table(source, target.db, table, on_progress) for table in TABLES}
    target.db.execute(RECOUNT_MAIL)
    for ((paused,),) in source.rows("log", "paused"):
        target.db.execute("UPDATE log SET paused = :paused", {"paused": paused})
    for table in SEQUENCE_TABLES:
        target.set_last_sequence(table, source.last_sequence(table))
    target.finish()
    return rows


def check_transfer(db: Connection, result: TransferResult, on_progress: OnProgress) -> None:
    """Raise `StoreUnusable` if rows are missing or an invariant is violated."""
    on_progress("Checking what was copied")
    for table, count in result.rows.items():
        engine_rows = len(ENGINE_META_KEYS) if table == "meta" else 0
        (arrived,) = db.execute("SELECT count(*) FROM " + table).fetchone()
        if not count <= arrived <= count + engine_rows:
            raise StoreUnusable(f"{arrived:,} rows of {table} arrived, but {count:,} were sent: nothing was copied")
    for name, (_, sql) in INVARIANTS.items():
        if row := db.execute(sql).fetchone():
            raise StoreUnusable(
                f"the society's data is inconsistent ({describe_violation(name, row)}), and nothing was copied:"
                " list all problems with coterie verify"
            )


def _transfer_table(source: Source, db: Connection, table: str, on_progress: OnProgress) -> int:
    columns, total, done = ", ".join(source.columns(table)), source.count(table), 0
    for batch in source.rows(table, columns):
        copied = [row for row in batch if table != "meta" or row[0] not in ENGINE_META_KEYS]
        insert(db, f"{table} ({columns})", copied)
        done += len(copied)
        on_progress(f"Copying {table}: {done:,} of {total:,}")
    return done


def _transfer_blobs(source: Source, target: Target, on_progress: OnProgress) -> tuple[int, tuple[str, ...]]:
    """Return the number of blobs copied and the hashes of missing ones."""
    blobs = target.db.execute("SELECT DISTINCT sha256, size FROM artifacts ORDER BY sha256").fetchall()
    lost: list[str] = []
    for number, (sha256, size) in enumerate(blobs, 1):
        on_progress(f"Copying artifacts: {number:,} of {len(blobs):,}")
        chunks = source.read_blob(sha256)
        if chunks is None:
            lost.append(sha256)
        else:
            target.write_blob(sha256, size, _verify_chunks(sha256, size, chunks))
    return len(blobs) - len(lost), tuple(lost)


def _verify_chunks(sha256: str, size: int, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Pass the chunks through; raise `StoreUnusable` at the end if hash or size differs."""
    digest, seen = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk)
        seen += len(chunk)
        yield chunk
    if (digest.hexdigest(), seen) != (sha256, size):
        raise StoreUnusable(
            f"artifact {sha256} holds other bytes than were stored, and nothing was copied: restore a backup"
            " with coterie restore FILE"
        )


class SqliteSource:
    def __init__(self, db: sqlite3.Connection, artifacts: Path) -> None:
        self._db, self._artifacts = db, artifacts

    @classmethod
    @contextmanager
    def open(cls, database: Path, artifacts: Path) -> Iterator[SqliteSource]:
        with sqlite_errors(database), closing(open_reader(database)) as db:
            if sqlite_version(db) < schema_scripts("sqlite").newest:
                raise StoreUnusable(f"{database} has an older schema: bring it up to date with coterie migrate")
            db.execute("BEGIN")  # one snapshot for all reads
            yield cls(db, artifacts)

    def columns(self, table: str) -> Sequence[str]:
        return [name for (name,) in self._db.execute("SELECT name FROM pragma_table_info(:table)", {"table": table})]

    def count(self, table: str) -> int:
        return int(self._db.execute("SELECT count(*) FROM " + table).fetchone()[0])

    def rows(self, table: str, columns: str) -> Iterator[Sequence[tuple[Any, ...]]]:
        cursor = self._db.execute("SELECT " + columns + " FROM " + table)
        while batch := cursor.fetchmany(BATCH_ROWS):
            yield batch

    def last_sequence(self, table: str) -> int:
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = :table", {"table": table}).fetchone()
        row = row or self._db.execute("SELECT max(seq) FROM " + table).fetchone()
        return row[0] or 0

    def read_blob(self, sha256: str) -> Iterator[bytes] | None:
        return read_blob(self._artifacts, sha256)


class SqliteTarget:
    """A new database file. For all-or-nothing, create it elsewhere and rename it."""

    def __init__(self, db: sqlite3.Connection, artifacts: Path) -> None:
        self.db, self._artifacts = db, artifacts

    @classmethod
    @contextmanager
    def create(cls, database: Path, artifacts: Path) -> Iterator[SqliteTarget]:
        """Commit and fsync when the block ends without error."""
        try:
            os.close(os.open(database, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            with closing(sqlite3.connect(database, isolation_level=None)) as db:
                db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
                migrate_sqlite(db)
                db.execute("PRAGMA foreign_keys = ON")
                db.execute("BEGIN IMMEDIATE")
                db.execute("DELETE FROM meta")  # replaced by the source's rows, its secret among them
                yield cls(db, artifacts)
                db.execute("COMMIT")
        except DATABASE_ERRORS as error:
            raise to_store_error(error) from error
        with database.open("rb") as file:
            os.fsync(file.fileno())

    def set_last_sequence(self, table: str, number: int) -> None:
        if table not in AUTOINCREMENT_TABLES:
            return  # SQLite numbers the next row after the last one
        self.db.execute("DELETE FROM sqlite_sequence WHERE name = :table", {"table": table})
        if number:
            self.db.execute(
                "INSERT INTO sqlite_sequence (name, seq) VALUES (:table, :number)", {"table": table, "number": number}
            )

    def write_blob(self, sha256: str, size: int, chunks: Iterator[bytes]) -> None:
        write_blob(self._artifacts, sha256, chunks)

    def finish(self) -> None:
        pass
