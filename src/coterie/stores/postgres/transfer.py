"""Transfer of a society out of PostgreSQL and into it: `Source` and `Target` of `stores/transfer.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie.errors import StoreUnusable
from coterie.stores.blobs import CHUNK_BYTES, read_blob, write_blob
from coterie.stores.postgres.connection import CLOCK, LOCK_TIMEOUT_MS, PgConnection, owner_connection
from coterie.stores.sql.migrations import migrate_postgres, require_newest_postgres
from coterie.stores.transfer import BATCH_ROWS, TABLES

# Readers may go on; writers and starting processes wait.
_BLOCK_WRITES = (
    f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}; LOCK TABLE {', '.join(TABLES)}, log, processes IN EXCLUSIVE MODE"
)
# The planner has no statistics of the new tables. ANALYZE without names would also lock tables of other schemas.
_ANALYZE = f"ANALYZE {', '.join(TABLES)}"
_SELECT_COLUMNS = """
SELECT attname FROM pg_attribute
 WHERE attrelid = :table::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum
"""
_COUNT_PROCESSES = f"SELECT count(*), max(lease_ms) FROM processes WHERE seen_at + lease_ms > {CLOCK}"
_READ_CHUNK = "SELECT bytes FROM pieces WHERE sha256 = :sha256 AND start >= :start ORDER BY start LIMIT 1"
_INSERT_BLOB = f"INSERT INTO blobs (sha256, size, at) VALUES (:sha256, :size, {CLOCK})"
_INSERT_CHUNK = "INSERT INTO pieces (sha256, start, bytes) VALUES (:sha256, :start, :bytes)"
# SQLite releases claims at the next start. Here no start does, so release them now.
_RELEASE_CLAIMS = "UPDATE agents SET runnable_at = 0 WHERE state IN ('llm', 'tools') AND runnable_at IS NULL"


class PostgresSource:
    def __init__(self, db: PgConnection, folder: Path | None) -> None:
        """`folder`: where artifact bytes are, if not in the database."""
        self._db, self._folder = db, folder

    @classmethod
    @contextmanager
    def open(cls, url: str, folder: Path | None, *, require_stopped: bool = False) -> Iterator[PostgresSource]:
        """Read one snapshot.

        `require_stopped`: block writes, and raise `StoreUnusable` if a process runs the society.
        """
        with owner_connection(url) as db:
            require_newest_postgres(db.raw)
            if require_stopped:
                # The snapshot is taken by the first query, so after the lock.
                db.execute_now(f"BEGIN ISOLATION LEVEL REPEATABLE READ; {_BLOCK_WRITES}")
                _require_no_process(db)
            else:
                db.execute_now("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield cls(db, folder)
            db.execute_now("ROLLBACK")

    def columns(self, table: str) -> Sequence[str]:
        return _columns(self._db, table)

    def count(self, table: str) -> int:
        return _fetch_int(self._db, "SELECT count(*) FROM " + table)

    def rows(self, table: str, columns: str) -> Iterator[Sequence[tuple[Any, ...]]]:
        with self._db.raw.cursor(name="transfer") as cursor:  # a server-side cursor bounds memory
            cursor.execute(("SELECT " + columns + " FROM " + table).encode())
            while batch := cursor.fetchmany(BATCH_ROWS):
                yield batch

    def last_sequence(self, table: str) -> int:
        return _fetch_int(self._db, "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM " + table + "_seq_seq")

    def read_blob(self, sha256: str) -> Iterator[bytes] | None:
        if self._folder:
            return read_blob(self._folder, sha256)
        exists = self._db.execute("SELECT 1 FROM blobs WHERE sha256 = :sha256", {"sha256": sha256}).fetchone()
        return self._read_chunks(sha256) if exists else None

    def _read_chunks(self, sha256: str) -> Iterator[bytes]:
        for start in itertools.count(0, CHUNK_BYTES):
            row = self._db.execute(_READ_CHUNK, {"sha256": sha256, "start": start}).fetchone()
            if row is None:
                return
            yield bytes(row[0])


class PostgresTarget:
    """An empty database. Schema and rows are written in one transaction."""

    def __init__(self, db: PgConnection, folder: Path | None) -> None:
        self.db, self._folder = db, folder
        self._new_files: list[Path] = []

    @classmethod
    @contextmanager
    def create(cls, url: str, folder: Path | None, not_empty_message: str) -> Iterator[PostgresTarget]:
        """Commit when the block ends without error. `not_empty_message`: for the error if the database has data."""
        with owner_connection(url) as db:
            target = cls(db, folder)
            with db.raw.transaction():
                migrate_postgres(db.raw)
                _require_empty(db, not_empty_message)
                db.execute_now(_BLOCK_WRITES)
                db.execute("DELETE FROM meta WHERE key NOT IN ('schema', 'compatible_from')")
                try:
                    yield target
                except BaseException:
                    target._delete_new_files()
                    raise

    def set_last_sequence(self, table: str, number: int) -> None:
        sequence = f"{table}_seq_seq"
        self.db.execute(
            "SELECT setval(:sequence::regclass, :number, :is_called::int::bool)",
            {"sequence": sequence, "number": max(1, number), "is_called": number > 0},
        )

    def write_blob(self, sha256: str, size: int, chunks: Iterator[bytes]) -> None:
        if self._folder:
            self._new_files += write_blob(self._folder, sha256, chunks)
            return
        self.db.execute(_INSERT_BLOB, {"sha256": sha256, "size": size})
        for number, chunk in enumerate(_rechunk(chunks)):
            self.db.execute(_INSERT_CHUNK, {"sha256": sha256, "start": number * CHUNK_BYTES, "bytes": chunk})

    def _delete_new_files(self) -> None:
        for path in self._new_files:
            path.unlink(missing_ok=True)

    def finish(self) -> None:
        self.db.execute(_RELEASE_CLAIMS)
        self.db.execute_now(_ANALYZE)


def _require_no_process(db: PgConnection) -> None:
    count, lease_ms = db.execute(_COUNT_PROCESSES).fetchone()
    if count:
        who = "a process runs" if count == 1 else f"{count} processes run"
        raise StoreUnusable(
            f"{who} the society in this database: stop them first; one that was killed counts as gone"
            f" after {lease_ms / 1000:.0f} s"
        )


def _require_empty(db: PgConnection, message: str) -> None:
    for table in ("agents", "messages", "events", "artifacts", "blobs"):
        if db.execute("SELECT 1 FROM " + table + " LIMIT 1").fetchone():
            raise StoreUnusable(message)


def _columns(db: PgConnection, table: str) -> list[str]:
    """Columns that can be written: no generated ones."""
    return [name for (name,) in db.execute(_SELECT_COLUMNS, {"table": table})]


def _fetch_int(db: PgConnection, sql: str) -> int:
    return int(db.execute(sql).fetchone()[0])


def _rechunk(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in chunks of CHUNK_BYTES; the last may be shorter."""
    rest = b""
    for chunk in chunks:
        rest += chunk
        while len(rest) >= CHUNK_BYTES:
            yield rest[:CHUNK_BYTES]
            rest = rest[CHUNK_BYTES:]
    if rest:
        yield rest
