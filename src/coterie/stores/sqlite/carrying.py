"""A society in its SQLite file, as something to carry away, and as a place to carry it to."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from coterie.errors import StoreUnusable
from coterie.stores.folder import place_bytes, read_bytes
from coterie.stores.sql.carrying import PART
from coterie.stores.sqlite.connections import DATABASE_ERRORS, PAGE, open_reader, translate
from coterie.stores.sqlite.migrate import check_version, migrate, migrations


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
