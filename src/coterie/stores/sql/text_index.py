"""The text index: finds the messages that may contain some words, without reading all messages.

A message is indexed by its grams: for each position in each of its words, the next three characters, or fewer at the
end of a word. So a text that contains a word of three or more characters has all grams of this word, and a shorter
word is the beginning of a gram. Case and punctuation are removed first. A search compares the text of every message
that the index returns, so the index may return too many messages, but never too few.

Messages are indexed in the background, in the order of `seq` and up to a position stored in `meta`. A search reads
later messages one by one. Deleting a message deletes its entry in the same transaction: on SQLite by
`remove_from_index`, on PostgreSQL by a trigger. If SQLite has to remove many entries, it does so in later transactions.
A search shows none of them meanwhile, because it reads the messages that the index returns.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from coterie.stores.sql.rows import LAST_SEQ, Connection, get_meta, set_meta

POSITION = "text_index_position"
"""Key of `meta`: the last message that is indexed. Without it none is."""
GRAM_CHARS = 3
UNINDEXED_MESSAGES = 1_000
"""Messages that are left to the scan of a search: few enough for some milliseconds."""
SCANNED_MESSAGES = 2_000
"""Newest messages that a search reads first. Frequent words are found there, without the index."""
BATCH_MESSAGES = 100
BATCH_GRAMS = 8_000
"""A batch ends with the message that reaches one of the two limits: a few milliseconds of the writer."""
BATCH_CHARS = 500_000
"""Or this one: the grams of a million characters take 0.7 s, and PostgreSQL ends a transaction that is idle for 3 s."""
MAX_GRAMS = 5_000
"""A message with more grams is returned by every search instead."""
MAX_QUERY_GRAMS = 32
ANY_WORDS = "any_words"
"""The entry of a message that every search returns."""
# Longer than a gram, so that neither is taken for the other.
_AGENT = "agent_"
_PLAIN = {code: "_" for code in range(128) if not chr(code).isalnum() and not chr(code).isspace()}

_SELECT_NEXT = """
SELECT seq, sender, recipient, CAST(payload AS BLOB), created_at FROM messages
 WHERE seq > :after ORDER BY seq LIMIT :limit
"""
_SELECT_STORED = "SELECT seq FROM messages WHERE seq > :after AND seq <= :upto"
# SQLite only
_REMOVE = "INSERT INTO message_grams (message_grams, rowid, grams) VALUES ('delete', :seq, :grams)"
REMOVED_ENTRIES = 50
"""Entries that one transaction removes. If more messages are deleted at once, all are left to later transactions."""
_QUEUE_REMOVAL = """
INSERT INTO index_removals (seq, sender, recipient, payload)
VALUES (:seq, :sender, :recipient, CAST(:payload AS TEXT))
"""
_SELECT_QUEUED = "SELECT seq, sender, recipient, CAST(payload AS BLOB) FROM index_removals ORDER BY seq LIMIT :limit"
_DELETE_QUEUED = "DELETE FROM index_removals WHERE seq = :seq"
MERGED_PAGES = 16
"""Pages of SQLite's index that one step merges: a few milliseconds."""
REMOVALS_PER_PAGE = 3
"""Removed entries that make it necessary to merge about one page."""
MERGE = "INSERT INTO message_grams (message_grams, rank) VALUES ('merge', :pages)"


class DeletedMessage(NamedTuple):
    seq: int
    sender: str
    recipient: str
    payload: bytes | str


class Batch(NamedTuple):
    """The next messages for the index."""

    after: int
    upto: int
    entries: Sequence[tuple[int, str]]
    """`seq` and grams of each."""


class Query(NamedTuple):
    """What every message with the words has in the index."""

    grams: Sequence[str]
    beginnings: Sequence[str]
    """Each is the beginning of at least one gram."""
    agent: str | None


class _TextPayload(msgspec.Struct):
    text: str = ""


def make_grams(sender: str, recipient: str, payload: bytes | str) -> str:
    """Return the entry of a message: its grams and agents, separated by spaces."""
    agents = {_AGENT + _plain(sender), _AGENT + _plain(recipient)}
    words = _plain(_read_text(payload)).split()
    grams = {word[at : at + GRAM_CHARS] for word in words for at in range(len(word))}
    return " ".join(agents | grams if len(grams) <= MAX_GRAMS else agents | {ANY_WORDS})


def make_query(words: Sequence[str], agent_id: str | None) -> Query:
    """`words`: in lower case, without spaces."""
    plain = [_plain(word) for word in words]
    grams = [word[at : at + GRAM_CHARS] for word in plain for at in _gram_positions(len(word))]
    # A beginning of ASCII characters is in a great part of all messages, and takes long to look up.
    beginnings = [word for word in plain if len(word) < GRAM_CHARS and not (grams and word.isascii())]
    return Query([*dict.fromkeys(grams)][:MAX_QUERY_GRAMS], beginnings, _AGENT + _plain(agent_id) if agent_id else None)


