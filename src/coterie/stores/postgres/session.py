"""The session of one batch of jobs where many processes write: row locks, message numbers, time and the event log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import psycopg

from coterie.ids import new_id
from coterie.store import SOCIETY_EVENTS
from coterie.stores.postgres.cluster import LOG_LOCK_BITS, NotifyChannels
from coterie.stores.postgres.connection import (
    CLOCK,
    PgConnection,
    RowsLocked,
    StateChanged,
    encode_rows,
    translate_sql,
)
from coterie.stores.postgres.load_sharing import Load, WorkerLoads
from coterie.stores.sql.mailbox import MAILBOX_COLUMNS, Mailbox
from coterie.stores.sql.rows import read_secret
from coterie.stores.sql.session import SELECT_WAITING, WAITING_COLUMNS, EventRow, MailboxPosition, WaitingRow
from coterie.stores.sql.task_changes import TaskChange, merge_changes
from coterie.turn_store import Interruption

_LOCK_AGENTS = f"SELECT id, {MAILBOX_COLUMNS} FROM agents WHERE id = ANY (:ids) ORDER BY id FOR UPDATE"
# SKIP LOCKED: it never waits, and an agent that another transaction has locked is no error in the server's log.
_LOCK_AGENT = f"""
WITH locked AS MATERIALIZED (SELECT {MAILBOX_COLUMNS} FROM agents WHERE id = :id FOR UPDATE SKIP LOCKED)
SELECT EXISTS (SELECT 1 FROM agents WHERE id = :id), {CLOCK}, pg_current_xact_id()::text, locked.*
  FROM (SELECT 1) AS always LEFT JOIN locked ON true
"""
_LOCK_TASKS = "SELECT id FROM tasks WHERE id = ANY (:tasks) ORDER BY id FOR UPDATE"
_COUNT_TASKS = "SELECT count(*) FROM tasks WHERE id = ANY (:tasks)"
# A batch that relied on the pause state shares this lock from here to its commit, and reads the state again. A pause
# needs the lock alone. So a claim is committed before the pause, or sees it. Nothing is waited for after this lock.
_LOCK_PAUSE_SHARED = "SELECT pg_advisory_xact_lock_shared(hashtextextended(:pause_lock, 0))"
_LOCK_PAUSE = "SELECT pg_advisory_xact_lock(hashtextextended(:pause_lock, 0))"
_UPDATE_PAUSED = "UPDATE log SET paused = :paused"
# Numbers and writes the events, marks the batch and notifies, in one statement. `opened` locks the last number before
# the batch takes its own: see `read_event_horizon`. `:paused_read`: the pause state that jobs of this batch have read,
# or NULL. If it has changed since, `at` becomes NULL, which the table refuses: the batch is retried.
_WRITE_EVENTS = f"""
WITH opened AS MATERIALIZED (
    SELECT pg_advisory_xact_lock_shared(:log_lock + CASE WHEN is_called THEN last_value ELSE 0 END),
           pg_notify(:channel, :notice)
      FROM events_seq_seq),
marked AS (
    INSERT INTO batches (process, batch, at) VALUES (:process, :batch, {CLOCK})
        ON CONFLICT (process) DO UPDATE SET batch = excluded.batch, at = excluded.at)
INSERT INTO events (seq, at, kind, subject, data)
SELECT nextval('events_seq_seq'), CASE WHEN paused = coalesce(:paused_read::int, paused) THEN event.at END,
       event.kind, event.subject, event.data
  FROM opened, log,
       json_to_recordset(:events) AS event (position BIGINT, at BIGINT, kind TEXT, subject TEXT, data TEXT)
 ORDER BY event.position
RETURNING pg_current_xact_id()::text
"""
_LAST_NUMBER = "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM events_seq_seq"
# The key of an advisory lock is shown in two halves.
_OLDEST_OPEN = f"""
SELECT min(((classid::bigint << 32) | objid::bigint) - :log_lock) FROM pg_locks
 WHERE locktype = 'advisory' AND objsubid = 1 AND granted
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND ((classid::bigint << 32) | objid::bigint) >> {LOG_LOCK_BITS} = :log_lock >> {LOG_LOCK_BITS}
"""
_EVENT_COLUMNS = ("position", "at", "kind", "subject", "data")
MAX_PREFETCHED_MAIL = 100
"""Mailboxes with more waiting messages are not prefetched."""
# LATERAL: reads each mailbox by its index, whatever the planner's statistics say.
_SELECT_ALL_WAITING = f"""
SELECT agents.id, mail.*
  FROM agents,
       LATERAL (SELECT {WAITING_COLUMNS} FROM messages
                 WHERE recipient = agents.id AND in_seq > agents.taken_seq AND messages.state = 'pending'
                 ORDER BY in_seq) AS mail
 WHERE agents.id = ANY (:ids) AND agents.waiting <= {MAX_PREFETCHED_MAIL} ORDER BY agents.id, mail.in_seq
