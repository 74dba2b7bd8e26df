"""What only shows on a real socket: broken requests, slow senders, senders who leave, memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fastapi import FastAPI

from coterie.errors import CoterieError
from coterie.society import Society
from coterie.stores.sqlite import SqliteStore
from coterie.testing import FakeClock
from coterie.web.addresses import addresses
from coterie.web.app import build_app
from coterie.web.auth import Access
from coterie.web.middleware import MAX_BODY_BYTES
from coterie.web.server import WebServer, close, listen, port_of

from .conftest import TOKEN

PATIENCE = 20


@pytest.fixture
async def front(society: Society, access: Access, clock: FakeClock) -> AsyncIterator[tuple[FastAPI, int]]:
    sockets = listen("127.0.0.1", 0)
    app = build_app(society, access, where=addresses("127.0.0.1", port_of(sockets)), clock=clock)
    server = WebServer(app, sockets, clock=clock)
    await server.start()
    yield app, port_of(sockets)
    await server.stop()


@pytest.fixture
def port(front: tuple[FastAPI, int]) -> int:
    return front[1]


class Wire:
    """A connection on which anything can be written."""

    def __init__(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.port, self.reader, self.writer = port, reader, writer

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator[Wire]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(PATIENCE):
            yield cls(port, reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def say(self, *lines: str) -> None:
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
async def test_a_missing_double_or_strange_host_is_misdirected(port: int, lines: list[str]) -> None:
    async with Wire.to(port) as wire:
        wire.say(*lines)
        assert await wire.status() == 421


@pytest.mark.parametrize("host", ["HERE", "LOCALHOST:PORT", "[::1]:PORT"])
async def test_its_own_names_are_known(port: int, host: str) -> None:
    async with Wire.to(port) as wire:
        wire.say("GET /healthz HTTP/1.1", f"Host: {host.replace('PORT', str(port))}")
        assert await wire.status() == 200
        assert b"server:" not in wire.head


async def test_headers_without_end_are_cut_off(port: int) -> None:
    async with Wire.to(port) as wire:
        wire.writer.write(b"GET /healthz HTTP/1.1\r\nX: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                wire.writer.write(b"x" * 65_536)
                await wire.writer.drain()
        with contextlib.suppress(ConnectionError):
            assert b"HTTP/1.1 431 " in await wire.reader.read()


async def test_a_chunked_body_beyond_the_limit_is_refused_and_the_connection_goes_on(port: int) -> None:
    async with Wire.to(port) as wire:
        wire.say("POST /session HTTP/1.1", "Host: HERE", "Content-Type: application/json", "Transfer-Encoding: chunked")
        for _ in range(2 * MAX_BODY_BYTES // 65_536):
            wire.writer.write(b"10000\r\n" + b" " * 65_536 + b"\r\n")
            await wire.writer.drain()
        wire.writer.write(b"0\r\n\r\n")
        assert await wire.status() == 413
        assert b'"body_too_large"' in wire.body
        wire.say("GET /healthz HTTP/1.1", "Host: HERE")
        assert await wire.status() == 200


def _incoming(society: Society) -> list[Path]:
    assert isinstance(society.store, SqliteStore)
    return list((Path(society.store._path).parent / "artifacts" / "incoming").iterdir())


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():
            await asyncio.sleep(0.01)


async def test_nothing_stays_of_a_file_whose_sender_left(port: int, society: Society) -> None:
    async with Wire.to(port) as wire:
        wire.say(
            "POST /api/v1/artifacts HTTP/1.1", "Host: HERE", AUTH, "Content-Length: 1000000",
            "Content-Type: multipart/form-data; boundary=b",
        )  # fmt: skip
        wire.writer.write(b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nbegun')
        await _until(lambda: len(_incoming(society)) == 1)
    await _until(lambda: _incoming(society) == [])
    assert await society.artifacts.latest() == []


async def test_a_silent_sender_is_told_and_nothing_stays(
    port: int, society: Society, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.web.uploads.IDLE_TIMEOUT_SECONDS", 0.1)
    async with Wire.to(port) as wire:
        wire.say(
            "POST /api/v1/artifacts HTTP/1.1", "Host: HERE", AUTH, "Content-Length: 1000000",
            "Content-Type: multipart/form-data; boundary=b",
        )  # fmt: skip
        wire.writer.write(b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nbegun')
        assert await wire.status() == 408
    assert _incoming(society) == []


async def test_a_client_that_is_let_go_loses_its_connection_and_no_error_is_logged(
    front: tuple[FastAPI, int], caplog: pytest.LogCaptureFixture
) -> None:
    app, port = front
    async with Wire.to(port) as wire:
        wire.say("GET /api/v1/events HTTP/1.1", "Host: HERE", AUTH)
        await wire.reader.readuntil(b"event: hello")
        (client,) = app.state.hub.clients
        client.drop()
        with contextlib.suppress(ConnectionError):
            assert not (await wire.reader.read()).endswith(b"0\r\n\r\n")
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_stopping_says_goodbye_while_the_store_is_open(society: Society, app: FastAPI) -> None:
    heard: list[tuple[int, bool]] = []

    async def last_words(early: int) -> None:
        heard.append((early, await society.store.last_event() > 0))

    await society.send(to="ada", text="later", delay_ms=60_000)
    assert await society.stop(last_words) == 1
    assert heard == [(1, True)]


def test_a_port_that_is_taken_or_an_address_that_is_not_ours_is_one_sentence() -> None:
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
