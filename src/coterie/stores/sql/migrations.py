"""Schema versions of both engines: creates the schema of an empty database and upgrades an older one.

The scripts are in the engine's folder `schema/`. `0017_schema.sql` creates the whole current schema, version 17.
`0017_upgrade_from_0016.sql` brings version 16 to version 17. A change of the schema edits and renumbers the first, and
adds an upgrade from the number before.

With PostgreSQL several processes use the database while one upgrades it. An upgrade that begins with the line
`-- compatible` leaves a database that programs of the version before use correctly: they go on, and may still start.
Any other upgrade ends them: every transaction reads `compatible_from` in `meta`, the oldest version that may write.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from coterie.errors import StoreUnusable
from coterie.failpoints import hit

if TYPE_CHECKING:  # installed only where PostgreSQL is used
    import psycopg

_UPGRADE = re.compile(r"(\d{4})_upgrade_from_(\d{4})\.sql")
_SCHEMA = re.compile(r"(\d{4})_schema\.sql")


class Script(NamedTuple):
    version: int
    """The schema version after the script."""
    sql: str

    @property
    def is_compatible(self) -> bool:
        """True if programs of the version before may go on with the new schema."""
        return self.sql.startswith("-- compatible\n")


class SchemaScripts(NamedTuple):
    current: Script
    upgrades: dict[int, Script]
    """By the version that each script upgrades."""

    @property
    def newest(self) -> int:
        return self.current.version

    def scripts_from(self, version: int) -> list[Script]:
        """Return the scripts that bring `version` to the newest one; 0 is an empty database.

        `StoreUnusable`: the version is newer than this program, or too old for an upgrade.
        """
        if version > self.newest:
            raise StoreUnusable(
                f"this society was last run by a newer Coterie (schema {version}, this one knows {self.newest}):"
                " install that version again, or restore a backup made before the change"
            )
        if version == 0:
            return [self.current]
        scripts: list[Script] = []
        while version < self.newest:
            if version not in self.upgrades:
                raise StoreUnusable(
                    f"schema {version} is older than any that this version of Coterie can upgrade"
                    f" ({', '.join(map(str, sorted(self.upgrades)))}): run coterie migrate with Coterie 0.1.0 first"
                )
            scripts.append(self.upgrades[version])
            version = scripts[-1].version
        return scripts


@cache
def schema_scripts(engine: Literal["sqlite", "postgres"]) -> SchemaScripts:
    """Read the schema scripts of an engine."""
    # Through the folder, not the engine's package: that would import its driver.
    folder, upgrades = files("coterie.stores") / engine / "schema", {}
    current = Script(0, "")
    for entry in folder.iterdir():
        if found := _UPGRADE.fullmatch(entry.name):
            upgrades[int(found[2])] = Script(int(found[1]), entry.read_text(encoding="utf-8"))
        elif found := _SCHEMA.fullmatch(entry.name):
            current = Script(int(found[1]), entry.read_text(encoding="utf-8"))
    return SchemaScripts(current, upgrades)


# SQLite: each script runs in one transaction together with its version number.

APPLICATION_ID = 0x436F7465  # "Cote": identifies our databases


def migrate_sqlite(db: sqlite3.Connection) -> int:
    """Bring `db` to the newest schema and return the version it had. A newer schema is refused unchanged."""
    version = sqlite_version(db)
    for script in schema_scripts("sqlite").scripts_from(version):
        _apply(db, script)
    return version


def sqlite_version(db: sqlite3.Connection) -> int:
    """Schema version, 0 for an empty file; `StoreUnusable` if it is foreign, too new or too old."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    application_id = db.execute("PRAGMA application_id").fetchone()[0]
    is_empty = not version and not db.execute("SELECT 1 FROM sqlite_schema").fetchone()
    if application_id != APPLICATION_ID and not is_empty:
        raise StoreUnusable("data/coterie.db is not a Coterie database: move it away, then start again")
    schema_scripts("sqlite").scripts_from(version)
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


# PostgreSQL: if several processes start at once, one migrates and the others wait.

ADVISORY_LOCK_KEY = 0x436F7465
"""Held per transaction: behind a pooler, sessions are not ours."""
_FOREIGN = "this database holds tables of another program: give the society a database of its own"


def migrate_postgres(raw: psycopg.Connection[Any]) -> int:
    """Bring the database to the newest schema and return the version it had. A newer schema is refused unchanged."""
    with raw.transaction():
        raw.execute("SELECT pg_advisory_xact_lock(%s)", (ADVISORY_LOCK_KEY,))
        version = before = postgres_version(raw)
        scripts = (
            schema_scripts("postgres").scripts_from(version) if version <= schema_scripts("postgres").newest else ()
        )
        if version and scripts:
            # Every transaction of another process reads this table first: those under way end before the upgrade, and
            # later ones see it.
            raw.execute("LOCK TABLE log IN ACCESS EXCLUSIVE MODE")
        for script in scripts:
            raw.execute(script.sql.encode())
            hit("migrate.statement")
            compatible_from = before if before and script.is_compatible else script.version
            for key, value in (("schema", script.version), ("compatible_from", compatible_from)):
                raw.execute(
                    "INSERT INTO meta (key, value) VALUES (%s, %s)"
                    " ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                    (key, str(value)),
                )
            before = script.version
        hit("migrate.before_commit")
    return version


def require_newest_postgres(raw: psycopg.Connection[Any]) -> None:
    """Raise `StoreUnusable` if the schema is older than this program, or newer and not compatible with it."""
    if postgres_version(raw) < schema_scripts("postgres").newest:
        raise StoreUnusable(
            "the database of this society is not up to date: run coterie migrate, or start it with coterie serve"
        )


def postgres_version(raw: psycopg.Connection[Any]) -> int:
    """Schema version, 0 for an empty database; `StoreUnusable` if it is foreign, too new or too old.

    A newer version than this program's is not too new if it is compatible.
    """
    # `messages` first: another process may create the whole schema between the two reads.
    has_messages = raw.execute("SELECT to_regclass('messages')").fetchone()[0]  # type: ignore[index]
    if not raw.execute("SELECT to_regclass('meta')").fetchone()[0]:  # type: ignore[index]
        if has_messages:
            raise StoreUnusable(_FOREIGN)
        return 0
    row = raw.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    if row is None:
        raise StoreUnusable(_FOREIGN)
    version, newest = int(row[0]), schema_scripts("postgres").newest
    compatible = raw.execute("SELECT value FROM meta WHERE key = 'compatible_from'").fetchone()
    if version <= newest or compatible is None or int(compatible[0]) > newest:
        schema_scripts("postgres").scripts_from(version)
    return version
