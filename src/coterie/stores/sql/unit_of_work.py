"""The unit of work of one transaction: accepts envelopes, moves messages and writes all changes in `flush`.

Every change of a mailbox goes through it. So sequence numbers, counters, wake-ups and events always agree with the
messages. Rows are buffered and written as sets, which makes a batch of sends cheap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from coterie.agents import ACTIVE_STATES
from coterie.errors import Refused
from coterie.failpoints import hit
from coterie.ids import keyed_id
from coterie.messages import (
    NEW_CHAIN_DELAY,
    PERSON,
    RESERVED_IDS,
    SYSTEM,
    Envelope,
    Message,
    Receipt,
    make_envelope,
    undeliverable_payload,
)
from coterie.store import EventKind, Limits
from coterie.stores.sql import reminders, schedules
from coterie.stores.sql.mailbox import NO_QUESTIONS, Mailbox, Mailboxes, Questions
from coterie.stores.sql.rows import (
    ASKS_BACK_OPTION,
    IS_READABLE,
    STOPPED_OPTION,
    STORED_MESSAGE_COLUMNS,
    Connection,
    MessageRow,
    NewMessageRow,
    StoredMessage,
    insert,
    insert_messages,
    make_receipt,
)
from coterie.stores.sql.session import ALL_WAITING, MailboxPosition, Session, WaitingRow
from coterie.stores.sql.task_changes import (
    IS_WAITING_TASK,
    TaskChange,
    TaskChanges,
    is_stopped,
    read_budget_question,
    starts_with_row,
    was_started_via,
)
from coterie.tasks import STOP
from coterie.turn_store import Interruption

_DEAD_LETTER = "UPDATE messages SET state = 'dead', reason = :reason WHERE seq = :seq"
_SELECT_ARTIFACT = "SELECT 1 FROM artifacts WHERE ref = :ref"
_SELECT_READABLE_ARTIFACT = f"SELECT 1 FROM artifacts WHERE ref = :ref AND {IS_READABLE}"

# Another agent that the same plan asked, and that is working now.
_SELECT_OTHER_ANSWERER = """
SELECT 1 FROM messages AS asked
  JOIN messages AS other
    ON other.sender = asked.sender AND other.plan = asked.plan AND other.recipient <> asked.recipient
  JOIN agents ON agents.id = other.recipient
 WHERE asked.id = :asked AND other.state IN ('pending', 'taken')
   AND agents.kind = 'agent' AND agents.state IN ('ready', 'llm', 'tools') LIMIT 1
"""

_MS = timedelta(milliseconds=1)
JOIN_MS = 1_000
"""Longest wait of an answer for others. `claims` treats a longer wait of a ready agent as a clock that was set back."""

_encode = msgspec.json.Encoder().encode

_SELECT_CAUSE = """
SELECT messages.hops, coalesce(messages.task, messages.id), tasks.state
  FROM messages LEFT JOIN tasks ON tasks.id = coalesce(messages.task, messages.id) WHERE messages.id = :id
