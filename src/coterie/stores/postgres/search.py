"""Search for words on PostgreSQL, and the table with the grams of `stores/sql/text_index.py`.

The grams are the lexemes of a `tsvector` with a GIN index: part of every server, without an extension, and able to
look up the beginning of a gram.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coterie.messages import Message
from coterie.store import Page
from coterie.stores.postgres.connection import SET_TIMEOUTS, PgConnection
from coterie.stores.sql.queries import json_patterns, like_patterns, search_words
from coterie.stores.sql.rows import LAST_SEQ, MESSAGE_COLUMNS, to_message
from coterie.stores.sql.text_index import ANY_WORDS, POSITION, Query, add_to_index, make_query, read_batch, scan_start

OPEN_TRANSACTIONS_MS = 60_000
"""Longer than any transaction. A running transaction may still add messages with lower numbers than visible ones."""
SEARCH_PAGE_ROWS = 500
_ADD = """
INSERT INTO message_grams (rowid, grams) VALUES (:seq, array_to_tsvector(string_to_array(:grams, ' ')))
"""
# One process indexes at a time. The trigger for deleted messages waits for this lock, too.
_LOCK_POSITION = f"SELECT value FROM meta WHERE key = '{POSITION}' FOR UPDATE SKIP LOCKED"
# The index can be built again, so the commit need not be durable.
_BEGIN = f"""
BEGIN; {SET_TIMEOUTS} SET LOCAL synchronous_commit = off;
INSERT INTO meta (key, value) VALUES ('{POSITION}', '0') ON CONFLICT DO NOTHING
"""
# The function decodes the payload and is slow. The first condition rules out most messages.
_CONTAINS = "payload ILIKE ALL (:json_patterns) AND said(payload) ILIKE ALL (:patterns)"
_SCAN = f"""
SELECT {MESSAGE_COLUMNS} FROM messages
 WHERE seq > :after AND seq < :before AND (:agent_id IS NULL OR :agent_id IN (sender, recipient))
   AND {_CONTAINS}
 ORDER BY seq DESC LIMIT :limit
"""
_LOOK_UP = f"""
SELECT {MESSAGE_COLUMNS} FROM messages
 WHERE seq IN (SELECT rowid FROM message_grams WHERE grams @@ :query::tsquery AND rowid < :before)
   AND (:agent_id IS NULL OR :agent_id IN (sender, recipient)) AND {_CONTAINS}
 ORDER BY seq DESC LIMIT :limit
"""
_ANY_TEXT = "%"


def search(db: PgConnection, words: str, page: Page, agent_id: str | None) -> list[Message]:
    """Messages whose text contains all the words, in any case, newest first. Call it in a snapshot transaction."""
    patterns = like_patterns(words)
    if not patterns:
        return []
    before, after = page.before or LAST_SEQ, scan_start(db, page.before)
    query = _tsquery(make_query(search_words(words), agent_id))
    is_caseless = words.isascii() or words.lower() == words.upper()

    def read(sql: str, before: int, limit: int) -> list[Message]:
        parameters: dict[str, Any] = {"agent_id": agent_id, "before": before, "after": after, "query": query}
        if is_caseless:
            compared = {"patterns": patterns, "json_patterns": json_patterns(words)}
            return [to_message(row) for row in db.execute(sql, parameters | compared | {"limit": limit})]
        parameters |= {"patterns": [_ANY_TEXT], "json_patterns": [_ANY_TEXT], "limit": SEARCH_PAGE_ROWS}
        return _compare_casefold(
            lambda before: db.execute(sql, parameters | {"before": before}).fetchall(),
            search_words(words),
            before,
            limit,
        )

    found = read(_SCAN, before, page.limit)
    if len(found) < page.limit and after > 0:
        found += read(_LOOK_UP, min(before, after + 1), page.limit - len(found))
    return found


def _compare_casefold(
    read: Callable[[int], list[tuple[object, ...]]], words: list[str], before: int, limit: int
) -> list[Message]:
    """Compare in Python: PostgreSQL's case folding depends on the database's locale."""
    found: list[Message] = []
    while len(found) < limit:
        messages = [to_message(row) for row in read(before)]
        for message in messages:
            text = str(message.payload.get("text", "")).casefold()
            if all(word in text for word in words):
                found.append(message)
        if len(messages) < SEARCH_PAGE_ROWS:
            break
        before = messages[-1].seq
    return found[:limit]


def _tsquery(query: Query) -> str:
    terms = [f"'{gram}'" for gram in query.grams] + [f"'{beginning}':*" for beginning in query.beginnings]
    expression = f"(({' & '.join(terms)}) | '{ANY_WORDS}')"
    return f"'{query.agent}' & {expression}" if query.agent else expression


def index_next(db: PgConnection, now: int) -> bool:
    """Index the next messages in a transaction of its own. False: nothing to index, or another process does it."""
    db.execute_now(_BEGIN)
    row = db.execute(_LOCK_POSITION).fetchone()
    batch = read_batch(db, int(row[0]), now - OPEN_TRANSACTIONS_MS) if row else None
    if batch:
        add_to_index(db, _ADD, batch)
    db.execute_now("COMMIT")
    return batch is not None
