"""A disk that fills up: nobody begins what could not be written down, and nobody has to start anything again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from coterie.config import Config, SocietyFolder, Storage
from coterie.files import HARD, LOW, Disk
from coterie.stores.open import filled_by
from coterie.testing import FakeClock
from coterie.testing.replies import Says
from tests.agent.stage import each, stage

Leave = Callable[[int], None]


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Leave:
    """Leaves so many bytes free."""

    def leave(free: int) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))

    leave(LOW)
    return leave


async def test_with_hardly_any_disk_left_no_agent_begins_anything_and_who_has_begun_may_end(
    tmp_path: Path, clock: FakeClock, leave: Leave, caplog: pytest.LogCaptureFixture
) -> None:
    may_answer = asyncio.Event()
    async with stage(tmp_path, agents="[agents.ada]\n[agents.bob]\n[agents.eve]\n", clock=clock) as here:
        here.server.default = each(ada=[Says("ada", gate=may_answer)], bob=["bob"], eve=["eve"])
        await here.say("go")
        await here.server.asked(1)
        leave(HARD - 1)
        await clock.advance(seconds=2)
        await here.say("go", to="bob")
        await here.say("go", to="eve")
        await clock.advance(seconds=2)
        may_answer.set()
        assert await here.texts() == ["ada"]
        await clock.advance(minutes=1)
        assert len(here.server.requests) == 1
        told = [line for line in caplog.messages if "no agent begins anything" in line]

        leave(HARD)
        await clock.advance(seconds=2)
        assert set(await here.texts(3)) == {"ada", "bob", "eve"}
    assert len(told) == 1 and f"fewer than {HARD:,} bytes" in told[0]


async def test_one_look_a_second_tells_of_both_marks_and_each_is_logged_once(
    tmp_path: Path, clock: FakeClock, leave: Leave, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "coterie.files")
    disk, seen = Disk(tmp_path, clock), []
    for free in (LOW, LOW - 1, HARD, HARD - 1, 0, HARD, LOW):
        leave(free)
        before = (disk.is_low(), disk.is_full())
        await clock.advance(seconds=1)
        seen.append((disk.is_low(), disk.is_full()))
        assert before == (seen[-2] if len(seen) > 1 else (False, False))  # it has not looked again
    low, full = (True, False), (True, True)
    assert seen == [(False, False), low, low, full, full, low, (False, False)]
    assert [("no agent" in line, line.startswith("fewer than")) for line in caplog.messages] == [
        (False, True),
        (True, True),
        (False, True),
        (False, False),
    ]


async def test_a_folder_that_is_gone_says_nothing_about_its_disk(tmp_path: Path, clock: FakeClock) -> None:
    disk = Disk(tmp_path / "gone", clock)
    assert not disk.is_low() and not disk.is_full()


@pytest.mark.parametrize(
    ("store", "folder"),
    [
        (Storage(), "data"),
        (Storage(url="postgresql://x/y"), None),
        (Storage(url="postgresql://x/y", artifacts="files"), "files"),
    ],
)
def test_the_disk_is_that_of_the_folder_which_grows_with_the_society(
    tmp_path: Path, store: Storage, folder: str | None
) -> None:
    found = filled_by(SocietyFolder(tmp_path), Config(store=store))
    assert found == (tmp_path / folder if folder else None)
