"""One seed: virtual workers over one store, and a scheduler that lets anything happen at any moment."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random

from coterie.agent.context import said
from coterie.agent.history_cache import Memory
from coterie.errors import Refused, StoreError
from coterie.ids import keyed_id
from coterie.messages import PERSON, Envelope, seal
from coterie.turn import Answered, Ask, Event, Ran, Rest, Rules, Run, Stopped
from coterie.turn_store import Claim, StaleOwner

from .mind import Mind
from .oracle import Oracle, Violation, complaints
from .world import AGENTS, RULES, SECRET, World

STEPS = 110
WORKERS = 4
DRAIN = 3_000
"""Steps after which somebody who still has something to do is stuck."""


@dataclass(slots=True)
class Job:
    """A claim in a worker's hands, and what came of its effect once that is known."""

    claim: Claim
    outcome: tuple[Event, Envelope | None] | None = None


@dataclass(slots=True)
class Worker:
    name: str
    jobs: list[Job] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    """The conversations that this worker has kept, of agents that others work on as well."""
    paused: bool = False
    deferred: list[Callable[[World], None]] = field(default_factory=list)
    """What a mutant left for a second transaction. The real engine leaves nothing."""


@dataclass(slots=True)
class Attendant:
    """A worker that waits for agents, as the store sees it."""

    worker: str
    take: Callable[[Sequence[Claim]], None]
    rules: Rules = RULES

    def reserve(self, agent_id: str, person: bool) -> bool:
        return True

    def give_back(self, places: int) -> None: ...

    def look(self) -> None: ...

    def check_claims(self) -> None: ...

    def drop(self) -> None: ...


_UNPLANNED = (TypeError, KeyError, ValueError)
Deferred = list[Callable[[World], None]]


