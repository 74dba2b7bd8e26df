"""One connection to an MCP server: a child process, or a session over HTTP.

`McpConnection.request` classifies a failed request: `NotRun` (the server did not run it, so any call may be
repeated on a new connection), `ConnectionLost` (it may have run), or the server's own error. A connection that is no
longer usable takes no new requests, but those under way may end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import logging
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from coterie.agent.child_process import PROGRAM
from coterie.agent.mcp_requests import REFUSED
from coterie.agent.mcp_stderr import StderrLog
from coterie.clock import Clock
from coterie.errors import CoterieError
from coterie.llm.config import KeyLookup
from coterie.problem_texts import ProblemText
from coterie.redaction import find_secrets, redact
from coterie.text import one_line, to_storable

if TYPE_CHECKING:  # the import takes a second and is needed only if servers are configured
    import mcp

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""Time for a server to end before its connection is cut."""
PROBE_SECONDS = 10.0
"""Time for the server to answer a probe after a cancelled request, for example one past its deadline."""
MAX_RESUBSCRIBE_DELAY = timedelta(minutes=1)
_READ_SECONDS = 3600.0
"""Silence on an HTTP response. The deadline of the tool ends a call before."""
_CONNECT_SECONDS = 30.0
_MAX_EVENT_BYTES = 64 << 20
"""One server-sent event, which holds a whole result. The SDK's limit of 1 MiB is too small for pictures."""
_MAX_PAGES = 100
_CONNECTION_CLOSED = -32000
"""The SDK's error code for a connection that ended before the answer. A server may use it for other errors."""
_METHOD_NOT_FOUND = -32601
T = TypeVar("T")


class McpServerEntry(Protocol):
    """Configuration of a server: a command to run, or the URL of a running server."""

    @property
    def id(self) -> str: ...
    @property
    def command(self) -> str | None: ...
    @property
    def args(self) -> tuple[str, ...]: ...
    @property
    def env(self) -> Mapping[str, str] | None: ...
    @property
    def url(self) -> str | None: ...
    @property
    def headers(self) -> Mapping[str, str] | None: ...
    @property
    def roots(self) -> tuple[str, ...]: ...
    @property
    def start_seconds(self) -> int: ...
    @property
    def approve(self) -> tuple[str, ...]: ...
    @property
    def sampling(self) -> bool: ...


class McpUnavailable(CoterieError):
    """The server cannot be reached. The call was not sent."""

    def __init__(self, text: ProblemText) -> None:
        self.text = text
        super().__init__(text)


class NotRun(CoterieError):
    """The server did not run the request: it was not sent, or its session was refused."""


class ConnectionLost(CoterieError):
    """The connection ended during the request, which may have run."""


# Keys in the configuration

