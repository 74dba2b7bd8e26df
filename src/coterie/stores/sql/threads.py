"""The person's conversations: parts of them, how far they were read, and their end."""

from __future__ import annotations

from coterie.errors import Refused
from coterie.messages import Message
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.rows import MESSAGE, to_message

Place = tuple[int, int]
_LAST: Place = (1 << 62, 1 << 62)

# In the order in which things were said to somebody: a message is in its thread from its delivery on.
_UP_TO = f"""
SELECT {MESSAGE} FROM messages
 WHERE thread = ? AND delivered_at IS NOT NULL AND (delivered_at, seq) <= (?, ?)
 ORDER BY delivered_at DESC, seq DESC LIMIT ?
"""
_BEHIND = f"""
SELECT {MESSAGE} FROM messages
 WHERE thread = ? AND delivered_at IS NOT NULL AND (delivered_at, seq) > (?, ?)
 ORDER BY delivered_at, seq LIMIT ?
"""
_OPEN = """
question = 1 AND answered_by IS NULL AND state IN ('pending', 'taken')
"""
_UNREAD = "SELECT count(*) FROM messages WHERE thread = ? AND sender <> 'user' AND state = 'pending'"


def part(
    db: Connection, agent_id: str, before: str | None, after: str | None, around: str | None, limit: int
) -> list[Message]:
    if after is not None:
        return _behind(db, agent_id, position_of(db, agent_id, after), limit)
    if before is not None:
        delivered_at, seq = position_of(db, agent_id, before)
        return _up_to(db, agent_id, (delivered_at, seq - 1), limit)
    if around is not None:
        place = position_of(db, agent_id, around)
        # What one side lacks, the other may have: the message named stands in the middle where it can.
        up_to, behind = _up_to(db, agent_id, place, limit), _behind(db, agent_id, place, limit)
        first = max(limit - limit // 2, limit - len(behind))
        return (up_to[-first:] + behind)[:limit]
    return _up_to(db, agent_id, _LAST, limit)


def unread(db: Connection, agent_id: str) -> int:
    (count,) = db.execute(_UNREAD, (agent_id,)).fetchone()
    return int(count)


def open_questions(db: Connection, agent_id: str | None, limit: int) -> list[Message]:
    rows = db.execute(
        f"SELECT {MESSAGE} FROM messages WHERE {_OPEN} AND (?1 IS NULL OR sender = ?1)"
        " ORDER BY delivered_at DESC, seq DESC LIMIT ?2",
        (agent_id, limit),
    )
    return [to_message(row) for row in rows]


def count_open_questions(db: Connection) -> int:
    return int(db.execute(f"SELECT count(*) FROM messages WHERE {_OPEN}").fetchone()[0])


def _up_to(db: Connection, agent_id: str, place: Place, limit: int) -> list[Message]:
    return [to_message(row) for row in db.execute(_UP_TO, (agent_id, *place, limit))][::-1]


def _behind(db: Connection, agent_id: str, place: Place, limit: int) -> list[Message]:
    return [to_message(row) for row in db.execute(_BEHIND, (agent_id, *place, limit))]


def position_of(db: Connection, thread: str | None, message_id: str) -> Place:
    row = db.execute("SELECT delivered_at, seq, thread FROM messages WHERE id = ?", (message_id,)).fetchone()
    if row is None or row[0] is None or row[2] != thread:
        raise Refused("unknown_message", f"there is no message {message_id!r} in this conversation")
    return int(row[0]), int(row[1])
