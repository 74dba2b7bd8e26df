"""The program that starts a stdio MCP server: `python -m coterie.agent.mcp_keeper PARENT COMMAND [ARGUMENT ...]`.

The server inherits standard input, output and error, and talks to the runtime directly. This process waits until the
server has ended, until it gets SIGTERM, or until the runtime has died. Then it kills the server, if it does not end by
itself within a second, and everything that the server has started.
"""

# Imports only the standard library and a sibling that does the same: the server starts sooner, and uses less memory.

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from typing import NoReturn

from coterie.agent.tool_process import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, hear_signals, kill_descendants, prctl

_GRACE_LOOKS, _LOOK_SECONDS = 10, 0.1
"""A server that was told to end is looked at so often, and then killed."""
_PARENT_SECONDS = None if sys.platform == "linux" else 1.0
"""How often the parent is looked for where the system does not tell of its death."""
_NOT_FOUND = 127


def main() -> NoReturn:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    alarm = hear_signals()
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)  # it died before this process could be told of it
    server = os.fork()
    if server == 0:
        _become(command)
    # The pipes are the server's alone: their ends must close when it does.
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    status = _watch(server, alarm, parent)
    kill_descendants()
    os._exit(status)


def _become(command: list[str]) -> NoReturn:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the owner names the program
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(_NOT_FOUND)


def _watch(server: int, alarm: int, parent: int) -> int:
    """Wait until the server has ended or has to end; the exit status."""
    while True:
        ready, _, _ = select.select([alarm], [], [], _PARENT_SECONDS)
        heard = os.read(alarm, 64) if ready else b""
        if (status := _ended(server)) is not None:
            return status
        if signal.SIGTERM in heard or os.getppid() != parent:
            break
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGTERM)
    for _ in range(_GRACE_LOOKS):
        if (status := _ended(server)) is not None:
            return status
        if select.select([alarm], [], [], _LOOK_SECONDS)[0]:
            os.read(alarm, 64)
    return 0


def _ended(server: int) -> int | None:
    """The exit status of the server, if it has ended. Orphans that came to this process are reaped on the way."""
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
