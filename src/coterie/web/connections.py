"""Open connections, and the limits that keep strangers from using up the server.

A stranger is a connection whose last request brought no right secret. Strangers are few: one more than allowed closes
the oldest. The owner often comes from the same address as an attacker (a page or a program on the same machine, or a
proxy), so a new connection is never refused, and a connection with a right secret is never closed for others.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from coterie.clock import Clock
from coterie.web.addresses import budget_of_address

log = logging.getLogger(__name__)

HANG_UP = "coterie.hang_up"
"""The ASGI extension with which a route ends a connection that nobody reads from."""
KNOWN = "coterie.known"
"""The ASGI extension with which the gate says whether a request brought a right secret."""
STRANGERS = 512
STRANGERS_OF_ADDRESS = 128
HEAD_BYTES = 64 << 10
"""Request line and headers; also all bytes between two pieces of a body, and those of trailers."""
HEADERS = 256
FRAMING_FACTOR = 16
"""Bytes of chunk sizes and extensions for each byte of a body, beyond `HEAD_BYTES`. A chunk of one byte needs 5."""
LEFTOVER_BYTES = 8 << 20
"""What a stranger may send of a body after its answer, so that the answer arrives before the connection closes."""
PIPELINED = 16
"""Requests that may wait for the answer to an earlier one on the same connection."""
SLICE = 32 << 10
"""Bytes that are parsed between two looks at the limits."""
HEAD_SECONDS = 15.0
BODY_SECONDS, BODY_BYTES = 30.0, 4 << 10
"""In each period a body must bring so many bytes."""
STRANGERS_BODY_SECONDS = 60.0
"""A stranger's whole body: it can only be a code, or something that was refused already."""
WRITE_SECONDS = 30.0
"""In each period the client must take some bytes of what is sent to it."""
CLOSE_SECONDS = 5.0
WARN_SECONDS = 60.0


class Connection(Protocol):
    """What `Connections` needs of a connection."""

    @property
    def address(self) -> str: ...

    def abort(self) -> None:
        """Close at once, without an answer."""
        ...

    def check_deadlines(self, now: float) -> None: ...


