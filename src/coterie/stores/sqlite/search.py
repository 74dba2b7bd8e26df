"""Search for words on SQLite, and the FTS5 table with the grams of `stores/sql/text_index.py`.

The table stores no texts (`content=''`) and no positions (`detail=none`). SQLite would merge its segments within the
insert that makes one too many, for up to 80 ms, so they are merged here in small steps.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from coterie.messages import Message
from coterie.store import Page
from coterie.stores.sql.jobs import Result
from coterie.stores.sql.queries import like_patterns, search_words
from coterie.stores.sql.rows import LAST_SEQ, MESSAGE_COLUMNS, to_message
from coterie.stores.sql.text_index import (
    ANY_WORDS,
    MERGE,
    MERGED_PAGES,
    Batch,
    Query,
    Removal,
    add_to_index,
    make_grams,
    make_query,
    remove_queued,
    scan_start,
)

SAMPLED_MESSAGES = 64
FREQUENT_PART = 0.125
"""A gram that more of the sampled messages have is looked up only if all grams of the search are as frequent."""
_FIRST_AND_LAST = "SELECT (SELECT min(seq) FROM messages), (SELECT max(seq) FROM messages)"
_SAMPLE = """
SELECT sender, recipient, CAST(payload AS BLOB) FROM json_each(:positions) AS position
  JOIN messages ON messages.seq = (SELECT min(seq) FROM messages WHERE seq >= position.value)
"""
_ADD = "INSERT INTO message_grams (rowid, grams) VALUES (:seq, :grams)"

# No pattern fails: the text contains all words.
_CONTAINS = """
NOT EXISTS (SELECT 1 FROM json_each(:patterns)
             WHERE coalesce(json_extract(payload, '$.text'), '') NOT LIKE value ESCAPE '\\')
"""
# SQLite's LIKE ignores case for ASCII letters only, but is faster than a Python call for each row.
_CONTAINS_CASEFOLD = """
NOT EXISTS (SELECT 1 FROM json_each(:patterns)
             WHERE casefold(coalesce(json_extract(payload, '$.text'), '')) NOT LIKE value ESCAPE '\\')
"""
_IS_OF_AGENT = "(:agent_id IS NULL OR :agent_id IN (sender, recipient))"
_SCAN = f"""
SELECT {MESSAGE_COLUMNS} FROM messages WHERE seq > :after AND seq < :before AND {_IS_OF_AGENT} AND {_CONTAINS}
 ORDER BY seq DESC LIMIT :limit
"""
_LOOK_UP = f"""
SELECT {MESSAGE_COLUMNS} FROM message_grams CROSS JOIN messages ON messages.seq = message_grams.rowid
 WHERE message_grams MATCH :query AND message_grams.rowid < :before AND {_IS_OF_AGENT} AND {_CONTAINS}
 ORDER BY message_grams.rowid DESC LIMIT :limit
"""
_SCAN_CASEFOLD = f"""
SELECT {MESSAGE_COLUMNS} FROM messages WHERE seq > :after AND seq < :before AND {_IS_OF_AGENT} AND {_CONTAINS_CASEFOLD}
 ORDER BY seq DESC LIMIT :limit
"""
_LOOK_UP_CASEFOLD = f"""
SELECT {MESSAGE_COLUMNS} FROM message_grams CROSS JOIN messages ON messages.seq = message_grams.rowid
 WHERE message_grams MATCH :query AND message_grams.rowid < :before AND {_IS_OF_AGENT} AND {_CONTAINS_CASEFOLD}
 ORDER BY message_grams.rowid DESC LIMIT :limit
"""


def search(db: sqlite3.Connection, words: str, page: Page, agent_id: str | None) -> list[Message]:
    """Messages whose text contains all the words, in any case, newest first. Call it in a snapshot transaction."""
    patterns = like_patterns(words)
    if not patterns:
        return []
    scan, look_up = _SCAN, _LOOK_UP
    if not words.isascii() and words.lower() != words.upper():
        db.create_function("casefold", 1, str.casefold, deterministic=True)
        scan, look_up = _SCAN_CASEFOLD, _LOOK_UP_CASEFOLD
    before, after = page.before or LAST_SEQ, scan_start(db, page.before)
    parameters = {
        "patterns": msgspec.json.encode(patterns).decode(),
        "agent_id": agent_id,
        "before": before,
        "after": after,
        "limit": page.limit,
    }
    found = [to_message(row) for row in db.execute(scan, parameters)]
    if len(found) < page.limit and after > 0:
        query = _without_frequent(db, make_query(search_words(words), agent_id))
        parameters |= {"before": min(before, after + 1), "limit": page.limit - len(found)}
        parameters["query"] = _match_expression(query)
        found += [to_message(row) for row in db.execute(look_up, parameters)]
    return found


def _without_frequent(db: sqlite3.Connection, query: Query) -> Query:
    """Leave out the grams that a great part of all messages has, if there are others.

    FTS5 reads the lists of all grams side by side: without this, 600 ms for one hit among two million messages. A
    sample of old and new messages shows which grams are frequent. A wrong guess costs only time, because texts are
    compared.
    """
    first, last = db.execute(_FIRST_AND_LAST).fetchone()
    if first is None or len(query.grams) < 2:
        return query
    positions = [first + (last - first) * number // SAMPLED_MESSAGES for number in range(SAMPLED_MESSAGES)]
    sample = [
        set(make_grams(*row).split())
        for row in db.execute(_SAMPLE, {"positions": msgspec.json.encode(positions).decode()})
    ]
    most = FREQUENT_PART * len(sample)
    rare = [gram for gram in query.grams if sum(gram in grams for grams in sample) <= most]
    return query._replace(grams=rare or query.grams)


def _match_expression(query: Query) -> str:
    terms = [f'"{gram}"' for gram in query.grams] + [f'"{beginning}" *' for beginning in query.beginnings]
    expression = f'(({" AND ".join(terms)}) OR "{ANY_WORDS}")'
    return f'"{query.agent}" AND {expression}' if query.agent else expression


def index_batch(db: sqlite3.Connection, batch: Batch) -> Result:
    return Result(add_to_index(db, _ADD, batch), needs_flush=False)


def remove_batch(db: sqlite3.Connection, removals: Sequence[Removal]) -> Result:
    remove_queued(db, removals)
    return Result(None, needs_flush=False)


def merge_segments(db: sqlite3.Connection) -> Result:
    """Do a part of the merging that the last batches made necessary. The result is True if there may be more."""
    before = db.total_changes
    db.execute(MERGE, {"pages": MERGED_PAGES})
    # The statement itself counts as one change; SQLite's documentation recommends this check.
    return Result(db.total_changes - before >= 2, needs_flush=False)
