"""The session that a unit of work runs in: message numbers, time, agent rows and the event log.

`Session` is the protocol. `SqliteSession` serves one writer; `stores/postgres/session.py` serves many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn, Protocol

from coterie.stores.sql.mailbox import SELECT_MAILBOX, Mailbox
from coterie.stores.sql.rows import MESSAGE_COLUMNS, Connection, MessageRow, insert, read_secret
from coterie.stores.sql.task_changes import TaskChange

SELECT_PAUSED = "SELECT paused FROM log"
SELECT_LAST_EVENT = "SELECT max(seq) FROM events"
EVENT_COLUMNS = "events (at, kind, subject, data)"
WAITING_COLUMNS = f"{MESSAGE_COLUMNS}, length(messages.payload)"
"""Columns of `WaitingRow`."""
SELECT_WAITING = f"""
SELECT {WAITING_COLUMNS} FROM messages
 WHERE recipient = :recipient AND in_seq > :after AND in_seq <= :upto AND state = 'pending' ORDER BY in_seq LIMIT :limit
"""
ALL_WAITING = 1 << 62
"""Number of messages, or position in a mailbox, that is never reached."""
MAX_CACHED_AGENTS = 4_096
"""Agent rows in memory: one or two megabytes."""
EventRow = tuple[int, str, str, str | None]
"""Time in ms, kind, subject and JSON data of an event that has no number yet."""
MailboxPosition = tuple[int, int, int]
"""`taken_seq`, `next_in_seq` and `waiting` of a mailbox. While they are unchanged, so are the waiting messages."""


class WaitingHeader(NamedTuple):
    """What a turn decision needs of a waiting message."""

    in_seq: int
    id: str
    sender: str
    in_reply_to: str | None
    option: int | None
    cause: str | None


class WaitingRow(MessageRow):
    """A waiting message with the size of its payload in characters."""

    payload_size: int


class Session(Protocol):
    @property
    def secret(self) -> bytes:
        """The society's secret."""
        ...

    @property
    def timestamp(self) -> int:
        """Time to store, in ms. Never earlier than any time stored before in the mailboxes locked so far."""
        ...

    @property
    def lease_ms(self) -> int | None:
        """How long a claim holds without a heartbeat. None: until the process ends."""
        ...

    def lock_agent(self, agent_id: str) -> Mailbox | None:
        """Return the agent's row and lock it until the transaction ends. Do not change it. None: no such agent."""
        ...

    def lock_tasks(self, task_ids: Sequence[str]) -> None:
        """Lock tasks whose rows are changed before the end of the transaction. Those that do not exist are skipped."""
        ...

    def prefetch(self, agent_ids: Sequence[str]) -> None:
        """Read the rows of agents that are locked already and are used next."""
        ...

    def cache_agent(self, agent_id: str, row: Mailbox) -> None:
        """Remember the row that was just written. The session owns it from now on."""
        ...

    def invalidate(self) -> None:
        """Drop cached rows: they were changed directly in the database, or rolled back."""
        ...

    def read_waiting(
        self, agent_id: str, position: MailboxPosition, after: int, upto: int, limit: int
    ) -> Sequence[WaitingRow]:
        """Return the first `limit` waiting messages between two positions, in order. The caller owns the rows."""
        ...

    def open_questions(self, agent_id: str) -> Mapping[str, str] | None:
        """Return the agent's open questions to the person, in order, with their tasks. None: they must be read."""
        ...

    def retry_with(self, agent_id: str) -> NoReturn:
        """Roll the transaction back and run it again with this agent locked first: rows that it read have changed."""
        ...

    def next_message_seq(self, recipient: str) -> int:
        """Return the number of a new message to `recipient`, whose mailbox is locked."""
        ...

    def reserve_message_seqs(self, count: int) -> None:
        """Fetch `count` message numbers ahead."""
        ...

    def append_events(self, events: Sequence[EventRow]) -> None:
        """Write the events before the commit."""
        ...

    def change_tasks(self, changes: Mapping[str, TaskChange]) -> None:
        """Add to the counters of tasks, by id."""
        ...

    def unwritten_change(self, task_id: str) -> TaskChange | None:
        """Return what earlier jobs of the batch add to a task, if it is not in the database yet."""
        ...

    def is_society_paused(self) -> bool:
        """True if the whole society is paused. The transaction is retried if that changes before its commit."""
        ...

    def set_society_paused(self, paused: bool) -> None: ...


