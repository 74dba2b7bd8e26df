"""Two `coterie worker` processes: one continues the turns of the other."""

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

from .harness import scaled_timeout

pytestmark = pytest.mark.slow
SOON = 180
"""Timeout in seconds; ends a test that hangs."""


class StallingModel:
    """A model that never answers."""

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
async def stalling_model() -> AsyncIterator[StallingModel]:
    model = StallingModel()
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
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {"NO_COLOR": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def wait_for_worker(url: str, workers: int) -> None:
    """Wait for the first heartbeat of `workers` workers."""
    async with asyncio.timeout(SOON):
        while True:
            with psycopg.connect(url, autocommit=True) as db:
                row = db.execute("SELECT count(*) FROM processes WHERE worker IS NOT NULL").fetchone()
            if row == (workers,):
                return
            await asyncio.sleep(0.05)  # another process, so poll


@asynccontextmanager
async def two_workers(
    shared: Postgres, folder: Path, lease: int
) -> AsyncIterator[tuple[subprocess.Popen[bytes], StallingModel]]:
    """The first worker waits for its model in a turn; the second is idle."""
    url = shared.url(folder)
    async with stalling_model() as model:
        homes = [home(folder / name, url, model.port, lease) for name in ("asking", "first", "second")]
        async with Society.open(homes[0], work=False) as society:
            with worker(homes[1]) as first:
                await wait_for_worker(url, 1)
                await society.send(to="ada", text="think")
                async with asyncio.timeout(SOON):
                    await model.asked.get()
                with worker(homes[2]):
                    await wait_for_worker(url, 2)
                    yield first, model


async def test_the_turns_of_a_killed_worker_continue_within_its_lease_and_two_seconds(
    shared: Postgres, tmp_path: Path
) -> None:
    async with two_workers(shared, tmp_path, lease=2) as (first, model), asyncio.timeout(SOON):
        assert model.asked.empty()
        died = time.monotonic()
        first.kill()
        assert await model.asked.get() - died < 2 + scaled_timeout(2)


async def test_a_worker_that_stops_releases_its_turns_to_another_at_once(shared: Postgres, tmp_path: Path) -> None:
    async with two_workers(shared, tmp_path, lease=10 * SOON) as (first, model), asyncio.timeout(SOON):
        first.send_signal(signal.SIGTERM)
        await model.asked.get()
        assert await asyncio.to_thread(first.wait) == 0
