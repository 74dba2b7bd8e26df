"""The post office of one transaction: takes envelopes in, moves messages on, and writes it all down at the end.

Everything that touches a mailbox goes through here, so that sequence numbers, counters, wake-ups and events can never
disagree with the messages they speak of. Rows are gathered and written as sets: that is what makes a batch of sends
cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from coterie.agents import ACTIVE
from coterie.clock import from_ms
from coterie.errors import Refused
from coterie.events import EventKind
from coterie.failpoints import hit
from coterie.ids import keyed_id
from coterie.messages import NEW_CHAIN_AFTER, PERSON, RESERVED, SYSTEM, Envelope, Message, Receipt, seal
from coterie.store import Delivery, Limits
from coterie.stores.sql.connection import Connection, insert
from coterie.stores.sql.mailbox import Mailbox, Mailboxes, Questions
from coterie.stores.sql.rows import READABLE, to_message
from coterie.stores.sql.session import Ledger

_MESSAGES = (
    "messages (seq, id, sender, recipient, state, in_seq, created_at, deliver_at, delivered_at, taken_at, queued, hops,"
    " option, in_reply_to, cause, replay_of, automatic, stopped, plan, reason, payload,"
    " thread, question, answered_by, answered_option)"
)
_STATE, _TAKEN_AT = 4, 9
"""Places in such a row."""
_DELIVER = "UPDATE messages SET state = 'pending', in_seq = ?, delivered_at = ?, early = ? WHERE seq = ?"
_BURY = "UPDATE messages SET state = 'dead', reason = ? WHERE seq = ?"

_MS = timedelta(milliseconds=1)
NAMED_IN_NOTICE = 20

_encode = msgspec.json.Encoder().encode


class DueRow(NamedTuple):
    seq: int
    id: str
    sender: str
    recipient: str
    created_at: int
    deliver_at: int
    payload_size: int


class UnitOfWork:
    def __init__(self, db: Connection, *, now: int, limits: Limits, ledger: Ledger) -> None:
        self._db, self._limits, self._ledger = db, limits, ledger
        self.now = now
        """What due times are measured against."""
        self._mailboxes = Mailboxes(db, self._ledger)
        self.frees = False
        """Somebody can be claimed whose own row was not opened for it."""
        self._new: list[list[Any]] = []
        """Messages of this transaction that are not written yet."""
        self._unread: dict[str, list[int]] = {}
        """Per recipient, the places of those among them that wait in its mailbox."""
        self._attachments: list[tuple[str, int]] = []
        self._events: list[tuple[int, EventKind, str, str | None]] = []
        self._receipts: dict[str, Receipt] = {}
        self._dead: dict[tuple[str, str], list[tuple[str, str]]] = {}
        """Per sender and reason, the messages that died, with their recipients."""
        self._questions = Questions(db, self._new)

    @property
    def stamp(self) -> int:
        """What is written down as the time: `now`, but never earlier than anything stamped before."""
        return self._ledger.stamp

    @property
    def secret(self) -> bytes:
        """The society's secret; see `coterie.stores.sql.connection`."""
        return self._ledger.secret

    @property
    def society_paused(self) -> bool:
        """Nobody may begin anything."""
        return self._ledger.society_paused()

    def pause_society(self, paused: bool) -> None:
        self._ledger.pause_society(paused)

    def accept_all(self, envelopes: Sequence[Envelope]) -> list[Receipt | Refused]:
        """Each of them taken in, or why not."""
        self._ledger.reserve(len(envelopes))
        outcomes: list[Receipt | Refused] = []
        for envelope in envelopes:
            try:
                outcomes.append(self.accept(envelope))
            except Refused as refusal:
                outcomes.append(refusal)
        return outcomes

    def accept(
        self, envelope: Envelope, *, hops: int | None = None, reply_checked: bool = False, **marks: Any
    ) -> Receipt:
        """Take in one message, or raise `Refused`. `marks` are columns that only the runtime may set."""
        given = envelope.id
        if envelope.keyed:
            envelope = msgspec.structs.replace(envelope, id=keyed_id(self._ledger.secret, given))
        if envelope.retried and (known := self._known(envelope, given)):
            return known
        mailbox = self._check_recipient(envelope)
        if hops is None:
            hops = self._hops(envelope)
        self._check_hops(hops)
        answers = () if reply_checked else self._questions.to_answer(envelope)
        for ref in envelope.attachments:
            # The person may send a dead letter again that was in order when it was first sent.
            self._check_artifact(ref, PERSON if "replay_of" in marks else envelope.sender)
        seq = self._ledger.next_message()
        receipt = self._put(seq, envelope, mailbox, hops, **marks)
        self._attachments += ((ref, seq) for ref in dict.fromkeys(envelope.attachments))
        if answers:
            self._questions.answer(answers, envelope)
            for question in answers:
                self.tell("quick_replies.changed", question)
        if envelope.retried:
            self._receipts[envelope.id] = receipt
        return receipt

    def _put(
        self,
        seq: int,
        envelope: Envelope,
        mailbox: Mailbox,
        hops: int,
        *,
        replay_of: str | None = None,
        automatic: bool = False,
        stopped: bool = False,
        plan: str | None = None,
    ) -> Receipt:
        queued = mailbox.state in ACTIVE
        in_seq = deliver_at = delivered_at = None
        if envelope.delay:
            deliver_at = self.now + envelope.delay // _MS
            mailbox.delayed += 1
        else:
            in_seq = mailbox.deliver(len(envelope.payload_json), self.now, envelope.sender)
            delivered_at = self.stamp
        state = "delayed" if deliver_at else "pending"
        self._new.append(
            [seq, envelope.id, envelope.sender, envelope.to, state, in_seq, self.stamp, deliver_at, delivered_at,
             None, queued and not deliver_at, hops, envelope.option, envelope.in_reply_to, envelope.cause, replay_of,
             automatic, stopped, plan, None, envelope.payload_json, envelope.thread, envelope.question, None, None]
        )  # fmt: skip
        if not deliver_at:
            self._unread.setdefault(envelope.to, []).append(len(self._new) - 1)
        if envelope.question:
            self._questions.asked(envelope)
        self.tell("delayed.scheduled" if deliver_at else "message.created", envelope.id)
        return _receipt(envelope.id, queued, deliver_at)

    def deliver(self, due: Iterable[DueRow], *, early: bool) -> tuple[list[Delivery], int]:
        """Move delayed messages into their mailboxes, in the order given; those of the departed become dead letters."""
        moved, delivered, dead, at = [], [], 0, from_ms(self.stamp)
        for row in due:
            mailbox = self._mailboxes.get(row.recipient)
            assert mailbox is not None  # noqa: S101 - the foreign key holds
            mailbox.delayed -= 1
            if mailbox.state == "terminated":
                self.bury(row, "recipient_terminated")
                dead += 1
                continue
            is_early = early and row.deliver_at > self.now
            moved.append((mailbox.deliver(row.payload_size, self.now, row.sender), self.stamp, is_early, row.seq))
            self.tell("delayed.delivered", row.id)
            delivered.append(Delivery(row.id, row.recipient, from_ms(row.created_at), from_ms(row.deliver_at), at))
        self._db.executemany(_DELIVER, moved)
        return delivered, dead

    def close_question(self, question: str) -> None:
        """No answer to it has an effect any more. One that was answered keeps its answer."""
        if self._questions.close(question):
            self.tell("quick_replies.changed", question)

    def bury(self, row: DueRow, reason: str) -> None:
        """The message is dead; its sender will be told, once for all that died in this transaction."""
        self._db.execute(_BURY, (reason, row.seq))
        self.tell("message.updated", row.id)
        self._dead.setdefault((row.sender, reason), []).append((row.id, row.recipient))

    def bury_unsent(self, envelope: Envelope, reason: str) -> None:
        """An answer that its recipient cannot get is stored as dead from the start, and its sender is told."""
        if self._mailboxes.get(envelope.to) is None:
            return  # nobody to keep it for
        seq = self._ledger.next_message()
        # A dead letter keeps its files, since it can be sent again.
        kept = "SELECT 1 FROM artifacts WHERE ref = ?"
        refs = [ref for ref in dict.fromkeys(envelope.attachments) if self._db.execute(kept, (ref,)).fetchone()]
        self._attachments += ((ref, seq) for ref in refs)
        self._new.append(
            [seq, envelope.id, envelope.sender, envelope.to, "dead", None, self.stamp, None,
             None, None, False, 0, None, envelope.in_reply_to, envelope.cause, None, True, False, None, reason,
             envelope.payload_json, envelope.thread, envelope.question, None, None]
        )  # fmt: skip
        self.tell("message.updated", envelope.id)
        self._dead.setdefault((envelope.sender, reason), []).append((envelope.id, envelope.to))

    def foresee(self, agent_ids: Sequence[str]) -> None:
        """Their mailboxes are opened next; they are held already."""
        self._ledger.foresee(agent_ids)

    def read_anew(self) -> None:
        """Agents' rows were changed past their mailboxes."""
        self._ledger.read_anew()

    def mailbox(self, agent_id: str) -> Mailbox:
        """The mailbox of somebody who exists, to be changed and saved with the rest."""
        mailbox = self._mailboxes.get(agent_id)
        if mailbox is None:
            raise Refused("unknown_agent", f"there is no agent {agent_id!r}")
        return mailbox

    def tell(self, kind: EventKind, subject: str, data: dict[str, Any] | None = None) -> None:
        """`data`: what could not be looked up afterwards."""
        self._events.append((self.stamp, kind, subject, None if data is None else _encode(data).decode()))

    def woken(self) -> list[tuple[str, str]]:
        """Those who have something to do now and had not before, with their states."""
        return self._mailboxes.woken(self.now)

    def leaves_work(self) -> bool:
        """Somebody has something to do and is not claimed yet."""
        return self.frees or bool(self.woken())

    def waiting(self, agent_id: str, *, whole: bool = True) -> list[Any]:
        """All that waits for it and is written, each with its size; or just what a decision needs of it."""
        mailbox = self.mailbox(agent_id)
        return self._ledger.waiting(agent_id, (mailbox.taken_seq, mailbox.next_in_seq, mailbox.waiting), whole=whole)

    def unwritten(self, agent_id: str) -> list[tuple[int, Message]]:
        """All that waits for it, each with its size, as it is once taken; if it was all sent in this transaction."""
        places = self._unread.get(agent_id, ())
        if len(places) != self.mailbox(agent_id).waiting:
            return []
        return [_as_taken(self._new[place], self.stamp) for place in places]

    def take_unwritten(self, agent_id: str) -> None:
        """It is written as taken, which spares looking for it and changing it."""
        for place in self._unread.pop(agent_id):
            self._new[place][_STATE], self._new[place][_TAKEN_AT] = "taken", self.stamp

    def write_messages(self) -> None:
        """So that they can be read back."""
        if self._new:
            insert(self._db, _MESSAGES, self._new)
            insert(self._db, "attachments (artifact_ref, message_seq)", self._attachments)
            self._new.clear()
            self._unread.clear()
            self._attachments.clear()
            self._questions.written()

    def close(self) -> None:
        """Write down everything gathered."""
        self._send_notices()
        hit("post.before_write")
        self.write_messages()
        hit("post.between")
        self._mailboxes.save(self.now)
        self._ledger.log(self._events)
        hit("post.after_write")

    def _send_notices(self) -> None:
        for (sender, reason), dead in self._dead.items():
            if sender == SYSTEM or (mailbox := self._mailboxes.get(sender)) is None or mailbox.state == "terminated":
                continue
            envelope = seal(sender=SYSTEM, to=sender, payload=undeliverable(dead, reason))
            # A chain that was too long must not go on by way of the notice.
            self._put(
                self._ledger.next_message(), envelope, mailbox, self._limits.max_hops if reason == "hop_limit" else 0
            )
        self._dead.clear()

    def _known(self, envelope: Envelope, given: str) -> Receipt | None:
        """`given`: the id before it was keyed. Version 0.1 stored messages under it."""
        message_id = envelope.id
        self._mailboxes.get(envelope.to)  # whoever sends the same elsewhere has done so, or waits behind us
        if receipt := self._receipts.get(message_id):
            return receipt
        row = self._db.execute(
            "SELECT id, queued, deliver_at FROM messages WHERE id = ? OR id = ?", (message_id, given)
        ).fetchone()
        return row and _receipt(row[0], bool(row[1]), row[2])

    def _check_recipient(self, envelope: Envelope) -> Mailbox:
        mailbox, limits = self._mailboxes.get(envelope.to), self._limits
        if mailbox is None:
            raise Refused("unknown_recipient", f"there is no agent {envelope.to!r}: list_agents names those there are")
        if mailbox.state == "terminated":
            raise Refused("recipient_terminated", f"{envelope.to!r} was terminated and reads no more messages")
        full = mailbox.waiting >= limits.mailbox or mailbox.waiting_bytes >= limits.mailbox_bytes
        if full and mailbox.kind == "agent" and not _unblocks(envelope, mailbox):
            raise Refused(
                "mailbox_full", f"{mailbox.waiting:,} messages wait for {envelope.to!r} already: try again later"
            )
        return mailbox

    def _hops(self, envelope: Envelope) -> int:
        if envelope.cause is None or envelope.delay >= NEW_CHAIN_AFTER:
            return 0
        row = self._db.execute("SELECT hops FROM messages WHERE id = ?", (envelope.cause,)).fetchone()
        return row[0] + 1 if row else 0

    def _check_hops(self, hops: int) -> None:
        if hops > self._limits.max_hops:
            raise Refused(
                "hop_limit",
                f"this chain of messages is {hops - 1} long, the most is {self._limits.max_hops}: answer the person,"
                " or start afresh with a message delayed by a minute or more",
            )

    def _check_artifact(self, ref: str, sender: str) -> None:
        """A file that its sender may not read does not exist for it: the same error tells it nothing."""
        if sender in RESERVED or self._limits.shared_artifacts:
            found = self._db.execute("SELECT 1 FROM artifacts WHERE ref = ?", (ref,))
        else:
            found = self._db.execute(f"SELECT 1 FROM artifacts WHERE ref = ? AND {READABLE}", (ref, sender, sender))
        if not found.fetchone():
            raise Refused("attachment_unknown", f"there is no artifact {ref!r}: upload the file first")


