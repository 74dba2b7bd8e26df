"""The files of a society after each commit, flush and checkpoint, and the images that a power cut could leave."""

from __future__ import annotations

import asyncio
import bisect
import json
import random
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from coterie.messages import PERSON
from coterie.society import Society
from coterie.stores.sqlite.connection import PAGE_BYTES
from coterie.testing import FakeClock

from .disk import Change, Disk
from .fake_model import RandomModel, ToolEffects, fake_models
from .harness import scaled_timeout
from .scenarios import AGENTS, Client, make_home
from .witness import Note
from .workload import Approver

PAGE = PAGE_BYTES
WAL_HEADER, FRAME = 32, 24 + PAGE
SECTOR = 512

Content = tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True)
class DiskState:
    """Files and content just after a change."""

    change: Change
    db: bytes
    wal: bytes
    content: Content
    notes: int
    """How much somebody outside had noticed before."""


@dataclass(frozen=True, slots=True)
class Image:
    """Files after a crash."""

    how: str
    db: bytes
    wal: bytes
    allowed: tuple[Content, ...]
    """The contents that a start may find, oldest first."""
    notes: int = 0
    """How much somebody outside had noticed."""

    def write(self, data: Path) -> None:
        data.mkdir(parents=True)
        (data / "coterie.db").write_bytes(self.db)
        (data / "coterie.db-wal").write_bytes(self.wal)


def content(db: sqlite3.Connection) -> Content:
    """Messages, agents, artifacts, calls, histories and event count, for comparison."""
    if not db.execute("PRAGMA user_version").fetchone()[0]:
        return ()
    rows = db.execute(
        "SELECT seq, id, sender, recipient, state, in_seq, deliver_at, delivered_at, CAST(payload AS BLOB)"
        " FROM messages"
    ).fetchall()
    rows += db.execute("SELECT id, state, next_in_seq, waiting, delayed, turn_no FROM agents ORDER BY id").fetchall()
    rows += db.execute(
        "SELECT ref, sha256, message_seq FROM artifacts, attachments WHERE ref = artifact_ref"
    ).fetchall()
    rows += db.execute(
        "SELECT 'call', agent_id || '/' || turn_no || '/' || step_no || '/' || idx, state FROM calls"
    ).fetchall()
    rows += db.execute("SELECT agent_id, seq, turn_no, role, message_id, content, calls FROM history").fetchall()
    rows += db.execute("SELECT count(*), max(seq) FROM events").fetchall()
    return tuple(rows)


class Recording:
    """Records a society at every change while it sends, delays, delivers, withdraws and checkpoints."""

    def __init__(self, folder: Path, seed: int, steps: int) -> None:
        self._folder, self._rng = folder, random.Random(seed)
        self.states: list[DiskState] = []
        self.notes: list[Note] = []
        """What somebody outside knew."""
        self.problems: list[str] = []
        self._is_ended = False
        self.durable: Content = ()
        """What a power cut could not take back now."""
        self.make_home(folder)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch)
            asyncio.run(self._run(disk, steps))
        self.closed = (folder / "data" / "coterie.db").read_bytes()
        """The database after a graceful stop."""

    @staticmethod
    def make_home(folder: Path) -> None:
        make_home(folder)

    @property
    def checkpoints(self) -> int:
        return sum(before.db != after.db for before, after in pairwise(self.states))

    async def _run(self, disk: Disk, steps: int) -> None:
        clock = FakeClock()
        acknowledged: set[str] = set()
        late: list[str] = []
        disk.on_change = self._snapshot
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
                assert acknowledged <= {str(row[1]) for row in self.durable}
            disk.on_change = lambda *_: None

    def _snapshot(self, change: Change, db: sqlite3.Connection) -> None:
        data, last = self._folder / "data", self.states[-1] if self.states else None
        file, wal = (data / "coterie.db").read_bytes(), (data / "coterie.db-wal").read_bytes()
        found = content(db) if change == "commit" or last is None else last.content
        if last and last.db == file:
            file = last.db  # kept once
        if change != "commit" or (last and last.db is not file):  # a checkpoint within the commit flushes first
            self.durable = found
        self.states.append(DiskState(change, file, wal, found, len(self.notes)))

    def images(self, rng: random.Random) -> Iterator[Image]:
        """Yield images without end: for each change, parts of the writes since the last flush that may be on disk."""
        while True:
            flushed = self.states[0].wal
            possible = [self.states[0].content]
            for number, (before, after) in enumerate(pairwise(self.states), 2):
                # Somebody may have noticed more until the next change.
                notes = self.states[number].notes if number < len(self.states) else len(self.notes)
                if after.change == "commit":
                    if after.wal[:WAL_HEADER] != before.wal[:WAL_HEADER]:
                        # SQLite begins the log anew after a checkpoint, and flushes the new header first.
                        flushed = after.wal[:WAL_HEADER] + before.wal[WAL_HEADER:]
                    possible.append(after.content)
                    for image in _cut_logs(flushed, before, after, tuple(dict.fromkeys(possible)), rng):
                        yield replace(image, notes=notes)
                if after.change != "commit" or before.db is not after.db:
                    flushed, possible = after.wal, [after.content]
                    yield Image("commit flushed", before.db, flushed, (after.content,), notes)
                if before.db is not after.db:
                    for _ in range(4):
                        db = _scattered(before.db, after.db, 0, len(after.db), rng, PAGE)
                        yield Image("checkpoint cut", db, flushed, (after.content,), notes)


