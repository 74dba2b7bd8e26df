"""Server side of `harness.ForkServer`: executes the JSON commands on its standard input."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coterie.agent_runtime
import coterie.setup  # noqa: F401 - imported before the first fork
from coterie import failpoints
from coterie.stores.sql.migrations import schema_scripts

from . import kill_cycles, scenarios, shared_cycles, task_cycles, work_cycles, zombies
from .harness import HANG_SECONDS, Child, scaled_timeout

_held: dict[int, Child] = {}


def run(scenario: str, folder: str, arm: str = "", uid: int | None = None, **arguments: Any) -> dict[str, Any]:
    """Run a scenario in a fork with failpoints armed. Return its exit status and its result or error."""
    child = Child(functools.partial(_perform, scenario, folder, arm, uid, arguments))
    # Longer than each wait of a scenario, or its result would come too late to be read.
    output = child.output_to_end(10 * HANG_SECONDS)
    status = child.end()
    return {"status": status, "pid": child.pid, **(json.loads(output) if output else {})}


def hold(folder: str, work: bool = False) -> int:
    """Start a fork that runs the society in `folder` until `kill`; return its pid."""
    child = Child(functools.partial(_perform_holding, folder, work))
    assert child.read(scaled_timeout()) == b"open", "it did not open"
    _held[child.pid] = child
    return child.pid


def kill(pid: int) -> int:
    child = _held.pop(pid)
    child.kill()
    return child.end()


COMMANDS: dict[str, Callable[..., Any]] = {
    "run": run,
    "hold": hold,
    "kill": kill,
    "cycles": kill_cycles.run,
    "work_cycles": work_cycles.run,
    "task_cycles": task_cycles.run,
    "shared_kills": shared_cycles.kills,
    "shared_zombies": shared_cycles.zombies,
    "resume_zombies": zombies.resume_zombies,
    "shared_stops": shared_cycles.stops,
    "shared_begin": shared_cycles.begin,
    "shared_let_work": shared_cycles.let_work,
    "shared_let_work_until": shared_cycles.let_work_until,
    "shared_end": shared_cycles.end,
}


def _perform(scenario: str, folder: str, arm: str, uid: int | None, arguments: dict[str, Any], pipe: int) -> None:
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    failpoints.arm(arm)
    answer: dict[str, Any]
    try:
        answer = {"returned": asyncio.run(getattr(scenarios, scenario)(Path(folder), **arguments))}
    except BaseException as error:  # a leaked CancelledError, too, must reach the test
        answer = {
            "raised": type(error).__name__,
            "message": str(error),
            "owner": getattr(error, "pid", None),
            "traceback": traceback.format_exc(),
        }
    os.write(pipe, json.dumps(answer).encode())


def _perform_holding(folder: str, work: bool, pipe: int) -> None:
    asyncio.run(scenarios.hold(Path(folder), work, pipe))


def main() -> None:
    logging.disable(logging.CRITICAL)
    # Read before the fork: a child of another user may not have access to package data.
    assert schema_scripts("sqlite").newest
    gc.freeze()  # a garbage collection in a child would copy shared pages
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": COMMANDS[request["command"]](**request["arguments"])}
        except Exception:
            answer = {"failed": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
