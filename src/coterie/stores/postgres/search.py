"""Words looked for in what was said."""

from __future__ import annotations

from coterie.messages import Message
from coterie.store import Page
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.records import patterns
from coterie.stores.sql.rows import MESSAGE, to_message

_LOOKED_AT = f"""
SELECT {MESSAGE} FROM messages
 WHERE (?1 IS NULL OR seq < ?1) AND (?2 IS NULL OR ?2 IN (sender, recipient)) AND said(payload) ILIKE ALL (?3)
 ORDER BY seq DESC LIMIT ?4
"""
_ANY = "%"
READ_AT_ONCE = 500


def search(db: Connection, words: str, page: Page, agent_id: str | None) -> list[Message]:
    wanted = patterns(words)
    if not wanted:
        return []
    if words.isascii() or words.lower() == words.upper():
        rows = db.execute(_LOOKED_AT, (page.before, agent_id, wanted, page.limit))
        return [to_message(row) for row in rows]
    return _folded(db, words.casefold().split()[: len(wanted)], page, agent_id)


def _folded(db: Connection, words: list[str], page: Page, agent_id: str | None) -> list[Message]:
    """Which letters are the same in another case depends on how the database was made; Python knows them all."""
    found: list[Message] = []
    before = page.before
    while len(found) < page.limit:
        read = [to_message(row) for row in db.execute(_LOOKED_AT, (before, agent_id, [_ANY], READ_AT_ONCE))]
        found += [one for one in read if all(word in str(one.payload.get("text", "")).casefold() for word in words)]
        if len(read) < READ_AT_ONCE:
            break
        before = read[-1].seq
    return found[: page.limit]
