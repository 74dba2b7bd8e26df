"""Creates and upgrades the schema. If several processes start at once, one migrates and the others wait."""

from __future__ import annotations

from typing import Any

import psycopg

from coterie.errors import StoreUnusable
from coterie.failpoints import hit
from coterie.stores.sql.schema import read_schema

ADVISORY_LOCK_KEY = 0x436F7465
"""Held per transaction: behind a pooler, sessions are not ours."""
_FOREIGN = "this database holds tables of another program: give the society a database of its own"
SCHEMA = read_schema("coterie.stores.postgres")


def migrate(raw: psycopg.Connection[Any]) -> int:
    """Bring the database to the newest schema and return the version it had. A newer schema is refused unchanged."""
    with raw.transaction():
        raw.execute("SELECT pg_advisory_xact_lock(%s)", (ADVISORY_LOCK_KEY,))
        version = read_version(raw)
        for script in SCHEMA.scripts_from(version):
            raw.execute(script.sql.encode())
            hit("migrate.statement")
            raw.execute(
                "INSERT INTO meta (key, value) VALUES ('schema', %s)"
                " ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                (str(script.version),),
            )
        hit("migrate.before_commit")
    return version


def check_version(raw: psycopg.Connection[Any]) -> None:
    """Raise `StoreUnusable` unless the schema is the newest."""
    if read_version(raw) != SCHEMA.newest:
        raise StoreUnusable(
            "the database of this society is not up to date: run coterie migrate, or start it with coterie serve"
        )


def read_version(raw: psycopg.Connection[Any]) -> int:
    """Schema version, 0 for an empty database; `StoreUnusable` if it is foreign, too new or too old."""
    if not raw.execute("SELECT to_regclass('meta')").fetchone()[0]:  # type: ignore[index]
        if raw.execute("SELECT to_regclass('messages')").fetchone()[0]:  # type: ignore[index]
            raise StoreUnusable(_FOREIGN)
        return 0
    row = raw.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    if row is None:
        raise StoreUnusable(_FOREIGN)
    version = int(row[0])
    SCHEMA.scripts_from(version)
    return version