_REFERENCE = re.compile(r"\$(\$?)\{([A-Za-z_][A-Za-z0-9_]*)\}")
_PLAIN_NAME = re.compile(r"(HOME|USER|LOGNAME|PATH|PWD|DIR|LANG|SHELL|HOST|PORT)$", re.I)
"""Variables whose values are no secrets. Redacting a home folder would make results useless."""
_SECRET_HEADER = re.compile(r"authorization|cookie|(key|token|secret|password)$", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedServer:
    """A server's entry with the values of its `${NAME}` references. It exists only in memory."""

    id: str
    command: str | None
    args: tuple[str, ...]
    env: Mapping[str, str]
    url: str | None
    headers: Mapping[str, str]
    roots: tuple[tuple[str, str], ...]
    """Names and URIs of folders."""
    sampling: bool
    """The server may ask the models of the agents that call it."""
    secrets: tuple[str, ...]
    """Removed from all text of the server."""


def resolve_server(entry: McpServerEntry, find_key: KeyLookup) -> ResolvedServer:
    """Replace `${NAME}` in args, env, url and headers. `$${NAME}` stays as `${NAME}`.

    `McpUnavailable`: a name is not set.
    """
    used: dict[str, str] = {}

    def fill(text: str, where: str) -> str:
        def value(match: re.Match[str]) -> str:
            if match[1]:
                return match[0][1:]
            if (key := find_key(match[2])) is None:
                raise McpUnavailable(ProblemText("unset_reference", name=match[2], where=where))
            if not _PLAIN_NAME.search(match[2]):
                used[f"{match[2]}_KEY"] = key
            return key

        return _REFERENCE.sub(value, text)

    args = tuple(fill(arg, "args") for arg in entry.args)
    env = {name: fill(value, f"env.{name}") for name, value in (entry.env or {}).items()}
    headers = {name: fill(value, f"headers.{name}") for name, value in (entry.headers or {}).items()}
    url = entry.url and fill(entry.url, "url")
    for number, (name, value) in enumerate(headers.items()):
        if _SECRET_HEADER.search(name):  # such as "Bearer KEY"
            used |= {f"{number}_{part}_KEY": word for part, word in enumerate(value.split())}
    return ResolvedServer(
        id=entry.id,
        command=entry.command,
        args=args,
        env=env,
        url=url,
        headers=headers,
        roots=tuple((path.name, path.as_uri()) for path in (Path(one).expanduser().resolve() for one in entry.roots)),
        sampling=entry.sampling,
        secrets=find_secrets(env, args, url, used),
    )


def secrets_of(entry: McpServerEntry, find_key: KeyLookup) -> tuple[str, ...]:
    """Return the secrets of a server, as far as its references can be resolved."""
    return resolve_server(entry, lambda name: find_key(name) or "").secrets


# HTTP


@dataclass(slots=True)
class HttpExchange:
    """HTTP facts about the request that runs in the same context."""

    status: int = 0
    """Of the last response; 0: none."""
    has_session: bool = False
    was_sent: bool = True
    is_broken: bool = False
    """The connection failed before a response."""
    was_accepted: bool = False
    """The server began to answer. What follows in the same context belongs to a request that it has run: answers to its
    questions, and attempts to read its answer on after the connection broke."""

    @property
    def is_refused(self) -> bool:
        """True if the server cannot have run the request.

        Servers answer a request of an unknown session with 404, as the specification asks, or with 400 or 410.
        """
        if self.was_accepted:
            return False
        return not self.was_sent or (self.has_session and self.status in (400, 404, 410))


_exchange: ContextVar[HttpExchange | None] = ContextVar("coterie_mcp_exchange", default=None)
"""Set by `McpConnection.request`. The SDK sends each request in the context of its caller."""


def _http_client(headers: Mapping[str, str]) -> Any:
    import httpx2

    class Client(httpx2.AsyncClient):
        async def send(self, request: httpx2.Request, *args: Any, **options: Any) -> httpx2.Response:
            """Send a request. A failed POST becomes an error response: an exception would end all other requests."""
            exchange = _exchange.get() or HttpExchange()
            try:
                response = await super().send(request, *args, **options)
            except httpx2.TransportError as error:
                if request.method != "POST":
                    raise
                unsent = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)
                exchange.was_sent, exchange.is_broken = not isinstance(error, unsent), True
                message = str(error) or type(error).__name__
                answer = {"jsonrpc": "2.0", "id": None, "error": {"code": _CONNECTION_CLOSED, "message": message}}
                return httpx2.Response(503, json=answer, request=request)
            exchange.status = response.status_code
            exchange.was_accepted |= response.is_success
            exchange.has_session = "mcp-session-id" in request.headers
            return response

    timeout = httpx2.Timeout(_CONNECT_SECONDS, read=_READ_SECONDS)
    return Client(headers=dict(headers), timeout=timeout)


# The connection

OnTools = Callable[["list[mcp.Tool]"], object]
"""Called with the new list when the server's tools have changed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallHandlers:
    """Answers what the server asks while it runs a call."""

    elicit: Callable[[Any], Awaitable[Any]] | None = None
    """Answers a question to the person: `ElicitRequestParams -> ElicitResult`."""
    sample: Callable[[Any], Awaitable[Any]] | None = None
    """Asks the agent's model: `CreateMessageRequestParams -> CreateMessageResult | ErrorData`."""


_handlers: ContextVar[CallHandlers | None] = ContextVar("coterie_mcp_handlers", default=None)
"""Of the call in whose context the SDK handles a message of the server."""


