"""The numbers, the time and the log of one transaction: where one writer and many differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from coterie.stores.sql.bulk import insert
from coterie.stores.sql.connection import Connection

EVENTS = "events (at, kind, subject, data)"
Noted = tuple[int, str, str, str | None]
"""An event without its number."""


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
