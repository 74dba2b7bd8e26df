"""The session of one batch of jobs where many processes write: row locks, message numbers, time and the event log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import psycopg

from coterie.ids import new_id
from coterie.stores.postgres.cluster import NotifyChannels
from coterie.stores.postgres.connection import (
    CLOCK,
    SET_TIMEOUTS,
    AgentLocked,
    PgConnection,
    StateChanged,
    encode_rows,
    translate_sql,
)
from coterie.stores.sql.mailbox import MAILBOX_COLUMNS, Mailbox
from coterie.stores.sql.rows import read_secret
from coterie.stores.sql.session import SELECT_WAITING, WAITING_COLUMNS, EventRow, MailboxPosition, WaitingRow
from coterie.stores.sql.task_changes import TaskChange, merge_changes
from coterie.turn_store import Interruption

_LOCK_AGENTS = f"SELECT id, {MAILBOX_COLUMNS} FROM agents WHERE id = ANY (:ids) ORDER BY id FOR UPDATE"
_LOCK_AGENT = f"""
SELECT {CLOCK}, pg_current_xact_id()::text, {MAILBOX_COLUMNS} FROM agents WHERE id = :id FOR UPDATE NOWAIT
"""
# `:paused_read`: the pause state that jobs of this batch have read, or NULL. `:paused_new`: the new state, or NULL.
# If the state has changed since, the CASE yields NULL and violates NOT NULL, so the batch fails and is retried.
# Every writing batch locks this row last anyway, so the check costs nothing and orders batches and pauses.
_SET_PAUSED = """
paused = CASE WHEN paused = coalesce(:paused_read::int, paused) THEN coalesce(:paused_new::int, paused) END
"""
_UPDATE_PAUSED = f"UPDATE log SET {_SET_PAUSED}"
# Numbers and writes the events in one round trip. The notification is sent at commit.
_WRITE_EVENTS = f"""
WITH numbered AS (
    UPDATE log SET last = last + :count, last_at = greatest(last_at, :timestamp), {_SET_PAUSED}
    RETURNING last - :count AS before, pg_notify(:channel, :notice)::text)
INSERT INTO events (seq, at, kind, subject, data)
SELECT before + position, at, kind, subject, data
  FROM numbered, json_to_recordset(:events) AS event (position BIGINT, at BIGINT, kind TEXT, subject TEXT, data TEXT)
