"""Bytes that are let go of while the same bytes come in again: what is named by an artifact is never missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coterie.artifacts import Artifact
from coterie.society import Society
from coterie.store import Retention
from coterie.stores.blobs import FolderBytes
from coterie.stores.sqlite import SqliteStore
from coterie.testing import FakeClock

from .scenarios import make_home

SAME = b"the same bytes"


@pytest.fixture
async def society(tmp_path: Path, clock: FakeClock) -> AsyncIterator[Society]:
    """One that holds bytes nobody has needed for more than a day."""
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


async def test_bytes_that_arrive_again_while_the_old_are_tidied_away_are_kept(
    society: Society, monkeypatch: pytest.MonkeyPatch
) -> None:
    naming = Gate(monkeypatch, SqliteStore, "add_artifact")
    coming = asyncio.create_task(society.artifacts.put(SAME, "new.txt"))
    await naming.reached.wait()

    await society.artifacts.tidy(Retention())
    naming.open.set()
    artifact: Artifact = await coming

    assert await society.artifacts.read(artifact.ref) == SAME


async def test_bytes_that_arrive_again_while_the_old_are_being_deleted_are_kept(
    society: Society, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleting = Gate(monkeypatch, FolderBytes, "delete")
    tidying = asyncio.create_task(society.artifacts.tidy(Retention()))
    await deleting.reached.wait()
    coming = asyncio.create_task(society.artifacts.put(SAME, "new.txt"))
    await asyncio.wait({coming}, timeout=0.2)  # it may have to wait for the deletion, or be done with its naming

    deleting.open.set()
    await tidying
    artifact = await coming

    assert await society.artifacts.read(artifact.ref) == SAME


async def test_bytes_nobody_needs_are_let_go_of_when_nothing_comes_in(society: Society, tmp_path: Path) -> None:
    kept = tmp_path / "society" / "data" / "artifacts"
    assert [file for file in kept.rglob("*") if file.is_file()]

    await society.artifacts.tidy(Retention())

    assert [file for file in kept.rglob("*") if file.is_file()] == []
