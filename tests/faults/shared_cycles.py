"""Three workers of one society on PostgreSQL, which are killed, stopped and woken; then a rest, and an examination."""

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

from .harness import HUNG, Child, patience
from .kill_cycles import IN_COMMIT, IN_PROMOTION, OWED_AGAIN, has_seen
from .scenarios import AGENTS, make_home
from .shared_workload import conditions, wait_until_idle_and_copy, work_together
from .witness import Note, Reader, Witness
from .work_cycles import FAILPOINTS, WINDOW
from .work_verifier import WorkVerification
from .workload import PAUSE

WORKERS = 3
LEASE = 0.4
LONG = 120.0
"""Seconds for a rest on a machine that has much else to do."""
WAYS = {"at random": 13, "in a commit": 3, "in a promotion": 1, "while opening": 1, **dict.fromkeys(FAILPOINTS, 3)}
WAYS |= {"before a tool": 6, "after a tool": 6}  # mail withdraws many plans before they run
LEISURE = 0.2
"""Seconds between two messages of a client, at most: nine of them must leave agents the time to do what they plan."""
ZOMBIES = ("turn.asking", "turn.answered", "turn.calling", "turn.ran")
"""Where one is stopped with something to write down in its hands."""


class SharedLife:
    def __init__(self, folder: str, url: str, seed: int, number: int = 0, lease: float = LEASE) -> None:
        home = Path(folder) / f"life{number}"
        self._homes = [home / f"worker{n}" for n in range(WORKERS)]
        self._witness_file, self._home, self._url, self._lease = home / "witness", home, url, lease
        self._seed, self._rng = seed, random.Random(f"{seed}/{number}")
        self._name, self._count = f"L{number}", 0
        self._reader = Reader(self._witness_file)
        self._running: dict[Path, tuple[str, Child]] = {}
        self._owed: dict[Path, list[Note]] = {one: [] for one in self._homes}
        self.seen: Counter[str] = Counter()
        self.problems: list[str] = []
        for one in self._homes:
            furnish(one, url)

    def begin(self, *, nameless: float = 0.0, pause: float = PAUSE) -> None:
        self._nameless, self._pause = nameless, pause
        for home in self._homes:
            self._start(home)

    def _start(self, home: Path, spec: str = "", *, sure: bool = False) -> tuple[str, Child]:
        self._count += 1
        name = f"{self._name}.{self._count}"
        child = Child(functools.partial(self._work, home, name, spec, sure))
        self._running[home] = name, child
        return name, child

    def _work(self, home: Path, name: str, spec: str, sure: bool, ready: int) -> None:
        failpoints.arm(spec)
        witness = Witness(self._witness_file)
        with conditions(witness, self._lease, sure=sure):
            owed, ways = self._owed[home], (self._nameless, self._pause)
            asyncio.run(work_together(home, self._seed, name, owed, witness, ready, *ways))

    # What happens to them

    def lose_one(self) -> None:
        """One is killed, by its own hand or ours, and another comes in its place."""
        home = self._rng.choice(self._homes)
        how = self._rng.choices([*WAYS], [*WAYS.values()])[0]
        self._kill(home, "in the end")
        _, child = self._start(home, self._failpoint(how))
        if how == "while opening":
            time.sleep(self._rng.uniform(0, 0.05))  # the injected fault: some instant
        elif child.said(patience()) and how == "at random":
            time.sleep(self._rng.uniform(0.01, 0.08))
        elif how != "at random" and not child.ends(patience(3.0)):
            how = "too late for its failpoint"
        self._kill(home, how)
        self._start(home)

    def make_zombies(self) -> None:
        """One is stopped with something to write in its hands, and goes on when others have taken over: a few times."""
        home = self._rng.choice(self._homes)
        self._kill(home, "in the end")
        spec = ",".join(f"{name}:{self._rng.randint(1, 2)}:pause" for name in ZOMBIES)
        name, child = self._start(home, spec, sure=True)
        for _ in ZOMBIES:
            if not within(HUNG, lambda: is_stopped(child.pid)):
                self.seen["too late for its failpoint"] += 1
                return
            (worker,) = [note["worker"] for note in self._notes() if note.get("hired") == name]
            self._until(lambda worker=worker: not held_by(self._url, worker), f"nobody took over from {name}")
            before = self._fenced()
            os.kill(child.pid, signal.SIGCONT)
            self._until(
                lambda before=before: self._fenced() > before or is_stopped(child.pid), f"{name} was not turned away"
            )
            self.seen["zombies"] += self._fenced() > before

    def stop_one_for_a_while(self) -> None:
        """SIGSTOP at any moment, for longer than a lease."""
        home = self._rng.choice(self._homes)
        name, child = self._running[home]
        child.said(patience() if not self._is_hired(name) else 0)
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(self._lease * self._rng.uniform(1.2, 2))  # the injected fault: so long it does not move
        os.kill(child.pid, signal.SIGCONT)
        self.seen["stopped for a while"] += 1
        self.let_work(3)

    def let_work(self, messages: int) -> None:
        """Until so many more were answered than before."""
        before = self._answered()
        self._until(lambda: self._answered() >= before + messages, "nobody works any more")

    def end(self) -> dict[str, Any]:
        for home in self._homes:
            self._kill(home, "in the end")
        child = Child(self._rest)
        child.last_words(LONG)
        if end := child.end():
            resting = [note["resting"] for note in self._notes() if "resting" in note]
            self.problems.append(f"{self._name}: the last, peaceful run ended with {end}: {resting}")
        else:
            examination = WorkVerification(self._homes[0], self._notes())
            self.problems += [f"{self._name}: {problem}" for problem in examination.problems]
            self.seen += examination.seen
            self.seen["fenced"] += self._fenced()
            self.seen["asked again under the same id"] += sum(bool(note.get("again")) for note in self._notes())
            self.seen["refused for now"] += sum("refused" in note for note in self._notes())
        if not self.problems:
            shutil.rmtree(self._home)
        return {"seen": dict(self.seen), "problems": self.problems}

    def _rest(self, _: int) -> None:
        witness = Witness(self._witness_file)
        with conditions(witness, self._lease, sure=False):
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
        self._owed[home] = [note for note in lost if self._rng.random() < OWED_AGAIN]

    def _failpoint(self, how: str) -> str:
        names = FAILPOINTS | {"in a commit": IN_COMMIT, "in a promotion": IN_PROMOTION}
        nth = 1 if "tool" in how else self._rng.choice((1, 1, 2, 3, 5))  # mail withdraws most plans before they run
        return f"{self._rng.choice(names[how])}:{nth}:kill" if how in names else ""

    # What can be seen of them

    def _notes(self) -> list[Note]:
        return self._reader.notes()

    def _fenced(self) -> int:
        return sum("fenced" in note for note in self._notes())

    def _answered(self) -> int:
        return sum("answered" in note for note in self._notes())

    def _is_hired(self, name: str) -> bool:
        return any(note.get("hired") == name for note in self._notes())

    def _states(self) -> list[Any]:
        with psycopg.connect(self._url, autocommit=True) as db:
            return db.execute("SELECT id, state, waiting, why, worker, crashes, runnable_at FROM agents").fetchall()

    def _until(self, happened: Any, otherwise: str) -> None:
        assert within(LONG, happened), f"{otherwise}: {self._states()}"


