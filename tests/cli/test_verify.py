from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from coterie.admin.inspect import artifact_hashes
from coterie.config import SocietyFolder
from coterie.stores.blobs import blob_path

from .commands import Result, coterie
from .conftest import schedule


@pytest.fixture
def artifact(folder: Path, tmp_path: Path) -> Path:
    """Path of the only stored artifact."""
    (tmp_path / "note.txt").write_text("twelve bytes")
    coterie("send", "assistant", "read this", "--attach", tmp_path / "note.txt", "--dir", folder)
    ((sha256, _),) = artifact_hashes(folder / "data" / "coterie.db")
    return blob_path(SocietyFolder(folder).artifacts, sha256)


def test_verify_passes_a_valid_society(folder: Path, artifact: Path) -> None:
    schedule(folder, 3)

    assert coterie("verify", "--dir", folder, "--deep").code == 0
    assert coterie("verify", "--dir", folder, "--json").json == {"ok": True, "violations": []}


def test_every_violation_is_listed(folder: Path) -> None:
    schedule(folder, 1)
    _change(folder, "UPDATE agents SET delayed = 7 WHERE id = 'assistant'")
    _change(folder, "UPDATE messages SET in_seq = 9 WHERE recipient = 'assistant'")

    done = coterie("verify", "--dir", folder)

    assert done.code == 1
    counted = "assistant counts 0 waiting messages of 0 characters and 7 delayed ones, but has 0 of 0 and 1"
    assert f"Violation: counters: {counted}" in done.stdout
    assert "Violation: M1 one state" in done.stdout


def test_missing_artifact_bytes_are_a_violation(folder: Path, artifact: Path) -> None:
    artifact.unlink()

    assert "its bytes are gone" in _only_violation(coterie("verify", "--dir", folder, "--json"))


def test_artifact_bytes_of_another_size_are_a_violation(folder: Path, artifact: Path) -> None:
    artifact.write_text("more than twelve bytes")

    assert "has 22 bytes, but 12 were stored" in _only_violation(coterie("verify", "--dir", folder, "--json"))


def test_a_deep_verify_finds_changed_artifact_bytes(folder: Path, artifact: Path) -> None:
    artifact.write_text("TWELVE bytes")

    assert coterie("verify", "--dir", folder).code == 0
    assert "holds other bytes" in _only_violation(coterie("verify", "--dir", folder, "--deep", "--json"))


def test_verify_of_a_damaged_database_is_a_one_line_error(folder: Path) -> None:
    schedule(folder, 1)
    (folder / "data" / "coterie.db").write_bytes(b"no database at all, " * 1000)

    assert "restore a backup" in coterie("verify", "--dir", folder).failure


@pytest.mark.parametrize("page", range(2, 12))
def test_verify_reports_a_damaged_page_without_a_traceback(folder: Path, page: int) -> None:
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
