"""The person's conversations: parts of them, how far they were read, and their end."""

from __future__ import annotations

from coterie.agents import ACTIVE
from coterie.errors import Refused
from coterie.messages import PERSON, SYSTEM, Message
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.mailbox import Mailbox
from coterie.stores.sql.post import Post
from coterie.stores.sql.rows import MESSAGE, to_message
from coterie.stores.sql.transitions import set_meta

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
# In the words of the index of what is unread.
_READ = """
UPDATE messages SET state = 'taken', taken_at = ?
 WHERE thread = ? AND sender <> 'user' AND state = 'pending' AND (delivered_at, seq) <= (?, ?)
RETURNING length(payload)
"""
_UNREAD = "SELECT count(*) FROM messages WHERE thread = ? AND sender <> 'user' AND state = 'pending'"
_READ_NOTICES = """
UPDATE messages SET state = 'taken', taken_at = ?
 WHERE recipient = 'user' AND thread IS NULL AND state = 'pending' AND (delivered_at, seq) <= (?, ?)
RETURNING length(payload)
"""
_CLEAR = """
DELETE FROM messages
 WHERE thread = ?1 AND state <> 'delayed' AND NOT (state = 'pending' AND recipient = ?1)
RETURNING recipient, state, length(payload)
"""
_MEMORY = (
    "DELETE FROM summaries WHERE agent_id = ?",
    "DELETE FROM history WHERE agent_id = ?",
    "DELETE FROM calls WHERE agent_id = ?",
    "DELETE FROM plans WHERE agent_id = ?",
)


def part(
    db: Connection, agent_id: str, before: str | None, after: str | None, around: str | None, limit: int
) -> list[Message]:
    if after is not None:
        return _behind(db, agent_id, _place(db, agent_id, after), limit)
    if before is not None:
        delivered_at, seq = _place(db, agent_id, before)
        return _up_to(db, agent_id, (delivered_at, seq - 1), limit)
    if around is not None:
        place = _place(db, agent_id, around)
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


def read(db: Connection, post: Post, thread: str, upto: str) -> int:
    mailbox = post.mailbox(PERSON)
    if thread == SYSTEM:
        rows = db.execute(_READ_NOTICES, (post.stamp, *_place(db, None, upto))).fetchall()
    else:
        rows = db.execute(_READ, (post.stamp, thread, *_place(db, thread, upto))).fetchall()
    for (size,) in rows:
        mailbox.remove(size)
    if rows:
        post.tell("read", thread, {"upto": upto})
    return len(rows)


def clear(db: Connection, post: Post, agent_id: str) -> int:
    """What is delayed, and what waits for the agent, stays: nobody has met it yet.

    What other agents wrote to it stays as well, for their sake, though it remembers none of that. A turn in which it
    got stuck is over.
    """
    mailbox = post.mailbox(agent_id)
    if mailbox.kind == "person":
        raise Refused("unknown_agent", f"{agent_id!r} is a person, not an agent")
    if mailbox.state in ACTIVE:
        raise Refused("agent_busy", f"{agent_id!r} is at work: stop it first, or wait until it is done")
    persons = post.mailbox(PERSON)
    gone = db.execute(_CLEAR, (agent_id,)).fetchall()
    for recipient, state, size in gone:
        if recipient == PERSON and state == "pending":
            persons.remove(size)
    for forget in _MEMORY:
        db.execute(forget, (agent_id,))
    db.execute("UPDATE agents SET cleared_seq = taken_seq WHERE id = ?", (agent_id,))
    mailbox.epoch, mailbox.next_hist_seq, mailbox.why = mailbox.epoch + 1, 1, None
    mailbox.history_version += 1
    if mailbox.state == "blocked":
        _unblock(post, agent_id, mailbox)
    if gone:
        set_meta(db, "pruned", "1")
    post.tell("thread.cleared", agent_id)
    return len(gone)


def _unblock(post: Post, agent_id: str, mailbox: Mailbox) -> None:
    mailbox.state, mailbox.runnable_at = "paused" if mailbox.hold else "idle", None
    if mailbox.waiting and not mailbox.hold:
        mailbox.state, mailbox.runnable_at = "ready", post.now
    post.tell("agent.state", agent_id)


def _up_to(db: Connection, agent_id: str, place: Place, limit: int) -> list[Message]:
    return [to_message(row) for row in db.execute(_UP_TO, (agent_id, *place, limit))][::-1]


def _behind(db: Connection, agent_id: str, place: Place, limit: int) -> list[Message]:
    return [to_message(row) for row in db.execute(_BEHIND, (agent_id, *place, limit))]


def _place(db: Connection, thread: str | None, message_id: str) -> Place:
    row = db.execute("SELECT delivered_at, seq, thread FROM messages WHERE id = ?", (message_id,)).fetchone()
    if row is None or row[0] is None or row[2] != thread:
        raise Refused("unknown_message", f"there is no message {message_id!r} in this conversation")
    return int(row[0]), int(row[1])
