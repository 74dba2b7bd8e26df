"""Who owns the file, and how the last owner left it."""

from __future__ import annotations

import sqlite3

from coterie.stores.sql.connection import get_meta, set_meta


def begin_boot(db: sqlite3.Connection) -> None:
    # Whoever worked on a turn is gone with the last boot: those agents can be claimed at once.
    db.execute("UPDATE agents SET runnable_at = 0 WHERE state IN ('llm', 'tools')")
    # Counted by the database: nothing depends on the number, so nothing may fail over it.
    db.execute(
        "INSERT INTO meta (key, value) VALUES ('boot_epoch', '1')"
        " ON CONFLICT (key) DO UPDATE SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT)"
    )
    set_meta(db, "clean", "0")


def end_boot(db: sqlite3.Connection) -> None:
    set_meta(db, "clean", "1")


def was_unclean(db: sqlite3.Connection) -> bool:
    if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'meta'").fetchone():
        return False
    return get_meta(db, "clean") == "0"
