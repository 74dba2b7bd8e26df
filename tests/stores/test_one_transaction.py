"""Several operations in one transaction of the SQLite engine see each other's changes."""

from __future__ import annotations

import sqlite3

from coterie.agents import Agent
from coterie.messages import make_envelope
from coterie.store import Limits
from coterie.stores.sql import claims, commands
from coterie.stores.sql.migrations import migrate_sqlite
from coterie.stores.sql.session import SqliteSession
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import ModelAnswered, Rules


def test_an_agent_takes_messages_that_arrive_in_the_transaction_that_ends_its_turn() -> None:
    db = sqlite3.connect(":memory:", isolation_level=None)
    migrate_sqlite(db)

    def uow() -> UnitOfWork:
        return UnitOfWork(db, now=1_000, limits=Limits(), session=SqliteSession(db, 1_000))

    office = uow()
    commands.add_agents(db, office, [Agent(id="user", name="You", kind="person"), Agent(id="ada", name="Ada")])
    office.accept(make_envelope(sender="user", to="ada", payload={"text": "first"}))
    office.flush()
    office = uow()
    (claim,) = claims.claim_agents(db, office, "w", Rules(), 1)
    office.flush()
    office = uow()
    office.accept(make_envelope(sender="user", to="ada", payload={"text": "second"}))
    claims.advance(db, office, claim, ModelAnswered(text="done"), Rules(), None)
    office.flush()
    assert db.execute("SELECT state, waiting, turn_no FROM agents WHERE id = 'ada'").fetchone() == ("llm", 0, 2)
    assert [row[0] for row in db.execute("SELECT role FROM history ORDER BY seq")] == ["user", "assistant", "user"]
    db.close()
