"""`coterie worker` twice, as the owner starts them: what one of them leaves behind, the other goes on with."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psycopg
import pytest

from coterie.society import Society
from tests.engines import Postgres

from .harness import patience

pytestmark = pytest.mark.slow
SOON = 60
"""Seconds that no machine is too slow for."""
AT_ONCE = 3.0
"""Seconds for a program to end in order on a machine with nothing else to do; the lease is ten times as long."""


class Thinker:
    """A model that is asked and never answers."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[float] = asyncio.Queue()
        self.port = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked.put_nowait(time.monotonic())
        await reader.read()
        await reader.read()
        writer.close()


@asynccontextmanager
async def thinker() -> AsyncIterator[Thinker]:
    model = Thinker()
    server = await asyncio.start_server(model, "127.0.0.1", 0)
    async with server:
        model.port = server.sockets[0].getsockname()[1]
        yield model


def home(folder: Path, url: str, port: int, lease: int) -> Path:
    folder.mkdir()
    store = f"[store]\nurl = {json.dumps(url)}\nlease_seconds = {lease}\n"
    (folder / "coterie.toml").write_text(f"[agents.ada]\n[shutdown]\ndrain_seconds = 0\n{store}")
    entry = {"id": "main", "baseURL": f"http://127.0.0.1:{port}/v1", "model": "m"}
    (folder / "llmservices.json").write_text(json.dumps({"services": [entry]}))
    return folder


@contextmanager
def worker(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "coterie", "worker", str(folder)]
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | {"NO_COLOR": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def until_at_work(url: str, workers: int) -> None:
    """A worker has told the others that it lives."""
    async with asyncio.timeout(SOON):
        while True:
            with psycopg.connect(url, autocommit=True) as db:
                row = db.execute("SELECT count(*) FROM processes WHERE worker IS NOT NULL").fetchone()
            if row == (workers,):
                return
            await asyncio.sleep(0.05)  # nobody tells us


@asynccontextmanager
async def two_workers(
    shared: Postgres, folder: Path, lease: int
) -> AsyncIterator[tuple[subprocess.Popen[bytes], Thinker]]:
    """The first of them is in the middle of a turn, and the model it has asked; the second has nothing to do."""
    url = shared.url(folder)
    async with thinker() as model:
        homes = [home(folder / name, url, model.port, lease) for name in ("asking", "first", "second")]
        async with Society.open(homes[0], work=False) as society:
            with worker(homes[1]) as first:
                await until_at_work(url, 1)
                await society.send(to="ada", text="think")
                async with asyncio.timeout(SOON):
                    await model.asked.get()
                with worker(homes[2]):
                    await until_at_work(url, 2)
                    yield first, model


async def test_the_agents_of_a_worker_that_was_killed_go_on_within_its_lease_and_two_seconds(
    shared: Postgres, tmp_path: Path
) -> None:
    async with two_workers(shared, tmp_path, lease=2) as (first, model), asyncio.timeout(SOON):
        assert model.asked.empty()
        died = time.monotonic()
        first.kill()
        assert await model.asked.get() - died < 2 + patience(2)


async def test_a_worker_that_is_told_to_leave_hands_its_agents_over_at_once(shared: Postgres, tmp_path: Path) -> None:
    async with two_workers(shared, tmp_path, lease=30) as (first, model), asyncio.timeout(SOON):
        told = time.monotonic()
        first.send_signal(signal.SIGTERM)
        assert await model.asked.get() - told < patience(AT_ONCE)
        assert await asyncio.to_thread(first.wait) == 0
