"""Stops during turns: in time, with nothing lost, and with no process left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coterie import Society
from coterie.testing import Calls, ModelServer, Says

from .harness import ForkServer, scaled_timeout
from .scenarios import make_home
from .verifier import find_violations, open_database

pytestmark = pytest.mark.slow

DRAIN = 1
TOOLS = """
import asyncio, os, signal, threading
from coterie import tool

def say_so(fifo):
    # A reader gets the end of file when this process and all its children have ended.
    global held
    held = os.open(fifo, os.O_WRONLY)
    os.write(held, b"at work")

@tool
async def on_the_loop(fifo: str) -> str:
    "Never ends."
    say_so(fifo)
    await asyncio.Event().wait()
    return ""

@tool
def in_a_thread(fifo: str) -> str:
    "Never ends, and ignores cancellation."
    say_so(fifo)
    threading.Event().wait()
    return ""

@tool(process=True)
def in_a_process(fifo: str) -> str:
    "Never ends."
    say_so(fifo)
    signal.pause()
    return ""
"""


class Fifo:
    """A named pipe that a tool process holds open: shows when the process starts and when it has ended."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def wait_for_start(self) -> None:
        assert self._next() == b"at work"

    def wait_for_end(self) -> None:
        assert self._next() == b"", "the process still runs"

    def close(self) -> None:
        os.close(self._end)

    def _next(self) -> bytes:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        assert poll.poll(scaled_timeout() * 1000), "nothing happened"
        return os.read(self._end, 100)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "society"
    make_home(folder)
    (folder / "tools.py").write_text(TOOLS)
    config = folder / "coterie.toml"
    config.write_text(config.read_text().replace("[shutdown]", f"[shutdown]\ndrain_seconds = {DRAIN}"))
    return folder


@pytest.fixture
async def server(home: Path) -> AsyncIterator[ModelServer]:
    async with ModelServer() as opened:
        services = f'{{"services": [{{"id": "main", "baseURL": "{opened.base_url}", "model": "m"}}]}}'
        (home / "llmservices.json").write_text(services)
        yield opened
        assert opened.refused == []


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    with contextlib.closing(Fifo(tmp_path / "fifo")) as opened:
        yield opened


async def answers_after_a_restart(home: Path, server: ModelServer) -> list[str]:
    """Messages to the person after the society is opened again."""
    server.script("there you are")
    async with Society.open(home) as society, contextlib.aclosing(society.inbox()) as inbox:
        async for message in inbox:
            return [str(message.payload["text"])]
    return []


def calls_of(home: Path) -> list[tuple[str, int]]:
    with open_database(home) as db:
        assert find_violations(db) == []
        return db.execute("SELECT c.state, a.crashes FROM calls c JOIN agents a ON a.id = c.agent_id").fetchall()


async def test_a_stop_during_a_model_call_ends_in_time_and_the_next_start_repeats_the_call(
    home: Path, server: ModelServer
) -> None:
    server.script(Says("never", gate=asyncio.Event()))
    society = await Society.start(home)
    await society.send(to="ada", text="hello")
    await server.wait_for_request(1)

    began = time.monotonic()
    await society.stop()

    assert DRAIN <= time.monotonic() - began < DRAIN + scaled_timeout(1)
    assert await answers_after_a_restart(home, server) == ["there you are"]
    assert len(server.requests) == 2


@pytest.mark.parametrize("tool", ["on_the_loop", "in_a_thread", "in_a_process"])
async def test_a_stop_during_a_tool_call_ends_in_time_and_the_model_gets_an_unknown_outcome(
    tool: str, home: Path, server: ModelServer, fifo: Fifo
) -> None:
    server.script(Says(calls=(Calls(tool, {"fifo": str(fifo.path)}),)))
    society = await Society.start(home)
    await society.send(to="ada", text="work")
    await asyncio.to_thread(fifo.wait_for_start)

    began = time.monotonic()
    await society.stop()

    assert time.monotonic() - began < DRAIN + scaled_timeout(1)
    if tool == "in_a_process":
        await asyncio.to_thread(fifo.wait_for_end)
    assert await answers_after_a_restart(home, server) == ["there you are"]
    assert calls_of(home) == [("unknown", 0)]


async def test_a_turn_that_ends_within_the_drain_time_is_finished_before_the_stop(
    home: Path, server: ModelServer
) -> None:
    gate = asyncio.Event()
    server.script(Says("just in time", gate=gate))
    society = await Society.start(home)
    await society.send(to="ada", text="hello")
    await server.wait_for_request(1)

    stopping = asyncio.create_task(society.stop())
    gate.set()
    await stopping

    with open_database(home) as db:
        received = db.execute("SELECT json_extract(payload, '$.text') FROM messages WHERE recipient = 'user'")
        assert received.fetchall() == [("just in time",)]


async def test_a_signal_during_a_model_call_stops_the_program_gracefully_and_in_time(
    home: Path, server: ModelServer
) -> None:
    server.script(Says("never", gate=asyncio.Event()))
    async with Society.open(home, work=False) as society:
        await society.send(to="ada", text="hello")
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "coterie", "serve", "--dir", str(home)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    await server.wait_for_request(1)

    began = time.monotonic()
    program.send_signal(signal.SIGTERM)

    assert await program.wait() == 0
    assert time.monotonic() - began < DRAIN + scaled_timeout(1)
    assert await answers_after_a_restart(home, server) == ["there you are"]


async def test_a_kill_of_the_runtime_also_ends_the_process_of_its_tool(
    home: Path, server: ModelServer, fifo: Fifo, fork_server: ForkServer
) -> None:
    server.script(Says(calls=(Calls("in_a_process", {"fifo": str(fifo.path)}),)))
    async with Society.open(home, work=False) as society:
        await society.send(to="ada", text="work")
    owner = await asyncio.to_thread(fork_server.call, "hold", folder=str(home), work=True)
    await asyncio.to_thread(fifo.wait_for_start)

    assert await asyncio.to_thread(fork_server.call, "kill", pid=owner) == -signal.SIGKILL

    await asyncio.to_thread(fifo.wait_for_end)
    assert await answers_after_a_restart(home, server) == ["there you are"]
    assert calls_of(home) == [("unknown", 1)]
