"""The session of one batch of jobs where many processes write: row locks, message numbers, time and the event log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import psycopg

from coterie.ids import new_id
from coterie.stores.postgres.cluster import NotifyChannels
from coterie.stores.postgres.connection import CLOCK, SET_TIMEOUTS, PgConnection, encode_rows
from coterie.stores.postgres.errors import AgentLocked, PauseChanged
from coterie.stores.sql.mailbox import MAILBOX_COLUMNS, SELECT_MAILBOX
from coterie.stores.sql.rows import read_secret
from coterie.stores.sql.session import SELECT_WAITING, EventRow, MailboxPosition

_LOCK_AGENTS = SELECT_MAILBOX.replace("SELECT ", "SELECT id, ").replace("id = ?", "id IN ({}) ORDER BY id FOR UPDATE")
# First value: the pause state that jobs of this batch have read, or NULL. Second: the new state, or NULL.
# If the state has changed since, the CASE yields NULL and violates NOT NULL, so the batch fails and is retried.
# Every writing batch locks this row last anyway, so the check costs nothing and orders batches and pauses.
_SET_PAUSED = "paused = CASE WHEN paused = coalesce(?::int, paused) THEN coalesce(?::int, paused) END"
# Numbers and writes the events in one round trip. The notification is sent at commit.
_WRITE_EVENTS = f"""
WITH numbered AS (
    UPDATE log SET last = last + ?, last_at = greatest(last_at, ?), {_SET_PAUSED}
    RETURNING last - ? AS before, pg_notify(?, ?)::text)
INSERT INTO events (seq, at, kind, subject, data)
SELECT before + position, at, kind, subject, data
  FROM numbered, json_to_recordset(?) AS event (position BIGINT, at BIGINT, kind TEXT, subject TEXT, data TEXT)
RETURNING pg_current_xact_id()::text
"""
_EVENT_COLUMNS = ("position", "at", "kind", "subject", "data")
MAX_PREFETCHED_MAIL = 100
"""Mailboxes with more waiting messages are not prefetched."""
_AGENT_MAIL = SELECT_WAITING.replace("recipient = ? AND in_seq > ?", "recipient = a.id AND in_seq > a.taken_seq")
# LATERAL: reads each mailbox by its index, whatever the planner's statistics say.
_SELECT_ALL_WAITING = f"""
SELECT a.id, mail.* FROM agents a, LATERAL ({_AGENT_MAIL}) AS mail
 WHERE a.id = ANY (?::text[]) AND a.waiting <= {MAX_PREFETCHED_MAIL} ORDER BY a.id, mail.position
"""
_STATE, _TAKEN, _NEXT, _WAITING = map(MAILBOX_COLUMNS.index, ("state", "taken_seq", "next_in_seq", "waiting"))
_TRANSACTION_ID = "pg_current_xact_id_if_assigned()::text"
_SELECT_LOG = f"SELECT {CLOCK}, last_at, paused, {_TRANSACTION_ID} FROM log"
_SELECT_NOW = f"SELECT {CLOCK}, {_TRANSACTION_ID}"
_NOTIFY = "SELECT pg_notify(?, ?)"
_MARK_BATCH = f"""
INSERT INTO batches (process, batch, at) VALUES (?, ?, {CLOCK})
    ON CONFLICT (process) DO UPDATE SET batch = excluded.batch, at = excluded.at
