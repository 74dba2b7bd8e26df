"""The database connection that both engines provide, bulk inserts, and the `meta` table.

SQL uses SQLite's parameters: `?`, `?1`. A comment with a plus, `/*+ FOR UPDATE */`, holds what several writers need:
SQLite ignores the comment, and the PostgreSQL engine turns it into SQL.

The society's secret is one random row of `meta` that never changes. Message ids and the marks around messages in a
model's request are hashed with it. It leaves the database only in a backup or a copy of the whole society.
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
        """Run `sql` once per row. It has no result and may run together with the next statement."""
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


ROWS_PER_INSERT = (64, 8, 4, 3, 2, 1)
"""Rows of one INSERT. Few sizes, so that every statement stays prepared."""


def insert(db: Connection, into: str, rows: Sequence[Sequence[Any]]) -> None:
    """Insert `rows` into `into`, a table with its columns: `events (at, kind)`.

    One INSERT of many rows holds the interpreter lock once; `executemany` takes it once per row. A connection with a
    faster way has a method `insert_rows`.
    """
    if len(rows) == 1:
        db.execute(_statement(into, len(rows[0]), 1), rows[0])
        return
    if rows and (insert_rows := getattr(db, "insert_rows", None)):
        insert_rows(into, rows)
        return
    done = 0
    for size in ROWS_PER_INSERT if rows else ():
        while len(rows) - done >= size:
            part = rows[done : done + size]
            db.execute(_statement(into, len(part[0]), size), tuple(chain.from_iterable(part)))
            done += size


@cache
def _statement(into: str, width: int, size: int) -> str:
    row = f"({', '.join('?' * width)})"
    return f"INSERT INTO {into} VALUES {', '.join([row] * size)}"


def read_secret(db: Connection) -> bytes:
    """Return the secret; random bytes if an old database, opened for reading only, has none."""
    value = get_meta(db, "secret")
    return value.encode() if value is not None else os.urandom(32)


def make_secret(db: Connection) -> bytes:
    """Return the secret; create it if it is missing. Call it when a store opens, outside any other transaction."""
    db.execute("INSERT INTO meta (key, value) VALUES ('secret', ?) ON CONFLICT (key) DO NOTHING", (new_secret(),))
    return read_secret(db)
