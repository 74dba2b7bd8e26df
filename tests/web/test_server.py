"""Behaviour on a real socket: malformed requests, slow clients, disconnects, listening."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from starlette.applications import Starlette

from coterie.errors import CoterieError
from coterie.society import Society
from coterie.testing import FakeClock
from coterie.web.addresses import addresses
from coterie.web.app import build_app
from coterie.web.auth import Access
from coterie.web.middleware import MAX_BODY_BYTES
from coterie.web.server import WebServer, close, listen, port_of

from .conftest import TOKEN

TIMEOUT = 120
"""Seconds."""


@pytest.fixture
async def front(society: Society, access: Access, clock: FakeClock) -> AsyncIterator[tuple[Starlette, int]]:
    sockets = listen("127.0.0.1", 0)
    app = build_app(society, access, where=addresses("127.0.0.1", port_of(sockets)), clock=clock)
    server = WebServer(app, sockets, clock=clock)
    await server.start()
    yield app, port_of(sockets)
    await server.stop()


@pytest.fixture
def port(front: tuple[Starlette, int]) -> int:
    return front[1]


class Wire:
    """A raw connection to the server."""

    def __init__(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.port, self.reader, self.writer = port, reader, writer

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator[Wire]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(TIMEOUT):
            yield cls(port, reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def send_lines(self, *lines: str) -> None:
        named = [line.replace("HERE", f"127.0.0.1:{self.port}") for line in lines]
        self.writer.write("\r\n".join([*named, "", ""]).encode())

    async def status(self) -> int:
        line = await self.reader.readline()
        head = await self.reader.readuntil(b"\r\n\r\n")
        (length,) = [int(h.split(b":")[1]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length")]
        self.head, self.body = head.lower(), await self.reader.readexactly(length)
        return int(line.split()[1])


AUTH = f"Authorization: Bearer {TOKEN}"


@pytest.mark.parametrize(
    "lines",
    [
        ["GET /healthz HTTP/1.1"],
        ["GET /healthz HTTP/1.0"],
        ["GET /healthz HTTP/1.1", "Host: HERE", "Host: HERE"],
        ["GET /healthz HTTP/1.1", "Host: HERE", "Host: evil.example"],
        ["GET /healthz HTTP/1.1", "Host: evil.example", "Host: HERE"],
        ["GET http://evil.example/healthz HTTP/1.1", "Host: evil.example"],
        ["GET /healthz HTTP/1.1", "Host: HERE."],
    ],
)
async def test_a_missing_repeated_or_unknown_host_gets_421(port: int, lines: list[str]) -> None:
    async with Wire.to(port) as wire:
        wire.send_lines(*lines)
        assert await wire.status() == 421


@pytest.mark.parametrize("host", ["HERE", "LOCALHOST:PORT", "[::1]:PORT"])
async def test_requests_to_its_own_hosts_are_served(port: int, host: str) -> None:
    async with Wire.to(port) as wire:
        wire.send_lines("GET /healthz HTTP/1.1", f"Host: {host.replace('PORT', str(port))}")
        assert await wire.status() == 200
        assert b"server:" not in wire.head


async def test_endless_headers_get_431(port: int) -> None:
    async with Wire.to(port) as wire:
        wire.writer.write(b"GET /healthz HTTP/1.1\r\nX: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                wire.writer.write(b"x" * 65_536)
                await wire.writer.drain()
        with contextlib.suppress(ConnectionError):
            assert b"HTTP/1.1 431 " in await wire.reader.read()


async def test_a_chunked_body_over_the_limit_gets_413_and_the_connection_stays_usable(port: int) -> None:
    async with Wire.to(port) as wire:
        wire.send_lines(
            "POST /session HTTP/1.1", "Host: HERE", "Content-Type: application/json", "Transfer-Encoding: chunked"
        )
        for _ in range(2 * MAX_BODY_BYTES // 65_536):
            wire.writer.write(b"10000\r\n" + b" " * 65_536 + b"\r\n")
            await wire.writer.drain()
        wire.writer.write(b"0\r\n\r\n")
        assert await wire.status() == 413
        assert b'"body_too_large"' in wire.body
        wire.send_lines("GET /healthz HTTP/1.1", "Host: HERE")
        assert await wire.status() == 200


def _incoming(tmp_path: Path) -> list[Path]:
    """Files of uploads that are not complete."""
    return list((tmp_path / "home" / "data" / "artifacts" / "incoming").iterdir())


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not true():
            await asyncio.sleep(0.01)


async def test_an_upload_whose_client_disconnects_leaves_no_file(port: int, society: Society, tmp_path: Path) -> None:
    async with Wire.to(port) as wire:
        wire.send_lines(
            "POST /api/v1/artifacts HTTP/1.1", "Host: HERE", AUTH, "Content-Length: 1000000",
            "Content-Type: multipart/form-data; boundary=b",
        )  # fmt: skip
        wire.writer.write(b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nbegun')
        await _until(lambda: len(_incoming(tmp_path)) == 1)
    await _until(lambda: _incoming(tmp_path) == [])
    assert await society.artifacts.latest() == []


async def test_an_upload_that_stops_gets_408_and_leaves_no_file(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.web.api.artifacts.IDLE_TIMEOUT_SECONDS", 0.1)
    async with Wire.to(port) as wire:
        wire.send_lines(
            "POST /api/v1/artifacts HTTP/1.1", "Host: HERE", AUTH, "Content-Length: 1000000",
            "Content-Type: multipart/form-data; boundary=b",
        )  # fmt: skip
        wire.writer.write(b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nbegun')
        assert await wire.status() == 408
    assert _incoming(tmp_path) == []


async def test_a_dropped_stream_client_is_disconnected_without_an_error_in_the_log(
    front: tuple[Starlette, int], caplog: pytest.LogCaptureFixture
) -> None:
    app, port = front
    async with Wire.to(port) as wire:
        wire.send_lines("GET /api/v1/events HTTP/1.1", "Host: HERE", AUTH)
        await wire.reader.readuntil(b"event: hello")
        (client,) = app.state.hub.clients
        client.drop()
        with contextlib.suppress(ConnectionError):
            assert not (await wire.reader.read()).endswith(b"0\r\n\r\n")
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_the_shutdown_callback_runs_while_the_store_is_open(society: Society, app: Starlette) -> None:
    calls: list[tuple[int, bool]] = []

    async def on_stop(early: int) -> None:
        calls.append((early, await society.store.last_event() > 0))

    await society.send(to="ada", text="later", delay_ms=60_000)
    assert await society.stop(on_stop) == 1
    assert calls == [(1, True)]


def test_a_taken_port_and_a_foreign_address_give_one_line_errors() -> None:
    taken = listen("127.0.0.1", 0)
    try:
        with pytest.raises(CoterieError, match=r"is taken by another program: choose another with --port"):
            listen("127.0.0.1", port_of(taken))
    finally:
        close(taken)
    for host in ("192.0.2.1", "no such host"):
        with pytest.raises(CoterieError, match=r"this machine has no address .* --host"):
            listen(host, 0)


def test_localhost_listens_on_one_port_for_all_its_addresses() -> None:
    sockets = listen("localhost", 0)
    assert {s.getsockname()[1] for s in sockets} == {port_of(sockets)}
    assert socket.AF_INET in {s.family for s in sockets}
    close(sockets)
