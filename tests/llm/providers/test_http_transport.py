"""Transport of model services: connecting, cancellation, several addresses, environment proxies."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpcore
import pytest
import pytest_asyncio

from coterie.llm.providers.http_transport import AsyncioBackend, AsyncioTransport, make_transport

CONNECT_SECONDS = 5
Connect = Callable[[socket.socket, Any], Awaitable[None]]


@pytest_asyncio.fixture
async def port() -> AsyncIterator[int]:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """All sockets created during the test."""
    found: list[socket.socket] = []

    class Noted(socket.socket):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            found.append(self)

    monkeypatch.setattr(socket, "socket", Noted)
    return found


def connect_by(monkeypatch: pytest.MonkeyPatch, way: Callable[[Connect], Connect]) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "sock_connect", way(loop.sock_connect))


def resolve_to(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    """Resolve every host name to 127.0.0.1 with these ports."""

    async def look_up(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in ports]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_cancelled_connect_leaves_no_open_socket(
    port: int, made: list[socket.socket], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def way(connect: Connect) -> Connect:
        async def connecting(one: socket.socket, address: Any) -> None:
            if moment == "before":
                task.cancel()
            await connect(one, address)
            if moment == "after":
                task.cancel()

        return connecting

    connect_by(monkeypatch, way)
    task = asyncio.create_task(AsyncioBackend().connect_tcp("127.0.0.1", port, CONNECT_SECONDS))
    async with asyncio.timeout(CONNECT_SECONDS):
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        # Let the server's handler end as well.
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError)
    assert made[0].fileno() == -1, "the others are the server's"


async def test_a_refusing_address_is_followed_by_the_next(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, closed_port(), port)
    stream = await AsyncioBackend().connect_tcp("a.name", port, CONNECT_SECONDS)
    assert stream.get_extra_info("socket").getpeername()[1] == port
    await stream.aclose()


async def test_a_silent_address_is_followed_by_the_next_and_abandoned(
    port: int, made: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = closed_port()

    def way(connect: Connect) -> Connect:
        async def connecting(one: socket.socket, address: Any) -> None:
            if address[1] == silent:
                await asyncio.Event().wait()
            await connect(one, address)

        return connecting

    resolve_to(monkeypatch, silent, port)
    connect_by(monkeypatch, way)
    made.clear()
    stream = await AsyncioBackend(next_address_seconds=0.001).connect_tcp("a.name", port, CONNECT_SECONDS)
    assert stream.get_extra_info("socket").getpeername()[1] == port
    await stream.aclose()
    assert made[0].fileno() == -1


async def test_if_all_addresses_fail_the_first_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, closed_port(), closed_port())
    with pytest.raises(httpcore.ConnectError, match="Connect call failed"):
        await AsyncioBackend().connect_tcp("a.name", 1, CONNECT_SECONDS)


async def test_httpx_handles_environment_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    context = ssl.create_default_context()
    assert isinstance(make_transport("http://models.example/v1", context), AsyncioTransport)

    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "localhost")
    assert make_transport("http://models.example/v1", context) is None
    assert isinstance(make_transport("http://localhost:11434/v1", context), AsyncioTransport)
    assert isinstance(make_transport("https://models.example/v1", context), AsyncioTransport)
