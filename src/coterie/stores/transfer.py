"""A whole society carried from one database into another: every row, every number that was given out, every byte.

Nothing is translated on the way but what the engines keep differently, so it goes on where it was, and carried back it
is the same.

A society in its SQLite file, as something to carry away, and as a place to carry it to.
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
from coterie.stores.blobs import place_bytes, read_bytes
from coterie.stores.sql.connection import Connection, insert
from coterie.stores.sql.invariants import INVARIANTS, broken
from coterie.stores.sqlite.connection import DATABASE_ERRORS, PAGE, open_reader, translate
from coterie.stores.sqlite.migrate import check_version, migrate, migrations

TABLES = (
    "meta", "agents", "messages", "artifacts", "attachments", "events", "history", "plans", "calls", "roles",
    "llm_calls", "summaries",
)  # fmt: skip
"""Those that both engines have, each behind the ones it refers to."""
NUMBERED = ("messages", "plans")
"""Their numbers are never given out twice, not even those of rows that are gone."""
ENGINES_OWN = ("schema",)
"""What an engine notes about itself, and not about the society."""
PART = 1_000
Tell = Callable[[str], None]


class Source(Protocol):
    """A society as it was at one moment, whatever becomes of it meanwhile."""

    def columns(self, table: str) -> Sequence[str]: ...

    def count(self, table: str) -> int: ...

    def rows(self, table: str, columns: str) -> Iterator[Sequence[tuple[Any, ...]]]:
        """All of them, a part at a time."""
        ...

    def last_number(self, table: str) -> int:
        """The highest that was ever given out; 0: none was."""
        ...

    def pieces(self, sha256: str) -> Iterator[bytes] | None:
        """The bytes of an artifact. None: they are gone."""
        ...


class Target(Protocol):
    """A database with nothing in it, and a transaction under way."""

    @property
    def db(self) -> Connection: ...

    def set_last_number(self, table: str, number: int) -> None: ...

    def keep(self, sha256: str, size: int, pieces: Iterator[bytes]) -> None: ...

    def settle(self) -> None:
        """All rows are there: whatever else this engine keeps about them is made to fit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    rows: Mapping[str, int]
    """By table."""
    artifacts: int
    """So many different ones, by content."""
    lost: tuple[str, ...]
    """Content hashes that the source names and whose bytes were gone there already."""


def carry(source: Source, target: Target, tell: Tell) -> Carried:
    rows = carry_rows(source, target, tell)
    artifacts, lost = _carry_bytes(source, target, tell)
    return Carried(rows=rows, artifacts=artifacts, lost=lost)


def carry_rows(source: Source, target: Target, tell: Tell = lambda _: None) -> Mapping[str, int]:
    """Everything but bytes; how many rows each table has."""
    rows = {table: _carry_table(source, target.db, table, tell) for table in TABLES}
    for ((paused,),) in source.rows("log", "paused"):
        target.db.execute("UPDATE log SET paused = ?", (paused,))
    for table in NUMBERED:
        target.set_last_number(table, source.last_number(table))
    target.settle()
    return rows


def check(db: Connection, carried: Carried, tell: Tell) -> None:
    """`StoreUnusable` unless all of it is there, and keeps every promise."""
    tell("Checking what was copied")
    for table, count in carried.rows.items():
        own = len(ENGINES_OWN) if table == "meta" else 0
        (found,) = db.execute("SELECT count(*) FROM " + table).fetchone()
        if not count <= found <= count + own:
            raise StoreUnusable(f"{found:,} rows of {table} arrived, but {count:,} were sent: nothing was copied")
    if found := next(violations(db), None):
        raise StoreUnusable(
            f"the society contradicts itself ({found}), and nothing was copied: see all of it with coterie verify"
        )


def violations(db: Connection) -> Iterator[str]:
    for name, (_, sql) in INVARIANTS.items():
        for row in db.execute(sql):
            yield broken(name, row)


def _carry_table(source: Source, db: Connection, table: str, tell: Tell) -> int:
    columns, total, done = ", ".join(source.columns(table)), source.count(table), 0
    for part in source.rows(table, columns):
        kept = [row for row in part if table != "meta" or row[0] not in ENGINES_OWN]
        insert(db, f"{table} ({columns})", kept)
        done += len(kept)
        tell(f"Copying {table}: {done:,} of {total:,}")
    return done


def _carry_bytes(source: Source, target: Target, tell: Tell) -> tuple[int, tuple[str, ...]]:
    wanted = target.db.execute("SELECT DISTINCT sha256, size FROM artifacts ORDER BY sha256").fetchall()
    lost: list[str] = []
    for number, (sha256, size) in enumerate(wanted, 1):
        tell(f"Copying artifacts: {number:,} of {len(wanted):,}")
        pieces = source.pieces(sha256)
        if pieces is None:
            lost.append(sha256)
        else:
            target.keep(sha256, size, _checked(sha256, size, pieces))
    return len(wanted) - len(lost), tuple(lost)


def _checked(sha256: str, size: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    digest, seen = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        seen += len(piece)
        yield piece
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
        try:
            with closing(open_reader(database)) as db:
                if check_version(db) < migrations()[-1][0]:
                    raise StoreUnusable(f"{database} has an older schema: bring it up to date with coterie migrate")
                db.execute("BEGIN")  # all of it is read from the state the first statement sees
                yield cls(db, artifacts)
        except DATABASE_ERRORS as error:
            raise translate(error) from error

    def columns(self, table: str) -> Sequence[str]:
        return [name for _, name, *_ in self._db.execute("SELECT * FROM pragma_table_info(?)", (table,))]

    def count(self, table: str) -> int:
        return int(self._db.execute("SELECT count(*) FROM " + table).fetchone()[0])

    def rows(self, table: str, columns: str) -> Iterator[Sequence[tuple[Any, ...]]]:
        found = self._db.execute("SELECT " + columns + " FROM " + table)
        while part := found.fetchmany(PART):
            yield part

    def last_number(self, table: str) -> int:
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
        return int(row[0]) if row else 0

    def pieces(self, sha256: str) -> Iterator[bytes] | None:
        return read_bytes(self._artifacts, sha256)


class SqliteTarget:
    """A new file. Whoever wants all or nothing makes it elsewhere, and moves it into its place."""

    def __init__(self, db: sqlite3.Connection, artifacts: Path) -> None:
        self.db, self._artifacts = db, artifacts

    @classmethod
    @contextmanager
    def make(cls, database: Path, artifacts: Path) -> Iterator[SqliteTarget]:
        """On the disk when it is left."""
        try:
            os.close(os.open(database, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            with closing(sqlite3.connect(database, isolation_level=None)) as db:
                db.execute(f"PRAGMA page_size = {PAGE}")
                migrate(db)
                db.execute("PRAGMA foreign_keys = ON")
                db.execute("BEGIN IMMEDIATE")
                db.execute("DELETE FROM meta")  # the rows of the source take their place, its secret among them
                yield cls(db, artifacts)
                db.execute("COMMIT")
        except DATABASE_ERRORS as error:
            raise translate(error) from error
        with database.open("rb") as written:
            os.fsync(written.fileno())

    def set_last_number(self, table: str, number: int) -> None:
        self.db.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
        if number:
            self.db.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (table, number))

    def keep(self, sha256: str, size: int, pieces: Iterator[bytes]) -> None:
        place_bytes(self._artifacts, sha256, pieces)

    def settle(self) -> None:
        pass
