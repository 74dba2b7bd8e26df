"""An agent's row while a transaction works on it: read once, changed in memory, written once at the end."""

from __future__ import annotations

from functools import cache
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple as as_row

from coterie.messages import PERSON
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.ledger import Ledger


class Mailbox(Struct):
    kind: str
    state: str
    runnable_at: int | None
    next_in_seq: int
    taken_seq: int
    waiting: int
    waiting_bytes: int
    delayed: int
    epoch: int
    step_no: int
    turn_no: int
    next_hist_seq: int
    rounds: int
    withdrawals: int
    retries: int
    hold: int
    why: str | None
    worker: str | None
    crash_step: int
    crashes: int
    since: int | None
    history_version: int
    """Changes with every change of what `history.view` returns for the agent; it never goes back."""
    person: int
    """1: the person wrote one of the messages of the turn, or of the mail that waits."""
    retry_ms: int | None = None

    def deliver(self, size: int, now: int, sender: str = "") -> int:
        """One more message waits; the place it got. It wakes an agent that has nothing better to do."""
        place = self.next_in_seq
        self.next_in_seq += 1
        self.waiting += 1
        self.waiting_bytes += size
        if self.kind == "agent":
            # At rest nothing waits, so the mark is left over from the turn before.
            self.person = int(sender == PERSON or (self.person == 1 and self.state != "idle"))
            if self.state == "idle":
                self.state, self.runnable_at = "ready", now
            elif self.state == "wait_approval" or (self.state == "blocked" and sender == PERSON):
                self.runnable_at = now
        return place

    def remove(self, size: int) -> None:
        """One that waited does not any more. With nothing left to do, a woken agent goes back to sleep."""
        self.waiting -= 1
        self.waiting_bytes -= size
        if self.state == "ready" and not self.waiting:
            self.state, self.runnable_at = "idle", None

    def is_leased(self) -> bool:
        """Somebody has just taken it, or a step further."""
        return self.runnable_at is None and self.state in ("llm", "tools")

    def can_run(self, now: int) -> bool:
        return self.runnable_at is not None and self.runnable_at <= now


COLUMNS = Mailbox.__struct_fields__
_LIST = ", ".join(COLUMNS)
READ = f"SELECT {_LIST} FROM agents WHERE id = ?"
_PLACES = range(len(COLUMNS))
_STATE, _RUNNABLE_AT = COLUMNS.index("state"), COLUMNS.index("runnable_at")


@cache
def _save(places: tuple[int, ...]) -> str:
    """A step changes a few columns, always the same ones, and writing all of them costs three times as much."""
    sets = ", ".join(f"{COLUMNS[place]} = ?" for place in places)
    return f"UPDATE agents SET {sets} WHERE id = ?"


def _could_run(row: tuple[Any, ...], now: int) -> bool:
    return row[_RUNNABLE_AT] is not None and row[_RUNNABLE_AT] <= now


class Mailboxes:
    """Those that one transaction has opened."""

    def __init__(self, db: Connection, ledger: Ledger) -> None:
        self._db, self._ledger = db, ledger
        self._open: dict[str, tuple[Mailbox, tuple[Any, ...]] | None] = {}
        """Each with the row as it was read."""

    def get(self, agent_id: str) -> Mailbox | None:
        try:
            found = self._open[agent_id]
        except KeyError:
            row = self._ledger.open(READ, agent_id)
            found = self._open[agent_id] = row and (Mailbox(*row), row)
        return found[0] if found else None

    def woken(self, now: int) -> list[tuple[str, str]]:
        """Who has something to do that had not, with their states."""
        return [
            (agent_id, found[0].state)
            for agent_id, found in self._open.items()
            if found and found[0].can_run(now) and not _could_run(found[1], now)
        ]

    def save(self, now: int) -> None:
        """Write those that were changed."""
        changed: dict[tuple[int, ...], list[list[Any]]] = {}
        for agent_id, found in self._open.items():
            if found is None or as_row(found[0]) == found[1]:
                continue
            row, was = self._marked(found[0], found[1], now), found[1]
            places = tuple([place for place in _PLACES if row[place] != was[place]])
            changed.setdefault(places, []).append([*[row[place] for place in places], agent_id])
            self._ledger.saved(agent_id, row)
        for places, rows in changed.items():
            if len(rows) == 1:
                self._db.execute(_save(places), rows[0])
            else:
                self._db.executemany(_save(places), rows)
        self._open.clear()

    def _marked(self, mailbox: Mailbox, was: tuple[Any, ...], now: int) -> tuple[Any, ...]:
        """The row to write: with since when it is in its state, and for how long it is held."""
        if mailbox.state != was[_STATE]:
            mailbox.since = self._ledger.stamp
        if self._ledger.lease is not None and mailbox.is_leased():
            mailbox.runnable_at = now + self._ledger.lease
        return as_row(mailbox)