_WHY = {
    "recipient_terminated": "terminated before it could be read",
    "hop_limit": "since this chain of messages is too long already",
    "mailbox_full": "whose mailbox is full",
    "poison": "since it is damaged and cannot be read",
}


def undeliverable(dead: list[tuple[str, str]], reason: str) -> dict[str, Any]:
    """What the sender of dead letters is told."""
    recipients = sorted({recipient for _, recipient in dead})
    many = f"{len(dead)} messages" if len(dead) > 1 else "a message"
    why = _WHY.get(reason, f"refused as {reason}")
    return {
        "text": f"Not delivered: {many} to {', '.join(recipients)}, {why}. Kept as a dead letter.",
        "notice": {
            "kind": "undeliverable",
            "reason": reason,
            "recipients": recipients,
            "count": len(dead),
            "messageIds": [message_id for message_id, _ in dead[:NAMED_IN_NOTICE]],
        },
    }


def _as_taken(row: list[Any], stamp: int) -> tuple[int, Message]:
    (seq, id_, sender, to, _, in_seq, created_at, _, delivered_at, _, _, hops, option, in_reply_to, cause, replay_of,
     _, stopped, _, _, payload, *_) = row  # fmt: skip
    message = (seq, id_, sender, to, payload, "taken", created_at, None, delivered_at, stamp, in_seq, in_reply_to,
               option, cause, hops, False, stopped, None, replay_of, None, None)  # fmt: skip
    return len(payload), to_message(message)


def _unblocks(envelope: Envelope, mailbox: Mailbox) -> bool:
    """Nothing but this gets a blocked agent to try again and take its mail. One is enough: it wakes the agent."""
    at_once = envelope.sender == PERSON and not envelope.delay
    return at_once and mailbox.state == "blocked" and mailbox.runnable_at is None


def _receipt(message_id: str, queued: bool, deliver_at: int | None) -> Receipt:
    if deliver_at is not None:
        return Receipt(message_id=message_id, state="delayed", scheduled_delivery_time=from_ms(deliver_at))
    return Receipt(message_id=message_id, state="queued" if queued else "pending")
