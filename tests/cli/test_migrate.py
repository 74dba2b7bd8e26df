from __future__ import annotations

import json
import socket
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from coterie.ids import new_id
from coterie.stores.postgres.connection import connect
from coterie.stores.sql.migrations import APPLICATION_ID, schema_scripts
from coterie.stores.sqlite.connection import FolderLock

from .commands import coterie
from .conftest import schedule

OLD_SCHEMAS = Path(__file__).parents[1] / "stores" / "old_schemas"
NEWEST_FILE = schema_scripts("sqlite").newest
NEWEST_SHARED = schema_scripts("postgres").newest


@pytest.fixture
def database(postgres: str) -> Iterator[str]:
    """URL of an empty PostgreSQL schema."""
    schema = f"m{new_id()}"
    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute(f'CREATE SCHEMA "{schema}"'.encode())
        yield f"{postgres}{'&' if '?' in postgres else '?'}options={quote(f'-c search_path={schema}')}"
        db.execute(f'DROP SCHEMA "{schema}" CASCADE'.encode())


@pytest.fixture
def shared(folder: Path, database: str) -> Path:
    """A society configured for PostgreSQL."""
    (folder / "coterie.toml").write_text(f"[store]\nurl = {json.dumps(database)}\n")
    return folder


def make_old_database(folder: Path, version: int = 5) -> None:
    """Create the database of an earlier version of Coterie."""
    (folder / "data").mkdir(exist_ok=True)
    with closing(sqlite3.connect(folder / "data" / "coterie.db", isolation_level=None)) as db:
        db.executescript((OLD_SCHEMAS / "sqlite_0005.sql").read_text())
        db.execute(f"PRAGMA user_version = {version}")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")


def test_migrate_upgrades_an_older_database_once(
    folder: Path,
) -> None:
    make_old_database(folder)

    done = coterie("migrate", "--dir", folder)
    again = coterie("migrate", "--dir", folder, "--json")

    assert (done.code, again.code) == (0, 0)
    assert f"from schema 5 to {NEWEST_FILE}" in done.stdout
    assert again.json == {"engine": "sqlite", "from": NEWEST_FILE, "to": NEWEST_FILE, "migrated": False}
    assert coterie("verify", "--dir", folder).code == 0


def test_migrate_check_changes_nothing_and_exits_with_1_if_a_migration_is_due(folder: Path) -> None:
    make_old_database(folder)

    found = coterie("migrate", "--check", "--dir", folder, "--json")
    text = coterie("migrate", "--check", "--dir", folder)

    assert (found.code, text.code) == (1, 1)
    assert found.json == {"engine": "sqlite", "from": 5, "to": NEWEST_FILE, "migrated": False}
    assert f"run coterie migrate --dir {folder}" in text.stdout
    coterie("migrate", "--dir", folder)
    assert coterie("migrate", "--check", "--dir", folder).code == 0


def test_migrate_creates_the_tables_of_a_new_society(folder: Path) -> None:
    assert coterie("migrate", "--check", "--dir", folder).code == 1
    assert coterie("migrate", "--dir", folder, "--json").json["from"] == 0
    assert (folder / "data" / "coterie.db").stat().st_mode & 0o777 == 0o600
    schedule(folder, 1)


def test_migrate_is_refused_while_a_process_owns_an_older_database(folder: Path) -> None:
    make_old_database(folder)
    lock = FolderLock(folder / "data")
    try:
        assert "is in use by process" in coterie("migrate", "--dir", folder).failure
    finally:
        lock.release()
    coterie("migrate", "--dir", folder)
    lock = FolderLock(folder / "data")
    try:
        assert coterie("migrate", "--dir", folder).code == 0
    finally:
        lock.release()


def test_migrate_refuses_a_database_of_a_newer_version_and_leaves_it_unchanged(folder: Path) -> None:
    coterie("migrate", "--dir", folder)
    path = folder / "data" / "coterie.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 999")
    before = path.read_bytes()

    for options in ([], ["--check"]):
        assert "last run by a newer Coterie (schema 999" in coterie("migrate", "--dir", folder, *options).failure
    assert path.read_bytes() == before


def test_migrate_refuses_a_database_that_is_too_old_and_leaves_it_unchanged(folder: Path) -> None:
    make_old_database(folder, version=3)
    path = folder / "data" / "coterie.db"
    before = path.read_bytes()

    for options in ([], ["--check"]):
        assert "schema 3 is older than any" in coterie("migrate", "--dir", folder, *options).failure
    assert path.read_bytes() == before


def test_migrate_upgrades_a_postgresql_database(shared: Path, database: str) -> None:
    with connect(database) as db:
        db.execute((OLD_SCHEMAS / "postgres_0004.sql").read_bytes())
        db.execute("INSERT INTO meta (key, value) VALUES ('schema', '4')")

    assert coterie("migrate", "--check", "--dir", shared).code == 1
    assert "run coterie migrate" in coterie("verify", "--dir", shared).failure
    assert f"from schema 4 to {NEWEST_SHARED}" in coterie("migrate", "--dir", shared).stdout
    assert coterie("migrate", "--check", "--dir", shared, "--json").json == {
        "engine": "postgresql",
        "from": NEWEST_SHARED,
        "to": NEWEST_SHARED,
        "migrated": False,
    }
    assert coterie("verify", "--dir", shared).code == 0


def test_of_concurrent_migrations_one_migrates_and_all_succeed(shared: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: _migrated(shared), range(8)))

    assert sorted(before for before, _ in found) == [0] + [NEWEST_SHARED] * 7
    assert {newest for _, newest in found} == {NEWEST_SHARED}


def _migrated(folder: Path) -> tuple[int, int]:
    from coterie.admin.migrate import migrate_society
    from coterie.config import SocietyFolder

    found = migrate_society(SocietyFolder(folder))
    return found.version, found.newest


def test_commands_refuse_a_postgresql_database_of_a_newer_version(shared: Path, database: str) -> None:
    coterie("migrate", "--dir", shared)
    with connect(database) as db:
        db.execute("UPDATE meta SET value = '999' WHERE key IN ('schema', 'compatible_from')")

    for command in (["migrate"], ["migrate", "--check"], ["verify"]):
        assert "last run by a newer Coterie (schema 999" in coterie(*command, "--dir", shared).failure


def test_an_unreachable_database_is_a_one_line_error_without_the_password(folder: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # no other program can listen there
        url = f"postgresql://me:hidden@127.0.0.1:{bound.getsockname()[1]}/x"
        (folder / "coterie.toml").write_text(f'[store]\nurl = "{url}"\n')

        failure = coterie("migrate", "--dir", folder).failure

    assert "cannot be used (Connection refused): no server listens there" in failure
    assert "hidden" not in failure
