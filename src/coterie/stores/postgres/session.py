"""The numbers, the time, the locks and the log of one batch, where many processes write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import psycopg

from coterie.ids import new_id
from coterie.stores.postgres.cluster import Herald
from coterie.stores.postgres.connection import CLOCK, TIMEOUTS, PgConnection, json_rows
from coterie.stores.postgres.errors import Contended, PausedMeanwhile
from coterie.stores.sql.connection import read_secret
from coterie.stores.sql.mailbox import COLUMNS, READ
from coterie.stores.sql.session import WAITING, Mark, Noted

_LOCKED = READ.replace("SELECT ", "SELECT id, ").replace("id = ?", "id IN ({}) ORDER BY id FOR UPDATE")
# The first value: what this batch was decided on, or NULL. The second: what is to be, or NULL for no change.
# A batch that was decided on the wrong value fails here, because the column is NOT NULL. It locks the row that every
# writing batch locks last, so it costs nothing more, and batches and pauses are committed one after the other.
_PAUSED = "paused = CASE WHEN paused = coalesce(?::int, paused) THEN coalesce(?::int, paused) END"
# Numbered and written in one round trip; whoever listens is told when it is committed.
_LOG = f"""
WITH numbered AS (
    UPDATE log SET last = last + ?, last_at = greatest(last_at, ?), {_PAUSED}
    RETURNING last - ? AS before, pg_notify(?, ?)::text)
INSERT INTO events (seq, at, kind, subject, data)
SELECT before + place, at, kind, subject, data
  FROM numbered, json_to_recordset(?) AS noted (place BIGINT, at BIGINT, kind TEXT, subject TEXT, data TEXT)
RETURNING pg_current_xact_id()::text
"""
FEW = 100
"""So much mail of one agent is read on the chance that it is asked for."""
_ITS_MAIL = WAITING.replace("recipient = ? AND in_seq > ?", "recipient = a.id AND in_seq > a.taken_seq")
# Each mailbox by its index, whatever the planner thinks of the tables.
_ALL_WAITING = f"""
SELECT a.id, mail.* FROM agents a, LATERAL ({_ITS_MAIL}) AS mail
 WHERE a.id = ANY (?::text[]) AND a.waiting <= {FEW} ORDER BY a.id, mail.place
"""
_STATE, _TAKEN, _NEXT, _WAITING = map(COLUMNS.index, ("state", "taken_seq", "next_in_seq", "waiting"))
_NOTED = ("place", "at", "kind", "subject", "data")
_TRANSACTION = "pg_current_xact_id_if_assigned()::text"
_TIME = f"SELECT {CLOCK}, last_at, paused, {_TRANSACTION} FROM log"
_NOW = f"SELECT {CLOCK}, {_TRANSACTION}"
_TELL = "SELECT pg_notify(?, ?)"
_MARK = f"""
INSERT INTO batches (process, batch, at) VALUES (?, ?, {CLOCK})
    ON CONFLICT (process) DO UPDATE SET batch = excluded.batch, at = excluded.at
