"""A connection as the shared transitions see it: what `sqlite3` has, and what the PostgreSQL engine imitates.

SQL is written as SQLite reads it: `?`, `?1`. What only several writers need stands in a comment that begins with a
plus, `/*+ FOR UPDATE */`: SQLite, with its one writer, passes over it, and PostgreSQL's dialect uncovers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol


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
