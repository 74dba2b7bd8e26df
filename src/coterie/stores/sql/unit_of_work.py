"""The unit of work of one transaction: accepts envelopes, moves messages and writes all changes in `flush`.

Every change of a mailbox goes through it. So sequence numbers, counters, wake-ups and events always agree with the
messages. Rows are buffered and written as sets, which makes a batch of sends cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import astuple

from coterie.agents import ACTIVE_STATES
from coterie.clock import from_ms
from coterie.errors import Refused
from coterie.events import EventKind
from coterie.failpoints import hit
from coterie.ids import keyed_id
from coterie.messages import NEW_CHAIN_DELAY, PERSON, RESERVED_IDS, SYSTEM, Envelope, Message, Receipt, make_envelope
from coterie.store import Delivery, Limits
from coterie.stores.sql.mailbox import Mailbox, Mailboxes, Questions
from coterie.stores.sql.rows import IS_READABLE, NEW_MESSAGES, Connection, NewMessageRow, insert
from coterie.stores.sql.session import MailboxPosition, Session, WaitingHeader, WaitingRow

_DELIVER = """
UPDATE messages SET state = 'pending', in_seq = :in_seq, delivered_at = :delivered_at, early = :early WHERE seq = :seq
"""
_DEAD_LETTER = "UPDATE messages SET state = 'dead', reason = :reason WHERE seq = :seq"
_SELECT_ARTIFACT = "SELECT 1 FROM artifacts WHERE ref = :ref"
_SELECT_READABLE_ARTIFACT = f"SELECT 1 FROM artifacts WHERE ref = :ref AND {IS_READABLE}"

_MS = timedelta(milliseconds=1)
MAX_IDS_IN_NOTICE = 20

_encode = msgspec.json.Encoder().encode


STORED_MESSAGE_COLUMNS = "seq, id, sender, recipient, created_at, deliver_at, length(payload)"
"""Columns of `StoredMessage`."""


class StoredMessage(NamedTuple):
    """What the unit of work needs of a message in the database to deliver it or make it a dead letter."""

    seq: int
    id: str
    sender: str
    recipient: str
    created_at: int
    deliver_at: int
    payload_size: int


class UnitOfWork:
    def __init__(self, db: Connection, *, now: int, limits: Limits, session: Session) -> None:
        self._db, self._limits, self._session = db, limits, session
        self.now = now
        """Time in ms that due times are compared with."""
        self._mailboxes = Mailboxes(db, self._session)
        self.frees_other_agents = False
        """Agents became claimable whose rows this transaction did not lock."""
        self._new_rows: list[NewMessageRow] = []
        """Messages that are not written yet."""
        self._new_waiting: dict[str, list[NewMessageRow]] = {}
        """Those of `_new_rows` that wait, by recipient."""
        self._attachments: list[tuple[str, int]] = []
        self._events: list[tuple[int, EventKind, str, str | None]] = []
        self._receipts: dict[str, Receipt] = {}
        self._dead: dict[tuple[str, str], list[tuple[str, str]]] = {}
        """Per sender and reason: ids and recipients of new dead letters."""
        self._questions = Questions(db)

    @property
    def timestamp(self) -> int:
        """Time to store, in ms: `now`, but never earlier than a time stored before."""
        return self._session.timestamp

    @property
    def secret(self) -> bytes:
        return self._session.secret

    @property
    def is_society_paused(self) -> bool:
        """True while no turn, model call or tool may start."""
        return self._session.is_society_paused()

    def set_society_paused(self, paused: bool) -> None:
        self._session.set_society_paused(paused)

    def accept_all(self, envelopes: Sequence[Envelope]) -> list[Receipt | Refused]:
        """Accept each envelope; return its receipt, or the reason why it was refused."""
        self._session.reserve_message_seqs(len(envelopes))
        results: list[Receipt | Refused] = []
        for envelope in envelopes:
            try:
                results.append(self.accept(envelope))
            except Refused as refusal:
                results.append(refusal)
        return results

    def accept(
        self, envelope: Envelope, *, hops: int | None = None, reply_checked: bool = False, **runtime_columns: Any
    ) -> Receipt:
        """Buffer one message for its mailbox or for later delivery, or raise `Refused`.

        `hops`: counted already. `runtime_columns`: columns that no sender may set.
        """
        unkeyed_id = envelope.id
        if envelope.is_keyed:
            envelope = msgspec.structs.replace(envelope, id=keyed_id(self._session.secret, unkeyed_id))
        if envelope.may_exist and (receipt := self._existing_receipt(envelope, unkeyed_id)):
            return receipt
        mailbox = self._check_recipient(envelope)
        if hops is None:
            hops = self._count_hops(envelope)
        self._check_hops(hops)
        questions = () if reply_checked else self._questions.find_answered(envelope)
        for ref in envelope.attachments:
            # The person may resend a dead letter whose sender was allowed to attach the file.
            self._check_artifact(ref, PERSON if "replay_of" in runtime_columns else envelope.sender)
        seq = self._session.next_message_seq()
        receipt = self._buffer_message(seq, envelope, mailbox, hops, **runtime_columns)
        self._attachments += ((ref, seq) for ref in dict.fromkeys(envelope.attachments))
        if questions:
            self._questions.record_answer(questions, envelope)
            for question in questions:
                self.record_event("quick_replies.changed", question)
        if envelope.may_exist:
            self._receipts[envelope.id] = receipt
        return receipt

    def _buffer_message(
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
        queued = mailbox.state in ACTIVE_STATES
        in_seq = deliver_at = delivered_at = None
        if envelope.delay:
            deliver_at = self.now + envelope.delay // _MS
            mailbox.delayed += 1
        else:
            in_seq = mailbox.add_message(len(envelope.payload_json), self.now, envelope.sender)
            delivered_at = self.timestamp
        row = NewMessageRow(
            seq,
            envelope.id,
            envelope.sender,
            envelope.to,
            "delayed" if deliver_at else "pending",
            self.timestamp,
            envelope.payload_json,
            envelope.thread,
            envelope.is_question,
            in_seq=in_seq,
            deliver_at=deliver_at,
            delivered_at=delivered_at,
            queued=queued and not deliver_at,
            hops=hops,
            option=envelope.option,
            in_reply_to=envelope.in_reply_to,
            cause=envelope.cause,
        )
        row.replay_of, row.automatic, row.stopped, row.plan = replay_of, automatic, stopped, plan
        self._new_rows.append(row)
        if not deliver_at:
            self._new_waiting.setdefault(envelope.to, []).append(row)
        if envelope.is_question:
            self._questions.add(row)
        self.record_event("delayed.scheduled" if deliver_at else "message.created", envelope.id)
        return _receipt(envelope.id, queued, deliver_at)

    def deliver_due(self, due: Iterable[StoredMessage], *, early: bool) -> tuple[list[Delivery], int]:
        """Move delayed messages into their mailboxes, in the order given.

        Messages to terminated agents become dead letters. Return the deliveries and the number of dead letters.
        """
        moved, delivered, dead, at = [], [], 0, from_ms(self.timestamp)
        for row in due:
            mailbox = self._mailboxes.get(row.recipient)
            assert mailbox is not None  # noqa: S101 - the foreign key holds
            mailbox.delayed -= 1
            if mailbox.state == "terminated":
                self.dead_letter(row, "recipient_terminated")
                dead += 1
                continue
            moved.append(
                {
                    "in_seq": mailbox.add_message(row.payload_size, self.now, row.sender),
                    "delivered_at": self.timestamp,
                    "early": early and row.deliver_at > self.now,
                    "seq": row.seq,
                }
            )
            self.record_event("delayed.delivered", row.id)
            delivered.append(Delivery(row.id, row.recipient, from_ms(row.created_at), from_ms(row.deliver_at), at))
        self._db.executemany(_DELIVER, moved)
        return delivered, dead

    def close_question(self, question: str) -> None:
        """Close an open question without an answer. An answered question keeps its answer."""
        if self._questions.close(question):
            self.record_event("quick_replies.changed", question)

    def dead_letter(self, row: StoredMessage, reason: str) -> None:
        """Make a stored message a dead letter. `flush` sends one notice per sender and reason."""
        self._db.execute(_DEAD_LETTER, {"reason": reason, "seq": row.seq})
        self.record_event("message.updated", row.id)
        self._dead.setdefault((row.sender, reason), []).append((row.id, row.recipient))

    def store_dead_letter(self, envelope: Envelope, reason: str) -> None:
        """Store a refused reply as a dead letter, and notify its sender. Skip it if the recipient never existed."""
        if self._mailboxes.get(envelope.to) is None:
            return
        seq = self._session.next_message_seq()
        # A dead letter keeps its files, because it can be sent again.
        for ref in dict.fromkeys(envelope.attachments):
            if self._db.execute(_SELECT_ARTIFACT, {"ref": ref}).fetchone():
                self._attachments.append((ref, seq))
        self._new_rows.append(
            NewMessageRow(
                seq,
                envelope.id,
                envelope.sender,
                envelope.to,
                "dead",
                self.timestamp,
                envelope.payload_json,
                envelope.thread,
                envelope.is_question,
                in_reply_to=envelope.in_reply_to,
                cause=envelope.cause,
                automatic=True,
                reason=reason,
            )
        )
        self.record_event("message.updated", envelope.id)
        self._dead.setdefault((envelope.sender, reason), []).append((envelope.id, envelope.to))

    def prefetch(self, agent_ids: Sequence[str]) -> None:
        """Read the mailboxes of agents that are locked already and are used next."""
        self._session.prefetch(agent_ids)

    def invalidate(self) -> None:
        """Drop cached agent rows, because SQL changed them directly."""
        self._session.invalidate()

    def mailbox(self, agent_id: str) -> Mailbox:
        """Lock and return an agent's mailbox. Changes to it are written by `flush`."""
        mailbox = self._mailboxes.get(agent_id)
        if mailbox is None:
            raise Refused("unknown_agent", f"there is no agent {agent_id!r}")
        return mailbox

    def record_event(self, kind: EventKind, subject: str, data: dict[str, Any] | None = None) -> None:
        """Append to the event log. `data`: facts that cannot be read from the database later."""
        self._events.append((self.timestamp, kind, subject, None if data is None else _encode(data).decode()))

    def newly_runnable(self) -> list[tuple[str, str]]:
        """Ids and states of agents that became runnable in this transaction."""
        return self._mailboxes.newly_runnable(self.now)

    def has_unclaimed_work(self) -> bool:
        """True if an agent is runnable and not claimed."""
        return self.frees_other_agents or bool(self.newly_runnable())

    def read_waiting(self, agent_id: str) -> Sequence[WaitingRow]:
        """Return the stored waiting messages in order."""
        return self._session.read_waiting(agent_id, self._mailbox_position(agent_id))

    def read_waiting_headers(self, agent_id: str) -> Sequence[WaitingHeader] | Sequence[WaitingRow]:
        """The same, but headers suffice."""
        return self._session.read_waiting_headers(agent_id, self._mailbox_position(agent_id))

    def _mailbox_position(self, agent_id: str) -> MailboxPosition:
        mailbox = self.mailbox(agent_id)
        return mailbox.taken_seq, mailbox.next_in_seq, mailbox.waiting

    def buffered_messages(self, agent_id: str) -> list[tuple[int, Message]]:
        """Return sizes and messages, in state taken, of a mailbox whose messages are all still buffered.

        Empty if a waiting message is in the database.
        """
        rows = self._new_waiting.get(agent_id, ())
        if len(rows) != self.mailbox(agent_id).waiting:
            return []
        return [(len(row.payload), row.to_taken_message(self.timestamp)) for row in rows]

    def take_buffered(self, agent_id: str) -> None:
        """Mark the agent's buffered messages as taken before they are written; this saves an UPDATE."""
        for row in self._new_waiting.pop(agent_id):
            row.state, row.taken_at = "taken", self.timestamp

    def flush_messages(self) -> None:
        """Write buffered messages, so that SQL can read them."""
        if self._new_rows:
            insert(self._db, NEW_MESSAGES, [astuple(row) for row in self._new_rows])
            insert(self._db, "attachments (artifact_ref, message_seq)", self._attachments)
            self._new_rows.clear()
            self._new_waiting.clear()
            self._attachments.clear()
            self._questions.mark_flushed()

    def flush(self) -> None:
        """Write all buffered changes. Call it once, at the end of the transaction."""
        self._send_notices()
        hit("flush.before_messages")
        self.flush_messages()
        hit("flush.before_agents")
        self._mailboxes.save(self.now)
        self._session.append_events(self._events)
        hit("flush.done")

    def _send_notices(self) -> None:
        for (sender, reason), dead in self._dead.items():
            if sender == SYSTEM or (mailbox := self._mailboxes.get(sender)) is None or mailbox.state == "terminated":
                continue
            envelope = make_envelope(sender=SYSTEM, to=sender, payload=undeliverable_payload(dead, reason))
            # The notice must not continue a chain that is too long already.
            hops = self._limits.max_hops if reason == "hop_limit" else 0
            self._buffer_message(self._session.next_message_seq(), envelope, mailbox, hops)
        self._dead.clear()

    def _existing_receipt(self, envelope: Envelope, unkeyed_id: str) -> Receipt | None:
        """Return the receipt of an earlier send under the same id. Version 0.1 stored messages under `unkeyed_id`."""
        self._mailboxes.get(envelope.to)  # locks the mailbox: a duplicate in another process is now visible, or waits
        if receipt := self._receipts.get(envelope.id):
            return receipt
        row = self._db.execute(
            "SELECT id, queued, deliver_at FROM messages WHERE id = :id OR id = :unkeyed_id",
            {"id": envelope.id, "unkeyed_id": unkeyed_id},
        ).fetchone()
        if row is None:
            return None
        message_id, queued, deliver_at = row
        return _receipt(message_id, bool(queued), deliver_at)

    def _check_recipient(self, envelope: Envelope) -> Mailbox:
        mailbox, limits = self._mailboxes.get(envelope.to), self._limits
        if mailbox is None:
            raise Refused(
                "unknown_recipient", f"there is no agent {envelope.to!r}: list_agents shows the existing ones"
            )
        if mailbox.state == "terminated":
            raise Refused("recipient_terminated", f"{envelope.to!r} was terminated and reads no more messages")
        is_full = mailbox.waiting >= limits.mailbox or mailbox.waiting_bytes >= limits.mailbox_bytes
        if is_full and mailbox.kind == "agent" and not _unblocks(envelope, mailbox):
            raise Refused(
                "mailbox_full", f"{mailbox.waiting:,} messages wait for {envelope.to!r} already: try again later"
            )
        return mailbox

    def _count_hops(self, envelope: Envelope) -> int:
        if envelope.cause is None or envelope.delay >= NEW_CHAIN_DELAY:
            return 0
        row = self._db.execute("SELECT hops FROM messages WHERE id = :id", {"id": envelope.cause}).fetchone()
        return row[0] + 1 if row else 0

    def _check_hops(self, hops: int) -> None:
        if hops > self._limits.max_hops:
            raise Refused(
                "hop_limit",
                f"this chain of messages is {hops - 1} long, the most is {self._limits.max_hops}: answer the person,"
                " or start afresh with a message delayed by a minute or more",
            )

    def _check_artifact(self, ref: str, sender: str) -> None:
        """Refuse a file that is missing or that the sender may not read, with the same error for both."""
        if sender in RESERVED_IDS or self._limits.shared_artifacts:
            rows = self._db.execute(_SELECT_ARTIFACT, {"ref": ref})
        else:
            rows = self._db.execute(_SELECT_READABLE_ARTIFACT, {"ref": ref, "reader": sender})
        if not rows.fetchone():
            raise Refused("attachment_unknown", f"there is no artifact {ref!r}: upload the file first")


