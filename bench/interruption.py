"""The check for interjections alone: seeing whether mail waits, and deciding what follows. No write, no flush.

It happens before every tool call, in the transaction that the call's result needs anyway; so this is all it adds.
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
from coterie.stores.sql.session import OneWriter
from coterie.stores.sql.turn_transaction import TurnTransaction
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import Ran, Rules, Run, reduce
from coterie.turn_store import Claim

FEW, MANY = 1_000, 100_000
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
_INTERJECTION = """
INSERT INTO messages (id, sender, recipient, state, in_seq, created_at, delivered_at, cause, payload)
SELECT 'new', 'agent-1', ?2, 'pending', ?1 + 1, 0, 0, printf('%044x', ?1), ?3
"""


def run() -> None:
    report = Report("interruption")
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[], float]] = {}
        for count in (FEW, MANY):
            for mail in (False, True):
                db = society(Path(folder, f"{count}-{mail}", "coterie.db"), count, mail=mail)
                ways[f"{'with' if mail else 'without'} mail, {count:,} messages read before"] = partial(p99_ms, db)
        figures = best(ways | {"counting": counting_p99_ms}, pick=min)
    # Hardly anything: how much of a p99 is this machine's.
    report.line(f"p99 of counting to {NUMBERS}", figures.pop("counting"), "ms")
    for name, value in figures.items():
        report.line(f"p99 of a check {name}", value, "ms", at_most=GOAL_MS)
    few, few_with_mail, many, many_with_mail = figures.values()
    report.ratio(f"without mail, {MANY:,} rows over {FEW:,}", many, few, at_most=NOISE)
    report.ratio(f"with mail, {MANY:,} rows over {FEW:,}", many_with_mail, few_with_mail, at_most=NOISE)


def society(path: Path, count: int, *, mail: bool) -> sqlite3.Connection:
    """An agent in the middle of a plan, with `count` messages behind it."""
    db = open_plain(path, 2)
    db.execute("BEGIN")
    db.execute(_PAST, (count, AGENT, PAYLOAD_JSON))
    db.execute(_HISTORY, (AGENT,))
    for statement in (_AT_WORK, _PLAN, _CALLS):
        db.execute(statement, (count, AGENT))
    if mail:
        db.execute(_INTERJECTION, (count, AGENT, PAYLOAD_JSON))
        db.execute("UPDATE agents SET next_in_seq = next_in_seq + 1, waiting = 1 WHERE id = ?", (AGENT,))
    db.execute("COMMIT")
    return db


def p99_ms(db: sqlite3.Connection) -> float:
    rules, ran, claim, ledger = Rules(), Ran(index=0, ok=True, result="seen"), _claim(db), OneWriter(db, 0)
    took = []
    db.execute("BEGIN IMMEDIATE")  # as in the store, where the writer has begun already
    for _ in range(CHECKS):
        start = time.perf_counter()
        ledger.begin(0)
        desk = TurnTransaction(db, UnitOfWork(db, now=0, limits=LIMITS, ledger=ledger), AGENT, rules)
        desk.go_on(claim)
        reduce(desk._turn(), ran)
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
    """As whoever runs the first call of the plan holds it."""
    found = turn_rows.read_open(db, AGENT)
    assert found is not None
    key, plan = found
    epoch, step_no, turn_no = db.execute("SELECT epoch, step_no, turn_no FROM agents WHERE id = ?", (AGENT,)).fetchone()
    return Claim(agent_id=AGENT, epoch=epoch, step_no=step_no, turn_no=turn_no, effect=Run(0), plan=plan, plan_key=key)
