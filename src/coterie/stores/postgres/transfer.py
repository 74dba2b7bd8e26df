"""A society in PostgreSQL, as something to carry away, and as a place to carry it to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from coterie.errors import StoreUnusable
from coterie.stores.blobs import place_bytes, read_bytes
from coterie.stores.postgres.blobs import PIECE
from coterie.stores.postgres.connection import CLOCK, LOCK_MS, PgConnection, errand
from coterie.stores.postgres.migrate import check_version, migrate
from coterie.stores.transfer import PART, TABLES

# Reading goes on beside it; whoever wants to write, or to begin, waits.
_NOBODY_WRITES = f"SET LOCAL lock_timeout = {LOCK_MS}; LOCK TABLE {', '.join(TABLES)}, log, processes IN EXCLUSIVE MODE"
_ALIVE = f"SELECT count(*) FROM processes WHERE seen_at > {CLOCK} - ?"
_PIECE = "SELECT bytes FROM pieces WHERE sha256 = ? AND start >= ? ORDER BY start LIMIT 1"
_BLOB = f"INSERT INTO blobs (sha256, size, at) VALUES (?, ?, {CLOCK})"
_PUT = "INSERT INTO pieces (sha256, start, bytes) VALUES (?, ?, ?)"
_LOG = "UPDATE log SET (last, last_at) = (SELECT coalesce(max(seq), 0), coalesce(max(at), 0) FROM events)"
# Where one process owns all, it knows at its next start that nobody works on these. Here somebody must say so.
_FREE = "UPDATE agents SET runnable_at = 0 WHERE state IN ('llm', 'tools') AND runnable_at IS NULL"


class PostgresSource:
    def __init__(self, db: PgConnection, folder: Path | None) -> None:
        """`folder`: where the bytes of artifacts are, if not in the database."""
        self._db, self._folder = db, folder

    @classmethod
    @contextmanager
    def open(cls, url: str, folder: Path | None, *, alone: timedelta | None = None) -> Iterator[PostgresSource]:
        """`alone`: nobody may run it, and nobody can write to it meanwhile. Who was not seen for so long is gone."""
        with errand(url) as db:
            check_version(db.raw)
            if alone is None:
                db.say("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            else:
                # What this transaction sees is settled by the first question in it: behind the lock.
                db.say(f"BEGIN ISOLATION LEVEL REPEATABLE READ; {_NOBODY_WRITES}")
                _refuse_company(db, alone)
            yield cls(db, folder)
            db.say("ROLLBACK")

    def columns(self, table: str) -> Sequence[str]:
        return _columns(self._db, table)

    def count(self, table: str) -> int:
        return _number(self._db, "SELECT count(*) FROM " + table)

    def rows(self, table: str, columns: str) -> Iterator[Sequence[tuple[Any, ...]]]:
        with self._db.raw.cursor(name="carried") as found:  # of the server: only a part of it is ever here
            found.execute(("SELECT " + columns + " FROM " + table).encode())
            while part := found.fetchmany(PART):
                yield part

    def last_number(self, table: str) -> int:
        return _number(self._db, "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM " + table + "_seq_seq")

    def pieces(self, sha256: str) -> Iterator[bytes] | None:
        if self._folder:
            return read_bytes(self._folder, sha256)
        known = self._db.execute("SELECT 1 FROM blobs WHERE sha256 = ?", (sha256,)).fetchone()
        return self._pieces(sha256) if known else None

    def _pieces(self, sha256: str) -> Iterator[bytes]:
        for start in itertools.count(0, PIECE):
            row = self._db.execute(_PIECE, (sha256, start)).fetchone()
            if row is None:
                return
            yield bytes(row[0])


class PostgresTarget:
    """All of it in one transaction, tables and all: it is there when that commits, and before there is nothing."""

    def __init__(self, db: PgConnection, folder: Path | None) -> None:
        self.db, self._folder = db, folder
        self._brought: list[Path] = []

    @classmethod
    @contextmanager
    def make(cls, url: str, folder: Path | None, taken: str) -> Iterator[PostgresTarget]:
        """Durable when it is left. `taken`: what to say when there is a society in it already."""
        with errand(url) as db:
            target = cls(db, folder)
            with db.raw.transaction():
                migrate(db.raw)
                _refuse_contents(db, taken)
                db.say(_NOBODY_WRITES)
                db.execute("DELETE FROM meta WHERE key <> 'schema'")
                try:
                    yield target
                except BaseException:
                    target._take_back()
                    raise

    def set_last_number(self, table: str, number: int) -> None:
        sequence = f"{table}_seq_seq"
        self.db.execute("SELECT setval(?::regclass, ?, ?::int::bool)", (sequence, max(1, number), number > 0))

    def keep(self, sha256: str, size: int, pieces: Iterator[bytes]) -> None:
        if self._folder:
            self._brought += place_bytes(self._folder, sha256, pieces)
            return
        self.db.execute(_BLOB, (sha256, size))
        for number, piece in enumerate(_cut(pieces)):
            self.db.execute(
                "INSERT INTO pieces (sha256, start, bytes) VALUES (?, ?, ?)", (sha256, number * PIECE, piece)
            )

    def _take_back(self) -> None:
        for path in self._brought:
            path.unlink(missing_ok=True)

    def settle(self) -> None:
        self.db.execute(_LOG)
        self.db.execute(_FREE)
        self.db.say("ANALYZE")  # what is asked next is asked of tables that the planner has not heard of


def _refuse_company(db: PgConnection, lease: timedelta) -> None:
    if alive := _number(db, _ALIVE, lease // timedelta(milliseconds=1)):
        who = "a process runs" if alive == 1 else f"{alive} processes run"
        raise StoreUnusable(
            f"{who} the society in this database: stop them first; one that was killed counts as gone"
            f" after {lease.total_seconds():.0f} s"
        )


def _refuse_contents(db: PgConnection, taken: str) -> None:
    for table in ("agents", "messages", "events", "artifacts", "blobs"):
        if db.execute("SELECT 1 FROM " + table + " LIMIT 1").fetchone():
            raise StoreUnusable(taken)


def _columns(db: PgConnection, table: str) -> list[str]:
    return [
        column.name for column in db.raw.execute(("SELECT * FROM " + table + " LIMIT 0").encode()).description or ()
    ]


def _number(db: PgConnection, sql: str, *values: Any) -> int:
    return int(db.execute(sql, values).fetchone()[0])


def _cut(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes, each piece but the last PIECE long."""
    rest = b""
    for piece in pieces:
        rest += piece
        while len(rest) >= PIECE:
            yield rest[:PIECE]
            rest = rest[PIECE:]
    if rest:
        yield rest
