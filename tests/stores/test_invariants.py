"""Every invariant check can fail."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest

from coterie.agents import Agent
from coterie.clock import to_ms
from coterie.llm.service import ToolCall
from coterie.messages import make_envelope
from coterie.plan import PlannedCall
from coterie.store import Limits
from coterie.stores.sql import claims, commands, turn_transaction
from coterie.stores.sql.invariants import INVARIANTS
from coterie.stores.sql.migrations import migrate_sqlite
from coterie.stores.sql.rows import set_meta
from coterie.stores.sql.session import SqliteSession
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.testing.clock import START
from coterie.turn import CallEnded, ModelAnswered, Rules
from coterie.turn_store import Claim

RULES = Rules()
NOW = to_ms(START)

# A corruption that each invariant must report. Other invariants may report it too.
CORRUPTIONS = {
    "M1 one state": "UPDATE messages SET delivered_at = NULL WHERE state = 'pending'",
    "M1 times of the calendar": "UPDATE messages SET created_at = -138844032352328 WHERE in_seq = 1",
    "M3 dense mailboxes": "UPDATE agents SET next_in_seq = next_in_seq + 1 WHERE id = 'ada'",
    "M3 order of delivery": "UPDATE messages SET delivered_at = delivered_at + 9 WHERE in_seq = 1",
    "M5 never early": "UPDATE messages SET deliver_at = delivered_at + 1 WHERE in_seq = 1",
    "counters": "UPDATE agents SET waiting = waiting + 1 WHERE id = 'bob'",
    "A1 idle agents have no mail": "UPDATE agents SET waiting = 1 WHERE id = 'cyd'",
    "A1 resting agents are left alone": "UPDATE agents SET runnable_at = 1 WHERE id = 'cyd'",
    "A2 plans and states": "UPDATE agents SET state = 'wait_retry' WHERE id = 'ada'",
    "A2 one call at a time": "UPDATE calls SET state = 'planned' WHERE state = 'started'",
    "H1 rows fit their roles": "UPDATE history SET role = 'assistant' WHERE role = 'tool'",
    "H2 whole groups": "UPDATE history SET calls = '[]' WHERE calls IS NOT NULL",
    "H3 no result without its call": "UPDATE history SET call_id = 'call_9_9_9' WHERE role = 'tool'",
    "H4 call ids": "UPDATE calls SET call_id = 'same'",
    "H5 closed groups": "DELETE FROM history WHERE role = 'tool'",
    "H6 dense histories": "UPDATE history SET seq = seq + 100 WHERE role = 'assistant' AND calls IS NULL",
    "H7 taken is read": "DELETE FROM history WHERE role = 'user'",
    "H7 read is taken": "UPDATE messages SET state = 'pending', taken_at = NULL WHERE state = 'taken'",
    "H8 read in order": "UPDATE messages SET in_seq = in_seq + 50 WHERE in_seq = 1 AND recipient = 'ada'",
    "H8 taken in order": "UPDATE agents SET taken_seq = 99 WHERE id = 'bob'",
    "positions of the person's mail": "UPDATE agents SET last_from_person = 0",
    "H9 results": "UPDATE history SET content = 'another' WHERE role = 'tool' AND content = 'one'",
    "H9 ended calls": "UPDATE calls SET state = 'planned' WHERE state = 'cancelled'",
    "H10 summaries end between groups": (
        "INSERT INTO summaries (agent_id, upto, text, at)"
        " SELECT agent_id, seq, 'in short', 0 FROM history WHERE calls IS NOT NULL"
    ),
    "H12 attachments exist": "DELETE FROM artifacts",
    "H12 sizes": "UPDATE messages SET payload = printf('%1048577s', '') WHERE in_seq = 1",
    "H13 withdrawn plans": "UPDATE plans SET outcome = 'withdrawn' WHERE outcome = 'closed'",
    "questions and answers": "UPDATE messages SET state = 'withdrawn' WHERE option IS NOT NULL",
    "one answer": "UPDATE messages SET answered_by = NULL, answered_option = NULL WHERE question = 1",
    "S1 one next occurrence": "UPDATE schedules SET state = 'paused'",
    "S2 no occurrence without its schedule": "DELETE FROM schedules",
    "threads": "UPDATE messages SET thread = 'cyd' WHERE sender = 'bob'",
    "T1 every message has a task": "DELETE FROM tasks WHERE agent = 'ada'",
    "T2 what keeps a task open": "UPDATE tasks SET queued = queued + 1 WHERE agent = 'ada'",
    "T2 agents at work": "UPDATE agents SET state = 'wait_approval' WHERE id = 'ada'",
    "T2 state of a task": "UPDATE tasks SET state = 'done' WHERE state = 'working'",
    "T3 a stopped task has nothing left": "UPDATE tasks SET stopped_at = 1, state = 'stopped' WHERE active > 0",
    "T4 open turns": "UPDATE agents SET turn_began = NULL WHERE task IS NOT NULL",
    "T4 tasks of resting agents": "UPDATE agents SET task = (SELECT id FROM tasks LIMIT 1) WHERE id = 'cyd'",
    "T5 what a task has used": "UPDATE tasks SET output_tokens = output_tokens + 1 WHERE requests > 0",
    "T5 messages and calls of a task": "UPDATE tasks SET tool_calls = tool_calls - 1 WHERE tool_calls > 0",
    "T6 one budget question": "UPDATE tasks SET budget_question = 'gone' WHERE agent = 'ada'",
    "T7 messages that an answer withdraws": "UPDATE agents SET reminders = reminders + 1 WHERE id = 'bob'",
    "T7 no such message after its answer": (
        "UPDATE messages SET unless_answered = (SELECT id FROM messages AS asked WHERE asked.question = 1),"
        " state = 'delayed' WHERE id = (SELECT message_id FROM schedules)"
    ),
    "indexed messages exist": "INSERT INTO message_grams (rowid, grams) VALUES (77, 'abc')",
    "messages are indexed": "INSERT INTO meta (key, value) VALUES ('text_index_position', '99')",
    "replies point somewhere": "UPDATE messages SET in_reply_to = id WHERE in_seq = 1",
}


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    """A society with a withdrawn, a closed and an open plan, and waiting messages."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    migrate_sqlite(db)

    def uow() -> UnitOfWork:
        return UnitOfWork(db, now=NOW, limits=Limits(), session=SqliteSession(db, NOW))

    def send(to: str, text: str) -> None:
        office = uow()
        office.accept(make_envelope(sender="user", to=to, payload={"text": text}))
        office.flush()

    def claim(agent_id: str) -> Claim:
        office = uow()
        claimed = turn_transaction.TurnTransaction(db, office, agent_id, RULES).claim("w")
        office.flush()
        return claimed

    def advance(claimed: Claim, *events: ModelAnswered | CallEnded) -> Claim:
        for event in events:
            office = uow()
            claimed = claims.advance(db, office, claimed, event, RULES, None)
            office.flush()
        return claimed

    plan = ModelAnswered(text="", calls=(call(), call()))
    office = uow()
    people = [Agent(id=name, name=name) for name in ("ada", "bob", "cyd")]
    commands.add_agents(db, office, [Agent(id="user", name="You", kind="person"), *people])
    office.flush()
    for text in ("first", "second"):
        send("ada", text)
    claimed = claim("ada")
    send("ada", "withdraws a plan")
    claimed = advance(claimed, plan, plan)
    send("ada", "closes a plan")
    claimed = advance(claimed, CallEnded(index=0, ok=True, result="one"), ModelAnswered(text="done"))
    send("ada", "begins another")
    advance(claim("ada"), plan)
    send("bob", "waits")
    office = uow()
    asked = office.accept(make_envelope(sender="bob", to="user", payload={"text": "Well?"}, quick_replies=["Yes"]))
    office.accept(
        make_envelope(sender="user", to="bob", payload={"text": "Yes"}, in_reply_to=asked.message_id, option=0)
    )
    office.accept(make_envelope(sender="user", to="cyd", payload={"text": "again"}, every="daily 08:00 UTC"))
    office.flush()
    db.execute("INSERT INTO artifacts VALUES ('r', 'a.png', 'image', 'image/png', 1, '00', 0, NULL)")
    db.execute("INSERT INTO attachments VALUES ('r', 1)")
    yield db
    db.close()


