"""Helpers that call tools of a toolbox, and a pipe that shows when processes have ended."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import ToolContext, ToolResult, get_tool

SOON = timedelta(milliseconds=150)
LONG = timedelta(seconds=60)
HANG_SECONDS = 180
"""Timeout of waits for something that always happens; it only ends a hanging test."""


def toolbox_of(*functions: object, **options: Any) -> Toolbox:
    return Toolbox([made for function in functions if (made := get_tool(function))], **options)


async def call(box: Toolbox, name: str, ctx: ToolContext, deadline: timedelta = LONG, **arguments: Any) -> ToolResult:
    return await box.call(name, arguments, ctx, deadline, patterns=["*"])


def content_of(result: ToolResult) -> Any:
    """Return the parsed JSON of a result."""
    return json.loads(result.text)


def error_of(result: ToolResult) -> str:
    """Return code and message of an error result."""
    assert not result.ok
    content = content_of(result)
    return f"{content['error']}: {content['message']}"


async def wait_until(condition: Callable[[], bool]) -> None:
    """Poll for a condition that a thread or another process makes true, without an event on this loop."""
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


class LifePipe:
    """A named pipe that processes open for writing. It reaches its end when all of them have ended."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    async def read(self) -> bytes:
        """Wait for the next bytes; empty after the last writer has ended."""
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._reader, readable.set)
        try:
            await asyncio.wait_for(readable.wait(), HANG_SECONDS)
            return os.read(self._reader, 100)
        finally:
            loop.remove_reader(self._reader)

    def close(self) -> None:
        os.close(self._reader)
