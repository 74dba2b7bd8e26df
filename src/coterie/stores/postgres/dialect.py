"""The shared SQL, which is written as SQLite reads it, in the words of PostgreSQL."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

_ONLY_HERE = re.compile(r"/\*\+(.*?)\*/", re.DOTALL)
_NUMBERED = re.compile(r"\?(\d+)")
# There is no text here that is no text.
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
