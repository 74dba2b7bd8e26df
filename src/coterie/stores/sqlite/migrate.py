"""Numbered schema migrations. Each runs in one transaction together with its version number."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from importlib.resources import files

from coterie.errors import StoreUnusable
from coterie.failpoints import hit

APPLICATION_ID = 0x436F7465  # "Cote": identifies our databases


def migrations() -> list[tuple[int, str]]:
    """Version and SQL script of each migration, ascending."""
    folder = files(__package__) / "migrations"
    scripts = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [(int(name[:4]), (folder / name).read_text(encoding="utf-8")) for name in scripts]


def migrate(db: sqlite3.Connection) -> int:
    """Bring `db` to the newest schema and return the version it had. A newer schema is refused unchanged."""
    version = check_version(db)
    for number, script in migrations():
        if number > version:
            _apply(db, number, script)
    return version


def check_version(db: sqlite3.Connection) -> int:
    """Schema version, 0 for an empty file; `StoreUnusable` if it is foreign or too new."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    application_id = db.execute("PRAGMA application_id").fetchone()[0]
    is_empty = not version and not db.execute("SELECT 1 FROM sqlite_schema").fetchone()
    if application_id != APPLICATION_ID and not is_empty:
        raise StoreUnusable("data/coterie.db is not a Coterie database: move it away, then start again")
    newest = migrations()[-1][0]
    if version > newest:
        raise StoreUnusable(
            f"this society was last run by a newer Coterie (schema {version}, this one knows {newest}):"
            " install that version again, or restore a backup made before the change"
        )
    return version


def _apply(db: sqlite3.Connection, number: int, script: str) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        for statement in _statements(script):
            db.execute(statement)
            hit("migrate.statement")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {number}")
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
