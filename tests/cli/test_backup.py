from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from coterie.admin.inspect import Inspection, artifact_hashes
from coterie.config import SocietyFolder
from coterie.stores.blobs import blob_path

from .commands import ServeProcess, coterie
from .conftest import delayed, schedule, waiting


@pytest.fixture
def full(folder: Path, tmp_path: Path) -> Path:
    """A society with messages, an artifact, delayed messages, prompts, tools, a token and keys."""
    (tmp_path / "note.txt").write_text("a note")
    coterie("send", "assistant", "read this", "--attach", tmp_path / "note.txt", "--dir", folder)
    schedule(folder, 3)
    (folder / "coterie.toml").write_text('[agents.assistant]\nprompt_file = "roles/a.md"\n')
    for name in ("prompts/deep/b.md", "roles/a.md", "tools.py", "tools/more.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}")
    (folder / "data" / "token").write_text("the-token-of-this-society-0123456789")
    (folder / "data" / "secrets.json").write_text('{"KEY": "the key"}')
    return folder


@pytest.fixture
def archive(full: Path, tmp_path: Path) -> Path:
    path = tmp_path / "society.tar"
    assert coterie("backup", "--dir", full, "--to", path).code == 0
    return path


def test_a_restored_society_equals_the_one_that_was_backed_up(full: Path, archive: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"

    done = coterie("restore", archive, "--dir", new)

    assert done.code == 0
    assert f"coterie serve {new}" in done.stdout
    assert coterie("verify", "--dir", new, "--deep").code == 0
    assert (waiting(new), delayed(new)) == (waiting(full), delayed(full))
    for name in ("coterie.toml", "llmservices.json", "prompts/deep/b.md", "roles/a.md", "tools.py", "tools/more.py"):
        assert (new / name).read_text() == (full / name).read_text()


def test_a_backup_is_private_and_holds_no_keys(full: Path, archive: Path) -> None:
    with tarfile.open(archive) as tar:
        names = tar.getnames()

    assert archive.stat().st_mode & 0o777 == 0o600
    assert not [name for name in names if "token" in name or "secrets" in name]
    assert b"the key" not in archive.read_bytes()
    done = coterie("backup", "--dir", full, "--to", archive.with_name("second.tar"))
    assert "Not in it: the access token and the keys of model services" in done.stdout


@pytest.mark.slow
def test_a_backup_of_a_running_society_can_be_restored_and_passes_verify(full: Path, tmp_path: Path) -> None:
    with ServeProcess(full) as society:
        made = coterie("backup", "--dir", full, "--to", tmp_path, "--json").json
        assert coterie("restore", made["file"], "--dir", tmp_path / "new").code == 0
        assert society.stop() == 0

    assert Path(made["file"]).name.startswith("society-20")
    assert coterie("verify", "--dir", tmp_path / "new").code == 0
    assert len(delayed(tmp_path / "new")) == 3
    with ServeProcess(tmp_path / "new") as restored:
        assert restored.stop(signal.SIGTERM) == 0
    assert not [line for line in restored.messages if "did not stop cleanly" in line]


def test_a_restored_society_has_a_new_event_log_id(full: Path, archive: Path, tmp_path: Path) -> None:
    coterie("restore", archive, "--dir", tmp_path / "new")

    assert _log_id(full) != _log_id(tmp_path / "new")


def test_an_existing_file_is_not_overwritten(full: Path, archive: Path) -> None:
    before = archive.read_bytes()

    assert "exists already" in coterie("backup", "--dir", full, "--to", archive).failure

    assert archive.read_bytes() == before


def test_a_backup_that_fails_leaves_nothing_behind(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    target.mkdir()

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", fail)

    assert "No space left" in coterie("backup", "--dir", full, "--to", target / "a.tar").failure
    assert list(target.iterdir()) == []


def test_a_backup_reports_missing_artifact_bytes_and_succeeds(full: Path, tmp_path: Path) -> None:
    ((sha256, _),) = artifact_hashes(full / "data" / "coterie.db")
    blob_path(SocietyFolder(full).artifacts, sha256).unlink()

    done = coterie("backup", "--dir", full, "--to", tmp_path / "a.tar")

    assert done.code == 0
    assert "1 artifact" in done.stderr
    assert coterie("restore", tmp_path / "a.tar", "--dir", tmp_path / "new").code == 0
    assert len(waiting(tmp_path / "new")) == 1


def test_a_restore_does_not_overwrite_a_society_with_data(full: Path, archive: Path) -> None:
    coterie("send", "assistant", "newer", "--dir", full)
    before = waiting(full)

    assert "holds a society with data already" in coterie("restore", archive, "--dir", full).failure

    assert waiting(full) == before


def test_a_write_ahead_log_without_its_database_counts_as_data(archive: Path, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "data").mkdir(parents=True)
    (target / "data" / "coterie.db-wal").write_bytes(b"x")

    assert "holds a society with data already" in coterie("restore", archive, "--dir", target).failure


def test_a_restore_into_a_folder_fresh_from_init_succeeds(archive: Path, tmp_path: Path) -> None:
    coterie("init", tmp_path / "fresh")

    assert coterie("restore", archive, "--dir", tmp_path / "fresh").code == 0
    assert "prompt_file" in (tmp_path / "fresh" / "coterie.toml").read_text()


def test_a_restore_does_not_overwrite_a_changed_configuration(archive: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    coterie("init", target)
    (target / "coterie.toml").write_text("# mine")

    assert "differs from the backup's" in coterie("restore", archive, "--dir", target).failure

    assert (target / "coterie.toml").read_text() == "# mine"
    assert sorted(path.name for path in target.iterdir()) == ["coterie.toml", "data", "llmservices.json", "tools.py"]
    assert not (target / "data" / "coterie.db").exists()


@pytest.mark.parametrize(
    "share", [0.0, 0.02, 0.999, *(pytest.param(one, marks=pytest.mark.full) for one in (0.001, 0.005, 0.5, 0.9, 0.99))]
)
def test_a_truncated_backup_is_refused_and_leaves_no_files(archive: Path, tmp_path: Path, share: float) -> None:
    with tarfile.open(archive) as tar:
        whole = max(member.offset_data + member.size for member in tar)  # the rest is padding
    cut = tmp_path / "cut.tar"
    cut.write_bytes(archive.read_bytes()[: int(whole * share)])

    failure = coterie("restore", cut, "--dir", tmp_path / "deep" / "new").failure

    assert "is cut short" in failure or "is not a Coterie backup" in failure
    assert not (tmp_path / "deep").exists()


def test_a_changed_byte_in_any_member_is_detected(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as tar:
        offsets = [member.offset_data + member.size // 2 for member in tar if member.size]
    data = archive.read_bytes()
    changed = tmp_path / "changed.tar"
    for offset in offsets:
        changed.write_bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :])
        assert coterie("restore", changed, "--dir", tmp_path / "new").failure
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 10_240, b"PK\x03\x04" * 500, b"\x1f\x8b" + b"z" * 2000])
def test_a_file_that_is_not_a_backup_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "foreign").write_bytes(content)

    assert "is not a Coterie backup" in coterie("restore", tmp_path / "foreign", "--dir", tmp_path / "new").failure
    assert not (tmp_path / "new").exists()


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, 5 if kind == tarfile.REGTYPE else 0
    return info