"""
_MARKED = "SELECT 1 FROM batches WHERE process = ? AND batch = ?"
_STATUS = "SELECT pg_xact_status(?::xid8)"
_NUMBERS = "SELECT nextval('messages_seq_seq') FROM generate_series(1, {})"


@dataclass(frozen=True, slots=True)
class Written:
    """A batch of which it may have to be found out what became of it."""

    transaction: str
    process: str
    batch: str

    def is_under_way(self, db: PgConnection) -> bool:
        try:
            return bool(db.execute(_STATUS, (self.transaction,)).fetchone()[0] == "in progress")
        except psycopg.DataError:  # after a crash or a failover: a number that was never given out here
            return False

    def is_committed(self, db: PgConnection) -> bool:
        """Once it is no longer under way."""
        return db.execute(_MARKED, (self.process, self.batch)).fetchone() is not None


@dataclass(frozen=True, slots=True)
class JobMark:
    """What the ledger had gathered before a job ran: what the job adds is undone by going back to it."""

    events: int
    leaves_work: bool
    pause: tuple[bool, bool | None, bool | None]
    """What was known, told and wanted of the pause of the society."""


class BatchLedger:
    """Begins a transaction; whoever holds it commits."""

    def __init__(
        self,
        db: PgConnection,
        touches: Iterable[str],
        lease: int,
        herald: Herald,
        clock: Callable[[], int] | None = None,
        *,
        messages: int = 0,
        secret: bytes = b"",
    ) -> None:
        """`clock`: in place of the database's own. `messages`: as many are expected to those it touches.

        `secret`: the society's, if it is known already.
        """
        self._secret = secret
        self._db, self.lease, self._herald, self._clock = db, lease, herald, clock
        self._numbers: list[int] = []
        self._ahead: list[int] = []
        """Numbers that were taken behind the locks of those it touches: good for messages to these."""
        self._events: list[Noted] = []
        self._rows: dict[str, tuple[Any, ...]] = {}
        self._marks: dict[str, Mark] = {}
        """Of those for whom something waits, as they were when they were locked."""
        self._mail: dict[str, tuple[Mark, list[Any]]] = {}
        self._transaction: str | None = None
        self._paused = False
        self._decided_on: bool | None = None
        """What jobs of this batch were told about the pause of the society when they asked first."""
        self._becomes: bool | None = None
        """What a job of this batch wants it to be."""
        self.leaves_work = False
        """Somebody has something to do whom nobody was found for here."""
        self.now = self.stamp = 0
        """The first is what due times are measured against."""
        self._begin(sorted(set(touches)), messages)

    def _begin(self, touches: Sequence[str], messages: int) -> None:
        """In one round trip: the locks in order, then the time and the numbers, which are read behind them."""
        marks = ", ".join(["%s"] * len(touches))
        locked = f"{_LOCKED.format(marks)};" if touches else ""
        numbers = f"{_NUMBERS.format(messages)};" if messages else ""
        words = f"BEGIN; {TIMEOUTS} {locked} {numbers} {_TIME}; SAVEPOINT job"
        answer = self._db.raw.execute(words.encode(), touches or None)
        found = []
        while answer.nextset():
            if answer.description:
                found.append(answer.fetchall())
        (now, last_at, paused, self._transaction), *_ = found.pop()
        self._paused = self.began_paused = bool(paused)
        if messages:
            self._ahead = sorted((number for (number,) in found.pop()), reverse=True)
        self._hold(chain.from_iterable(found))
        self.now = self._clock() if self._clock else now
        self.stamp = max(self.now, last_at)

    # One job after the other

    def next_job(self) -> JobMark:
        self._numbers.clear()  # a number given out late would stand behind messages that are older
        return JobMark(len(self._events), self.leaves_work, (self._paused, self._decided_on, self._becomes))

    def forget(self, mark: JobMark) -> None:
        """What was gathered since `mark` did not happen."""
        del self._events[mark.events :]
        self.leaves_work = mark.leaves_work
        self._paused, self._decided_on, self._becomes = mark.pause
        self.read_anew()

    def read_anew(self) -> None:
        """Rows may have been changed without having been opened."""
        self._rows.clear()
        self._marks.clear()
        self._mail.clear()

    # What the post office asks for

    @property
    def secret(self) -> bytes:
        self._secret = self._secret or read_secret(self._db)
        return self._secret

    def open(self, sql: str, agent_id: str) -> tuple[Any, ...] | None:
        if (row := self._rows.pop(agent_id, None)) is not None:
            return row
        try:
            found = self._db.execute(_at_once(sql), (agent_id,)).fetchone()
        except psycopg.errors.LockNotAvailable as error:
            raise Contended(agent_id) from error
        if found is None:
            return None
        *rest, now, self._transaction = found
        self._saw(now)
        return tuple(rest)

    def foresee(self, agent_ids: Sequence[str]) -> None:
        if not agent_ids:
            return
        marks = ", ".join(["?"] * len(agent_ids))
        rows, time = self._db.execute(_LOCKED.format(marks), agent_ids), self._db.execute(_NOW)
        mail = self._db.execute(_ALL_WAITING, (list(agent_ids),))
        now, self._transaction = time.fetchone()
        self._saw(now)
        self._hold(rows)
        self._sort(agent_ids, mail)

    def saved(self, agent_id: str, row: tuple[Any, ...]) -> None:
        pass  # the next to open it may be another process

    def _saw(self, now: int) -> None:
        if not self._clock:
            self.stamp = max(self.stamp, now)

    def waiting(self, agent_id: str, mark: Mark, *, whole: bool) -> list[Any]:
        """Whoever is held and works is likely to ask next: what waits for all of them comes in one round trip."""
        if self._marks.get(agent_id) == mark:
            held = [*self._marks]
            self._sort(held, self._db.execute(_ALL_WAITING, (held,)))
        seen, rows = self._mail.pop(agent_id, (None, []))
        return rows if seen == mark else self._db.execute(WAITING, (agent_id, mark[0])).fetchall()

    def _sort(self, agent_ids: Iterable[str], mail: Iterable[Sequence[Any]]) -> None:
        """All that waits for these."""
        for agent_id in agent_ids:
            if mark := self._marks.pop(agent_id, None):
                self._mail[agent_id] = (mark, [])
        for agent_id, *row in mail:
            if agent_id in self._mail:
                self._mail[agent_id][1].append(tuple(row))

    def _hold(self, rows: Iterable[Sequence[Any]]) -> None:
        for agent_id, *row in rows:
            self._rows[agent_id] = tuple(row)
            state, mark = row[_STATE], (row[_TAKEN], row[_NEXT], row[_WAITING])
            if state in ("ready", "llm", "tools") and 0 < mark[2] <= FEW:
                self._marks[agent_id] = mark

    def next_message(self) -> int:
        if not self._numbers:
            self._numbers = self._fetch(1)
        return self._numbers.pop()

    def reserve(self, messages: int) -> None:
        if len(self._ahead) >= messages:
            first = len(self._ahead) - messages
            self._numbers, self._ahead = self._ahead[first:], self._ahead[:first]
            return
        self._numbers = self._fetch(messages)

    def _fetch(self, messages: int) -> list[int]:
        rows = self._db.execute(_NUMBERS.format("?"), (messages,))
        return sorted((number for (number,) in rows), reverse=True)

    def log(self, events: Sequence[Noted]) -> None:
        self._events += events

    def society_paused(self) -> bool:
        if self._decided_on is None and self._becomes is None:
            self._decided_on = self._paused
        return self._paused

    def pause_society(self, paused: bool) -> None:
        # Written with the log, last of all: whoever holds that row must not wait for an agent's.
        self._paused = self._becomes = paused

    def close(self) -> Written | None:
        """Write the log, last of all; how to find out later whether it was committed, if it has written anything."""
        try:
            transaction = self._close()
        except psycopg.errors.NotNullViolation as error:
            raise PausedMeanwhile from error
        if transaction is None:
            return None
        written = Written(transaction, self._herald.process, new_id())
        self._db.execute(_MARK, (written.process, written.batch))
        return written

    def _close(self) -> str | None:
        if not self._events:
            return self._close_untold()
        numbered = json_rows(_NOTED, ((place, *event) for place, event in enumerate(self._events, 1)))
        count = len(self._events)
        news = self._herald.news(self.leaves_work)
        logged = self._db.execute(_LOG, (count, self.stamp, self._decided_on, self._becomes, count, *news, numbered))
        return self._transaction or str(logged.fetchone()[0])

    def _close_untold(self) -> str | None:
        if self._decided_on is not None or self._becomes is not None:
            self._db.execute(f"UPDATE log SET {_PAUSED}", (self._decided_on, self._becomes))
        if self.leaves_work:
            self._db.execute(_TELL, self._herald.news(self.leaves_work))
        if self._transaction is None:
            (self._transaction,) = self._db.execute(f"SELECT {_TRANSACTION}").fetchone()
        return self._transaction


@cache
def _at_once(sql: str) -> str:
    """The row with the time behind it. Where the row has just been changed, both are read anew."""
    return sql.replace(" FROM ", f", {CLOCK}, pg_current_xact_id()::text FROM ") + " FOR UPDATE NOWAIT"
