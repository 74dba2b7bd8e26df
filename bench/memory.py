"""Stored data needs no memory: resident bytes of a large society compared with an empty one."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench import child, rows
from bench.report import Report, best

DELAYED, AGENTS = 1_000_000, 100_000
MB = 1_000_000
GROWTH_MB = 20


def run() -> None:
    report = Report("memory")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows.make_society(folder / "empty", 1, [])
        rows.make_society(folder / "agents", AGENTS, [])
        rows.make_society(folder / "delayed", 100, [])
        rows.add_delayed(folder / "delayed", DELAYED)
        ways = {place: lambda place=place: _resident(folder / place) for place in ("empty", "delayed", "agents")}
        used = best(ways, 1)
    report.line("a society at work, empty store", used["empty"], "MB")
    report.line(
        "growth with 1,000,000 delayed messages stored", used["delayed"] - used["empty"], "MB", at_most=GROWTH_MB
    )
    report.line("growth with 100,000 agents stored", used["agents"] - used["empty"], "MB", at_most=GROWTH_MB)


def _resident(folder: Path) -> float:
    return child.figure("-m", "bench.society", "memory", str(folder)) / MB
