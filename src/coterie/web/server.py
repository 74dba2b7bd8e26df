"""uvicorn inside this process, on sockets that are bound here. The society handles signals and logging."""

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
from coterie.web.connections import (
    MAX_UNAUTHENTICATED,
    Connections,
    LimitedProtocol,
    ServerConfig,
    check_deadlines_forever,
)  # fmt: skip

log = logging.getLogger(__name__)

BACKLOG = 2048
ACCEPTS_PER_ITERATION = 16
"""New connections per iteration of the event loop. A new connection is authenticated within a few iterations, so a
flood cannot make the owner's connection the oldest unauthenticated one before that."""
DEADLINE_CHECK_INTERVAL = timedelta(seconds=1)
DEFAULT_FILE_LIMIT = 1 << 20
"""Used if the system has no hard limit."""
KEEP_ALIVE_SECONDS = 75
SHUTDOWN_TIMEOUT_SECONDS = 2
"""Time for running responses to finish."""


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: every connection needs a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = DEFAULT_FILE_LIMIT if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files stays at %d: %s", soft, error)


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of `host`. Port 0: a free port, the same for all."""
    bound: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in _resolve(host, port):
            listener = socket.socket(family, kind, protocol)
            bound.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], port or port_of(bound[:1]), *address[2:]))
            # Listen now: clients that connect before the server is ready wait.
            listener.listen(BACKLOG)
            listener.setblocking(False)
    except OSError as error:
        close(bound)
        raise CoterieError(_explain(error, host, port)) from error
    return bound


def port_of(sockets: Sequence[socket.socket]) -> int:
    return int(sockets[0].getsockname()[1])


def close(sockets: Sequence[socket.socket]) -> None:
    for listener in sockets:
        listener.close()


def _resolve(host: str, port: int) -> list[Any]:
    found = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # A machine without IPv6 may still resolve a name to `::1`.
    usable = [info for info in dict.fromkeys(found) if info[0] == socket.AF_INET or _has_ipv6(str(info[4][0]))]
    return usable or found


def _has_ipv6(address: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def _explain(error: OSError, host: str, port: int) -> str:
    if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return f"this machine has no address {host!r}: choose another with --host, or under [server] in coterie.toml"
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is taken by another program: choose another with --port, or under [server] in coterie.toml"
    if error.errno == errno.EACCES:
        return f"port {port} may not be used by this user: choose one from 1024 up with --port"
    return f"{host}:{port} cannot be listened on ({error.strerror}): choose another with --host and --port"


class WebServer:
    """Serves an app on bound sockets, in the running event loop."""

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
            max_unauthenticated=min(MAX_UNAUTHENTICATED, max(1, files // 4)),
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
            backlog=ACCEPTS_PER_ITERATION,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_SECONDS,
        )
        self._server, self._sockets = _Server(config), list(sockets)
        self.ended: asyncio.Task[None]
        """Set by `start`; done when the server has stopped."""

    async def start(self) -> None:
        """Return once requests are answered."""
        deadlines = check_deadlines_forever(self.connections, DEADLINE_CHECK_INTERVAL)
        self._deadlines = asyncio.create_task(deadlines, name="coterie-web-deadlines")
        self.ended = asyncio.create_task(self._server.serve(self._sockets), name="coterie-web")
        started = asyncio.create_task(self._server.started_event.wait())
        await asyncio.wait({started, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self.ended.done():
            self.ended.result()

    async def stop(self) -> None:
        self._server.should_exit = True
        try:
            await self.ended
        finally:
            self._deadlines.cancel()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.started_event = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio uses `backlog` also for the accepts per iteration; the system's queue should be longer.
        for listener in sockets or ():
            listener.listen(BACKLOG)
        self.started_event.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signals: the society does."""
        yield
