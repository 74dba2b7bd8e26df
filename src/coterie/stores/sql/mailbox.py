"""An agent's row while a transaction works on it: read once, changed in memory, written once at the end.

Questions to the person within one transaction: which are open, and what answers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import astuple as as_row

from coterie.errors import Refused
from coterie.messages import PERSON, Answer, Envelope, Message
from coterie.stores.sql import turn_rows
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.rows import to_payload
from coterie.stores.sql.session import Ledger
from coterie.stores.sql.turn_rows import question_id
from coterie.turn import DENIED


class Mailbox(Struct):
    kind: str
    state: str
    runnable_at: int | None
    next_in_seq: int
    taken_seq: int
    waiting: int
    waiting_bytes: int
    delayed: int
    epoch: int
    step_no: int
    turn_no: int
    next_hist_seq: int
    rounds: int
    withdrawals: int
    retries: int
    hold: int
    why: str | None
    worker: str | None
    crash_step: int
    crashes: int
    since: int | None
    history_version: int
    """Changes with every change of what `history.view` returns for the agent; it never goes back."""
    person: int
    """1: the person wrote one of the messages of the turn, or of the mail that waits."""
    retry_ms: int | None = None

    def deliver(self, size: int, now: int, sender: str = "") -> int:
        """One more message waits; the place it got. It wakes an agent that has nothing better to do."""
        place = self.next_in_seq
        self.next_in_seq += 1
        self.waiting += 1
        self.waiting_bytes += size
        if self.kind == "agent":
            # At rest nothing waits, so the mark is left over from the turn before.
            self.person = int(sender == PERSON or (self.person == 1 and self.state != "idle"))
            if self.state == "idle":
                self.state, self.runnable_at = "ready", now
            elif self.state == "wait_approval" or (self.state == "blocked" and sender == PERSON):
                self.runnable_at = now
        return place

    def remove(self, size: int) -> None:
        """One that waited does not any more. With nothing left to do, a woken agent goes back to sleep."""
        self.waiting -= 1
        self.waiting_bytes -= size
        if self.state == "ready" and not self.waiting:
            self.state, self.runnable_at = "idle", None

    def is_leased(self) -> bool:
        """Somebody has just taken it, or a step further."""
        return self.runnable_at is None and self.state in ("llm", "tools")

    def can_run(self, now: int) -> bool:
        return self.runnable_at is not None and self.runnable_at <= now


COLUMNS = Mailbox.__struct_fields__
_LIST = ", ".join(COLUMNS)
READ = f"SELECT {_LIST} FROM agents WHERE id = ?"
_PLACES = range(len(COLUMNS))
_STATE, _RUNNABLE_AT = COLUMNS.index("state"), COLUMNS.index("runnable_at")


@cache
def _save(places: tuple[int, ...]) -> str:
    """A step changes a few columns, always the same ones, and writing all of them costs three times as much."""
    sets = ", ".join(f"{COLUMNS[place]} = ?" for place in places)
    return f"UPDATE agents SET {sets} WHERE id = ?"


def _could_run(row: tuple[Any, ...], now: int) -> bool:
    return row[_RUNNABLE_AT] is not None and row[_RUNNABLE_AT] <= now


class Mailboxes:
    """Those that one transaction has opened."""

    def __init__(self, db: Connection, ledger: Ledger) -> None:
        self._db, self._ledger = db, ledger
        self._open: dict[str, tuple[Mailbox, tuple[Any, ...]] | None] = {}
        """Each with the row as it was read."""

    def get(self, agent_id: str) -> Mailbox | None:
        try:
            found = self._open[agent_id]
        except KeyError:
            row = self._ledger.open(READ, agent_id)
            found = self._open[agent_id] = row and (Mailbox(*row), row)
        return found[0] if found else None

    def woken(self, now: int) -> list[tuple[str, str]]:
        """Who has something to do that had not, with their states."""
        return [
            (agent_id, found[0].state)
            for agent_id, found in self._open.items()
            if found and found[0].can_run(now) and not _could_run(found[1], now)
        ]

    def save(self, now: int) -> None:
        """Write those that were changed."""
        changed: dict[tuple[int, ...], list[list[Any]]] = {}
        for agent_id, found in self._open.items():
            if found is None or as_row(found[0]) == found[1]:
                continue
            row, was = self._marked(found[0], found[1], now), found[1]
            places = tuple([place for place in _PLACES if row[place] != was[place]])
            changed.setdefault(places, []).append([*[row[place] for place in places], agent_id])
            self._ledger.saved(agent_id, row)
        for places, rows in changed.items():
            if len(rows) == 1:
                self._db.execute(_save(places), rows[0])
            else:
                self._db.executemany(_save(places), rows)
        self._open.clear()

    def _marked(self, mailbox: Mailbox, was: tuple[Any, ...], now: int) -> tuple[Any, ...]:
        """The row to write: with since when it is in its state, and for how long it is held."""
        if mailbox.state != was[_STATE]:
            mailbox.since = self._ledger.stamp
        if self._ledger.lease is not None and mailbox.is_leased():
            mailbox.runnable_at = now + self._ledger.lease
        return as_row(mailbox)


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
    state, result = turn_rows.call_state(db, agent_id, call_id)
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
