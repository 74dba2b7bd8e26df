"""HTTP transport for model services: httpcore's connection pool over asyncio connections.

httpcore's default backend, anyio, pauses the socket and opens a cancel scope for every read. That is a third of the
cost of reading a stream. This backend only applies the connect timeout; `deadlines` applies all others.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast
from urllib.request import getproxies, proxy_bypass

import httpcore
import httpx

NEXT_ADDRESS_SECONDS = 0.25
"""Delay before the next address of a host is tried in parallel."""
MAX_IDLE_CONNECTIONS = 20
IDLE_CONNECTION_SECONDS = 5.0
_READ_BUFFER_BYTES = 16 * 1024
_MAX_RECEIVED_BYTES = 256 * 1024
"""Unread bytes of one response at which the socket is no longer read."""
_ConnectTask = asyncio.Task[socket.socket]

_HTTPX_ERRORS: dict[type[Exception], type[httpx.TransportError]] = {
    httpcore.ConnectTimeout: httpx.ConnectTimeout,
    httpcore.ReadTimeout: httpx.ReadTimeout,
    httpcore.WriteTimeout: httpx.WriteTimeout,
    httpcore.PoolTimeout: httpx.PoolTimeout,
    httpcore.TimeoutException: httpx.TimeoutException,
    httpcore.ConnectError: httpx.ConnectError,
    httpcore.ReadError: httpx.ReadError,
    httpcore.WriteError: httpx.WriteError,
    httpcore.NetworkError: httpx.NetworkError,
    httpcore.ProxyError: httpx.ProxyError,
    httpcore.UnsupportedProtocol: httpx.UnsupportedProtocol,
    httpcore.LocalProtocolError: httpx.LocalProtocolError,
    httpcore.RemoteProtocolError: httpx.RemoteProtocolError,
    httpcore.ProtocolError: httpx.ProtocolError,
}
_HTTPCORE_ERRORS = tuple(_HTTPX_ERRORS)


def make_transport(url: str, ssl_context: ssl.SSLContext) -> httpx.AsyncBaseTransport | None:
    """Return the transport for `url`; None if an environment proxy applies, which httpx's own transport handles."""
    target = httpx.URL(url)
    proxies = getproxies()
    uses_proxy = bool(proxies.get(target.scheme) or proxies.get("all")) and not proxy_bypass(target.host)
    return None if uses_proxy else AsyncioTransport(ssl_context)


