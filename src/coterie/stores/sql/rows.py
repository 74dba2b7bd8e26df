"""The connection that both engines provide, bulk inserts, the `meta` table, and conversion of rows to objects.

SQL is written in SQLite's dialect with named parameters, `:name`; the PostgreSQL engine translates both. A comment with
a plus, `/*+ FOR UPDATE */`, holds a clause that only PostgreSQL executes: SQLite has one writer and needs no row locks.

A row type has the columns of its SELECT as fields, in the same order: `MessageRow(*row)`.

The society's secret is one random row of `meta` that never changes. Message ids and the marks around messages in a
model's request are hashed with it. It leaves the database only in a backup or a copy of the whole society.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec.structs import astuple

from coterie.agents import CLAIMED_STATES, Agent, AgentState
from coterie.artifacts import Artifact, ArtifactType
from coterie.clock import from_ms
from coterie.ids import new_secret
from coterie.messages import NEW_CHAIN_DELAY, PERSON, CutOff, Message, Payload, QuestionAnswer, Receipt, State

log = logging.getLogger(__name__)


class Rows(Protocol):
    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    @property
    def Error(self) -> type[Exception]: ...  # noqa: N802 - the names of the DB-API

    @property
    def IntegrityError(self) -> type[Exception]: ...  # noqa: N802

    @property
    def OperationalError(self) -> type[Exception]: ...  # noqa: N802

    def execute(self, sql: str, parameters: Mapping[str, Any] | Sequence[Any] = ..., /) -> Rows:
        """Run `sql`. A mapping sets parameters `:name`; a sequence sets the `?` of the INSERT that `insert` writes."""
        ...

    def executemany(self, sql: str, parameters: Iterable[Mapping[str, Any]], /) -> object:
        """Run `sql` once per mapping. It has no result and may run together with the next statement."""
        ...


def get_meta(db: Connection, key: str) -> str | None:
    row = db.execute("SELECT value FROM meta WHERE key = :key", {"key": key}).fetchone()
    return row[0] if row else None


def set_meta(db: Connection, key: str, value: str) -> str:
    db.execute(
        "INSERT INTO meta (key, value) VALUES (:key, :value) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        {"key": key, "value": value},
    )
    return value


FEW_ROWS = 4
"""So many rows or fewer are one INSERT."""
ROWS_PER_INSERT = (64, 8, *range(FEW_ROWS, 0, -1))
"""Rows of one INSERT. Few sizes, so that every statement stays prepared."""


def insert(db: Connection, into: str, rows: Sequence[Sequence[Any]]) -> None:
    """Insert `rows` into `into`, a table with its columns: `events (at, kind)`.

    One INSERT of many rows holds the interpreter lock once; `executemany` takes it once per row. It is the only
    statement with `?`: SQLite looks named parameters up one by one. A connection with a faster way has a method
    `insert_rows`.
    """
    if not rows:
        return
    if insert_rows := getattr(db, "insert_rows", None):
        insert_rows(into, rows)
        return
    if len(rows) <= FEW_ROWS:
        db.execute(_statement(into, len(rows[0]), len(rows)), tuple(chain.from_iterable(rows)))
        return
    done = 0
    for size in ROWS_PER_INSERT:
        while len(rows) - done >= size:
            part = rows[done : done + size]
            db.execute(_statement(into, len(part[0]), size), tuple(chain.from_iterable(part)))
            done += size


@cache
def _statement(into: str, width: int, size: int) -> str:
    row = f"({', '.join('?' * width)})"
    return f"INSERT INTO {into} VALUES {', '.join([row] * size)}"


def read_secret(db: Connection) -> bytes:
    """Return the secret; random bytes if an old database, opened for reading only, has none."""
    value = get_meta(db, "secret")
    return value.encode() if value is not None else os.urandom(32)


def make_secret(db: Connection) -> bytes:
    """Return the secret; create it if it is missing. Call it when a store opens, outside any other transaction."""
    db.execute(
        "INSERT INTO meta (key, value) VALUES ('secret', :secret) ON CONFLICT (key) DO NOTHING",
        {"secret": new_secret()},
    )
    return read_secret(db)


def json_keys(values: Iterable[str]) -> str:
    """Return the parameter of `IN (SELECT key FROM json_each(:ids))`: a JSON object with `values` as keys.

    Both engines have `json_each` for objects, but not for arrays.
    """
    return _encode(dict.fromkeys(values)).decode()


MESSAGE_COLUMNS = """
messages.seq, messages.id, messages.sender, messages.recipient, CAST(messages.payload AS BLOB), messages.state,
messages.created_at, messages.deliver_at, messages.delivered_at, messages.taken_at, messages.in_seq,
messages.in_reply_to, messages.option, messages.cause, messages.hops, messages.early, messages.stopped,
messages.reason, messages.replay_of, messages.answered_by, messages.answered_option, messages.schedule_id,
messages.every, messages.missed, messages.task, messages.parent_task, messages.unless_answered, messages.via
"""
"""Columns of `MessageRow`. The payload as bytes: one that is not valid UTF-8 must not make other rows unreadable."""


ENDINGS: dict[int, CutOff] = {2: "length", 3: "content_filter"}
"""Values of the column `stopped` for answers that the service cut off. 0: complete, 1: stopped by the person."""


def ending_code(*, stopped: bool, cut_off: CutOff | None) -> int:
    """The value of the column `stopped`."""
    return next((code for code, reason in ENDINGS.items() if reason == cut_off), int(stopped))


ASKS_BACK_OPTION = -1
"""Value of `option` of a message that asks about a call that needs approval, and chooses no option."""


def chosen_option(option: int | None) -> int | None:
    return None if option == ASKS_BACK_OPTION else option


STOPPED_OPTION = -1
"""Value of `answered_option` of a question that was closed because its task was stopped."""


def to_answer(answered_by: str | None, option: int | None) -> QuestionAnswer | None:
    if answered_by is None:
        return None
    if option == STOPPED_OPTION:
        return QuestionAnswer(answered_by, None, is_stopped=True)
    return QuestionAnswer(answered_by, option)


class MessageRow(msgspec.Struct, gc=False):
    seq: int
    id: str
    sender: str
    recipient: str
    payload: str | bytes
    state: State
    created_at: int
    deliver_at: int | None
    delivered_at: int | None
    taken_at: int | None
    in_seq: int | None
    in_reply_to: str | None
    option: int | None
    cause: str | None
    hops: int
    early: int
    stopped: int
    reason: str | None
    replay_of: str | None
    answered_by: str | None
    answered_option: int | None
    schedule_id: str | None
    every: str | None
    missed: int
    task: str | None
    """None: the message is the first of its task."""
    parent_task: str | None
    unless_answered: str | None
    via: str | None

    def to_message(self) -> Message:
        return Message(
            seq=self.seq,
            id=self.id,
            sender=self.sender,
            to=self.recipient,
            payload=to_payload(self.id, self.payload),
            state=self.state,
            created_at=from_ms(self.created_at),
            deliver_at=None if self.deliver_at is None else from_ms(self.deliver_at),
            delivered_at=None if self.delivered_at is None else from_ms(self.delivered_at),
            taken_at=None if self.taken_at is None else from_ms(self.taken_at),
            mailbox_position=self.in_seq,
            in_reply_to=self.in_reply_to,
            option=chosen_option(self.option),
            asks_back=self.option == ASKS_BACK_OPTION,
            cause=self.cause,
            hops=self.hops,
            early=bool(self.early),
            stopped=self.stopped == 1,
            cut_off=ENDINGS.get(self.stopped),
            reason=self.reason,
            replay_of=self.replay_of,
            answer=to_answer(self.answered_by, self.answered_option),
            schedule_id=self.schedule_id,
            every=self.every,
            missed=self.missed,
            task=self.task or self.id,
            parent_task=self.parent_task,
            unless_answered=self.unless_answered,
            via=self.via,
        )


class NewMessageRow(msgspec.Struct, gc=False):
    """A message to insert; the fields are columns of `messages`.

    Pass the required fields by position: msgspec needs five times as long for 20 keywords. Flags are integers, because
    sqlite3 looks for an adapter of each bool.
    """

    seq: int
    id: str
    sender: str
    recipient: str
    state: State
    created_at: int
    payload: str
    thread: str | None
    question: int
    in_seq: int | None = None
    delivered_at: int | None = None
    queued: int = 0
    hops: int = 0
    # Few messages have more than the columns above. The defaults of those below are those of the table.
    deliver_at: int | None = None
    taken_at: int | None = None
    option: int | None = None
    in_reply_to: str | None = None
    cause: str | None = None
    replay_of: str | None = None
    automatic: bool = False
    stopped: int = 0
    plan: str | None = None
    reason: str | None = None
    answered_by: str | None = None
    answered_option: int | None = None
    schedule_id: str | None = None
    every: str | None = None
    task: str | None = None
    """None: the message is the first of its task."""
    parent_task: str | None = None
    unless_answered: str | None = None
    via: str | None = None

    @property
    def starts_task_when_due(self) -> bool:
        """True for a delayed message that does not count for any task yet."""
        if self.deliver_at is None:
            return False
        return self.schedule_id is not None or self.deliver_at - self.created_at >= OWN_TASK_DELAY_MS

    def to_taken_message(self, taken_at: int) -> Message:
        """The message as it is after its recipient takes it."""
        return Message(
            seq=self.seq,
            id=self.id,
            sender=self.sender,
            to=self.recipient,
            payload=to_payload(self.id, self.payload),
            state="taken",
            created_at=from_ms(self.created_at),
            delivered_at=None if self.delivered_at is None else from_ms(self.delivered_at),
            taken_at=from_ms(taken_at),
            mailbox_position=self.in_seq,
            in_reply_to=self.in_reply_to,
            option=chosen_option(self.option),
            asks_back=self.option == ASKS_BACK_OPTION,
            cause=self.cause,
            hops=self.hops,
            stopped=self.stopped == 1,
            cut_off=ENDINGS.get(self.stopped),
            replay_of=self.replay_of,
            task=self.task or self.id,
            parent_task=self.parent_task,
            via=self.via,
        )


_PLAIN = NewMessageRow.__struct_fields__.index("deliver_at")
_DEFAULTS = NewMessageRow.__struct_defaults__[_PLAIN - len(NewMessageRow.__struct_fields__) :]


def insert_messages(db: Connection, messages: Sequence[NewMessageRow]) -> None:
    rows, columns = [astuple(message) for message in messages], NewMessageRow.__struct_fields__
    if all(row[_PLAIN:] == _DEFAULTS for row in rows):
        rows, columns = [row[:_PLAIN] for row in rows], columns[:_PLAIN]
    insert(db, _messages(columns), rows)


@cache
def _messages(columns: Sequence[str]) -> str:
    return f"messages ({', '.join(columns)})"


OWN_TASK_DELAY_MS = NEW_CHAIN_DELAY // timedelta(milliseconds=1)
"""A message delayed this long starts a task of its own when it is due."""
STORED_MESSAGE_COLUMNS = """
seq, id, sender, recipient, state, created_at, deliver_at, length(payload), schedule_id, missed, task, parent_task,
question, unless_answered
"""
"""Columns of `StoredMessage`."""


class StoredMessage(NamedTuple):
    """What the unit of work needs of a message in the database to deliver it, withdraw it or make it a dead letter."""

    seq: int
    id: str
    sender: str
    recipient: str
    state: str
    created_at: int
    deliver_at: int
    payload_size: int
    schedule_id: str | None
    missed: int
    task: str | None
    """None: the message is the first of its task."""
    parent_task: str | None
    question: int
    unless_answered: str | None

    @property
    def task_id(self) -> str:
        return self.task or self.id

    @property
    def starts_task_when_due(self) -> bool:
        """True for a delayed message that does not count for any task yet."""
        return self.state == "delayed" and (
            self.schedule_id is not None or self.deliver_at - self.created_at >= OWN_TASK_DELAY_MS
        )

    @property
    def is_queued(self) -> bool:
        """True if it keeps its task at work."""
        if self.state == "delayed":
            return not self.starts_task_when_due
        return self.state == "pending" and self.recipient != PERSON


DAMAGED_TEXT = "[This message is damaged: its text is lost.]"
_decode = msgspec.json.Decoder(Payload).decode
_encode = msgspec.json.Encoder().encode


def to_message(row: Sequence[Any]) -> Message:
    """Convert a row of `MESSAGE_COLUMNS`."""
    return MessageRow(*row).to_message()


def to_payload(message_id: str, stored: str | bytes) -> Payload:
    try:
        return _decode(stored)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # One damaged message must not make the others unreadable.
        log.error(
            "the stored message %s is damaged (%s): restore a backup with coterie restore FILE", message_id, error
        )
        return {"text": DAMAGED_TEXT}


def find_message(db: Connection, message_id: str) -> Message | None:
    row = db.execute(f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE id = :id", {"id": message_id}).fetchone()
    return row and to_message(row)


LAST_SEQ = 1 << 62
"""A number beyond all rows: `seq < :before` uses an index, `:before IS NULL OR seq < :before` reads all newer rows."""
IS_BUSY = "(agents.waiting > 0 OR agents.delayed > 0 OR agents.task IS NOT NULL) /*+ AND agents.is_busy */"
"""Condition for the few agents with mail or a turn, in the form for which each engine has an index."""
SHOWN_STATE = """
CASE WHEN (SELECT paused FROM log) = 1 AND kind = 'agent'
          AND (state IN ('idle', 'ready', 'wait_retry')
               OR (state IN ('llm', 'tools') AND (worker IS NULL OR runnable_at = 0)))
     THEN 'paused' ELSE state END
