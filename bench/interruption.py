"""Cost of the interruption check alone: look for waiting mail and decide. No write, no flush.

The check runs before each tool call, inside the transaction that stores the last result, so this is its whole cost.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.report import Report, best, percentile
from bench.rows import PAYLOAD_JSON, open_plain
from coterie.store import Limits
from coterie.stores.sql import turn_rows
from coterie.stores.sql.session import SqliteSession
from coterie.stores.sql.turn_transaction import TurnTransaction
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import CallEnded, Rules, RunCall, reduce
from coterie.turn_store import Claim

FEW, MANY = 1_000, 100_000
WAITING = (0, 1, 5_000)
CHECKS = 20_000
AGENT = "agent-0"
LIMITS = Limits()
NUMBERS = 1_000
GOAL_MS = 0.1
NOISE = 1.5

_PAST = """
WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < ?1)
INSERT INTO messages (seq, id, sender, recipient, state, in_seq, created_at, delivered_at, taken_at, payload)
SELECT n, printf('%044x', n), 'user', ?2, 'taken', n, 0, 0, 0, ?3 FROM number
"""
_HISTORY = """
INSERT INTO history (agent_id, seq, turn_no, role, message_id)
SELECT recipient, in_seq, in_seq, 'user', id FROM messages WHERE recipient = ?
"""
_AT_WORK = """
UPDATE agents SET state = 'tools', turn_no = ?1, step_no = 2, taken_seq = ?1, next_in_seq = ?1 + 1,
                  next_hist_seq = ?1 + 1 WHERE id = ?2
"""
_PLAN = "INSERT INTO plans (agent_id, turn_no, step_no, text, outcome, at) VALUES (?2, ?1, 1, '', 'open', 0)"
_CALLS = """
INSERT INTO calls (agent_id, turn_no, step_no, idx, call_id, name, arguments, effect, gated, state)
SELECT ?2, ?1, 1, key, 'call_' || key, 'look', '{"x":1}', 'unsafe', 0, value
FROM json_each('["started","planned","planned"]')
"""
_INTERJECTIONS = """
WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < ?4)
INSERT INTO messages (id, sender, recipient, state, in_seq, created_at, delivered_at, cause, payload)
SELECT 'new' || n, 'agent-1', ?2, 'pending', ?1 + n, 0, 0, printf('%044x', ?1), ?3 FROM number
"""


def run() -> None:
    report = Report("interruption")
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[], float]] = {}
        for count in (FEW, MANY):
            for waiting in WAITING:
                db = society(Path(folder, f"{count}-{waiting}", "coterie.db"), count, waiting)
                ways[f"with {waiting:,} waiting, {count:,} messages read before"] = partial(p99_ms, db)
        figures = best(ways | {"counting": counting_p99_ms}, pick=min)
    # Almost no work: the part of the p99 that the machine causes.
    report.line(f"p99 of counting to {NUMBERS}", figures.pop("counting"), "ms")
    for name, value in figures.items():
        report.line(f"p99 of a check {name}", value, "ms", at_most=GOAL_MS)
    few, many = [*figures.values()][: len(WAITING)], [*figures.values()][len(WAITING) :]
    for waiting, first, later in zip(WAITING, few, many, strict=True):
        report.ratio(f"with {waiting:,} waiting, {MANY:,} rows over {FEW:,}", later, first, at_most=NOISE)
    report.ratio(f"{WAITING[2]:,} waiting over {WAITING[1]:,}", many[2], many[1], at_most=NOISE)


def society(path: Path, count: int, waiting: int) -> sqlite3.Connection:
    """A database with an agent in the middle of a plan, `count` older messages and `waiting` new ones."""
    db = open_plain(path, 2)
    db.execute("BEGIN")
    db.execute(_PAST, (count, AGENT, PAYLOAD_JSON))
    db.execute(_HISTORY, (AGENT,))
    for statement in (_AT_WORK, _PLAN, _CALLS):
        db.execute(statement, (count, AGENT))
    if waiting:
        db.execute(_INTERJECTIONS, (count, AGENT, PAYLOAD_JSON, waiting))
        db.execute(
            "UPDATE agents SET next_in_seq = next_in_seq + ?1, waiting = ?1 WHERE id = ?2",
            (waiting, AGENT),
        )
    db.execute("COMMIT")
    return db


def p99_ms(db: sqlite3.Connection) -> float:
    rules, ran, claim, session = Rules(), CallEnded(index=0, ok=True, result="seen"), _claim(db), SqliteSession(db, 0)
    took = []
    db.execute("BEGIN IMMEDIATE")  # as in the store, where a transaction is open
    for _ in range(CHECKS):
        start = time.perf_counter()
        session.begin(0)
        transaction = TurnTransaction(db, UnitOfWork(db, now=0, limits=LIMITS, session=session), AGENT, rules)
        transaction.resume(claim)
        reduce(transaction._build_turn(ran), ran)
        took.append(time.perf_counter() - start)
    db.execute("ROLLBACK")
    return percentile(took, 0.99) * 1e3


def counting_p99_ms() -> float:
    took = []
    for _ in range(CHECKS):
        start = time.perf_counter()
        for _ in range(NUMBERS):
            pass
        took.append(time.perf_counter() - start)
    return percentile(took, 0.99) * 1e3


def _claim(db: sqlite3.Connection) -> Claim:
    """The claim of a worker that runs the first call of the plan."""
    found = turn_rows.read_open_plan(db, AGENT)
    assert found is not None
    key, plan = found
    epoch, step_no, turn_no = db.execute("SELECT epoch, step_no, turn_no FROM agents WHERE id = ?", (AGENT,)).fetchone()
    return Claim(
        agent_id=AGENT, epoch=epoch, step_no=step_no, turn_no=turn_no, action=RunCall(0), plan=plan, plan_key=key
    )
