"""The files of a society after each commit, and the images that a power cut in between could leave on the disk."""

from __future__ import annotations

import asyncio
import bisect
import random
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from coterie.society import Society
from coterie.testing import FakeClock

from .disk import Disk
from .scenarios import AGENTS, make_home

PAGE = 4096
WAL_HEADER, FRAME = 32, 24 + PAGE
SECTOR = 512

Content = tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True)
class CommitState:
    """Files and content just after a commit."""

    db: bytes
    wal: bytes
    content: Content


@dataclass(frozen=True, slots=True)
class Image:
    """Files after a crash."""

    how: str
    db: bytes
    wal: bytes
    allowed: tuple[Content, ...]
    """The contents that a start may find."""

    def write(self, data: Path) -> None:
        data.mkdir(parents=True)
        (data / "coterie.db").write_bytes(self.db)
        (data / "coterie.db-wal").write_bytes(self.wal)


def content(db: sqlite3.Connection) -> Content:
    """Messages, agents, artifacts and event count, for comparison."""
    if not db.execute("PRAGMA user_version").fetchone()[0]:
        return ()
    rows = db.execute(
        "SELECT seq, id, sender, recipient, state, in_seq, deliver_at, delivered_at, CAST(payload AS BLOB)"
        " FROM messages"
    ).fetchall()
    rows += db.execute("SELECT id, state, next_in_seq, waiting, delayed FROM agents ORDER BY id").fetchall()
    rows += db.execute(
        "SELECT ref, sha256, message_seq FROM artifacts, attachments WHERE ref = artifact_ref"
    ).fetchall()
    rows += db.execute("SELECT count(*), max(seq) FROM events").fetchall()
    return tuple(rows)


class Recording:
    """Records a society at every commit while it sends, delays, delivers, withdraws and checkpoints."""

    def __init__(self, folder: Path, seed: int, steps: int) -> None:
        self._folder, self._rng = folder, random.Random(seed)
        self.states: list[CommitState] = []
        self.checkpoints = 0
        make_home(folder)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch)
            asyncio.run(self._run(disk, steps))
        self.closed = (folder / "data" / "coterie.db").read_bytes()
        """The database after a graceful stop."""

    async def _run(self, disk: Disk, steps: int) -> None:
        clock = FakeClock()
        acknowledged: set[str] = set()
        late: list[str] = []
        disk.on_commit = self._snapshot
        async with Society.open(self._folder, clock=clock, work=False) as society:
            disk.checkpoint_every(60)
            for number in range(steps):
                match self._rng.randrange(6):
                    case 0 | 1 | 2:
                        sent = [
                            society.send(
                                to=self._rng.choice(AGENTS), text=f"{number} {n}" + "." * self._rng.randrange(900)
                            )
                            for n in range(self._rng.randint(1, 4))
                        ]
                        acknowledged |= {receipt.message_id for receipt in await asyncio.gather(*sent)}
                    case 3:
                        receipt = await society.send(
                            to="ada", text=f"late {number}", delay_ms=self._rng.randint(1, 4000)
                        )
                        acknowledged.add(receipt.message_id)
                        late.append(receipt.message_id)
                    case 4:
                        await clock.advance(seconds=1)
                    case 5 if late:
                        await society.bus.withdraw(late.pop())
                assert acknowledged <= {str(row[1]) for row in self.states[-1].content}
            disk.on_commit = lambda _: None

    def _snapshot(self, db: sqlite3.Connection) -> None:
        data = self._folder / "data"
        state = CommitState((data / "coterie.db").read_bytes(), (data / "coterie.db-wal").read_bytes(), content(db))
        if self.states and self.states[-1].db != state.db:
            self.checkpoints += 1
        self.states.append(state)

    def images(self, rng: random.Random) -> Iterator[Image]:
        """Yield images without end: for each commit, parts of its writes that may have reached the disk."""
        while True:
            for before, after in zip(self.states, self.states[1:], strict=False):
                yield from _between(before, after, rng)


def _between(before: CommitState, after: CommitState, rng: random.Random) -> Iterator[Image]:
    """Yield images between two commits. A commit is flushed to the log, then a checkpoint may copy pages."""
    either, done = (before.content, after.content), (after.content,)
    start, end = _changed(before.wal, after.wal)
    for boundary in range(WAL_HEADER, end + 1, FRAME):
        if boundary >= start:
            log = _overlaid(before.wal, after.wal, boundary)
            yield Image("log cut between frames", before.db, log, done if boundary >= end else either)
    for _ in range(3):
        log = _overlaid(before.wal, after.wal, rng.randint(start, end))
        yield Image("log cut anywhere", before.db, log, either)
        log = _scattered(before.wal, after.wal, start, end, rng)
        yield Image("log written out of order", before.db, log, either)
    yield Image("commit flushed", before.db, after.wal, done)
    if before.db != after.db:
        for _ in range(4):
            db = _scattered(before.db, after.db, 0, len(after.db), rng, PAGE)
            yield Image("checkpoint cut", db, after.wal, done)


def _changed(old: bytes, new: bytes) -> tuple[int, int]:
    """Return the range of bytes that a commit changed."""
    common = min(len(old), len(new))
    start = _longest(common, lambda length: old[:length] == new[:length])
    if len(new) > len(old):
        return start, len(new)
    return start, common - _longest(common - start, lambda length: old[common - length :] == new[common - length :])


def _longest(most: int, equal: Callable[[int], bool]) -> int:
    """The greatest length up to `most` for which `equal` holds. Bisects, because comparing slices is fast."""
    return bisect.bisect_left(range(1, most + 1), True, key=lambda length: not equal(length))


def _overlaid(old: bytes, new: bytes, upto: int) -> bytes:
    return new[:upto] + old[upto:]


def _scattered(old: bytes, new: bytes, start: int, end: int, rng: random.Random, piece: int = SECTOR) -> bytes:
    """Apply a random half of the written sectors: without a flush a disk keeps no order."""
    image = bytearray(old.ljust(len(new), b"\0"))
    for at in range(start - start % piece, end, piece):
        if rng.random() < 0.5:
            image[at : at + piece] = new[at : at + piece]
    return bytes(image)