def _gram_positions(length: int) -> list[int]:
    """Positions of grams that cover a word. All grams would exclude few messages more, and take longer to look up."""
    last = length - GRAM_CHARS
    return [*range(0, last, GRAM_CHARS), last] if last >= 0 else []


def scan_start(db: Connection, before: int | None) -> int:
    """Return the `seq` after which a search reads all messages up to `before`. The index has all that come before."""
    (last,) = db.execute("SELECT coalesce(max(seq), 0) FROM messages").fetchone()
    return min(read_position(db), int(last) - SCANNED_MESSAGES, (before or LAST_SEQ) - SCANNED_MESSAGES)


def read_position(db: Connection) -> int:
    return int(get_meta(db, POSITION) or 0)


def read_batch(db: Connection, position: int, created_before: int = LAST_SEQ) -> Batch | None:
    """Return the messages that should be indexed next; None if there are few.

    `created_before`: time in ms; the batch ends before the first message that is newer.
    """
    (last,) = db.execute("SELECT coalesce(max(seq), 0) FROM messages").fetchone()
    if last - position <= UNINDEXED_MESSAGES:
        return None
    entries: list[tuple[int, str]] = []
    count = size = 0
    for seq, sender, recipient, payload, created_at in db.execute(
        _SELECT_NEXT, {"after": position, "limit": BATCH_MESSAGES}
    ):
        if created_at >= created_before or count >= BATCH_GRAMS or size >= BATCH_CHARS:
            break
        entries.append((seq, make_grams(sender, recipient, payload)))
        size += len(payload)
        count += entries[-1][1].count(" ")
    return Batch(position, entries[-1][0], entries) if entries else None


def add_to_index(db: Connection, sql: str, batch: Batch) -> bool:
    """Store the entries with `sql`, without those of messages deleted meanwhile. False: another process was faster."""
    if read_position(db) != batch.after:
        return False
    stored = {seq for (seq,) in db.execute(_SELECT_STORED, {"after": batch.after, "upto": batch.upto})}
    db.executemany(sql, [{"seq": seq, "grams": grams} for seq, grams in batch.entries if seq in stored])
    set_meta(db, POSITION, str(batch.upto))
    return True


class Removal(NamedTuple):
    """An entry to remove, with all grams that SQLite's index has of the message."""

    seq: int
    grams: str


def remove_from_index(db: Connection, deleted: Iterable[DeletedMessage]) -> None:
    """Remove the entries of deleted messages, or queue them for `remove_queued`. PostgreSQL has a trigger for it.

    SQLite's index stores no texts: a removal must name the grams of the message.
    """
    if not isinstance(db, sqlite3.Connection):
        return
    position = read_position(db)
    indexed = [one for one in deleted if one.seq <= position]
    if len(indexed) > REMOVED_ENTRIES:
        db.executemany(_QUEUE_REMOVAL, [one._asdict() for one in indexed])
    elif indexed:
        _remove(db, [_to_removal(one) for one in indexed])


def read_queued(db: sqlite3.Connection) -> list[Removal]:
    """The entries that should be removed next."""
    return [_to_removal(DeletedMessage(*row)) for row in db.execute(_SELECT_QUEUED, {"limit": REMOVED_ENTRIES})]


def remove_queued(db: sqlite3.Connection, removals: Sequence[Removal]) -> None:
    """Remove these entries, without those that were removed since `read_queued`."""
    queued = [one for one in removals if db.execute(_DELETE_QUEUED, {"seq": one.seq}).rowcount]
    if queued:
        _remove(db, queued)


def _to_removal(deleted: DeletedMessage) -> Removal:
    return Removal(deleted.seq, make_grams(deleted.sender, deleted.recipient, deleted.payload))


def _remove(db: sqlite3.Connection, removals: Sequence[Removal]) -> None:
    db.executemany(_REMOVE, [one._asdict() for one in removals])
    db.execute(MERGE, {"pages": min(MERGED_PAGES, 1 + len(removals) // REMOVALS_PER_PAGE)})


def _read_text(payload: bytes | str) -> str:
    """The text of a message; empty if the payload cannot be decoded. No search finds such a message."""
    if isinstance(payload, bytes):
        payload = payload.decode(errors="replace")
    try:
        return msgspec.json.decode(payload, type=_TextPayload).text
    except msgspec.DecodeError:
        return ""


def _plain(text: str) -> str:
    return text.casefold().translate(_PLAIN)
