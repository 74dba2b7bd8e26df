"""Connections to model services: whoever is sent away in the middle of connecting leaves no socket behind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpcore
import pytest
import pytest_asyncio

from coterie.llm.providers import sockets
from coterie.llm.providers.sockets import AsyncioBackend

PATIENCE = 5
"""Seconds. Nothing waits that long; it only keeps what hangs from hanging the tests."""
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
    """Every socket that is made."""
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
    """Whatever the name, it has these addresses."""

    async def look_up(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in ports]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_one_who_is_sent_away_while_connecting_leaves_no_socket_behind(
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
    task = asyncio.create_task(AsyncioBackend().connect_tcp("127.0.0.1", port, PATIENCE))
    async with asyncio.timeout(PATIENCE):
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        # The server's end, too, hears that nobody is there any more.
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError)
    assert made[0].fileno() == -1, "the others are the server's"


async def test_an_address_that_refuses_is_followed_by_the_next(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, closed_port(), port)
    stream = await AsyncioBackend().connect_tcp("a.name", port, PATIENCE)
    assert stream.get_extra_info("socket").getpeername()[1] == port
    await stream.aclose()


async def test_an_address_that_keeps_silent_is_followed_by_the_next_and_given_up(
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
    monkeypatch.setattr(sockets, "_TRY_NEXT_ADDRESS", 0.001)
    made.clear()
    stream = await AsyncioBackend().connect_tcp("a.name", port, PATIENCE)
    assert stream.get_extra_info("socket").getpeername()[1] == port
    await stream.aclose()
    assert made[0].fileno() == -1


async def test_when_nobody_answers_the_first_ones_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, closed_port(), closed_port())
    with pytest.raises(httpcore.ConnectError, match="Connect call failed"):
        await AsyncioBackend().connect_tcp("a.name", 1, PATIENCE)