class AsyncioTransport(httpx.AsyncBaseTransport):
    """Sends httpx requests over a pool of HTTP/1.1 connections. The number of connections is not limited."""

    def __init__(self, ssl_context: ssl.SSLContext) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=None,
            max_keepalive_connections=MAX_IDLE_CONNECTIONS,
            keepalive_expiry=IDLE_CONNECTION_SECONDS,
            network_backend=AsyncioBackend(),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = httpcore.URL(
            scheme=request.url.raw_scheme,
            host=request.url.raw_host,
            port=request.url.port,
            target=request.url.raw_path,
        )
        core_request = httpcore.Request(
            method=request.method,
            url=url,
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        try:
            response = await self._pool.handle_async_request(core_request)
        except _HTTPCORE_ERRORS as error:
            raise _to_httpx(error) from error
        return httpx.Response(
            response.status, headers=response.headers, stream=_ResponseStream(response), extensions=response.extensions
        )

    async def aclose(self) -> None:
        await self._pool.aclose()


class _ResponseStream(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            # `aiter_stream` would add another generator per chunk.
            async for chunk in self._response.stream:  # type: ignore[union-attr]
                yield chunk
        except _HTTPCORE_ERRORS as error:
            raise _to_httpx(error) from error

    async def aclose(self) -> None:
        await self._response.aclose()


def _to_httpx(error: Exception) -> httpx.TransportError:
    kind = next(_HTTPX_ERRORS[base] for base in type(error).__mro__ if base in _HTTPX_ERRORS)
    return kind(str(error))


class AsyncioBackend(httpcore.AsyncNetworkBackend):
    def __init__(self, *, next_address_seconds: float = NEXT_ADDRESS_SECONDS) -> None:
        self._next_address_seconds = next_address_seconds

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        async with _connect_errors(timeout):
            connected = await _connect(host, port, self._next_address_seconds)
            _, stream = await asyncio.get_running_loop().create_connection(_Stream, sock=connected)
            return stream


class _Stream(asyncio.BufferedProtocol, httpcore.AsyncNetworkStream):
    """One connection. asyncio's StreamReader would allocate 256 KiB for every read, which costs a fifth of a stream."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._read_buffer = memoryview(bytearray(_READ_BUFFER_BYTES))
        self._received = bytearray()
        self._is_paused = False
        self._is_ended = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        """Waits for bytes or the end."""
        self._can_write = asyncio.Event()
        self._closed: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._can_write.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._received += self._read_buffer[:nbytes]
        if len(self._received) > _MAX_RECEIVED_BYTES and not self._is_paused:
            self._transport.pause_reading()
            self._is_paused = True
        self._wake_reader()

    def eof_received(self) -> None:
        self._is_ended = True
        self._wake_reader()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_ended, self._error = True, error
        self._wake_reader()
        self._can_write.set()
        if not self._closed.done():
            self._closed.set_result(None)

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def _wake_reader(self) -> None:
        if self._reader and not self._reader.done():
            self._reader.set_result(None)

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if not self._received and not self._is_ended:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if not self._received and self._error:
            raise httpcore.ReadError(str(self._error)) from self._error
        data = bytes(self._received[:max_bytes])
        del self._received[: len(data)]
        if self._is_paused and not self._is_ended:
            self._transport.resume_reading()
            self._is_paused = False
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._transport.write(buffer)
        await self._can_write.wait()
        if self._closed.done() or self._transport.is_closing():
            raise httpcore.WriteError(str(self._error or "the server closed the connection")) from self._error

    async def aclose(self) -> None:
        # Abort: a TLS shutdown would wait for a peer that may not answer.
        self._transport.abort()
        await asyncio.shield(self._closed)

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with _connect_errors(timeout):
                transport = await self._loop.start_tls(
                    self._transport, self, ssl_context, server_hostname=server_hostname
                )
        except BaseException:
            self._transport.abort()
            raise
        if transport is None:
            raise httpcore.ConnectError("the server closed the connection")
        self._transport = transport
        return self

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            # The pool asks this of an idle connection; True means that the server has closed it.
            return (
                self._is_ended
                or bool(self._received)
                or self._transport.is_closing()
                or _is_readable(self._transport.get_extra_info("socket"))
            )
        return self._transport.get_extra_info(info)


async def _connect(host: str, port: int, next_address_seconds: float) -> socket.socket:
    """Return a socket connected to the first address that accepts.

    asyncio's `create_connection` leaks a socket when it is cancelled at the wrong moment.
    """
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    tasks: list[_ConnectTask] = []
    winner: _ConnectTask | None = None
    try:
        for family, kind, protocol, _, address in addresses:
            tasks.append(asyncio.create_task(_connect_address(family, kind, protocol, address)))
            timeout = next_address_seconds if len(tasks) < len(addresses) else None
            if winner := await _first_connected(tasks, timeout):
                return winner.result()
        return await tasks[0]  # all failed: raise the error of the first address
    finally:
        for task in tasks:
            if task is not winner:
                _abandon(task)


async def _first_connected(tasks: Sequence[_ConnectTask], timeout: float | None) -> _ConnectTask | None:
    """Return the first connected task; None if all failed or the timeout passed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            while (pending := [task for task in tasks if not task.done()]) and not _connected(tasks):
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    return _connected(tasks)


def _connected(tasks: Sequence[_ConnectTask]) -> _ConnectTask | None:
    return next((task for task in tasks if task.done() and not task.cancelled() and task.exception() is None), None)


async def _connect_address(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    created = socket.socket(family, kind, protocol)
    try:
        created.setblocking(False)
        await asyncio.get_running_loop().sock_connect(created, address)
    except BaseException:
        created.close()
        raise
    return created


def _abandon(task: _ConnectTask) -> None:
    """Cancel the task without waiting for it, and close its socket if it connected anyway."""

    def close(ended: _ConnectTask) -> None:
        if not ended.cancelled() and ended.exception() is None:
            ended.result().close()

    task.cancel()
    task.add_done_callback(close)


def _is_readable(connection: socket.socket) -> bool:
    """Poll the socket itself: the event loop may not have read what has arrived."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


@asynccontextmanager
async def _connect_errors(timeout: float | None) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout):
            yield
    except TimeoutError as error:
        raise httpcore.ConnectTimeout("timed out") from error
    except OSError as error:
        raise httpcore.ConnectError(str(error)) from error
