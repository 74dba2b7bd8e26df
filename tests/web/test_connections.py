"""Slow, endless and too many connections are closed, and the owner is served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable

import pytest

from coterie.society import Society
from coterie.testing import FakeClock
from coterie.web.addresses import addresses
from coterie.web.app import build_app
from coterie.web.auth import Access
from coterie.web.connections import MAX_HEAD_BYTES, MAX_LEFTOVER_BYTES, MAX_UNAUTHENTICATED_PER_ADDRESS, Connections
from coterie.web.server import WebServer, listen, port_of

from .test_server import AUTH, TIMEOUT, Wire

CHUNKED = "POST /session HTTP/1.1\r\nHost: HERE\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
KB = b"x" * 1024


class Server:
    def __init__(self, port: int, connections: Connections) -> None:
        self.port, self.connections = port, connections
        self.slowest = 0.0
        """Seconds of the owner's slowest request."""

    async def connect(self, text: str = "") -> Wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(text.replace("HERE", f"127.0.0.1:{self.port}").encode())
        return Wire(self.port, reader, writer)

    async def attack(self, text: str, count: int) -> list[Wire]:
        """Open `count` connections that send only `text`."""
        return [await self.connect(text) for _ in range(count)]

    def connect_unaccepted(self, text: str = "GET /") -> socket.socket:
        """A connection with `text` sent, which the server has not accepted yet."""
        connection = socket.create_connection(("127.0.0.1", self.port), TIMEOUT)
        connection.send(text.replace("HERE", f"127.0.0.1:{self.port}").encode())
        connection.setblocking(False)
        return connection

    async def serves_the_owner(self) -> None:
        """Check that a new connection with the token gets its response."""
        began = time.monotonic()
        async with Wire.to(self.port) as wire:
            wire.send_lines("GET /metrics HTTP/1.1", "Host: HERE", AUTH)
            assert await wire.status() == 200
        self.slowest = max(self.slowest, time.monotonic() - began)


