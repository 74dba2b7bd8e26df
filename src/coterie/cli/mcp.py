"""The command `mcp`: an MCP server on standard input and output, for programs that start their servers themselves.

It relays messages to /mcp of the society's server and does not interpret them. If that server restarts, the relay
finds it again, opens a new session and repeats what was not answered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from coterie.cli.options import DEFAULT_FOLDER, Dir, Token
from coterie.cli.output import run_quietly
from coterie.errors import CoterieError, ServerUnusable

if TYPE_CHECKING:
    from mcp.types import JSONRPCMessage, JSONRPCRequest

    from coterie.cli.client import Client, Response

PATH = "/mcp"
GIVE_UP_SECONDS = 60.0
"""How long the relay looks for a lost server before it answers with an error."""
RETRY_SECONDS = 0.25
SILENCE_SECONDS = 60.0
"""The server pings every 15 seconds while it works on a call."""
TASK_METHODS = "tasks/"
ACCEPT = "application/json, text/event-stream"

Find = Callable[[], "Client | None"]
"""Finds the society's server; None: it does not run now."""
Write = Callable[["JSONRPCMessage"], Awaitable[None]]


def mcp(
    dir: Dir = DEFAULT_FOLDER,  # noqa: A002
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Address of a server elsewhere, instead of a folder.", show_default=False),
    ] = None,
    token: Token = None,
) -> None:
    """Serve MCP on standard input and output: the agents as tools of a coding assistant.

    It uses the running server of the folder. If none runs, it runs the society itself until it ends.
    """
    run_quietly(_serve(dir, url, token))


async def _serve(folder: Path, url: str | None, token: str | None) -> None:
    from mcp.server.stdio import stdio_server

    async with _connected(folder, url, token) as find, stdio_server() as (incoming, outgoing):

        async def write(message: JSONRPCMessage) -> None:
            from mcp.shared.message import SessionMessage

            await outgoing.send(SessionMessage(message))

        async with outgoing:  # the SDK's writer ends with it
            await Relay(find, write).run(incoming)


@asynccontextmanager
async def _connected(folder: Path, url: str | None, token: str | None) -> AsyncIterator[Find]:
    from coterie.cli.client import Client, connect, find_server
    from coterie.config import ServerAddress

    if url is not None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CoterieError(f"--url must be an address such as http://127.0.0.1:8642, got {url!r}")
        if token is None:
            raise CoterieError("a server elsewhere needs a token or a key: give it with --token or COTERIE_TOKEN")
        address = ServerAddress(url=url.rstrip("/").removesuffix(PATH), pid=0)
        async with Client(address, token) as client:
            yield lambda: client
        return
    async with connect(folder, token, private="work") as client:
        yield (lambda: client) if client.is_private else (lambda: find_server(folder, token))


class _Lost(Exception):
    """The server did not answer: it is gone, stops, or has forgotten the session."""


class _Rejected(Exception):
    """The server rejected the message; the text says why."""


