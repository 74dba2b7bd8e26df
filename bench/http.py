"""Messages over HTTP: a durable POST compared with an empty route of the same framework, 64 connections each.

Server and load client run in separate processes.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.child import ROOT
from bench.report import Report, best
from bench.rows import PAYLOAD

CONNECTIONS = 64
REQUESTS = 3_000
TOKEN = "bench-token-0123456789abcdef"


def run() -> None:
    report = Report("http")
    rates = best({"empty route": lambda: measure("empty"), "durable POST /messages": lambda: measure("coterie")})
    for name, rate in rates.items():
        report.line(name, rate, "requests/s")
    report.ratio("durable POST to empty route", rates["durable POST /messages"], rates["empty route"], at_least=0.4)


def measure(kind: str) -> float:
    """Requests per second."""
    with tempfile.TemporaryDirectory(prefix="bench-http-") as folder:
        server = subprocess.Popen(_command("serve", kind, folder), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            done = subprocess.run(_command("load", port), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        finally:
            server.terminate()
            server.wait()
    return float(done.stdout)


async def serve(kind: str, folder: str) -> None:
    import uvicorn

    from coterie.web.server import listen, port_of

    listeners = listen("127.0.0.1", 0)  # as `coterie serve` does: other sockets delay small packets by 40 ms
    port = port_of(listeners)
    if kind == "empty":
        server = uvicorn.Server(uvicorn.Config(_empty_app(), log_level="warning", access_log=False))
        print(port, flush=True)
        await server.serve(listeners)
        return
    from coterie.clock import SystemClock
    from coterie.society import Society
    from coterie.web.addresses import addresses
    from coterie.web.app import build_app
    from coterie.web.auth import Access

    (Path(folder) / "coterie.toml").write_text("[limits]\nmailbox = 10000000\n")
    async with Society.open(folder, work=False) as society:
        access = Access(TOKEN, society.store.info.log_id, SystemClock())
        app = build_app(society, access, where=addresses("127.0.0.1", port))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        print(port, flush=True)
        await server.serve(listeners)


def _empty_app() -> Any:
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    async def nothing(_: Any) -> Response:
        return Response(b"{}", 202, media_type="application/json")

    return Starlette(routes=[Route("/api/v1/messages", nothing, methods=["POST"])])


class Caller(asyncio.Protocol):
    """One connection that sends the next request after each response."""

    def __init__(self, request: bytes, left: list[int], done: asyncio.Future[None]) -> None:
        self._request, self._left, self._done = request, left, done
        self._seen = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        self._seen += data
        head, end, body = self._seen.partition(b"\r\n\r\n")
        if not end:
            return
        if not head.startswith(b"HTTP/1.1 202"):
            raise RuntimeError(self._seen.decode(errors="replace"))
        if len(body) >= int(head.lower().partition(b"content-length:")[2].split()[0]):
            self._seen = b""
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(exc or RuntimeError("the server hung up"))

    def _next(self) -> None:
        assert self._transport is not None
        if self._left[0]:
            self._left[0] -= 1
            self._transport.write(self._request)
        elif not self._done.done():
            self._done.set_result(None)


async def load(port: int) -> None:
    body = json.dumps({"to": "assistant", "payload": PAYLOAD}).encode()
    head = (
        f"POST /api/v1/messages HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    loop = asyncio.get_running_loop()
    await _round(loop, port, head + body, REQUESTS // 10)
    start = time.perf_counter()
    await _round(loop, port, head + body, REQUESTS)
    print(REQUESTS / (time.perf_counter() - start))


async def _round(loop: asyncio.AbstractEventLoop, port: int, request: bytes, count: int) -> None:
    left = [count]
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in range(CONNECTIONS)]
    callers = [Caller(request, left, end) for end in ends]
    opened = [await loop.create_connection(partial(_same, caller), "127.0.0.1", port) for caller in callers]
    await asyncio.gather(*ends)
    for transport, _ in opened:
        transport.abort()


def _same(caller: Caller) -> Caller:
    return caller


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "bench.http", *arguments]


def main(role: str = "", *arguments: str) -> None:
    match role:
        case "serve":
            asyncio.run(serve(*arguments))
        case "load":
            asyncio.run(load(int(arguments[0])))
        case _:
            run()


if __name__ == "__main__":
    main(*sys.argv[1:])
