"""Connections that strangers hold, starve or flood: they end, and the owner is served all the while."""

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

from .test_server import AUTH, PATIENCE, Wire

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
        """So many connections that send only `text`."""
        return [await self.connect(text) for _ in range(count)]

    def knock(self, text: str = "GET /") -> socket.socket:
        """A connection that waits to be accepted, with `text` sent already."""
        each = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        each.send(text.replace("HERE", f"127.0.0.1:{self.port}").encode())
        each.setblocking(False)
        return each

    async def serves_the_owner(self) -> None:
        """A new connection with the token gets its answer."""
        began = time.monotonic()
        async with Wire.to(self.port) as wire:
            wire.say("GET /metrics HTTP/1.1", "Host: HERE", AUTH)
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


async def has_ended(wire: Wire) -> bytes:
    """What came until the server closed the connection. Fails if it stays open."""
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionError):
            return await wire.reader.read()
    return b""


async def all_ended(wires: Iterable[Wire]) -> None:
    for wire in wires:
        await has_ended(wire)
        wire.writer.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():
            await asyncio.sleep(0.01)


# Half-sent requests

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
async def test_a_half_sent_request_ends_in_time(server: Server, clock: FakeClock, sent: str) -> None:
    wire = await server.connect(sent)
    await until(lambda: len(server.connections) == 1)
    await server.serves_the_owner()  # on the same loop: what was sent before has been read
    await clock.advance(seconds=100)
    told = await has_ended(wire)
    if sent and "refused" not in sent and b"HTTP/1.1" in told:
        assert told.count(b"HTTP/1.1") <= 2
    await until(lambda: len(server.connections) == 0)
    wire.writer.close()


async def test_who_sends_too_slowly_is_told(server: Server, clock: FakeClock) -> None:
    for text, words in ((HALF["half of the headers"], b"headers"), (HALF["half a body"], b"body")):
        wire = await server.connect(text)
        await server.serves_the_owner()
        await clock.advance(seconds=31)
        told = await has_ended(wire)
        assert told.startswith(b"HTTP/1.1 408 ") and words in told
        wire.writer.close()


@pytest.mark.parametrize("sent", HALF.values(), ids=HALF)
async def test_three_hundred_half_sent_requests_do_not_silence_the_owner(server: Server, sent: str) -> None:
    wires = await server.attack(sent, 300)
    await server.serves_the_owner()
    await until(lambda: server.connections.unauthenticated <= MAX_UNAUTHENTICATED_PER_ADDRESS)
    await all_ended(wires[: 300 - MAX_UNAUTHENTICATED_PER_ADDRESS - 1])  # the oldest
    await server.serves_the_owner()
    for wire in wires:
        wire.writer.close()


async def test_the_owners_connections_stay_open_while_strangers_come_and_go(server: Server) -> None:
    stream = await server.connect(f"GET /api/v1/events HTTP/1.1\r\nHost: HERE\r\n{AUTH}\r\n\r\n")
    async with asyncio.timeout(PATIENCE):
        await stream.reader.readuntil(b"event: hello")
    async with Wire.to(server.port) as kept:
        kept.say("GET /metrics HTTP/1.1", "Host: HERE", AUTH)
        assert await kept.status() == 200
        wires = await server.attack(HALF["half of the headers"], 300)
        await server.serves_the_owner()
        kept.say("GET /metrics HTTP/1.1", "Host: HERE", AUTH)
        assert await kept.status() == 200
    assert not stream.reader.at_eof()
    for wire in (*wires, stream):
        wire.writer.close()


async def test_the_owner_gets_through_between_two_crowds_that_come_at_once(server: Server) -> None:
    """From the owner's own address: the second crowd is larger than all strangers of one address may be."""
    for _ in range(3):
        crowd = [server.knock() for _ in range(2 * MAX_UNAUTHENTICATED_PER_ADDRESS)]
        owner = server.knock(f"GET /metrics HTTP/1.1\r\nHost: HERE\r\n{AUTH}\r\n\r\n")
        crowd += [server.knock() for _ in range(2 * MAX_UNAUTHENTICATED_PER_ADDRESS)]
        began = time.monotonic()
        async with asyncio.timeout(PATIENCE):
            answer = await asyncio.get_running_loop().sock_recv(owner, 1000)
        server.slowest = max(server.slowest, time.monotonic() - began)
        assert answer.startswith(b"HTTP/1.1 200 ")
        await server.serves_the_owner()
        for each in (*crowd, owner):
            each.close()


