"""The numbers, the time and the log of one transaction: where one writer and many differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from coterie.stores.sql.bulk import insert
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.rows import MESSAGE

EVENTS = "events (at, kind, subject, data)"
_PENDING = "FROM messages WHERE recipient = ? AND in_seq > ? AND state = 'pending' ORDER BY in_seq"
_GLANCE = "in_seq AS place, id, sender, in_reply_to, option, cause"
_GLANCED = f"SELECT {_GLANCE} {_PENDING}"
WAITING = f"SELECT {_GLANCE}, length(payload), {MESSAGE} {_PENDING}"
GLANCE = len(_GLANCE.split(","))
"""So many columns of it are enough for a decision."""
Noted = tuple[int, str, str, str | None]
"""An event without its number."""
Mark = tuple[int, int, int]
"""Where a mailbox stands: what was taken last, what comes next, and how much waits. As long as it is the same, so is
what waits."""


class Ledger(Protocol):
    @property
    def stamp(self) -> int:
        """What is written down as the time: never earlier than what stands before it in any mailbox opened so far."""
        ...

    @property
    def lease(self) -> int | None:
        """For how long, in ms, a claim holds without being renewed. None: until its owner is gone."""
        ...

    def open(self, sql: str, agent_id: str) -> tuple[Any, ...] | None:
        """An agent's row, read with `sql`; nobody else changes it before this transaction ends."""
        ...

    def foresee(self, agent_ids: Sequence[str]) -> None:
        """These, whose rows are held already, are opened next."""
        ...

    def waiting(self, agent_id: str, mark: Mark, *, whole: bool) -> list[Any]:
        """What waits for it, in order, as rows like those of `WAITING`; or no more of each than a glance."""
        ...

    def next_message(self) -> int: ...

    def reserve(self, messages: int) -> None:
        """So many numbers will be asked for next."""
        ...

    def log(self, events: Sequence[Noted]) -> None: ...


class OneWriter:
    """Where nobody else writes, everything is known beforehand. One of these lasts as long as the writer."""

    lease: int | None = None

    def __init__(self, db: Connection, stamp: int) -> None:
        self._db, self.stamp = db, stamp
        self._last: int | None = None
        """The number of the newest message. Those of an undone transaction are not given out again."""

    def open(self, sql: str, agent_id: str) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._db.execute(sql, (agent_id,)).fetchone()
        return row

    def foresee(self, agent_ids: Sequence[str]) -> None:
        pass

    def waiting(self, agent_id: str, mark: Mark, *, whole: bool) -> list[Any]:
        return self._db.execute(WAITING if whole else _GLANCED, (agent_id, mark[0])).fetchall()

    def next_message(self) -> int:
        # The next number is known before the row is written; attachments need it.
        if self._last is None:
            row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'messages'").fetchone()
            self._last = row[0] if row else 0
        self._last += 1
        return self._last

    def reserve(self, messages: int) -> None:
        pass

    def log(self, events: Sequence[Noted]) -> None:
        insert(self._db, EVENTS, events)
