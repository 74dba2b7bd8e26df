"""Agent rows and questions to the person within one transaction.

A row is read once, changed in memory and written once, by `Mailboxes.save`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import compress
from operator import ne
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import astuple, replace

from coterie.agents import ACTIVE_STATES
from coterie.errors import Refused
from coterie.messages import PERSON, Envelope, Message, QuestionAnswer
from coterie.plan import DENIED_RESULT
from coterie.stores.sql import turn_rows
from coterie.stores.sql.rows import Connection, NewMessageRow, to_answer, to_payload
from coterie.stores.sql.task_changes import TaskChanges, read_budget_question, was_started_via
from coterie.stores.sql.turn_rows import approval_question_id
from coterie.turn import wakes

if TYPE_CHECKING:
    from coterie.stores.sql.session import Session


class Mailbox(Struct, gc=False):
    """One row of `agents`; the fields are its columns."""

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
    problem: str | None
    worker: str | None
    crash_step: int
    crashes: int
    since: int | None
    history_version: int
    """Grows with every change of what `queries.read_history_view` returns for the agent."""
    person: int
    """1: the person wrote a message of the turn, or a waiting one."""
    retry_ms: int | None = None
    task: str | None = None
    """The task that the open turn counts for. None: no turn is open."""
    turn_began: int | None = None
    """When the open turn took its first message."""
    other_tasks: str | None = None
    """Other tasks whose messages the open turn took, separated by spaces. They go on until the turn ends."""
    over_budget: int = 0
    """1: blocked because `task` has used its budget. 2: the open turn goes on for another task, whose budget is checked
    before the next request."""
    reminders: int = 0
    """Delayed messages from this sender that an answer withdraws."""
    first_from_person: int = 0
    """No waiting message of the person is before this position."""
    last_from_person: int = 0
    """The position of the person's last message. It may have been taken or withdrawn."""

    def add_message(self, size: int, now: int, sender: str = "") -> int:
        """Count a new waiting message of `size` characters, and return its position. Wake the agent if it is idle."""
        position = self.next_in_seq
        self.next_in_seq += 1
        self.waiting += 1
        self.waiting_bytes += size
        if self.kind == "agent":
            if sender == PERSON:
                if not self.may_have_from_person():
                    self.first_from_person = position
                self.last_from_person = position
            # An idle agent has no waiting messages: its `person` is left over from the previous turn.
            self.person = int(sender == PERSON or (self.person == 1 and self.state != "idle"))
            if wakes(self.state, unblocks=sender == PERSON or self.over_budget == 1) or self.is_joining(now):
                self.state, self.runnable_at = "ready" if self.state == "idle" else self.state, now
        return position

    def remove_message(self, size: int) -> None:
        """Count one waiting message less. A ready agent without messages becomes idle."""
        self.waiting -= 1
        self.waiting_bytes -= size
        if self.state == "ready" and not self.waiting:
            self.state, self.runnable_at = "idle", None

    def may_have_from_person(self) -> bool:
        """False: no message of the person waits."""
        return self.last_from_person > self.taken_seq and self.last_from_person >= self.first_from_person

    def is_joining(self, now: int) -> bool:
        """True if the agent waits for further answers to the same plan before it reads those that arrived."""
        return self.state == "ready" and self.runnable_at is not None and self.runnable_at > now

    def is_claimed(self) -> bool:
        return self.state in ("llm", "tools")

    def is_leased(self) -> bool:
        """True if this transaction claimed the agent or advanced its turn."""
        return self.runnable_at is None and self.is_claimed()

    def is_runnable(self, now: int) -> bool:
        return self.runnable_at is not None and self.runnable_at <= now

    def tasks_at_work(self) -> list[str]:
        """The tasks that the agent is at work on. One whose turn waits for an approval has an open question instead."""
        if self.task is None:
            return []
        if self.state == "blocked":  # by the budget, and about to try again
            return [self.task] if self.over_budget and self.runnable_at is not None else []
        if self.state not in ACTIVE_STATES:
            return []
        others = self.other_tasks.split() if self.other_tasks else []
        return others if self.state == "wait_approval" else [self.task, *others]


MAILBOX_COLUMNS = ", ".join(Mailbox.__struct_fields__)
SELECT_MAILBOX = f"SELECT {MAILBOX_COLUMNS} FROM agents WHERE id = :id"


@cache
def _update_sql(columns: tuple[str, ...]) -> str:
    """UPDATE of some columns. A step changes few of them, and writing all costs three times as much."""
    sets = ", ".join(f"{column} = :{column}" for column in columns)
    return f"UPDATE agents SET {sets} WHERE id = :id"


class _LockedRow(NamedTuple):
    mailbox: Mailbox
    """The row as the transaction changes it."""
    before: Mailbox
    """The row as it was read."""


