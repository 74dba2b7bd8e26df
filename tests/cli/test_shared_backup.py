"""Backups of a society in PostgreSQL, restored into either engine."""

from __future__ import annotations

import asyncio
import tarfile
from pathlib import Path
from typing import Any

import pytest

from coterie.config import read_config
from coterie.store_url import replace_store_url, without_password
from coterie.stores.postgres.connection import owner_connection
from coterie.stores.postgres.transfer import PostgresSource
from tests.busy_society import CHART, busy_society
from tests.engines import Postgres
from tests.test_copy import contents, copied

from .commands import coterie


@pytest.fixture
def url(shared: Postgres, tmp_path: Path) -> str:
    return shared.url(tmp_path / "first")


@pytest.fixture
def busy(url: str, tmp_path: Path) -> Path:
    """A society in PostgreSQL with running turns and waiting mail."""

    async def make() -> None:
        async with busy_society(tmp_path / "home", url):
            pass

    asyncio.run(make())
    return tmp_path / "home"


def test_a_backup_from_postgresql_is_restored_into_sqlite(busy: Path, url: str, tmp_path: Path) -> None:
    made = coterie("backup", "--dir", busy, "--to", tmp_path / "a.tar", "--json")
    assert (made.json["artifacts"], made.json["lost"]) == (2, [])

    done = coterie("restore", tmp_path / "a.tar", "--dir", tmp_path / "new", "--store", "sqlite")

    assert done.code == 0
    assert read_config(tmp_path / "new").store.url == "sqlite"
    assert coterie("verify", "--dir", tmp_path / "new", "--deep").code == 0
    asyncio.run(copied(url, tmp_path / "copy"))
    copy, restored = contents(tmp_path / "copy"), contents(tmp_path / "new")
    for what in (copy, restored):
        del what["meta"]  # a restored society gets a new log id
    assert restored == copy and CHART in restored.values()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["postgres", "sqlite"])
def test_a_backup_is_restored_into_an_empty_postgresql_database(
    engine: str, busy: Path, url: str, shared: Postgres, tmp_path: Path
) -> None:
    source = busy
    if engine == "sqlite":
        asyncio.run(copied(url, tmp_path / "source"))
        source = tmp_path / "source"
    assert coterie("backup", "--dir", source, "--to", tmp_path / "a.tar").code == 0
    second = shared.url(tmp_path / "second")

    done = coterie("restore", tmp_path / "a.tar", "--dir", tmp_path / "new", "--store", second)

    assert done.code == 0, done.stderr
    assert read_config(tmp_path / "new").store.url == second
    assert coterie("verify", "--dir", tmp_path / "new", "--deep").code == 0
    assert not list((tmp_path / "new" / "data").glob("coterie.db*"))
    asyncio.run(copied(second, tmp_path / "b"))
    asyncio.run(copied(url, tmp_path / "a"))
    before, after = contents(tmp_path / "a"), contents(tmp_path / "b")
    del before["meta"], after["meta"]
    assert after == before
    taken = coterie("restore", tmp_path / "a.tar", "--dir", tmp_path / "newer", "--store", second)
    assert "holds a society already: name one that is empty, or sqlite, with --store" in taken.failure
    assert not (tmp_path / "newer").exists()


def test_restoring_a_backup_from_postgresql_requires_a_store(busy: Path, tmp_path: Path) -> None:
    coterie("backup", "--dir", busy, "--to", tmp_path / "a.tar")

    assert "choose a store with --store" in coterie("restore", tmp_path / "a.tar", "--dir", tmp_path / "n").failure
    assert coterie("restore", tmp_path / "a.tar", "--dir", tmp_path / "n", "--store", "mysql://x").code == 2
    assert not (tmp_path / "n").exists()


def test_a_backup_does_not_contain_the_password_of_the_database(busy: Path, url: str, tmp_path: Path) -> None:
    file = busy / "coterie.toml"
    with_password = url.replace("postgres:@", "postgres:sesame@")
    assert with_password != url
    file.write_text(replace_store_url(file.read_text() + "# mine\n", with_password))

    done = coterie("backup", "--dir", busy, "--to", tmp_path / "a.tar")

    assert "and the password in store.url" in done.stdout
    assert b"sesame" not in (tmp_path / "a.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        kept = tar.extractfile("coterie-backup/coterie.toml")
        assert kept is not None
        assert kept.read().decode() == replace_store_url(file.read_text(), without_password(url))


def test_a_backup_from_postgresql_is_one_snapshot(
    busy: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = PostgresSource.rows

    def meanwhile(self: PostgresSource, table: str, columns: str) -> Any:
        if table == "agents":  # read before `roles`
            with owner_connection(url) as db:
                db.execute("INSERT INTO roles (name, profile) VALUES ('later', '{}')")
        return rows(self, table, columns)

    monkeypatch.setattr(PostgresSource, "rows", meanwhile)
    assert coterie("backup", "--dir", busy, "--to", tmp_path / "a.tar").code == 0
    monkeypatch.undo()

    assert coterie("restore", tmp_path / "a.tar", "--dir", tmp_path / "new", "--store", "sqlite").code == 0
    assert contents(tmp_path / "new")["roles"] == []
    with owner_connection(url) as db:
        assert db.execute("SELECT name FROM roles").fetchall() == [("later",)]


def test_verify_finds_violated_invariants_and_missing_bytes_in_postgresql(
    busy: Path, shared: Postgres, tmp_path: Path
) -> None:
    assert coterie("verify", "--dir", busy, "--json", "--deep").json == {"ok": True, "violations": []}
    with shared.behind(tmp_path / "first") as db:
        db.execute("UPDATE pieces SET bytes = set_byte(bytes, 0, 255 - get_byte(bytes, 0)) WHERE start = 262144")
    assert coterie("verify", "--dir", busy).code == 0
    (deep,) = coterie("verify", "--dir", busy, "--deep", "--json").json["violations"]
    assert "holds other bytes than were stored" in deep
    with shared.behind(tmp_path / "first") as db:
        db.execute("UPDATE blobs SET size = 7 WHERE size < 100")
        db.execute("DELETE FROM blobs WHERE size > 100")
        db.execute("UPDATE agents SET delayed = 7 WHERE id = 'ada'")
    found = coterie("verify", "--dir", busy, "--json")
    assert found.code == 1
    violations = "\n".join(found.json["violations"])
    assert (
        "counters: ada counts" in violations
        and "but its bytes are gone" in violations
        and "has 7 bytes, but 19 were" in violations
    )
