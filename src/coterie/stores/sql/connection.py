"""A connection as the shared transitions see it: what `sqlite3` has, and what the PostgreSQL engine imitates.

SQL is written as SQLite reads it: `?`, `?1`. What only several writers need stands in a comment that begins with a
plus, `/*+ FOR UPDATE */`: SQLite, with its one writer, passes over it, and PostgreSQL's dialect uncovers it.

Many rows in one statement.

`executemany` goes through Python and the interpreter lock once a row; one INSERT of 64 rows does so once, which lowers
the cost of a batch and leaves the event loop its processor meanwhile. An engine may have a better way still: its
connection has a method `insert_rows` then.

The secret of a society: one random row that every process of the society reads and nobody changes.

Message ids and the marks around messages in a model's request are hashed with it. It never leaves the database except
in a backup or a copy of the whole society. No tool, API route or export shows it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, Protocol

from coterie.ids import new_secret


class Rows(Protocol):
    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    @property
    def Error(self) -> type[Exception]: ...  # noqa: N802 - the names of the DB-API

    @property
    def IntegrityError(self) -> type[Exception]: ...  # noqa: N802

    @property
    def OperationalError(self) -> type[Exception]: ...  # noqa: N802

    def execute(self, sql: str, parameters: Any = ..., /) -> Rows: ...

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> object:
        """What comes of it is not looked at: it may be done when the next statement is."""
        ...


def get_meta(db: Connection, key: str) -> str | None:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return row[0] if row else None


def set_meta(db: Connection, key: str, value: str) -> str:
    db.execute(
        "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (key, value),
    )
    return value


SIZES = (64, 8, 4, 3, 2, 1)
"""Few sizes, so that every statement stays prepared."""


def insert(db: Connection, into: str, rows: Sequence[Sequence[Any]]) -> None:
    """Insert `rows` into `into`, a table with its columns: `events (at, kind)`."""
    if len(rows) == 1:
        db.execute(_statement(into, len(rows[0]), 1), rows[0])
        return
    if rows and (insert_rows := getattr(db, "insert_rows", None)):
        insert_rows(into, rows)
        return
    done = 0
    for size in SIZES if rows else ():
        while len(rows) - done >= size:
            part = rows[done : done + size]
            db.execute(_statement(into, len(part[0]), size), tuple(chain.from_iterable(part)))
            done += size


@cache
def _statement(into: str, width: int, size: int) -> str:
    row = f"({', '.join('?' * width)})"
    return f"INSERT INTO {into} VALUES {', '.join([row] * size)}"


_READ = "SELECT value FROM meta WHERE key = 'secret'"
_MAKE = "INSERT INTO meta (key, value) VALUES ('secret', ?) ON CONFLICT (key) DO NOTHING"


def read_secret(db: Connection) -> bytes:
    """The secret; a random one if the database has none, which happens only in databases opened for reading."""
    row = db.execute(_READ).fetchone()
    return row[0].encode() if row else os.urandom(32)


def make_secret(db: Connection) -> bytes:
    """Make the secret unless there is one, and return it. Call it when a store opens, outside any other transaction."""
    db.execute(_MAKE, (new_secret(),))
    return read_secret(db)
