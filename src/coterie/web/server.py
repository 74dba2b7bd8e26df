"""uvicorn inside our own process: our sockets, our signals, our log."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from coterie.errors import CoterieError

BACKLOG = 2048
IDLE_SECONDS = 75
"""How long a connection is kept for the next request."""
HEAD_BYTES = 64 << 10
"""Request line and headers."""
HEAD_SECONDS = 15
HANG_UP = "coterie.hang_up"
"""What a route finds among the extensions of its request to end a connection that nobody reads from."""
LINGER_SECONDS = 2
"""What answers are still under way may take so long at the end."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets on every address that `host` stands for. Port 0: any that is free, the same on all of them."""
    bound: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in _resolve(host, port):
            listener = socket.socket(family, kind, protocol)
            bound.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], port or port_of(bound[:1]), *address[2:]))
            # From here on the port is ours; whoever comes before we are ready waits.
            listener.listen(BACKLOG)
            listener.setblocking(False)
    except OSError as error:
        close(bound)
        raise CoterieError(_why_not(error, host, port)) from error
    return bound


def port_of(sockets: Sequence[socket.socket]) -> int:
    return int(sockets[0].getsockname()[1])


def close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _resolve(host: str, port: int) -> list[Any]:
    found = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # A machine without IPv6 still has a name for its loopback address.
    return [each for each in dict.fromkeys(found) if each[0] == socket.AF_INET or _has_ipv6(str(each[4][0]))] or found


def _has_ipv6(address: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def _why_not(error: OSError, host: str, port: int) -> str:
    if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return f"this machine has no address {host!r}: choose another with --host, or under [server] in coterie.toml"
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is taken by another program: choose another with --port, or under [server] in coterie.toml"
    if error.errno == errno.EACCES:
        return f"port {port} may not be used by this user: choose one from 1024 up with --port"
    return f"{host}:{port} cannot be listened on ({error.strerror}): choose another with --host and --port"


class WebServer:
    """Serves an app on sockets that are bound already, in the loop that runs."""

    def __init__(self, app: Any, sockets: Sequence[socket.socket], *, access_log: bool = False) -> None:
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            log_config=None,
            access_log=access_log,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=LINGER_SECONDS,
        )
        self._server, self._sockets = _Server(config), list(sockets)
        self.ended: asyncio.Task[None]
        """From `start` on; done when it serves no longer."""

    async def start(self) -> None:
        """Requests are answered when it returns."""
        self.ended = asyncio.create_task(self._server.serve(self._sockets), name="coterie-web")
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait({up, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self.ended.done():
            self.ended.result()

    async def stop(self) -> None:
        self._server.should_exit = True
        await self.ended


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the society's: it has more to end than a server."""
        yield


class Protocol(HttpToolsProtocol):
    """uvicorn's own, with a limit on what comes before the body: it would gather headers without end."""

    _head: int | None = 0
    _hurry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._hurry = self.loop.call_later(HEAD_SECONDS, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm_down()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += len(data)
            if self._head > HEAD_BYTES and self._head - len(data) > 0:
                self.send_400_response("The headers are too long.")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._head = self._head or 0
        super().on_message_begin()
        self.scope["extensions"] = {HANG_UP: {"now": self.transport.abort}}

    def on_headers_complete(self) -> None:
        self._head = None
        self._calm_down()
        super().on_headers_complete()

    def _calm_down(self) -> None:
        if self._hurry:
            self._hurry.cancel()
            self._hurry = None
