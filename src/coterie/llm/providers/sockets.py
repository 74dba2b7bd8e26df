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
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpcore
import httpx

_TRY_NEXT_ADDRESS = 0.25
"""Seconds until a second address of a host is tried beside the first."""
_Dialing = asyncio.Task[socket.socket]


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
            return _Stream(*await asyncio.open_connection(sock=await _dial(host, port)))


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


async def _dial(host: str, port: int) -> socket.socket:
    """The first address of `host` that answers. asyncio's own way loses a socket when it is cancelled in between."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    dialing: list[_Dialing] = []
    answered: _Dialing | None = None
    try:
        for family, kind, protocol, _, address in found:
            dialing.append(asyncio.create_task(_connected(family, kind, protocol, address)))
            patience = _TRY_NEXT_ADDRESS if len(dialing) < len(found) else None
            if answered := await _first(dialing, patience):
                return answered.result()
        return await dialing[0]  # nobody answered: why not is the error of the first
    finally:
        for one in dialing:
            if one is not answered:
                _hang_up(one)


async def _first(dialing: Sequence[_Dialing], patience: float | None) -> _Dialing | None:
    """Who is connected; None when all of them failed, or it took too long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(patience):
            while (under_way := [one for one in dialing if not one.done()]) and not _answered(dialing):
                await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
    return _answered(dialing)


def _answered(dialing: Sequence[_Dialing]) -> _Dialing | None:
    return next((one for one in dialing if one.done() and not one.cancelled() and one.exception() is None), None)


async def _connected(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, address)
    except BaseException:
        made.close()
        raise
    return made


def _hang_up(one: _Dialing) -> None:
    """Nobody is waited for: whoever is cancelled here may be cancelled again."""

    def close(ended: _Dialing) -> None:
        if not ended.cancelled() and ended.exception() is None:
            ended.result().close()

    one.cancel()
    one.add_done_callback(close)


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
