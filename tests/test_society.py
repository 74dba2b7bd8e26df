"""Opening, stopping and reopening a society in its folder."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

import pytest

from coterie import Society
from coterie.errors import ConfigError, StoreOwned, StoreUnavailable, StoreUnusable
from coterie.testing import FakeClock
from tests.agent.tool_calls import wait_until
from tests.engines import Engine

HOUR = 3_600_000


async def test_a_new_folder_gets_templates_and_a_private_data_folder(tmp_path: Path) -> None:
    async with Society.open(tmp_path / "new", work=False) as society:
        assert [agent.id for agent in await society.store.agents()] == ["assistant", "user"]
    assert (tmp_path / "new/coterie.toml").exists() and (tmp_path / "new/llmservices.json").exists()
    assert (tmp_path / "new/data").stat().st_mode & 0o777 == 0o700


async def test_reads_after_the_stop_are_refused_as_sends_are(engine: Engine, tmp_path: Path, clock: FakeClock) -> None:
    store = await engine.open(tmp_path, clock)
    await store.close()

    with pytest.raises(StoreUnavailable, match="the society is stopping"):
        await store.pause_all()
    with pytest.raises(StoreUnavailable, match="the society is stopping"):
        await store.message("any")


async def test_a_start_that_is_cancelled_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "coterie.toml").write_text(
        f"[mcp.silent]\ncommand = {json.dumps(sys.executable)}\nargs = {json.dumps(['-c', 'input(); input()'])}\n"
    )
    starting = asyncio.create_task(Society.start(tmp_path))
    await wait_until(lambda: "coterie-mcp-silent" in names_of_tasks())
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting

    assert names_of_tasks() == []


def names_of_tasks() -> list[str]:
    return [name for task in asyncio.all_tasks() if (name := task.get_name()).startswith("coterie-")]


async def test_files_of_the_owner_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "coterie.toml").write_text("[agents.ada]\n")
    async with Society.open(tmp_path, work=False):
        pass
    assert (tmp_path / "coterie.toml").read_text() == "[agents.ada]\n"
    assert not (tmp_path / "llmservices.json").exists()


async def test_messages_and_schedule_survive_a_restart_when_the_owner_keeps_them(
    tmp_path: Path, clock: FakeClock
) -> None:
    (tmp_path / "coterie.toml").write_text('[shutdown]\ndelayed = "keep"\n')
    async with Society.open(tmp_path, clock=clock, work=False) as society:
        await society.send(to="assistant", text="now")
        await society.send(to="assistant", text="later", delay_ms=HOUR)
    async with Society.open(tmp_path, clock=clock, work=False) as society:
        assert [m.payload["text"] for m in await society.waiting("assistant")] == ["now"]
        await clock.advance(hours=1)
        (_, later) = await society.waiting("assistant")
        assert later.payload["text"] == "later" and not later.early


async def test_messages_due_while_stopped_are_delivered_in_order_at_the_next_start(
    tmp_path: Path, clock: FakeClock
) -> None:
    (tmp_path / "coterie.toml").write_text('[shutdown]\ndelayed = "keep"\n')
    async with Society.open(tmp_path, clock=clock, work=False) as society:
        for text, delay in (("b", 2000), ("a", 1000), ("c", 2000)):
            await society.send(to="assistant", text=text, delay_ms=delay)
    await clock.jump(days=3)
    async with Society.open(tmp_path, clock=clock, work=False) as society:
        await clock.advance()
        assert [m.payload["text"] for m in await society.waiting("assistant")] == ["a", "b", "c"]


async def test_by_default_a_stop_delivers_delayed_messages_marked_early(tmp_path: Path, clock: FakeClock) -> None:
    async with Society.open(tmp_path, clock=clock, work=False) as society:
        receipt = await society.send(to="assistant", text="friday", delay_ms=HOUR)
    async with Society.open(tmp_path, clock=clock, work=False) as society:
        (message,) = await society.waiting("assistant")
        assert message.early and message.deliver_at == receipt.scheduled_delivery_time


async def test_a_stop_logs_how_many_delayed_messages_it_delivers_early(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """002-4.1, 002-4.3"""
    caplog.set_level(logging.INFO)
    async with Society.open(tmp_path, clock=clock, work=False) as society:
        for number in range(3):
            await society.send(to="assistant", text=str(number), delay_ms=HOUR)
    assert "delivering 3 delayed messages early" in caplog.text
    async with Society.open(tmp_path, clock=clock, work=False) as society:
        assert len(await society.waiting("assistant")) == 3


async def test_a_forced_exit_warns_about_delayed_messages_and_counts_them(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """002-4.2, 002-4.3"""
    society = await Society.start(tmp_path, clock=clock, work=False)
    for number in range(2):
        await society.send(to="assistant", text=str(number), delay_ms=HOUR)
    await society.abandon()
    (warning,) = [record for record in caplog.records if "forced exit" in record.getMessage()]
    assert warning.levelno == logging.WARNING
    assert "2 delayed messages were not delivered" in warning.getMessage()
    async with Society.open_read_only(tmp_path, clock=clock) as society:
        assert await society.bus.delayed_count() == 2


async def test_a_second_society_in_the_same_folder_is_refused_with_the_owners_pid(tmp_path: Path) -> None:
    import os

    async with Society.open(tmp_path, work=False) as society:
        with pytest.raises(StoreOwned, match=f"in use by process {os.getpid()}"):
            await Society.start(tmp_path)
        await society.send(to="assistant", text="still works")


async def test_a_wrong_configuration_stops_the_start_and_leaves_the_folder_free(tmp_path: Path) -> None:
    (tmp_path / "coterie.toml").write_text("[server]\nport = 0\n")
    with pytest.raises(ConfigError):
        await Society.start(tmp_path)
    (tmp_path / "coterie.toml").write_text("")
    async with Society.open(tmp_path, work=False):
        pass


async def test_opening_a_folder_that_cannot_be_created_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable, match="cannot be created or written"):
        await Society.start(tmp_path / "file" / "society")


async def test_times_never_go_back_when_the_clock_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    await clock.advance(days=1)
    async with Society.open(tmp_path, clock=clock, work=False) as society:
        first = await society.send(to="assistant", text="tomorrow")
    async with Society.open(tmp_path, clock=FakeClock(), work=False) as society:
        second = await society.send(to="assistant", text="yesterday")
        messages = [await society.store.message(receipt.message_id) for receipt in (first, second)]
    assert messages[0] and messages[1] and messages[0].created_at <= messages[1].created_at
    assert "the clock is behind the last run by more than five minutes" in caplog.text


async def test_an_unclean_stop_is_checked_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import sqlite3

    async with Society.open(tmp_path, work=False) as society:
        await society.send(to="assistant", text="x")
    db = sqlite3.connect(tmp_path / "data/coterie.db")
    db.execute("UPDATE meta SET value = '0' WHERE key = 'clean'")
    db.commit()
    db.close()
    caplog.set_level(logging.WARNING)
    async with Society.open(tmp_path, work=False) as society:
        assert society.store.info.unclean
    assert "the last run did not stop cleanly" in caplog.text


async def test_postgres_without_its_package_is_refused_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.stores.open.find_spec", lambda _: None)
    (tmp_path / "coterie.toml").write_text('[store]\nurl = "postgresql://me@127.0.0.1/society"\n')
    with pytest.raises(ConfigError, match="PostgreSQL needs a package"):
        await Society.start(tmp_path)


async def test_an_unreachable_postgres_gives_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "coterie.toml").write_text('[store]\nurl = "postgresql://me@127.0.0.1:1/society"\n')
    with pytest.raises(StoreUnusable, match=r"cannot be used \(Connection refused\): no server listens there"):
        await Society.start(tmp_path)