_life: list[SharedLife] = []


def begin(folder: str, url: str, seed: int, lease: float = LEASE) -> None:
    """A life of its own: whoever calls does the harm."""
    _life[:] = [SharedLife(folder, url, seed, lease=lease)]
    _life[0].begin()


def let_work(messages: int) -> None:
    _life[0].let_work(messages)


def end() -> dict[str, Any]:
    return _life.pop().end()


def kills(
    folder: str, urls: list[str], seed: int, lives: int, cycles: int, at_least: Mapping[str, int]
) -> dict[str, Any]:
    """`cycles` kills in `lives` lives; what was seen, and everything wrong with it.

    Each life has a database of its own. Those in `urls` that are left over are for more lives, for as long as too
    little was seen.
    """
    return _live(folder, urls, seed, lives, cycles, at_least, "lose_one")


def zombies(
    folder: str, urls: list[str], seed: int, lives: int, cycles: int, at_least: Mapping[str, int]
) -> dict[str, Any]:
    """`cycles` of them, each with a takeover and at least one write that came too late."""
    return _live(folder, urls, seed, lives, cycles, at_least, "make_zombies", until="zombies")


def stops(
    folder: str, urls: list[str], seed: int, lives: int, cycles: int, at_least: Mapping[str, int]
) -> dict[str, Any]:
    return _live(folder, urls, seed, lives, cycles, at_least, "stop_one_for_a_while")


def _live(
    folder: str,
    urls: list[str],
    seed: int,
    lives: int,
    cycles: int,
    at_least: Mapping[str, int],
    what: str,
    until: str = "",
) -> dict[str, Any]:
    seen: Counter[str] = Counter()
    problems: list[str] = []
    for number, url in enumerate(urls):
        if number >= lives and (problems or has_seen(seen, at_least)):
            break
        life = SharedLife(folder, url, seed, number)
        life.begin(nameless=0.3, pause=LEISURE)
        done = 0
        while done < cycles / lives:
            getattr(life, what)()
            done = life.seen[until] if until else done + 1
        report = life.end()
        seen += Counter(report["seen"])
        problems += report["problems"]
    return {"seen": dict(seen), "problems": problems}


def furnish(home: Path, url: str, agents: Sequence[str] = AGENTS) -> None:
    make_home(home, agents=agents)
    with (home / "coterie.toml").open("a") as toml:
        toml.write(f"[store]\nurl = {json.dumps(url)}\n")
    entry = {"id": "main", "baseURL": "http://127.0.0.1:9/v1", "model": "m", "contextTokens": WINDOW}
    entry["maxConcurrentRequests"] = max(8, len(agents))
    (home / "llmservices.json").write_text(json.dumps({"services": [entry]}))


def within(seconds: float, happened: Callable[[], object]) -> bool:
    """Whether it happens in `seconds`, or in as much longer as a busy machine needs."""
    until = time.monotonic() + patience(seconds)
    while not happened():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def held_by(url: str, worker: str) -> int:
    """How many agents it works on."""
    with psycopg.connect(url, autocommit=True) as db:
        held = db.execute("SELECT count(*) FROM agents WHERE worker = %s AND state IN ('llm', 'tools')", (worker,))
        return int(held.fetchall()[0][0])


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] == "T"