class Mailboxes:
    """The mailboxes that one transaction has locked."""

    def __init__(self, db: Connection, session: Session, tasks: TaskChanges) -> None:
        self._db, self._session, self._tasks = db, session, tasks
        self._locked: dict[str, _LockedRow | None] = {}
        """By agent id. None: no such agent."""

    def get(self, agent_id: str) -> Mailbox | None:
        """Lock the agent's row and return its mailbox. None: no such agent."""
        try:
            locked = self._locked[agent_id]
        except KeyError:
            row = self._session.lock_agent(agent_id)
            locked = self._locked[agent_id] = _LockedRow(replace(row), row) if row else None
        return locked.mailbox if locked else None

    def newly_runnable(self, now: int) -> list[tuple[str, str]]:
        """Ids and states of agents that are runnable now and were not when they were read."""
        return [
            (agent_id, locked.mailbox.state)
            for agent_id, locked in self._locked.items()
            if locked and locked.mailbox.is_runnable(now) and not locked.before.is_runnable(now)
        ]

    def save(self, now: int) -> bool:
        """Write the changed rows and release all mailboxes. True: a lease began or ended; flush the commit.

        A process outlives a crash of its database. If the crash undid a claim, two processes could have the same epoch.
        """
        has_leases, is_lease_changed = self._session.lease_ms is not None, False
        changed: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for agent_id, locked in self._locked.items():
            if locked is None or locked.mailbox == locked.before:
                continue
            mailbox, before = locked
            self._set_times(mailbox, before, now)
            self._count_work(mailbox, before)
            if has_leases and (mailbox.epoch != before.epoch or mailbox.is_claimed() != before.is_claimed()):
                is_lease_changed = True
            row = _changed_columns(before, mailbox)
            columns = tuple(row)
            row["id"] = agent_id
            changed.setdefault(columns, []).append(row)
            self._session.cache_agent(agent_id, mailbox)
        # PostgreSQL's connection joins several writes into one statement.
        update_row = getattr(self._db, "update_row", None)
        for columns, rows in changed.items():
            if update_row:
                for row in rows:
                    update_row(_update_sql(columns), row)
            elif len(rows) == 1:
                self._db.execute(_update_sql(columns), rows[0])
            else:
                self._db.executemany(_update_sql(columns), rows)
        self._locked.clear()
        return is_lease_changed

    def _set_times(self, mailbox: Mailbox, before: Mailbox, now: int) -> None:
        """Set the time of a state change and the end of the lease."""
        if mailbox.state != before.state:
            mailbox.since = self._session.timestamp
        lease_ms = self._session.lease_ms
        if lease_ms is not None and mailbox.is_leased():
            end = before.runnable_at if before.state in ("llm", "tools") and before.epoch == mailbox.epoch else None
            # An index has this column, so a change of it is expensive. Heartbeats renew the lease in any case.
            is_long = end is not None and now + lease_ms * 2 // 3 < end <= now + lease_ms
            mailbox.runnable_at = end if is_long else now + lease_ms

    def _count_work(self, mailbox: Mailbox, before: Mailbox) -> None:
        """Count the agents at work of the tasks that the row has left or joined."""
        left, joined = before.tasks_at_work(), mailbox.tasks_at_work()
        if left != joined:
            for task in left:
                self._tasks.of(task).active -= 1
            for task in joined:
                self._tasks.of(task).active += 1


def _changed_columns(before: Mailbox, after: Mailbox) -> dict[str, Any]:
    # Compared without a loop in Python: a row has 32 columns.
    old, new = astuple(before), astuple(after)
    return dict(compress(zip(Mailbox.__struct_fields__, new, strict=True), map(ne, old, new)))


_SELECT_QUESTION = """
SELECT sender, CAST(payload AS BLOB), question, answered_by, answered_option, coalesce(task, id), state FROM messages
 WHERE id = :id
"""
_SELECT_OPEN = """
SELECT id, coalesce(task, id) FROM messages
 WHERE sender = :sender AND question = 1 AND answered_by IS NULL AND state IN ('pending', 'taken') ORDER BY seq
"""
_ANSWER = """
UPDATE messages SET answered_by = :answer, answered_option = :option WHERE id = :id AND answered_by IS NULL RETURNING id
"""
# A question that was closed without an answer has its own id in answered_by.
_CLOSE = """
UPDATE messages SET answered_by = id, answered_option = :option
 WHERE id = :id AND question = 1 AND answered_by IS NULL RETURNING sender, state, coalesce(task, id)
"""
_REOPEN = """
UPDATE messages SET answered_by = NULL, answered_option = NULL WHERE answered_by = :answer
RETURNING seq, id, coalesce(task, id)
"""

