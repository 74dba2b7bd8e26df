"""MCP servers as tools: `[mcp.files]` in coterie.toml provides the tools `files__read`, `files__write` and so on.

Servers are connected when the society starts. After a lost connection the next call connects again: it waits a few
seconds for a server that restarts, then it returns an error. Attempts to connect are delayed exponentially.
`agent/mcp_connection` owns one connection, `agent/mcp_stderr` the log of a server's stderr.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import mimetypes
import os
import re
from base64 import b64decode
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from coterie.agent.mcp_connection import (
    CLOSE_SECONDS,
    CallHandlers,
    ConnectionLost,
    McpConnection,
    McpServerEntry,
    McpUnavailable,
    NotRun,
    resolve_server,
)
from coterie.agent.mcp_requests import Sampler, answer_elicitation
from coterie.agent.tools import OnLoop, Tool, ToolContext, ToolResult, error_result, unknown_result
from coterie.artifacts import Artifact
from coterie.clock import Clock
from coterie.errors import CoterieError, Problem
from coterie.ids import id_for
from coterie.llm.config import KeyLookup, key_lookup
from coterie.llm.service import ToolSpec
from coterie.plan import Effect
from coterie.problem_texts import ProblemText
from coterie.redaction import redact
from coterie.text import one_line, to_storable

if TYPE_CHECKING:  # the import takes a second and is needed only if servers are configured
    import mcp

log = logging.getLogger(__name__)

MAX_RECONNECT_DELAY = timedelta(minutes=1)
MAX_WAIT = timedelta(seconds=5)
"""How long a call waits for attempts to connect, so that a restart of a server goes unnoticed."""
RELIST_TIMEOUT = timedelta(seconds=30)
"""For a connected server to list its tools again at a reload. A server that does not answer is connected anew."""
READ_RESOURCE = "read_resource"
MAX_LISTED_RESOURCES = 200
_UNSAFE_CHARACTER = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_NAME = 64
T = TypeVar("T")

ReplaceTools = Callable[[str, Iterable[Tool]], object]
"""`Toolbox.replace_tools`."""


class McpServers:
    def __init__(
        self,
        entries: Iterable[McpServerEntry],
        clock: Clock,
        replace_tools: ReplaceTools,
        *,
        find_key: KeyLookup | None = None,
        start_timeout: timedelta | None = None,
        max_wait: timedelta | None = None,
    ) -> None:
        """`find_key`: values of `${NAME}`; default: the environment. `start_timeout`: instead of `start_seconds`.

        `max_wait`: how long a call waits for attempts to connect; default: `MAX_WAIT`.
        """
        self._servers = [
            McpServer(
                entry,
                clock,
                replace_tools,
                find_key=find_key or key_lookup(os.environ, {}),
                start_timeout=start_timeout or timedelta(seconds=entry.start_seconds),
                max_wait=MAX_WAIT if max_wait is None else max_wait,
            )
            for entry in entries
        ]

    async def connect(self) -> list[Problem]:
        """Connect all unconnected servers concurrently; return a problem for each that failed. May be repeated."""
        problems = await asyncio.gather(*(server.try_connect() for server in self._servers))
        return [problem for problem in problems if problem]

    async def refresh(self) -> list[Problem]:
        """Check all connections, list the tools again, and connect without delay what is not connected."""
        problems = await asyncio.gather(*(server.refresh() for server in self._servers))
        return [problem for problem in problems if problem]

    @property
    def connected_ids(self) -> list[str]:
        """Ids of the connected servers."""
        return [server.id for server in self._servers if server.is_connected]

    @property
    def left_out(self) -> list[str]:
        """Tools of the servers that are not offered, because they must run as tasks."""
        return [name for server in self._servers for name in server.left_out]

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers))


class McpServer:
    def __init__(
        self,
        entry: McpServerEntry,
        clock: Clock,
        replace_tools: ReplaceTools,
        *,
        find_key: KeyLookup,
        start_timeout: timedelta,
        max_wait: timedelta,
    ) -> None:
        self.id = entry.id
        self._entry, self._clock, self._replace_tools = entry, clock, replace_tools
        self._find_key, self._start_timeout, self._max_wait = find_key, start_timeout, max_wait
        self._connection: McpConnection | None = None
        self._connecting: asyncio.Task[McpConnection] | None = None
        self._unfinished: set[McpConnection] = set()
        """Connections whose task has not ended: the current one, and those that were given up."""
        self._failures = 0
        self._last_failure = ""
        self._not_before = 0.0
        self._reader: str | None = None
        """Name of the tool that reads resources."""
        self.left_out: tuple[str, ...] = ()
        """Tools that are not offered, because they must run as tasks, which the SDK does not support."""

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and self._connection.is_open

    async def try_connect(self) -> Problem | None:
        try:
            if not self.is_connected:
                await self._connect_once()
        except McpUnavailable as error:
            log.warning("%s", error)
            return Problem(f"coterie.toml: mcp.{self.id}", error.text)
        return None

    async def refresh(self) -> Problem | None:
        self._failures, self._not_before = 0, 0.0
        connection = self._connection
        if connection and connection.is_open:
            try:
                self._offer(connection, await connection.list_tools(RELIST_TIMEOUT))
            except Exception as error:
                log.warning("the MCP server %s did not list its tools: %s", self.id, connection.error_text(error))
                connection.retire()
        return await self.try_connect()

    async def close(self) -> None:
        if self._connecting:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        self._connection = None
        ending = [connection.task for connection in self._unfinished]
        for connection in self._unfinished:
            connection.close()
        if ending:
            _, late = await asyncio.wait(ending, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()

    # The connection

    async def _ensure_connected(self) -> McpConnection:
        """Return the connection; connect first if necessary. `McpUnavailable`: it failed for `max_wait`."""
        if self._connection and self._connection.is_open and await self._connection.is_alive():
            return self._connection
        left = self._max_wait.total_seconds()
        while True:
            try:
                return await self._connect_once()
            except McpUnavailable:
                delay = max(0.0, self._not_before - self._clock.monotonic())
                if delay > left:
                    raise
            left -= delay
            await self._clock.sleep(timedelta(seconds=delay))

    async def _connect_once(self) -> McpConnection:
        """Connect, or wait for the attempt under way. `McpUnavailable`: it failed, now or a moment ago."""
        if self._connecting is None or self._connecting.done():
            if self._connection and self._connection.is_open:
                return self._connection
            delay = self._not_before - self._clock.monotonic()
            if delay > 0:
                seconds = max(1, math.ceil(delay))
                values = {"name": self.id, "why": self._last_failure, "seconds": seconds}
                raise McpUnavailable(ProblemText("mcp_not_connected", **values))
            self._connecting = asyncio.create_task(self._connect(), name=f"coterie-mcp-{self.id}-connect")
            self._connecting.add_done_callback(_retrieve_error)
        # The attempt serves all callers, so it does not end with the deadline of one of them.
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> McpConnection:
        self._give_up()
        try:
            server = resolve_server(self._entry, self._find_key)
        except McpUnavailable as error:
            raise self._unavailable(error.text) from error
        self._connection = connection = McpConnection(server, self._clock, lambda tools: self._offer(connection, tools))
        self._unfinished.add(connection)
        connection.task.add_done_callback(lambda _: self._unfinished.discard(connection))
        try:
            listed = await connection.wait_ready(self._start_timeout)
        except asyncio.CancelledError:
            connection.close()
            raise
        except Exception as error:
            raise self._unavailable(connection.describe_failure(error)) from error
        self._failures = 0
        self._offer(connection, listed)
        return connection

    def _unavailable(self, why: str) -> McpUnavailable:
        self._drop()
        delay = min(timedelta(seconds=2**self._failures), MAX_RECONNECT_DELAY)
        self._failures = min(self._failures + 1, 10)
        self._not_before = self._clock.monotonic() + delay.total_seconds()
        self._last_failure = why
        return McpUnavailable(ProblemText("mcp_unavailable", name=self.id, why=why))

    def _give_up(self) -> None:
        """Replace the connection by the next one. A child process ends, because two of them could disturb each other.

        Over HTTP the requests under way may end: the answer to each says whether the server ran it.
        """
        if self._connection and self._connection.server.url:
            self._connection.retire()
            self._connection = None
        self._drop()

    def _drop(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

    # Its tools

    def _offer(self, connection: McpConnection, listed: Iterable[mcp.Tool]) -> None:
        if connection is not self._connection:
            return
        tools: dict[str, Tool] = {}
        needs_tasks = list[str]()
        for mcp_tool in listed:
            if mcp_tool.execution and mcp_tool.execution.task_support == "required":
                needs_tasks.append(mcp_tool.name)
                continue
            tool = self._tool(mcp_tool, tool_name(self.id, mcp_tool.name, tools))
            tools[tool.name] = tool
        if needs_tasks and tuple(needs_tasks) != self.left_out:
            names = one_line(", ".join(needs_tasks), 500)
            log.warning(
                "tools of the MCP server %s are not offered, because they must run as tasks: %s", self.id, names
            )
        self.left_out = tuple(needs_tasks)
        self._reader = tool_name(self.id, READ_RESOURCE, tools) if connection.has_resources else None
        if self._reader:
            tools[self._reader] = self._resource_tool(self._reader)
        self._replace_tools(f"mcp.{self.id}", tools.values())

    def _tool(self, listed: mcp.Tool, name: str) -> Tool:
        effect = effect_of(listed)

        async def run(arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
            async def report_progress(progress: float, total: float | None, message: str | None) -> None:
                await ctx.report_progress(progress, total, self._redact(to_storable(message or "")))

            def call(client: mcp.Client) -> Awaitable[mcp.types.CallToolResult]:
                return client.call_tool(listed.name, arguments, progress_callback=report_progress)

            answer = await self._request(call, effect, ctx)
            if isinstance(answer, ToolResult):
                return answer
            return await self._redacted(render_result(answer, listed.name, ctx, self._reader_for(ctx)))

        return Tool(
            name=name,
            spec=ToolSpec(
                name=name,
                description=to_storable(listed.description or ""),
                parameters={"type": "object"} | listed.input_schema,
            ),
            effect=effect,
            approval=self._needs_approval(name, listed.name),
            convert_arguments=lambda arguments, ctx: {"arguments": dict(arguments), "ctx": ctx},
            run=OnLoop(run),
        )

    def _resource_tool(self, name: str) -> Tool:
        async def run(arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
            uri = arguments.get("uri")
            if uri is not None and not isinstance(uri, str):
                return error_result("bad_arguments", "uri: expected a string")
            if not uri:
                listed = await self._request(list_resources, "pure", ctx)
                return listed if isinstance(listed, ToolResult) else await self._redacted(_resource_list(listed))
            read = await self._request(lambda client: client.read_resource(uri), "pure", ctx)
            return read if isinstance(read, ToolResult) else await self._redacted(render_resource(read, ctx))

        uri = {"type": "string", "description": "The URI of the resource. Without it, the resources are listed."}
        description = f"Read a resource of {self.id}, for example one that a result links to."
        return Tool(
            name=name,
            spec=ToolSpec(
                name=name, description=description, parameters={"type": "object", "properties": {"uri": uri}}
            ),
            effect="pure",
            approval=self._needs_approval(name, READ_RESOURCE),
            convert_arguments=lambda arguments, ctx: {"arguments": dict(arguments), "ctx": ctx},
            run=OnLoop(run),
        )

    def _reader_for(self, ctx: ToolContext) -> str | None:
        """Name of the tool that reads resources, if the agent may use it."""
        return self._reader if self._reader in ctx.tools else None

    def _needs_approval(self, *names: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in names for pattern in self._entry.approve)

    async def _request(
        self, send: Callable[[mcp.Client], Awaitable[T]], effect: Effect, ctx: ToolContext
    ) -> T | ToolResult:
        """Send a request, a second time if the first one certainly had no effect. Failures become results."""
        handlers = CallHandlers(
            elicit=partial(answer_elicitation, server=self.id, ask=ctx.ask) if ctx.ask else None,
            sample=Sampler(self.id, ctx).answer if self._entry.sampling else None,
        )
        for is_last in (False, True):
            try:
                connection = await self._ensure_connected()
            except McpUnavailable as error:
                return error_result("mcp_unavailable", str(error))
            try:
                return await connection.request(send, handlers)
            except NotRun as error:
                if is_last:
                    return error_result("mcp_error", f"the MCP server {self.id} did not run the call: {error}")
            except ConnectionLost as error:
                message = (
                    f"the MCP server {self.id} disconnected during the call ({error}); the next call starts it again"
                )
                if effect == "unsafe":
                    return unknown_result("mcp_lost", message)
                if is_last:
                    return error_result("mcp_lost", message)
            except Exception as error:
                return error_result("mcp_error", f"the MCP server {self.id} says: {connection.error_text(error)}")
        raise AssertionError("the last attempt returns")

    async def _redacted(self, rendering: Awaitable[ToolResult]) -> ToolResult:
        result = await rendering
        return replace(result, text=self._redact(result.text))

    def _redact(self, text: str) -> str:
        """Remove the keys of this connection, which may be newer than those that the toolbox knows."""
        return redact(text, self._connection.server.secrets) if self._connection else text


def _retrieve_error(task: asyncio.Task[McpConnection]) -> None:
    """Retrieve the error, so that asyncio logs no warning if all callers have gone."""
    if not task.cancelled():
        task.exception()


def tool_name(server: str, tool: str, taken: Collection[str] = ()) -> str:
    """Return `<server>__<tool>` in the characters and length that every model service accepts."""
    safe = _UNSAFE_CHARACTER.sub("_", f"{server}__{tool}")
    if len(safe) <= _MAX_NAME and safe not in taken:
        return safe
    return f"{safe[: _MAX_NAME - 9]}_{id_for(server, tool)[:8]}"


def effect_of(listed: mcp.Tool) -> Effect:
    """Return the effect that the server's annotations declare. Without annotations a tool is unsafe."""
    hints = listed.annotations
    if hints is None:
        return "unsafe"
    if hints.read_only_hint:
        return "pure"
    # A destructive tool is not repeated after a crash, even if it is idempotent: others may have worked on meanwhile.
    return "idempotent" if hints.idempotent_hint and not hints.destructive_hint else "unsafe"


