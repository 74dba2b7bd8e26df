"""Words looked for in what was said."""

from __future__ import annotations

import sqlite3

import msgspec

from coterie.messages import Message
from coterie.store import Page
from coterie.stores.sql.records import patterns
from coterie.stores.sql.rows import MESSAGE, to_message

_TEXT = "coalesce(json_extract(payload, '$.text'), '')"
_FOLDED = f"folded({_TEXT})"
_LOOKED_AT = f"""
SELECT {MESSAGE} FROM messages WHERE (?1 IS NULL OR seq < ?1) AND (?2 IS NULL OR ?2 IN (sender, recipient))
"""
_NOT_IN = "AND NOT EXISTS (SELECT 1 FROM json_each(?3) WHERE"
_NEWEST = "NOT LIKE value ESCAPE '\\') ORDER BY seq DESC LIMIT ?4"
_SEARCH = f"{_LOOKED_AT} {_NOT_IN} {_TEXT} {_NEWEST}"
_SEARCH_FOLDED = f"{_LOOKED_AT} {_NOT_IN} {_FOLDED} {_NEWEST}"


def search(db: sqlite3.Connection, words: str, page: Page, agent_id: str | None) -> list[Message]:
    wanted = patterns(words)
    if not wanted:
        return []
    sql = _SEARCH
    if not words.isascii() and words.lower() != words.upper():
        # The engine's own LIKE knows the two cases of a to z only, and is faster than asking Python for each row.
        db.create_function("folded", 1, str.casefold, deterministic=True)
        sql = _SEARCH_FOLDED
    rows = db.execute(sql, (page.before, agent_id, msgspec.json.encode(wanted).decode(), page.limit))
    return [to_message(row) for row in rows]