class Simulation:
    """Everything that a seed decides. `run` raises `Violation`, or returns what was seen."""

    def __init__(self, seed: int, tell: Callable[[str], None] = lambda _: None, world: World | None = None) -> None:
        self.seed, self._tell = seed, tell
        self._rng = Random(seed)
        self.world = world or World()
        self.mind = Mind(self._rng)
        self.oracle = Oracle(self.world)
        self.seen: Counter[str] = Counter()
        self.deferred: Deferred = []
        self._workers: list[Worker] = []
        self._hired = self._sent = 0
        self._orphans: list[str] = []
        self._withdrawable: list[str] = []

    def run(self) -> Counter[str]:
        broken: tuple[type[Exception], ...] = (*self.world.errors, StoreError, AssertionError, *_UNPLANNED)
        try:
            for beginning in (Simulation.hire, Simulation.hire, Simulation.hire, Simulation.speak, Simulation.speak):
                self._act(beginning)
            for _ in range(STEPS):
                self.seen["steps"] += 1
                self._act(self._rng.choices(_ACTIONS, _WEIGHTS)[0])
            self._drain()
            self.oracle.judge(self.mind.witness)
            self._count()
        except Violation as violation:
            raise Violation(f"{violation}\n{self._replay}") from violation
        except broken as error:
            raise Violation(f"{type(error).__name__}: {error}\n{self._replay}") from error
        finally:
            self.world.close()
        return self.seen

    @property
    def _replay(self) -> str:
        return f"replay: python -m tests.sim {self.world.replayed_with}{self.seed}"

    def _act(self, action: Callable[[Simulation], None]) -> None:
        self._attend()
        action(self)
        self.world.taker = None
        self.oracle.look()

    def _attend(self) -> None:
        """Mostly there is a worker that takes whoever gets mail; where there is none, they are found later."""
        able = [worker for worker in self._workers if not worker.paused]
        if able and self._rng.random() < 0.7:
            worker = self._rng.choice(able)
            self.world.taker = Attendant(worker.name, lambda claims: self._take(worker, claims))

    def _take(self, worker: Worker, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._tell(f"{worker.name} gets {claim.agent_id} with its mail")
            self.seen["claimed with the mail"] += 1
            self.world.compare(claim)
            self._hold(worker, claim)
        self._leave(worker)

    # Workers

    def work(self) -> None:
        """One worker does one thing: claim, perform, or write down."""
        able = [worker for worker in self._workers if not worker.paused]
        if not able:
            return self.hire()
        return self._step(self._rng.choice(able))

    def _step(self, worker: Worker) -> None:
        if worker.deferred:
            worker.deferred.pop(0)(self.world)
        elif not worker.jobs:
            self._claim(worker)
        else:
            job = self._rng.choice(worker.jobs)
            if job.outcome is None:
                self._perform(worker, job)
            else:
                self._advance(worker, job)

    def _claim(self, worker: Worker) -> None:
        claims = self.world.claim(worker.name, self._rng.choice((1, 1, 2)))
        for claim in claims:
            self._tell(f"{worker.name} claims {claim.agent_id} for {claim.effect}")
            if claim.agent_id in self._orphans:
                self._orphans.remove(claim.agent_id)
                self.seen["takeovers"] += 1
            self._hold(worker, claim)
        self._leave(worker)

    def _hold(self, worker: Worker, claim: Claim) -> None:
        self.oracle.claimed(claim)
        worker.memory.add(claim)
        if not isinstance(claim.effect, Rest):
            worker.jobs.append(Job(claim))

    def _perform(self, worker: Worker, job: Job) -> None:
        claim = self.effect_of(job.claim)
        if isinstance(claim.effect, Ask):
            if not self._shows_all(worker, claim):
                worker.jobs.remove(job)
                return
            if self._rng.random() < 0.1 and (complaint := complaints(self.world.history(claim.agent_id))):
                raise Violation(f"H11: {claim.agent_id} asks its model with {complaint}")
            job.outcome = self.mind.answer(), None
        else:
            assert isinstance(claim.effect, Run)
            job.outcome = self.mind.run(claim, claim.effect.index)
        self._tell(f"{claim.agent_id}: {claim.effect} -> {job.outcome[0]}")

    def _shows_all(self, worker: Worker, claim: Claim) -> bool:
        """What the model is shown is what is stored. False: the worker has lost its claim and is told so."""
        shown = worker.memory.recall(claim.agent_id, claim.history_version)
        if shown is None:
            try:
                shown = worker.memory.keep(claim.agent_id, self.world.view(claim.agent_id, claim))
            except StaleOwner:
                self.oracle.fenced(claim)
                self.seen["fenced reads"] += 1
                return False
        else:
            self.seen["shown from memory"] += 1
        if not self.oracle.is_stale(claim):
            stored = self.world.view(claim.agent_id)
            if (shown.summary, shown.said) != (stored.summary, [said(row) for row in stored.rows]):
                raise Violation(f"{claim.agent_id}: its model is shown an old history")
        return True

    def effect_of(self, claim: Claim) -> Claim:
        """What the claim says is to be done; nobody looks anywhere else."""
        return claim

    def _advance(self, worker: Worker, job: Job) -> None:
        assert job.outcome is not None
        event, sends = job.outcome
        try:
            after = self.world.advance(job.claim, event, sends)
        except StaleOwner:
            self._tell(f"{worker.name} is turned away from {job.claim.agent_id}")
            self.oracle.fenced(job.claim)
            self.seen["fenced"] += 1
            worker.jobs.remove(job)
            return
        self._tell(f"{worker.name} writes down {event} for {job.claim.agent_id}: {after.effect}")
        self.oracle.advanced(job.claim, after, checked=isinstance(event, Answered | Ran))
        if sends is not None:
            self._acknowledge(sends)
        if self._rng.random() < 0.03:
            self.seen["ambiguous"] += 1
            self._orphans.append(job.claim.agent_id)  # the answer got lost: it will try the same again
            return
        worker.memory.add(after)
        worker.jobs.remove(job)
        if not isinstance(after.effect, Rest):
            worker.jobs.append(Job(after))
        self._leave(worker)

    def _leave(self, worker: Worker) -> None:
        worker.deferred += self.deferred
        self.deferred.clear()

    def _acknowledge(self, envelope: Envelope) -> None:
        stored = keyed_id(SECRET, envelope.id) if envelope.keyed else envelope.id
        if envelope.to in AGENTS and self.world.rows("SELECT 1 FROM messages WHERE id = ?", stored):
            self.oracle.acknowledged[stored] = envelope.to

    def hire(self) -> None:
        if len(self._workers) < WORKERS:
            self._hired += 1
            self._workers.append(Worker(f"worker {self._hired}"))

    def crash(self) -> None:
        """A worker is gone without a word, wherever it was."""
        busy = [worker for worker in self._workers if worker.jobs or worker.deferred]
        if busy:
            self._drop(self._rng.choice(busy))

    def _drop(self, worker: Worker) -> None:
        self._tell(f"{worker.name} crashes with {[job.claim.agent_id for job in worker.jobs]}")
        self.seen["crashes"] += 1
        self._workers.remove(worker)
        self._orphans += [job.claim.agent_id for job in worker.jobs]
        self._orphans += [claim for claim in self._left_by(worker) if claim not in self._orphans]

    def _left_by(self, worker: Worker) -> Iterator[str]:
        """Mutants may leave an agent at work that nobody holds."""
        if worker.deferred:
            yield from AGENTS

    def kill(self) -> None:
        """The whole process is gone, and comes back."""
        for worker in [worker for worker in self._workers if not worker.paused]:
            if worker.jobs or worker.deferred:
                self._drop(worker)
            else:
                self._workers.remove(worker)
        self.world.restart()
        self.seen["restarts"] += 1

    def leave(self) -> None:
        """A worker stops in order: it leaves its turns as they are, for whoever comes next."""
        able = [worker for worker in self._workers if worker.jobs and not worker.paused and not worker.deferred]
        if able:
            worker = self._rng.choice(able)
            self._tell(f"{worker.name} leaves {[job.claim.agent_id for job in worker.jobs]}")
            self.seen["left in order"] += 1
            self._workers.remove(worker)
            self.world.release(worker.name)
            # What was claimed in the name of others is left to them.
            self._orphans += [job.claim.agent_id for job in worker.jobs]

    def expire(self) -> None:
        """The lease of an agent whose worker is gone, or does not move, runs out."""
        silent = [job.claim.agent_id for worker in self._workers if worker.paused for job in worker.jobs]
        for agent_id in dict.fromkeys((*self._orphans, *silent)):
            if self.world.expire(agent_id):
                self._tell(f"the lease on {agent_id} runs out")

    def pause(self) -> None:
        able = [worker for worker in self._workers if worker.jobs and not worker.paused]
        if able:
            worker = self._rng.choice(able)
            worker.paused = True
            self._tell(f"{worker.name} is paused with {[job.claim.agent_id for job in worker.jobs]}")
            self._orphans += [job.claim.agent_id for job in worker.jobs]
            if self._rng.random() < 0.5:
                self.expire()

    def go_on(self) -> None:
        paused = [worker for worker in self._workers if worker.paused]
        if paused:
            worker = self._rng.choice(paused)
            worker.paused = False
            self._tell(f"{worker.name} goes on")
            self._step(worker)

    def stop(self) -> None:
        """Somebody ends a turn: whatever its effect would have brought is not waited for."""
        jobs = [job for worker in self._workers if not worker.paused for job in worker.jobs]
        if jobs:
            job = self._rng.choice(jobs)
            said = "partly" if isinstance(job.claim.effect, Ask) and self._rng.random() < 0.5 else ""
            job.outcome = Stopped(said and f"{said} {self.seen['steps']}"), None
            self.seen["stops"] += 1

    # People, agents and time

    def speak(self) -> None:
        sender = self._rng.choice((PERSON, PERSON, *AGENTS))
        self._send(sender, self._rng.choice(AGENTS), self._rng.choice((None, None, None, 1, 500, 70_000)))

    def _send(self, sender: str, to: str, delay_ms: int | None = None) -> None:
        self._sent += 1
        text = f"{sender} says {self._sent}"
        envelope = seal(
            sender=sender, to=to, payload={"text": text}, delay_ms=delay_ms, client_id=f"{self.seed}/{self._sent}"
        )
        for _ in range(self._rng.choice((1, 1, 1, 2))):  # the second: the acknowledgement got lost
            try:
                receipt = self.world.send(envelope)
            except Refused as refusal:
                self.seen[refusal.code] += 1
                return
            self._tell(f"{text} to {to}: {receipt.state}")
            self.oracle.acknowledged[receipt.message_id] = to
        self._withdrawable.append(keyed_id(SECRET, envelope.id))

    def withdraw(self) -> None:
        if self._withdrawable:
            message_id = self._withdrawable.pop(self._rng.randrange(len(self._withdrawable)))
            try:
                self.world.withdraw(message_id)
            except Refused:
                return
            self.oracle.withdrawn.add(message_id)
            self.seen["withdrawn messages"] += 1

    def judge(self) -> None:
        """The person answers a question about a call, mostly with one of the buttons."""
        questions = self.world.rows(
            "SELECT q.id, q.sender FROM messages q JOIN agents a ON a.id = q.sender"
            " WHERE q.recipient = ? AND a.state = 'wait_approval' AND q.payload LIKE '%\"approval\"%'"
            " AND NOT EXISTS (SELECT 1 FROM messages r WHERE r.in_reply_to = q.id) ORDER BY q.seq",
            PERSON,
        )
        if not questions:
            return
        question, agent_id = map(str, questions[-1])
        option = self._rng.choice((0, 0, 1))
        envelope = seal(
            sender=PERSON,
            to=agent_id,
            payload={"text": ("Approve", "Deny")[option]},
            in_reply_to=question,
            option=option,
        )
        try:
            self.world.send(envelope)
        except Refused:
            return
        self._tell(f"the person tells {agent_id} to {('approve', 'deny')[option]}")
        self.oracle.acknowledged[envelope.id] = agent_id
        self.seen["approved" if option == 0 else "denied"] += 1

    def wait(self) -> None:
        self.world.tick(timedelta(milliseconds=self._rng.choice((1, 50, 800, 6_000, 80_000))))

    def promote(self) -> None:
        self.world.promote()

    def promote_early(self) -> None:
        self.seen["early rounds"] += 1
        self.world.promote(early=True)

    def dismiss(self) -> None:
        """An agent is terminated, in the middle of anything. Somebody stays."""
        alive = [str(row[0]) for row in self.world.rows("SELECT id FROM agents WHERE state <> 'terminated'")]
        if len(alive) > 3:
            agent_id = self._rng.choice([name for name in alive if name != PERSON])
            self._tell(f"{agent_id} is terminated")
            self.world.terminate(agent_id)
            self.oracle.dismissed(agent_id)
            self.seen["terminations"] += 1

    def hold(self) -> None:
        """An agent is to rest when its turn is over."""
        self._aside(self.world.pause, "paused")

    def wake(self) -> None:
        self._aside(self.world.resume, "resumed")

    def _aside(self, change: Callable[[str], None], what: str) -> None:
        agent_id = self._rng.choice(AGENTS)
        try:
            change(agent_id)
        except Refused:
            return
        self._tell(f"{agent_id} is {what}")
        self.seen[what] += 1

    # The end

    def _drain(self) -> None:
        """No more faults: everybody finishes what there is, and then there must be nothing left."""
        self.mind.calm = True
        for agent_id in AGENTS:
            with contextlib.suppress(Refused):
                self.world.resume(agent_id)
        for worker in self._workers:
            worker.paused = False
        while len(self._workers) < WORKERS:
            self.hire()
        for _ in range(DRAIN):
            self.expire()
            for worker in self._workers:
                self._act(lambda _, worker=worker: self._step(worker))  # type: ignore[misc]
            if not self._busy():
                self._act(Simulation.judge)
                self.world.tick(timedelta(minutes=2))
                self._act(Simulation.promote)
                if not self._busy() and not self._unfinished():
                    return
        raise Violation(f"stuck: {self._unfinished()}")

    def _busy(self) -> bool:
        return any(worker.jobs or worker.deferred for worker in self._workers) or bool(
            self.world.rows("SELECT 1 FROM agents WHERE runnable_at <= ?", self.world.now)
        )

    def _unfinished(self) -> list[tuple[object, ...]]:
        unfinished = self.world.rows(
            "SELECT id, state, waiting, delayed, runnable_at FROM agents WHERE kind = 'agent'"
            " AND (state NOT IN ('idle', 'terminated') OR waiting > 0 OR delayed > 0)"
        )
        for agent_id, state, *_ in unfinished:
            if state == "blocked":
                self._send(PERSON, str(agent_id))
        return list(unfinished)

    def _count(self) -> None:
        """What there was to see, from the records."""
        for name, sql in _RECORDS.items():
            self.seen[name] += int(str(self.world.rows(sql)[0][0]))


_CANCELLED = "SELECT count(*) FROM calls c JOIN plans p USING (agent_id, turn_no, step_no) WHERE c.state = 'cancelled'"
_INTERRUPTED = _CANCELLED.replace("count(*)", "count(DISTINCT agent_id || '/' || turn_no || '/' || step_no)")
_RECORDS = {
    "retracted, k = 0": "SELECT count(*) FROM plans WHERE outcome = 'withdrawn'",
    "retracted, k >= 1": f"{_INTERRUPTED} AND p.outcome = 'closed' AND c.result LIKE '%interrupted%' AND EXISTS"
    " (SELECT 1 FROM calls d WHERE (d.agent_id, d.turn_no, d.step_no) = (c.agent_id, c.turn_no, c.step_no)"
    " AND d.state IN ('done', 'failed', 'unknown'))",
    "cancelled": f"{_CANCELLED} AND p.outcome = 'closed'",
    "unknown": "SELECT count(*) FROM calls WHERE state = 'unknown'",
    "early": "SELECT count(*) FROM messages WHERE early = 1",
    "answers": "SELECT count(*) FROM messages WHERE automatic = 1",
    "dead": "SELECT count(*) FROM messages WHERE state = 'dead'",
    "poisoned": "SELECT count(*) FROM history WHERE content LIKE '[turn aborted%'",
    "questions": "SELECT count(*) FROM messages WHERE payload LIKE '%\"approval\"%'",
    "turns": "SELECT sum(turn_no) FROM agents",
    "messages": "SELECT count(*) FROM messages",
}

_CHANCES: dict[Callable[[Simulation], None], float] = {
    Simulation.work: 60,
    Simulation.hire: 8,
    Simulation.speak: 12,
    Simulation.crash: 12,
    Simulation.kill: 0.7,
    Simulation.expire: 6,
    Simulation.pause: 6,
    Simulation.go_on: 4,
    Simulation.stop: 1,
    Simulation.withdraw: 1.5,
    Simulation.judge: 3,
    Simulation.wait: 4,
    Simulation.promote: 2,
    Simulation.promote_early: 0.2,
    Simulation.dismiss: 0.15,
    Simulation.leave: 1,
    Simulation.hold: 0.6,
    Simulation.wake: 1,
}
_ACTIONS, _WEIGHTS = list(_CHANCES), list(_CHANCES.values())
