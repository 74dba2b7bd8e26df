"""MCP servers as tools: `[mcp.files]` in coterie.toml makes the tools `files__read`, `files__write` and so on.

A server is connected when the society starts. One that went away is started again by the next call; one that does not
come back is an error result, and is left in peace for a while before it is tried again.
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

from coterie.agent.mcp_connection import McpConnection, McpEntry, McpUnavailable, error_text
from coterie.agent.tools import OnLoop, Tool, ToolContext, ToolResult, error_result, unknown_result
from coterie.clock import Clock
from coterie.errors import CoterieError, Problem
from coterie.ids import id_for
from coterie.llm.types import ToolSpec
from coterie.text import to_storable
from coterie.turn import Effect

if TYPE_CHECKING:  # a second to import, needed only where servers are configured
    import mcp

log = logging.getLogger(__name__)

START_TIMEOUT = timedelta(seconds=30)
"""A server that has not told its tools by then counts as absent; the first start of one may fetch a package."""
MAX_RECONNECT_DELAY = timedelta(minutes=1)
_LEAVING_SECONDS = 10.0
_UNSAFE_CHARACTER = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_NAME = 64

ReplaceTools = Callable[[str, Iterable[Tool]], object]
"""Takes the tools that a source offers from now on: `Toolbox.adopt`."""


class McpServers:
    def __init__(
        self,
        entries: Iterable[McpEntry],
        clock: Clock,
        replace_tools: ReplaceTools,
        *,
        start_timeout: timedelta = START_TIMEOUT,
    ) -> None:
        self._servers = [McpServer(entry, clock, replace_tools, start_timeout=start_timeout) for entry in entries]

    async def connect(self) -> list[Problem]:
        """Try all that are not there, at once; the problems are those that still are not. To be repeated at will."""
        found = await asyncio.gather(*(server.try_connect() for server in self._servers))
        return [problem for problem in found if problem]

    @property
    def connected_ids(self) -> list[str]:
        """The ids of those that are there now."""
        return [server.id for server in self._servers if server.is_connected]

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers))


class McpServer:
    def __init__(
        self, entry: McpEntry, clock: Clock, replace_tools: ReplaceTools, *, start_timeout: timedelta = START_TIMEOUT
    ) -> None:
        self.id = entry.id
        self._entry, self._clock, self._adopt, self._start = entry, clock, replace_tools, start_timeout
        self._connection: McpConnection | None = None
        self._connecting = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        self._failures = 0
        self._why = ""
        self._not_before = 0.0

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and self._connection.client is not None

    async def try_connect(self) -> Problem | None:
        try:
            await self._connected()
        except McpUnavailable as absent:
            log.warning("%s", absent)
            return Problem(f"coterie.toml: mcp.{self.id}", str(absent))
        return None

    async def close(self) -> None:
        self._drop()
        if self._leaving:
            _, late = await asyncio.wait(self._leaving, timeout=_LEAVING_SECONDS)
            for task in late:
                task.cancel()

    # The connection

    async def _connected(self) -> McpConnection:
        """`Absent` when there is none and none can be made, or when it was tried a moment ago."""
        async with self._connecting:
            if self._connection and self._connection.client:
                return self._connection
            rest = self._not_before - self._clock.monotonic()
            if rest > 0:
                raise McpUnavailable(f"the MCP server {self.id} is not there ({self._why}); next try in {rest:.0f} s")
            self._drop()
            self._connection = connection = McpConnection(self._entry, self._clock)
            self._leaving.add(connection.task)
            connection.task.add_done_callback(self._leaving.discard)
            try:
                offered = await connection.wait_ready(self._start)
            except asyncio.CancelledError:
                connection.task.cancel()
                raise
            except Exception as error:
                raise self._absent(connection.describe_failure(error)) from error
            self._failures = 0
            self._adopt(f"mcp.{self.id}", self._tools(offered))
            return connection

    def _absent(self, why: str) -> McpUnavailable:
        self._drop()
        rest = min(timedelta(seconds=2**self._failures), MAX_RECONNECT_DELAY)
        self._failures = min(self._failures + 1, 10)
        self._not_before = self._clock.monotonic() + rest.total_seconds()
        self._why = why
        return McpUnavailable(f"the MCP server {self.id} cannot be reached: {self._why}")

    def _drop(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

    # Its tools

    def _tools(self, offered: Iterable[mcp.Tool]) -> list[Tool]:
        tools: dict[str, Tool] = {}
        for one in offered:
            made = self._tool(one, tool_name(self.id, one.name, tools))
            tools[made.name] = made
        return list(tools.values())

    def _tool(self, offered: mcp.Tool, name: str) -> Tool:
        effect = _effect(offered)

        async def run(arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
            return await self._call(offered.name, arguments, ctx, effect, tries=1 if effect == "unsafe" else 2)

        return Tool(
            name=name,
            spec=ToolSpec(
                name=name,
                description=to_storable(offered.description or ""),
                parameters={"type": "object"} | offered.input_schema,
            ),
            effect=effect,
            convert_arguments=lambda arguments, ctx: {"arguments": dict(arguments), "ctx": ctx},
            run=OnLoop(run),
        )

    async def _call(
        self, name: str, arguments: dict[str, Any], ctx: ToolContext, effect: Effect, *, tries: int
    ) -> ToolResult:
        """`tries`: how often to ask when the connection is lost on the way."""
        try:
            connection = await self._connected()
        except McpUnavailable as absent:
            return error_result("mcp_unavailable", str(absent))
        try:
            result = await connection.call(name, arguments)
        except Exception as error:
            if not connection.is_connection_error(error):
                return error_result("mcp_error", f"the MCP server {self.id} says: {error_text(error, self._entry)}")
            connection.close()
            why = error_text(error, self._entry)
            if tries > 1:
                return await self._call(name, arguments, ctx, effect, tries=tries - 1)
            words = f"the MCP server {self.id} went away during the call ({why}); the next call starts it again"
            return unknown_result("mcp_lost", words) if effect == "unsafe" else error_result("mcp_lost", words)
        return await render_result(result, name, ctx)


def tool_name(server: str, tool: str, taken: Collection[str] = ()) -> str:
    """`<server>__<tool>` in the characters and the length that every model service takes."""
    safe = _UNSAFE_CHARACTER.sub("_", f"{server}__{tool}")
    if len(safe) <= _MAX_NAME and safe not in taken:
        return safe
    return f"{safe[: _MAX_NAME - 9]}_{id_for(server, tool)[:8]}"


async def render_result(result: mcp.types.CallToolResult, name: str, ctx: ToolContext) -> ToolResult:
    """Its texts as they are; pictures, sound and files as artifacts, one JSON object each."""
    parts = [await _part(block, name, number, ctx) for number, block in enumerate(result.content)]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return ToolResult(ok=not result.is_error, text="\n".join(parts))


async def _part(block: mcp.types.ContentBlock, name: str, number: int, ctx: ToolContext) -> str:
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return await _kept(block.data, block.mime_type, name, number, ctx)
        case "resource":
            if text := getattr(block.resource, "text", None):
                return str(text)
            data = getattr(block.resource, "blob", "")
            return await _kept(data, block.resource.mime_type or "", name, number, ctx)
    return json.dumps({"resource": str(block.uri), "name": block.name}, ensure_ascii=False)


async def _kept(data: str, mime_type: str, name: str, number: int, ctx: ToolContext) -> str:
    try:
        filename = name + (mimetypes.guess_extension(mime_type) or "")
        artifact = await ctx.artifacts.put(b64decode(data), filename, key=f"{ctx.idempotency_key}/{number}")
    except (ValueError, CoterieError, OSError) as error:
        return json.dumps({"notKept": to_storable(str(error)), "mimeType": mime_type}, ensure_ascii=False)
    return json.dumps(artifact.to_dict(), ensure_ascii=False)


def _effect(offered: mcp.Tool) -> Effect:
    hints = offered.annotations
    if hints and hints.read_only_hint:
        return "pure"
    return "idempotent" if hints and hints.idempotent_hint else "unsafe"
