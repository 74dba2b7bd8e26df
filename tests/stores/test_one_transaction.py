"""Several things that happen in one transaction of the SQLite engine know of each other."""

from __future__ import annotations

import sqlite3

from coterie.agents import Agent
from coterie.messages import seal
from coterie.store import Limits
from coterie.stores.sql import claims, commands
from coterie.stores.sql.session import OneWriter
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.stores.sqlite.migrate import migrate
from coterie.turn import Answered, Rules


def test_an_agent_takes_up_mail_that_came_in_the_transaction_that_ends_its_turn() -> None:
    db = sqlite3.connect(":memory:", isolation_level=None)
    migrate(db)

    def post() -> UnitOfWork:
        return UnitOfWork(db, now=1_000, limits=Limits(), ledger=OneWriter(db, 1_000))

    office = post()
    commands.add_agents(db, office, [Agent(id="user", name="You", kind="person"), Agent(id="ada", name="Ada")])
    office.accept(seal(sender="user", to="ada", payload={"text": "first"}))
    office.close()
    office = post()
    (claim,) = claims.claim(db, office, "w", Rules(), 1)
    office.close()
    office = post()
    office.accept(seal(sender="user", to="ada", payload={"text": "second"}))
    claims.advance(db, office, claim, Answered(text="done"), Rules(), None)
    office.close()
    assert db.execute("SELECT state, waiting, turn_no FROM agents WHERE id = 'ada'").fetchone() == ("llm", 0, 2)
    assert [row[0] for row in db.execute("SELECT role FROM history ORDER BY seq")] == ["user", "assistant", "user"]
    db.close()
