"""Failpoints: named points at which a test makes the process fail.

`COTERIE_FAILPOINTS="name:nth:action,…"` triggers at the nth hit. `kill` sends SIGKILL, `pause` sends SIGSTOP,
`hang` blocks the calling thread forever, `raise` raises `FailpointHit`. Without the variable a hit costs one test.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

_armed: dict[str, tuple[int, str]] = {}
_hits: Counter[str] = Counter()


class FailpointHit(Exception):
    """Raised by the action `raise`."""


def arm(spec: str | None = None) -> None:
    """Set the failpoints from `spec`, or from the environment. Call it at process start, not on import."""
    if spec is None:
        spec = os.environ.get("COTERIE_FAILPOINTS", "")
    _armed.clear()
    _hits.clear()
    for part in filter(None, spec.split(",")):
        name, nth, action = part.split(":")
        _armed[name] = (int(nth), action)


def hits() -> dict[str, int]:
    """Hits of each armed failpoint since `arm`."""
    return dict(_hits)


def hit(name: str) -> None:
    if _armed and name in _armed:
        _trigger(name)


def _trigger(name: str) -> None:
    nth, action = _armed[name]
    _hits[name] += 1
    if _hits[name] != nth:
        return
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "pause":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            threading.Event().wait()
        case _:
            raise FailpointHit(name)