_decode = msgspec.json.decode


NO_QUESTIONS: Mapping[str, str] = MappingProxyType({})


class _QuestionRow(NamedTuple):
    sender: str
    payload: str | bytes
    question: int
    answered_by: str | None
    answered_option: int | None
    task: str
    state: str

    @property
    def is_open(self) -> bool:
        return self.answered_by is None and self.state in ("pending", "taken")


class Questions:
    """Open questions to the person, and the messages that answer them."""

    def __init__(self, db: Connection, session: Session, tasks: TaskChanges) -> None:
        self._db, self._session, self._tasks = db, session, tasks
        self._buffered: dict[str, NewMessageRow] = {}
        """Questions that are not written yet, by id."""
        self._open: dict[str, dict[str, str]] = {}
        """Per agent looked up so far: its open questions in order, by id, with their tasks."""
        self._has_changed = False
        """This transaction answered or closed a question, so what the session read at its beginning is outdated."""

    def add(self, row: NewMessageRow) -> None:
        """Register a question that is buffered."""
        self._buffered[row.id] = row
        if row.sender in self._open and row.state != "delayed":
            self._open[row.sender][row.id] = row.task or row.id

    def mark_flushed(self) -> None:
        """Forget buffered questions: their rows are in the database now."""
        self._buffered.clear()

    def find_answered(self, envelope: Envelope) -> Mapping[str, str]:
        """Return the questions that this message answers: ids and their tasks. Or raise `Refused`.

        A program answers only questions of tasks that it started itself.
        """
        if envelope.in_reply_to is not None:
            return self._find_replied(envelope, envelope.in_reply_to)
        if envelope.sender == PERSON and (questions := self._open_questions(envelope.to)):
            if envelope.via is None:
                return dict(questions)
            return {id_: task for id_, task in questions.items() if was_started_via(self._db, task, envelope.via)}
        return NO_QUESTIONS

    def record_answer(self, questions: Mapping[str, str], envelope: Envelope) -> None:
        """Store the answer. The person's mailbox is locked; `questions` may have been read before that."""
        self._has_changed = True
        for question, task in questions.items():
            self._tasks.of(task).questions -= 1
            self._open.get(envelope.to, {}).pop(question, None)
            if row := self._buffered.get(question):
                row.answered_by, row.answered_option = envelope.id, envelope.option
                continue
            answer = {"answer": envelope.id, "option": envelope.option, "id": question}
            if self._db.execute(_ANSWER, answer).fetchone() is None:
                self._session.retry_with(PERSON)  # another process answered or closed it meanwhile

    def close(self, question: str, option: int | None = None) -> bool:
        """Close a stored question without an answer. False: it is not open."""
        self._has_changed = True
        row = self._db.execute(_CLOSE, {"id": question, "option": option}).fetchone()
        if row is None:
            return False
        sender, state, task = row
        self._open.get(sender, {}).pop(question, None)
        if state in ("pending", "taken"):
            self._tasks.of(task).questions -= 1
        return True

    def _find_replied(self, envelope: Envelope, message_id: str) -> Mapping[str, str]:
        question = self._find(message_id)
        is_own = envelope.via is None or (question and was_started_via(self._db, question.task, envelope.via))
        if question is None or not is_own:
            raise Refused("inReplyTo_unknown", f"there is no message {message_id!r} to reply to")
        if envelope.asks_back:
            self._check_asks_back(envelope, message_id, question)
            return {}
        if envelope.option is not None:
            _check_option(envelope, envelope.option, message_id, question)
        if envelope.sender != PERSON or not question.question or envelope.to != question.sender:
            return {}
        if envelope.option is None:
            return {message_id: question.task} if question.is_open else {}  # free text is never refused
        status = approval_status(self._db, message_id, question.sender, question.payload)
        if envelope.via is not None and (status or read_budget_question(self._db, question.task) == message_id):
            raise Refused("not_yours", "only the owner may approve a call or grant a budget: use the panel")
        if question.answered_by is None and status in ("decided", "void"):
            raise Refused(
                "already_answered",
                "that approval is void: its call no longer waits for it",
                answer=QuestionAnswer(message_id, None).to_dict(),
            )
        if question.is_open:
            return {message_id: question.task}
        if question.answered_by is None:
            reason = "that question was withdrawn, or is not delivered yet"
            raise Refused("already_answered", reason, answer=QuestionAnswer(message_id, None).to_dict())
        first_answer = to_answer(question.answered_by, question.answered_option)
        assert first_answer is not None  # noqa: S101
        reason = "that question was answered already"
        if first_answer.is_stopped:
            reason = "that question was closed: its task was stopped"
        elif question.answered_by == message_id:
            reason = "that question was closed without an answer"
        raise Refused("already_answered", reason, answer=first_answer.to_dict())

    def _check_asks_back(self, envelope: Envelope, message_id: str, question: _QuestionRow) -> None:
        status = approval_status(self._db, message_id, question.sender, question.payload)
        if status is None or envelope.sender != PERSON or envelope.to != question.sender:
            raise Refused("asksBack_invalid", "asksBack needs inReplyTo: an approval question of the agent")
        if envelope.via is not None:
            raise Refused("not_yours", "only the owner may ask about a call before approving it: use the panel")
        if status != "waiting" or question.answered_by is not None:
            answer = to_answer(question.answered_by, question.answered_option) or QuestionAnswer(message_id, None)
            reason = "the call no longer waits for a decision: send this as an ordinary message"
            raise Refused("already_answered", reason, answer=answer.to_dict())

    def task_of(self, question: str) -> str | None:
        row = self._find(question)
        return row.task if row else None

    def _find(self, message_id: str) -> _QuestionRow | None:
        if row := self._buffered.get(message_id):
            task = row.task or row.id
            answer = row.answered_by, row.answered_option
            return _QuestionRow(row.sender, row.payload, row.question, *answer, task, row.state)
        return _read_question(self._db, message_id)

    def _open_questions(self, agent_id: str) -> dict[str, str]:
        if agent_id not in self._open:
            known = None if self._has_changed else self._session.open_questions(agent_id)
            if known is None:
                known = dict(self._db.execute(_SELECT_OPEN, {"sender": agent_id}).fetchall())
            questions = dict(known)
            for row in self._buffered.values():
                if row.sender == agent_id and row.state != "delayed" and row.answered_by is None:
                    questions[row.id] = row.task or row.id
            self._open[agent_id] = questions
        return self._open[agent_id]


