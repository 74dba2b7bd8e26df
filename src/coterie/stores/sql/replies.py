"""Replies: the text that ends a turn is sent to every asker of the turn.

A text that is too long for a message is sent as its beginning, with the whole text as a file.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from coterie.errors import Refused
from coterie.messages import PERSON, SYSTEM, make_envelope, shorten
from coterie.stores.sql import reminders
from coterie.stores.sql.rows import Connection, ending_code, to_payload
from coterie.stores.sql.task_changes import is_stopped
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import SendReply
from coterie.turn_store import ReplyTarget

log = logging.getLogger(__name__)

Asker = tuple[str, str | None]
"""A sender, and the key of the program that sends for the person."""

_COLUMNS = """
messages.id, messages.sender, messages.automatic, messages.in_reply_to, messages.cause, messages.hops,
coalesce(messages.task, messages.id), messages.via, coalesce(messages.option, 0) < 0
"""
"""Columns of `ReplyTarget`."""
# A turn that ended with a text has answered its messages. The rows of a turn are adjacent, so the first message of the
# next turn bounds the search.
_ANSWERED = """
SELECT question.seq, EXISTS (
    SELECT 1 FROM history AS answer
     WHERE answer.agent_id = question.agent_id AND answer.turn_no = question.turn_no AND answer.seq > question.seq
       AND answer.seq < (SELECT later.seq FROM history AS later
                          WHERE later.agent_id = question.agent_id AND later.turn_no > question.turn_no
                            AND later.message_id IS NOT NULL ORDER BY later.turn_no, later.seq LIMIT 1)
       AND answer.role = 'assistant' AND answer.calls IS NULL)
  FROM history AS question WHERE question.message_id = :message_id
"""
_SELECT_TAKEN = f"""
SELECT {_COLUMNS} FROM history JOIN messages ON messages.id = history.message_id
 WHERE history.agent_id = :agent_id AND history.turn_no = :turn_no AND history.message_id IS NOT NULL
 ORDER BY history.seq
"""
_SELECT_MESSAGE = f"SELECT {_COLUMNS} FROM messages WHERE messages.id = :id"
# All plans of a turn: their names begin with its number and "/"; the next character after "/" is "0".
_SELECT_SENT = """
SELECT id, CAST(payload AS BLOB) FROM messages
 WHERE sender = :sender AND plan >= :first_plan AND plan < :end_plan AND recipient = :recipient
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
    open_tasks: Collection[str | None],
) -> tuple[str, ...]:
    """Send `reply` once to each asker, as the answer to its newest unanswered message; return the message ids.

    A partial reply without text marks a stop before the first word. Only the person gets such a mark.

    Each reply belongs to the task of the message that it answers. A stopped task gets none. `only`: the only asker, if
    it is known; not used for an answer to messages with `asks_back`. `may_have_sent`: the turn may have sent the same
    text with a tool. `open_tasks`: not stopped.
    """
    is_mark = reply.is_partial and not reply.text.strip()
    if not reply.text.strip() and not is_mark:
        return ()
    sent = []
    targets = (only,) if only and not reply.asks_back else find_askers(db, agent_id, turn_no, reply.asks_back).values()
    for target in targets:
        if is_mark and target.sender != PERSON:
            continue  # agents get no mark: they would answer it
        if (is_mark or target.task not in open_tasks) and is_stopped(db, target.task):
            continue  # the task itself shows that it was stopped
        if reply.is_error:
            problem = {"agent": agent_id, **reply.problem}
            sent.append(_send(uow, SYSTEM, target, {"text": reply.text, "problem": problem})[0])
        else:
            answer = _find_sent(db, agent_id, target.sender, turn_no, reply.text) if may_have_sent else None
            if answer is None:
                files = {"attachments": [*reply.attachments]} if reply.attachments else {}
                code = ending_code(stopped=reply.is_partial, cut_off=reply.cut_off)
                answer, is_delivered = _send(uow, agent_id, target, {"text": reply.text, **files}, stopped=code)
                sent.append(answer)
                if not is_delivered:
                    continue  # a dead letter is no answer
            if uow.mailbox(target.sender).reminders and not reply.asks_back:
                read = db.execute(reminders.SELECT_READ_TOGETHER, {"id": target.id, "asker": target.sender})
                answered = {target.id, *(message_id for (message_id,) in read.fetchall())}
                reminders.withdraw_answered(db, uow, answered, answer_id=answer, asker=target.sender, answerer=agent_id)
    return tuple(sent)


