"""Many rows in one statement.

`executemany` goes through Python and the interpreter lock once a row; one INSERT of 64 rows does so once, which lowers
the cost of a batch and leaves the event loop its processor meanwhile. An engine may have a better way still: its
connection has a method `insert_rows` then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

from coterie.stores.sql.connection import Connection

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