"""
"""State of an agent as people see it. While the society is paused, agents that no worker runs are `paused`."""
AGENT_COLUMNS = (
    f"id, name, kind, {SHOWN_STATE}, waiting, delayed, parent, profile, since, why, problem, tool, call_no,"
    " call_count, worker"
)
"""Columns of `AgentRow`, from `AGENTS_WITH_CALL`."""
AGENTS_WITH_CALL = """
(SELECT agents.*, active_call.name AS tool, active_call.idx + 1 AS call_no,
        (SELECT count(*) FROM calls
          WHERE calls.agent_id = active_call.agent_id AND calls.turn_no = active_call.turn_no
            AND calls.step_no = active_call.step_no) AS call_count
   FROM agents
   LEFT JOIN plans ON plans.agent_id = agents.id AND plans.outcome = 'open'
   LEFT JOIN calls AS active_call
          ON active_call.agent_id = plans.agent_id AND active_call.turn_no = plans.turn_no
         AND active_call.step_no = plans.step_no AND active_call.state IN ('started', 'gated')) AS agents_with_call
"""
"""Agents with the call that runs or waits for approval; each has at most one."""


class AgentRow(NamedTuple):
    id: str
    name: str
    kind: Literal["agent", "person"]
    state: AgentState
    waiting: int
    delayed: int
    parent: str | None
    profile: str
    since: int | None
    why: str | None
    problem: str | None
    tool: str | None
    call_no: int
    call_count: int
    worker: str | None


def to_agent(values: Sequence[Any]) -> Agent:
    """Convert a row of `AGENT_COLUMNS`."""
    row = AgentRow._make(values)
    return Agent(
        id=row.id,
        name=row.name,
        kind=row.kind,
        state=row.state,
        waiting=row.waiting,
        delayed=row.delayed,
        parent=row.parent,
        profile=row.profile,
        state_since=None if row.since is None else from_ms(row.since),
        state_reason=row.why,
        problem=row.problem or "",
        tool=row.tool,
        tool_position=None if row.tool is None else (row.call_no, row.call_count),
        worker=row.worker if row.state in CLAIMED_STATES else None,
    )


ARTIFACT_COLUMNS = "ref, filename, type, mime_type, size, sha256, created_at"
"""Columns of `ArtifactRow`."""
IS_READABLE = """
(maker = :reader
 OR EXISTS (SELECT 1 FROM attachments JOIN messages ON messages.seq = attachments.message_seq
             WHERE attachments.artifact_ref = artifacts.ref AND messages.recipient = :reader
               AND messages.state = 'taken'))