# Results


async def render_result(
    result: mcp.types.CallToolResult, name: str, ctx: ToolContext, reader: str | None = None
) -> ToolResult:
    """Convert the server's result: texts unchanged; images, audio and files as artifacts, one JSON object each.

    `reader`: name of the tool that reads linked resources.
    """
    parts, shown = list[str](), list[Artifact]()
    for number, block in enumerate(result.content):
        if block.type == "resource_link":
            parts.append(json.dumps(_describe_resource(block) | ({"readWith": reader} if reader else {})))
        else:
            parts.append(await _render_block(block, name, number, ctx, shown))
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return ToolResult(ok=not result.is_error, text="\n".join(parts), attachments=tuple(shown))


async def render_resource(read: mcp.types.ReadResourceResult, ctx: ToolContext) -> ToolResult:
    parts, shown = list[str](), list[Artifact]()
    for number, contents in enumerate(read.contents):
        parts.append(await _render_contents(contents, "resource", number, ctx, shown))
    return ToolResult(ok=True, text="\n".join(parts), attachments=tuple(shown))


async def _render_block(
    block: mcp.types.TextContent | mcp.types.ImageContent | mcp.types.AudioContent | mcp.types.EmbeddedResource,
    name: str,
    number: int,
    ctx: ToolContext,
    shown: list[Artifact],
) -> str:
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return await _store_file(block.data, block.mime_type, name, number, ctx, shown)
        case "resource":
            return await _render_contents(block.resource, name, number, ctx, shown)


