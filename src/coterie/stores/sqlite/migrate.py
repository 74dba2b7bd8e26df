"""Creates and upgrades the schema. Each script runs in one transaction together with its version number."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from coterie.errors import StoreUnusable
from coterie.failpoints import hit
from coterie.stores.sql.schema import Script, read_schema

APPLICATION_ID = 0x436F7465  # "Cote": identifies our databases


SCHEMA = read_schema("coterie.stores.sqlite")


def migrate(db: sqlite3.Connection) -> int:
    """Bring `db` to the newest schema and return the version it had. A newer schema is refused unchanged."""
    version = check_version(db)
    for script in SCHEMA.scripts_from(version):
        _apply(db, script)
    return version


def check_version(db: sqlite3.Connection) -> int:
    """Schema version, 0 for an empty file; `StoreUnusable` if it is foreign, too new or too old."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    application_id = db.execute("PRAGMA application_id").fetchone()[0]
    is_empty = not version and not db.execute("SELECT 1 FROM sqlite_schema").fetchone()
    if application_id != APPLICATION_ID and not is_empty:
        raise StoreUnusable("data/coterie.db is not a Coterie database: move it away, then start again")
    SCHEMA.scripts_from(version)
    return version


def _apply(db: sqlite3.Connection, script: Script) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        for statement in _statements(script.sql):
            db.execute(statement)
            hit("migrate.statement")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {script.version}")
        hit("migrate.before_commit")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
