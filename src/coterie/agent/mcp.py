"""MCP servers as tools: `[mcp.files]` in coterie.toml provides the tools `files__read`, `files__write` and so on.

Servers are connected when the society starts. After a lost connection, the next call connects again. While a server
cannot be reached, calls return an error, and attempts to connect are delayed exponentially.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mimetypes
import re
from base64 import b64decode
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from coterie.agent.mcp_connection import McpConnection, McpServerEntry, McpUnavailable, error_text
from coterie.agent.tools import OnLoop, Tool, ToolContext, ToolResult, error_result, unknown_result
from coterie.clock import Clock
from coterie.errors import CoterieError, Problem
from coterie.ids import id_for
from coterie.llm.types import ToolSpec
from coterie.text import to_storable
from coterie.turn import Effect

if TYPE_CHECKING:  # the import takes a second and is needed only if servers are configured
    import mcp

log = logging.getLogger(__name__)

START_TIMEOUT = timedelta(seconds=30)
"""Time to connect and list tools. The first start of a server may download a package."""
MAX_RECONNECT_DELAY = timedelta(minutes=1)
_CLOSE_TIMEOUT_SECONDS = 10.0
_UNSAFE_CHARACTER = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_NAME = 64

ReplaceTools = Callable[[str, Iterable[Tool]], object]
"""`Toolbox.replace_tools`."""


class McpServers:
    def __init__(
        self,
        entries: Iterable[McpServerEntry],
        clock: Clock,
        replace_tools: ReplaceTools,
        *,
        start_timeout: timedelta = START_TIMEOUT,
    ) -> None:
        self._servers = [McpServer(entry, clock, replace_tools, start_timeout=start_timeout) for entry in entries]

    async def connect(self) -> list[Problem]:
        """Connect all unconnected servers concurrently; return a problem for each that failed. May be repeated."""
        problems = await asyncio.gather(*(server.try_connect() for server in self._servers))
        return [problem for problem in problems if problem]

    @property
    def connected_ids(self) -> list[str]:
        """Ids of the connected servers."""
        return [server.id for server in self._servers if server.is_connected]

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers))


class McpServer:
    def __init__(
        self,
        entry: McpServerEntry,
        clock: Clock,
        replace_tools: ReplaceTools,
        *,
        start_timeout: timedelta = START_TIMEOUT,
    ) -> None:
        self.id = entry.id
        self._entry, self._clock, self._adopt, self._start = entry, clock, replace_tools, start_timeout
        self._connection: McpConnection | None = None
        self._connecting = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._failures = 0
        self._last_failure = ""
        self._not_before = 0.0

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and self._connection.client is not None

    async def try_connect(self) -> Problem | None:
        try:
            await self._ensure_connected()
        except McpUnavailable as error:
            log.warning("%s", error)
            return Problem(f"coterie.toml: mcp.{self.id}", str(error))
        return None

    async def close(self) -> None:
        self._drop()
        if self._closing:
            _, late = await asyncio.wait(self._closing, timeout=_CLOSE_TIMEOUT_SECONDS)
            for task in late:
                task.cancel()

    # The connection

    async def _ensure_connected(self) -> McpConnection:
        """Return the connection, and connect first if necessary. `McpUnavailable`: it failed, now or a moment ago."""
        async with self._connecting:
            if self._connection and self._connection.client:
                return self._connection
            delay = self._not_before - self._clock.monotonic()
            if delay > 0:
                raise McpUnavailable(
                    f"the MCP server {self.id} is not connected ({self._last_failure}); next try in {delay:.0f} s"
                )
            self._drop()
            self._connection = connection = McpConnection(self._entry, self._clock)
            self._closing.add(connection.task)
            connection.task.add_done_callback(self._closing.discard)
            try:
                listed = await connection.wait_ready(self._start)
            except asyncio.CancelledError:
                connection.task.cancel()
                raise
            except Exception as error:
                raise self._unavailable(connection.describe_failure(error)) from error
            self._failures = 0
            self._adopt(f"mcp.{self.id}", self._tools(listed))
            return connection

    def _unavailable(self, why: str) -> McpUnavailable:
        self._drop()
        delay = min(timedelta(seconds=2**self._failures), MAX_RECONNECT_DELAY)
        self._failures = min(self._failures + 1, 10)
        self._not_before = self._clock.monotonic() + delay.total_seconds()
        self._last_failure = why
        return McpUnavailable(f"the MCP server {self.id} cannot be reached: {self._last_failure}")

    def _drop(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

    # Its tools

    def _tools(self, listed: Iterable[mcp.Tool]) -> list[Tool]:
        tools: dict[str, Tool] = {}
        for mcp_tool in listed:
            tool = self._tool(mcp_tool, tool_name(self.id, mcp_tool.name, tools))
            tools[tool.name] = tool
        return list(tools.values())

    def _tool(self, listed: mcp.Tool, name: str) -> Tool:
        effect = _effect(listed)

        async def run(arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
            return await self._call(listed.name, arguments, ctx, effect, tries=1 if effect == "unsafe" else 2)

        return Tool(
            name=name,
            spec=ToolSpec(
                name=name,
                description=to_storable(listed.description or ""),
                parameters={"type": "object"} | listed.input_schema,
            ),
            effect=effect,
            convert_arguments=lambda arguments, ctx: {"arguments": dict(arguments), "ctx": ctx},
            run=OnLoop(run),
        )

    async def _call(
        self, name: str, arguments: dict[str, Any], ctx: ToolContext, effect: Effect, *, tries: int
    ) -> ToolResult:
        """Call the server's tool. `tries`: attempts if the connection is lost during the call."""
        try:
            connection = await self._ensure_connected()
        except McpUnavailable as error:
            return error_result("mcp_unavailable", str(error))
        try:
            result = await connection.call(name, arguments)
        except Exception as error:
            if not connection.is_connection_error(error):
                return error_result("mcp_error", f"the MCP server {self.id} says: {error_text(error, self._entry)}")
            connection.close()
            why = error_text(error, self._entry)
            if tries > 1:
                return await self._call(name, arguments, ctx, effect, tries=tries - 1)
            message = f"the MCP server {self.id} disconnected during the call ({why}); the next call starts it again"
            return unknown_result("mcp_lost", message) if effect == "unsafe" else error_result("mcp_lost", message)
        return await render_result(result, name, ctx)