class Connections:
    """All open connections; those of strangers by address, oldest first."""

    def __init__(
        self,
        clock: Clock,
        *,
        strangers: int = STRANGERS,
        of_address: int = STRANGERS_OF_ADDRESS,
        is_proxy: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`is_proxy`: True for addresses that many people share; only the limit for all strangers holds there."""
        self.clock = clock
        self._limit, self._of_address, self._is_proxy = strangers, min(of_address, strangers), is_proxy
        self._all: set[Connection] = set()
        self._strangers: dict[str, dict[Connection, None]] = {}
        self._count = 0
        self._warned = float("-inf")

    def __len__(self) -> int:
        return len(self._all)

    @property
    def strangers(self) -> int:
        return self._count

    def add(self, connection: Connection) -> None:
        """A new connection; it counts as a stranger's until its first request is checked."""
        self._all.add(connection)
        self._add_stranger(connection)

    def remove(self, connection: Connection) -> None:
        self._all.discard(connection)
        self._remove_stranger(connection)

    def set_known(self, connection: Connection, known: bool) -> None:
        """Note whether the latest request on it brought a right secret."""
        if known:
            self._remove_stranger(connection)
        elif connection in self._all:
            self._add_stranger(connection)

    def is_known(self, connection: Connection) -> bool:
        return connection not in self._strangers.get(budget_of_address(connection.address), {})

    def check_deadlines(self) -> None:
        now = self.clock.monotonic()
        for connection in tuple(self._all):
            connection.check_deadlines(now)

    def _add_stranger(self, connection: Connection) -> None:
        key = budget_of_address(connection.address)
        same = self._strangers.setdefault(key, {})
        if connection in same:
            return
        same[connection] = None
        self._count += 1
        if len(same) > self._of_address and not self._is_proxy(connection.address):
            self._close_oldest(same)
        elif self._count > self._limit:
            # Of the address that has most: one who opens many closes only their own.
            self._close_oldest(max(self._strangers.values(), key=len))

    def _close_oldest(self, same: dict[Connection, None]) -> None:
        oldest = next(iter(same))
        self.remove(oldest)
        oldest.abort()
        now = self.clock.monotonic()
        if now - self._warned >= WARN_SECONDS:
            self._warned = now
            log.warning("too many connections without a token, %d open: the oldest are closed", self._count)

    def _remove_stranger(self, connection: Connection) -> None:
        key = budget_of_address(connection.address)
        same = self._strangers.get(key)
        if same is None or connection not in same:
            return
        del same[connection]
        self._count -= 1
        if not same:
            del self._strangers[key]


class ServerConfig(uvicorn.Config):
    """uvicorn's, with the connections that its protocol reports to."""

    def __init__(self, app: Any, connections: Connections, **settings: Any) -> None:
        super().__init__(app, **settings)
        self.connections = connections


class LimitExceeded(Exception):
    """Raised inside the parser's callbacks to stop it."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with deadlines and byte limits; uvicorn itself would read and wait without end."""

    def __init__(self, config: uvicorn.Config, *args: Any, **more: Any) -> None:
        super().__init__(config, *args, **more)
        self._registry = cast(ServerConfig, config).connections
        self._clock = self._registry.clock
        self._reads: str = "head"
        """What comes next from the client: "head", "body", or "next", the first byte of another request."""
        self._since = self._clock.monotonic()
        """When `_reads` changed."""
        self._period, self._period_bytes = self._since, 0
        """When the current period of a body began, and the bytes since."""
        self._unparsed = 0
        """Bytes since the parser last began or ended something or gave a piece of a body."""
        self._head = self._body = self._framing = self._leftover = 0
        """Bytes of the current request: headers; body; all but the body; what came after its answer."""
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._unsent: tuple[float, int] | None = None
        """Since when the client takes nothing, and how much waits for it."""
        self._begun = False
        """A request has begun and is not read to its end."""
        self._closing: float | None = None
        self._refusal: tuple[int, str] | None = None

    # What the registry needs

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def abort(self) -> None:
        self.transport.abort()

    def check_deadlines(self, now: float) -> None:
        if self.transport.is_closing():
            self._closing = now if self._closing is None else self._closing
            if now - self._closing >= CLOSE_SECONDS:
                self.abort()
        elif self._takes_nothing(now):
            self.abort()
        elif self.flow.read_paused:
            # The client cannot go on before we read; its time begins then.
            self._since = self._period = now
        elif self._reads == "head" and now - self._since >= HEAD_SECONDS:
            self._refuse(408, "The headers did not arrive in time.")
        elif self._reads == "body" and self._is_body_late(now):
            self._refuse(408, "The body did not arrive in time.")

    def _takes_nothing(self, now: float) -> bool:
        if not self.flow.write_paused:
            self._unsent = None
            return False
        waiting = self.transport.get_write_buffer_size()
        if self._unsent is None or waiting < self._unsent[1]:
            self._unsent = (now, waiting)
        return now - self._unsent[0] >= WRITE_SECONDS

    def _is_body_late(self, now: float) -> bool:
        if now - self._since >= STRANGERS_BODY_SECONDS and not self._registry.is_known(self):
            return True
        if now - self._period < BODY_SECONDS:
            return False
        late = self._period_bytes < BODY_BYTES
        self._period, self._period_bytes = now, 0
        return late

    # The connection

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._registry.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.remove(self)
        # uvicorn tells only the newest of several pipelined requests that its client has left.
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._reads == "next" and not self._unanswered:
            self._expect("head")
        for start in range(0, len(data), SLICE):
            piece = data if len(data) <= SLICE else data[start : start + SLICE]
            self._period_bytes += len(piece)
            self._unparsed += len(piece)
            self._framing += len(piece)
            super().data_received(piece)
            if self.transport.is_closing():
                return
            if refusal := self._exceeded():
                self._refuse(*refusal)
                return

    def _exceeded(self) -> tuple[int, str] | None:
        if self._reads != "body":
            return (431, "The headers are too long.") if self._unparsed > HEAD_BYTES else None
        if self._unparsed > HEAD_BYTES or self._framing > HEAD_BYTES + FRAMING_FACTOR * self._body:
            return 400, "The body has too many bytes of chunk sizes, extensions or trailers."
        if self._leftover > LEFTOVER_BYTES and not self._registry.is_known(self):
            return 400, "The body goes on too long after its answer."
        return None

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser fails, which it also does when a callback raises `LimitExceeded`."""
        self._refuse(*(self._refusal or (400, msg)))

    def _refuse(self, status: int, sentence: str) -> None:
        """Answer if this connection can still take an answer, and close it."""
        current = [self.cycle] if self._reads == "body" else []
        if [*self._unanswered] != current or any(cycle.response_started for cycle in current):
            self.abort()  # the request has its answer already, or this one would stand before another's
            return
        if not self._begun:
            self.transport.close()  # nothing was asked
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
        self._head = self._body = self._framing = self._leftover = 0
        self._begun = True
        self._expect("head")
        super().on_message_begin()
        self.scope["extensions"] = {
            HANG_UP: {"now": self.transport.abort},
            KNOWN: {"set": self._set_known},
        }

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are no headers: uvicorn would add them after the request was checked, or before.
        if self._reads == "head":
            self._count_head(len(name) + len(value) + 4)
            if len(self.headers) >= HEADERS:
                self._stop(431, f"There are more than {HEADERS} headers.")
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self._unanswered) > PIPELINED:
            self._stop(400, "Too many requests wait for an answer on this connection.")
        self._expect("body")
        self._framing = 0
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._framing -= len(body)
        self._body += len(body)
        if self.cycle.response_complete:
            self._leftover += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._begun = False
        self._expect("next")
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._unanswered:
            self._unanswered.popleft()
        super().on_response_complete()

    def _expect(self, what: str) -> None:
        self._reads, self._unparsed = what, 0
        self._since = self._period = self._clock.monotonic()
        self._period_bytes = 0

    def _count_head(self, size: int) -> None:
        self._head += size
        if self._head > HEAD_BYTES:
            self._stop(431, "The headers are too long.")

    def _stop(self, status: int, sentence: str) -> None:
        self._refusal = (status, sentence)
        raise LimitExceeded(sentence)

    def _set_known(self, known: bool) -> None:
        self._registry.set_known(self, known)


async def watch(connections: Connections, every: Any) -> None:
    """Check all deadlines again and again, until cancelled."""
    never = asyncio.Event()
    while True:
        await connections.clock.wait(never, every)
        connections.check_deadlines()
