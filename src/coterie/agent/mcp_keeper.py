"""The program that starts a stdio MCP server: `python -m coterie.agent.mcp_keeper PARENT_PID COMMAND [ARGUMENT ...]`.

The server inherits stdin, stdout and stderr, and talks to the runtime directly. This process waits until the server
ends, SIGTERM arrives or the runtime dies. Then it terminates the server, kills it after one second, and kills all its
descendants.
"""

# Imports only the standard library and a sibling that does the same, to start fast and use little memory.

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from typing import NoReturn

from coterie.agent.tool_process import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    kill_descendants,
    open_signal_pipe,
    prctl,
)

_GRACE_CHECKS, _CHECK_SECONDS = 10, 0.1
"""Checks, and seconds between them, after SIGTERM and before SIGKILL."""
_PARENT_CHECK_SECONDS = None if sys.platform == "linux" else 1.0
"""Interval of checks that the parent lives, on systems without PR_SET_PDEATHSIG."""
_NOT_FOUND = 127


def main() -> NoReturn:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal_pipe = open_signal_pipe()
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)  # the runtime died before PR_SET_PDEATHSIG took effect
    server = os.fork()
    if server == 0:
        _exec_server(command)
    # Only the server may hold the pipes, so that they close when it ends.
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(devnull, stream)
    status = _watch(server, signal_pipe, parent)
    kill_descendants()
    os._exit(status)


def _exec_server(command: list[str]) -> NoReturn:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - coterie.toml names the program
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(_NOT_FOUND)


def _watch(server: int, signal_pipe: int, parent: int) -> int:
    """Wait until the server ends, or terminate it; return the exit status."""
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
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
