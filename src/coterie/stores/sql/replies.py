"""Answers unwind like a call stack: the text that ends a turn goes to whoever asked for it.

Answers that are too long for a message: the beginning as text, the whole as a file.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from coterie.artifacts import Artifact
from coterie.errors import CoterieError, Refused, StoreUnavailable
from coterie.messages import MAX_PAYLOAD_BYTES, SYSTEM, seal
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.rows import to_payload
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import Reply
from coterie.turn_store import Asked

log = logging.getLogger(__name__)

SHOWN = 32_000
"""Characters of a text that is too long, in its message and in the history."""
FILENAME = "answer.md"
_ROOM = 4_096
"""Bytes of a payload that are left for what stands beside the text."""
_MOST_BYTES_OF_ONE = 6
"""A control character in JSON, the longest there is."""
Keep = Callable[[bytes, str], Awaitable[Artifact]]
"""Stores a file durably; what it is called comes second."""


def is_too_long(text: str) -> bool:
    """True if no message can carry `text`."""
    limit = MAX_PAYLOAD_BYTES - _ROOM
    return len(text) * _MOST_BYTES_OF_ONE > limit and len(msgspec.json.encode(text)) > limit


def shortened(text: str, note: str) -> str:
    """The beginning of `text`, with a note on how much is missing."""
    return f"{text[:SHOWN]}\n\n[Shortened: these are the first {SHOWN:,} of {len(text):,} characters. {note}]"


async def fit_answer(text: str, keep: Keep | None) -> tuple[str, tuple[dict[str, Any], ...]]:
    """`text` as a message can carry it, and the attachments that hold the whole, if that is too long.

    The file is durable before the message that names it. If it cannot be stored, the text says so.
    """
    if not is_too_long(text):
        return text, ()
    if keep is None:
        return shortened(text, "The rest was not kept."), ()
    try:
        artifact = await keep(text.encode(), FILENAME)
    except StoreUnavailable:
        raise  # it comes back, and is waited for
    except (CoterieError, OSError) as error:
        log.warning("an answer of %d characters cannot be kept whole: %s", len(text), error)
        return shortened(text, f"The rest could not be kept: {str(error)[:200]}"), ()
    return shortened(text, f"The whole is in the file {FILENAME}, artifactRef {artifact.ref}."), (artifact.to_wire(),)


_COLUMNS = "m.id, m.sender, m.automatic, m.in_reply_to, m.cause, m.hops"
# A turn that ended with words has answered its messages. The rows of a turn stand together, so the next turn's first
# message bounds the search.
_ANSWERED = """
SELECT q.seq, EXISTS (
    SELECT 1 FROM history a WHERE a.agent_id = q.agent_id AND a.turn_no = q.turn_no AND a.seq > q.seq
       AND a.seq < (SELECT n.seq FROM history n WHERE n.agent_id = q.agent_id AND n.turn_no > q.turn_no
                       AND n.message_id IS NOT NULL ORDER BY n.turn_no, n.seq LIMIT 1)
       AND a.role = 'assistant' AND a.calls IS NULL)
  FROM history q WHERE q.message_id = ?
