"""Disk images of power cuts and bit rot: each has a committed state or is detected as damaged."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from coterie.clock import Clock
from coterie.errors import StoreError, StoreUnusable
from coterie.store import Page
from coterie.stores.sqlite import SqliteStore
from coterie.testing import FakeClock

from .recording import FRAME, PAGE, WAL_HEADER, Content, DiskState, Image, Recording, WorkRecording, content
from .verifier import find_violations, open_database
from .witness import Witness, read_notes
from .work_verifier import wrong_effects, wrong_histories
from .workload import run_until_idle


@pytest.fixture(scope="module")
def seed() -> int:
    return int(os.environ.get("COTERIE_FAULT_SEED") or random.randrange(1 << 32))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Recording:
    made = Recording(tmp_path_factory.mktemp("recorded") / "society", seed, 70)
    assert len(made.states) >= 50
    assert made.checkpoints >= 3
    return made


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, seed: int) -> WorkRecording:
    made = WorkRecording(tmp_path_factory.mktemp("worked") / "society", seed, 300)
    changes = Counter(state.change for state in made.states)
    assert changes["commit"] - changes["flush"] >= 30, changes
    assert made.checkpoints >= 3
    return made


def replay(seed: int) -> str:
    return f"COTERIE_FAULT_SEED={seed} python -m pytest tests/faults/test_crash_images.py"


async def found_in(image: Image, folder: Path, clock: Clock) -> Content:
    """Content that the next start finds, after its checks."""
    shutil.rmtree(folder, ignore_errors=True)
    image.write(folder / "data")
    store = await SqliteStore.open(folder / "data", clock)
    assert [violation async for violation in store.violations()] == []
    await store.close()
    with open_database(folder) as db:
        return content(db)


async def open_images(
    recording: Recording, seed: int, folder: Path, clock: Clock, step: int, count: int
) -> Counter[str]:
    seen: Counter[str] = Counter()
    images = recording.images(random.Random(seed))
    for image in islice(images, 0, count * step, step):
        found = await found_in(image, folder / "image", clock)
        assert found in image.allowed, f"{image.how}: neither what was committed before nor after; {replay(seed)}"
        seen[image.how] += 1
        seen["rolled back" if found != image.allowed[-1] else "complete"] += 1
    return seen


@pytest.mark.slow
async def test_a_power_cut_leaves_the_state_of_one_commit(
    recording: Recording, seed: int, quick_folder: Path, clock: FakeClock
) -> None:
    seen = await open_images(recording, seed, quick_folder, clock, step=3, count=300)

    assert min(seen[how] for how in ("log cut between frames", "log cut anywhere", "log written out of order")) >= 30
    assert min(seen["rolled back"], seen["complete"]) >= 30, seen


@pytest.mark.full
async def test_2000_power_cuts_each_leave_the_state_of_one_commit(
    recording: Recording, seed: int, quick_folder: Path, clock: FakeClock
) -> None:
    seen = await open_images(recording, seed, quick_folder, clock, step=1, count=2_000)

    assert sum(seen[how] for how in ("rolled back", "complete")) == 2_000
    assert seen["checkpoint cut"] >= 20, seen
    assert min(seen["rolled back"], seen["complete"]) >= 200, seen


@pytest.mark.slow
async def test_a_power_cut_while_agents_work_leaves_the_state_of_a_commit_since_the_last_flush(
    work: WorkRecording, seed: int, quick_folder: Path, clock: FakeClock
) -> None:
    seen = await open_images(work, seed, quick_folder, clock, step=19, count=90)

    assert min(seen["rolled back"], seen["complete"]) >= 3, seen


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(150, marks=pytest.mark.full)])
async def test_after_a_power_cut_no_acknowledged_message_is_lost_and_no_call_is_repeated(
    count: int, work: WorkRecording, seed: int, quick_folder: Path
) -> None:
    rng = random.Random(seed)
    images = [image for image in islice(work.images(rng), 4_000) if len(image.allowed) > 1]
    for number, image in enumerate(rng.sample(images, count)):
        home = quick_folder / str(number) / "society"
        work.make_home(home)
        image.write(home / "data")
        witness = Witness(home.parent / "witness")
        for note in work.notes[: image.notes]:
            witness.note(**note)

        await run_until_idle(home, seed, f"after cut {number}", witness)

        witness.close()
        notes = read_notes(home.parent / "witness")
        with open_database(home) as db:
            db.row_factory = sqlite3.Row
            assert wrong_effects(db, notes) == wrong_histories(db) == find_violations(db) == [], replay(seed)
            stored = {row["id"] for row in db.execute("SELECT id FROM messages")}
        assert {note["id"] for note in notes if "acked" in note} <= stored, replay(seed)
        # An agent that has not read anything yet has no request.
        assert [error for error in notes[-1]["violations"] if "at least one message" not in error] == []


# Bit rot

FLIPS = [40, pytest.param(400, marks=pytest.mark.full)]


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with one random bit flipped."""
    return flipped_at(data, rng.randrange(len(data)), rng)


def flipped_at(data: bytes, position: int, rng: random.Random) -> bytes:
    image = bytearray(data)
    image[position] ^= 1 << rng.randrange(8)
    return bytes(image)


