"""A fork server: one process that has imported everything and has no threads, and forks whatever is to be killed.

A cold start costs half a second, a fork a few milliseconds; and forking from the test runner itself, which has threads
and event loops, would carry their locks into the child. Tests talk to the server in JSON lines: `ForkServer.call`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HUNG = 60.0
"""Seconds after which a child counts as hung, where the machine has nothing else to do."""


def patience(seconds: float = HUNG) -> float:
    """`seconds`, stretched by how much more this machine has to do than it has processors.

    For limits that only end a wait for something that never happens: a slow machine is not a fault.
    """
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


class ForkServer:
    """The test's end of it."""

    def __init__(self) -> None:
        assert __package__
        root = Path(__file__).parents[__package__.count(".") + 1]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )

    def call(self, command: str, **arguments: Any) -> Any:
        """Have `command` done; its answer. An error on the other side is raised here with its traceback."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"command": command, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the fork server died while doing {command!r}"
        answer = json.loads(line)
        assert "failed" not in answer, f"the fork server could not do {command!r}:\n{answer['failed']}"
        return answer["result"]

    def run(self, scenario: str, folder: Path, **arguments: Any) -> dict[str, Any]:
        """Let a fork do `scenario` in `folder`; how it ended."""
        answer: dict[str, Any] = self.call("run", scenario=scenario, folder=str(folder), **arguments)
        return answer

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(timeout=patience())
        self._process.stdout.close()


class Child:
    """One fork at work, seen from its parent."""

    def __init__(self, work: Callable[[int], None]) -> None:
        """`work` gets a descriptor it may write to; what it writes is read here, and its end is the child's end."""
        self._pipe, inner = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._pipe)
            _become(work, inner)
        os.close(inner)

    def said(self, within: float) -> bytes:
        """The next thing it wrote; empty when it ended, or when `within` seconds passed."""
        ready, _, _ = select.select([self._pipe], [], [], max(within, 0))
        return os.read(self._pipe, 1 << 16) if ready else b""

    def ends(self, within: float) -> bool:
        """Whether it ends by itself in that time."""
        ready, _, _ = select.select([self._pipe], [], [], within)
        return bool(ready) and not os.read(self._pipe, 1 << 16)

    def last_words(self, within: float = HUNG) -> bytes:
        """Everything it wrote until its end."""
        until, words = time.monotonic() + patience(within), b""
        while piece := self.said(until - time.monotonic()):
            words += piece
        return words

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Wait for its end, killing it if it hangs: the exit status, negative for a signal."""
        until = time.monotonic() + patience()
        while select.select([self._pipe], [], [], max(until - time.monotonic(), 0))[0]:
            if not os.read(self._pipe, 1 << 16):
                break
        else:
            self.kill()
        os.close(self._pipe)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _become(work: Callable[[int], None], pipe: int) -> None:
    status = 1
    try:
        work(pipe)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)  # nothing of the parent's (buffers, exit handlers) is ours to finish
