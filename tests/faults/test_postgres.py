"""Several worker processes on one PostgreSQL; some are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coterie import Society
from coterie.testing import ModelServer
from coterie.testing.model_server import Calls, ReceivedRequest, Reply, Says
from tests.engines import Postgres

AGENTS = ("ada", "bob", "cyd", "dan")
WORKERS = 3
TOOLS = """
import os
from coterie import tool

@tool
async def note(line: str) -> str:
    "Append a line to the log file."
    file = os.open({witness!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (line + "\\n").encode())
    os.close(file)
    return "noted"
"""


def answer(request: ReceivedRequest) -> Reply:
    """Model that calls `note` once with the message, then answers."""
    messages = request.body["messages"]
    last = max(place for place, one in enumerate(messages) if one["role"] == "user")
    words = re.findall(r"task \d+", json.dumps(messages[last]["content"]))
    if any(one["role"] == "tool" for one in messages[last:]):
        return Says(f"done {words[-1]}", token_delay=0.01)
    return Says(calls=(Calls("note", {"line": words[-1]}),), token_delay=0.01)


def make_home(folder: Path, url: str, base_url: str, witness: Path) -> None:
    folder.mkdir()
    agents = "".join(f"[agents.{name}]\n" for name in AGENTS)
    (folder / "coterie.toml").write_text(f"[store]\nurl = {json.dumps(url)}\nlease_seconds = 2\n{agents}")
    (folder / "llmservices.json").write_text(
        json.dumps({"services": [{"id": "main", "baseURL": base_url, "model": "m"}]})
    )
    (folder / "tools.py").write_text(TOOLS.format(witness=str(witness)))


class Workers:
    """Several `coterie worker` processes, each in its own folder as on another machine."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._running: dict[Path, asyncio.subprocess.Process] = {}

    async def start(self) -> None:
        await asyncio.gather(*(self._start(folder) for folder in self._folders))

    async def _start(self, folder: Path) -> None:
        with (folder / "log").open("ab") as log:
            command = (sys.executable, "-m", "coterie", "worker", str(folder))
            one = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=log)
        self._running[folder] = one
        assert one.stdout
        while line := await one.stdout.readline():
            if line.startswith(b"Ready"):
                return
        raise AssertionError((folder / "log").read_text())

    async def kill(self, folder: Path, how: signal.Signals = signal.SIGKILL) -> int:
        one = self._running.pop(folder)
        one.send_signal(how)
        return await one.wait()

    async def kill_one(self, chance: random.Random) -> None:
        folder = chance.choice(self._folders)
        await self.kill(folder)
        await self._start(folder)

    async def stop(self) -> list[int]:
        return await asyncio.gather(*(self.kill(folder, signal.SIGTERM) for folder in [*self._running]))


@contextlib.asynccontextmanager
async def society_with_workers(folder: Path, url: str, witness: Path) -> AsyncIterator[tuple[Society, Workers]]:
    """A server that runs no agents, with separate workers."""
    async with ModelServer() as server:
        server.default = answer
        homes = [folder / f"home{n}" for n in range(1 + WORKERS)]
        for home in homes:
            make_home(home, url, server.base_url, witness)
        workers = Workers(homes[1:])
        async with Society.open(homes[0], work=False) as society:
            await workers.start()
            try:
                yield society, workers
            finally:
                await workers.stop()
        assert server.refused == []


async def run_tasks(society: Society, agent: str, tasks: range) -> None:
    """Send the tasks one by one, each after the answer to the last."""
    for task in tasks:
        receipt = await society.send(to=agent, text=f"task {task}")
        async with contextlib.aclosing(society.inbox()) as inbox:
            async for message in inbox:
                if message.in_reply_to == receipt.message_id:
                    break


@pytest.mark.slow
async def test_a_worker_that_gets_sigterm_hands_its_turns_over_at_once(shared: Postgres, tmp_path: Path) -> None:
    url, witness = shared.url(tmp_path), tmp_path / "witness"
    async with society_with_workers(tmp_path, url, witness) as (society, workers), asyncio.timeout(180):
        await run_tasks(society, "ada", range(1))
        assert await workers.stop() == [0] * WORKERS
        assert [violation async for violation in society.store.violations()] == []