class WorkRecording(Recording):
    """Records agents at work, and checks at every observation from outside that it is durable already."""

    @staticmethod
    def make_home(folder: Path) -> None:
        make_home(folder)
        entry = {"id": "main", "baseURL": "http://127.0.0.1:9/v1", "model": "m"}
        (folder / "llmservices.json").write_text(json.dumps({"services": [entry]}))

    async def _run(self, disk: Disk, steps: int) -> None:
        disk.on_change = self._snapshot
        ToolEffects.witness = self  # type: ignore[assignment]
        model = RandomModel(self._rng, AGENTS, self)  # type: ignore[arg-type]
        with fake_models(lambda _: model):
            async with Society.open(self._folder) as society:
                disk.checkpoint_every(200)
                clients: list[Client] = [Client(society, self._rng, "c", self, pause=0.02)]  # type: ignore[arg-type]
                clients.append(Approver(society, self._rng, "p", self, pause=0.02))  # type: ignore[arg-type]
                tasks = [asyncio.create_task(client.work([])) for client in clients]
                tasks += [
                    asyncio.create_task(self._watch(society, steps // 2)),
                    asyncio.create_task(self._read(society)),
                ]
                async with asyncio.timeout(scaled_timeout(60)):
                    while len(self.states) < steps and not any(task.done() for task in tasks):
                        await asyncio.sleep(0.01)
                self._is_ended, disk.on_change = True, lambda *_: None
                for task in tasks:
                    task.cancel()
                for ended in await asyncio.gather(*tasks, return_exceptions=True):
                    assert isinstance(ended, asyncio.CancelledError), ended
        assert self.problems == []

    def note(self, **fact: Any) -> None:
        """Note what somebody outside knows from now on."""
        if self._is_ended:
            return
        durable = {row[1] for row in self.durable}
        if "acked" in fact and fact["id"] not in durable:
            self.problems.append("an acknowledged message could be lost")
        if fact.get("did") in ("put", "fire", "pay") and ("call", fact["key"], "started") not in self.durable:
            self.problems.append(f"{fact} acts for a plan that could be lost")
        if "question" in fact and fact["question"] not in durable:
            self.problems.append("a question was shown that could be lost")
        self.notes.append(fact)

    async def _watch(self, society: Society, after: int) -> None:
        """A client must be able to continue after the last event that it has seen."""
        while len(self.states) < after:  # a watcher lets more commits be flushed
            await asyncio.sleep(0.01)
        async with society.bus.watch(queue=100_000) as watcher:
            async for event in watcher:
                newest = self.durable[-1][1]
                assert isinstance(newest, int) and event.seq <= newest, "an event was shown that could be lost"

    async def _read(self, society: Society) -> None:
        """What the person reads stays."""
        while True:
            shown = {message.id for message in await society.waiting(PERSON)}
            assert shown <= {row[1] for row in self.durable}, "an answer was shown that could be lost"
            await asyncio.sleep(0.003)


def _cut_logs(
    flushed: bytes, before: DiskState, after: DiskState, possible: tuple[Content, ...], rng: random.Random
) -> Iterator[Image]:
    """Yield images after a commit that is not flushed. `flushed`: the log at the last flush."""
    start, end = _changed(flushed, after.wal)
    new, _ = _changed(before.wal, after.wal)
    for boundary in range(WAL_HEADER, end + 1, FRAME):
        if boundary >= max(start, new):
            log = _overlaid(flushed, after.wal, boundary)
            allowed = (after.content,) if boundary >= end else possible
            yield Image("log cut between frames", before.db, log, allowed)
    for _ in range(3):
        log = _overlaid(flushed, after.wal, rng.randint(start, end))
        yield Image("log cut anywhere", before.db, log, possible)
        log = _scattered(flushed, after.wal, start, end, rng)
        yield Image("log written out of order", before.db, log, possible)


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
