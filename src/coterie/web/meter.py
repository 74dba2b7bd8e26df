"""Requests counted as they pass: a dictionary and a list of numbers, so that counting costs next to nothing."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from starlette.types import Scope

BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Seconds."""


@dataclass(slots=True)
class Durations:
    total: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    def note(self, seconds: float) -> None:
        self.total += seconds
        self.counts[bisect_left(BUCKETS, seconds)] += 1


class HttpMeter:
    """Requests by method, route template and status. A template is ours, so there are only so many of them."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, int], Durations] = {}

    def note(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else "other"
        key = (method, template(scope), status)
        found = self.requests.get(key)
        if found is None:
            found = self.requests[key] = Durations()
        found.note(seconds)


API = "/api/v1"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def template(scope: Scope) -> str:
    path: str = getattr(scope.get("route"), "path", "")
    # A router's own routes do not know under which prefix they were mounted.
    prefix = API if scope["path"].startswith(API) and not path.startswith(API) else ""
    return f"{prefix}{path}" if path else "unmatched"
