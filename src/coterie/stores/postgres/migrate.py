"""Numbered migrations. However many processes start at once, one of them migrates and the others wait for it."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import psycopg

from coterie.errors import StoreUnusable
from coterie.failpoints import hit

LOCK = 0x436F7465
"""Of the transaction and not of the session: those behind a pooler are not ours."""


def migrations() -> list[tuple[int, str]]:
    folder = files(__package__) / "migrations"
    scripts = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [(int(name[:4]), (folder / name).read_text(encoding="utf-8")) for name in scripts]


def migrate(raw: psycopg.Connection[Any]) -> int:
    """Bring the database to the newest schema; the number it had. One newer than this code is refused untouched."""
    with raw.transaction():
        raw.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK,))
        version = version_of(raw)
        for number, script in migrations():
            if number > version:
                raw.execute(script.encode())
                hit("migrate.statement")
                _note(raw, number)
        hit("migrate.before_commit")
    return version


def check_version(raw: psycopg.Connection[Any]) -> None:
    """`StoreUnusable` if it cannot be looked at as it is."""
    if version_of(raw) != migrations()[-1][0]:
        raise StoreUnusable(
            "the database of this society is not up to date: run coterie migrate, or start it with coterie serve"
        )


def version_of(raw: psycopg.Connection[Any]) -> int:
    """The schema's number, 0 before there is any; `StoreUnusable` if it is not ours to open."""
    if not raw.execute("SELECT to_regclass('meta')").fetchone()[0]:  # type: ignore[index]
        if raw.execute("SELECT to_regclass('messages')").fetchone()[0]:  # type: ignore[index]
            raise StoreUnusable("this database holds something else than Coterie: give the society one of its own")
        return 0
    row = raw.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    if row is None:
        raise StoreUnusable("this database holds something else than Coterie: give the society one of its own")
    version, newest = int(row[0]), migrations()[-1][0]
    if version > newest:
        raise StoreUnusable(
            f"this society was last run by a newer Coterie (schema {version}, this one knows {newest}):"
            " install that version again, or restore a backup made before the change"
        )
    return version


def _note(raw: psycopg.Connection[Any], number: int) -> None:
    raw.execute(
        "INSERT INTO meta (key, value) VALUES ('schema', %s) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (str(number),),
    )
