"""Blob stores in folders: owned by one process, or shared by several."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from coterie.artifact_service import PARTS
from coterie.society import Society
from coterie.store_url import replace_store_url
from coterie.stores.blobs import FolderBlobStore, SharedFolderBlobStore, blob_path
from coterie.stores.postgres import PostgresStore
from tests.engines import Postgres
from tests.pruning import delete_unnamed_bytes, delete_unused

DAY = 86_400


async def some(data: bytes) -> AsyncIterator[bytes]:
    yield data


def age(path: Path, seconds: float) -> None:
    now = path.stat().st_mtime
    os.utime(path, (now - seconds, now - seconds))


async def test_a_start_keeps_running_uploads_of_other_processes_and_deletes_aborted_ones(tmp_path: Path) -> None:
    SharedFolderBlobStore(tmp_path)
    coming, left = tmp_path / "incoming" / "coming", tmp_path / "incoming" / "left"
    for path in (coming, left):
        path.write_bytes(b"a part")
    age(left, DAY + 60)

    SharedFolderBlobStore(tmp_path)

    assert (coming.exists(), left.exists()) == (True, False)
    FolderBlobStore(tmp_path)  # the only owner knows that no upload is running
    assert not coming.exists()


async def test_recently_uploaded_bytes_are_not_deleted_by_another_process(tmp_path: Path) -> None:
    north, south = SharedFolderBlobStore(tmp_path), SharedFolderBlobStore(tmp_path)
    stored = await north.put(some(b"the same bytes"), 100)
    age(blob_path(tmp_path, stored.sha256), 2 * 3600)
    await south.put(some(b"the same bytes"), 100)  # about to be referenced

    await north.delete(stored.sha256)

    assert await south.size(stored.sha256) == 14
    age(blob_path(tmp_path, stored.sha256), 2 * 3600)
    await north.delete(stored.sha256)
    assert await south.size(stored.sha256) is None
    await north.delete(stored.sha256)
    assert list((tmp_path / "incoming").iterdir()) == []


async def test_a_read_only_blob_store_creates_and_deletes_nothing(tmp_path: Path) -> None:
    FolderBlobStore.open_read_only(tmp_path / "none")
    (tmp_path / "incoming").mkdir()
    (tmp_path / "incoming" / "coming").write_bytes(b"a part")
    FolderBlobStore.open_read_only(tmp_path)
    assert (tmp_path / "incoming" / "coming").exists() and not (tmp_path / "none").exists()


@pytest.fixture
def home(shared: Postgres, tmp_path: Path) -> Path:
    """A society in PostgreSQL, whose files lie in a folder that all machines share."""
    folder = tmp_path / "home"
    folder.mkdir()
    text = f"[store]\nartifacts = '{tmp_path / 'pool'}'\n[agents.ada]\n"
    (folder / "coterie.toml").write_text(replace_store_url(text, shared.url(tmp_path / "data")))
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
    assert blob_path(tmp_path / "pool", chart.sha256).stat().st_size == 500_000
    with shared.behind(tmp_path / "data") as db:
        assert db.execute("SELECT count(*) FROM blobs").fetchone()[0] == 0


async def test_old_unreferenced_artifacts_are_deleted_from_the_shared_folder(home: Path, tmp_path: Path) -> None:
    async with Society.open(home, work=False) as society:
        loose = await society.artifacts.put(b"loose", "loose.txt")
        path = blob_path(tmp_path / "pool", loose.sha256)
        age(path, 2 * 3600)
        await delete_unused(society, timedelta(0))
        assert not path.exists()


async def run_retention(society: Society, full: bool) -> None:
    if full:
        await society.retention.prune()
    else:
        for _ in range(PARTS):
            await delete_unnamed_bytes(society)


@pytest.mark.parametrize("full", [True, False])
async def test_bytes_that_no_artifact_names_are_deleted_after_an_hour(tmp_path: Path, full: bool) -> None:
    """A process crashed between the bytes and the row of an artifact."""
    async with Society.open(tmp_path / "society", work=False) as society:
        named = await society.artifacts.put(b"named", "a.txt")
        folder = tmp_path / "society" / "data" / "artifacts"
        lost, recent = [await FolderBlobStore(folder).put(some(data), 100) for data in (b"lost", b"recent")]
        (folder / lost.sha256[:2] / "note.txt").write_text("no blob")
        for sha256 in (named.sha256, lost.sha256):
            age(blob_path(folder, sha256), 2 * 3600)
        age(folder / lost.sha256[:2] / "note.txt", 2 * 3600)

        await run_retention(society, full)

        left = {path.name for path in folder.rglob("*") if path.is_file()}
        assert left == {named.sha256, recent.sha256, "note.txt"}


async def test_bytes_in_a_shared_folder_may_belong_to_another_society(home: Path, tmp_path: Path) -> None:
    async with Society.open(home, work=False) as society:
        path = blob_path(tmp_path / "pool", (await FolderBlobStore(tmp_path / "pool").put(some(b"theirs"), 100)).sha256)
        age(path, 2 * 3600)
        await run_retention(society, full=True)
        assert path.exists()


@pytest.mark.parametrize("full", [True, False])
async def test_bytes_in_postgresql_that_no_artifact_names_are_deleted_after_an_hour(
    shared: Postgres, tmp_path: Path, full: bool
) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "coterie.toml").write_text(replace_store_url("[agents.ada]\n", shared.url(tmp_path / "data")))
    async with Society.open(folder, work=False) as society:
        named = await society.artifacts.put(b"named", "a.txt")
        assert isinstance(society.store, PostgresStore)
        lost, recent = [await society.store.blobs().put(some(data), 100) for data in (b"lost", b"recent")]
        with shared.behind(tmp_path / "data") as db:
            old = {"hour": 7_200_000, "recent": recent.sha256}
            db.execute("UPDATE blobs SET at = at - :hour WHERE sha256 <> :recent", old)
            await run_retention(society, full)
            left = {sha256 for (sha256,) in db.execute("SELECT sha256 FROM blobs").fetchall()}
        assert left == {named.sha256, recent.sha256} and lost.sha256 not in left