def reopen_questions(db: Connection, tasks: TaskChanges, answer_id: str) -> list[tuple[str, str]]:
    """Reopen the questions that the withdrawn message `answer_id` answered; return their ids and tasks.

    The caller has locked the person's mailbox.
    """
    reopened = sorted(db.execute(_REOPEN, {"answer": answer_id}))
    for _, _, task in reopened:
        tasks.of(task).questions += 1
    return [(question, task) for _, question, task in reopened]


def _read_question(db: Connection, message_id: str | None) -> _QuestionRow | None:
    row = db.execute(_SELECT_QUESTION, {"id": message_id}).fetchone()
    return row and _QuestionRow._make(row)


ApprovalStatus = Literal["waiting", "decided", "void"]
"""Of the call that the question is about: it waits, was approved or denied, or ended without a decision."""


def approval_status(db: Connection, question: str, agent_id: str, payload_json: str | bytes) -> ApprovalStatus | None:
    """Return the status of the approval that `question` asks for. None: it asks for no approval."""
    approval = to_payload(question, payload_json).get("approval")
    call_id = approval.get("callId") if isinstance(approval, dict) else None
    if not isinstance(call_id, str) or approval_question_id(agent_id, call_id) != question:
        return None  # agents can write any `approval` into their payloads; only our own id counts
    state, result = turn_rows.read_call_state(db, agent_id, call_id)
    if state == "gated":
        return "waiting"
    return "void" if state == "cancelled" and result != DENIED_RESULT else "decided"


def answered_approval_status(db: Connection, answer: Message) -> ApprovalStatus | None:
    """Return the status of the approval that `answer` replies to. None: it replies to none."""
    question = _read_question(db, answer.in_reply_to) if answer.option is not None else None
    return approval_status(db, answer.in_reply_to or "", question.sender, question.payload) if question else None


def _translated_options(payload: Mapping[str, Any], option: int) -> list[Any]:
    """The texts of a quick reply in the languages of `payload.translations`, which only the tour's greeting has."""
    languages = payload.get("translations")
    found = languages.values() if isinstance(languages, dict) else ()
    lists = [one.get("quickReplies") for one in found if isinstance(one, dict)]
    return [one[option] for one in lists if isinstance(one, list) and len(one) > option]


def _check_option(envelope: Envelope, option: int, message_id: str, question: _QuestionRow) -> None:
    payload = to_payload(message_id, question.payload)
    options = payload.get("quickReplies")
    if not isinstance(options, list):
        options = []
    if option >= len(options):
        raise Refused("option_invalid", f"that message offers {len(options)} quick replies, not {option + 1}")
    text = _decode(envelope.payload_json).get("text")
    if text != options[option] and text not in _translated_options(payload, option):
        raise Refused("option_invalid", "payload.text must be the text of the chosen quick reply, unchanged")
    if envelope.sender == PERSON and question.question and envelope.to != question.sender:
        raise Refused("option_invalid", f"a quick reply must go to the agent that offered it: {question.sender!r}")
