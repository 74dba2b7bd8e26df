"""One connection to an MCP server, and the log of its stderr.

`StderrLog` copies the server's stderr to our log: line by line, limited in size and rate, with secrets redacted.
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
"""Longer lines are cut."""
MAX_LINES_PER_PERIOD, PERIOD_SECONDS = 200, 10.0
"""Rate limit of logged lines. Further lines are read and counted, not logged."""
MAX_HELD_BACK_LINES = 10
"""Last unlogged lines, logged when the server ends: they may say why."""
_READ_BYTES = 1 << 13
"""Bytes per read, so that a flood does not block the event loop."""
_MAX_DRAIN_BYTES = 1 << 20
"""Bytes read after the server ended. A pipe holds less, but an orphaned child may write for ever."""


class StderrLog:
    """Context manager with a pipe that is read on the event loop. On exit, the rest of the pipe is logged."""

    writable: TextIO
    """Stderr of the server. The caller closes it after the server has started."""

    def __init__(self, server: str, secrets: tuple[str, ...], clock: Clock) -> None:
        self._server, self._secrets, self._clock = server, secrets, clock
        self._longest_secret = max((len(one.encode()) for one in secrets), default=0)
        self._line, self._last = bytearray(), b""
        self._since, self._logged = clock.monotonic(), 0
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
        self._log_skipped()
        for line in self._held_back:
            self._log_line(line)

    @property
    def last_line(self) -> str:
        """The last non-empty line, redacted."""
        return one_line(self._redact(bytes(self._line.strip()) or self._last), 300)

    def _drain(self) -> None:
        read = 0
        while read < _MAX_DRAIN_BYTES and (size := self._read()):
            read += size

    def _read(self) -> int:
        """Read once; return the number of bytes, 0 if the pipe is empty or closed."""
        try:
            piece = os.read(self._readable, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not piece:  # end of file: the reader would be called for ever
            asyncio.get_running_loop().remove_reader(self._readable)
        *ends, rest = piece.split(b"\n")
        for end in ends:
            self._append(end)
            self._end_line()
        self._append(rest)
        return len(piece)

    def _append(self, piece: bytes) -> None:
        # One byte more than the limit shows that the line is longer. The rest of the line is dropped.
        self._line += piece[: MAX_LINE_BYTES + self._longest_secret + 1 - len(self._line)]

    def _end_line(self) -> None:
        line = bytes(self._line).rstrip()
        self._line.clear()
        if not line:
            return
        self._last = line
        now = self._clock.monotonic()
        if now - self._since >= PERIOD_SECONDS:
            self._since, self._logged = now, 0
            self._log_skipped()
            self._held_back.clear()
        if self._logged < MAX_LINES_PER_PERIOD:
            self._logged += 1
            self._log_line(line)
        else:
            self._skipped += 1
            self._held_back.append(line)

    def _log_skipped(self) -> None:
        if self._skipped:
            log.info("the MCP server %s wrote %d more lines: not all are shown", self._server, self._skipped)
        self._skipped = 0

    def _log_line(self, line: bytes) -> None:
        log.info("the MCP server %s wrote: %s", self._server, self._redact(line))

    def _redact(self, line: bytes) -> str:
        text = redact(to_storable(line.decode("utf-8", "replace")), self._secrets)
        if len(line) > MAX_LINE_BYTES + self._longest_secret:
            text = text[: -self._longest_secret - 1]  # a secret that was cut in two would not be redacted
        return text if len(text) <= MAX_LINE_BYTES else text[:MAX_LINE_BYTES] + "…"


_MAX_PAGES = 100
_KEEPER = "coterie.agent.mcp_keeper"
_CONNECTION_CLOSED = -32000
"""The SDK's error code for a connection that ended before the answer. A server may use it for other errors."""


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


class McpUnavailable(CoterieError):
    """The server cannot be reached. The call was not sent."""