"""

_SELECT_RECIPIENT = f"SELECT recipient FROM messages WHERE id = :id AND {IS_WAITING_TASK}"
# From now on the message has its own id as its task: the row of the task exists.
_SET_OWN_TASK = f"""
UPDATE messages SET task = id WHERE id = :id AND {IS_WAITING_TASK} RETURNING parent_task, sender, recipient, created_at
"""


class _Cause(NamedTuple):
    """Columns of `_SELECT_CAUSE`: of the message that caused another one."""

    hops: int
    task: str
    state: str | None
    """Of its task. None: the task has not started."""


class UnitOfWork:
    def __init__(self, db: Connection, *, now: int, limits: Limits, session: Session) -> None:
        self._db, self._limits, self._session = db, limits, session
        self.now = now
        """Time in ms that due times are compared with."""
        self.tasks = TaskChanges()
        self._mailboxes = Mailboxes(db, self._session, self.tasks)
        self.frees_other_agents = False
        """Agents became claimable whose rows this transaction did not lock."""
        self.needs_flush = False
        """A person or another program depends on this transaction: its commit must be durable before it is visible."""
        self._new_rows: list[NewMessageRow] = []
        """Messages that are not written yet."""
        self._new_waiting: dict[str, list[NewMessageRow]] = {}
        """Those of `_new_rows` that wait, by recipient."""
        self._attachments: list[tuple[str, int]] = []
        self._events: list[tuple[int, EventKind, str, str | None]] = []
        self._receipts: dict[str, Receipt] = {}
        self._dead: dict[tuple[str, str], list[tuple[str, str]]] = {}
        """Per sender and reason: ids and recipients of new dead letters."""
        self._task_of_dead: dict[tuple[str, str], str] = {}
        """The task of one of them, to which the notice belongs."""
        self._questions = Questions(db, session, self.tasks)
        self.interruptions: dict[str, int] = {}
        """Positions of new messages that may cut a model's answer, by id of the agent whose model is asked."""
        self.ended_epochs: dict[str, int] = {}
        """By agent whose turn this transaction ended: results of actions under an earlier epoch are refused."""

    @property
    def timestamp(self) -> int:
        """Time to store, in ms: `now`, but never earlier than a time stored before."""
        return self._session.timestamp

    @property
    def secret(self) -> bytes:
        return self._session.secret

    @property
    def has_other_writers(self) -> bool:
        """True if other processes may write at the same time."""
        return self._session.lease_ms is not None

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
        self,
        envelope: Envelope,
        *,
        hops: int | None = None,
        task: str | None = None,
        reply_checked: bool = False,
        **runtime_columns: Any,
    ) -> Receipt:
        """Buffer one message for its mailbox or for later delivery, or raise `Refused`.

        `hops`, `task`: known already. `runtime_columns`: columns that no sender may set.
        """
        unkeyed_id = envelope.id
        if envelope.is_keyed:
            envelope = msgspec.structs.replace(envelope, id=keyed_id(self._session.secret, unkeyed_id))
        if envelope.may_exist and (receipt := self._existing_receipt(envelope, unkeyed_id)):
            if envelope.only_new:
                raise Refused("already_sent", f"the message {receipt.message_id} was sent already")
            return receipt
        mailbox = self._check_recipient(envelope)
        if envelope.every:
            envelope = schedules.set_first_due(envelope, self.now)
        if hops is None:
            hops, task = (0, None) if envelope.cause is None else self._continue_chain(envelope)
        if hops > self._limits.max_hops:
            raise Refused(
                "hop_limit",
                f"this chain of messages is {hops - 1} long, the most is {self._limits.max_hops}: answer the person,"
                " or start a new chain with a message delayed by a minute or more",
            )
        # A message that is delivered later answers only the question that it names; a recurring one answers none.
        answers_none = reply_checked or envelope.every or (envelope.delay and envelope.in_reply_to is None)
        questions = NO_QUESTIONS if answers_none else self._questions.find_answered(envelope)
        parent_task = None
        # Most messages of the person start a task at once.
        if task or questions or envelope.delay or "replay_of" in runtime_columns or mailbox.state in ACTIVE_STATES:
            task, parent_task = self._choose_task(envelope, mailbox, task, questions, "replay_of" in runtime_columns)
        if envelope.unless_answered and reminders.is_answered(self._db, self, envelope):
            runtime_columns["is_withdrawn"] = True
        if parent_task:
            self.tasks.of(parent_task).adds_later = 1
        for ref in envelope.attachments:
            # The person may resend a dead letter whose sender was allowed to attach the file.
            self._check_artifact(ref, PERSON if "replay_of" in runtime_columns else envelope.sender)
        seq = self._session.next_message_seq(envelope.to)
        if envelope.every:
            runtime_columns["schedule_id"] = schedules.start_schedule(self._db, self, envelope)
        receipt = self._buffer_message(
            seq, envelope, mailbox, hops, task=task, parent_task=parent_task, **runtime_columns
        )
        if envelope.attachments:
            self._attachments += ((ref, seq) for ref in dict.fromkeys(envelope.attachments))
        if questions:
            self.lock_questions()
            self._questions.record_answer(questions, envelope)
            for question in questions:
                self.record_event("quick_replies.changed", question)
            receipt = self._decide_budget(envelope, questions) or receipt
        is_answer = questions or (envelope.in_reply_to and not envelope.asks_back)
        if mailbox.reminders and receipt.state != "withdrawn" and is_answer:
            answered = {*questions, envelope.in_reply_to or ""}
            reminders.withdraw_answered(
                self._db, self, answered, answer_id=envelope.id, asker=envelope.to, answerer=envelope.sender
            )
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
        stopped: int = 0,
        plan: str | None = None,
        schedule_id: str | None = None,
        task: str | None = None,
        parent_task: str | None = None,
        is_withdrawn: bool = False,
    ) -> Receipt:
        """`task` None: the message starts one."""
        at = self.timestamp
        queued = mailbox.state in ACTIVE_STATES
        in_seq = deliver_at = delivered_at = None
        task_id = task or envelope.id
        if is_withdrawn:
            deliver_at = self.now + envelope.delay // _MS
        elif envelope.delay:
            deliver_at = self.now + envelope.delay // _MS
            mailbox.delayed += 1
            if envelope.unless_answered:
                self.mailbox(envelope.sender).reminders += 1
        else:
            joining_until = self._joining_until(mailbox) if automatic else None
            in_seq = self.add_message(envelope.to, mailbox, len(envelope.payload_json), envelope.sender)
            if joining_until and self._db.execute(_SELECT_OTHER_ANSWERER, {"asked": envelope.in_reply_to}).fetchone():
                mailbox.runnable_at = joining_until
            delivered_at = at
        row = NewMessageRow(
            seq, envelope.id, envelope.sender, envelope.to,
            "withdrawn" if is_withdrawn else "delayed" if deliver_at else "pending",
            at, envelope.payload_json, envelope.thread, int(envelope.is_question), in_seq, delivered_at,
            int(queued and not deliver_at), hops, deliver_at, None,
            ASKS_BACK_OPTION if envelope.asks_back else envelope.option,
            envelope.in_reply_to, envelope.cause, replay_of, automatic, stopped, plan,
        )  # fmt: skip
        row.task, row.parent_task, row.via = task, parent_task, envelope.via
        if deliver_at or schedule_id:
            row.schedule_id, row.every, row.unless_answered = schedule_id, envelope.every, envelope.unless_answered
        self._new_rows.append(row)
        if not deliver_at:
            self._new_waiting.setdefault(envelope.to, []).append(row)
        if envelope.is_question and not is_withdrawn:
            self._questions.add(row)
        if task or deliver_at or envelope.to == PERSON:
            self._count_message(row, envelope)
        if deliver_at:
            self.record_event("delayed.withdrawn" if is_withdrawn else "delayed.scheduled", envelope.id)
        else:
            self.record_event("message.created", envelope.id)
        return make_receipt(envelope.id, queued, deliver_at, schedule_id, task_id, is_withdrawn=is_withdrawn)

    def _count_message(self, row: NewMessageRow, envelope: Envelope) -> None:
        """Count a new message for its task. One that starts a task when it is due or taken is counted at that time."""
        if row.task is None:
            if row.starts_task_when_due:
                return
            self.tasks.start(row.id, row.parent_task, row.sender, row.recipient, row.created_at)
        change = self.tasks.of(row.task or row.id)
        change.messages += 1
        change.queued += row.state == "delayed" or (row.state == "pending" and row.recipient != PERSON)
        if row.recipient == PERSON and row.state == "pending":
            change.questions += row.question
            change.failed = int(row.sender == SYSTEM)  # an error, or the notice of a message that was not delivered

    def leave_queue(self, message: MessageRow | NewMessageRow | StoredMessage) -> None:
        """Count a message that no longer waits for an agent, or is no longer delayed."""
        if message.task is not None or starts_with_row(message.recipient, message.deliver_at):
            self.tasks.of(message.task or message.id).queued -= 1
            return
        self.tasks.start(message.id, message.parent_task, message.sender, message.recipient, message.created_at)
        self.tasks.of(message.id).messages += 1
        if not isinstance(message, NewMessageRow):
            self.record_event("task.changed", message.id)

    def _write_waiting_task(self, message_id: str) -> None:
        """Write the row of a task whose first message still waits, because another message joins it."""
        waiting = self._db.execute(_SELECT_RECIPIENT, {"id": message_id}).fetchone()
        if waiting:
            self.mailbox(waiting[0])  # locked: no other process takes the message now
        row = waiting and self._db.execute(_SET_OWN_TASK, {"id": message_id}).fetchone()
        if row:
            parent, sender, recipient, created_at = row
            self.tasks.start(message_id, parent, sender, recipient, created_at)
            change = self.tasks.of(message_id)
            change.messages, change.queued = change.messages + 1, change.queued + 1

    def _choose_task(
        self,
        envelope: Envelope,
        mailbox: Mailbox,
        task: str | None,
        questions: Mapping[str, str],
        is_replay: bool,
    ) -> tuple[str | None, str | None]:
        """Return the task of a new message and its parent task. Task None: it starts one.

        `task`: that of its cause. An answer joins the task of the question; a message of the person to an agent at work
        joins the task that the agent works on, unless another program started that task.
        """
        if task is None and questions:
            task = [*questions.values()][-1]
        elif task is None and envelope.asks_back:
            task = self._questions.task_of(envelope.in_reply_to or "")
        elif task is None and envelope.sender == PERSON and not envelope.delay and mailbox.state in ACTIVE_STATES:
            task = mailbox.task if was_started_via(self._db, mailbox.task, envelope.via) else None
        if is_replay or envelope.every or envelope.delay >= NEW_CHAIN_DELAY:
            return None, task
        return task, None

    def _decide_budget(self, envelope: Envelope, questions: Mapping[str, str]) -> Receipt | None:
        """Continue or stop a task as the person chose. Return the receipt of a message that stopped its own task."""
        from coterie.stores.sql import task_control  # it uses this module

        for question, task in questions.items():
            if read_budget_question(self._db, task) == question:
                self.tasks.of(task).close_question()
                if envelope.option is None:
                    # A text closes the question, and the agent may answer it. The next request of any agent of the
                    # task asks the person again.
                    task_control.retry_blocked(self._db, self, task)
                    continue
                if envelope.option == STOP:
                    task_control.stop_task(self._db, self, task)
                    return Receipt(message_id=envelope.id, state="withdrawn", task=task)
                task_control.grant_budget(self._db, self, task)
        return None

    def read_stored(self, seq: int) -> StoredMessage:
        """Read a message that is in the database."""
        row = self._db.execute(f"SELECT {STORED_MESSAGE_COLUMNS} FROM messages WHERE seq = :seq", {"seq": seq})
        return StoredMessage._make(row.fetchone())

    def withdraw(self, row: StoredMessage) -> None:
        """Withdraw a delayed or waiting message that is in the database."""
        mailbox = self.mailbox(row.recipient)
        if row.state == "delayed":
            mailbox.delayed -= 1
            if row.unless_answered:
                self.mailbox(row.sender).reminders -= 1
        else:
            mailbox.remove_message(row.payload_size)
            self.record_event("queue.changed", row.recipient)
        if row.is_queued:
            self.leave_queue(row)
        self._db.execute("UPDATE messages SET state = 'withdrawn' WHERE seq = :seq", {"seq": row.seq})
        self.record_event("delayed.withdrawn" if row.state == "delayed" else "message.updated", row.id)

    def _joining_until(self, mailbox: Mailbox) -> int | None:
        """Return until when an answer waits for other answers to the same plan. None: it does not wait."""
        if mailbox.is_joining(self.now):
            return mailbox.runnable_at
        return self.now + JOIN_MS if mailbox.kind == "agent" and mailbox.state == "idle" else None

    def accept_occurrence(self, envelope: Envelope, schedule_id: str) -> None:
        """Buffer the next message of a schedule. It starts a new causal chain."""
        seq = self._session.next_message_seq(envelope.to)
        cause = self._read_cause(envelope.cause)
        self._buffer_message(
            seq,
            envelope,
            self.mailbox(envelope.to),
            0,
            schedule_id=schedule_id,
            parent_task=cause.task if cause else None,
        )
        self._attachments += ((ref, seq) for ref in dict.fromkeys(envelope.attachments))

    def check_occurrence(self, recipient: str, attachments: Sequence[str]) -> None:
        """Raise `Refused` if a schedule cannot be resumed."""
        if self.mailbox(recipient).state == "terminated":
            raise Refused("recipient_terminated", f"{recipient!r} was terminated and reads no more messages")
        for ref in attachments:
            self._check_artifact(ref, PERSON)

    def add_message(self, recipient: str, mailbox: Mailbox, size: int, sender: str) -> int:
        """Count a waiting message; return its position. A paused agent ends its turn before it reads more mail."""
        position = mailbox.add_message(size, self.now, sender)
        if recipient == PERSON:
            self.needs_flush = True  # people act on what they read
        if sender == PERSON and mailbox.state == "llm" and not mailbox.hold:
            self.interruptions[recipient] = position
        return position

    def close_question(self, question: str, *, stopped: bool = False) -> bool:
        """Close an open question without an answer. An answered question keeps its answer. False: it is not open."""
        self.lock_questions()
        if not self._questions.close(question, STOPPED_OPTION if stopped else None):
            return False
        self.record_event("quick_replies.changed", question)
        return True

    def dead_letter(self, row: StoredMessage, reason: str) -> None:
        """Make a stored message a dead letter. `flush` sends one notice per sender and reason."""
        if row.is_queued:
            self.leave_queue(row)
        self._db.execute(_DEAD_LETTER, {"reason": reason, "seq": row.seq})
        self.record_event("message.updated", row.id)
        self._dead.setdefault((row.sender, reason), []).append((row.id, row.recipient))
        if not row.starts_task_when_due:
            self._task_of_dead[(row.sender, reason)] = row.task_id

    def store_dead_letter(self, envelope: Envelope, reason: str, task: str) -> None:
        """Store a refused reply as a dead letter, and notify its sender. Skip it if the recipient never existed."""
        if self._mailboxes.get(envelope.to) is None:
            return
        seq = self._session.next_message_seq(envelope.to)
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
                int(envelope.is_question),
                in_reply_to=envelope.in_reply_to,
                cause=envelope.cause,
                automatic=True,
                reason=reason,
                task=task,
            )
        )
        self.tasks.of(task).messages += 1
        self.record_event("message.updated", envelope.id)
        self._dead.setdefault((envelope.sender, reason), []).append((envelope.id, envelope.to))
        self._task_of_dead[(envelope.sender, reason)] = task

    def prefetch(self, agent_ids: Sequence[str]) -> None:
        """Read the mailboxes of agents that are locked already and are used next."""
        self._session.prefetch(agent_ids)

    def lock_questions(self) -> None:
        """Lock the person's mailbox, which has all questions: no other process changes one of them now."""
        self._mailboxes.get(PERSON)

    def lock_tasks(self, task_ids: Sequence[str]) -> None:
        """Lock tasks whose rows SQL changes directly, before `flush`."""
        self._session.lock_tasks(task_ids)

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
        self._events.append((self._session.timestamp, kind, subject, None if data is None else _encode(data).decode()))

    def interruption_list(self) -> list[Interruption]:
        """Return the interruptions for the workers that run actions of these agents."""
        messages = [Interruption(agent_id, position) for agent_id, position in self.interruptions.items()]
        return messages + [Interruption(agent_id, 0, epoch) for agent_id, epoch in self.ended_epochs.items()]

    def newly_runnable(self) -> list[tuple[str, str]]:
        """Ids and states of agents that became runnable in this transaction."""
        return self._mailboxes.newly_runnable(self.now)

    def read_waiting(
        self, agent_id: str, *, after: int | None = None, upto: int = ALL_WAITING, limit: int | None = None
    ) -> Sequence[WaitingRow]:
        """Return the stored waiting messages after position `after` and up to `upto`, in order; the first `limit`."""
        mailbox = self.mailbox(agent_id)
        position: MailboxPosition = (mailbox.taken_seq, mailbox.next_in_seq, mailbox.waiting)
        after = mailbox.taken_seq if after is None else after
        return self._session.read_waiting(agent_id, position, after, upto, ALL_WAITING if limit is None else limit)

    def buffered_messages(self, agent_id: str) -> list[tuple[NewMessageRow, Message]]:
        """Return the rows and messages (in state taken) of a mailbox whose messages are all still buffered.

        Empty if a waiting message is in the database.
        """
        rows = self._new_waiting.get(agent_id, ())
        if len(rows) != self.mailbox(agent_id).waiting:
            return []
        return [(row, row.to_taken_message(self.timestamp)) for row in rows]

    def take_buffered(self, agent_id: str, count: int) -> None:
        """Mark the agent's first `count` buffered messages as taken before they are written; this saves an UPDATE."""
        rows = self._new_waiting.pop(agent_id)
        for row in rows[:count]:
            row.state, row.taken_at = "taken", self.timestamp
        if rows[count:]:
            self._new_waiting[agent_id] = rows[count:]

    def flush_messages(self) -> None:
        """Write buffered messages, so that SQL can read them."""
        if self._new_rows:
            insert_messages(self._db, self._new_rows)
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
        self.needs_flush |= self._mailboxes.save(self.now)
        self.write_tasks()
        self._session.append_events(self._events)
        hit("flush.done")

    def unwritten_changes(self, task_id: str) -> list[TaskChange]:
        """Return what this transaction, and earlier ones of its batch, add to a task and is not in the database."""
        earlier = self._session.unwritten_change(task_id)
        return [*([earlier] if earlier else []), self.tasks.pending(task_id)]

    def write_tasks(self) -> None:
        """Write tasks that start, and the counters of others."""
        self.tasks.write_new(self._db, self.timestamp)
        if changes := self.tasks.take_changes():
            for task_id, change in changes.items():
                if change.is_visible:
                    self.record_event("task.changed", task_id)
            self._session.change_tasks(changes)

    def _send_notices(self) -> None:
        for (sender, reason), dead in self._dead.items():
            if sender == SYSTEM or (mailbox := self._mailboxes.get(sender)) is None or mailbox.state == "terminated":
                continue
            envelope = make_envelope(sender=SYSTEM, to=sender, payload=undeliverable_payload(dead, reason))
            # The notice must not continue a chain that is too long already.
            hops = self._limits.max_hops if reason == "hop_limit" else 0
            task = self._task_of_dead.get((sender, reason))
            if task and not self.tasks.is_new(task) and is_stopped(self._db, task):
                task = None
            self._buffer_message(self._session.next_message_seq(sender), envelope, mailbox, hops, task=task)
        self._dead.clear()
        self._task_of_dead.clear()

    def _existing_receipt(self, envelope: Envelope, unkeyed_id: str) -> Receipt | None:
        """Return the receipt of an earlier send under the same id. Version 0.1 stored messages under `unkeyed_id`."""
        self._mailboxes.get(envelope.to)  # locks the mailbox: a duplicate in another process is now visible, or waits
        if receipt := self._receipts.get(envelope.id):
            return receipt
        row = self._db.execute(
            "SELECT id, queued, deliver_at, schedule_id, coalesce(task, id),"
            " CASE WHEN state = 'withdrawn' AND unless_answered IS NOT NULL THEN 1 ELSE 0 END"
            " FROM messages WHERE id = :id OR id = :unkeyed_id",
            {"id": envelope.id, "unkeyed_id": unkeyed_id},
        ).fetchone()
        if row is None:
            return None
        message_id, queued, deliver_at, schedule_id, task, is_withdrawn = row
        return make_receipt(message_id, bool(queued), deliver_at, schedule_id, task, is_withdrawn=bool(is_withdrawn))

    def _check_recipient(self, envelope: Envelope) -> Mailbox:
        mailbox, limits = self._mailboxes.get(envelope.to), self._limits
        if mailbox is None:
            raise Refused("unknown_recipient", f"there is no agent {envelope.to!r}: use the id of an existing one")
        if mailbox.state == "terminated":
            raise Refused("recipient_terminated", f"{envelope.to!r} was terminated and reads no more messages")
        if envelope.unless_paused and mailbox.state == "paused":
            raise Refused("recipient_paused", f"{envelope.to} is paused: the owner must resume it. Nothing was sent")
        is_full = mailbox.waiting >= limits.mailbox or mailbox.waiting_bytes >= limits.mailbox_bytes
        if is_full and mailbox.kind == "agent" and not _unblocks(envelope, mailbox):
            raise Refused("mailbox_full", f"{mailbox.waiting:,} messages wait for {envelope.to!r}: try again later")
        return mailbox

    def _continue_chain(self, envelope: Envelope) -> tuple[int, str | None]:
        """Return the hops of a new message, and the task of the message that caused it."""
        cause = self._read_cause(envelope.cause)
        if cause is None:
            return 0, None
        if cause.state is None and not self.tasks.is_new(cause.task):
            self._write_waiting_task(cause.task)
        if cause.state == "stopped":
            raise Refused("task_stopped", "the person stopped this task: nothing more can be sent for it")
        return 0 if envelope.delay >= NEW_CHAIN_DELAY else cause.hops + 1, cause.task

    def _read_cause(self, message_id: str | None) -> _Cause | None:
        row = message_id and self._db.execute(_SELECT_CAUSE, {"id": message_id}).fetchone()
        return _Cause._make(row) if row else None

    def _check_artifact(self, ref: str, sender: str) -> None:
        """Refuse a file that is missing or that the sender may not read, with the same error for both."""
        if sender in RESERVED_IDS or self._limits.shared_artifacts:
            rows = self._db.execute(_SELECT_ARTIFACT, {"ref": ref})
        else:
            rows = self._db.execute(_SELECT_READABLE_ARTIFACT, {"ref": ref, "reader": sender})
        if not rows.fetchone():
            raise Refused("attachment_unknown", f"there is no artifact {ref!r}: upload the file first")


def _unblocks(envelope: Envelope, mailbox: Mailbox) -> bool:
    """True if the message makes a blocked agent try again. Only the first one does: it sets `runnable_at`."""
    is_immediate = envelope.sender == PERSON and not envelope.delay
    return is_immediate and mailbox.state == "blocked" and mailbox.runnable_at is None
