"""The program that runs a `process=True` tool: `python -m coterie.agent.tool_process PARENT_PID`.

It reads one line of JSON from stdin and writes one line of JSON with `kind` and `size` to stdout, then `size` bytes.
The program is two processes. The worker runs the tool. The keeper waits until the worker ends, or the runtime closes
stdin or dies. Then it kills all descendants, including daemons that left the process group, and exits.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

# Imports only small modules. The worker loads all others, under the tool's memory limit.


PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")


def main() -> NoReturn:
    parent = int(sys.argv[1])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal_pipe = open_signal_pipe()
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)  # the runtime died before PR_SET_PDEATHSIG took effect
    request = json.loads(sys.stdin.buffer.readline())
    worker = os.fork()
    if worker == 0:
        _run_worker(request)
    os.close(1)
    status = _watch(worker, signal_pipe)
    kill_descendants()
    os._exit(status)


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# The keeper


def open_signal_pipe() -> int:
    """Return the read end of a pipe that receives a byte per SIGCHLD and SIGTERM, for use with `select`."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return readable


def _watch(worker: int, signal_pipe: int) -> int:
    """Wait until the worker ends or the call is over; return the exit status."""
    while True:
        ready, _, _ = select.select([0, signal_pipe], [], [])
        if 0 in ready or signal.SIGTERM in os.read(signal_pipe, 64):
            return 0
        ended, status = os.waitpid(worker, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def kill_descendants() -> None:
    """Kill all descendants. As a subreaper this process adopts orphans, so it finds each of them as a child."""
    if not _PROC.is_dir():
        os.killpg(0, signal.SIGKILL)  # no subreaper on this system: only the process group can be found
    while True:
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    children = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_bytes()
        except OSError:
            continue  # it has just ended
        # The name, in parentheses, may contain anything; state and parent follow it.
        if int(stat.rpartition(b")")[2].split()[1]) == os.getpid():
            children.append(int(entry.name))
    return children


# The worker


def _run_worker(request: dict[str, Any]) -> NoReturn:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    result_fd = os.dup(1)
    os.dup2(2, 1)  # what the tool prints must not mix with its result
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        kind, payload = _run_tool(request)
    except BaseException as error:  # SystemExit and MemoryError too
        kind, payload = "failed", _failure(request["name"], error)
    header = json.dumps({"kind": kind, "size": len(payload)}).encode() + b"\n"
    with os.fdopen(result_fd, "wb") as stream:
        stream.write(header + payload)
    sys.stdout.flush()
    os._exit(0)


def _run_tool(request: dict[str, Any]) -> tuple[str, bytes]:
    if limit := request["memoryMb"]:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (limit << 20, limit << 20))
    sys.path[:] = request["path"]
    import asyncio
    import inspect

    from coterie.agent.tools import ToolResult, encode_result, parameters_of
    from coterie.agent.user_tools import import_tool_file

    function = getattr(import_tool_file(request["module"], Path(request["file"])), request["name"])
    value = function(**parameters_of(function).convert(request["arguments"], None))
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    match encode_result(value):
        case bytes(data):
            return "bytes", data
        case ToolResult(ok=ok, text=text):
            return "text" if ok else "failed", text.encode("utf-8", "replace")
        case str(text):
            return "text", text.encode("utf-8", "replace")


async def _awaited(value: Any) -> Any:
    return await value


def _failure(name: str, error: BaseException) -> bytes:
    from coterie.agent.tools import exception_result

    return exception_result(name, error).text.encode("utf-8", "replace")


if __name__ == "__main__":
    main()
