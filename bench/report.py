"""Prints results as JSON lines, takes the best of several rounds, waits until the machine is idle."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROUNDS = 3
BUSY = 0.2
"""A round waits while more than this share of all processors is in use."""
IDLE_TIMEOUT_SECONDS = 2.0


class Report:
    """The results of one benchmark."""

    def __init__(self, bench: str) -> None:
        self._bench = bench

    def line(
        self,
        metric: str,
        value: float,
        unit: str,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        check: int | None = None,
    ) -> None:
        """Print one figure and whether it meets its target. `check`: number of the panel's acceptance check."""
        shown: dict[str, Any] = {"bench": self._bench, "metric": metric, "value": _rounded(value), "unit": unit}
        if check is not None:
            shown["check"] = check
        if at_most is not None:
            shown |= {"target": f"<= {at_most:,g} {unit}", "holds": value <= at_most}
        if at_least is not None:
            shown |= {"target": f">= {at_least:,g} {unit}", "holds": value >= at_least}
        print(json.dumps(shown), flush=True)

    def ratio(
        self, metric: str, ours: float, limit: float, *, at_most: float | None = None, at_least: float | None = None
    ) -> None:
        """Print our figure as a multiple of the plain limit, both from the same run."""
        self.line(f"ratio: {metric}", ours / limit, "x", at_most=at_most, at_least=at_least)


def best(
    ways: Mapping[str, Callable[[], float]], rounds: int = ROUNDS, pick: Callable[..., float] = max
) -> dict[str, float]:
    """The best figure of each variant. The variants alternate, so that noise affects all of them."""
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, measure in ways.items():
            settle()
            figures[name].append(measure())
    return {name: pick(values) for name, values in figures.items()}


def settle() -> None:
    """Wait for other processes of this machine to pause, with a timeout."""
    gc.collect()
    end = time.monotonic() + IDLE_TIMEOUT_SECONDS
    while _busy() > BUSY and time.monotonic() < end:
        pass


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def _busy(seconds: float = 0.2) -> float:
    total, idle = _processor_time()
    time.sleep(seconds)
    total_after, idle_after = _processor_time()
    return 1 - (idle_after - idle) / max(1, total_after - total)


def _processor_time() -> tuple[int, int]:
    """Total and idle processor time; both 0 without /proc."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0]
    except OSError:
        return 0, 0
    ticks = [int(field) for field in first.split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]


def _rounded(value: float) -> float:
    if not math.isfinite(value):
        return value
    return round(value) if abs(value) >= 1000 else float(f"{value:.3g}")