"""
_IS_BATCH_MARKED = "SELECT 1 FROM batches WHERE process = ? AND batch = ?"
_TRANSACTION_STATUS = "SELECT pg_xact_status(?::xid8)"
_NEXT_MESSAGE_SEQS = "SELECT nextval('messages_seq_seq') FROM generate_series(1, {})"


@dataclass(frozen=True, slots=True)
class BatchCommit:
    """Identifies a batch, to find out whether it was committed when the response was lost."""

    transaction: str
    process: str
    batch: str

    def is_in_progress(self, db: PgConnection) -> bool:
        try:
            return bool(db.execute(_TRANSACTION_STATUS, (self.transaction,)).fetchone()[0] == "in progress")
        except psycopg.DataError:  # after a crash or failover the server may not know this transaction id
            return False

    def is_committed(self, db: PgConnection) -> bool:
        """Call it only when the batch is no longer in progress."""
        return db.execute(_IS_BATCH_MARKED, (self.process, self.batch)).fetchone() is not None


@dataclass(frozen=True, slots=True)
class BatchCheckpoint:
    """State of the session before a job, to roll the job back."""

    events: int
    has_unclaimed_work: bool
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
        self._rows: dict[str, tuple[Any, ...]] = {}
        self._positions: dict[str, MailboxPosition] = {}
        """Mailboxes with waiting mail that was not read yet, as they were when locked."""
        self._mail: dict[str, tuple[MailboxPosition, list[Any]]] = {}
        self._transaction: str | None = None
        self._paused = False
        self._paused_read: bool | None = None
        """Pause state that jobs of this batch relied on."""
        self._paused_new: bool | None = None
        """Pause state that a job of this batch sets."""
        self.has_unclaimed_work = False
        """True if an agent has work and this process did not claim it."""
        self.now = self.timestamp = 0
        """`now` decides what is due; `timestamp` is stored."""
        self._begin(sorted(set(touches)), messages)

    def _begin(self, touches: Sequence[str], messages: int) -> None:
        """One round trip: locks in order, then numbers and time, which must be read under the locks."""
        placeholders = ", ".join(["%s"] * len(touches))
        lock = f"{_LOCK_AGENTS.format(placeholders)};" if touches else ""
        numbers = f"{_NEXT_MESSAGE_SEQS.format(messages)};" if messages else ""
        script = f"BEGIN; {SET_TIMEOUTS} {lock} {numbers} {_SELECT_LOG}; SAVEPOINT job"
        cursor = self._db.raw.execute(script.encode(), touches or None)
        results = []
        while cursor.nextset():
            if cursor.description:
                results.append(cursor.fetchall())
        (now, last_at, paused, self._transaction), *_ = results.pop()
        self._paused = self.was_paused_at_start = bool(paused)
        if messages:
            self._reserved_seqs = sorted((number for (number,) in results.pop()), reverse=True)
        self._cache_rows(chain.from_iterable(results))
        self.now = self._clock() if self._clock else now
        self.timestamp = max(self.now, last_at)

    def begin_job(self) -> BatchCheckpoint:
        self._message_seqs.clear()  # a number used late would sort behind older messages
        pause = (self._paused, self._paused_read, self._paused_new)
        return BatchCheckpoint(len(self._events), self.has_unclaimed_work, pause)

    def roll_back_to(self, checkpoint: BatchCheckpoint) -> None:
        """Forget what the session collected since `checkpoint`."""
        del self._events[checkpoint.events :]
        self.has_unclaimed_work = checkpoint.has_unclaimed_work
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

    def lock_agent(self, sql: str, agent_id: str) -> tuple[Any, ...] | None:
        if (row := self._rows.pop(agent_id, None)) is not None:
            return row
        try:
            locked = self._db.execute(_lock_sql(sql), (agent_id,)).fetchone()
        except psycopg.errors.LockNotAvailable as error:
            raise AgentLocked(agent_id) from error
        if locked is None:
            return None
        *row_values, now, self._transaction = locked
        self._advance_timestamp(now)
        return tuple(row_values)

    def prefetch(self, agent_ids: Sequence[str]) -> None:
        if not agent_ids:
            return
        placeholders = ", ".join(["?"] * len(agent_ids))
        rows, time = self._db.execute(_LOCK_AGENTS.format(placeholders), agent_ids), self._db.execute(_SELECT_NOW)
        mail = self._db.execute(_SELECT_ALL_WAITING, (list(agent_ids),))
        now, self._transaction = time.fetchone()
        self._advance_timestamp(now)
        self._cache_rows(rows)
        self._cache_mail(agent_ids, mail)

    def cache_agent(self, agent_id: str, row: tuple[Any, ...]) -> None:
        pass  # another process may change the row next

    def _advance_timestamp(self, now: int) -> None:
        if not self._clock:
            self.timestamp = max(self.timestamp, now)

    def read_waiting(self, agent_id: str, position: MailboxPosition, *, full: bool) -> list[Any]:
        """Reads the mail of all locked agents in one round trip: they are likely to be asked for next."""
        if self._positions.get(agent_id) == position:
            agent_ids = [*self._positions]
            self._cache_mail(agent_ids, self._db.execute(_SELECT_ALL_WAITING, (agent_ids,)))
        cached_position, rows = self._mail.pop(agent_id, (None, []))
        if cached_position == position:
            return rows
        return self._db.execute(SELECT_WAITING, (agent_id, position[0])).fetchall()

    def _cache_mail(self, agent_ids: Iterable[str], mail: Iterable[Sequence[Any]]) -> None:
        for agent_id in agent_ids:
            if position := self._positions.pop(agent_id, None):
                self._mail[agent_id] = (position, [])
        for agent_id, *row in mail:
            if agent_id in self._mail:
                self._mail[agent_id][1].append(tuple(row))

    def _cache_rows(self, rows: Iterable[Sequence[Any]]) -> None:
        for agent_id, *row in rows:
            self._rows[agent_id] = tuple(row)
            state, position = row[_STATE], (row[_TAKEN], row[_NEXT], row[_WAITING])
            if state in ("ready", "llm", "tools") and 0 < row[_WAITING] <= MAX_PREFETCHED_MAIL:
                self._positions[agent_id] = position

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
        rows = self._db.execute(_NEXT_MESSAGE_SEQS.format("?"), (count,))
        return sorted((number for (number,) in rows), reverse=True)

    def append_events(self, events: Sequence[EventRow]) -> None:
        self._events += events

    def is_society_paused(self) -> bool:
        if self._paused_read is None and self._paused_new is None:
            self._paused_read = self._paused
        return self._paused

    def set_society_paused(self, paused: bool) -> None:
        # `close` writes it last: a transaction that holds the log row must not wait for an agent's row.
        self._paused = self._paused_new = paused

    def close(self) -> BatchCommit | None:
        """Write the events, as the last statement before COMMIT. None if the transaction wrote nothing."""
        try:
            transaction = self._write_events() if self._events else self._close_without_events()
        except psycopg.errors.NotNullViolation as error:
            raise PauseChanged from error
        if transaction is None:
            return None
        commit = BatchCommit(transaction, self._channels.process, new_id())
        self._db.execute(_MARK_BATCH, (commit.process, commit.batch))
        return commit

    def _write_events(self) -> str:
        events = encode_rows(_EVENT_COLUMNS, ((position, *event) for position, event in enumerate(self._events, 1)))
        count, notice = len(self._events), self._channels.change_notice(self.has_unclaimed_work)
        result = self._db.execute(
            _WRITE_EVENTS, (count, self.timestamp, self._paused_read, self._paused_new, count, *notice, events)
        )
        return self._transaction or str(result.fetchone()[0])

    def _close_without_events(self) -> str | None:
        if self._paused_read is not None or self._paused_new is not None:
            self._db.execute(f"UPDATE log SET {_SET_PAUSED}", (self._paused_read, self._paused_new))
        if self.has_unclaimed_work:
            self._db.execute(_NOTIFY, self._channels.change_notice(self.has_unclaimed_work))
        if self._transaction is None:
            (self._transaction,) = self._db.execute(f"SELECT {_TRANSACTION_ID}").fetchone()
        return self._transaction


@cache
def _lock_sql(sql: str) -> str:
    """Lock the row and return it with the time, which is read after the lock was granted."""
    return sql.replace(" FROM ", f", {CLOCK}, pg_current_xact_id()::text FROM ") + " FOR UPDATE NOWAIT"