class McpConnection:
    """Owns a task that holds the connection, because the SDK's scopes belong to the task that entered them."""

    def __init__(self, entry: McpServerEntry, clock: Clock) -> None:
        self.client: mcp.Client | None = None
        """None: not connected."""
        self._stderr = StderrLog(entry.id, _secrets(entry), clock)
        self._lost_event, self._has_warned = asyncio.Event(), False
        self._entry = entry
        self._ready: asyncio.Future[list[mcp.Tool]] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._run(), name=f"coterie-mcp-{entry.id}")

    async def wait_ready(self, within: timedelta) -> list[mcp.Tool]:
        await asyncio.wait({self._ready}, timeout=within.total_seconds())
        if not self._ready.done():
            raise TimeoutError(f"it did not list its tools within {within.total_seconds():g} s")
        return self._ready.result()

    async def call(self, name: str, arguments: dict[str, Any]) -> mcp.types.CallToolResult:
        if self.client is None:
            raise ConnectionError("the connection has just ended")
        return await self.client.call_tool(name, arguments)

    def describe_failure(self, error: Exception) -> str:
        """Return why there is no connection, with the last line of the server's stderr."""
        why, wrote = error_text(error, self._entry), self._stderr.last_line
        return f"{why}; the last it wrote was: {wrote}" if wrote else why

    def is_connection_error(self, error: Exception) -> bool:
        """True if the connection was lost; False if the server answered with an error."""
        if self.client is None or isinstance(error, OSError):
            return True
        # Over HTTP the SDK reports a lost server before the connection is closed.
        code, text = getattr(error, "code", None), str(error)
        return self._entry.url is not None and (code == _CONNECTION_CLOSED or text == "Session terminated")

    def close(self) -> None:
        self._mark_lost()
        if not self._ready.done():
            self._ready.cancel()
            self.task.cancel()

    async def _run(self) -> None:
        try:
            sdk = await asyncio.to_thread(importlib.import_module, "mcp")  # off the loop: it takes a second
            async with sdk.Client(self._transport()) as client:
                tools = await _list(client)
                self.client = client
                if not self._ready.done():
                    self._ready.set_result(tools)
                await self._lost_event.wait()
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                log.warning(
                    "the connection to the MCP server %s broke: %s", self._entry.id, error_text(error, self._entry)
                )
        finally:
            self._mark_lost()

    def _mark_lost(self) -> None:
        self.client = None
        self._lost_event.set()

    def _transport(self) -> Any:
        if self._entry.url:
            from mcp.client.streamable_http import streamable_http_client

            return streamable_http_client(self._entry.url)
        if not self._entry.command:
            raise McpUnavailable("the entry names neither a command nor a url")
        return self._process()

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[tuple[Any, Any]]:
        """Run the server as a child process. When its stdout ends, the connection is marked as lost."""
        import anyio
        from mcp.client.stdio import StdioServerParameters, stdio_client

        assert self._entry.command  # noqa: S101
        env = dict(self._entry.env or {})
        _check_command(self._entry.command, env)
        # The keeper kills the server and its descendants even if this process dies. The SDK cannot do that.
        keeper = ("-P", "-m", _KEEPER, str(os.getpid()), self._entry.command, *self._entry.args)
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
                self._entry.id,
            )
        self._has_warned = True


def _check_command(command: str, env: Mapping[str, str]) -> None:
    """Raise `OSError` if the program does not exist. The keeper could only report it by its exit status."""
    if shutil.which(command, path=env.get("PATH") or os.environ.get("PATH")) is None:
        number = errno.EACCES if Path(command).exists() else errno.ENOENT
        raise OSError(number, os.strerror(number), command)


def error_text(error: BaseException, entry: McpServerEntry) -> str:
    """Return the error message without the secrets of the entry: errors repeat whole URLs."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = redact(to_storable(str(error)), _secrets(entry))
    return one_line(text, 300) or type(error).__name__


def _secrets(entry: McpServerEntry) -> tuple[str, ...]:
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
