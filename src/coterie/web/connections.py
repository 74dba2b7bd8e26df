"""Open connections, with limits that protect the server from unauthenticated clients.

A connection is unauthenticated while its last request had no valid secret. One connection more than the limit closes
the oldest unauthenticated one. The owner often has the same address as an attacker (a page or a program on the same
machine, or a proxy). So a new connection is never refused, and an authenticated one is never closed for others.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, Protocol, cast

import uvicorn
from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from coterie.clock import Clock
from coterie.web.addresses import client_key_of_address

log = logging.getLogger(__name__)

HANG_UP = "coterie.hang_up"
"""ASGI extension: lets a route close a connection whose client reads nothing."""
AUTHENTICATED = "coterie.authenticated"
"""ASGI extension: lets the middleware report whether a request had a valid secret."""
MAX_UNAUTHENTICATED = 512
MAX_UNAUTHENTICATED_PER_ADDRESS = 128
MAX_HEAD_BYTES = 64 << 10
"""Request line and headers; also the bytes between two pieces of a body, and trailers."""
MAX_HEADERS = 256
FRAMING_FACTOR = 16
"""Bytes of chunk sizes and extensions per byte of body, beyond `MAX_HEAD_BYTES`. A chunk of one byte needs 5."""
MAX_LEFTOVER_BYTES = 8 << 20
"""Body bytes that an unauthenticated client may send after its answer, so that it still reads the answer."""
MAX_PIPELINED = 16
"""Requests that may wait for an earlier answer on the same connection."""
PARSE_BYTES = 32 << 10
"""Bytes parsed between two checks of the limits."""
HEAD_TIMEOUT_SECONDS = 15.0
BODY_PERIOD_SECONDS, BODY_PERIOD_BYTES = 30.0, 4 << 10
"""A body must bring this many bytes in each period."""
UNAUTHENTICATED_BODY_TIMEOUT_SECONDS = 60.0
"""For the whole body: it can only be a code, or belong to a refused request."""
WRITE_TIMEOUT_SECONDS = 30.0
"""A client must read some bytes in this time."""
CLOSE_TIMEOUT_SECONDS = 5.0
WARNING_INTERVAL_SECONDS = 60.0


class Connection(Protocol):
    """The part of a connection that `Connections` uses."""

    @property
    def address(self) -> str: ...

    def abort(self) -> None:
        """Close at once, without a response."""
        ...

    def check_deadlines(self, now: float) -> None: ...


class Connections:
    """All open connections; the unauthenticated ones also by address, oldest first."""

    def __init__(
        self,
        clock: Clock,
        *,
        max_unauthenticated: int = MAX_UNAUTHENTICATED,
        max_per_address: int = MAX_UNAUTHENTICATED_PER_ADDRESS,
        is_proxy: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`is_proxy`: True for an address that many clients share; it has no limit per address."""
        self.clock = clock
        self._max, self._is_proxy = max_unauthenticated, is_proxy
        self._max_per_address = min(max_per_address, max_unauthenticated)
        self._all: set[Connection] = set()
        self._unauthenticated: dict[str, dict[Connection, None]] = {}
        """By address or network; each dict is an ordered set."""
        self._count = 0
        self._warned_at = float("-inf")

    def __len__(self) -> int:
        return len(self._all)

    @property
    def unauthenticated(self) -> int:
        return self._count

    def add(self, connection: Connection) -> None:
        """Add a new connection, unauthenticated until its first request is checked."""
        self._all.add(connection)
        self._add_unauthenticated(connection)

    def remove(self, connection: Connection) -> None:
        self._all.discard(connection)
        self._remove_unauthenticated(connection)

    def set_authenticated(self, connection: Connection, authenticated: bool) -> None:
        """Record whether the latest request of the connection had a valid secret."""
        if authenticated:
            self._remove_unauthenticated(connection)
        elif connection in self._all:
            self._add_unauthenticated(connection)

    def is_authenticated(self, connection: Connection) -> bool:
        return connection not in self._unauthenticated.get(client_key_of_address(connection.address), {})

    def check_deadlines(self) -> None:
        now = self.clock.monotonic()
        for connection in tuple(self._all):
            connection.check_deadlines(now)

    def _add_unauthenticated(self, connection: Connection) -> None:
        key = client_key_of_address(connection.address)
        same_address = self._unauthenticated.setdefault(key, {})
        if connection in same_address:
            return
        same_address[connection] = None
        self._count += 1
        if len(same_address) > self._max_per_address and not self._is_proxy(connection.address):
            self._close_oldest(same_address)
        elif self._count > self._max:
            # From the address with most connections: an attacker closes only its own.
            self._close_oldest(max(self._unauthenticated.values(), key=len))

    def _close_oldest(self, same_address: dict[Connection, None]) -> None:
        oldest = next(iter(same_address))
        self.remove(oldest)
        oldest.abort()
        now = self.clock.monotonic()
        if now - self._warned_at >= WARNING_INTERVAL_SECONDS:
            self._warned_at = now
            log.warning("too many connections without a token, %d open: closing the oldest", self._count)

    def _remove_unauthenticated(self, connection: Connection) -> None:
        key = client_key_of_address(connection.address)
        same_address = self._unauthenticated.get(key)
        if same_address is None or connection not in same_address:
            return
        del same_address[connection]
        self._count -= 1
        if not same_address:
            del self._unauthenticated[key]


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration, plus the `Connections` that the protocol registers with."""

    def __init__(self, app: Any, connections: Connections, **settings: Any) -> None:
        super().__init__(app, **settings)
        self.connections = connections


class LimitExceeded(Exception):
    """Raised inside the parser's callbacks to stop it."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with timeouts and byte limits, which uvicorn itself does not have."""

    def __init__(self, config: uvicorn.Config, *args: Any, **more: Any) -> None:
        super().__init__(config, *args, **more)
        self._connections = cast(ServerConfig, config).connections
        self._clock = self._connections.clock
        self._expected: Literal["head", "body", "next"] = "head"
        """What the client sends next; "next": the first byte of another request."""
        self._expected_since = self._clock.monotonic()
        self._period_start, self._period_bytes = self._expected_since, 0
        """Of the current period of a body."""
        self._unparsed_bytes = 0
        """Bytes since the parser's last callback."""
        self._head_bytes = self._body_bytes = self._framing_bytes = self._leftover_bytes = 0
        """Bytes of the current request; framing: all but the body; leftover: body after its answer."""
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._write_stalled: tuple[float, int] | None = None
        """Since when the client reads nothing, and the bytes that wait for it."""
        self._in_request = False
        """A request has begun and is not read to its end."""
        self._closing_since: float | None = None
        self._parse_error: tuple[int, str] | None = None
        """Status and sentence of the limit that a parser callback found exceeded."""

    # Called by `Connections`

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def abort(self) -> None:
        self.transport.abort()

    def check_deadlines(self, now: float) -> None:
        if self.transport.is_closing():
            self._closing_since = now if self._closing_since is None else self._closing_since
            if now - self._closing_since >= CLOSE_TIMEOUT_SECONDS:
                self.abort()
        elif self._is_write_stalled(now):
            self.abort()
        elif self.flow.read_paused:
            # The client cannot send before the server reads, so its time starts then.
            self._expected_since = self._period_start = now
        elif self._expected == "head" and now - self._expected_since >= HEAD_TIMEOUT_SECONDS:
            self._refuse(408, "The headers did not arrive in time.")
        elif self._expected == "body" and self._is_body_late(now):
            self._refuse(408, "The body did not arrive in time.")

    def _is_write_stalled(self, now: float) -> bool:
        if not self.flow.write_paused:
            self._write_stalled = None
            return False
        waiting = self.transport.get_write_buffer_size()
        if self._write_stalled is None or waiting < self._write_stalled[1]:
            self._write_stalled = (now, waiting)
        return now - self._write_stalled[0] >= WRITE_TIMEOUT_SECONDS

    def _is_body_late(self, now: float) -> bool:
        if (
            now - self._expected_since >= UNAUTHENTICATED_BODY_TIMEOUT_SECONDS
            and not self._connections.is_authenticated(self)
        ):
            return True
        if now - self._period_start < BODY_PERIOD_SECONDS:
            return False
        late = self._period_bytes < BODY_PERIOD_BYTES
        self._period_start, self._period_bytes = now, 0
        return late

    # The connection

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        # uvicorn reports a disconnect only to the newest of several pipelined requests.
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._expected == "next" and not self._unanswered:
            self._expect("head")
        for start in range(0, len(data), PARSE_BYTES):
            piece = data if len(data) <= PARSE_BYTES else data[start : start + PARSE_BYTES]
            self._period_bytes += len(piece)
            self._unparsed_bytes += len(piece)
            self._framing_bytes += len(piece)
            super().data_received(piece)
            if self.transport.is_closing():
                return
            if error := self._exceeded():
                self._refuse(*error)
                return

    def _exceeded(self) -> tuple[int, str] | None:
        if self._expected != "body":
            return (431, "The headers are too long.") if self._unparsed_bytes > MAX_HEAD_BYTES else None
        if (
            self._unparsed_bytes > MAX_HEAD_BYTES
            or self._framing_bytes > MAX_HEAD_BYTES + FRAMING_FACTOR * self._body_bytes
        ):
            return 400, "The body has too many bytes of chunk sizes, extensions or trailers."
        if self._leftover_bytes > MAX_LEFTOVER_BYTES and not self._connections.is_authenticated(self):
            return 400, "The body goes on too long after its answer."
        return None

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser fails, also after a callback raised `LimitExceeded`."""
        self._refuse(*(self._parse_error or (400, msg)))

    def _refuse(self, status: int, sentence: str) -> None:
        """Send an error if no other response is under way, and close the connection."""
        current = [self.cycle] if self._expected == "body" else []
        if [*self._unanswered] != current or any(cycle.response_started for cycle in current):
            self.abort()  # the request has its response already, or the error would precede another response
            return
        if not self._in_request:
            self.transport.close()  # there is no request to answer
            return
        lines = [
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}",
            "content-type: text/plain; charset=utf-8",
            f"content-length: {len(sentence)}",
            "connection: close",
        ]
        self.transport.write("\r\n".join([*lines, "", sentence]).encode("ascii"))
        self.transport.close()

    # The parser's callbacks

    def on_message_begin(self) -> None:
        self._head_bytes = self._body_bytes = self._framing_bytes = self._leftover_bytes = 0
        self._in_request = True
        self._expect("head")
        super().on_message_begin()
        self.scope["extensions"] = {
            HANG_UP: {"now": self.transport.abort},
            AUTHENTICATED: {"set": self._set_authenticated},
        }

    def on_url(self, url: bytes) -> None:
        self._count_head_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Drop trailers: uvicorn would add them to the headers that were checked already.
        if self._expected == "head":
            self._count_head_bytes(len(name) + len(value) + 4)
            if len(self.headers) >= MAX_HEADERS:
                self._abort_parsing(431, f"There are more than {MAX_HEADERS} headers.")
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self._unanswered) > MAX_PIPELINED:
            self._abort_parsing(400, "Too many requests wait for an answer on this connection.")
        self._expect("body")
        self._framing_bytes = 0
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        self._framing_bytes -= len(body)
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._leftover_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_request = False
        self._expect("next")
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._unanswered:
            self._unanswered.popleft()
        super().on_response_complete()

    def _expect(self, what: Literal["head", "body", "next"]) -> None:
        self._expected, self._unparsed_bytes = what, 0
        self._expected_since = self._period_start = self._clock.monotonic()
        self._period_bytes = 0

    def _count_head_bytes(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._abort_parsing(431, "The headers are too long.")

    def _abort_parsing(self, status: int, sentence: str) -> None:
        self._parse_error = (status, sentence)
        raise LimitExceeded(sentence)

    def _set_authenticated(self, authenticated: bool) -> None:
        self._connections.set_authenticated(self, authenticated)


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def check_deadlines_forever(connections: Connections, interval: timedelta) -> None:
    never = asyncio.Event()
    while True:
        await connections.clock.wait(never, interval)
        connections.check_deadlines()
