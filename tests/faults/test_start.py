"""Starts after crashes, with a second owner, on foreign databases, and without permissions."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import ForkServer
from .scenarios import make_home
from .verifier import find_violations, open_database

NOBODY = 65534


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_home(tmp_path / "society")
    return tmp_path / "society"


def contents(folder: Path) -> dict[str, bytes]:
    """Files of the folder without the shared memory file of SQLite."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.name.endswith("-shm")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


# Repeated starts


@pytest.mark.parametrize("name", ["open.checked", "commit.before", "commit.after"])
def test_a_start_after_repeatedly_killed_starts_succeeds_and_has_lost_nothing(
    name: str, home: Path, fork_server: ForkServer
) -> None:
    fork_server.call("kill", pid=fork_server.call("hold", folder=str(home)))
    for _ in range(5):
        assert fork_server.run("open_and_close", home, arm=f"{name}:1:kill")["status"] == -9

    opened = fork_server.run("open_and_close", home)

    assert opened["returned"] == {"unclean": True, "violations": []}
    with open_database(home) as db:
        assert find_violations(db) == []
        assert db.execute("SELECT state FROM messages").fetchall() == [("pending",)]


@pytest.mark.parametrize(
    "place", ["migrate.statement:1", "migrate.statement:4", "migrate.statement:9", "migrate.before_commit:1"]
)
def test_a_killed_migration_is_rolled_back_and_runs_again(place: str, home: Path, fork_server: ForkServer) -> None:
    for _ in range(2):
        assert fork_server.run("open_and_close", home, arm=f"{place}:kill")["status"] == -9
        with open_database(home) as db:
            assert db.execute("SELECT name FROM sqlite_schema").fetchall() == []
            assert db.execute("PRAGMA user_version").fetchone() == (0,)

    assert "returned" in fork_server.run("send", home, text="hello")


# Two owners


def test_a_second_start_is_refused_with_the_owners_pid_and_leaves_the_first_untouched(
    home: Path, fork_server: ForkServer
) -> None:
    owner = fork_server.call("hold", folder=str(home))
    before = contents(home / "data")

    second = fork_server.run("open_and_close", home)

    assert second["raised"] == "StoreOwned"
    assert second["owner"] == owner
    assert str(owner) in second["message"]
    assert contents(home / "data") == before
    assert fork_server.call("kill", pid=owner) == -9, "the first was still at work"


def test_after_kill_9_of_its_owner_a_folder_opens_at_once_with_all_messages(
    home: Path, fork_server: ForkServer
) -> None:
    for _ in range(3):
        fork_server.call("kill", pid=fork_server.call("hold", folder=str(home)))

    opened = fork_server.run("open_and_close", home)

    assert opened["returned"] == {"unclean": True, "violations": []}
    with open_database(home) as db:
        assert db.execute("SELECT count(*) FROM messages").fetchone() == (3,)


# Foreign databases


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("PRAGMA user_version = 9999", ["newer Coterie", "9999", "restore"]),
        ("PRAGMA application_id = 42", ["not a Coterie database"]),
    ],
)
def test_a_database_of_an_unsupported_version_is_refused_and_unchanged(
    statement: str, words: list[str], home: Path, fork_server: ForkServer
) -> None:
    fork_server.run("send", home, text="precious")
    with open_database(home) as db:
        db.execute(statement)
        db.commit()
    before = contents(home / "data")

    refused = fork_server.run("open_and_close", home)

    assert refused["raised"] == "StoreUnusable"
    assert all(word in refused["message"] for word in words)
    assert contents(home / "data") == before


@pytest.mark.parametrize("version", [0, 1])
def test_a_database_of_another_program_is_refused_and_unchanged(
    version: int, home: Path, fork_server: ForkServer
) -> None:
    (home / "data").mkdir()
    with open_database(home) as db:
        db.execute("CREATE TABLE theirs (x)")
        db.execute(f"PRAGMA user_version = {version}")
        db.commit()
    before = (home / "data" / "coterie.db").read_bytes()

    refused = fork_server.run("open_and_close", home)

    assert refused["raised"] == "StoreUnusable"
    assert "not a Coterie database" in refused["message"]
    assert (home / "data" / "coterie.db").read_bytes() == before


# Permissions


@pytest.fixture
def shared_home() -> Iterator[Path]:
    """A society folder that every user can reach, unlike the folders of pytest."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    make_home(place / "society")
    yield place / "society"
    shutil.rmtree(place)


def start_as_nobody(fork_server: ForkServer, home: Path) -> dict[str, Any]:
    """Start without root rights: as root the fork becomes the user `nobody` first."""
    return fork_server.run("open_and_close", home, uid=NOBODY if os.geteuid() == 0 else None)


def chown_to_nobody(*paths: Path) -> None:
    if os.geteuid() == 0:
        for path in paths:
            os.chown(path, NOBODY, NOBODY)


def test_a_start_in_a_read_only_folder_is_refused_and_creates_nothing(
    shared_home: Path, fork_server: ForkServer
) -> None:
    shared_home.chmod(0o555)

    refused = start_as_nobody(fork_server, shared_home)

    assert refused["raised"] == "StoreUnusable", refused
    assert "choose another" in refused["message"]
    assert set(contents(shared_home)) == {"coterie.toml", "tools.py"}
    shared_home.chmod(0o755)


@pytest.mark.parametrize("unreachable", ["lock", "coterie.db", "artifacts"])
def test_a_start_with_a_file_of_another_user_is_refused_and_changes_nothing(
    unreachable: str, shared_home: Path, fork_server: ForkServer
) -> None:
    assert "returned" in fork_server.run("send", shared_home, text="precious")
    data = shared_home / "data"
    chown_to_nobody(shared_home, data, *data.rglob("*"))
    part = data / unreachable
    if os.geteuid() == 0:
        os.chown(part, 0, 0)
    part.chmod(0o500 if part.is_dir() else 0o400)
    before = contents(shared_home)

    refused = start_as_nobody(fork_server, shared_home)

    assert refused["raised"] == "StoreUnusable", refused
    assert "writable" in refused["message"]
    if unreachable != "artifacts":  # checked after the database is open, which counts its openings
        assert contents(shared_home) == before
    part.chmod(0o700 if part.is_dir() else 0o600)
    with open_database(shared_home) as db:
        assert find_violations(db) == []
        assert db.execute("SELECT json_extract(payload, '$.text') FROM messages").fetchall() == [("precious",)]


def test_a_data_folder_of_another_user_is_refused_and_unchanged(shared_home: Path, fork_server: ForkServer) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can create a folder of another user")
    assert "returned" in fork_server.run("send", shared_home, text="precious")
    (shared_home / "data").chmod(0o755)
    before = contents(shared_home)

    refused = start_as_nobody(fork_server, shared_home)

    assert refused["raised"] == "StoreUnusable", refused
    assert contents(shared_home) == before