"""


def answer(
    db: Connection, post: UnitOfWork, agent_id: str, turn_no: int, reply: Reply, *, only: Asked | None, spoke: bool
) -> tuple[str, ...]:
    """Send `reply` to each asker of the turn, once, as the answer to their newest unanswered message; what was sent.

    `only`: nobody else has asked. `spoke`: the turn may have sent somebody the same words itself.
    """
    if not reply.text.strip():
        return ()
    sent = []
    for asked in (only,) if only else askers(db, agent_id, turn_no).values():
        if reply.trouble:
            sent.append(_send(post, SYSTEM, asked, {"text": reply.text, "problem": {"agent": agent_id}}))
        elif not (spoke and _told_already(db, agent_id, asked.sender, turn_no, reply.text)):
            files = {"attachments": [*reply.attachments]} if reply.attachments else {}
            sent.append(_send(post, agent_id, asked, {"text": reply.text, **files}, stopped=reply.stopped))
    return tuple(sent)


def _send(post: UnitOfWork, sender: str, asked: Asked, payload: dict[str, object], *, stopped: bool = False) -> str:
    address: dict[str, Any] = {"sender": sender, "to": asked.sender, "in_reply_to": asked.id, "cause": asked.id}
    try:
        envelope = seal(**address, payload=payload)
    except Refused as refusal:
        # A turn must end whatever the text is. Where it comes from the handler, it fits already.
        cut = shortened(str(payload["text"]), f"A message cannot carry the rest: {refusal.message[:200]}")
        envelope = seal(**address, payload={"text": cut})
    try:
        post.accept(envelope, hops=asked.hops + 1, reply_checked=True, automatic=True, stopped=stopped)
    except Refused as refusal:
        # Nobody may be left without knowing: what cannot be answered is kept as a dead letter.
        post.bury_unsent(envelope, refusal.code)
    return envelope.id


def askers(db: Connection, agent_id: str, turn_no: int) -> dict[str, Asked]:
    """Who asked, each with the message that the answer replies to: the newest one that is not answered yet.

    A message of this turn is newer than any that a late answer of another agent leads back to.
    """
    rows = db.execute(
        f"SELECT {_COLUMNS} FROM history h JOIN messages m ON m.id = h.message_id"
        " WHERE h.agent_id = ? AND h.turn_no = ? AND h.message_id IS NOT NULL ORDER BY h.seq",
        (agent_id, turn_no),
    ).fetchall()
    asked: dict[str, dict[str, Asked]] = {}
    direct: dict[str, Asked] = {}
    for message in (Asked(*row) for row in rows):
        if behind := _asker_behind(db, agent_id, message):
            asked.setdefault(behind.sender, {})[behind.id] = behind
            if behind is message:
                direct[behind.sender] = message
    return {
        asker: direct.get(asker) or _newest_unanswered(db, [*messages.values()])
        for asker, messages in asked.items()
        if asker not in (agent_id, SYSTEM)
    }


def _newest_unanswered(db: Connection, messages: list[Asked]) -> Asked:
    """Of messages of earlier turns. If all are answered, the newest: its sender was told to wait, perhaps."""
    if len(messages) == 1:
        return messages[0]

    def rank(message: Asked) -> tuple[bool, int]:
        row = db.execute(_ANSWERED, (message.id,)).fetchone()
        return (not row[1], row[0]) if row else (False, 0)

    return max(messages, key=rank)


def _asker_behind(db: Connection, agent_id: str, message: Asked) -> Asked | None:
    """An explicit message itself; behind an automatic answer, the message that made this agent ask."""
    seen: set[str] = set()
    found: Asked | None = message
    while found is not None and found.automatic:
        if found.id in seen:
            return None
        seen.add(found.id)
        request = _message(db, found.in_reply_to)
        found = _message(db, request.cause) if request and request.sender == agent_id else None
    return found


def _message(db: Connection, message_id: str | None) -> Asked | None:
    row = db.execute(f"SELECT {_COLUMNS} FROM messages m WHERE m.id = ?", (message_id,)).fetchone()
    return Asked(*row) if row else None


def _told_already(db: Connection, agent_id: str, asker: str, turn_no: int, text: str) -> bool:
    """A model that has just sent the same words with `send_message` need not say them twice."""
    rows = db.execute(
        # All plans of the turn: what begins with its number and a stroke, behind which the next letter is "0".
        "SELECT id, CAST(payload AS BLOB) FROM messages WHERE sender = ? AND plan >= ? AND plan < ? AND recipient = ?",
        (agent_id, f"{turn_no}/", f"{turn_no}0", asker),
    ).fetchall()
    return any(to_payload(message_id, payload).get("text") == text for message_id, payload in rows)
