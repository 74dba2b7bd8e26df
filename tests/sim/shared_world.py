"""The same simulation on PostgreSQL, with its session and SQL dialect. The test still sets the time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import psycopg

from coterie.agents import Agent
from coterie.clock import to_ms
from coterie.messages import PERSON
from coterie.stores.postgres.cluster import NotifyChannels
from coterie.stores.postgres.connection import PgConnection, connect
from coterie.stores.postgres.session import PostgresSession
from coterie.stores.sql import commands
from coterie.stores.sql.migrations import migrate_postgres
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.testing.clock import START
from tests.engines import EMPTY

from .world import AGENTS, LIMITS, SECRET, World

T = TypeVar("T")
LEASE = timedelta(seconds=30) // timedelta(milliseconds=1)


class SharedWorld(World):
    """Leases expire as time passes, so an active worker can lose its agent."""

    errors: tuple[type[Exception], ...] = (psycopg.Error,)
    replayed_with = "--postgres "

    def __init__(self, url: str) -> None:
        raw = connect(url)
        migrate_postgres(raw)
        self.db: Any = PgConnection(raw)
        self.db.execute_now(EMPTY)
        self.db.execute("INSERT INTO meta (key, value) VALUES ('secret', ?)", (SECRET.decode(),))
        self.now = to_ms(START)
        people = [Agent(id=PERSON, name="You", kind="person"), *(Agent(id=name, name=name) for name in AGENTS)]
        self.transact(lambda db, uow: commands.add_agents(db, uow, people))

    def restart(self) -> None:
        """All processes end: their leases expire."""
        for agent_id in AGENTS:
            self.expire(agent_id)

    def run_unit(self, run: Callable[[Any, UnitOfWork], T]) -> T:
        session = PostgresSession(self.db, (), LEASE, NotifyChannels("simulated", "one"), lambda: self.now)
        self.db.pipelining = True
        try:
            uow = UnitOfWork(self.db, now=session.now, limits=LIMITS, session=session)
            result = run(self.db, uow)
            uow.flush()
            session.close()
            self.db.execute_now("COMMIT")
        except BaseException:
            self.db.discard_queued()
            self.db.execute_now("ROLLBACK")
            raise
        finally:
            self.db.pipelining = False
        return result
