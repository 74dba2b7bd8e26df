"""Repeated kill -9 of the runtime during turns, then a run until all agents are idle, then a verification."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie import failpoints

from .kill_cycles import KillRun, kill_repeatedly
from .witness import Note, Witness
from .work_verifier import WorkVerification
from .workload import run_until_idle, run_workload

FAILPOINTS = {
    "in a claim": ("turn.claimed",),
    "before the model": ("turn.asking",),
    "after the model": ("turn.answered",),
    "before a tool": ("turn.calling",),
    "after a tool": ("turn.ran",),
    "in a step": ("turn.fenced", "turn.before_save", "turn.group_closed", "turn.replied"),
}
WINDOW = 4_500
"""Context tokens: the system prompt and a dozen messages."""


def run(folder: str, seed: int, cycles: int, at_least: Mapping[str, int]) -> dict[str, Any]:
    """Kill `cycles` times, and more while less than `at_least` was seen. Return what was seen and all problems."""
    return kill_repeatedly(WorkRun, Path(folder), seed, cycles, at_least)


class WorkRun(KillRun):
    ways: Mapping[str, int] = {
        "while opening": 2,
        "at random": 12,
        "in a commit": 2,
        "with a commit hanging": 2,
        "in a promotion": 1,
        **dict.fromkeys(FAILPOINTS, 2),
    }
    instants = (0.003, 0.035)
    failpoint_timeout = 0.25
    verification = WorkVerification

    def __init__(self, home: Path, seed: int, number: int) -> None:
        super().__init__(home, seed, number)
        entry = {"id": "main", "baseURL": "http://127.0.0.1:9/v1", "model": "m", "contextTokens": WINDOW}
        (self._folder / "llmservices.json").write_text(json.dumps({"services": [entry]}))
        with (self._folder / "coterie.toml").open("a") as toml:
            toml.write('interrupt = "stream"\n')  # of the last agent
            toml.write("[limits.task]\nturns = 4\n")

    def _work(self, name: str, spec: str, ready: int) -> None:
        failpoints.arm(spec)
        asyncio.run(run_workload(self._folder, self._seed, name, self._to_repeat, Witness(self._witness_file), ready))

    def _finish(self, _: int) -> None:
        asyncio.run(run_until_idle(self._folder, self._seed, self._name, Witness(self._witness_file)))

    def _failpoint(self, how: str) -> str:
        if how in FAILPOINTS:
            # The first hit is most often during the recovery of the last child's work.
            return f"{self._rng.choice(FAILPOINTS[how])}:{self._rng.choice((1, 1, 2, 3, 5, 8))}:kill"
        return super()._failpoint(how)

    def _record(self, news: list[Note]) -> None:
        super()._record(news)
        asked = {note["asks"] for note in news if "asks" in note} - {note.get("answered") for note in news}
        ran = {note["key"] for note in news if "did" in note} - {note.get("done") for note in news}
        self.seen["killed while a model was asked"] += bool(asked)
        summaries = {note["asks"] for note in news if note.get("summary")}
        self.seen["killed while a summary was made"] += bool(asked & summaries)
        for note in news:
            self.seen["retries"] += note.get("failed") == "for now"
            self.seen["resumed by hand"] += "resumed" in note
            self.seen["stopped tasks"] += "stopped" in note
            self.seen["turns ended by stops"] += note.get("turns", 0)
            self.seen["budget questions"] += "over_budget" in note
            for state in note.get("found", ()):
                self.seen[f"found in {state.replace('_', ' ')}"] += 1
        self.seen["killed while a tool ran"] += bool(ran)
