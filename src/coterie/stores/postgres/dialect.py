"""The shared SQL, which is written as SQLite reads it, in the words of PostgreSQL."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

import msgspec

CLOCK = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
"""The server's time in milliseconds."""
_ONLY_HERE = re.compile(r"/\*\+(.*?)\*/", re.DOTALL)
_INTO = re.compile(r"(\w+) \(([^)]*)\)")
_NUMBERED = re.compile(r"\?(\d+)")
# There is no text here that is no text.
_FROM_JSON = "INSERT INTO {} SELECT {} FROM json_populate_recordset(NULL::{}, ?)"
_encode = msgspec.json.Encoder().encode
_SAME = {"CAST(payload AS BLOB)": "payload", "CAST(m.payload AS BLOB)": "m.payload"}


def bound(sql: str, parameters: Any) -> tuple[bytes, Any]:
    """The statement and its values as psycopg wants them."""
    text, numbered = translated(sql)
    if not numbered:
        return text, parameters
    return text, {f"p{n}": value for n, value in enumerate(parameters, 1)}


@lru_cache(maxsize=1024)
def translated(sql: str) -> tuple[bytes, bool]:
    """With psycopg's placeholders; whether they are numbered."""
    text = _ONLY_HERE.sub(r"\1", sql).replace("%", "%%")
    for theirs, ours in _SAME.items():
        text = text.replace(theirs, ours)
    text, numbered = _NUMBERED.subn(r"%(p\1)s", text)
    return (text if numbered else text.replace("?", "%s")).encode(), bool(numbered)


@cache
def as_json(into: str) -> tuple[str, Sequence[str]]:
    """Inserts rows that come as one JSON text into a table with its columns; their names."""
    found = _INTO.fullmatch(into)
    assert found, into  # noqa: S101
    table, columns = found.groups()
    return _FROM_JSON.format(into, columns, table), columns.replace(" ", "").split(",")


def json_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """True and false are numbers here."""
    return _encode(
        [
            {name: int(value) if value.__class__ is bool else value for name, value in zip(columns, row, strict=True)}
            for row in rows
        ]
    ).decode()
