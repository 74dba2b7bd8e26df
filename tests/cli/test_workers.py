"""`coterie agents` and /metrics with several processes of one society."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from coterie.clock import SystemClock
from coterie.society import Society
from coterie.store import worker_name
from coterie.testing import ModelServer
from coterie.testing.model_faults import stall
from coterie.web.app import build_app
from coterie.web.auth import Access
from tests.engines import Postgres

from .commands import coterie
from .environment import Environment

TOKEN = "a-token-of-the-tests-0123456789abcdef"


def make_home(folder: Path, url: str, base_url: str) -> Path:
    folder.mkdir()
    text = f"[store]\nurl = {json.dumps(url)}\nlease_seconds = 2\n[shutdown]\ndrain_seconds = 0\n[agents.ada]\n"
    (folder / "coterie.toml").write_text(text)
    services = [{"id": "main", "baseURL": base_url, "model": "m"}]
    (folder / "llmservices.json").write_text(json.dumps({"services": services}))
    return folder


async def start_worker(folder: Path) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "coterie", "worker", str(folder))
    process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-3)
    assert process.stdout
    while line := await process.stdout.readline():
        if line.startswith(b"Ready"):
            return process
    raise AssertionError("the worker never got ready")


async def listed(folder: Path) -> dict[str, Any]:
    done = await asyncio.to_thread(coterie, "agents", "--json", "--dir", folder)
    found: dict[str, Any] = done.json
    return found


@pytest.mark.slow
async def test_agents_and_metrics_show_the_worker_of_each_claim_and_its_takeovers(
    shared: Postgres, tmp_path: Path
) -> None:
    async with ModelServer() as server, asyncio.timeout(120):
        server.default = stall()
        homes = [make_home(tmp_path / f"home{n}", shared.url(tmp_path), server.base_url) for n in range(3)]
        async with Society.open(homes[0], work=False) as society:
            workers = await asyncio.gather(*map(start_worker, homes[1:]))
            names = {worker_name(worker.pid): worker for worker in workers}
            await society.send(to="ada", text="hello")
            await server.wait_for_request(1)
            found = await listed(homes[0])
            holder = found["items"][0]["worker"]
            assert holder in names
            assert {worker["name"] for worker in found["workers"]} == {worker_name(), *names}
            table = (await asyncio.to_thread(coterie, "agents", "--dir", homes[0])).stdout
            assert "WORKER" in table and f"{holder} (1 at work)" in table

            names[holder].kill()
            await server.wait_for_request(2)

            (other,) = set(names) - {holder}
            assert (await listed(homes[0]))["items"][0]["worker"] == other
            numbers = await metrics_when(society, f'coterie_worker_lease_takeovers_total{{worker="{other}"}} 1.0')
            assert f'coterie_worker_claims{{worker="{other}"}} 1.0' in numbers
            assert f'coterie_worker_fenced_writes_total{{worker="{other}"}} 0.0' in numbers
            assert f'coterie_worker_heartbeats_total{{worker="{worker_name()}"}}' in numbers
            names[other].send_signal(signal.SIGTERM)
            assert await names[other].wait() == 0
            assert (await listed(homes[0]))["items"][0]["worker"] in (None, "gone")
        for worker in workers:
            await worker.wait()


async def metrics_when(society: Society, line: str) -> str:
    """Return the metrics once they contain `line`. Other processes report theirs with the next heartbeat."""
    app = build_app(society, Access(TOKEN, society.store.info.log_id, SystemClock()), clock=SystemClock())
    headers = {"Authorization": f"Bearer {TOKEN}"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8642", headers=headers) as client:
        while line not in (text := (await client.get("/metrics")).text):
            await asyncio.sleep(0.05)
    return text


def test_a_society_in_sqlite_has_one_worker(env: Environment) -> None:
    env.serve()
    gated, go_on = env.gated("done")
    env.script(gated)
    coterie("send", "ada", "hello", "--dir", env.folder)
    env.wait_for_request()

    found = coterie("agents", "--json", "--dir", env.folder).json["items"]

    assert {agent["id"]: agent["worker"] for agent in found} == {"ada": worker_name(), "bob": None}
    go_on()
    env.wait_for_event("message.created")
