"""Three workers of one society on PostgreSQL are killed, stopped and resumed; then the society is verified."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg

from coterie import failpoints

from .harness import HANG_SECONDS, Child, load_factor, scaled_timeout
from .kill_cycles import IN_COMMIT, IN_PROMOTION, RETRY_SHARE, has_seen
from .scenarios import AGENTS, make_home
from .shared_workload import conditions, run_worker, wait_until_idle_and_copy
from .witness import Note, Reader, Witness
from .work_cycles import FAILPOINTS, WINDOW
from .work_verifier import WorkVerification
from .workload import PAUSE

WORKERS = 3
LEASE = 0.4
"""Seconds, if the machine has at most two runnable processes per processor. A busy one renews leases later."""
LONG_SECONDS = 120.0
"""Timeout on a busy machine."""
WAYS = {"at random": 13, "in a commit": 3, "in a promotion": 1, "while opening": 1, **dict.fromkeys(FAILPOINTS, 3)}
WAYS |= {"before a tool": 6, "after a tool": 6}  # mail withdraws many plans before they run
FAILPOINT_SECONDS = 3.0
"""Seconds within which an armed failpoint should be hit. Not scaled: a kill that comes too late is a kill, too."""
CLIENT_PAUSE = 0.2
"""Most seconds between two messages of a client. Nine clients must leave agents time to run their plans."""
ZOMBIES = ("turn.asking", "turn.answered", "turn.calling", "turn.ran")
"""Failpoints at which a worker is stopped with a write outstanding."""


class SharedRun:
    def __init__(self, folder: str, url: str, seed: int, number: int = 0, lease: float = LEASE) -> None:
        home = Path(folder) / f"run{number}"
        self._homes = [home / f"worker{n}" for n in range(WORKERS)]
        self._witness_file, self._home, self._url, self._lease = home / "witness", home, url, lease
        self._seed, self._rng = seed, random.Random(f"{seed}/{number}")
        self._name, self._count = f"L{number}", 0
        self._reader = Reader(self._witness_file)
        self._running: dict[Path, tuple[str, Child]] = {}
        self._to_repeat: dict[Path, list[Note]] = {worker_home: [] for worker_home in self._homes}
        self.seen: Counter[str] = Counter()
        self.problems: list[str] = []
        for worker_home in self._homes:
            make_worker_home(worker_home, url)

    def begin(self, *, anonymous_share: float = 0.0, pause: float = PAUSE) -> None:
        self._anonymous_share, self._pause = anonymous_share, pause
        for home in self._homes:
            self._start(home)

    def _start(self, home: Path, spec: str = "", *, keeps_claims: bool = False) -> tuple[str, Child]:
        self._count += 1
        name = f"{self._name}.{self._count}"
        child = Child(functools.partial(self._work, home, name, spec, keeps_claims))
        self._running[home] = name, child
        return name, child

    def _work(self, home: Path, name: str, spec: str, keeps_claims: bool, ready: int) -> None:
        failpoints.arm(spec)
        witness = Witness(self._witness_file)
        with conditions(witness, self._lease, keeps_claims=keeps_claims):
            to_repeat, ways = self._to_repeat[home], (self._anonymous_share, self._pause)
            asyncio.run(run_worker(home, self._seed, name, to_repeat, witness, ready, *ways))

    # Faults

    def kill_one(self) -> None:
        """Kill one worker, by a failpoint or from outside, and start another."""
        home = self._rng.choice(self._homes)
        how = self._rng.choices([*WAYS], [*WAYS.values()])[0]
        self._kill(home, "at the end")
        _, child = self._start(home, self._failpoint(how))
        if how == "while opening":
            time.sleep(self._rng.uniform(0, 0.05))  # the injected fault: a random instant
        elif child.read(scaled_timeout()) and how == "at random":
            time.sleep(self._rng.uniform(0.01, 0.08))
        elif how != "at random" and not child.ends(FAILPOINT_SECONDS):
            how = "too late for its failpoint"
        self._kill(home, how)
        self._start(home)

    def make_zombies(self) -> None:
        """Stop one worker at failpoints, and resume it each time after others have taken over its claims."""
        home = self._rng.choice(self._homes)
        self._kill(home, "at the end")
        spec = ",".join(f"{name}:{self._rng.randint(1, 2)}:pause" for name in ZOMBIES)
        name, child = self._start(home, spec, keeps_claims=True)
        for _ in ZOMBIES:
            if not within(HANG_SECONDS, lambda: is_stopped(child.pid)):
                self.seen["too late for its failpoint"] += 1
                return
            (worker,) = [note["worker"] for note in self._notes() if note.get("started") == name]
            self._until(lambda worker=worker: not held_by(self._url, worker), f"no worker took over from {name}")
            before = self._fenced()
            os.kill(child.pid, signal.SIGCONT)
            self._until(
                lambda before=before: self._fenced() > before or is_stopped(child.pid), f"{name} was not fenced"
            )
            self.seen["zombies"] += self._fenced() > before

    def suspend_one(self) -> None:
        """SIGSTOP at a random moment, for longer than a lease."""
        home = self._rng.choice(self._homes)
        name, child = self._running[home]
        child.read(scaled_timeout() if not self._is_started(name) else 0)
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(self._lease * self._rng.uniform(1.2, 2))  # the injected fault: longer than a lease
        os.kill(child.pid, signal.SIGCONT)
        self.seen["suspended"] += 1
        self.let_work(3)

    def let_work(self, messages: int) -> None:
        """Wait until so many more requests were answered."""
        before = self._answered()
        self._until(lambda: self._answered() >= before + messages, "no worker answers any more")

    def let_work_until(self, acknowledged: int, answers: int) -> None:
        """Wait until so many sends were acknowledged and so many answers of agents were stored since the start."""

        def has_happened() -> bool:
            return sum("acked" in note for note in self._notes()) >= acknowledged and self._stored() >= answers

        self._until(has_happened, f"fewer than {acknowledged} acknowledged sends or {answers} answers")

    def end(self) -> dict[str, Any]:
        for home in self._homes:
            self._kill(home, "at the end")
        child = Child(self._finish)
        child.output_to_end(LONG_SECONDS)
        if end := child.end():
            states = [note["states"] for note in self._notes() if "states" in note]
            self.problems.append(f"{self._name}: the last child, which is not killed, ended with {end}: {states}")
        else:
            verification = WorkVerification(self._homes[0], self._notes())
            self.problems += [f"{self._name}: {problem}" for problem in verification.problems]
            self.seen += verification.seen
            self.seen["fenced"] += self._fenced()
            self.seen["asked again under the same id"] += sum(bool(note.get("again")) for note in self._notes())
            self.seen["temporarily refused"] += sum("refused" in note for note in self._notes())
        if not self.problems:
            shutil.rmtree(self._home)
        return {"seen": dict(self.seen), "problems": self.problems}

    def _finish(self, _: int) -> None:
        witness = Witness(self._witness_file)
        with conditions(witness, self._lease, keeps_claims=False):
            asyncio.run(wait_until_idle_and_copy(self._homes[0], self._seed, witness))

    def _kill(self, home: Path, how: str) -> None:
        name, child = self._running.pop(home)
        child.kill()
        if (status := child.end()) != -9:
            self.problems.append(f"{name} ended with {status} before it was killed {how}")
        self.seen[f"killed {how}"] += 1
        mine = [note for note in self._notes() if str(note.get("wanted", note.get("acked", ""))).startswith(f"{name}.")]
        acked = {note["acked"] for note in mine if "acked" in note}
        lost = [note for note in mine if "wanted" in note and note["wanted"] not in acked and "anonymous" not in note]
        self._to_repeat[home] = [note for note in lost if self._rng.random() < RETRY_SHARE]

    def _failpoint(self, how: str) -> str:
        names = FAILPOINTS | {"in a commit": IN_COMMIT, "in a promotion": IN_PROMOTION}
        nth = 1 if "tool" in how else self._rng.choice((1, 1, 2, 3, 5))  # mail withdraws most plans before they run
        return f"{self._rng.choice(names[how])}:{nth}:kill" if how in names else ""

    # Observations

    def _notes(self) -> list[Note]:
        return self._reader.notes()

    def _fenced(self) -> int:
        return sum("fenced" in note for note in self._notes())

    def _answered(self) -> int:
        return sum("answered" in note for note in self._notes())

    def _stored(self) -> int:
        with psycopg.connect(self._url, autocommit=True) as db:
            return int(db.execute("SELECT count(*) FROM messages WHERE automatic <> 0").fetchall()[0][0])

    def _is_started(self, name: str) -> bool:
        return any(note.get("started") == name for note in self._notes())

    def _states(self) -> list[Any]:
        with psycopg.connect(self._url, autocommit=True) as db:
            return db.execute("SELECT id, state, waiting, why, worker, crashes, runnable_at FROM agents").fetchall()

    def _until(self, happened: Any, otherwise: str) -> None:
        assert within(LONG_SECONDS, happened), f"{otherwise}: {self._states()}"


_current: list[SharedRun] = []


def begin(folder: str, url: str, seed: int, lease: float = LEASE) -> None:
    """Start a run in which the caller injects the faults."""
    _current[:] = [SharedRun(folder, url, seed, lease=lease)]
    _current[0].begin()


def let_work(messages: int) -> None:
    _current[0].let_work(messages)


def let_work_until(acknowledged: int, answers: int) -> None:
    _current[0].let_work_until(acknowledged, answers)


def end() -> dict[str, Any]:
    return _current.pop().end()


def kills(
    folder: str, urls: list[str], seed: int, runs: int, cycles: int, at_least: Mapping[str, int]
) -> dict[str, Any]:
    """Kill `cycles` times in `runs` runs. Return what was seen and all problems.

    Each run has its own database. Further `urls` are used for more runs while less than `at_least` was seen.
    """
    return _execute(folder, urls, seed, runs, cycles, at_least, SharedRun.kill_one)


def zombies(
    folder: str, urls: list[str], seed: int, runs: int, cycles: int, at_least: Mapping[str, int]
) -> dict[str, Any]:
    """Make `cycles` zombies, each with a takeover and at least one fenced write."""
    return _execute(folder, urls, seed, runs, cycles, at_least, SharedRun.make_zombies, until="zombies")


def stops(
    folder: str, urls: list[str], seed: int, runs: int, cycles: int, at_least: Mapping[str, int]
) -> dict[str, Any]:
    return _execute(folder, urls, seed, runs, cycles, at_least, SharedRun.suspend_one)


def _execute(
    folder: str,
    urls: list[str],
    seed: int,
    runs: int,
    cycles: int,
    at_least: Mapping[str, int],
    inject: Callable[[SharedRun], None],
    until: str = "",
) -> dict[str, Any]:
    seen: Counter[str] = Counter()
    problems: list[str] = []
    for number, url in enumerate(urls):
        if number >= runs and (problems or has_seen(seen, at_least)):
            break
        run = SharedRun(folder, url, seed, number, LEASE * max(1.0, load_factor() / 2))
        run.begin(anonymous_share=0.3, pause=CLIENT_PAUSE)
        done = 0
        while done < cycles / runs:
            inject(run)
            done = run.seen[until] if until else done + 1
        report = run.end()
        seen += Counter(report["seen"])
        problems += report["problems"]
    return {"seen": dict(seen), "problems": problems}


def make_worker_home(home: Path, url: str, agents: Sequence[str] = AGENTS) -> None:
    make_home(home, agents=agents)
    with (home / "coterie.toml").open("a") as toml:
        toml.write(f"[store]\nurl = {json.dumps(url)}\n")
    entry = {"id": "main", "baseURL": "http://127.0.0.1:9/v1", "model": "m", "contextTokens": WINDOW}
    entry["maxConcurrentRequests"] = max(8, len(agents))
    (home / "llmservices.json").write_text(json.dumps({"services": [entry]}))


def within(seconds: float, happened: Callable[[], object]) -> bool:
    """Return whether the condition holds within `seconds`, scaled by the load of the machine."""
    until = time.monotonic() + scaled_timeout(seconds)
    while not happened():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def held_by(url: str, worker: str) -> int:
    """Number of turns that the worker runs."""
    with psycopg.connect(url, autocommit=True) as db:
        held = db.execute("SELECT count(*) FROM agents WHERE worker = %s AND state IN ('llm', 'tools')", (worker,))
        return int(held.fetchall()[0][0])


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] == "T"
