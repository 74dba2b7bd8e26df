"""The engine under simulation: the SQLite store's own transitions, driven one after the other on a database in memory.

There are no threads, no event loop and no clock but the one moved here, so a seed decides everything that happens.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import TypeVar

from coterie.agents import Agent
from coterie.clock import to_ms
from coterie.messages import PERSON, Envelope, Message, Receipt
from coterie.store import Limits, Promotion
from coterie.stores.sql import claims, commands, queries, replies, turn_rows
from coterie.stores.sql.claims import Attendance, Attended
from coterie.stores.sql.invariants import INVARIANTS
from coterie.stores.sql.mailbox import READ
from coterie.stores.sql.session import OneWriter
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.stores.sqlite import engine
from coterie.stores.sqlite.migrate import migrate
from coterie.testing.clock import START
from coterie.turn import Event, Rules
from coterie.turn_store import Claim, HistoryRow, Taker, View

T = TypeVar("T")
AGENTS = ("ada", "bob", "cyd")
RULES = Rules(max_withdrawals=2, max_rounds=8)
LIMITS = Limits(max_hops=2, mailbox=12)
SECRET = b"simulated"
"""Of every simulated society, so that a seed decides the ids of messages too."""


class World:
    """One society. Every method is one transaction, as in the store."""

    errors: tuple[type[Exception], ...] = (sqlite3.Error,)
    """What the engine raises."""
    replayed_with = ""
    taker: Taker | None = None
    """Whoever gets mail is claimed for it at once, in the transaction of that mail."""

    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:", isolation_level=None, cached_statements=256)
        self.db.deserialize(_empty_society())
        self.db.execute("PRAGMA foreign_keys = ON")
        self.now = to_ms(START)
        self.ledger = OneWriter(self.db, self.now)

    def close(self) -> None:
        self.db.close()

    def tick(self, by: timedelta) -> None:
        self.now += by // timedelta(milliseconds=1)

    # What the store does

    def send(self, envelope: Envelope) -> Receipt:
        return self.post(lambda _, post: post.accept(envelope))

    def promote(self, *, early: bool = False) -> Promotion:
        return self.post(lambda db, post: commands.promote(db, post, 100, early))

    def withdraw(self, message_id: str) -> Message:
        return self.post(lambda db, post: commands.withdraw(db, post, message_id, PERSON))

    def terminate(self, agent_id: str) -> None:
        self.post(lambda db, post: commands.terminate(db, post, agent_id))

    def claim(self, worker: str, limit: int) -> list[Claim]:
        claims = self.post(lambda db, post: claims.claim(db, post, worker, RULES, limit))
        for claim in claims:
            self.compare(claim)
        return claims

    def advance(self, claim: Claim, event: Event, sends: Envelope | None) -> Claim:
        after = self.post(lambda db, post: claims.advance(db, post, claim, event, RULES, sends))
        self.compare(after)
        return after

    def compare(self, claim: Claim) -> None:
        """What a claim says of history, plan and askers is what is stored."""
        if claim.added:
            stored = self.history(claim.agent_id, claim.added[0].seq - 1)
            assert [*claim.added] == stored, f"{claim.added} was told, {stored} is stored"
        found = turn_rows.read_open(self.db, claim.agent_id)
        assert (claim.plan_key, claim.plan) == (found or (claim.plan_key, None))
        if claim.asked:
            assert [claim.asked] == [*replies.askers(self.db, claim.agent_id, claim.turn_no).values()]
        sent = "SELECT 1 FROM messages WHERE sender = ? AND plan >= ? AND plan < ?"
        assert claim.spoke or not self.rows(sent, claim.agent_id, f"{claim.turn_no}/", f"{claim.turn_no}0")

    def release(self, worker: str) -> None:
        self.post(lambda db, post: claims.release(db, post, worker, (), False))

    def pause(self, agent_id: str) -> None:
        self.post(lambda db, post: commands.pause(db, post, agent_id))

    def resume(self, agent_id: str) -> None:
        self.post(lambda db, post: commands.resume(db, post, agent_id))

    def history(self, agent_id: str, after: int = 0) -> list[HistoryRow]:
        return queries.history(self.db, agent_id, after)

    def view(self, agent_id: str, claim: Claim | None = None) -> View:
        return queries.view(self.db, agent_id, claim)

    # What happens to its owners

    def restart(self) -> None:
        """Everybody who worked on a turn is gone, as after a kill -9 of the process that owns the file."""
        self.transaction(engine.begin_boot)
        self.ledger = OneWriter(self.db, self.now)

    def expire(self, agent_id: str) -> bool:
        """The lease of whoever works on this agent runs out: anybody may take it over."""

        def run_out(db: sqlite3.Connection, post: UnitOfWork) -> bool:
            post.read_anew()
            changed = db.execute(
                "UPDATE agents SET runnable_at = ? WHERE id = ? AND state IN ('llm', 'tools')", (self.now, agent_id)
            )
            return changed.rowcount == 1

        return self.in_one(run_out)

    # Plumbing

    def post(self, run: Callable[[sqlite3.Connection, UnitOfWork], T]) -> T:
        if not self.taker:
            return self.in_one(run)
        attendance = Attendance(self.taker)

        def attending(db: sqlite3.Connection, post: UnitOfWork) -> tuple[T, Attended]:
            result = run(db, post)
            return result, attendance.serve(db, post)

        result, attended = self.in_one(attending)
        attendance.settle(attended)
        return result

    def in_one(self, run: Callable[[sqlite3.Connection, UnitOfWork], T]) -> T:
        def work(db: sqlite3.Connection) -> T:
            self.ledger.begin(self.now)
            post = UnitOfWork(db, now=self.now, limits=LIMITS, ledger=self.ledger)
            result = run(db, post)
            post.close()
            return result

        result = self.transaction(work)
        for agent_id, row in self.ledger.rows.items():
            assert row == self.db.execute(READ, (agent_id,)).fetchone(), f"{agent_id} is not as it is remembered"
        return result

    def transaction(self, run: Callable[[sqlite3.Connection], T]) -> T:
        self.db.execute("BEGIN IMMEDIATE")
        try:
            result = run(self.db)
        except BaseException:
            self.db.execute("ROLLBACK")
            self.ledger.read_anew()
            raise
        self.db.execute("COMMIT")
        return result

    def rows(self, sql: str, *parameters: object) -> Sequence[tuple[object, ...]]:
        return self.db.execute(sql, parameters).fetchall()

    def violations(self) -> list[str]:
        return [
            f"{name}: {sentence.format(*row)}"
            for name, (sentence, sql) in INVARIANTS.items()
            for row in self.db.execute(sql)
        ]


@cache
def _empty_society() -> bytes:
    """Made once and copied for every seed."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    migrate(db)
    db.execute("UPDATE meta SET value = ? WHERE key = 'secret'", (SECRET.decode(),))
    people = [Agent(id=PERSON, name="You", kind="person"), *(Agent(id=name, name=name) for name in AGENTS)]
    post = UnitOfWork(db, now=to_ms(START), limits=LIMITS, ledger=OneWriter(db, to_ms(START)))
    commands.add_agents(db, post, people)
    post.close()
    engine.begin_boot(db)
    image = db.serialize()
    db.close()
    return image