def call() -> PlannedCall:
    return PlannedCall(call=ToolCall(id="c", name="look", arguments={}))


def broken(db: sqlite3.Connection) -> set[str]:
    return {name for name, (sentence, sql) in INVARIANTS.items() for row in db.execute(sql) if sentence.format(*row)}


def test_a_society_at_work_violates_nothing(db: sqlite3.Connection) -> None:
    assert broken(db) == set()
    shown = db.execute("SELECT outcome, count(*) FROM plans GROUP BY outcome ORDER BY outcome").fetchall()
    assert shown == [("closed", 1), ("open", 1), ("withdrawn", 1)]


@pytest.mark.parametrize("name", INVARIANTS)
def test_each_violation_is_reported_by_its_invariant(db: sqlite3.Connection, name: str) -> None:
    db.execute("PRAGMA foreign_keys = OFF")
    assert db.execute(CORRUPTIONS[name]).rowcount > 0
    assert name in broken(db)


def test_a_wrong_size_of_waiting_mail_is_reported(db: sqlite3.Connection) -> None:
    db.execute("UPDATE agents SET waiting_bytes = waiting_bytes + 1 WHERE id = 'bob'")
    assert broken(db) == {"counters"}


def test_an_open_group_at_the_end_of_a_history_is_reported(db: sqlite3.Connection) -> None:
    db.execute(
        "INSERT INTO history (agent_id, seq, turn_no, role, content, calls)"
        " SELECT 'ada', next_hist_seq, turn_no, 'assistant', '', '[{\"id\":\"x\"}]' FROM agents WHERE id = 'ada'"
    )
    assert {"H5 closed groups", "H6 dense histories"} <= broken(db)


def test_an_executed_call_that_was_dropped_is_reported(db: sqlite3.Connection) -> None:
    db.execute("UPDATE plans SET outcome = 'withdrawn' WHERE outcome = 'closed'")
    db.execute("DELETE FROM history WHERE role = 'tool' OR calls IS NOT NULL")
    assert {"H9 results", "H9 ended calls"} & broken(db)


def test_a_message_in_the_history_of_another_agent_is_reported(db: sqlite3.Connection) -> None:
    db.execute("UPDATE messages SET recipient = 'cyd', in_seq = 1 WHERE in_seq = 1 AND recipient = 'ada'")
    assert "H7 read is taken" in broken(db)


def test_a_history_whose_messages_were_pruned_is_no_violation(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM attachments")
    db.execute("DELETE FROM messages WHERE state = 'taken'")
    assert "H7 read is taken" in broken(db)
    set_meta(db, "pruned", "1")
    assert "H7 read is taken" not in broken(db)