"""
"""True if the agent `:reader` made the artifact or took a message with it."""
# Each half of the UNION uses its own index.
SELECT_READABLE_ARTIFACTS = f"""
SELECT {ARTIFACT_COLUMNS} FROM artifacts WHERE ref IN (
    SELECT ref FROM artifacts WHERE maker = :reader
     UNION
    SELECT attachments.artifact_ref FROM messages JOIN attachments ON attachments.message_seq = messages.seq
     WHERE messages.recipient = :reader AND messages.in_seq IS NOT NULL AND messages.state = 'taken')
 ORDER BY created_at DESC, ref DESC LIMIT :limit
"""


class ArtifactRow(NamedTuple):
    ref: str
    filename: str
    type: ArtifactType
    mime_type: str
    size: int
    sha256: str
    created_at: int


def to_artifact(values: Sequence[Any]) -> Artifact:
    """Convert a row of `ARTIFACT_COLUMNS`."""
    row = ArtifactRow._make(values)
    return Artifact(
        ref=row.ref,
        filename=row.filename,
        type=row.type,
        mime_type=row.mime_type,
        size=row.size,
        sha256=row.sha256,
        created_at=from_ms(row.created_at),
    )


def make_receipt(
    message_id: str,
    queued: bool,
    deliver_at: int | None,
    schedule_id: str | None,
    task: str,
    *,
    is_withdrawn: bool = False,
) -> Receipt:
    """Return the receipt of a stored message."""
    if is_withdrawn:
        return Receipt(message_id=message_id, state="withdrawn", task=task)
    if deliver_at is not None:
        return Receipt(
            message_id=message_id,
            state="delayed",
            scheduled_delivery_time=from_ms(deliver_at),
            schedule_id=schedule_id,
            task=task,
        )
    return Receipt(message_id=message_id, state="queued" if queued else "pending", task=task)
