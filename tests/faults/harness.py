"""A fork server: one process without threads that has imported everything and forks the children to be killed.

A cold start takes half a second, a fork a few milliseconds. A fork of the test runner itself, which has threads and
event loops, would copy their locks into the child. `ForkServer.call` sends commands as JSON lines.
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

HANG_SECONDS = 60.0
"""Seconds after which a child counts as hung, on an idle machine."""


def load_factor() -> float:
    """How much longer work takes than on an idle machine: runnable processes per processor, at least 1."""
    average, *_, running = Path("/proc/loadavg").read_text().split("/")[0].split()  # the average is of a minute
    return max(1.0, max(float(average), float(running)) / len(os.sched_getaffinity(0)))


def scaled_timeout(seconds: float = HANG_SECONDS) -> float:
    """Return `seconds` times the load of the machine, at least three times as many: other tests may start now.

    For timeouts that only end a wait for an event that never comes.
    """
    return seconds * max(3.0, load_factor())


class ForkServer:
    """Client of the fork server."""

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
        """Run `command` on the server and return its result. An error of the server is raised with its traceback."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"command": command, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the fork server died during {command!r}"
        answer = json.loads(line)
        assert "failed" not in answer, f"the fork server failed during {command!r}:\n{answer['failed']}"
        return answer["result"]

    def run(self, scenario: str, folder: Path, **arguments: Any) -> dict[str, Any]:
        """Run `scenario` in `folder` in a fork. Return its exit status and its result or error."""
        answer: dict[str, Any] = self.call("run", scenario=scenario, folder=str(folder), **arguments)
        return answer

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(timeout=scaled_timeout())
        self._process.stdout.close()


class Child:
    """A fork, seen from its parent."""

    def __init__(self, work: Callable[[int], None]) -> None:
        """Fork and call `work` with the write end of a pipe that this process reads. The child ends after `work`."""
        self._pipe, inner = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._pipe)
            _run_child(work, inner)
        os.close(inner)

    def read(self, within: float) -> bytes:
        """Return the next output; empty if the child ended or `within` seconds passed."""
        ready, _, _ = select.select([self._pipe], [], [], max(within, 0))
        return os.read(self._pipe, 1 << 16) if ready else b""

    def ends(self, within: float) -> bool:
        """Return whether the child ends within so many seconds."""
        ready, _, _ = select.select([self._pipe], [], [], within)
        return bool(ready) and not os.read(self._pipe, 1 << 16)

    def output_to_end(self, within: float = HANG_SECONDS) -> bytes:
        """Return all output until the child ends."""
        until, output = time.monotonic() + scaled_timeout(within), b""
        while piece := self.read(until - time.monotonic()):
            output += piece
        return output

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Wait until the child ends; kill it if it hangs. Return its exit status, negative for a signal."""
        until = time.monotonic() + scaled_timeout()
        while select.select([self._pipe], [], [], max(until - time.monotonic(), 0))[0]:
            if not os.read(self._pipe, 1 << 16):
                break
        else:
            self.kill()
        os.close(self._pipe)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _run_child(work: Callable[[int], None], pipe: int) -> None:
    status = 1
    try:
        work(pipe)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)  # skips the exit handlers and buffers of the parent
