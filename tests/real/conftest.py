"""Parts that are not ours: a llama.cpp server with a real model."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coterie import Society

CONTEXT_TOKENS = 4096
END_SECONDS = 60
STALLED_WORK_SECONDS = 300
"""A test fails if the server computes for so long without a token or an event. Its own processor time is measured, not
the time of day, because machines differ and may be busy. A summary of the whole window takes about 60 seconds."""
STALLED_SECONDS = 300
"""A test also fails if the server does nothing for so long, and nothing else happens."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LlamaServer:
    """A llama.cpp server in its own process, on a fixed port, so that it can be restarted."""

    def __init__(self, folder: Path, max_tokens: int = 24) -> None:
        if "COTERIE_REAL_PYTHON" not in os.environ:
            pytest.fail("the llama.cpp server is not installed: run ./dev test --real")
        self._log, self._port, self._max_tokens = folder / "llama.log", free_port(), max_tokens
        self._process: subprocess.Popen[str] | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def start(self) -> None:
        script = Path(__file__).with_name("llama_server.py")
        arguments = map(str, (self._port, CONTEXT_TOKENS, self._max_tokens))
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [os.environ["COTERIE_REAL_PYTHON"], script, *arguments], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        if not self._process.stdout.readline().startswith("http"):
            pytest.fail(f"the llama.cpp server did not start: {self._log.read_text()[-2_000:]}")

    def work_seconds(self) -> float:
        """Processor time that the process has used; 0 if it does not run."""
        process = self._process
        if process is None:
            return 0
        try:
            used = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        except OSError:  # it has just ended, or this system is not Linux
            return 0
        return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait(END_SECONDS)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


def write_society(folder: Path, llama: LlamaServer, *, interrupt: str = "step") -> None:
    """Write a society with one agent, `ada`, whose model is the real one."""
    service = {
        "id": "local",
        "baseURL": llama.base_url,
        "model": "smollm2",
        "contextTokens": CONTEXT_TOKENS,
        "capabilities": {"input": ["text"], "output": ["text"]},
        "timeout": 600_000,
        "firstTokenTimeout": 1_800_000,
    }
    (folder / "llmservices.json").write_text(json.dumps({"services": [service]}))
    ada = f'[agents.ada]\nprompt = "Answer in one short sentence."\ninterrupt = "{interrupt}"\n'
    (folder / "coterie.toml").write_text(ada)


@asynccontextmanager
async def open_society(folder: Path, llama: LlamaServer) -> AsyncIterator[Society]:
    """Run a society. Raises TimeoutError if it stalls: see `STALLED_WORK_SECONDS` and `STALLED_SECONDS`."""
    loop, work_limit = asyncio.get_running_loop(), float(STALLED_WORK_SECONDS)

    async with asyncio.timeout(STALLED_SECONDS) as limit, Society.open(folder) as society:

        def on_progress(_: object) -> None:
            nonlocal work_limit
            work_limit = llama.work_seconds() + STALLED_WORK_SECONDS
            if not limit.expired():
                limit.reschedule(loop.time() + STALLED_SECONDS)

        async def follow_events() -> None:
            async with society.bus.watch() as watcher:
                async for event in watcher:
                    on_progress(event)

        async def follow_work() -> None:
            work = llama.work_seconds()
            while True:
                await asyncio.sleep(1)
                before, work = work, llama.work_seconds()
                if before != work and work < work_limit and not limit.expired():
                    limit.reschedule(loop.time() + STALLED_SECONDS)

        unsubscribe = society.live.subscribe(on_progress)
        following = {asyncio.create_task(follow_events()), asyncio.create_task(follow_work())}
        try:
            yield society
            assert [violation async for violation in society.store.violations()] == []
        finally:
            unsubscribe()
            for task in following:
                task.cancel()
            await asyncio.wait(following)


@pytest.fixture
def llama(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LlamaServer]:
    """A running server. Parameter: the longest answer, in tokens."""
    server = LlamaServer(tmp_path, max_tokens=getattr(request, "param", 24))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def long_conversation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, LlamaServer]]:
    """The folder of a society that several tests continue, and its running server."""
    folder = tmp_path_factory.mktemp("long")
    server = LlamaServer(folder, max_tokens=16)
    server.start()
    write_society(folder, server)
    yield folder, server
    server.kill()
