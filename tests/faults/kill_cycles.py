"""Repeated kill -9 at random instants and inside commits, then a verification.

A *run* kills the processes of one folder a few dozen times and then verifies the folder. Later kills meet a larger
database, and no database grows so large that its verification takes longer than its workload.
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

from .harness import Child, load_factor, scaled_timeout
from .scenarios import drain, make_home, send_until_killed
from .verifier import Verification
from .witness import Note, Reader, Witness

KILLS_PER_RUN = 25
IN_COMMIT = ("commit.after", "commit.before", "flush.before_messages", "flush.before_agents", "flush.done")
NOT_YET_COMMITTED = IN_COMMIT[1:]
IN_PROMOTION = ("promote.selected", "promote.moved")
MAX_EXTENSION = 4
"""A slow machine does less between two kills. A test that has seen too little continues, up to so many times longer."""
RETRY_SHARE = 0.6
"""Share of unacknowledged sends that are repeated. The others show what a lost acknowledgement leaves."""


def run(folder: str, seed: int, cycles: int, at_least: Mapping[str, int]) -> dict[str, Any]:
    """Kill `cycles` times, and more while less than `at_least` was seen. Return what was seen and all problems."""
    return kill_repeatedly(KillRun, Path(folder), seed, cycles, at_least)


def kill_repeatedly(
    kind: type[KillRun], folder: Path, seed: int, cycles: int, at_least: Mapping[str, int]
) -> dict[str, Any]:
    seen: Counter[str] = Counter()
    problems: list[str] = []
    for number in range(0, cycles * MAX_EXTENSION, KILLS_PER_RUN):
        if number >= cycles and (problems or has_seen(seen, at_least)):
            break
        home = folder / f"run{number}"
        run = kind(home, seed, number)
        run.execute(min(KILLS_PER_RUN, cycles - number if number < cycles else KILLS_PER_RUN))
        problems += [f"run {number}: {problem}" for problem in run.problems]
        seen += run.seen
        if not run.problems:
            shutil.rmtree(home)
    return {"seen": dict(seen), "problems": problems}


def has_seen(seen: Mapping[str, int], at_least: Mapping[str, int]) -> bool:
    return all(seen.get(what, 0) >= number for what, number in at_least.items())


class KillRun:
    ways: Mapping[str, int] = {
        "while opening": 2,
        "at random": 8,
        "in a commit": 4,
        "with a commit hanging": 4,
        "in a promotion": 4,
    }
    """When to kill, with the relative frequency of each."""
    instants = (0.003, 0.015)
    """Range of seconds of work before a kill at random."""
    failpoint_timeout = 0.1
    """Seconds within which an armed failpoint should be hit."""
    verification = Verification

    def __init__(self, home: Path, seed: int, number: int) -> None:
        self._folder, self._witness_file = home / "society", home / "witness"
        self._seed, self._rng, self._name = seed, random.Random(f"{seed}/{number}"), f"L{number}"
        self._delivers_early = number % (3 * KILLS_PER_RUN) == 0
        self._to_repeat: list[Note] = []
        self._reader = Reader(self._witness_file)
        self.seen: Counter[str] = Counter()
        self.problems: list[str] = []
        make_home(self._folder, delayed="deliver" if self._delivers_early else "keep")

    def _work(self, name: str, spec: str, ready: int) -> None:
        """The workload of a child until it is killed."""
        failpoints.arm(spec)
        asyncio.run(
            send_until_killed(self._folder, self._seed, name, self._to_repeat, Witness(self._witness_file), ready)
        )

    def _finish(self, _: int) -> None:
        """The workload of the last child, which is not killed."""
        late = (Witness(self._witness_file), f"{self._name}.last") if self._delivers_early else ()
        asyncio.run(_drain(self._folder, not self._delivers_early, *late))

    def execute(self, kills: int) -> None:
        for number in range(kills):
            self._kill_one(f"{self._name}.{number}")
        end = Child(self._finish).end()
        if end:
            self.problems.append(f"the last child, which is not killed, ended with {end}")
            return
        verification = self.verification(self._folder, self._reader.notes())
        self.problems += verification.problems
        self.seen += verification.seen

    def _kill_one(self, name: str) -> None:
        how = self._rng.choices([*self.ways], [*self.ways.values()])[0]
        spec = self._failpoint(how)
        child = Child(functools.partial(self._work, name, spec))
        if how == "while opening":
            time.sleep(self._rng.uniform(0, 0.012))  # the injected fault: a random instant
        elif child.read(scaled_timeout()) and how in ("at random", "with a commit hanging"):
            time.sleep(self._rng.uniform(*self.instants))
        elif spec and not child.ends(self.failpoint_timeout * load_factor()):  # the failpoint kills it
            how = "too late for its failpoint"
        child.kill()
        if (status := child.end()) != -9:
            self.problems.append(f"{name} ended with {status} before it was killed {how}")
        self.seen[f"killed {how}"] += 1
        self._record(self._reader.new_notes())

    def _failpoint(self, how: str) -> str:
        match how:
            case "in a commit":
                return f"{self._rng.choice(IN_COMMIT)}:{self._rng.randint(2, 20)}:kill"
            case "with a commit hanging":
                return f"{self._rng.choice(NOT_YET_COMMITTED)}:{self._rng.randint(2, 8)}:hang"
            case "in a promotion":
                return f"{self._rng.choice(IN_PROMOTION)}:{self._rng.randint(1, 4)}:kill"
        return ""

    def _record(self, news: list[Note]) -> None:
        """Count what the killed child did, and choose the unacknowledged sends to repeat."""
        acked = {note["acked"] for note in news if "acked" in note}
        self.seen["asked again under the same id"] += sum(bool(note.get("again")) for note in news if "acked" in note)
        unanswered = [note for note in news if "wanted" in note and note["wanted"] not in acked]
        self.seen["killed with a send in flight"] += bool(unanswered)
        still = [note for note in self._to_repeat if note["wanted"] not in acked]
        again = [note for note in unanswered if "anonymous" not in note and self._rng.random() < RETRY_SHARE]
        self._to_repeat = still + again


async def _drain(*arguments: Any) -> None:
    await drain(*arguments)
