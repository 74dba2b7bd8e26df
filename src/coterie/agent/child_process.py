"""Programs that the runtime starts in child processes: `python -m coterie.agent.child_process tool|server PID …`.

`PID` is the process id of the runtime. `tool` runs a `process=True` tool: it reads one line of JSON from stdin and
writes one line of JSON with `kind` and `size` to stdout, then `size` bytes. A tool with `ctx` has one more socket, see
`process_context`. `server PID COMMAND [ARGUMENT …]` starts a stdio MCP server, which inherits stdin, stdout and stderr
and talks to the runtime directly.

Both are two processes. The keeper waits until its child ends, SIGTERM arrives or the runtime dies; for a tool, also
until the runtime closes stdin. Then it kills all descendants, including daemons that left the process group, and exits.
"""

# Imports only the standard library, to start fast and use little memory. The tool's worker loads other modules, under
# the tool's memory limit.

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

PROGRAM = "coterie.agent.child_process"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")


def main() -> NoReturn:
    role, parent, *command = sys.argv[1:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal_pipe = _open_signal_pipe()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        os._exit(1)  # the runtime died before PR_SET_PDEATHSIG took effect
    status = _keep_tool(signal_pipe) if role == "tool" else _keep_server(command, signal_pipe, int(parent))
    _kill_descendants()
    os._exit(status)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _open_signal_pipe() -> int:
    """Return the read end of a pipe that receives a byte per SIGCHLD and SIGTERM, for use with `select`."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return readable


def _kill_descendants() -> None:
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


# Tools


def _keep_tool(signal_pipe: int) -> int:
    """Fork the worker and wait until it ends or the call is over; return the exit status."""
    request = json.loads(sys.stdin.buffer.readline())
    worker = os.fork()
    if worker == 0:
        _run_worker(request)
    os.close(1)
    while True:
        ready, _, _ = select.select([0, signal_pipe], [], [])
        if 0 in ready or signal.SIGTERM in os.read(signal_pipe, 64):
            return 0
        ended, status = os.waitpid(worker, os.WNOHANG)
        if ended:
            return _exit_code(status)


def _run_worker(request: dict[str, Any]) -> NoReturn:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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

    from coterie.agent.process_context import make_context
    from coterie.agent.tools import ToolResult, encode_result, parameters_of
    from coterie.agent.user_tools import import_tool_file

    function = getattr(import_tool_file(request["module"], Path(request["file"])), request["name"])
    ctx = make_context(request["context"]) if request["context"] else None
    value = function(**parameters_of(function).convert(request["arguments"], ctx))
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


# MCP servers

_GRACE_CHECKS, _CHECK_SECONDS = 10, 0.1
"""Checks, and seconds between them, after SIGTERM and before SIGKILL."""
_PARENT_CHECK_SECONDS = None if sys.platform == "linux" else 1.0
"""Interval of checks that the parent lives, on systems without PR_SET_PDEATHSIG."""
_NOT_FOUND = 127


def _keep_server(command: list[str], signal_pipe: int, parent: int) -> int:
    """Fork the server and wait until it ends, or terminate it; return the exit status."""
    server = os.fork()
    if server == 0:
        _exec_server(command)
    # Only the server may hold the pipes, so that they close when it ends.
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(devnull, stream)
    while True:
        ready, _, _ = select.select([signal_pipe], [], [], _PARENT_CHECK_SECONDS)
        signals = os.read(signal_pipe, 64) if ready else b""
        if (status := _exit_status(server)) is not None:
            return status
        if signal.SIGTERM in signals or os.getppid() != parent:
            break
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGTERM)
    for _ in range(_GRACE_CHECKS):
        if (status := _exit_status(server)) is not None:
            return status
        if select.select([signal_pipe], [], [], _CHECK_SECONDS)[0]:
            os.read(signal_pipe, 64)
    return 0


def _exec_server(command: list[str]) -> NoReturn:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - coterie.toml names the program
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(_NOT_FOUND)


def _exit_status(server: int) -> int | None:
    """Return the exit status of the server; None if it runs. Also reaps adopted orphans."""
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 0
        if ended == 0:
            return None
        if ended == server:
            return _exit_code(status)


def _exit_code(status: int) -> int:
    """Exit code for the status of a child; 128 plus the number of the signal that killed it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
