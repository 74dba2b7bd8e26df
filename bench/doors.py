"""A question and its answer through `/v1/chat/completions`, compared with the plain API: POST a message, read events.

Server and load client run in separate processes. The model, in the server's process, answers at once, so the figures
show what the interfaces cost.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from bench.child import ROOT
from bench.report import Report, best

AGENTS = 8
QUESTIONS = 200
TOKEN = "bench-token-0123456789abcdef"


def run() -> None:
    report = Report("doors")
    for name, callers in (("one at a time", 1), (f"{AGENTS} at once", AGENTS)):
        times = best(
            {
                "plain API": lambda callers=callers: measure("plain", callers),  # type: ignore[misc]
                "/v1/chat/completions": lambda callers=callers: measure("chat", callers),  # type: ignore[misc]
            },
            pick=min,
        )
        for way, milliseconds in times.items():
            report.line(f"{way}, {name}", milliseconds, "ms per answer")
        report.ratio(
            f"/v1/chat/completions to the plain API, {name}",
            times["/v1/chat/completions"],
            times["plain API"],
            at_most=1.15,
        )


def measure(way: str, callers: int) -> float:
    """Milliseconds per answer."""
    with tempfile.TemporaryDirectory(prefix="bench-doors-") as folder:
        server = subprocess.Popen(_command("serve", folder), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            command = _command("load", port, way, str(callers))
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        finally:
            server.terminate()
            server.wait()
    return float(done.stdout)


async def serve(folder: str) -> None:
    import uvicorn

    from coterie.clock import SystemClock
    from coterie.society import Society
    from coterie.testing import ModelServer
    from coterie.web.addresses import addresses
    from coterie.web.app import build_app
    from coterie.web.auth import Access

    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = listener.getsockname()[1]
    async with ModelServer() as model:
        model.default = lambda _: "The answer."
        services = [{"id": "main", "model": "m", "baseURL": model.base_url, "maxConcurrentRequests": AGENTS}]
        (Path(folder) / "llmservices.json").write_text(json.dumps({"services": services}))
        (Path(folder) / "coterie.toml").write_text("".join(f"[agents.a{number}]\n" for number in range(AGENTS)))
        async with Society.open(folder) as society:
            access = Access(TOKEN, society.store.info.log_id, SystemClock())
            app = build_app(society, access, where=addresses("127.0.0.1", port))
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
            print(port, flush=True)
            await server.serve([listener])


async def load(port: int, way: str, callers: int) -> None:
    base, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=60, trust_env=False) as client:
        plain = Plain(client)
        ask: Callable[[str, str], Awaitable[None]] = plain.ask if way == "plain" else Chat(client).ask
        reading = asyncio.create_task(plain.read_events()) if way == "plain" else None
        if reading:
            await plain.connected.wait()
        await _round(ask, callers, "warm", QUESTIONS // 10)
        start = time.perf_counter()
        await _round(ask, callers, "q", QUESTIONS)
        print((time.perf_counter() - start) / QUESTIONS * 1000)
        if reading:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _round(ask: Callable[[str, str], Awaitable[None]], callers: int, name: str, count: int) -> None:
    async def caller(number: int) -> None:
        for index in range(number, count, callers):
            await ask(f"a{number}", f"{name} {index}")

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
            asyncio.run(load(int(arguments[0]), arguments[1], int(arguments[2])))
        case _:
            run()


if __name__ == "__main__":
    main(*sys.argv[1:])
