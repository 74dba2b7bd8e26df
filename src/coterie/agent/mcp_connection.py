"""One connection to an MCP server, from its start to its end.

What an MCP server writes to its standard error, in our log: line by line, without its keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import logging
import os
import shutil
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

from coterie.clock import Clock
from coterie.errors import CoterieError
from coterie.redaction import find_secrets, redact
from coterie.text import one_line, to_storable

if TYPE_CHECKING:
    import mcp

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 2000
"""Bytes of a line that are shown."""
MAX_LINES_PER_PERIOD, PERIOD_SECONDS = 200, 10.0
"""So many lines are shown in so many seconds; whoever writes more is counted, and read all the same."""
MAX_HELD_BACK_LINES = 10
"""Of the lines that were held back, so many are shown when the server ends: they may say why."""
_PIECE = 1 << 13
"""Bytes read at once: a flood takes its turn with everything else that happens here."""
_MOST_AT_THE_END = 1 << 20
"""Bytes. What a server leaves in the pipe is less; a child that it left behind may go on writing for ever."""


class StderrLog:
    """A pipe of ours, read on the event loop; when it is left, all that the server had written is in the log."""

    writable: TextIO
    """For the server. To be closed here when the server has it."""

    def __init__(self, server: str, secrets: tuple[str, ...], clock: Clock) -> None:
        self._server, self._secrets, self._clock = server, secrets, clock
        self._longest = max((len(one.encode()) for one in secrets), default=0)
        self._line, self._last = bytearray(), b""
        self._since, self._shown = clock.monotonic(), 0
        self._held_back, self._skipped = deque[bytes](maxlen=MAX_HELD_BACK_LINES), 0

    def __enter__(self) -> Self:
        self._readable, writable = os.pipe()
        os.set_blocking(self._readable, False)
        self.writable = os.fdopen(writable, "w")
        asyncio.get_running_loop().add_reader(self._readable, self._read)
        return self

    def __exit__(self, *exc: object) -> None:
        self.writable.close()
        self._drain()
        asyncio.get_running_loop().remove_reader(self._readable)
        os.close(self._readable)
        self._end_line()
        self._admit()
        for line in self._held_back:
            self._show(line)

    @property
    def last_line(self) -> str:
        """The last line that says something, as people may see it."""
        return one_line(self._without_keys(bytes(self._line.strip()) or self._last), 300)

    def _drain(self) -> None:
        read = 0
        while read < _MOST_AT_THE_END and (size := self._read()):
            read += size

    def _read(self) -> int:
        """How many bytes there were; 0 when there is nothing now, or no more."""
        try:
            piece = os.read(self._readable, _PIECE)
        except BlockingIOError:
            return 0
        if not piece:  # it would be told for ever
            asyncio.get_running_loop().remove_reader(self._readable)
        *ends, rest = piece.split(b"\n")
        for end in ends:
            self._grow(end)
            self._end_line()
        self._grow(rest)
        return len(piece)

    def _grow(self, piece: bytes) -> None:
        # One byte more than is looked at tells that the line goes on; of an endless one no more is kept.
        self._line += piece[: MAX_LINE_BYTES + self._longest + 1 - len(self._line)]

    def _end_line(self) -> None:
        line = bytes(self._line).rstrip()
        self._line.clear()
        if not line:
            return
        self._last = line
        now = self._clock.monotonic()
        if now - self._since >= PERIOD_SECONDS:
            self._since, self._shown = now, 0
            self._admit()
            self._held_back.clear()
        if self._shown < MAX_LINES_PER_PERIOD:
            self._shown += 1
            self._show(line)
        else:
            self._skipped += 1
            self._held_back.append(line)

    def _admit(self) -> None:
        if self._skipped:
            log.info("the MCP server %s wrote %d more lines: not all are shown", self._server, self._skipped)
        self._skipped = 0

    def _show(self, line: bytes) -> None:
        log.info("the MCP server %s wrote: %s", self._server, self._without_keys(line))

    def _without_keys(self, line: bytes) -> str:
        words = redact(to_storable(line.decode("utf-8", "replace")), self._secrets)
        if len(line) > MAX_LINE_BYTES + self._longest:
            words = words[: -self._longest - 1]  # a key that was cut in two is not found
        return words if len(words) <= MAX_LINE_BYTES else words[:MAX_LINE_BYTES] + "…"


_MAX_PAGES = 100
_KEEPER = "coterie.agent.mcp_keeper"
_GONE = -32000
"""What the SDK reports when the connection ended before the answer; a server may mean anything else by it."""


class McpEntry(Protocol):
    """How to reach a server: a command to run, or the address of one that runs."""

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


class McpUnavailable(CoterieError):
    """The server is not there, and was not asked."""


class McpConnection:
    """A task of its own holds it, since the SDK's scopes belong to the task that entered them."""

    def __init__(self, entry: McpEntry, clock: Clock) -> None:
        self.client: mcp.Client | None = None
        """None: not yet, or not any more."""
        self._stderr = StderrLog(entry.id, _secrets(entry), clock)
        self._gone, self._complained = asyncio.Event(), False
        self._entry = entry
        self._ready: asyncio.Future[list[mcp.Tool]] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._hold(), name=f"coterie-mcp-{entry.id}")

    async def wait_ready(self, within: timedelta) -> list[mcp.Tool]:
        await asyncio.wait({self._ready}, timeout=within.total_seconds())
        if not self._ready.done():
            raise TimeoutError(f"it did not tell its tools within {within.total_seconds():g} s")
        return self._ready.result()

    async def call(self, name: str, arguments: dict[str, Any]) -> mcp.types.CallToolResult:
        if self.client is None:
            raise ConnectionError("the connection has just ended")
        return await self.client.call_tool(name, arguments)

    def describe_failure(self, error: Exception) -> str:
        """Why there is no connection, in one sentence: what a child wrote last often says more than its end."""
        why, wrote = error_text(error, self._entry), self._stderr.last_line
        return f"{why}; the last it wrote was: {wrote}" if wrote else why

    def is_connection_error(self, error: Exception) -> bool:
        """Whether the call met the end of the connection, and not an answer that says no."""
        if self.client is None or isinstance(error, OSError):
            return True
        # Over HTTP the SDK speaks for a server that has gone, before the connection has noticed.
        code, words = getattr(error, "code", None), str(error)
        return self._entry.url is not None and (code == _GONE or words == "Session terminated")

    def close(self) -> None:
        self._lost()
        if not self._ready.done():
            self._ready.cancel()
            self.task.cancel()

    async def _hold(self) -> None:
        try:
            sdk = await asyncio.to_thread(importlib.import_module, "mcp")  # off the loop: it takes a second
            async with sdk.Client(self._transport()) as client:
                offered = await _list(client)
                self.client = client
                if not self._ready.done():
                    self._ready.set_result(offered)
                await self._gone.wait()
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                log.warning(
                    "the connection to the MCP server %s broke: %s", self._entry.id, error_text(error, self._entry)
                )
        finally:
            self._lost()

    def _lost(self) -> None:
        self.client = None
        self._gone.set()

    def _transport(self) -> Any:
        if self._entry.url:
            from mcp.client.streamable_http import streamable_http_client

            return streamable_http_client(self._entry.url)
        if not self._entry.command:
            raise McpUnavailable("the entry names neither a command nor a url")
        return self._process()

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[tuple[Any, Any]]:
        """A server as a child. When it stops talking, the connection is lost: the next call need not find out."""
        import anyio
        from mcp.client.stdio import StdioServerParameters, stdio_client

        assert self._entry.command  # noqa: S101
        env = dict(self._entry.env or {})
        _check_command(self._entry.command, env)
        # The SDK ends a server that ignores everything but SIGKILL only while this process lives to do so, and never
        # what left the server's process group.
        keeper = ("-P", "-m", _KEEPER, str(os.getpid()), self._entry.command, *self._entry.args)
        started = StdioServerParameters(command=sys.executable, args=list(keeper), env=env)
        said, heard = anyio.create_memory_object_stream[Any](0)

        async def pass_on() -> None:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                async for message in read:
                    if isinstance(message, Exception):
                        self._complain()
                    else:
                        await said.send(message)
            said.close()
            self._lost()

        with self._stderr as stderr:
            async with (
                said,
                heard,
                stdio_client(started, errlog=stderr.writable) as (read, write),
                anyio.create_task_group() as tasks,
            ):
                stderr.writable.close()
                tasks.start_soon(pass_on)
                yield heard, write
                tasks.cancel_scope.cancel()

    def _complain(self) -> None:
        """Once. Without the words, of which the error holds two pieces: a key that was cut in two is not found."""
        if not self._complained:
            words = "the MCP server %s writes to its standard output what is no message: have it use its standard error"
            log.warning(words, self._entry.id)
        self._complained = True


def _check_command(command: str, env: Mapping[str, str]) -> None:
    """`OSError` when there is no such program; found here, since the process that starts it could only exit."""
    if shutil.which(command, path=env.get("PATH") or os.environ.get("PATH")) is None:
        number = errno.EACCES if Path(command).exists() else errno.ENOENT
        raise OSError(number, os.strerror(number), command)


def error_text(error: BaseException, entry: McpEntry) -> str:
    """Without the keys that the owner gave the server: errors repeat whole addresses."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    words = redact(to_storable(str(error)), _secrets(entry))
    return one_line(words, 300) or type(error).__name__


def _secrets(entry: McpEntry) -> tuple[str, ...]:
    return find_secrets(entry.env, entry.args, entry.url)


async def _list(client: mcp.Client) -> list[mcp.Tool]:
    tools: list[mcp.Tool] = []
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if (cursor := page.next_cursor) is None:
            break
    return tools
