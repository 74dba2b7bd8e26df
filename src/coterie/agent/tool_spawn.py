"""Running a tool in a process of its own: start it, ask it, and leave nothing of it behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from coterie.agent.tool_context import ToolContext
from coterie.agent.tool_output import Died, NoResult
from coterie.agent.tools import InProcess, ToolResult

MAX_OUTPUT = 64 << 20
"""Bytes that one result may have; a process that says more is stopped."""
_PROGRAM = "coterie.agent.tool_process"
_SWEEP_SECONDS = 2.0
"""The process is given this long to kill what the tool has started, before it is killed itself."""


async def run_in_process(run: InProcess, arguments: Mapping[str, Any], ctx: ToolContext) -> str | bytes | ToolResult:
    """Ends with the process, and all that came of it, gone: whether it answered, failed or this task was cancelled."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", _PROGRAM, str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "COTERIE_AGENT_ID": ctx.agent_id, "COTERIE_IDEMPOTENCY_KEY": ctx.idempotency_key},
    )
    try:
        return await _ask(process, run, arguments)
    finally:
        await _finish(process)


async def _ask(
    process: asyncio.subprocess.Process, run: InProcess, arguments: Mapping[str, Any]
) -> str | bytes | ToolResult:
    assert process.stdin and process.stdout  # noqa: S101
    request = {
        "module": run.module,
        "file": run.file,
        "name": run.name,
        "memoryMb": run.memory_mb,
        "path": sys.path,
        "arguments": dict(arguments),
    }
    process.stdin.write(json.dumps(request).encode() + b"\n")
    try:
        await process.stdin.drain()
        header = json.loads(await process.stdout.readuntil(b"\n"))
        if header["size"] > MAX_OUTPUT:
            raise NoResult(f"it returned {header['size']:,} bytes, the most is {MAX_OUTPUT:,}")
        payload = await process.stdout.readexactly(header["size"])
    except (asyncio.IncompleteReadError, ConnectionError):
        raise Died(f"its process {_ending(await process.wait())} without a result") from None
    match header["kind"]:
        case "bytes":
            return payload
        case "text":
            return payload.decode()
    return ToolResult(ok=False, text=payload.decode())


def _ending(status: int) -> str:
    number = -status if status < 0 else status - 128
    try:
        return f"was ended by {signal.Signals(number).name}"
    except ValueError:
        return f"ended with status {status}"


async def _finish(process: asyncio.subprocess.Process) -> None:
    assert process.stdin  # noqa: S101
    process.stdin.close()  # tells the keeper that the call is over
    ended = asyncio.create_task(process.wait())
    try:
        await asyncio.wait({ended}, timeout=_SWEEP_SECONDS)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        # Whoever still holds the other end of a pipe keeps neither it nor us.
        process._transport.close()  # type: ignore[attr-defined]
        await asyncio.shield(ended)