async def _render_contents(contents: Any, name: str, number: int, ctx: ToolContext, shown: list[Artifact]) -> str:
    """Render the contents of a resource: its text, or an artifact."""
    text = getattr(contents, "text", None)
    if text is not None:
        return str(text)
    return await _store_file(contents.blob, contents.mime_type or "", name, number, ctx, shown)


async def _store_file(
    data: str, mime_type: str, name: str, number: int, ctx: ToolContext, shown: list[Artifact]
) -> str:
    """Store a file and return its description. Pictures and sound are added to `shown`."""
    try:
        filename = name + (mimetypes.guess_extension(mime_type) or "")
        artifact = await ctx.artifacts.put(b64decode(data), filename, key=f"{ctx.idempotency_key}/{number}")
    except (ValueError, CoterieError, OSError) as error:
        return json.dumps({"notKept": to_storable(str(error)), "mimeType": mime_type}, ensure_ascii=False)
    if artifact.type != "file":
        shown.append(artifact)
    return json.dumps(artifact.to_dict(), ensure_ascii=False)


async def list_resources(client: mcp.Client) -> list[mcp.types.Resource]:
    resources: list[mcp.types.Resource] = []
    cursor = None
    while len(resources) < MAX_LISTED_RESOURCES:
        page = await client.list_resources(cursor=cursor)
        resources += page.resources
        if (cursor := page.next_cursor) is None or not page.resources:
            break
    return resources[:MAX_LISTED_RESOURCES]


async def _resource_list(listed: Iterable[mcp.types.Resource]) -> ToolResult:
    described = {"resources": [_describe_resource(resource) for resource in listed]}
    return ToolResult(ok=True, text=json.dumps(described, ensure_ascii=False))


def _describe_resource(resource: mcp.types.Resource) -> dict[str, Any]:
    described = {
        "resource": str(resource.uri),
        "name": resource.name,
        "description": resource.description and one_line(resource.description, 200),
        "mimeType": resource.mime_type,
        "size": resource.size,
    }
    return {key: value for key, value in described.items() if value is not None}