class Relay:
    """Relays JSON-RPC messages of one client. Each request is repeated until the server has answered it."""

    def __init__(self, find: Find, write: Write) -> None:
        self._find, self._write = find, write
        self._client: Client | None = None
        self._initialize: JSONRPCRequest | None = None
        """The client's handshake, for new sessions. None: its revision of the protocol has no sessions."""
        self._session: str | None = None
        self._version: str | None = None
        self._requests: dict[Any, Any] = {}
        """Cancel scopes of the requests that are not answered yet."""

    async def run(self, incoming: Any) -> None:
        """Relay until the client closes its side."""
        import anyio
        from mcp.types import PARSE_ERROR, ErrorData, JSONRPCError, JSONRPCNotification, JSONRPCRequest

        async with anyio.create_task_group() as group:
            async for item in incoming:
                if isinstance(item, Exception):
                    await self._write(
                        JSONRPCError(jsonrpc="2.0", id=None, error=ErrorData(code=PARSE_ERROR, message="not JSON-RPC"))
                    )
                elif isinstance(item.message, JSONRPCRequest):
                    scope = self._requests[item.message.id] = anyio.CancelScope()
                    group.start_soon(self._relay_request, item.message, scope)
                elif not (isinstance(item.message, JSONRPCNotification) and self._take_cancellation(item.message)):
                    await self._relay_other(item.message)
            group.cancel_scope.cancel()

    def _take_cancellation(self, message: Any) -> bool:
        """In the revision without sessions the end of the response is the cancellation. True: that was done."""
        if message.method != "notifications/cancelled" or self._initialize is not None:
            return False
        scope = self._requests.get((message.params or {}).get("requestId"))
        if scope is not None:
            scope.cancel()
        return True

    async def _relay_request(self, message: JSONRPCRequest, scope: Any) -> None:
        from mcp.types import INTERNAL_ERROR, ErrorData, JSONRPCError

        if message.method == "initialize":
            self._initialize, self._session = message, None
        try:
            with scope:
                try:
                    await self._until_answered(message)
                except _Rejected as error:
                    data = ErrorData(code=INTERNAL_ERROR, message=str(error))
                    await self._write(JSONRPCError(jsonrpc="2.0", id=message.id, error=data))
        finally:
            if self._requests.get(message.id) is scope:
                del self._requests[message.id]

    async def _relay_other(self, message: JSONRPCMessage) -> None:
        try:
            await self._until_answered(message)
        except _Rejected:
            return  # a notification has no answer, not even an error

    async def _until_answered(self, message: JSONRPCMessage) -> None:
        import anyio

        until = anyio.current_time() + GIVE_UP_SECONDS
        while True:
            try:
                client = self._connected_client()
                if self._initialize is not None and self._session is None and message is not self._initialize:
                    await self._open_session(client, self._initialize)
                await self._post(client, message, self._write)
                return
            except _Lost as lost:
                self._client = None
                if anyio.current_time() >= until:
                    reason = f"the society's server does not answer ({lost}): start it with coterie serve"
                    raise _Rejected(reason) from lost
            await anyio.sleep(RETRY_SECONDS)

    def _connected_client(self) -> Client:
        if self._client is None:
            try:
                self._client = self._find()
            except ServerUnusable as error:
                raise _Rejected(str(error)) from error
            except CoterieError as error:  # it is starting
                raise _Lost(str(error)) from error
            if self._client is None:
                raise _Lost("it does not run")
        return self._client

    async def _open_session(self, client: Client, initialize: JSONRPCRequest) -> None:
        """Repeat the client's handshake with a server that does not know it. The client has its answer already."""
        from mcp.types import JSONRPCNotification

        async def drop(_: JSONRPCMessage) -> None:
            pass

        await self._post(client, initialize, drop)
        await self._post(client, JSONRPCNotification(jsonrpc="2.0", method="notifications/initialized"), drop)

    async def _post(self, client: Client, message: JSONRPCMessage, write: Write) -> None:
        """Send one message and pass on everything that the server answers. Raises `_Lost` without an answer."""
        body = message.model_dump(by_alias=True, mode="json", exclude_unset=True)
        try:
            async with client.open_stream(
                "POST", PATH, json=body, headers=self._headers(body), silence=SILENCE_SECONDS
            ) as response:
                if not response.is_success:
                    await response.aread()
                    raise self._failure(response, body)
                if body.get("method") == "initialize":
                    self._session = response.headers.get("mcp-session-id")
                await self._pass_on(response, body, write)
        except ServerUnusable as error:
            raise _Lost(str(error)) from error

    def _headers(self, body: Mapping[str, Any]) -> dict[str, str]:
        from mcp.shared.inbound import (
            MCP_METHOD_HEADER,
            MCP_NAME_HEADER,
            MCP_PROTOCOL_VERSION_HEADER,
            NAME_BEARING_METHODS,
            encode_header_value,
        )
        from mcp.types import PROTOCOL_VERSION_META_KEY

        headers = {"Accept": ACCEPT}
        params, method = body.get("params") or {}, body.get("method", "")
        version = (params.get("_meta") or {}).get(PROTOCOL_VERSION_META_KEY)
        if version:
            headers |= {MCP_PROTOCOL_VERSION_HEADER: str(version), MCP_METHOD_HEADER: method}
            key = "taskId" if method.startswith(TASK_METHODS) else NAME_BEARING_METHODS.get(method)
            if key and isinstance(name := params.get(key), str):
                headers[MCP_NAME_HEADER] = encode_header_value(name)
        elif method != "initialize":
            if self._session:
                headers["Mcp-Session-Id"] = self._session
            if self._version:
                headers[MCP_PROTOCOL_VERSION_HEADER] = self._version
        return headers

    def _failure(self, response: Response, body: Mapping[str, Any]) -> Exception:
        """The exception for an HTTP error: `_Lost` to try again, `_Rejected` to answer the client with an error."""
        if response.status_code == 404 and self._session and body.get("method") != "initialize":
            self._session = None
            return _Lost("it was restarted")
        if response.status_code == 503:
            return _Lost("it stops or starts")
        try:
            found = response.json()
            reason = found.get("detail") or found["error"]["message"]
        except (ValueError, KeyError, TypeError, AttributeError):
            reason = f"HTTP status {response.status_code}"
        return _Rejected(str(reason))

    async def _pass_on(self, response: Response, body: Mapping[str, Any], write: Write) -> None:
        from mcp.types import JSONRPCError, JSONRPCResponse

        from coterie.sse_parser import SseParser

        if "id" not in body or "method" not in body:
            return  # no answer follows
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        parser, whole = SseParser(), bytearray()
        async for chunk in response.aiter_bytes():
            if not is_stream:
                whole += chunk
                continue
            for event in parser.feed(chunk):
                found = self._read(body, event.data)
                await write(found)
                if isinstance(found, JSONRPCResponse | JSONRPCError):
                    return
        if is_stream or not whole:
            raise _Lost("it ended without an answer")
        await write(self._read(body, bytes(whole)))

    def _read(self, body: Mapping[str, Any], data: str | bytes) -> JSONRPCMessage:
        """Decode a message of the server. Remember the protocol revision that the handshake agreed on."""
        from mcp.types.jsonrpc import jsonrpc_message_adapter

        try:
            found: JSONRPCMessage = jsonrpc_message_adapter.validate_json(data, by_name=False)
        except ValueError as error:
            raise _Rejected("the answer is not MCP: another program than Coterie listens at this address") from error
        if body.get("method") == "initialize" and isinstance(result := getattr(found, "result", None), dict):
            self._version = result.get("protocolVersion")
        return found
