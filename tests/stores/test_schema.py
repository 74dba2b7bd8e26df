"""A new database and an upgraded one have the same schema, on both engines."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg

from coterie.stores.sql.migrations import APPLICATION_ID, migrate_postgres, migrate_sqlite

OLD_SCHEMAS = Path(__file__).parent / "old_schemas"


def sqlite_schema(db: sqlite3.Connection) -> dict[str, Any]:
    named = "SELECT name, type, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'"
    return {
        name: (
            db.execute(f"PRAGMA table_xinfo({name})").fetchall(),
            db.execute(f"PRAGMA table_list({name})").fetchall(),
        )
        if kind == "table"
        else " ".join(sql.split())
        for name, kind, sql in db.execute(named).fetchall()
    }


def test_an_upgraded_sqlite_database_has_the_schema_of_a_new_one() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as new:
        assert migrate_sqlite(new) == 0
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as old:
            old.executescript((OLD_SCHEMAS / "sqlite_0005.sql").read_text())
            old.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            old.execute("PRAGMA user_version = 5")
            assert migrate_sqlite(old) == 5
            assert sqlite_schema(old) == sqlite_schema(new)


def postgres_schema(db: psycopg.Connection[Any]) -> list[Any]:
    queries = (
        "SELECT table_name, column_name, ordinal_position, data_type, collation_name, is_nullable, column_default,"
        " is_identity FROM information_schema.columns WHERE table_schema = current_schema() ORDER BY 1, 3",
        "SELECT indexname, replace(indexdef, current_schema() || '.', '') FROM pg_indexes"
        " WHERE schemaname = current_schema() ORDER BY 1",
        "SELECT conname, replace(pg_get_constraintdef(oid), current_schema() || '.', '') FROM pg_constraint"
        " WHERE connamespace = current_schema()::regnamespace ORDER BY 1",
        "SELECT relname, relpersistence FROM pg_class"
        " WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r' ORDER BY 1",
    )
    return [db.execute(query.encode()).fetchall() for query in queries]


def test_an_upgraded_postgres_database_has_the_schema_of_a_new_one(postgres: str) -> None:
    found = []
    for version, script in ((0, None), (4, OLD_SCHEMAS / "postgres_0004.sql")):
        with psycopg.connect(postgres) as db:
            db.execute("CREATE SCHEMA upgrade; SET LOCAL search_path = upgrade")
            if script:
                db.execute(script.read_bytes())
                db.execute("INSERT INTO meta (key, value) VALUES ('schema', '4')")
            assert migrate_postgres(db) == version
            found.append(postgres_schema(db))
            db.rollback()
    assert found[0] == found[1]
    assert len(found[0][0]) > 100