_REASON_TEXT = {
    "recipient_terminated": "terminated before it could be read",
    "hop_limit": "since this chain of messages is too long already",
    "mailbox_full": "whose mailbox is full",
    "poison": "since it is damaged and cannot be read",
}


def undeliverable_payload(dead: list[tuple[str, str]], reason: str) -> dict[str, Any]:
    """Payload of the notice to the sender of dead letters, given as pairs of id and recipient."""
    recipients = sorted({recipient for _, recipient in dead})
    count = f"{len(dead)} messages" if len(dead) > 1 else "a message"
    why = _REASON_TEXT.get(reason, f"refused as {reason}")
    return {
        "text": f"Not delivered: {count} to {', '.join(recipients)}, {why}. Kept as a dead letter.",
        "notice": {
            "kind": "undeliverable",
            "reason": reason,
            "recipients": recipients,
            "count": len(dead),
            "messageIds": [message_id for message_id, _ in dead[:MAX_IDS_IN_NOTICE]],
        },
    }


def _unblocks(envelope: Envelope, mailbox: Mailbox) -> bool:
    """True if the message makes a blocked agent try again. Only the first one does: it sets `runnable_at`."""
    is_immediate = envelope.sender == PERSON and not envelope.delay
    return is_immediate and mailbox.state == "blocked" and mailbox.runnable_at is None


def _receipt(message_id: str, queued: bool, deliver_at: int | None) -> Receipt:
    if deliver_at is not None:
        return Receipt(message_id=message_id, state="delayed", scheduled_delivery_time=from_ms(deliver_at))
    return Receipt(message_id=message_id, state="queued" if queued else "pending")
