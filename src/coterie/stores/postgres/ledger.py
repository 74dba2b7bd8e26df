"""The numbers, the time, the locks and the log of one batch, where many processes write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import psycopg

from coterie.stores.postgres.connection import TIMEOUTS, PgConnection
from coterie.stores.postgres.trouble import Contended
from coterie.stores.sql.bulk import insert
from coterie.stores.sql.ledger import Noted
from coterie.stores.sql.mailbox import READ

CLOCK = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_EVENTS = "events (seq, at, kind, subject, data)"
_LOCKED = READ.replace("SELECT ", "SELECT id, ").replace("id = ?", "id IN ({}) ORDER BY id FOR UPDATE")
_NUMBER = (
    "UPDATE log SET last = last + ?1, last_at = greatest(last_at, ?2)"
    " RETURNING last, pg_current_xact_id()::text, pg_notify(?3, '')"
)
_TIME = f"SELECT {CLOCK}, last_at FROM log"
_TRANSACTION = "SELECT pg_current_xact_id_if_assigned()::text"


class BatchLedger:
    """Begins a transaction; whoever holds it commits."""

    def __init__(
        self,
        db: PgConnection,
        touches: Iterable[str],
        lease: int,
        channel: str,
        clock: Callable[[], int] | None = None,
    ) -> None:
        """`channel`: where others hear of it. `clock`: in place of the database's own."""
        self._db, self.lease, self._channel, self._clock = db, lease, channel, clock
        self._numbers: list[int] = []
        self._events: list[Noted] = []
        self._rows: dict[str, tuple[Any, ...]] = {}
        self.now = self.stamp = 0
        """The first is what due times are measured against."""
        self._begin(sorted(set(touches)))

    def _begin(self, touches: Sequence[str]) -> None:
        """In one round trip: the locks in order, then the time, which is read behind them."""
        marks = ", ".join(["%s"] * len(touches))
        locked = f"{_LOCKED.format(marks)};" if touches else ""
        answer = self._db.raw.execute(f"BEGIN; {TIMEOUTS} {locked} {_TIME}; SAVEPOINT job".encode(), touches or None)
        found = []
        while answer.nextset():
            if answer.description:
                found.append(answer.fetchall())
        (now, last_at), *_ = found.pop()
        self._rows = {agent_id: tuple(row) for rows in found for agent_id, *row in rows}
        self.now = self._clock() if self._clock else now
        self.stamp = max(self.now, last_at)

    # One job after the other

    def next_job(self) -> int:
        """How much is in the log before it."""
        self._numbers.clear()  # a number given out late would stand behind messages that are older
        return len(self._events)

    def forget(self, noted: int) -> None:
        """What was noted since then did not happen."""
        del self._events[noted:]
        self.read_anew()

    def read_anew(self) -> None:
        """Rows may have been changed without having been opened."""
        self._rows.clear()

    # What the post office asks for

    def open(self, sql: str, agent_id: str) -> tuple[Any, ...] | None:
        if (row := self._rows.pop(agent_id, None)) is not None:
            return row
        try:
            found = self._db.execute(_at_once(sql), (agent_id,)).fetchone()
        except psycopg.errors.LockNotAvailable as error:
            raise Contended(agent_id) from error
        if found is None:
            return None
        *rest, now = found
        if not self._clock:
            self.stamp = max(self.stamp, now)
        return tuple(rest)

    def next_message(self) -> int:
        if not self._numbers:
            self.reserve(1)
        return self._numbers.pop()

    def reserve(self, messages: int) -> None:
        rows = self._db.execute("SELECT nextval('messages_seq_seq') FROM generate_series(1, ?)", (messages,))
        self._numbers = sorted((number for (number,) in rows), reverse=True)

    def log(self, events: Sequence[Noted]) -> None:
        self._events += events

    def close(self) -> str | None:
        """Write the log, last of all; the number of the transaction, if it has written anything."""
        if not self._events:
            return self._db.execute(_TRANSACTION).fetchone()[0]  # type: ignore[index,no-any-return]
        last, number, _ = self._db.execute(_NUMBER, (len(self._events), self.stamp, self._channel)).fetchone()  # type: ignore[misc]
        first = last - len(self._events) + 1
        insert(self._db, _EVENTS, [(seq, *event) for seq, event in enumerate(self._events, first)])
        return str(number)


@cache
def _at_once(sql: str) -> str:
    """The row with the time behind it. Where the row has just been changed, both are read anew."""
    return sql.replace(" FROM ", f", {CLOCK} FROM ") + " FOR UPDATE NOWAIT"
