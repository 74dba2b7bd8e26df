"""Questions to the person within one transaction: which are open, and what answers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from coterie.agent.turn import DENIED
from coterie.errors import Refused
from coterie.messages import PERSON, Answer, Envelope, Message
from coterie.stores.sql import plans
from coterie.stores.sql.approvals import question_id
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.rows import to_payload

_ASKED = """
SELECT sender, CAST(payload AS BLOB), question, answered_by, answered_option FROM messages WHERE id = ?
"""
_OPEN = """
SELECT id FROM messages
 WHERE sender = ? AND question = 1 AND answered_by IS NULL AND state IN ('pending', 'taken') ORDER BY seq
"""
_ANSWER = "UPDATE messages SET answered_by = ?, answered_option = ? WHERE id = ?"
# A question that was closed without an answer names itself as its answer.
_CLOSE = "UPDATE messages SET answered_by = id WHERE id = ? AND question = 1 AND answered_by IS NULL RETURNING sender"
_REOPEN = "UPDATE messages SET answered_by = NULL, answered_option = NULL WHERE answered_by = ? RETURNING seq, id"

_decode = msgspec.json.decode


class _Asked(NamedTuple):
    sender: str
    payload_json: str | bytes
    question: bool
    answered_by: str | None
    answered_option: int | None


class Questions:
    def __init__(self, db: Connection, rows: list[list[Any]]) -> None:
        self._db, self._rows = db, rows
        """Messages of this transaction that are not written yet; the last two columns are the answer."""
        self._fresh: dict[str, tuple[int, Envelope]] = {}
        """Questions among them, with their place."""
        self._open: dict[str, dict[str, None]] = {}
        """Per agent asked about so far, its open questions in their order."""

    def asked(self, envelope: Envelope) -> None:
        """The question whose row was added last."""
        self._fresh[envelope.id] = (len(self._rows) - 1, envelope)
        if envelope.sender in self._open and not envelope.delay:
            self._open[envelope.sender][envelope.id] = None

    def written(self) -> None:
        """The rows are in the database now, and are looked up there."""
        self._fresh.clear()

    def to_answer(self, envelope: Envelope) -> Sequence[str]:
        """Those that this message will answer once it is accepted; `Refused` when it cannot be."""
        if envelope.in_reply_to is not None:
            return self._aimed_at(envelope, envelope.in_reply_to)
        return tuple(self._open_of(envelope.to)) if envelope.sender == PERSON else ()

    def answer(self, questions: Sequence[str], envelope: Envelope) -> None:
        for question in questions:
            self._open.get(envelope.to, {}).pop(question, None)
            if question in self._fresh:
                place, _ = self._fresh[question]
                self._rows[place][-2:] = envelope.id, envelope.option
            else:
                self._db.execute(_ANSWER, (envelope.id, envelope.option, question))

    def close(self, question: str) -> bool:
        """Close it without an answer; False when it is not open. Its row must be written."""
        row = self._db.execute(_CLOSE, (question,)).fetchone()
        if row is None:
            return False
        self._open.get(row[0], {}).pop(question, None)
        return True

    def _aimed_at(self, envelope: Envelope, message_id: str) -> Sequence[str]:
        asked = self._find(message_id)
        if asked is None:
            raise Refused("inReplyTo_unknown", f"there is no message {message_id!r} to reply to")
        if envelope.option is not None:
            _check_option(envelope, envelope.option, message_id, asked)
        if envelope.sender != PERSON or not asked.question or envelope.to != asked.sender:
            return ()
        if envelope.option is None:
            return () if asked.answered_by else (message_id,)  # words are never refused
        standing = approval_stands(self._db, message_id, asked.sender, asked.payload_json)
        if asked.answered_by is None and standing in ("judged", "void"):
            raise Refused(
                "already_answered",
                "that approval is void: the call it is about does not wait for it any more",
                answer=Answer(message_id, None).to_wire(),
            )
        if asked.answered_by is None:
            return (message_id,)
        winner = Answer(asked.answered_by, asked.answered_option)
        closed = asked.answered_by == message_id
        words = "that question was closed without an answer" if closed else "that question was answered already"
        raise Refused("already_answered", words, answer=winner.to_wire())

    def _find(self, message_id: str) -> _Asked | None:
        if message_id in self._fresh:
            place, envelope = self._fresh[message_id]
            return _Asked(envelope.sender, envelope.payload_json, True, *self._rows[place][-2:])
        row = self._db.execute(_ASKED, (message_id,)).fetchone()
        return row and _Asked(*row)

    def _open_of(self, agent_id: str) -> dict[str, None]:
        if agent_id not in self._open:
            found = dict.fromkeys(question for (question,) in self._db.execute(_OPEN, (agent_id,)))
            for question, (place, envelope) in self._fresh.items():
                if envelope.sender == agent_id and not envelope.delay and self._rows[place][-2] is None:
                    found[question] = None
            self._open[agent_id] = found
        return self._open[agent_id]


def reopen(db: Connection, answer_id: str) -> list[str]:
    """The message that answered them is withdrawn; which questions are open again."""
    return [question for _, question in sorted(db.execute(_REOPEN, (answer_id,)))]


Standing = Literal["waits", "judged", "void"]


def approval_stands(db: Connection, question: str, agent_id: str, payload_json: str | bytes) -> Standing | None:
    """Whether the call that the question is about waits for approval, was judged, or ended unjudged.

    None when the message asks for no approval.
    """
    approval = to_payload(question, payload_json).get("approval")
    call_id = approval.get("callId") if isinstance(approval, dict) else None
    if not isinstance(call_id, str) or question_id(agent_id, call_id) != question:
        return None  # an agent may put anything into its messages
    state, result = plans.call_state(db, agent_id, call_id)
    if state == "gated":
        return "waits"
    return "void" if state == "cancelled" and result != DENIED else "judged"


def standing_of(db: Connection, answer: Message) -> Standing | None:
    """How the approval that `answer` replies to stands; None when it replies to none."""
    row = db.execute(_ASKED, (answer.in_reply_to,)).fetchone() if answer.option is not None else None
    return approval_stands(db, answer.in_reply_to or "", row[0], row[1]) if row else None


def _check_option(envelope: Envelope, option: int, message_id: str, asked: _Asked) -> None:
    options = to_payload(message_id, asked.payload_json).get("quickReplies")
    if not isinstance(options, list):
        options = []
    if option >= len(options):
        raise Refused("option_invalid", f"that message offers {len(options)} quick replies, not {option + 1}")
    if _decode(envelope.payload_json).get("text") != options[option]:
        raise Refused("option_invalid", "payload.text must be the text of the chosen quick reply, unchanged")
    if envelope.sender == PERSON and asked.question and envelope.to != asked.sender:
        raise Refused("option_invalid", f"a quick reply goes to whoever offered it: send it to {asked.sender!r}")