RETURNING pg_current_xact_id()::text
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
_SELECT_LOG = f"""
SELECT {CLOCK}, last_at, paused, pg_current_xact_id_if_assigned()::text,
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
    has_unclaimed_work: bool
    interruptions: int
    task_changes: int
    pause: tuple[bool, bool | None, bool | None]
    """Current, read and new pause state of the society."""


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
        secret: bytes = b"",
    ) -> None:
        """`touches`: ids of agents to lock. `messages`: how many messages the batch sends to them.

        `clock`: time in ms instead of the database's clock. `secret`: the society's, if already known.
        """
        self._secret = secret
        self._db, self.lease_ms, self._channels, self._clock = db, lease_ms, channels, clock
        self._message_seqs: list[int] = []
        self._reserved_seqs: list[int] = []
        """Numbers fetched after `touches` were locked: valid for messages to these agents only."""
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
        self.has_unclaimed_work = False
        """True if an agent has work and this process did not claim it."""
        self.interruptions: list[Interruption] = []
        """Messages of the person to agents whose model is asked, and ended turns, for the processes that run them."""
        self._task_changes: list[tuple[str, TaskChange, int]] = []
        """Tasks, what is added to them, and when. `close` writes them, in the order of ids: no two batches deadlock."""
        self.now = self.timestamp = 0
        """`now` decides what is due; `timestamp` is stored."""
        self._begin(sorted(set(touches)), messages)

    def _begin(self, touches: Sequence[str], messages: int) -> None:
        """One round trip: locks in order, then numbers and time, which must be read under the locks."""
        lock = f"{_LOCK_AGENTS};" if touches else ""
        numbers = f"{_NEXT_MESSAGE_SEQS};" if messages else ""
        script = f"BEGIN; {SET_TIMEOUTS} {lock} {numbers} {_SELECT_LOG}; SAVEPOINT job"
        cursor = self._db.raw.execute(translate_sql(script), {"ids": touches, "count": messages})
        results = []
        while cursor.nextset():
            if cursor.description:
                results.append(cursor.fetchall())
        ((now, last_at, paused, self._transaction, self.configuration_version, self.compatible_from),) = results.pop()
        self._paused = self.was_paused_at_start = bool(paused)
        if messages:
            self._reserved_seqs = sorted((number for (number,) in results.pop()), reverse=True)
        self._cache_rows(chain.from_iterable(results))
        self.now = self._clock() if self._clock else now
        self.timestamp = max(self.now, last_at)

    def begin_job(self) -> BatchCheckpoint:
        self._message_seqs.clear()  # a number used late would sort behind older messages
        pause = (self._paused, self._paused_read, self._paused_new)
        return BatchCheckpoint(
            len(self._events), self.has_unclaimed_work, len(self.interruptions), len(self._task_changes), pause
        )

    def roll_back_to(self, checkpoint: BatchCheckpoint) -> None:
        """Forget what the session collected since `checkpoint`."""
        del self._events[checkpoint.events :]
        self.has_unclaimed_work = checkpoint.has_unclaimed_work
        del self.interruptions[checkpoint.interruptions :]
        del self._task_changes[checkpoint.task_changes :]
        self._paused, self._paused_read, self._paused_new = checkpoint.pause
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
        try:
            row = self._db.execute(_LOCK_AGENT, {"id": agent_id}).fetchone()
        except psycopg.errors.LockNotAvailable as error:
            raise AgentLocked(agent_id) from error
        if row is None:
            return None
        now, self._transaction, *columns = row  # the time is read after the lock was granted
        self._advance_timestamp(now)
        return Mailbox(*columns)

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

    def next_message_seq(self) -> int:
        if not self._message_seqs:
            self._message_seqs = self._fetch_seqs(1)
        return self._message_seqs.pop()

    def reserve_message_seqs(self, count: int) -> None:
        if len(self._reserved_seqs) >= count:
            first = len(self._reserved_seqs) - count
            self._message_seqs, self._reserved_seqs = self._reserved_seqs[first:], self._reserved_seqs[:first]
            return
        self._message_seqs = self._fetch_seqs(count)

    def _fetch_seqs(self, count: int) -> list[int]:
        """`count` message numbers, descending: the next one is popped from the end."""
        rows = self._db.execute(_NEXT_MESSAGE_SEQS, {"count": count})
        return sorted((number for (number,) in rows), reverse=True)

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
        # `close` writes it last: a transaction that holds the log row must not wait for an agent's row.
        self._paused = self._paused_new = paused

    def close(self) -> BatchCommit | None:
        """Write tasks and events, as the last statements before COMMIT. None if the transaction wrote nothing."""
        try:
            for sql, parameters in merge_changes(self._task_changes):
                self._db.executemany(sql, [parameters])
            transaction = self._write_events() if self._events else self._close_without_events()
        except psycopg.errors.NotNullViolation as error:
            raise StateChanged from error
        if transaction is None:
            return None
        commit = BatchCommit(transaction, self._channels.process, new_id())
        self._db.execute(_MARK_BATCH, {"process": commit.process, "batch": commit.batch})
        return commit

    def _write_events(self) -> str:
        events = encode_rows(_EVENT_COLUMNS, ((position, *event) for position, event in enumerate(self._events, 1)))
        channel, notice = self._channels.change_notice(self.has_unclaimed_work, self.interruptions)
        result = self._db.execute(
            _WRITE_EVENTS,
            {
                "count": len(self._events),
                "timestamp": self.timestamp,
                "paused_read": self._paused_read,
                "paused_new": self._paused_new,
                "channel": channel,
                "notice": notice,
                "events": events,
            },
        )
        return self._transaction or str(result.fetchone()[0])

    def _close_without_events(self) -> str | None:
        if self._paused_read is not None or self._paused_new is not None:
            self._db.execute(_UPDATE_PAUSED, {"paused_read": self._paused_read, "paused_new": self._paused_new})
        if self.has_unclaimed_work:
            channel, notice = self._channels.change_notice(self.has_unclaimed_work)
            self._db.execute(_NOTIFY, {"channel": channel, "notice": notice})
        if self._transaction is None:
            (self._transaction,) = self._db.execute(_SELECT_TRANSACTION).fetchone()
        return self._transaction
