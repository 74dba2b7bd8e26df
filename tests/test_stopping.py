"""Store errors in background tasks and in each step of a stop: turns are released and the store is closed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coterie.agent.mcp import McpServers
from coterie.agent.toolbox import Toolbox
from coterie.agent_runtime import AgentRuntime
from coterie.bus import MessageBus
from coterie.errors import StoreUnavailable
from coterie.llm.gateway import ModelGateway
from coterie.retention import RetentionService
from coterie.society import Society
from coterie.stores.sql.store import SqlStore
from coterie.testing import FakeClock, ModelServer
from coterie.testing.model_server import Calls, Says
from tests.engines import Engine, Postgres
from tests.faults.harness import scaled_timeout

LOST = StoreUnavailable("the database went away for a moment")


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer() as server:
        yield server


@pytest.fixture
def home(tmp_path: Path, server: ModelServer, engine: Engine) -> Path:
    url = f'[store]\nurl = "{engine.url(tmp_path)}"\n' if isinstance(engine, Postgres) else ""
    (tmp_path / "coterie.toml").write_text(f"{url}[shutdown]\ndrain_seconds = 0\n[agents.ada]\n")
    services = [{"id": "main", "baseURL": server.base_url, "model": "m"}]
    (tmp_path / "llmservices.json").write_text(json.dumps({"services": services}))
    return tmp_path


def claims(engine: Engine, home: Path) -> list[tuple[Any, ...]]:
    """State, worker and crash count of Ada in the database."""
    folder = home if engine.name == "postgres" else home / "data"
    with engine.behind(folder) as db:
        return [tuple(row) for row in db.execute("SELECT state, worker, crashes FROM agents WHERE id = 'ada'")]


async def next_answer(society: Society) -> str:
    async with asyncio.timeout(scaled_timeout(20)):
        return str((await anext(society.inbox())).payload["text"])


async def test_pruning_retries_after_a_store_error_and_a_stop_releases_turns(
    home: Path, engine: Engine, server: ModelServer, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []

    async def prune(_: RetentionService, **__: object) -> None:
        runs.append("run")
        if len(runs) < 3:
            raise LOST

    monkeypatch.setattr(RetentionService, "prune", prune)
    monkeypatch.setattr("coterie.retention.RUN_INTERVAL", timedelta(seconds=20))  # an hour has 3,600 sweeps
    held = asyncio.Event()
    server.script(Says("here"), Says("never said", gate=held), Says("after the restart"))
    society = await Society.start(home, clock=clock)
    await clock.advance(seconds=20)
    await society.send(to="ada", text="are you there?")
    assert await next_answer(society) == "here"
    await clock.advance(seconds=20)
    assert len(runs) >= 3, "pruning continues after two errors"

    await society.send(to="ada", text="a long question")
    await server.wait_for_request(2)
    await society.stop()

    assert claims(engine, home) == [("llm", None, 0)]
    held.set()


def fails(error: Exception) -> Callable[..., Any]:
    async def failing(*_: object, **__: object) -> Any:
        raise error

    return failing


STEPS: dict[str, tuple[type, str]] = {
    "stop pruning": (RetentionService, "stop"),
    "claim no more": (AgentRuntime, "stop_claiming"),
    "see whether others run": (SqlStore, "is_only_process"),
    "stop deliveries": (MessageBus, "stop"),
    "give up deliveries": (MessageBus, "abandon"),
    "count delayed messages": (SqlStore, "delayed_count"),
    "close MCP servers": (McpServers, "close"),
    "stop tools": (Toolbox, "close"),
    "close models": (ModelGateway, "close"),
    "close the relay": (Society, "_close_relay"),
}


@pytest.mark.parametrize("stop", [Society.stop, Society.abandon])
@pytest.mark.parametrize("step", STEPS)
async def test_if_any_step_of_a_stop_fails_turns_are_released_and_the_store_is_closed(
    step: str,
    stop: Callable[[Society], Any],
    home: Path,
    engine: Engine,
    server: ModelServer,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = asyncio.Event()
    server.script(Says("never said", gate=held), Says("after the restart"))
    society = await Society.start(home, clock=clock)
    await society.send(to="ada", text="a question")
    await server.wait_for_request(1)
    error = OSError(f"cannot {step}")
    with monkeypatch.context() as patch:
        patch.setattr(*STEPS[step], fails(error))
        try:
            await stop(society)
        except OSError as raised:
            assert raised is error

    assert claims(engine, home) == [("llm", None, 0)]
    held.set()
    async with Society.open(home, clock=clock) as again:
        assert await next_answer(again) == "after the restart"


async def test_the_first_error_of_a_stop_is_raised_after_the_last_step_and_the_others_are_logged(
    home: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    society = await Society.start(home, clock=clock)
    first, second = OSError("first"), ValueError("second")
    with monkeypatch.context() as patch:
        patch.setattr(MessageBus, "stop", fails(first))
        patch.setattr(ModelGateway, "close", fails(second))
        with pytest.raises(OSError, match="first"):
            await society.stop()
    logged = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert logged[:2] == ["first", "second"]
    async with Society.open(home, clock=clock):
        pass


async def test_a_cancelled_stop_still_releases_turns_and_closes_the_store(
    home: Path, engine: Engine, server: ModelServer, clock: FakeClock
) -> None:
    (home / "coterie.toml").write_text((home / "coterie.toml").read_text().replace("drain_seconds = 0", ""))
    held = asyncio.Event()
    server.script(Says("never said", gate=held))
    society = await Society.start(home, clock=clock)
    await society.send(to="ada", text="a question")
    await server.wait_for_request(1)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await society.stop()

    assert claims(engine, home) == [("llm", None, 0)]
    held.set()
    async with Society.open(home, clock=clock, work=False):
        pass


async def test_turns_are_released_even_if_the_store_fails_once(
    home: Path, engine: Engine, server: ModelServer, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = asyncio.Event()
    server.script(Says("never said", gate=held))
    society = await Society.start(home, clock=clock)
    await society.send(to="ada", text="a question")
    await server.wait_for_request(1)
    release, failures = SqlStore.release_claims, [LOST]

    async def once(self: SqlStore, *args: Any, **options: Any) -> None:
        if failures:
            raise failures.pop()
        await release(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(SqlStore, "release_claims", once)
        await society.stop()

    assert claims(engine, home) == [("llm", None, 0)]
    held.set()


async def test_watchers_get_events_again_after_an_unexpected_error(
    home: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Society.open(home, clock=clock, work=False) as society:
        events, failures = type(society.store).events, [RuntimeError("a bug")]

        async def once(self: SqlStore, *args: Any, **options: Any) -> Any:
            if failures:
                raise failures.pop()
            return await events(self, *args, **options)

        async with society.bus.watch() as watcher:
            monkeypatch.setattr(type(society.store), "events", once)
            await society.send(to="ada", text="hello")
            await clock.advance(seconds=3)
            async with asyncio.timeout(scaled_timeout(20)):
                assert (await anext(watcher)).kind
    assert any(record.levelno == logging.ERROR and "event log" in record.getMessage() for record in caplog.records)


async def test_if_the_address_file_cannot_be_written_the_society_stops_cleanly(
    home: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.cli import server

    monkeypatch.setattr(server, "greet", fails(BrokenPipeError("closed pipe")))
    with pytest.raises(BrokenPipeError):
        await server.run_server(server.ServeOptions(folder=home))
    if engine.name == "sqlite":
        with engine.behind(home / "data") as db:
            assert db.execute("SELECT value FROM meta WHERE key = 'clean'").fetchone()[0] == "1"
    async with Society.open(home, work=False):
        pass


@pytest.mark.parametrize("policy", ["deliver", "keep"])
async def test_a_delayed_message_sent_while_turns_drain_is_delivered_early_or_counted(
    home: Path,
    engine: Engine,
    server: ModelServer,
    clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
    policy: str,
) -> None:
    """The model lets ada send a reminder after the stop has begun."""
    caplog.set_level(logging.INFO)
    settings = (home / "coterie.toml").read_text().replace("drain_seconds = 0", f'delayed = "{policy}"')
    (home / "coterie.toml").write_text(f"{settings}[agents.bob]\n")
    held = asyncio.Event()
    reminder = {"to": "user", "payload": {"text": "wake up"}, "delayMs": 3_600_000}
    server.script(Says(calls=(Calls("send_message", reminder),), gate=held), Says("done"))
    society = await Society.start(home, clock=clock)
    await society.send(to="bob", text="tomorrow", delay_ms=7_200_000)
    await society.send(to="ada", text="remind me twice")
    await server.wait_for_request(1)
    store, early = society.store, list[int]()

    async def look(count: int) -> None:
        early.append(count)
        early.append(await store.delayed_count())

    stopping = asyncio.create_task(society.stop(look))
    while not any("delayed messages" in record.getMessage() for record in caplog.records):
        await asyncio.sleep(0)
    while policy == "deliver" and await store.delayed_count():
        await asyncio.sleep(0)
    held.set()
    async with asyncio.timeout(scaled_timeout(20)):
        count = await stopping

    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("stopping: ")]
    if policy == "deliver":
        assert (count, early) == (2, [2, 0])
        assert set(lines) == {"stopping: delivering 1 delayed messages early"}  # twice, or both in one round
    else:
        assert (count, early) == (0, [0, 2])
        assert lines == [f"stopping: {kept} delayed messages stay scheduled" for kept in (1, 2)]
