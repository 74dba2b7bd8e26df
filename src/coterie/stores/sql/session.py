"""The numbers, the time and the log of one transaction: where one writer and many differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from coterie.stores.sql.connection import Connection, insert, read_secret
from coterie.stores.sql.rows import MESSAGE

EVENTS = "events (at, kind, subject, data)"
_PENDING = "FROM messages WHERE recipient = ? AND in_seq > ? AND state = 'pending' ORDER BY in_seq"
_GLANCE = "in_seq AS place, id, sender, in_reply_to, option, cause"
_GLANCED = f"SELECT {_GLANCE} {_PENDING}"
WAITING = f"SELECT {_GLANCE}, length(payload), {MESSAGE} {_PENDING}"
GLANCE = len(_GLANCE.split(","))
"""So many columns of it are enough for a decision."""
KEPT = 4_096
"""Agents whose rows are remembered, a megabyte or two."""
Noted = tuple[int, str, str, str | None]
"""An event without its number."""
Mark = tuple[int, int, int]
"""Where a mailbox stands: what was taken last, what comes next, and how much waits. As long as it is the same, so is
what waits."""


class Ledger(Protocol):
    @property
    def secret(self) -> bytes:
        """The society's secret."""
        ...

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

    def saved(self, agent_id: str, row: tuple[Any, ...]) -> None:
        """That is what its row is like now."""
        ...

    def read_anew(self) -> None:
        """Rows may have been changed without having been opened, or changes undone."""
        ...

    def waiting(self, agent_id: str, mark: Mark, *, whole: bool) -> list[Any]:
        """What waits for it, in order, as rows like those of `WAITING`; or no more of each than a glance."""
        ...

    def next_message(self) -> int: ...

    def reserve(self, messages: int) -> None:
        """So many numbers will be asked for next."""
        ...

    def log(self, events: Sequence[Noted]) -> None: ...

    def society_paused(self) -> bool:
        """Whether the whole society is paused. If that changes before this transaction commits, it is run again."""
        ...

    def pause_society(self, paused: bool) -> None: ...


PAUSED = "SELECT paused FROM log"


class OneWriter:
    """Where nobody else writes, everything is known beforehand. One of these lasts as long as the writer."""

    lease: int | None = None

    def __init__(self, db: Connection, stamp: int) -> None:
        self._db, self.stamp = db, stamp
        self._last: int | None = None
        """The number of the newest message. Those of an undone transaction are not given out again."""
        self.rows: dict[str, tuple[Any, ...]] = {}
        """Agents as they stand in the database."""
        self._version: object = None
        self._secret = b""
        self._paused: bool | None = None
        """As the database has it. None: not read yet. Kept and dropped together with `rows`."""

    @property
    def secret(self) -> bytes:
        # The row is made when the store is opened and never changes, so it can be remembered.
        self._secret = self._secret or read_secret(self._db)
        return self._secret

    def begin(self, now: int) -> None:
        """A transaction of ours."""
        self.stamp = max(self.stamp, now)
        # Nobody else should write to this file. If somebody does, to mend something by hand, it counts all the same.
        version = self._db.execute("PRAGMA data_version").fetchone()
        if version != self._version:
            self._version = version
            self.read_anew()

    def open(self, sql: str, agent_id: str) -> tuple[Any, ...] | None:
        if known := self.rows.get(agent_id):
            return known
        row: tuple[Any, ...] | None = self._db.execute(sql, (agent_id,)).fetchone()
        if row is not None:
            self.saved(agent_id, row)
        return row

    def foresee(self, agent_ids: Sequence[str]) -> None:
        pass

    def saved(self, agent_id: str, row: tuple[Any, ...]) -> None:
        if len(self.rows) >= KEPT and agent_id not in self.rows:
            self.rows.clear()
        self.rows[agent_id] = row

    def read_anew(self) -> None:
        self.rows.clear()
        self._paused = None

    def society_paused(self) -> bool:
        if self._paused is None:
            self._paused = bool(self._db.execute(PAUSED).fetchone()[0])
        return self._paused

    def pause_society(self, paused: bool) -> None:
        self._db.execute("UPDATE log SET paused = ?", (paused,))
        self._paused = paused

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