@pytest.mark.parametrize(
    "hostile",
    [
        _member("/etc/hostile"),
        pytest.param(_member("coterie-backup//etc/hostile"), marks=pytest.mark.full),
        _member("coterie-backup/../hostile"),
        pytest.param(_member("coterie-backup/prompts/../../../hostile"), marks=pytest.mark.full),
        pytest.param(_member("coterie-backup/./hostile"), marks=pytest.mark.full),
        pytest.param(_member("elsewhere/hostile"), marks=pytest.mark.full),
        _member("coterie-backup/data/token"),
        pytest.param(_member("coterie-backup/data/secrets.json"), marks=pytest.mark.full),
        pytest.param(_member("coterie-backup/DATA/token"), marks=pytest.mark.full),
        pytest.param(_member("coterie-backup/data"), marks=pytest.mark.full),
        pytest.param(_member("coterie-backup/data/artifacts/ab/hostile"), marks=pytest.mark.full),
        _member("coterie-backup/prompts/link", tarfile.SYMTYPE, "/etc/passwd"),
        _member("coterie-backup/prompts/link", tarfile.LNKTYPE, "coterie-backup/data/coterie.db"),
        pytest.param(_member("coterie-backup/prompts/device", tarfile.CHRTYPE), marks=pytest.mark.full),
        pytest.param(_member("coterie-backup/prompts/pipe", tarfile.FIFOTYPE), marks=pytest.mark.full),
        _member("coterie-backup/prompts", tarfile.DIRTYPE),
    ],
    ids=lambda info: f"{info.name}:{info.type.decode()}",
)
def test_a_hostile_member_is_refused_before_anything_is_written(
    archive: Path, tmp_path: Path, hostile: tarfile.TarInfo
) -> None:
    bad = _rebuild(archive, tmp_path / "bad.tar", lambda tar: tar.addfile(hostile, io.BytesIO(b"12345")))
    before = set(tmp_path.rglob("*"))

    assert "is not a Coterie backup" in coterie("restore", bad, "--dir", tmp_path / "new").failure

    assert set(tmp_path.rglob("*")) == before


