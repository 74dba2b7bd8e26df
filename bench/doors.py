"""A question and its answer through `/v1/chat/completions`, compared with the plain API: POST a message, read events.

Server and load client run in separate processes. The model, in the server's process, answers at once, so the figures
show what the interfaces cost.

The server listens as `coterie serve` does. asyncio sends small packets at once (TCP_NODELAY) only on sockets whose
protocol is given. On others the second packet of a response, its body, waits 40 ms for the acknowledgement of the
first one. That would measure one way only: a completion is such a response, while the plain API waits for that of its
POST during the model's work, and gets the answer as one packet of the event stream.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from bench.child import ROOT
from bench.report import Report

AGENTS = 8
ROUNDS = 15
QUESTIONS = 24
"""Per round, a multiple of `AGENTS`."""
POOL = 2 * AGENTS * (ROUNDS + 1)
"""Agents. Each round asks its own, so that no round meets longer histories than another."""
TOKEN = "bench-token-0123456789abcdef"


def run() -> None:
    report = Report("doors")
    for name, callers in (("one at a time", 1), (f"{AGENTS} at once", AGENTS)):
        rounds = measure(callers)
        medians = {way: statistics.median(times) for way, times in rounds.items()}
        for way, milliseconds in medians.items():
            report.line(f"{way}, {name}", milliseconds, "ms per answer")
        report.ratio(
            f"/v1/chat/completions to the plain API, {name}",
            medians["/v1/chat/completions"],
            medians["plain API"],
            at_most=1.15,
        )


def measure(callers: int) -> dict[str, list[float]]:
    """Milliseconds per answer of each round. Rounds of both ways alternate, so that both meet the same noise."""
    with tempfile.TemporaryDirectory(prefix="bench-doors-") as folder:
        server = subprocess.Popen(_command("serve", folder), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            done = subprocess.run(
                _command("load", port, str(callers)), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
            )
        finally:
            server.terminate()
            server.wait()
    rounds: dict[str, list[float]] = json.loads(done.stdout)
    return rounds


async def serve(folder: str) -> None:
    import uvicorn

    from coterie.clock import SystemClock
    from coterie.society import Society
    from coterie.testing import ModelServer
    from coterie.web.addresses import addresses
    from coterie.web.app import build_app
    from coterie.web.auth import Access
    from coterie.web.server import listen, port_of

    listeners = listen("127.0.0.1", 0)
    port = port_of(listeners)
    async with ModelServer() as model:
        model.default = lambda _: "The answer."
        services = [{"id": "main", "model": "m", "baseURL": model.base_url, "maxConcurrentRequests": AGENTS}]
        (Path(folder) / "llmservices.json").write_text(json.dumps({"services": services}))
        (Path(folder) / "coterie.toml").write_text("".join(f"[agents.a{number}]\n" for number in range(POOL)))
        async with Society.open(folder) as society:
            access = Access(TOKEN, society.store.info.log_id, SystemClock())
            app = build_app(society, access, where=addresses("127.0.0.1", port))
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
            print(port, flush=True)
            await server.serve(listeners)


async def load(port: int, callers: int) -> None:
    base, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=60, trust_env=False) as client:
        rounds: dict[str, list[float]] = {"plain API": [], "/v1/chat/completions": []}
        for number in range(-1, ROUNDS):  # the first one warms up
            order = ("plain API", "/v1/chat/completions")
            for way in order if number % 2 else reversed(order):
                run_round = _plain_round if way == "plain API" else _chat_round
                first = (2 * (number + 1) + order.index(way)) * AGENTS
                took = await run_round(client, callers, f"{way} {number}", first)
                if number >= 0:
                    rounds[way].append(took / QUESTIONS * 1000)
        print(json.dumps(rounds))


async def _plain_round(client: httpx.AsyncClient, callers: int, name: str, first: int) -> float:
    plain = Plain(client)
    reading = asyncio.create_task(plain.read_events())  # not during the other way's rounds
    try:
        await plain.connected.wait()
        start = time.perf_counter()
        await _round(plain.ask, callers, name, first)
        return time.perf_counter() - start
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _chat_round(client: httpx.AsyncClient, callers: int, name: str, first: int) -> float:
    start = time.perf_counter()
    await _round(Chat(client).ask, callers, name, first)
    return time.perf_counter() - start


async def _round(ask: Callable[[str, str], Awaitable[None]], callers: int, name: str, first: int) -> None:
    """Ask `QUESTIONS` questions; `first`: number of the first agent."""

    async def caller(number: int) -> None:
        for index in range(number, QUESTIONS, callers):
            await ask(f"a{first + number}", f"{name} {index}")

    await asyncio.gather(*(caller(number) for number in range(callers)))


class Chat:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, agent: str, text: str) -> None:
        body = {"model": agent, "messages": [{"role": "user", "content": text}]}
        answer = await self._client.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "The answer.", answer.text


class Plain:
    """Sends with POST, and reads all answers from one event stream."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self.connected = asyncio.Event()

    def _answer(self, message_id: str) -> asyncio.Future[Any]:
        if message_id not in self._answers:
            self._answers[message_id] = asyncio.get_running_loop().create_future()
        return self._answers[message_id]

    async def ask(self, agent: str, text: str) -> None:
        sent = await self._client.post("/api/v1/messages", json={"to": agent, "payload": {"text": text}})
        message_id = sent.json()["messageId"]
        answer = await self._answer(message_id)
        assert answer["payload"]["text"] == "The answer.", answer
        del self._answers[message_id]

    async def read_events(self) -> None:
        async with self._client.stream("GET", "/api/v1/events", timeout=None) as events:
            async for line in events.aiter_lines():
                self.connected.set()
                if line.startswith("data:") and '"inReplyTo":"' in line:
                    data = json.loads(line[5:])
                    message = data.get("message", data)
                    if message.get("to") == "user" and not self._answer(message["inReplyTo"]).done():
                        self._answer(message["inReplyTo"]).set_result(message)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "bench.doors", *arguments]


def main(role: str = "", *arguments: str) -> None:
    match role:
        case "serve":
            asyncio.run(serve(arguments[0]))
        case "load":
            asyncio.run(load(int(arguments[0]), int(arguments[1])))
        case _:
            run()


if __name__ == "__main__":
    main(*sys.argv[1:])
