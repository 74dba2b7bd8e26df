"""Unused bytes are deleted while the same bytes are uploaded again: referenced bytes are never missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coterie.artifacts import Artifact
from coterie.society import Society
from coterie.stores.blobs import FolderBlobStore
from coterie.stores.sqlite import SqliteStore
from coterie.testing import FakeClock
from tests.pruning import delete_unused

from .scenarios import make_home

SAME = b"the same bytes"


@pytest.fixture
async def society(tmp_path: Path, clock: FakeClock) -> AsyncIterator[Society]:
    """Society with bytes that were unused for more than a day."""
    make_home(tmp_path / "society")
    async with Society.open(tmp_path / "society", clock=clock, work=False) as opened:
        await opened.artifacts.put(SAME, "old.txt")
    later = FakeClock(clock.now() + timedelta(hours=25))
    async with Society.open(tmp_path / "society", clock=later, work=False) as opened:
        yield opened


class Gate:
    """Holds a call until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        original = getattr(owner, name)

        async def held(*args: Any) -> Any:
            self.reached.set()
            await self.open.wait()
            return await original(*args)

        monkeypatch.setattr(owner, name, held)


async def test_bytes_uploaded_again_during_pruning_are_kept(society: Society, monkeypatch: pytest.MonkeyPatch) -> None:
    naming = Gate(monkeypatch, SqliteStore, "add_artifact")
    coming = asyncio.create_task(society.artifacts.put(SAME, "new.txt"))
    await naming.reached.wait()

    await delete_unused(society)
    naming.open.set()
    artifact: Artifact = await coming

    assert await society.artifacts.read(artifact.ref) == SAME


async def test_bytes_uploaded_again_during_deletion_are_kept(society: Society, monkeypatch: pytest.MonkeyPatch) -> None:
    deleting = Gate(monkeypatch, FolderBlobStore, "delete")
    tidying = asyncio.create_task(delete_unused(society))
    await deleting.reached.wait()
    coming = asyncio.create_task(society.artifacts.put(SAME, "new.txt"))
    await asyncio.wait({coming}, timeout=0.2)  # the upload may wait for the deletion, or be stored already

    deleting.open.set()
    await tidying
    artifact = await coming

    assert await society.artifacts.read(artifact.ref) == SAME


async def test_unused_bytes_are_deleted(society: Society, tmp_path: Path) -> None:
    kept = tmp_path / "society" / "data" / "artifacts"
    assert [file for file in kept.rglob("*") if file.is_file()]

    await delete_unused(society)

    assert [file for file in kept.rglob("*") if file.is_file()] == []