"""
_SELECT_TRANSACTION = "SELECT pg_current_xact_id_if_assigned()::text"
# Read under the locks of `:ids`: the time, numbers for messages to these agents, and their open questions.
_SELECT_LOG = f"""
SELECT {CLOCK}, coalesce((SELECT at FROM events ORDER BY seq DESC LIMIT 1), 0), paused,
       pg_current_xact_id_if_assigned()::text,
       ARRAY(SELECT nextval('messages_seq_seq') FROM generate_series(1, :count)),
       (SELECT json_agg(json_build_array(question.sender, question.id, coalesce(question.task, question.id))
                        ORDER BY question.seq)
          FROM messages AS question
         WHERE question.sender = ANY (:ids) AND question.question = 1 AND question.answered_by IS NULL
           AND question.state IN ('pending', 'taken')),
       coalesce((SELECT value FROM meta WHERE key = 'configuration_version'), '0')::bigint,
       coalesce((SELECT value FROM meta WHERE key = 'compatible_from'), '0')::bigint
  FROM log
"""
_SELECT_NOW = f"SELECT {CLOCK}, pg_current_xact_id_if_assigned()::text"
_NOTIFY = "SELECT pg_notify(:channel, :notice)"
_MARK_BATCH = f"""
INSERT INTO batches (process, batch, at) VALUES (:process, :batch, {CLOCK})
    ON CONFLICT (process) DO UPDATE SET batch = excluded.batch, at = excluded.at
