"""A full disk: no turn starts, nothing is lost, and no restart is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from coterie.config import Config, SocietyFolder, StoreSettings
from coterie.files import LOW_SPACE_BYTES, MIN_SPACE_BYTES, DiskMonitor
from coterie.stores.open import growing_folder
from coterie.testing import FakeClock
from coterie.testing.model_server import Says
from tests.agent.stage import each, stage

Leave = Callable[[int], None]


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Leave:
    """Returns a function that sets the free bytes of the disk."""

    def leave(free: int) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))

    leave(LOW_SPACE_BYTES)
    return leave


async def test_with_little_disk_space_no_turn_starts_and_running_turns_finish(
    tmp_path: Path, clock: FakeClock, leave: Leave, caplog: pytest.LogCaptureFixture
) -> None:
    may_answer = asyncio.Event()
    async with stage(tmp_path, agents="[agents.ada]\n[agents.bob]\n[agents.eve]\n", clock=clock) as here:
        here.server.default = each(ada=[Says("ada", gate=may_answer)], bob=["bob"], eve=["eve"])
        await here.say("go")
        await here.server.wait_for_request(1)
        leave(MIN_SPACE_BYTES - 1)
        while not any("no turn starts" in line for line in caplog.messages):  # a claim may still be under way
            await clock.advance(seconds=1)
        await here.say("go", to="bob")
        await here.say("go", to="eve")
        await clock.advance(seconds=2)
        may_answer.set()
        assert await here.texts() == ["ada"]
        await clock.advance(minutes=1)
        assert len(here.server.requests) == 1
        logged = [line for line in caplog.messages if "no turn starts" in line]

        leave(MIN_SPACE_BYTES)
        await clock.advance(seconds=2)
        assert set(await here.texts(3)) == {"ada", "bob", "eve"}
    assert len(logged) == 1 and f"fewer than {MIN_SPACE_BYTES:,} bytes" in logged[0]


async def test_free_space_is_checked_once_a_second_and_each_threshold_is_logged_once(
    tmp_path: Path, clock: FakeClock, leave: Leave, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "coterie.files")
    disk, seen = DiskMonitor(tmp_path, clock), []
    for free in (
        LOW_SPACE_BYTES,
        LOW_SPACE_BYTES - 1,
        MIN_SPACE_BYTES,
        MIN_SPACE_BYTES - 1,
        0,
        MIN_SPACE_BYTES,
        LOW_SPACE_BYTES,
    ):
        leave(free)
        before = (disk.is_low(), disk.is_full())
        await clock.advance(seconds=1)
        seen.append((disk.is_low(), disk.is_full()))
        assert before == (seen[-2] if len(seen) > 1 else (False, False))  # not checked again yet
    low, full = (True, False), (True, True)
    assert seen == [(False, False), low, low, full, full, low, (False, False)]
    assert [("no turn" in line, line.startswith("fewer than")) for line in caplog.messages] == [
        (False, True),
        (True, True),
        (False, True),
        (False, False),
    ]


async def test_a_missing_folder_does_not_count_as_a_full_disk(tmp_path: Path, clock: FakeClock) -> None:
    disk = DiskMonitor(tmp_path / "gone", clock)
    assert not disk.is_low() and not disk.is_full()


@pytest.mark.parametrize(
    ("store", "folder"),
    [
        (StoreSettings(), "data"),
        (StoreSettings(url="postgresql://x/y"), None),
        (StoreSettings(url="postgresql://x/y", artifacts="files"), "files"),
    ],
)
def test_the_monitored_disk_is_the_one_with_the_data_of_the_society(
    tmp_path: Path, store: StoreSettings, folder: str | None
) -> None:
    found = growing_folder(SocietyFolder(tmp_path), Config(store=store))
    assert found == (tmp_path / folder if folder else None)
