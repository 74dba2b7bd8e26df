"""kill -9 of the whole runtime with agents at work, again and again; then a rest, and an examination."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie import failpoints

from .kill_cycles import Life, live
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
WINDOW = 6_000
"""Tokens: what an agent is told first, and a dozen messages."""


def run(folder: str, seed: int, cycles: int, at_least: Mapping[str, int]) -> dict[str, Any]:
    """`cycles` kills, and more while too little was seen; what was seen, and everything wrong with it."""
    return live(WorkingLife, Path(folder), seed, cycles, at_least)


class WorkingLife(Life):
    ways: Mapping[str, int] = {
        "while opening": 2,
        "at random": 12,
        "in a commit": 2,
        "with a commit hanging": 2,
        "in a promotion": 1,
        **dict.fromkeys(FAILPOINTS, 2),
    }
    instants = (0.003, 0.035)
    patience = 0.25
    examination = WorkVerification

    def __init__(self, home: Path, seed: int, number: int) -> None:
        super().__init__(home, seed, number)
        entry = {"id": "main", "baseURL": "http://127.0.0.1:9/v1", "model": "m", "contextTokens": WINDOW}
        (self._folder / "llmservices.json").write_text(json.dumps({"services": [entry]}))

    def _work(self, name: str, spec: str, ready: int) -> None:
        failpoints.arm(spec)
        asyncio.run(run_workload(self._folder, self._seed, name, self._owed, Witness(self._witness_file), ready))

    def _rest(self, _: int) -> None:
        asyncio.run(run_until_idle(self._folder, self._seed, self._name, Witness(self._witness_file)))

    def _failpoint(self, how: str) -> str:
        if how in FAILPOINTS:
            # The first is most often met by what the last child left behind: a kill in the middle of a recovery.
            return f"{self._rng.choice(FAILPOINTS[how])}:{self._rng.choice((1, 1, 2, 3, 5, 8))}:kill"
        return super()._failpoint(how)

    def _look_back(self, news: list[Note]) -> None:
        super()._look_back(news)
        asked = {note["asks"] for note in news if "asks" in note} - {note.get("answered") for note in news}
        ran = {note["key"] for note in news if "did" in note} - {note.get("done") for note in news}
        self.seen["killed while a model was asked"] += bool(asked)
        summaries = {note["asks"] for note in news if note.get("summary")}
        self.seen["killed while a summary was made"] += bool(asked & summaries)
        for note in news:
            self.seen["retries"] += note.get("failed") == "for now"
            self.seen["resumed by hand"] += "resumed" in note
            for state in note.get("found", ()):
                self.seen[f"found in {state.replace('_', ' ')}"] += 1
        self.seen["killed while a tool ran"] += bool(ran)
