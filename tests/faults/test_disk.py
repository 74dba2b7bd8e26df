"""A full, locked or broken disk: acknowledged writes are stored, and only a broken disk needs a restart."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from coterie.errors import Refused, StoreBroken, StoreUnavailable
from coterie.society import Society
from coterie.stores.sqlite import SqliteStore, connection
from coterie.testing import FakeClock

from .disk import Disk
from .harness import scaled_timeout
from .scenarios import make_home

BIG = "x" * 200_000
HOUR = 3_600_000


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_home(tmp_path / "society")
    return tmp_path / "society"


@pytest.fixture
async def society(home: Path, disk: Disk, clock: FakeClock) -> AsyncIterator[Society]:
    async with Society.open(home, clock=clock, work=False) as opened:
        yield opened
        assert [violation async for violation in opened.store.violations()] == []


async def texts(society: Society, agent: str = "ada") -> list[str]:
    return [message.payload["text"][:20] for message in await society.waiting(agent)]


def healthy(society: Society) -> bool:
    return society.store.is_healthy


async def wait_for_queued(society: Society, jobs: int) -> None:
    """Wait until `jobs` writes are queued behind the held commit."""
    assert isinstance(society.store, SqliteStore)
    writer = society.store._writer
    assert writer
    async with asyncio.timeout(scaled_timeout()):
        while writer._jobs.qsize() < jobs:
            await asyncio.sleep(0)


# Full disk


async def test_a_send_on_a_full_disk_is_refused_and_sends_work_again_with_free_space(
    society: Society, disk: Disk
) -> None:
    await society.send(to="ada", text="before")
    disk.fill()

    with pytest.raises(StoreUnavailable) as refused:
        await society.send(to="ada", text=BIG)
    assert refused.value.full
    assert not healthy(society)
    assert await texts(society) == ["before"]

    disk.free()
    await society.send(to="ada", text="after")
    assert healthy(society)
    assert await texts(society) == ["before", "after"]


async def test_on_a_full_disk_all_changes_of_one_commit_are_refused_together(society: Society, disk: Disk) -> None:
    kept = await society.send(to="bob", text="kept")
    disk.hold_commits()
    first = asyncio.create_task(society.send(to="ada", text="first"))
    await asyncio.to_thread(disk.wait_for_commit)
    together = [
        asyncio.create_task(society.bus.withdraw(kept.message_id)),
        asyncio.create_task(society.send(to="ada", text=BIG)),
        asyncio.create_task(society.bus.withdraw("nothing")),
        asyncio.create_task(society.store.terminate("bob")),
    ]
    await wait_for_queued(society, len(together))
    disk.fill()
    disk.release_commits()

    await first
    outcomes = await asyncio.gather(*together, return_exceptions=True)

    assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * len(together)
    assert await texts(society) == ["first"]
    assert await texts(society, "bob") == ["kept"]
    disk.free()
    await society.bus.withdraw(kept.message_id)
    assert await texts(society, "bob") == []


async def test_a_message_due_on_a_full_disk_is_delivered_once_there_is_space(
    society: Society, disk: Disk, clock: FakeClock
) -> None:
    for number in range(300):
        await society.send(to="ada", text=f"late {number}", delay_ms=1000)
    disk.fill()
    await clock.advance(seconds=3)
    assert await society.bus.delayed_count() == 300

    disk.free()
    await clock.advance(seconds=1)

    assert await society.bus.delayed_count() == 0
    assert await texts(society) == [f"late {number}" for number in range(200)]


async def test_a_society_on_a_full_disk_can_be_stopped_and_started_again(
    home: Path, disk: Disk, clock: FakeClock
) -> None:
    society = await Society.start(home, clock=clock, work=False)
    await society.send(to="ada", text="before")
    disk.fail_next_commit(sqlite3.SQLITE_FULL)

    await society.stop()

    async with Society.open(home, clock=clock, work=False) as again:
        assert await texts(again) == ["before"]


# Locked database


@pytest.fixture
def locker(home: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts another program that locks the database until its input ends."""
    hold = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "db.execute('BEGIN EXCLUSIVE'); print('locked', flush=True); sys.stdin.read(); db.execute('ROLLBACK')"
    )
    started: list[subprocess.Popen[str]] = []

    def lock() -> subprocess.Popen[str]:
        path = str(home / "data" / "coterie.db")
        program = subprocess.Popen(
            [sys.executable, "-S", "-c", hold, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert program.stdout and program.stdout.readline() == "locked\n"
        started.append(program)
        return program

    yield lock
    for program in started:
        program.communicate()


async def test_sends_are_refused_while_another_program_locks_the_database(
    home: Path, locker: Callable[[], subprocess.Popen[str]], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BUSY_TIMEOUT_SECONDS", 0.05)
    async with Society.open(home, clock=clock, work=False) as society:
        await society.send(to="ada", text="before")
        await society.send(to="ada", text="late", delay_ms=500)
        program = locker()

        with pytest.raises(StoreUnavailable) as refused:
            await society.send(to="ada", text="meanwhile")
        assert not refused.value.full
        assert not healthy(society)
        await clock.advance(seconds=2)
        assert await texts(society) == ["before"], "reading goes on; nothing is delivered"

        program.communicate()
        await society.send(to="ada", text="after")
        assert healthy(society)
        await clock.advance(seconds=1)
        assert await texts(society) == ["before", "after", "late"]
        assert [violation async for violation in society.store.violations()] == []


async def test_a_database_locked_by_another_program_can_be_opened_after_it_is_unlocked(
    home: Path, locker: Callable[[], subprocess.Popen[str]], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BUSY_TIMEOUT_SECONDS", 0.05)
    async with Society.open(home, clock=clock, work=False) as society:
        await society.send(to="ada", text="before")
    program = locker()

    with pytest.raises(StoreUnavailable):
        await Society.start(home, clock=clock, work=False)

    program.communicate()
    async with Society.open(home, clock=clock, work=False) as society:
        assert await texts(society) == ["before"]


# Failed flush


@pytest.mark.parametrize("written", [False, True], ids=["not written", "written all the same"])
async def test_after_a_failed_flush_sends_are_refused_and_a_restart_finds_all_acknowledged_messages(
    written: bool, home: Path, disk: Disk, clock: FakeClock
) -> None:
    society = await Society.start(home, clock=clock, work=False)
    acked = [(await society.send(to="ada", text=f"acked {number}")).message_id for number in range(5)]
    if written:
        disk.fail_next_flush()
    else:
        disk.fail_next_commit(sqlite3.SQLITE_IOERR_FSYNC)

    with pytest.raises(StoreBroken):
        await society.send(to="ada", text="in doubt")

    assert isinstance(await asyncio.wait_for(asyncio.shield(society.broken), scaled_timeout(5)), StoreBroken)
    assert not healthy(society)
    with pytest.raises(StoreBroken):
        await society.send(to="ada", text="refused")
    await asyncio.wait_for(society.stop(), scaled_timeout(5))
    async with Society.open(home, clock=clock, work=False) as again:
        assert again.store.info.unclean
        found = await again.waiting("ada")
        assert [message.id for message in found[:5]] == acked
        assert [message.payload["text"] for message in found[5:]] == ["in doubt"] * written
        assert [violation async for violation in again.store.violations()] == []


async def test_writes_queued_behind_a_failed_flush_are_not_written_later(
    home: Path, disk: Disk, clock: FakeClock
) -> None:
    society = await Society.start(home, clock=clock, work=False)
    disk.hold_commits()
    first = asyncio.create_task(society.send(to="ada", text="first"))
    await asyncio.to_thread(disk.wait_for_commit)
    behind = asyncio.create_task(society.send(to="ada", text="behind"))
    await wait_for_queued(society, 1)
    disk.fail_next_commit(sqlite3.SQLITE_IOERR_FSYNC)
    disk.release_commits()

    outcomes = await asyncio.gather(first, behind, return_exceptions=True)

    assert [type(outcome) for outcome in outcomes] == [StoreBroken, StoreBroken]
    await asyncio.wait_for(society.stop(), scaled_timeout(5))
    async with Society.open(home, clock=clock, work=False) as again:
        assert await texts(again) == []


# Artifacts


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(params=["while writing", "on the flush", "on the rename"])
def full_folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No space for artifacts until the patch is undone."""
    with monkeypatch.context() as patch:
        match request.param:
            case "while writing":
                before = resource.getrlimit(resource.RLIMIT_FSIZE)
                patch.setattr(patch, "undo", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before))
                resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, before[1]))
            case "on the flush":
                patch.setattr(os, "fsync", full)
            case "on the rename":
                patch.setattr(Path, "replace", full)
        yield patch


async def test_an_upload_that_does_not_fit_leaves_no_artifact_and_no_bytes(
    home: Path, clock: FakeClock, full_folder: pytest.MonkeyPatch
) -> None:
    bytes_folder = home / "data" / "artifacts"

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"y" * 100_000

    async with Society.open(home, clock=clock, work=False) as society:
        with pytest.raises(StoreUnavailable) as refused:
            await society.artifacts.put(pieces(), "big.bin", key="big")
        assert refused.value.full
        full_folder.undo()

        assert [file for file in bytes_folder.rglob("*") if file.is_file()] == []
        with pytest.raises(Refused):
            await society.artifacts.describe("big")
        artifact = await society.artifacts.put(pieces(), "big.bin", key="big")
        await society.send(to="ada", text="here", attachments=[artifact.ref])
        assert len(await society.artifacts.read(artifact.ref)) == 1_000_000
