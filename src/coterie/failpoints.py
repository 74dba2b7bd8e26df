"""Named places where a test can make this process fail: `COTERIE_FAILPOINTS="name:nth:kill|raise|pause|hang,…"`.

Without the variable a failpoint costs one truth test. `pause` stops the process as SIGSTOP would, for zombies; `hang`
keeps this thread there for ever while the others go on, so that whatever they say too soon can be heard.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

_armed: dict[str, tuple[int, str]] = {}
_hits: Counter[str] = Counter()


class FailpointHit(Exception):
    """What `raise` raises: an error nobody planned for."""


def arm(spec: str | None = None) -> None:
    """Read `spec`, or the environment; called by whoever starts the process, never on import."""
    if spec is None:
        spec = os.environ.get("COTERIE_FAILPOINTS", "")
    _armed.clear()
    _hits.clear()
    for part in filter(None, spec.split(",")):
        name, nth, action = part.split(":")
        _armed[name] = (int(nth), action)


def hit(name: str) -> None:
    if _armed and name in _armed:
        _strike(name)


def _strike(name: str) -> None:
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
