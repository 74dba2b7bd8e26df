"""uvicorn inside our own process: our sockets, our signals, our log."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import uvicorn

from coterie.clock import Clock, SystemClock
from coterie.errors import CoterieError
from coterie.web.addresses import ClientAddresses
from coterie.web.connections import STRANGERS, Connections, LimitedProtocol, ServerConfig, watch

log = logging.getLogger(__name__)

BACKLOG = 2048
ACCEPTED_AT_ONCE = 16
"""New connections in one round of the event loop. In the few rounds until a new connection has been read and checked,
far fewer than the limit of strangers can come, so the owner's is never the oldest of them."""
CHECK = timedelta(seconds=1)
MOST_FILES = 1 << 20
"""Where the system sets no hard limit."""
IDLE_SECONDS = 75
"""How long a connection is kept for the next request."""
LINGER_SECONDS = 2
"""What answers are still under way may take so long at the end."""


def raise_file_limit() -> None:
    """Set the soft limit of open files to the hard one: every connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files stays at %d: %s", soft, error)


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

    def __init__(
        self,
        app: Any,
        sockets: Sequence[socket.socket],
        *,
        access_log: bool = False,
        clock: Clock | None = None,
        trusted_proxies: Sequence[str] = (),
    ) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.connections = Connections(
            clock or SystemClock(),
            strangers=min(STRANGERS, max(1, files // 4)),
            is_proxy=ClientAddresses(trusted_proxies).trusts,
        )
        config = ServerConfig(
            app,
            self.connections,
            http=LimitedProtocol,
            ws="none",
            log_config=None,
            access_log=access_log,
            proxy_headers=False,
            server_header=False,
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=LINGER_SECONDS,
        )
        self._server, self._sockets = _Server(config), list(sockets)
        self.ended: asyncio.Task[None]
        """From `start` on; done when it serves no longer."""

    async def start(self) -> None:
        """Requests are answered when it returns."""
        self._watch = asyncio.create_task(watch(self.connections, CHECK), name="coterie-web-deadlines")
        self.ended = asyncio.create_task(self._server.serve(self._sockets), name="coterie-web")
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait({up, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self.ended.done():
            self.ended.result()

    async def stop(self) -> None:
        self._server.should_exit = True
        try:
            await self.ended
        finally:
            self._watch.cancel()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio uses one number for both, and the system should let more of them wait than we take at once.
        for each in sockets or ():
            each.listen(BACKLOG)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the society's: it has more to end than a server."""
        yield
