"""The program that a `process=True` tool runs in: `python -m coterie.agent.tool_process PARENT`.

One line of JSON comes in on stdin; out goes one line of JSON with `kind` and `size`, and then `size` bytes. The program
is two processes. The worker runs the tool. The keeper waits until the worker has ended, or the runtime closes the pipe
or dies; then it kills whatever the tool has started, daemons that left the process group included, and ends.
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

# Only what is small to import stands here: everything else is loaded by the worker, under the tool's memory limit.


PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")


def main() -> NoReturn:
    parent = int(sys.argv[1])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    alarm = hear_signals()
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)  # it died before it could be watched
    request = json.loads(sys.stdin.buffer.readline())
    worker = os.fork()
    if worker == 0:
        _work(request)
    os.close(1)
    status = _watch(worker, alarm)
    kill_descendants()
    os._exit(status)


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# The keeper


def hear_signals() -> int:
    """A pipe that tells of signals, so that one `select` waits for all there is."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return readable


def _watch(worker: int, alarm: int) -> int:
    """Until the worker has ended, or nobody wants its result any more; the exit status."""
    while True:
        ready, _, _ = select.select([0, alarm], [], [])
        if 0 in ready or signal.SIGTERM in os.read(alarm, 64):
            return 0
        ended, status = os.waitpid(worker, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def kill_descendants() -> None:
    """Kill all that descends from here. Orphans become children of this process, so in the end all are seen."""
    if not _PROC.is_dir():
        os.killpg(0, signal.SIGKILL)  # without subreapers, those who stayed in the group are all that can be found
    while True:
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_bytes()
        except OSError:
            continue  # it has just ended
        # The name, in parentheses, may hold anything; behind it come state and parent.
        if int(stat.rpartition(b")")[2].split()[1]) == os.getpid():
            found.append(int(entry.name))
    return found


# The worker


def _work(request: dict[str, Any]) -> NoReturn:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answer_to = os.dup(1)
    os.dup2(2, 1)  # what the tool prints must not be taken for its result
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        kind, payload = _run(request)
    except BaseException as error:  # SystemExit and MemoryError are answers like any other
        kind, payload = "failed", _failure(request["name"], error)
    header = json.dumps({"kind": kind, "size": len(payload)}).encode() + b"\n"
    with os.fdopen(answer_to, "wb") as answer:
        answer.write(header + payload)
    sys.stdout.flush()
    os._exit(0)


def _run(request: dict[str, Any]) -> tuple[str, bytes]:
    if limit := request["memoryMb"]:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (limit << 20, limit << 20))
    sys.path[:] = request["path"]
    import asyncio
    import inspect

    from coterie.agent.tool_output import encode
    from coterie.agent.tools import ToolResult, parameters_of
    from coterie.agent.user_tools import import_tool_file

    function = getattr(import_tool_file(request["module"], Path(request["file"])), request["name"])
    value = function(**parameters_of(function).accept(request["arguments"], None))
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    match encode(value):
        case bytes(data):
            return "bytes", data
        case ToolResult(ok=ok, text=text):
            return "text" if ok else "failed", text.encode("utf-8", "replace")
        case str(text):
            return "text", text.encode("utf-8", "replace")


async def _awaited(value: Any) -> Any:
    return await value


def _failure(name: str, error: BaseException) -> bytes:
    from coterie.agent.tool_output import raised

    return raised(name, error).text.encode("utf-8", "replace")


if __name__ == "__main__":
    main()