class McpConnection:
    """Owns a task that holds the connection, because the SDK's scopes belong to the task that entered them."""

    def __init__(self, server: ResolvedServer, clock: Clock, on_tools: OnTools | None = None) -> None:
        self.client: mcp.Client | None = None
        """None: not connected."""
        self.server = server
        self._clock, self._on_tools = clock, on_tools
        self._stderr = StderrLog(server.id, server.secrets, clock)
        self._wake, self._is_lost, self._have_tools_changed = asyncio.Event(), False, False
        self._has_warned = False
        self._in_flight, self._is_retired, self._is_suspect = 0, False, False
        self._calls: list[CallHandlers] = []
        """Handlers of the calls under way, the newest last."""
        self._handshake = HttpExchange()
        self._ready: asyncio.Future[list[mcp.Tool]] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._run(), name=f"coterie-mcp-{server.id}")

    async def wait_ready(self, within: timedelta) -> list[mcp.Tool]:
        await asyncio.wait({self._ready}, timeout=within.total_seconds())
        if not self._ready.done():
            raise _no_tools_listed(within)
        return self._ready.result()

    @property
    def is_open(self) -> bool:
        """True if the connection takes new requests."""
        return self.client is not None and not self._is_retired

    @property
    def has_resources(self) -> bool:
        return self.client is not None and self.client.server_capabilities.resources is not None

    async def request(self, send: Callable[[mcp.Client], Awaitable[T]], handlers: CallHandlers | None = None) -> T:
        """Send a request. Raises `NotRun`, `ConnectionLost`, or the server's error.

        `handlers`: answer what the server asks meanwhile.
        """
        if self.client is None:
            raise NotRun("the connection has just ended")
        exchange = HttpExchange()
        context, handled = _exchange.set(exchange), _handlers.set(handlers)
        self._in_flight += 1
        if handlers:
            self._calls.append(handlers)
        try:
            return await send(self.client)
        except asyncio.CancelledError:
            self._is_suspect = True
            raise
        except Exception as error:
            raise self._classify(error, exchange) from error
        finally:
            _exchange.reset(context)
            _handlers.reset(handled)
            if handlers:
                self._calls.remove(handlers)
            self._in_flight -= 1
            if self._is_retired and not self._in_flight:
                self._mark_lost()

    def _classify(self, error: Exception, exchange: HttpExchange) -> Exception:
        text = self.error_text(error)
        if exchange.is_refused:
            self.retire()
            return NotRun(text)
        # Over HTTP the SDK reports a lost server before the connection is closed.
        is_closed = self.server.url is not None and getattr(error, "code", None) == _CONNECTION_CLOSED
        if self.client is None or isinstance(error, OSError) or is_closed or exchange.is_broken:
            self.retire()
            return ConnectionLost(text)
        if exchange.status in (502, 503, 504):  # a proxy without the server behind it
            self.retire()
            return ConnectionLost(f"HTTP {exchange.status}: {text}")
        if exchange.status in (401, 403):
            self.retire()  # the next connection uses the key that is set then
            return CoterieError(
                f"HTTP {exchange.status}: {text}. Check the key in headers or url of mcp.{self.server.id}"
            )
        return error

    async def list_tools(self, within: timedelta) -> list[mcp.Tool]:
        """Return all tools. `TimeoutError`: the server did not answer in time."""
        try:
            async with asyncio.timeout(within.total_seconds()):
                return await self.request(_list_tools)
        except TimeoutError:
            raise _no_tools_listed(within) from None

    async def is_alive(self) -> bool:
        """After a cancelled request, check that the server still answers. If not, take no new requests."""
        if self._is_suspect and not self._in_flight and self.client is not None:
            self._is_suspect = False
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    await _list_tools(self.client)
            except Exception as error:
                log.warning("the MCP server %s does not answer: %s", self.server.id, self.error_text(error))
                self.retire()
        return self.is_open

    def describe_failure(self, error: Exception) -> str:
        """Return why there is no connection, with the last line of the server's stderr."""
        why, wrote = self.error_text(error), self._stderr.last_line
        if self._handshake.status >= 400:
            why = ProblemText("http_status", status=self._handshake.status, why=why)
        return ProblemText("last_written", why=why, wrote=wrote) if wrote else why

    def error_text(self, error: BaseException) -> str:
        """Return the error message without the secrets of the server: errors repeat whole URLs."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error.args and isinstance(error.args[0], ProblemText):
            return error.args[0]
        text = redact(to_storable(str(error)), self.server.secrets)
        return one_line(text, 300) or type(error).__name__

    def retire(self) -> None:
        """Take no new requests, and close when those under way have ended."""
        self._is_retired = True
        if not self._in_flight:
            self._mark_lost()

    def close(self) -> None:
        self._mark_lost()
        if not self._ready.done():
            self._ready.cancel()
            self.task.cancel()

    async def _run(self) -> None:
        _exchange.set(self._handshake)
        try:
            sdk = await asyncio.to_thread(importlib.import_module, "mcp")  # off the loop: it takes a second
            callbacks: dict[str, Any] = {"list_roots_callback": self._list_roots} if self.server.roots else {}
            if self.server.sampling:  # else the capability is not announced
                callbacks["sampling_callback"] = self._on_sampling
            async with sdk.Client(
                self._transport(),
                message_handler=self._on_message,
                elicitation_callback=self._on_elicitation,
                cache=None,
                **callbacks,
            ) as client:
                tools = await _list_tools(client)
                self.client = client
                if not self._ready.done():
                    self._ready.set_result(tools)
                await self._follow_tools(client)
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                log.warning("the connection to the MCP server %s broke: %s", self.server.id, self.error_text(error))
        finally:
            self._mark_lost()

    def _mark_lost(self) -> None:
        self.client = None
        if not self._is_lost:
            self._is_lost = True
            self._wake.set()
            # A server that does not answer must not hold its connection for ever.
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, self.task.cancel)

    # What the server sends on its own

    async def _follow_tools(self, client: mcp.Client) -> None:
        """List the tools again whenever the server says that they have changed, until the connection is lost."""
        subscribing = asyncio.create_task(self._subscribe(client), name=f"coterie-mcp-{self.server.id}-changes")
        try:
            while not self._is_lost:
                await self._wake.wait()
                self._wake.clear()
                if self._have_tools_changed and not self._is_lost:
                    self._have_tools_changed = False
                    await self._relist(client)
        finally:
            subscribing.cancel()
            await asyncio.wait({subscribing})

    async def _relist(self, client: mcp.Client) -> None:
        try:
            tools = await _list_tools(client)
        except Exception as error:
            log.warning(
                "the changed tools of the MCP server %s cannot be listed: %s", self.server.id, self.error_text(error)
            )
            return
        if self._on_tools:
            self._on_tools(tools)

    async def _subscribe(self, client: mcp.Client) -> None:
        """Subscribe to changes of the tools. Servers of earlier protocol versions send them unasked."""
        from mcp.client.subscriptions import ListenNotSupportedError

        offered = client.server_capabilities.tools
        delay = timedelta(seconds=1)
        while offered and offered.list_changed:
            try:
                async with client.listen(tools_list_changed=True) as changes:
                    delay = timedelta(seconds=1)
                    self._note_change()  # changes before the subscription may have been missed
                    async for _ in changes:
                        self._note_change()
            except Exception as error:  # the stream ended, or the server cannot be reached
                if isinstance(error, ListenNotSupportedError) or getattr(error, "code", None) == _METHOD_NOT_FOUND:
                    return
            await self._clock.sleep(delay)
            delay = min(2 * delay, MAX_RESUBSCRIBE_DELAY)

    async def _on_message(self, message: object) -> None:
        if getattr(message, "method", "") == "notifications/tools/list_changed":
            self._note_change()

    def _note_change(self) -> None:
        self._have_tools_changed = True
        self._wake.set()

    async def _on_elicitation(self, context: object, params: Any) -> Any:
        from mcp.types import ElicitResult

        elicit = (self._current_call() or CallHandlers()).elicit
        return await elicit(params) if elicit else ElicitResult(action="cancel")

    async def _on_sampling(self, context: object, params: Any) -> Any:
        from mcp.types import ErrorData

        if sample := (self._current_call() or CallHandlers()).sample:
            return await sample(params)
        message = "a model can be asked only during a tool call of an agent"
        log.warning("a request of the MCP server %s to a model was refused: %s", self.server.id, message)
        return ErrorData(code=REFUSED, message=message)

    def _current_call(self) -> CallHandlers | None:
        """Return the handlers of the call to which a request of the server belongs.

        A request over HTTP may come in the response to the call, and so in its context. Otherwise it does not say to
        which call it belongs: the newest call is the likeliest.
        """
        known = _handlers.get()
        return known if known in self._calls else self._calls[-1] if self._calls else None

    async def _list_roots(self, context: object) -> Any:
        from mcp.types import ListRootsResult, Root

        return ListRootsResult(roots=[Root(uri=uri, name=name) for name, uri in self.server.roots])  # type: ignore[arg-type]

    # Transports

    def _transport(self) -> Any:
        if self.server.url:
            return self._http(self.server.url)
        if not self.server.command:
            raise McpUnavailable(ProblemText("no_command_or_url"))
        return self._process(self.server.command)

    @contextlib.asynccontextmanager
    async def _http(self, url: str) -> AsyncIterator[tuple[Any, Any]]:
        from mcp.client.streamable_http import streamable_http_client

        async with (
            _http_client(self.server.headers) as client,
            streamable_http_client(url, http_client=client, max_sse_event_size=_MAX_EVENT_BYTES) as streams,
        ):
            yield streams

    @contextlib.asynccontextmanager
    async def _process(self, command: str) -> AsyncIterator[tuple[Any, Any]]:
        """Run the server as a child process. When its stdout ends, the connection is marked as lost."""
        import anyio
        from mcp.client.stdio import StdioServerParameters, stdio_client

        env = dict(self.server.env)
        _check_command(command, env)
        # The keeper kills the server and its descendants even if this process dies. The SDK cannot do that.
        keeper = ("-P", "-m", PROGRAM, "server", str(os.getpid()), command, *self.server.args)
        started = StdioServerParameters(command=sys.executable, args=list(keeper), env=env)
        sender, receiver = anyio.create_memory_object_stream[Any](0)

        async def forward() -> None:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                async for message in read:
                    if isinstance(message, Exception):
                        self._warn_stdout()
                    else:
                        await sender.send(message)
            sender.close()
            self._mark_lost()

        with self._stderr as stderr:
            async with (
                sender,
                receiver,
                stdio_client(started, errlog=stderr.writable) as (read, write),
                anyio.create_task_group() as tasks,
            ):
                stderr.writable.close()
                tasks.start_soon(forward)
                yield receiver, write
                tasks.cancel_scope.cancel()

    def _warn_stdout(self) -> None:
        """Log once that stdout has invalid lines. Their text is omitted, because it may contain parts of secrets."""
        if not self._has_warned:
            log.warning(
                "the MCP server %s writes lines to stdout that are no MCP messages: change it to use stderr",
                self.server.id,
            )
        self._has_warned = True


def _check_command(command: str, env: Mapping[str, str]) -> None:
    """Raise `OSError` if the program does not exist. The keeper could only report it by its exit status."""
    if shutil.which(command, path=env.get("PATH") or os.environ.get("PATH")) is None:
        number = errno.EACCES if Path(command).exists() else errno.ENOENT
        raise OSError(number, os.strerror(number), command)


def _no_tools_listed(within: timedelta) -> TimeoutError:
    return TimeoutError(ProblemText("no_tools_listed", seconds=f"{within.total_seconds():g}"))


async def _list_tools(client: mcp.Client) -> list[mcp.Tool]:
    """Return all tools. A server that offers none, but for example resources, may reject the request."""
    tools: list[mcp.Tool] = []
    cursor = None
    for _ in range(_MAX_PAGES):
        try:
            page = await client.list_tools(cursor=cursor)
        except Exception as error:
            if client.server_capabilities.tools is None and getattr(error, "code", None) == _METHOD_NOT_FOUND:
                break
            raise
        tools += page.tools
        if (cursor := page.next_cursor) is None:
            break
    return tools
