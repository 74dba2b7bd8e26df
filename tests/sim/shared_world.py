"""The same simulation on PostgreSQL: its ledger and dialect under the same transitions; time is still the test's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import psycopg

from coterie.agents import Agent
from coterie.clock import to_ms
from coterie.messages import PERSON
from coterie.stores.postgres.cluster import Herald
from coterie.stores.postgres.connection import PgConnection, connect
from coterie.stores.postgres.migrate import migrate
from coterie.stores.postgres.session import BatchLedger
from coterie.stores.sql import commands
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.testing.clock import START
from tests.engines import EMPTY

from .world import AGENTS, LIMITS, SECRET, World

T = TypeVar("T")
LEASE = timedelta(seconds=30) // timedelta(milliseconds=1)


class SharedWorld(World):
    """Leases run out by themselves when time passes: whoever holds one may be taken over without having been silent."""

    errors: tuple[type[Exception], ...] = (psycopg.Error,)
    replayed_with = "--postgres "

    def __init__(self, url: str) -> None:
        raw = connect(url)
        migrate(raw)
        self.db: Any = PgConnection(raw)
        self.db.say(EMPTY)
        self.db.execute("INSERT INTO meta (key, value) VALUES ('secret', ?)", (SECRET.decode(),))
        self.now = to_ms(START)
        people = [Agent(id=PERSON, name="You", kind="person"), *(Agent(id=name, name=name) for name in AGENTS)]
        self.post(lambda db, post: commands.add_agents(db, post, people))

    def restart(self) -> None:
        """All processes are gone: their leases run out."""
        for agent_id in AGENTS:
            self.expire(agent_id)

    def in_one(self, run: Callable[[Any, UnitOfWork], T]) -> T:
        ledger = BatchLedger(self.db, (), LEASE, Herald("simulated", "one"), lambda: self.now)
        self.db.gathers = True
        try:
            post = UnitOfWork(self.db, now=ledger.now, limits=LIMITS, ledger=ledger)
            result = run(self.db, post)
            post.close()
            ledger.close()
            self.db.say("COMMIT")
        except BaseException:
            self.db.forget()
            self.db.say("ROLLBACK")
            raise
        finally:
            self.db.gathers = False
        return result
