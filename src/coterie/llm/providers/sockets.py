"""The connections below httpx, on asyncio's own streams.

httpx reads through anyio, which for every piece of an answer stops and starts the socket and opens a cancel scope. That
is a third of what listening costs, and hundreds of agents listen at once. Deadlines are kept above (`deadlines`), so
here is nothing but bytes.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpcore
import httpx

_TRY_NEXT_ADDRESS = 0.25
"""Seconds until a second address of a host is tried beside the first."""


def use_asyncio(client: httpx.AsyncClient) -> None:
    """Lets `client` connect this way, except through proxies. Where httpx has changed inside it stays as it was."""
    pool = getattr(getattr(client, "_transport", None), "_pool", None)
    if pool is not None and hasattr(pool, "_network_backend"):
        pool._network_backend = AsyncioBackend()


class AsyncioBackend(httpcore.AsyncNetworkBackend):
    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        async with _connecting(timeout):
            return _Stream(*await asyncio.open_connection(host, port, **_options()))


class _Stream(httpcore.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            return await self._reader.read(max_bytes)
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            self._writer.write(buffer)
            await self._writer.drain()
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        # No farewell: a peer that has gone silent would not answer it.
        self._writer.transport.abort()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with _connecting(timeout):
                await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        except BaseException:
            self._writer.transport.abort()
            raise
        return self

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            # Asked of a connection that waits for its next request; a yes means that the server has closed it.
            return (
                self._reader.at_eof() or self._writer.is_closing() or _readable(self._writer.get_extra_info("socket"))
            )
        return self._writer.get_extra_info(info)


def _options() -> dict[str, Any]:
    """Not every event loop can try a second address while it waits for the first."""
    can = isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop)
    return {"happy_eyeballs_delay": _TRY_NEXT_ADDRESS} if can else {}


def _readable(connection: socket.socket) -> bool:
    """What has arrived but not yet been noticed by the event loop counts too."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


@asynccontextmanager
async def _connecting(timeout: float | None) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout):
            yield
    except TimeoutError as error:
        raise httpcore.ConnectTimeout("timed out") from error
    except OSError as error:
        raise httpcore.ConnectError(str(error)) from error