async def test_a_connection_whose_next_request_brings_no_secret_is_a_strangers_again(server: Server) -> None:
    """A proxy sends the requests of many people over one connection."""
    async with Wire.to(server.port) as wire:
        wire.say("GET /metrics HTTP/1.1", "Host: HERE", AUTH)
        assert await wire.status() == 200
        assert (len(server.connections), server.connections.unauthenticated) == (1, 0)
        wire.say("GET /healthz HTTP/1.1", "Host: HERE")
        assert await wire.status() == 200
        assert server.connections.unauthenticated == 1


async def test_a_body_that_drips_ends_and_an_upload_that_goes_on_does_not(server: Server, clock: FakeClock) -> None:
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
    assert (await has_ended(drip)).startswith(b"HTTP/1.1 408 ")
    assert (await has_ended(flow)).startswith(b"HTTP/1.1 413 ")
    upload.writer.write(end)
    async with asyncio.timeout(PATIENCE):
        assert await upload.status() == 201
    for wire in (drip, flow, upload):
        wire.writer.close()


async def test_an_answer_that_nobody_takes_is_given_up(server: Server, society: Society, clock: FakeClock) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"z" * 1_000_000

    ref = (await society.artifacts.put(pieces(), "big")).ref
    wire = await server.connect(f"GET /api/v1/artifacts/{ref} HTTP/1.1\r\nHost: HERE\r\n{AUTH}\r\n\r\n")
    async with asyncio.timeout(PATIENCE):
        await wire.reader.readuntil(b"zzz")
    wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await server.serves_the_owner()
    await until(lambda: len(server.connections) == 1)
    for _ in range(3):
        await clock.advance(seconds=31)
        await server.serves_the_owner()
    await until(lambda: len(server.connections) == 0)
    wire.writer.transport.abort()


# Without end


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
async def test_what_has_no_end_is_cut_off_and_the_owner_is_served(server: Server, begin: str, piece: bytes) -> None:
    async def send(wire: Wire) -> bool:
        """True if the server stopped it."""
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
    async with asyncio.timeout(PATIENCE):
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
async def test_what_is_too_long_is_told_so(server: Server, text: str, status: bytes) -> None:
    wire = await server.connect(text)
    told = await has_ended(wire)
    # A reset on the way may take the answer with it; another answer never comes.
    assert not told or told.startswith(b"HTTP/1.1 " + status)
    wire.writer.close()


async def test_trailers_are_not_headers(server: Server) -> None:
    """A proxy checks and replaces headers, not trailers."""
    wire = await server.connect(
        "POST /api/v1/links HTTP/1.1\r\nHost: HERE\r\nContent-Type: application/json\r\n"
        f"Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n{AUTH}\r\n\r\n"
    )
    async with asyncio.timeout(PATIENCE):
        assert await wire.status() == 401
    wire.writer.close()


async def test_every_request_of_a_connection_that_is_lost_ends(server: Server, society: Society) -> None:
    """Also one before another that was pipelined behind it."""
    wire = await server.connect(
        f"GET /api/v1/events HTTP/1.1\r\nHost: HERE\r\n{AUTH}\r\n\r\nGET /metrics HTTP/1.1\r\nHost: HERE\r\n\r\n"
    )
    async with asyncio.timeout(PATIENCE):
        await wire.reader.readuntil(b"event: hello")
    named = [task for task in asyncio.all_tasks() if task.get_name() == "coterie-stream-client"]
    assert named
    wire.writer.transport.abort()
    await until(lambda: all(task.done() for task in named))


# Whom it closes


class Peer:
    def __init__(self, address: str) -> None:
        self.address, self.closed = address, False

    def abort(self) -> None:
        self.closed = True

    def check_deadlines(self, now: float) -> None: ...


def test_who_opens_many_connections_closes_only_their_own(clock: FakeClock) -> None:
    connections = Connections(clock, max_unauthenticated=10, max_per_address=8)
    quiet = [Peer(f"198.51.100.{n}") for n in range(4)]
    loud = [Peer("203.0.113.1") for _ in range(40)]
    network = [Peer(f"2001:db8::{n + 1:x}") for n in range(40)]
    for peer in (*quiet, *loud, *network):
        connections.add(peer)
    assert not any(peer.closed for peer in quiet)
    assert connections.unauthenticated == len(connections) == 10
    assert [peer.closed for peer in network] == sorted((peer.closed for peer in network), reverse=True)


def test_who_brought_a_right_secret_is_never_closed_for_others(clock: FakeClock) -> None:
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


def test_a_trusted_proxy_may_have_as_many_as_all_others_together(clock: FakeClock) -> None:
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