def read_positions(state: DiskState) -> list[int]:
    """Where the pages begin that are read from the database, because the write-ahead log has no newer ones."""
    logged = {int.from_bytes(state.wal[at : at + 4]) for at in range(WAL_HEADER, len(state.wal), FRAME)}
    return [at for at in range(0, len(state.db), PAGE) if at // PAGE + 1 not in logged]


async def detected_by(folder: Path, clock: Clock) -> str:
    """What detects the damage: the start, a read, or the full check. Empty: nothing."""
    try:
        store = await SqliteStore.open(folder / "data", clock)
    except StoreError as error:
        assert "restore" in str(error) or "move it away" in str(error), error
        return "the start"
    try:
        if [violation async for violation in store.violations()]:
            return "the invariants"
        page: Page | None = Page(limit=200)
        while page and (some := await store.messages(page)):
            page = Page(before=some[-1].seq, limit=200)
    except StoreError:
        return "a read"
    finally:
        await store.close()
    with open_database(folder) as db:
        return "a check of the file" if find_violations(db) else ""


async def rot(image: Image, folder: Path, clock: Clock) -> tuple[str, Content]:
    shutil.rmtree(folder, ignore_errors=True)
    image.write(folder / "data")
    noticed = await detected_by(folder, clock)
    if noticed:
        return noticed, ()
    with open_database(folder) as db:
        return "", content(db)


def differing_values(one: Content, other: Content) -> int:
    if len(one) != len(other):
        return abs(len(one) - len(other)) * 100
    return sum(a != b for row, twin in zip(one, other, strict=True) for a, b in zip(row, twin, strict=True))


@pytest.mark.parametrize("flips", FLIPS)
async def test_a_flipped_bit_in_the_write_ahead_log_is_detected_or_leaves_an_earlier_commit(
    flips: int, recording: Recording, seed: int, quick_folder: Path, clock: FakeClock
) -> None:
    # SQLite ignores the log from the first frame with a wrong checksum on. Each checksum
    # covers all frames before it, so the rest is always a committed state.
    rng = random.Random(seed)
    committed = {moment.content for moment in recording.states} | {()}
    for _ in range(flips):
        moment = rng.choice(recording.states)
        image = Image("bit rot", moment.db, flipped(moment.wal, rng), ())
        noticed, found = await rot(image, quick_folder / "image", clock)
        assert noticed or found in committed, f"a state that never was; {replay(seed)}"


@pytest.mark.parametrize("stopped", ["in order", "by a crash"])
@pytest.mark.parametrize("flips", FLIPS)
async def test_a_flipped_bit_in_the_database_is_detected_or_changes_one_value_only(
    flips: int, stopped: str, recording: Recording, seed: int, quick_folder: Path, clock: FakeClock
) -> None:
    rng, seen = random.Random(seed), Counter[str]()
    last = recording.states[-1]
    for _ in range(flips):
        if stopped == "in order":
            image = Image("bit rot", flipped(recording.closed, rng), b"", ())
        else:
            page = rng.choice(read_positions(last))
            image = Image("bit rot", flipped_at(last.db, page + rng.randrange(PAGE), rng), last.wal, ())
        noticed, found = await rot(image, quick_folder / "image", clock)
        seen[noticed] += 1
        assert noticed or differing_values(found, last.content) <= 1, f"silently another society; {replay(seed)}"

    assert flips - seen[""] >= flips // 40, f"hardly any flip was noticed: {seen}"


@pytest.mark.parametrize("value", [b"", b"\xff", b"x", b"-1", b"9" * 30])
async def test_a_start_on_a_damaged_database_header_fails_with_advice_to_restore(
    value: bytes, recording: Recording, quick_folder: Path, clock: FakeClock
) -> None:
    outcomes = Counter[str]()
    for number in range(3):
        folder = quick_folder / str(number)
        Image("damage", recording.closed, b"", ()).write(folder / "data")
        with open_database(folder) as db:
            row = "(SELECT key FROM meta ORDER BY key LIMIT 1 OFFSET ?)"
            spoilt = db.execute(f"UPDATE meta SET value = CAST(? AS TEXT) WHERE key = {row}", (value, number))
            assert spoilt.rowcount == 1
            db.commit()
        outcomes[await detected_by(folder, clock)] += 1

    assert sum(outcomes.values()) == 3
    assert outcomes["the start"] or value != b"\xff"


async def test_after_a_crash_a_start_on_damaged_messages_fails_with_advice_to_restore(
    recording: Recording, quick_folder: Path, clock: FakeClock
) -> None:
    data = quick_folder / "data"
    Image("damage", recording.closed, b"", ()).write(data)
    with open_database(quick_folder) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'messages'").fetchone()
        db.execute("UPDATE meta SET value = '0' WHERE key = 'clean'")
        db.commit()
    damaged = bytearray((data / "coterie.db").read_bytes())
    damaged[(page - 1) * PAGE + PAGE // 2 : page * PAGE] = bytes(PAGE // 2)
    (data / "coterie.db").write_bytes(damaged)

    with pytest.raises(StoreUnusable, match=r"damaged.*coterie restore"):
        await SqliteStore.open(data, clock)

    assert (data / "coterie.db").read_bytes() == damaged