def test_a_repeated_member_name_is_refused(archive: Path, tmp_path: Path) -> None:
    twice = _rebuild(
        archive,
        tmp_path / "bad.tar",
        lambda tar: tar.addfile(_member("coterie-backup/coterie.toml"), io.BytesIO(b"12345")),
    )

    assert coterie("restore", twice, "--dir", tmp_path / "new").failure
    assert not (tmp_path / "new").exists()


def test_a_backup_that_violates_an_invariant_is_not_restored(full: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(full / "data" / "coterie.db")) as db, db:
        db.execute("UPDATE agents SET reminders = 7 WHERE id = 'assistant'")
    coterie("backup", "--dir", full, "--to", tmp_path / "a.tar")

    assert (
        "T7 messages that an answer withdraws: assistant"
        in coterie("restore", tmp_path / "a.tar", "--dir", tmp_path / "new").failure
    )
    assert not (tmp_path / "new").exists()


def test_wrong_counts_of_mail_are_mended_by_a_restored_backup_as_verify_says(full: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(full / "data" / "coterie.db")) as db, db:
        db.execute("UPDATE agents SET waiting_bytes = waiting_bytes + 7, delayed = 9 WHERE id = 'assistant'")
    assert "make a backup and restore it into a new folder" in coterie("verify", "--dir", full).stdout
    coterie("backup", "--dir", full, "--to", tmp_path / "a.tar")

    assert coterie("restore", tmp_path / "a.tar", "--dir", tmp_path / "new").code == 0
    assert coterie("verify", "--dir", tmp_path / "new").code == 0


def test_a_terminated_restore_leaves_no_files(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.admin.backup._prepare_database", lambda *_: os.kill(os.getpid(), signal.SIGTERM))

    assert coterie("restore", archive, "--dir", tmp_path / "new").code == 143

    assert not (tmp_path / "new").exists()


def test_files_of_a_killed_restore_are_removed_by_the_next(archive: Path, tmp_path: Path) -> None:
    left = tmp_path / "new" / ".restoring-x"
    left.mkdir(parents=True)
    shutil.copy(archive, left)

    assert coterie("restore", archive, "--dir", tmp_path / "new").code == 0
    assert not left.exists()


def _rebuild(archive: Path, target: Path, change: Callable[[tarfile.TarFile], None]) -> Path:
    """Copy the archive, with `change` applied before the manifest."""
    with tarfile.open(archive) as old, tarfile.open(target, "w") as new:
        for member in old:
            if member.name.endswith("manifest.json"):
                change(new)
            new.addfile(member, old.extractfile(member))
    return target


def _log_id(folder: Path) -> str:
    async def read() -> str:
        async with Inspection.open(folder) as society:
            return society.store.info.log_id

    return asyncio.run(read())