def tool_name(server: str, tool: str, taken: Collection[str] = ()) -> str:
    """Return `<server>__<tool>` in the characters and length that every model service accepts."""
    safe = _UNSAFE_CHARACTER.sub("_", f"{server}__{tool}")
    if len(safe) <= _MAX_NAME and safe not in taken:
        return safe
    return f"{safe[: _MAX_NAME - 9]}_{id_for(server, tool)[:8]}"


async def render_result(result: mcp.types.CallToolResult, name: str, ctx: ToolContext) -> ToolResult:
    """Convert the server's result: texts unchanged; images, audio and files as artifacts, one JSON object each."""
    parts = [await _render_block(block, name, number, ctx) for number, block in enumerate(result.content)]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return ToolResult(ok=not result.is_error, text="\n".join(parts))


async def _render_block(block: mcp.types.ContentBlock, name: str, number: int, ctx: ToolContext) -> str:
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return await _store_file(block.data, block.mime_type, name, number, ctx)
        case "resource":
            if text := getattr(block.resource, "text", None):
                return str(text)
            data = getattr(block.resource, "blob", "")
            return await _store_file(data, block.resource.mime_type or "", name, number, ctx)
    return json.dumps({"resource": str(block.uri), "name": block.name}, ensure_ascii=False)


async def _store_file(data: str, mime_type: str, name: str, number: int, ctx: ToolContext) -> str:
    try:
        filename = name + (mimetypes.guess_extension(mime_type) or "")
        artifact = await ctx.artifacts.put(b64decode(data), filename, key=f"{ctx.idempotency_key}/{number}")
    except (ValueError, CoterieError, OSError) as error:
        return json.dumps({"notKept": to_storable(str(error)), "mimeType": mime_type}, ensure_ascii=False)
    return json.dumps(artifact.to_dict(), ensure_ascii=False)


def _effect(listed: mcp.Tool) -> Effect:
    hints = listed.annotations
    if hints and hints.read_only_hint:
        return "pure"
    return "idempotent" if hints and hints.idempotent_hint else "unsafe"
