"""The engine under simulation: the store's transactions, run one after the other on an SQLite database in memory.

There are no threads, no event loop and no real clock, so a seed decides everything that happens.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import TypeVar

from coterie.agents import Agent
from coterie.clock import to_ms
from coterie.llm.service import TokenUsage
from coterie.messages import PERSON, Envelope, Message, Receipt
from coterie.store import Limits, Promotion
from coterie.stores.sql import claims, commands, queries, replies, schedules, task_control, turn_rows
from coterie.stores.sql.claims import EagerClaimer, EagerClaims
from coterie.stores.sql.invariants import INVARIANTS
from coterie.stores.sql.mailbox import SELECT_MAILBOX, Mailbox
from coterie.stores.sql.migrations import migrate_sqlite
from coterie.stores.sql.session import SqliteSession
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.stores.sqlite import engine
from coterie.tasks import StoppedTask
from coterie.testing.clock import START
from coterie.turn import Event, Rules
from coterie.turn_store import Claim, HistoryRow, HistoryView, TurnWorker

T = TypeVar("T")
AGENTS = ("ada", "bob", "cyd")
RULES = Rules(max_withdrawals=2, max_rounds=8, interrupt="stream", max_cuts=2)
LIMITS = Limits(max_hops=2, mailbox=12)
SECRET = b"simulated"
"""Secret of every simulated society, so that the seed also decides message ids."""


class World:
    """One society. Every method is one transaction, as in the store."""

    errors: tuple[type[Exception], ...] = (sqlite3.Error,)
    """Errors of the engine."""
    replayed_with = ""
    rules = RULES
    limits = LIMITS
    worker: TurnWorker | None = None
    """Worker for which woken agents are claimed in the transaction of their messages."""

    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:", isolation_level=None, cached_statements=256)
        self.db.deserialize(_empty_society())
        self.db.execute("PRAGMA foreign_keys = ON")
        self.now = to_ms(START)
        self.session = SqliteSession(self.db, self.now)

    def close(self) -> None:
        self.db.close()

    def tick(self, by: timedelta) -> None:
        self.now += by // timedelta(milliseconds=1)

    # Methods of the store

    def send(self, envelope: Envelope) -> Receipt:
        return self.transact(lambda _, uow: uow.accept(envelope))

    def promote(self, *, early: bool = False) -> Promotion:
        return self.transact(lambda db, uow: commands.promote_due(db, uow, 100, early))

    def withdraw(self, message_id: str) -> Message:
        return self.transact(lambda db, uow: commands.withdraw(db, uow, message_id, PERSON))

    def reschedule(self, message_id: str, delay: timedelta) -> Message:
        return self.transact(lambda db, uow: commands.reschedule(db, uow, message_id, delay, PERSON))

    def stop_task(self, task_id: str) -> StoppedTask:
        return self.transact(lambda db, uow: task_control.stop_task(db, uow, task_id))

    def continue_task(self, task_id: str) -> None:
        self.transact(lambda db, uow: task_control.continue_task(db, uow, task_id))

    def change_schedule(self, schedule_id: str, *, every: str | None, paused: bool | None) -> None:
        self.transact(lambda db, uow: schedules.change_schedule(db, uow, schedule_id, PERSON, every, paused))

    def end_schedule(self, schedule_id: str) -> None:
        self.transact(lambda db, uow: schedules.end_schedule(db, uow, schedule_id, PERSON))

    def terminate(self, agent_id: str) -> None:
        self.transact(lambda db, uow: commands.terminate(db, uow, agent_id))

    def claim(self, worker: str, limit: int) -> list[Claim]:
        claimed = self.transact(lambda db, uow: claims.claim_agents(db, uow, worker, self.rules, limit))
        for claim in claimed:
            self.compare(claim)
        return claimed

    def advance(self, claim: Claim, event: Event, sends: Envelope | None) -> Claim:
        after = self.transact(lambda db, uow: claims.advance(db, uow, claim, event, self.rules, sends))
        self.compare(after)
        return after

    def add_usage(self, claim: Claim, usage: TokenUsage) -> None:
        self.transact(lambda db, uow: claims.add_usage(db, uow, claim, "main", usage))

    def compare(self, claim: Claim) -> None:
        """Check that history, plan and askers of a claim are those in the database."""
        if claim.added_rows:
            stored = self.history(claim.agent_id, claim.added_rows[0].seq - 1)
            assert [*claim.added_rows] == stored, f"{claim.added_rows} was returned, {stored} is stored"
        assert claim.cuts == turn_rows.count_cuts(self.db, claim.agent_id, claim.turn_no) <= RULES.max_cuts
        found = turn_rows.read_open_plan(self.db, claim.agent_id)
        assert (claim.plan_key, claim.plan) == (found or (claim.plan_key, None))
        if claim.reply_target:
            assert [claim.reply_target] == [*replies.find_askers(self.db, claim.agent_id, claim.turn_no).values()]
        sent = "SELECT 1 FROM messages WHERE sender = ? AND plan >= ? AND plan < ?"
        assert claim.may_have_sent or not self.rows(sent, claim.agent_id, f"{claim.turn_no}/", f"{claim.turn_no}0")

    def release(self, worker: str) -> None:
        self.transact(lambda db, uow: claims.release_claims(db, uow, worker=worker, failed=False))

    def pause(self, agent_id: str) -> None:
        self.transact(lambda _, uow: commands.pause(uow, agent_id))

    def resume(self, agent_id: str) -> None:
        self.transact(lambda _, uow: commands.resume(uow, agent_id))

    def history(self, agent_id: str, after: int = 0) -> list[HistoryRow]:
        return queries.read_history(self.db, agent_id, after)

    def view(self, agent_id: str, claim: Claim | None = None) -> HistoryView:
        return queries.read_history_view(self.db, agent_id, claim)

    # Faults

    def restart(self) -> None:
        """Restart as after a kill -9 of the process that owns the file."""
        self.transaction(engine.mark_started)
        self.session = SqliteSession(self.db, self.now)

    def expire(self, agent_id: str) -> bool:
        """Expire the lease on this agent. False: it is not claimed."""

        def run_out(db: sqlite3.Connection, uow: UnitOfWork) -> bool:
            uow.invalidate()
            changed = db.execute(
                "UPDATE agents SET runnable_at = ? WHERE id = ? AND state IN ('llm', 'tools')", (self.now, agent_id)
            )
            return changed.rowcount == 1

        return self.run_unit(run_out)

    # Plumbing

    def transact(self, run: Callable[[sqlite3.Connection, UnitOfWork], T]) -> T:
        if not self.worker:
            return self.run_unit(run)
        claimer = EagerClaimer(self.worker)

        def run_and_claim(db: sqlite3.Connection, uow: UnitOfWork) -> tuple[T, EagerClaims]:
            result = run(db, uow)
            return result, claimer.claim_woken(db, uow)

        result, claimed = self.run_unit(run_and_claim)
        claimer.settle(claimed)
        return result

    def run_unit(self, run: Callable[[sqlite3.Connection, UnitOfWork], T]) -> T:
        def work(db: sqlite3.Connection) -> T:
            self.session.begin(self.now)
            uow = UnitOfWork(db, now=self.now, limits=self.limits, session=self.session)
            result = run(db, uow)
            uow.flush()
            return result

        result = self.transaction(work)
        for agent_id, row in self.session.cached_agents.items():
            stored = Mailbox(*self.db.execute(SELECT_MAILBOX, {"id": agent_id}).fetchone())
            assert row == stored, f"{agent_id} differs from its cached row"
        return result

    def transaction(self, run: Callable[[sqlite3.Connection], T]) -> T:
        self.db.execute("BEGIN IMMEDIATE")
        try:
            result = run(self.db)
            self.session.write_events()
        except BaseException:
            self.db.execute("ROLLBACK")
            self.session.roll_back()
            raise
        self.db.execute("COMMIT")
        return result

    def rows(self, sql: str, *parameters: object) -> Sequence[tuple[object, ...]]:
        return self.db.execute(sql, parameters).fetchall()

    def violations(self, prefix: str = "") -> list[str]:
        """Violations of the invariants whose names begin with `prefix`."""
        return [
            f"{name}: {sentence.format(*row)}"
            for name, (sentence, sql) in INVARIANTS.items()
            if name.startswith(prefix)
            for row in self.db.execute(sql)
        ]


@cache
def _empty_society() -> bytes:
    """Created once and copied for every seed."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    migrate_sqlite(db)
    db.execute("UPDATE meta SET value = ? WHERE key = 'secret'", (SECRET.decode(),))
    people = [Agent(id=PERSON, name="You", kind="person"), *(Agent(id=name, name=name) for name in AGENTS)]
    session = SqliteSession(db, to_ms(START))
    uow = UnitOfWork(db, now=to_ms(START), limits=LIMITS, session=session)
    commands.add_agents(db, uow, people)
    uow.flush()
    session.write_events()
    engine.mark_started(db)
    image = db.serialize()
    db.close()
    return image
