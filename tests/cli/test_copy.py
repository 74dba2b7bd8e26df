from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.engines import Postgres

from .commands import coterie
from .conftest import delayed, schedule, waiting


@pytest.fixture
def full(folder: Path, tmp_path: Path) -> Path:
    (tmp_path / "note.txt").write_text("a note")
    coterie("send", "assistant", "read this", "--attach", tmp_path / "note.txt", "--dir", folder)
    schedule(folder, 3)
    return folder


@pytest.fixture
def url(shared: Postgres, tmp_path: Path) -> str:
    return shared.url(tmp_path / "data")


def use(folder: Path, url: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "coterie.toml").write_text(f"[store]\nurl = {json.dumps(url)}\n")
    return folder


def test_a_society_is_copied_to_postgresql_and_back_with_its_counts_printed(
    full: Path, url: str, tmp_path: Path
) -> None:
    there = coterie("copy", full, url)
    back = coterie("copy", use(tmp_path / "shared", url), tmp_path / "back", "--json")

    assert there.code == 0
    assert "set store.url in coterie.toml to this address" in there.stdout
    assert "4 messages, 1 artifact; everything was counted and checked" in there.stdout
    assert back.json["rows"]["messages"] == 4 and back.json["artifacts"] == 1 and back.json["lost"] == []
    assert back.json["to"] == str(tmp_path / "back")
    assert (waiting(tmp_path / "back"), delayed(tmp_path / "back")) == (waiting(full), delayed(full))
    assert coterie("verify", "--dir", tmp_path / "back", "--deep").code == 0
    assert coterie("verify", "--dir", tmp_path / "shared", "--deep").code == 0


def test_a_copy_in_another_folder_is_used_from_there(full: Path, tmp_path: Path) -> None:
    done = coterie("copy", full, tmp_path / "second")

    assert f"coterie serve {tmp_path / 'second'}" in done.stdout
    assert "store.url" not in done.stdout


def test_the_password_of_a_database_is_never_shown(full: Path) -> None:
    done = coterie("copy", full, "postgresql://me:hidden@127.0.0.1:1/x?password=hidden")

    assert "no server listens there" in done.failure
    assert "hidden" not in done.stdout + done.stderr


def test_a_copy_of_a_folder_without_a_society_is_refused(tmp_path: Path, folder: Path, url: str) -> None:
    failure = coterie("copy", tmp_path / "nothing", url).failure
    assert "there is no society in" in failure and "--dir" not in failure
    assert "has not run yet" in coterie("copy", folder, url).failure
    assert coterie("migrate", "--dir", use(tmp_path / "shared", url)).code == 0
    assert "there is no society in" in coterie("copy", url, tmp_path / "new").failure
    assert not (tmp_path / "new").exists()


def test_a_copy_of_a_damaged_database_advises_a_backup(full: Path, tmp_path: Path) -> None:
    (full / "data" / "coterie.db").write_text("something else")

    failure = coterie("copy", full, tmp_path / "new").failure
    assert failure.endswith("is damaged (file is not a database): restore a backup with coterie restore FILE")
    assert not (tmp_path / "new").exists()


def test_a_copy_to_a_folder_with_data_is_refused_with_advice_that_copy_can_follow(full: Path, tmp_path: Path) -> None:
    coterie("copy", full, tmp_path / "second")

    failure = coterie("copy", full, tmp_path / "second").failure
    assert "name another folder" in failure and "--dir" not in failure


def test_a_terminated_copy_leaves_no_data(
    full: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.admin.copy.check_transfer", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert coterie("copy", full, url).code == 143
    assert coterie("copy", full, tmp_path / "new").code == 143
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    assert coterie("copy", full, url).code == 0