class SqliteSession:
    """Session of the only writer. It outlives transactions and caches agent rows between them."""

    lease_ms: int | None = None

    def __init__(self, db: Connection, timestamp: int) -> None:
        self._db, self.timestamp = db, timestamp
        self._last_seq: int | None = None
        """Number of the newest message. Numbers of rolled back transactions are not reused."""
        self.cached_agents: dict[str, Mailbox] = {}
        """Agent rows as the database has them, by id."""
        self._data_version: object = None
        self._secret = b""
        self._paused: bool | None = None
        """Whether the society is paused; None: not read yet. Dropped together with `cached_agents`."""
        self._last_event: int | None = None
        """Number of the newest written event; None: not known. Dropped together with `cached_agents`."""
        self._events: list[EventRow] = []
        """Events of the transaction's jobs that are not written yet."""

    @property
    def secret(self) -> bytes:
        self._secret = self._secret or read_secret(self._db)
        return self._secret

    def begin(self, now: int) -> None:
        """Start a transaction at `now`, in ms."""
        self.timestamp = max(self.timestamp, now)
        # The owner may repair the file by hand while the society runs: another connection's write must count.
        version = self._db.execute("PRAGMA data_version").fetchone()
        if version != self._data_version:
            self._data_version = version
            self.invalidate()

    def lock_agent(self, agent_id: str) -> Mailbox | None:
        if cached := self.cached_agents.get(agent_id):
            return cached
        row = self._db.execute(SELECT_MAILBOX, {"id": agent_id}).fetchone()
        if row is None:
            return None
        mailbox = Mailbox(*row)
        self.cache_agent(agent_id, mailbox)
        return mailbox

    def lock_tasks(self, task_ids: Sequence[str]) -> None:
        pass

    def prefetch(self, agent_ids: Sequence[str]) -> None:
        pass

    def cache_agent(self, agent_id: str, row: Mailbox) -> None:
        if len(self.cached_agents) >= MAX_CACHED_AGENTS and agent_id not in self.cached_agents:
            self.cached_agents.clear()
        self.cached_agents[agent_id] = row

    def invalidate(self) -> None:
        self.cached_agents.clear()
        self._paused = self._last_event = None

    def roll_back(self) -> None:
        """Forget what was rolled back: a job, or the whole transaction."""
        self.invalidate()
        self._events.clear()

    def write_events(self) -> int:
        """Write the events of the jobs that have run; return the number of the newest event, 0 if there is none."""
        if self._last_event is None:
            self._last_event = self._db.execute(SELECT_LAST_EVENT).fetchone()[0] or 0
        if self._events:
            insert(self._db, EVENT_COLUMNS, self._events)
            # The number of a new row is one more than the newest, which is never deleted.
            self._last_event += len(self._events)
            self._events.clear()
        return self._last_event

    def is_society_paused(self) -> bool:
        if self._paused is None:
            self._paused = bool(self._db.execute(SELECT_PAUSED).fetchone()[0])
        return self._paused

    def set_society_paused(self, paused: bool) -> None:
        self._db.execute("UPDATE log SET paused = :paused", {"paused": paused})
        self._paused = paused

    def read_waiting(
        self, agent_id: str, position: MailboxPosition, after: int, upto: int, limit: int
    ) -> Sequence[WaitingRow]:
        bounds = {"recipient": agent_id, "after": after, "upto": upto, "limit": limit}
        return [WaitingRow(*row) for row in self._db.execute(SELECT_WAITING, bounds)]

    def open_questions(self, agent_id: str) -> Mapping[str, str] | None:
        return None

    def retry_with(self, agent_id: str) -> NoReturn:
        raise AssertionError(f"rows of {agent_id} changed, but there is only one writer")

    def next_message_seq(self, recipient: str) -> int:
        # Attachments need the number before the message row is written.
        if self._last_seq is None:
            row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'messages'").fetchone()
            self._last_seq = row[0] if row else 0
        self._last_seq += 1
        return self._last_seq

    def reserve_message_seqs(self, count: int) -> None:
        pass

    def append_events(self, events: Sequence[EventRow]) -> None:
        self._events += events  # one INSERT for all jobs of the transaction

    def change_tasks(self, changes: Mapping[str, TaskChange]) -> None:
        for task_id, change in changes.items():
            sets, parameters = change.to_assignments(self.timestamp)
            self._db.execute(f"UPDATE tasks SET {sets} WHERE id = :id", {**parameters, "id": task_id})

    def unwritten_change(self, task_id: str) -> TaskChange | None:
        return None
