"""kill -9, again and again, at random instants and inside commits; then an examination.

A *life* is one folder that is killed a few dozen times and then examined: every kill meets a database of another age,
and none grows so large that looking at it takes longer than filling it.
"""

from __future__ import annotations

import asyncio
import functools
import random
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie import failpoints

from .harness import Child, patience
from .scenarios import drain, hammer, make_home
from .verifier import Verification
from .witness import Note, Reader, Witness

KILLS_A_LIFE = 25
IN_COMMIT = ("commit.after", "commit.before", "flush.before_messages", "flush.before_agents", "flush.done")
NOT_YET_COMMITTED = IN_COMMIT[1:]
IN_PROMOTION = ("promote.selected", "promote.moved")
MORE = 4
"""A slow machine gets less done between two kills, so a run that has seen too little goes on: up to so many times."""
OWED_AGAIN = 0.6
"""How many of the clients that got no answer ask again; the others show what a lost acknowledgement leaves."""


def run(folder: str, seed: int, cycles: int, at_least: Mapping[str, int]) -> dict[str, Any]:
    """`cycles` kills, and more while too little was seen; what was seen, and everything wrong with it."""
    return live(Life, Path(folder), seed, cycles, at_least)


def live(kind: type[Life], folder: Path, seed: int, cycles: int, at_least: Mapping[str, int]) -> dict[str, Any]:
    seen: Counter[str] = Counter()
    problems: list[str] = []
    for life in range(0, cycles * MORE, KILLS_A_LIFE):
        if life >= cycles and (problems or has_seen(seen, at_least)):
            break
        home = folder / f"life{life}"
        one = kind(home, seed, life)
        one.live(min(KILLS_A_LIFE, cycles - life if life < cycles else KILLS_A_LIFE))
        problems += [f"life {life}: {problem}" for problem in one.problems]
        seen += one.seen
        if not one.problems:
            shutil.rmtree(home)
    return {"seen": dict(seen), "problems": problems}


def has_seen(seen: Mapping[str, int], at_least: Mapping[str, int]) -> bool:
    return all(seen.get(what, 0) >= number for what, number in at_least.items())


class Life:
    ways: Mapping[str, int] = {
        "while opening": 2,
        "at random": 8,
        "in a commit": 4,
        "with a commit hanging": 4,
        "in a promotion": 4,
    }
    """How it can be killed, and how often one way is chosen beside the others."""
    instants = (0.003, 0.015)
    """Seconds of work before a kill at random."""
    patience = 0.1
    """Seconds within which an armed failpoint should be met."""
    examination = Verification

    def __init__(self, home: Path, seed: int, number: int) -> None:
        self._folder, self._witness_file = home / "society", home / "witness"
        self._seed, self._rng, self._name = seed, random.Random(f"{seed}/{number}"), f"L{number}"
        self._ends_early = number % (3 * KILLS_A_LIFE) == 0
        self._owed: list[Note] = []
        self._reader = Reader(self._witness_file)
        self.seen: Counter[str] = Counter()
        self.problems: list[str] = []
        make_home(self._folder, delayed="deliver" if self._ends_early else "keep")

    def _work(self, name: str, spec: str, ready: int) -> None:
        """What the child does until it is killed."""
        failpoints.arm(spec)
        asyncio.run(hammer(self._folder, self._seed, name, self._owed, Witness(self._witness_file), ready))

    def _rest(self, _: int) -> None:
        """What the last child does, in peace."""
        late = (Witness(self._witness_file), f"{self._name}.last") if self._ends_early else ()
        asyncio.run(_drain_quietly(self._folder, not self._ends_early, *late))

    def live(self, kills: int) -> None:
        for number in range(kills):
            self._be_killed(f"{self._name}.{number}")
        end = Child(self._rest).end()
        if end:
            self.problems.append(f"the last, peaceful run ended with {end}")
            return
        examination = self.examination(self._folder, self._reader.notes())
        self.problems += examination.problems
        self.seen += examination.seen

    def _be_killed(self, name: str) -> None:
        how = self._rng.choices([*self.ways], [*self.ways.values()])[0]
        spec = self._failpoint(how)
        child = Child(functools.partial(self._work, name, spec))
        if how == "while opening":
            time.sleep(self._rng.uniform(0, 0.012))  # the injected fault: some instant
        elif child.said(patience()) and how in ("at random", "with a commit hanging"):
            time.sleep(self._rng.uniform(*self.instants))
        elif spec and not child.ends(patience(self.patience)):  # by its own hand, where the failpoint is
            how = "too late for its failpoint"
        child.kill()
        if (status := child.end()) != -9:
            self.problems.append(f"{name} ended with {status} before it was killed {how}")
        self.seen[f"killed {how}"] += 1
        self._look_back(self._reader.new_notes())

    def _failpoint(self, how: str) -> str:
        match how:
            case "in a commit":
                return f"{self._rng.choice(IN_COMMIT)}:{self._rng.randint(2, 20)}:kill"
            case "with a commit hanging":
                return f"{self._rng.choice(NOT_YET_COMMITTED)}:{self._rng.randint(2, 8)}:hang"
            case "in a promotion":
                return f"{self._rng.choice(IN_PROMOTION)}:{self._rng.randint(1, 4)}:kill"
        return ""

    def _look_back(self, news: list[Note]) -> None:
        """Who got no answer from the dead one will ask again, or not."""
        acked = {note["acked"] for note in news if "acked" in note}
        self.seen["asked again under the same id"] += sum(bool(note.get("again")) for note in news if "acked" in note)
        unanswered = [note for note in news if "wanted" in note and note["wanted"] not in acked]
        self.seen["killed with a send in flight"] += bool(unanswered)
        still = [note for note in self._owed if note["wanted"] not in acked]
        again = [note for note in unanswered if "anonymous" not in note and self._rng.random() < OWED_AGAIN]
        self._owed = still + again


async def _drain_quietly(*arguments: Any) -> None:
    await drain(*arguments)
