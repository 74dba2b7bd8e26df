"""Replies: the text that ends a turn is sent to every asker of the turn.

A text that is too long for a message is sent as its beginning, with the whole text as a file.
"""

from __future__ import annotations

import logging
from typing import Any

from coterie.errors import Refused
from coterie.messages import SYSTEM, make_envelope, shorten
from coterie.stores.sql.rows import Connection, to_payload
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import SendReply
from coterie.turn_store import ReplyTarget

log = logging.getLogger(__name__)


_COLUMNS = "m.id, m.sender, m.automatic, m.in_reply_to, m.cause, m.hops"
# A turn that ended with a text has answered its messages. The rows of a turn are adjacent, so the first message of the
# next turn bounds the search.
_ANSWERED = """
SELECT q.seq, EXISTS (
    SELECT 1 FROM history a WHERE a.agent_id = q.agent_id AND a.turn_no = q.turn_no AND a.seq > q.seq
       AND a.seq < (SELECT n.seq FROM history n WHERE n.agent_id = q.agent_id AND n.turn_no > q.turn_no
                       AND n.message_id IS NOT NULL ORDER BY n.turn_no, n.seq LIMIT 1)
       AND a.role = 'assistant' AND a.calls IS NULL)
  FROM history q WHERE q.message_id = ?
"""


def send_replies(
    db: Connection,
    uow: UnitOfWork,
    agent_id: str,
    turn_no: int,
    reply: SendReply,
    *,
    only: ReplyTarget | None,
    may_have_sent: bool,
) -> tuple[str, ...]:
    """Send `reply` once to each asker, as the answer to its newest unanswered message; return the message ids.

    `only`: the only asker, if it is known. `may_have_sent`: the turn may have sent the same text with a tool.
    """
    if not reply.text.strip():
        return ()
    sent = []
    for target in (only,) if only else find_askers(db, agent_id, turn_no).values():
        if reply.is_error:
            sent.append(_send(uow, SYSTEM, target, {"text": reply.text, "problem": {"agent": agent_id}}))
        elif not (may_have_sent and _was_sent(db, agent_id, target.sender, turn_no, reply.text)):
            files = {"attachments": [*reply.attachments]} if reply.attachments else {}
            sent.append(_send(uow, agent_id, target, {"text": reply.text, **files}, stopped=reply.is_partial))
    return tuple(sent)


def _send(
    uow: UnitOfWork, sender: str, target: ReplyTarget, payload: dict[str, object], *, stopped: bool = False
) -> str:
    address: dict[str, Any] = {"sender": sender, "to": target.sender, "in_reply_to": target.id, "cause": target.id}
    try:
        envelope = make_envelope(**address, payload=payload)
    except Refused as refusal:
        # A turn must end with any text. `fit_answer` has shortened texts of the handler already.
        text = shorten(str(payload["text"]), f"A message cannot carry the rest: {refusal.message[:200]}")
        envelope = make_envelope(**address, payload={"text": text})
    try:
        uow.accept(envelope, hops=target.hops + 1, reply_checked=True, automatic=True, stopped=stopped)
    except Refused as refusal:
        # A reply that cannot be delivered must not get lost: it becomes a dead letter.
        uow.store_dead_letter(envelope, refusal.code)
    return envelope.id


def find_askers(db: Connection, agent_id: str, turn_no: int) -> dict[str, ReplyTarget]:
    """Return, per asker of the turn, the newest message that is not answered yet.

    A message of this turn is newer than any request of an earlier turn that a late answer leads back to.
    """
    rows = db.execute(
        f"SELECT {_COLUMNS} FROM history h JOIN messages m ON m.id = h.message_id"
        " WHERE h.agent_id = ? AND h.turn_no = ? AND h.message_id IS NOT NULL ORDER BY h.seq",
        (agent_id, turn_no),
    ).fetchall()
    requests: dict[str, dict[str, ReplyTarget]] = {}
    direct: dict[str, ReplyTarget] = {}
    for message in (ReplyTarget(*row) for row in rows):
        if request := _original_request(db, agent_id, message):
            requests.setdefault(request.sender, {})[request.id] = request
            if request is message:
                direct[request.sender] = message
    return {
        asker: direct.get(asker) or _newest_unanswered(db, [*messages.values()])
        for asker, messages in requests.items()
        if asker not in (agent_id, SYSTEM)
    }


def _newest_unanswered(db: Connection, messages: list[ReplyTarget]) -> ReplyTarget:
    """Of requests of earlier turns. If all are answered, the newest: its answer may have been `please wait`."""
    if len(messages) == 1:
        return messages[0]

    def rank(message: ReplyTarget) -> tuple[bool, int]:
        row = db.execute(_ANSWERED, (message.id,)).fetchone()
        return (not row[1], row[0]) if row else (False, 0)

    return max(messages, key=rank)


def _original_request(db: Connection, agent_id: str, message: ReplyTarget) -> ReplyTarget | None:
    """Return an explicit message itself; for an automatic answer, the message that made this agent ask."""
    seen: set[str] = set()
    current: ReplyTarget | None = message
    while current is not None and current.automatic:
        if current.id in seen:
            return None
        seen.add(current.id)
        asked = _read_message(db, current.in_reply_to)
        current = _read_message(db, asked.cause) if asked and asked.sender == agent_id else None
    return current


def _read_message(db: Connection, message_id: str | None) -> ReplyTarget | None:
    row = db.execute(f"SELECT {_COLUMNS} FROM messages m WHERE m.id = ?", (message_id,)).fetchone()
    return ReplyTarget(*row) if row else None


def _was_sent(db: Connection, agent_id: str, asker: str, turn_no: int, text: str) -> bool:
    """True if this turn sent the same text to `asker` with `send_message`."""
    rows = db.execute(
        # All plans of the turn: their names begin with its number and "/"; the next character after "/" is "0".
        "SELECT id, CAST(payload AS BLOB) FROM messages WHERE sender = ? AND plan >= ? AND plan < ? AND recipient = ?",
        (agent_id, f"{turn_no}/", f"{turn_no}0", asker),
    ).fetchall()
    return any(to_payload(message_id, payload).get("text") == text for message_id, payload in rows)
