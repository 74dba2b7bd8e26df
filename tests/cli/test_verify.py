from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from coterie.admin.inspect import artifact_hashes, artifact_path
from coterie.config import SocietyFolder

from .commands import Result, coterie
from .conftest import schedule


@pytest.fixture
def kept(folder: Path, tmp_path: Path) -> Path:
    """The bytes of the one artifact in the society."""
    (tmp_path / "note.txt").write_text("twelve bytes")
    coterie("send", "assistant", "read this", "--attach", tmp_path / "note.txt", "--dir", folder)
    ((sha256, _),) = artifact_hashes(folder / "data" / "coterie.db")
    return artifact_path(SocietyFolder(folder), sha256)


def test_a_sound_society_passes(folder: Path, kept: Path) -> None:
    schedule(folder, 3)

    assert coterie("verify", "--dir", folder, "--deep").code == 0
    assert coterie("verify", "--dir", folder, "--json").json == {"ok": True, "violations": []}


def test_every_violation_is_listed(folder: Path) -> None:
    schedule(folder, 1)
    _change(folder, "UPDATE agents SET delayed = 7 WHERE id = 'assistant'")
    _change(folder, "UPDATE messages SET in_seq = 9 WHERE recipient = 'assistant'")

    done = coterie("verify", "--dir", folder)

    assert done.code == 1
    assert "Violation: counters: assistant counts 0 waiting and 7 delayed messages, but has 0 and 1" in done.stdout
    assert "Violation: M1 one state" in done.stdout


def test_bytes_that_are_gone_are_a_violation(folder: Path, kept: Path) -> None:
    kept.unlink()

    assert "its bytes are gone" in _only_violation(coterie("verify", "--dir", folder, "--json"))


def test_bytes_of_another_size_are_a_violation(folder: Path, kept: Path) -> None:
    kept.write_text("more than twelve bytes")

    assert "has 22 bytes, but 12 were stored" in _only_violation(coterie("verify", "--dir", folder, "--json"))


def test_changed_bytes_are_found_by_a_deep_look(folder: Path, kept: Path) -> None:
    kept.write_text("TWELVE bytes")

    assert coterie("verify", "--dir", folder).code == 0
    assert "holds other bytes" in _only_violation(coterie("verify", "--dir", folder, "--deep", "--json"))


def test_a_damaged_database_is_told_in_one_sentence(folder: Path) -> None:
    schedule(folder, 1)
    (folder / "data" / "coterie.db").write_bytes(b"no database at all, " * 1000)

    assert "restore a backup" in coterie("verify", "--dir", folder).failure


@pytest.mark.parametrize("page", range(2, 12))
def test_a_damaged_page_is_found_and_told_without_a_traceback(folder: Path, page: int) -> None:
    schedule(folder, 500)
    with open(folder / "data" / "coterie.db", "r+b") as database:
        database.seek((page - 1) * 4096)
        database.write(b"\xff" * 4096)

    done = coterie("verify", "--dir", folder)

    assert done.code == 1
    assert "Violation: database file: " in done.stdout or "is damaged" in done.failure


def _only_violation(done: Result) -> str:
    assert done.code == 1
    (violation,) = done.json["violations"]
    return str(violation)


def _change(folder: Path, sql: str) -> None:
    with closing(sqlite3.connect(folder / "data" / "coterie.db")) as db, db:
        db.execute(sql)