def _send(
    uow: UnitOfWork, sender: str, target: ReplyTarget, payload: dict[str, object], *, stopped: int = 0
) -> tuple[str, bool]:
    """Return the id of the reply, and False if it became a dead letter."""
    address: dict[str, Any] = {"sender": sender, "to": target.sender, "in_reply_to": target.id, "cause": target.id}
    try:
        envelope = make_envelope(**address, payload=payload)
    except Refused as refusal:
        # A turn must end with any text. `fit_answer` has shortened texts of the handler already.
        text = shorten(str(payload["text"]), f"A message cannot carry the rest: {refusal.message[:200]}")
        envelope = make_envelope(**address, payload={"text": text})
    try:
        uow.accept(
            envelope, hops=target.hops + 1, task=target.task, reply_checked=True, automatic=True, stopped=stopped
        )
    except Refused as refusal:
        # A reply that cannot be delivered must not get lost: it becomes a dead letter.
        uow.store_dead_letter(envelope, refusal.code, target.task)
        return envelope.id, False
    return envelope.id, True


def find_askers(db: Connection, agent_id: str, turn_no: int, asks_back: bool = False) -> dict[Asker, ReplyTarget]:
    """Return, per asker of the turn, the newest message that is not answered yet. Each program is an asker.

    `asks_back`: only the person, and only messages that ask about a call. Otherwise these count only if the person
    has sent no other message in the turn.
    A message of this turn is newer than any request of an earlier turn that a late answer leads back to.
    """
    rows = db.execute(_SELECT_TAKEN, {"agent_id": agent_id, "turn_no": turn_no}).fetchall()
    requests: dict[Asker, dict[str, ReplyTarget]] = {}
    direct: dict[Asker, ReplyTarget] = {}
    for message in (ReplyTarget(*row) for row in rows):
        if asks_back and not message.asks_back:
            continue
        if request := _original_request(db, agent_id, message):
            asker = request.sender, request.via
            requests.setdefault(asker, {})[request.id] = request
            if request is message and (asks_back or not message.asks_back or asker not in direct):
                direct[asker] = message
    return {
        asker: direct.get(asker) or _newest_unanswered(db, [*messages.values()])
        for asker, messages in requests.items()
        if asker[0] not in (agent_id, SYSTEM)
    }


def _newest_unanswered(db: Connection, messages: list[ReplyTarget]) -> ReplyTarget:
    """Return the newest unanswered one of these requests of earlier turns.

    If all are answered, return the newest: its answer may have been `please wait`.
    """
    if len(messages) == 1:
        return messages[0]

    def rank(message: ReplyTarget) -> tuple[bool, int]:
        row = db.execute(_ANSWERED, {"message_id": message.id}).fetchone()
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
    row = db.execute(_SELECT_MESSAGE, {"id": message_id}).fetchone()
    return ReplyTarget(*row) if row else None


def _find_sent(db: Connection, agent_id: str, asker: str, turn_no: int, text: str) -> str | None:
    """The message with the same text that this turn sent to `asker` with `send_message`."""
    rows = db.execute(
        _SELECT_SENT,
        {"sender": agent_id, "first_plan": f"{turn_no}/", "end_plan": f"{turn_no}0", "recipient": asker},
    )
    same = (message_id for message_id, payload in rows if to_payload(message_id, payload).get("text") == text)
    return next(same, None)