"""
_IS_BATCH_MARKED = "SELECT 1 FROM batches WHERE process = :process AND batch = :batch"
_TRANSACTION_STATUS = "SELECT pg_xact_status(:transaction::xid8)"
_NEXT_MESSAGE_SEQS = "SELECT nextval('messages_seq_seq') FROM generate_series(1, :count)"


@dataclass(frozen=True, slots=True)
class BatchCommit:
    """Identifies a batch, to find out whether it was committed when the response was lost."""

    transaction: str
    process: str
    batch: str

    def is_in_progress(self, db: PgConnection) -> bool:
        try:
            return bool(
                db.execute(_TRANSACTION_STATUS, {"transaction": self.transaction}).fetchone()[0] == "in progress"
            )
        except psycopg.DataError:  # after a crash or failover the server may not know this transaction id
            return False

    def is_committed(self, db: PgConnection) -> bool:
        """Call it only when the batch is no longer in progress."""
        mark = db.execute(_IS_BATCH_MARKED, {"process": self.process, "batch": self.batch})
        return mark.fetchone() is not None


@dataclass(frozen=True, slots=True)
class BatchCheckpoint:
    """State of the session before a job, to roll the job back."""

    events: int
    work: tuple[int, bool, int]
    """Unclaimed agents, whether other agents became claimable, and ended turns."""
    interruptions: int
    task_changes: int
    pause: tuple[bool, bool | None, bool | None]
    """Current, read and new pause state of the society."""
    locked_tasks: frozenset[str]


class PostgresSession:
    """Begins a transaction and locks agents. The caller commits or rolls back."""

    def __init__(
        self,
        db: PgConnection,
        touches: Iterable[str],
        lease_ms: int,
        channels: NotifyChannels,
        clock: Callable[[], int] | None = None,
        *,
        messages: int = 0,
        tasks: Iterable[str] = (),
        secret: bytes = b"",
        loads: WorkerLoads | None = None,
        own_load: Callable[[], Load] = lambda: Load(0, 0),
    ) -> None:
        """`touches`: ids of agents to lock. `messages`: how many messages the batch sends to them.

        `tasks`: ids of tasks to lock after them. `loads`, `own_load`: turns of other processes and of this one.
        `clock`: time in ms instead of the database's clock. `secret`: the society's, if already known.
        """
        self._secret = secret
        self._db, self.lease_ms, self._channels, self._clock = db, lease_ms, channels, clock
        self._message_seqs: list[int] = []
        self._reserved_seqs: list[int] = []
        """Numbers fetched after `touches` were locked, descending: valid for messages to these agents only."""
        self._reserved_for: frozenset[str] = frozenset()
        self._open_questions: dict[str, dict[str, str]] = {}
        """Open questions of the agents that were locked first, with their tasks. Valid for the first job."""
        self._jobs = 0
        self._events: list[EventRow] = []
        self._rows: dict[str, Mailbox] = {}
        self._positions: dict[str, MailboxPosition] = {}
        """Mailboxes with waiting mail that was not read yet, as they were when locked."""
        self._mail: dict[str, tuple[MailboxPosition, list[WaitingRow]]] = {}
        self._transaction: str | None = None
        self._paused = False
        self._paused_read: bool | None = None
        """Pause state that jobs of this batch relied on."""
        self._paused_new: bool | None = None
        """Pause state that a job of this batch sets."""
        self.configuration_version = 0
        """Version of the stored configuration when the transaction began."""
        self.compatible_from = 0
        """The oldest schema version whose programs may write."""
        self._loads, self._own_load = loads or WorkerLoads(), own_load
        self._unclaimed = 0
        """Agents that became ready and that this process did not claim."""
        self._frees_others = False
        """Agents became claimable whose rows the batch did not lock."""
        self._ended = 0
        """Turns of this process that end with the batch."""
        self.interruptions: list[Interruption] = []
        """Messages of the person to agents whose model is asked, and ended turns, for the processes that run them."""
        self._task_changes: list[tuple[str, TaskChange, int]] = []
        """Tasks, what is added to them, and when. `close` writes them, in the order of ids: no two batches deadlock."""
        self._locked_tasks = {*tasks}
        """Tasks that were locked before `close`."""
        self.now = self.timestamp = 0
        """`now` decides what is due; `timestamp` is stored."""
        self._begin(sorted(set(touches)), messages)

    def _begin(self, touches: Sequence[str], messages: int) -> None:
        """One round trip: locks in order, then numbers, questions and time, which must be read under the locks."""
        lock = f"{_LOCK_AGENTS};" if touches else ""
        tasks = sorted(self._locked_tasks)
        if tasks:
            lock += f"{_LOCK_TASKS};"
        script = f"{self._db.begin_sql}; {lock} {_SELECT_LOG}"
        cursor = self._db.raw.execute(translate_sql(script), {"ids": touches, "count": messages, "tasks": tasks})
        results = [cursor.fetchall() if cursor.description else []]
        while cursor.nextset():
            results.append(cursor.fetchall() if cursor.description else [])
        (now, last_at, paused, self._transaction, numbers, questions, *versions), *_ = results.pop()
        self.configuration_version, self.compatible_from = versions
        self._paused = self.was_paused_at_start = bool(paused)
        self._reserved_seqs = sorted(numbers, reverse=True)
        self._reserved_for = frozenset(touches)
        self._open_questions = {agent_id: {} for agent_id in touches}
        for sender, question, task in questions or ():
            self._open_questions[sender][question] = task
        if tasks:
            results.pop()
        if touches:
            self._cache_rows(results.pop())
        self.now = self._clock() if self._clock else now
        self.timestamp = max(self.now, last_at)

    def begin_job(self) -> BatchCheckpoint:
        self._message_seqs.clear()  # a number used late would sort behind older messages
        self._jobs += 1
        if self._jobs > 1:
            self._open_questions.clear()
        pause = (self._paused, self._paused_read, self._paused_new)
        return BatchCheckpoint(
            len(self._events),
            (self._unclaimed, self._frees_others, self._ended),
            len(self.interruptions),
            len(self._task_changes),
            pause,
            frozenset(self._locked_tasks),
        )

    def roll_back_to(self, checkpoint: BatchCheckpoint) -> None:
        """Forget what the session collected since `checkpoint`."""
        del self._events[checkpoint.events :]
        self._unclaimed, self._frees_others, self._ended = checkpoint.work
        del self.interruptions[checkpoint.interruptions :]
        del self._task_changes[checkpoint.task_changes :]
        self._paused, self._paused_read, self._paused_new = checkpoint.pause
        self._locked_tasks = {*checkpoint.locked_tasks}
        self.invalidate()

    def invalidate(self) -> None:
        self._rows.clear()
        self._positions.clear()
        self._mail.clear()

    @property
    def secret(self) -> bytes:
        self._secret = self._secret or read_secret(self._db)
        return self._secret

    def lock_agent(self, agent_id: str) -> Mailbox | None:
        if (mailbox := self._rows.pop(agent_id, None)) is not None:
            return mailbox
        exists, now, self._transaction, *columns = self._db.execute(_LOCK_AGENT, {"id": agent_id}).fetchone()
        if not exists:
            return None
        if columns[0] is None:
            raise RowsLocked(agents=[agent_id])
        self._advance_timestamp(now)
        return Mailbox(*columns)

    def lock_tasks(self, task_ids: Sequence[str]) -> None:
        missing = sorted({*task_ids} - self._locked_tasks)
        if not missing:
            return
        ids = {"tasks": missing}
        locked = self._db.execute(f"{_LOCK_TASKS} SKIP LOCKED", ids)
        (count,) = self._db.execute(_COUNT_TASKS, ids).fetchone()
        found = [task_id for (task_id,) in locked]
        if len(found) < count:
            raise RowsLocked(tasks=missing)
        self._locked_tasks.update(found)

    def prefetch(self, agent_ids: Sequence[str]) -> None:
        if not agent_ids:
            return
        ids = {"ids": list(agent_ids)}
        rows, time = self._db.execute(_LOCK_AGENTS, ids), self._db.execute(_SELECT_NOW)
        mail = self._db.execute(_SELECT_ALL_WAITING, ids)
        now, self._transaction = time.fetchone()
        self._advance_timestamp(now)
        self._cache_rows(rows)
        self._cache_mail(agent_ids, mail)

    def cache_agent(self, agent_id: str, row: Mailbox) -> None:
        pass  # another process may change the row next

    def _advance_timestamp(self, now: int) -> None:
        if not self._clock:
            self.timestamp = max(self.timestamp, now)

    def read_waiting(
        self, agent_id: str, position: MailboxPosition, after: int, upto: int, limit: int
    ) -> Sequence[WaitingRow]:
        """Reads the mail of all locked agents in one round trip: they are likely to be asked for next."""
        if self._positions.get(agent_id) == position:
            agent_ids = [*self._positions]
            self._cache_mail(agent_ids, self._db.execute(_SELECT_ALL_WAITING, {"ids": agent_ids}))
        cached_position, mail = self._mail.get(agent_id, (None, []))
        if cached_position == position:
            return [row for row in mail if after < (row.in_seq or 0) <= upto][:limit]
        bounds = {"recipient": agent_id, "after": after, "upto": upto, "limit": limit}
        return [WaitingRow(*row) for row in self._db.execute(SELECT_WAITING, bounds)]

    def _cache_mail(self, agent_ids: Iterable[str], mail: Iterable[Sequence[Any]]) -> None:
        for agent_id in agent_ids:
            if position := self._positions.pop(agent_id, None):
                self._mail[agent_id] = (position, [])
        for agent_id, *columns in mail:
            if agent_id in self._mail:
                self._mail[agent_id][1].append(WaitingRow(*columns))

    def _cache_rows(self, rows: Iterable[Sequence[Any]]) -> None:
        for agent_id, *columns in rows:
            mailbox = self._rows[agent_id] = Mailbox(*columns)
            if mailbox.state in ("ready", "llm", "tools") and 0 < mailbox.waiting <= MAX_PREFETCHED_MAIL:
                self._positions[agent_id] = (mailbox.taken_seq, mailbox.next_in_seq, mailbox.waiting)

    def open_questions(self, agent_id: str) -> Mapping[str, str] | None:
        return self._open_questions.get(agent_id)

    def retry_with(self, agent_id: str) -> NoReturn:
        raise RowsLocked(agents=[agent_id])

    def next_message_seq(self, recipient: str) -> int:
        if not self._message_seqs and self._reserved_seqs and recipient in self._reserved_for:
            return self._reserved_seqs.pop()
        if not self._message_seqs:
            self._message_seqs = self._fetch_seqs(1)
        return self._message_seqs.pop()

    def reserve_message_seqs(self, count: int) -> None:
        if len(self._reserved_seqs) >= count:
            first = len(self._reserved_seqs) - count
            self._message_seqs, self._reserved_seqs = self._reserved_seqs[first:], self._reserved_seqs[:first]
            return
        self._reserved_seqs = []  # they would sort before those that are used now
        self._message_seqs = self._fetch_seqs(count)

    def _fetch_seqs(self, count: int) -> list[int]:
        """`count` message numbers, descending: the next one is popped from the end."""
        rows = self._db.execute(_NEXT_MESSAGE_SEQS, {"count": count})
        return sorted((number for (number,) in rows), reverse=True)

    def count_work(self, *, unclaimed: int, frees_others: bool, ended: bool) -> None:
        """Count what a job leaves to the workers. `unclaimed`: agents that became ready and were not claimed.

        `frees_others`: others became claimable, too. `ended`: a turn of this process ended.
        """
        self._unclaimed += unclaimed
        self._frees_others = self._frees_others or frees_others
        self._ended += ended

    def append_events(self, events: Sequence[EventRow]) -> None:
        self._events += events

    def change_tasks(self, changes: Mapping[str, TaskChange]) -> None:
        self._task_changes += ((task_id, change, self.timestamp) for task_id, change in changes.items())

    def unwritten_change(self, task_id: str) -> TaskChange | None:
        unwritten: TaskChange | None = None
        for changed_id, change, _ in self._task_changes:
            if changed_id == task_id:
                unwritten = unwritten or TaskChange()
                unwritten.merge(change)
        return unwritten

    def is_society_paused(self) -> bool:
        if self._paused_read is None and self._paused_new is None:
            self._paused_read = self._paused
        return self._paused

    def set_society_paused(self, paused: bool) -> None:
        # `close` writes it last: a transaction that holds the lock of the pause must not wait for an agent's row.
        self._paused = self._paused_new = paused

    def close(self) -> BatchCommit | None:
        """Write tasks and events, as the last statements before COMMIT. None if the transaction wrote nothing."""
        try:
            updates = merge_changes(self._task_changes)
            task_ids = sorted(task_id for _, parameters in updates for task_id in parameters["tasks"])
            if self._locked_tasks:  # the order of ids is broken already, so no lock is waited for
                self.lock_tasks(task_ids)
            elif len(updates) < len(task_ids):  # an UPDATE of several rows locks them in any order
                self._db.executemany(_LOCK_TASKS, [{"tasks": task_ids}])
            for sql, parameters in updates:
                self._db.executemany(sql, [parameters])
            batch = new_id()
            transaction = self._write_events(batch) if self._events else self._close_without_events()
        except psycopg.errors.NotNullViolation as error:
            raise StateChanged from error
        if transaction is None:
            return None
        if not self._events:
            self._db.execute(_MARK_BATCH, {"process": self._channels.process, "batch": batch})
        return BatchCommit(transaction, self._channels.process, batch)

    def _write_events(self, batch: str) -> str:
        """Write the events and mark the batch; return the id of the transaction."""
        if self._paused_read is not None or self._paused_new is not None:
            lock = _LOCK_PAUSE_SHARED if self._paused_new is None else _LOCK_PAUSE
            self._db.execute(lock, {"pause_lock": f"{self._channels.change_channel} pause"})
        events = encode_rows(_EVENT_COLUMNS, ((position, *event) for position, event in enumerate(self._events, 1)))
        channel, notice = self._notice()
        result = self._db.execute(
            _WRITE_EVENTS,
            {
                "paused_read": self._paused_read,
                "log_lock": self._channels.log_lock,
                "channel": channel,
                "notice": notice,
                "events": events,
                "process": self._channels.process,
                "batch": batch,
            },
        )
        if self._paused_new is not None:
            self._db.executemany(_UPDATE_PAUSED, [{"paused": self._paused_new}])
        return self._transaction or str(result.fetchone()[0])

    def _notice(self) -> tuple[str, str]:
        """Channel and payload of the notice that other processes get when the batch is committed."""
        running, limit = self._own_load()
        return self._channels.change_notice(
            self._unclaimed > 0 or self._frees_others,
            self.interruptions,
            load=Load(max(0, running - self._ended), limit) if limit else None,
            claimers=() if self._frees_others else self._loads.assign(self._unclaimed),
            about_society=any(kind in SOCIETY_EVENTS for _, kind, _, _ in self._events),
        )

    def _close_without_events(self) -> str | None:
        # Every claim and every pause has an event, so nothing was decided by the pause state.
        if self._unclaimed or self._frees_others:
            channel, notice = self._notice()
            self._db.execute(_NOTIFY, {"channel": channel, "notice": notice})
        if self._transaction is None:
            (self._transaction,) = self._db.execute(_SELECT_TRANSACTION).fetchone()
        return self._transaction


def read_event_horizon(db: PgConnection, channels: NotifyChannels) -> int:
    """Return the number up to which all events are visible or will never be.

    Numbers of a sequence become visible out of order. A transaction locks the last number before it takes its own, and
    until it ends. So every number up to the oldest lock is of a transaction that has ended. The order of the two
    statements matters: a number up to the last one was taken before the locks are read. Read events afterwards.
    """
    was_pipelining, db.pipelining = db.pipelining, True
    try:
        last = db.execute(_LAST_NUMBER)
        (oldest,) = db.execute(_OLDEST_OPEN, {"log_lock": channels.log_lock}).fetchone()
    finally:
        db.pipelining = was_pipelining
    (number,) = last.fetchone()
    return int(number) if oldest is None else min(int(number), int(oldest))
