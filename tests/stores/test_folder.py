"""Bytes in a folder: one that a process owns, and one that several share."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coterie.config import with_store_url
from coterie.society import Society
from coterie.store import Retention
from coterie.stores.blobs import FolderBytes, SharedFolderBytes, path_of
from tests.engines import Postgres

DAY = 86_400


async def some(data: bytes) -> AsyncIterator[bytes]:
    yield data


def age(path: Path, seconds: float) -> None:
    now = path.stat().st_mtime
    os.utime(path, (now - seconds, now - seconds))


async def test_an_upload_of_another_process_survives_a_start_and_one_that_was_cut_off_does_not(tmp_path: Path) -> None:
    SharedFolderBytes(tmp_path)
    coming, left = tmp_path / "incoming" / "coming", tmp_path / "incoming" / "left"
    for path in (coming, left):
        path.write_bytes(b"a part")
    age(left, DAY + 60)

    SharedFolderBytes(tmp_path)

    assert (coming.exists(), left.exists()) == (True, False)
    FolderBytes(tmp_path)  # whoever owns the folder alone knows that nobody is at it
    assert not coming.exists()


async def test_bytes_that_somebody_has_just_brought_are_not_deleted_by_another(tmp_path: Path) -> None:
    north, south = SharedFolderBytes(tmp_path), SharedFolderBytes(tmp_path)
    stored = await north.put(some(b"the same bytes"), 100)
    age(path_of(tmp_path, stored.sha256), 2 * 3600)
    await south.put(some(b"the same bytes"), 100)  # about to be named

    await north.delete(stored.sha256)

    assert await south.size(stored.sha256) == 14
    age(path_of(tmp_path, stored.sha256), 2 * 3600)
    await north.delete(stored.sha256)
    assert await south.size(stored.sha256) is None
    await north.delete(stored.sha256)
    assert list((tmp_path / "incoming").iterdir()) == []


async def test_whoever_only_looks_makes_and_deletes_nothing(tmp_path: Path) -> None:
    FolderBytes.beside(tmp_path / "none")
    (tmp_path / "incoming").mkdir()
    (tmp_path / "incoming" / "coming").write_bytes(b"a part")
    FolderBytes.beside(tmp_path)
    assert (tmp_path / "incoming" / "coming").exists() and not (tmp_path / "none").exists()


@pytest.fixture
def home(shared: Postgres, tmp_path: Path) -> Path:
    """A society in PostgreSQL, whose files lie in a folder that all machines share."""
    folder = tmp_path / "home"
    folder.mkdir()
    text = f"[store]\nartifacts = '{tmp_path / 'pool'}'\n[agents.ada]\n"
    (folder / "coterie.toml").write_text(with_store_url(text, shared.url(tmp_path / "data")))
    return folder


async def test_artifacts_of_a_shared_society_can_lie_in_a_folder_and_not_in_the_database(
    home: Path, shared: Postgres, tmp_path: Path
) -> None:
    async with Society.open(home, work=False) as north, Society.open(home, work=False) as south:
        chart = await north.artifacts.put(b"chart" * 100_000, "chart.txt")
        sent = await north.send(to="ada", text="see", attachments=[chart.ref])

        assert await south.artifacts.read(chart.ref) == b"chart" * 100_000
        found = await south.store.message(sent.message_id)
        assert found is not None and found.payload["attachments"][0]["size"] == 500_000
    assert path_of(tmp_path / "pool", chart.sha256).stat().st_size == 500_000
    with shared.behind(tmp_path / "data") as db:
        assert db.execute("SELECT count(*) FROM blobs").fetchone()[0] == 0


async def test_what_nobody_names_any_more_leaves_the_shared_folder_when_it_is_old(home: Path, tmp_path: Path) -> None:
    async with Society.open(home, work=False) as society:
        loose = await society.artifacts.put(b"loose", "loose.txt")
        path = path_of(tmp_path / "pool", loose.sha256)
        age(path, 2 * 3600)
        from datetime import timedelta

        await society.artifacts.tidy(Retention(loose_artifacts=timedelta(0)))
        assert not path.exists()