@pytest.fixture
async def server(
    society: Society, access: Access, clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[Server]:
    sockets = listen("127.0.0.1", 0)
    app = build_app(society, access, where=addresses("127.0.0.1", port_of(sockets)), clock=clock)
    web = WebServer(app, sockets, clock=clock)
    await web.start()
    found = Server(port_of(sockets), web.connections)
    yield found
    await app.state.hub.shut_down(0)
    await web.stop()
    with capsys.disabled():
        if found.slowest:
            print(f" [owner served within {found.slowest * 1000:.0f} ms]", end="")


async def read_to_end(wire: Wire) -> bytes:
    """Bytes received until the server closed the connection. Fails if it stays open."""
    async with asyncio.timeout(TIMEOUT):
        with contextlib.suppress(ConnectionError):
            return await wire.reader.read()
    return b""


async def all_ended(wires: Iterable[Wire]) -> None:
    for wire in wires:
        await read_to_end(wire)
        wire.writer.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not true():
            await asyncio.sleep(0.01)


# Incomplete requests

HALF = {
    "nothing": "",
    "half a request line": "GET /hea",
    "half of the headers": "GET /healthz HTTP/1.1\r\nHost: HERE\r\nX: ",
    "half a body": CHUNKED.replace("Transfer-Encoding: chunked", "Content-Length: 99") + "{",
    "half a chunk": CHUNKED + "5\r\n{",
    "half a body that is refused": "POST /api/v1/messages HTTP/1.1\r\nHost: HERE\r\nContent-Length: 99\r\n\r\n{",
    "a body that no route reads": "GET /healthz HTTP/1.1\r\nHost: HERE\r\nContent-Length: 99\r\n\r\n{",
    "half of a second request": "GET /healthz HTTP/1.1\r\nHost: HERE\r\n\r\nGET /healthz HTTP/1.1\r\nHo",
}


@pytest.mark.parametrize("sent", HALF.values(), ids=HALF)
async def test_the_connection_of_an_incomplete_request_is_closed_after_its_timeout(
    server: Server, clock: FakeClock, sent: str
) -> None:
    wire = await server.connect(sent)
    await until(lambda: len(server.connections) == 1)
    await server.serves_the_owner()  # one event loop: the bytes sent before this have been read
    await clock.advance(seconds=100)
    received = await read_to_end(wire)
    if sent and "refused" not in sent and b"HTTP/1.1" in received:
        assert received.count(b"HTTP/1.1") <= 2
    await until(lambda: len(server.connections) == 0)
    wire.writer.close()


async def test_a_slow_sender_gets_408(server: Server, clock: FakeClock) -> None:
    for text, words in ((HALF["half of the headers"], b"headers"), (HALF["half a body"], b"body")):
        wire = await server.connect(text)
        await server.serves_the_owner()
        await clock.advance(seconds=31)
        received = await read_to_end(wire)
        assert received.startswith(b"HTTP/1.1 408 ") and words in received
        wire.writer.close()


@pytest.mark.parametrize("sent", HALF.values(), ids=HALF)
async def test_three_hundred_incomplete_requests_do_not_block_the_owner(server: Server, sent: str) -> None:
    wires = await server.attack(sent, 300)
    await server.serves_the_owner()
    await until(lambda: server.connections.unauthenticated <= MAX_UNAUTHENTICATED_PER_ADDRESS)
    await all_ended(wires[: 300 - MAX_UNAUTHENTICATED_PER_ADDRESS - 1])  # the oldest
    await server.serves_the_owner()
    for wire in wires:
        wire.writer.close()


async def test_authenticated_connections_stay_open_during_a_flood_of_unauthenticated_ones(server: Server) -> None:
    stream = await server.connect(f"GET /api/v1/events HTTP/1.1\r\nHost: HERE\r\n{AUTH}\r\n\r\n")
    async with asyncio.timeout(TIMEOUT):
        await stream.reader.readuntil(b"event: hello")
    async with Wire.to(server.port) as kept:
        kept.send_lines("GET /metrics HTTP/1.1", "Host: HERE", AUTH)
        assert await kept.status() == 200
        wires = await server.attack(HALF["half of the headers"], 300)
        await server.serves_the_owner()
        kept.send_lines("GET /metrics HTTP/1.1", "Host: HERE", AUTH)
        assert await kept.status() == 200
    assert not stream.reader.at_eof()
    for wire in (*wires, stream):
        wire.writer.close()


async def test_the_owner_is_served_between_two_floods_from_the_same_address(server: Server) -> None:
    """The second flood is larger than the limit per address."""
    for _ in range(3):
        flood = [server.connect_unaccepted() for _ in range(2 * MAX_UNAUTHENTICATED_PER_ADDRESS)]
        owner = server.connect_unaccepted(f"GET /metrics HTTP/1.1\r\nHost: HERE\r\n{AUTH}\r\n\r\n")
        flood += [server.connect_unaccepted() for _ in range(2 * MAX_UNAUTHENTICATED_PER_ADDRESS)]
        began = time.monotonic()
        async with asyncio.timeout(TIMEOUT):
            answer = await asyncio.get_running_loop().sock_recv(owner, 1000)
        server.slowest = max(server.slowest, time.monotonic() - began)
        assert answer.startswith(b"HTTP/1.1 200 ")
        await server.serves_the_owner()
        for each in (*flood, owner):
            each.close()


async def test_a_connection_counts_as_unauthenticated_after_a_request_without_a_secret(server: Server) -> None:
    """A proxy sends the requests of many clients over one connection."""
    async with Wire.to(server.port) as wire:
        wire.send_lines("GET /metrics HTTP/1.1", "Host: HERE", AUTH)
        assert await wire.status() == 200
        assert (len(server.connections), server.connections.unauthenticated) == (1, 0)
        wire.send_lines("GET /healthz HTTP/1.1", "Host: HERE")
        assert await wire.status() == 200
        assert server.connections.unauthenticated == 1


async def test_a_trickled_body_is_refused_and_a_steady_upload_succeeds(server: Server, clock: FakeClock) -> None:
    drip, flow = await server.connect(CHUNKED), await server.connect(CHUNKED)
    begin, end = '--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n', b"\r\n--b--\r\n"
    upload = await server.connect(
        f"POST /api/v1/artifacts HTTP/1.1\r\nHost: HERE\r\n{AUTH}\r\n"
        f"Content-Length: {len(begin) + 8 * 8192 + len(end)}\r\n"
        f"Content-Type: multipart/form-data; boundary=b\r\n\r\n{begin}"
    )
    for turn in range(8):
        upload.writer.write(b"y" * 8192)
        if turn < 1:
            drip.writer.write(b"100\r\n" + b" " * 256 + b"\r\n")
        if turn < 3:
            flow.writer.write(b"1400\r\n" + b" " * 5120 + b"\r\n")
        await server.serves_the_owner()
        await clock.advance(seconds=25)
    assert (await read_to_end(drip)).startswith(b"HTTP/1.1 408 ")
    assert (await read_to_end(flow)).startswith(b"HTTP/1.1 413 ")
    upload.writer.write(end)
    async with asyncio.timeout(TIMEOUT):
        assert await upload.status() == 201
    for wire in (drip, flow, upload):
        wire.writer.close()


async def test_a_connection_whose_client_does_not_read_the_response_is_closed(
    server: Server, society: Society, clock: FakeClock
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"z" * 1_000_000

    ref = (await society.artifacts.put(pieces(), "big")).ref
    wire = await server.connect(f"GET /api/v1/artifacts/{ref} HTTP/1.1\r\nHost: HERE\r\n{AUTH}\r\n\r\n")
    async with asyncio.timeout(TIMEOUT):
        await wire.reader.readuntil(b"zzz")
    wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await server.serves_the_owner()
    await until(lambda: len(server.connections) == 1)
    for _ in range(3):
        await clock.advance(seconds=31)
        await server.serves_the_owner()
    await until(lambda: len(server.connections) == 0)
    wire.writer.transport.abort()


# Endless input


def endless(begin: str, piece: bytes) -> tuple[str, bytes]:
    return begin, piece * (65_536 // len(piece))


GET = "GET /healthz HTTP/1.1\r\nHost: HERE\r\n"
REFUSED = "POST /api/v1/messages HTTP/1.1\r\nHost: HERE\r\n"
ENDLESS = {
    "one header": endless(GET + "X: ", b"x"),
    "headers": endless(GET, b"X: y\r\n"),
    "an address": endless("GET /", b"x"),
    "empty lines": endless("", b"\r\n"),
    "a header of a second request": endless(GET + "\r\n" + GET + "X: ", b"x"),
    "one trailer": endless(CHUNKED + "1\r\n{\r\n0\r\nX: ", b"x"),
    "trailers": endless(CHUNKED + "1\r\n{\r\n0\r\n", b"X: y\r\n"),
    "a chunk's extension": endless(CHUNKED + "1;", b"x"),
    "extensions of small chunks": endless(CHUNKED, b"1;" + b"x" * 250 + b"\r\n \r\n"),
    "digits of a chunk's size": endless(CHUNKED, b"0"),
    "trailers where no body is read": endless(GET + "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX: ", b"x"),
    "a body where none is read": endless(GET + "Content-Length: 99999999999\r\n\r\n", b"x"),
    "chunks where no body is read": endless(GET + "Transfer-Encoding: chunked\r\n\r\n", b"400\r\n" + KB + b"\r\n"),
    "a body after its refusal": endless(REFUSED + "Content-Length: 99999999999\r\n\r\n", b"x"),
    "bytes after the last request": endless(GET + "Connection: close\r\n\r\n", b"x"),
    "requests in one go": endless("", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n"),
}  # fmt: skip
MOST = 8 * MAX_LEFTOVER_BYTES
"""Bytes that each attacker tries to send."""


@pytest.mark.parametrize(("begin", "piece"), ENDLESS.values(), ids=ENDLESS)
async def test_endless_input_is_cut_off_and_the_owner_is_served(server: Server, begin: str, piece: bytes) -> None:
    async def send(wire: Wire) -> bool:
        """Send endless input; return whether the server closed the connection."""
        with contextlib.suppress(ConnectionError):
            for _ in range(MOST // len(piece)):
                wire.writer.write(piece)
                await wire.writer.drain()
                if wire.reader.at_eof():
                    return True
            return False
        return True

    wires = await server.attack(begin, 8)
    attacks = [asyncio.create_task(send(wire)) for wire in wires]
    for _ in range(3):
        await server.serves_the_owner()
    async with asyncio.timeout(TIMEOUT):
        assert await asyncio.gather(*attacks) == [True] * len(wires)
    for wire in wires:
        wire.writer.close()
    await until(lambda: len(server.connections) == 0)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (GET + "X: " + "x" * 2 * MAX_HEAD_BYTES, b"431"),
        (GET + "X: y\r\n" * 300 + "\r\n", b"431"),
        (CHUNKED + "1\r\n{\r\n0\r\nX: " + "x" * 2 * MAX_HEAD_BYTES, b"400"),
        (CHUNKED + "1;" + "x" * 2 * MAX_HEAD_BYTES, b"400"),
    ],
)
async def test_input_that_is_too_long_gets_431_or_400(server: Server, text: str, status: bytes) -> None:
    wire = await server.connect(text)
    received = await read_to_end(wire)
    # A TCP reset may discard the response; no other response is allowed.
    assert not received or received.startswith(b"HTTP/1.1 " + status)
    wire.writer.close()


async def test_trailers_are_not_headers(server: Server) -> None:
    """A proxy checks and replaces headers, not trailers."""
    wire = await server.connect(
        "POST /api/v1/links HTTP/1.1\r\nHost: HERE\r\nContent-Type: application/json\r\n"
        f"Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n{AUTH}\r\n\r\n"
    )
    async with asyncio.timeout(TIMEOUT):
        assert await wire.status() == 401
    wire.writer.close()


async def test_all_requests_of_a_lost_connection_are_cancelled(server: Server, society: Society) -> None:
    """Also a request with another one pipelined behind it."""
    wire = await server.connect(
        f"GET /api/v1/events HTTP/1.1\r\nHost: HERE\r\n{AUTH}\r\n\r\nGET /metrics HTTP/1.1\r\nHost: HERE\r\n\r\n"
    )
    async with asyncio.timeout(TIMEOUT):
        await wire.reader.readuntil(b"event: hello")
    named = [task for task in asyncio.all_tasks() if task.get_name() == "coterie-stream-client"]
    assert named
    wire.writer.transport.abort()
    await until(lambda: all(task.done() for task in named))


# Which connections are closed at the limit


class Peer:
    def __init__(self, address: str) -> None:
        self.address, self.closed = address, False

    def abort(self) -> None:
        self.closed = True

    def check_deadlines(self, now: float) -> None: ...


def test_an_address_with_many_connections_loses_only_its_own(clock: FakeClock) -> None:
    connections = Connections(clock, max_unauthenticated=10, max_per_address=8)
    quiet = [Peer(f"198.51.100.{n}") for n in range(4)]
    loud = [Peer("203.0.113.1") for _ in range(40)]
    network = [Peer(f"2001:db8::{n + 1:x}") for n in range(40)]
    for peer in (*quiet, *loud, *network):
        connections.add(peer)
    assert not any(peer.closed for peer in quiet)
    assert connections.unauthenticated == len(connections) == 10
    assert [peer.closed for peer in network] == sorted((peer.closed for peer in network), reverse=True)


def test_authenticated_connections_are_never_closed_for_others(clock: FakeClock) -> None:
    connections = Connections(clock, max_unauthenticated=10, max_per_address=8)
    owner, other = Peer("127.0.0.1"), Peer("127.0.0.1")
    for peer in (owner, other):
        connections.add(peer)
        connections.set_authenticated(peer, True)
    flood = [Peer("127.0.0.1") for _ in range(100)]
    for peer in flood:
        connections.add(peer)
    assert not owner.closed and connections.unauthenticated == 8
    connections.set_authenticated(other, False)
    assert connections.unauthenticated == 8 and not other.closed


def test_a_trusted_proxy_is_exempt_from_the_limit_per_address(clock: FakeClock) -> None:
    connections = Connections(
        clock, max_unauthenticated=10, max_per_address=4, is_proxy=lambda address: address == "10.0.0.1"
    )
    proxied, direct = [Peer("10.0.0.1") for _ in range(10)], [Peer("10.0.0.2") for _ in range(10)]
    for peer in proxied:
        connections.add(peer)
    assert not any(peer.closed for peer in proxied)
    for peer in direct:
        connections.add(peer)
    assert (sum(not peer.closed for peer in proxied), sum(not peer.closed for peer in direct)) == (6, 4)
