"""One seed: simulated workers on one store, and a random order of everything that can happen."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random

from coterie.agent.context import render_row
from coterie.agent.history_cache import HistoryCache
from coterie.errors import Refused, StoreError
from coterie.ids import keyed_id
from coterie.messages import PERSON, Envelope, make_envelope
from coterie.turn import AskModel, CallEnded, Event, ModelAnswered, Rest, Rules, RunCall, Stopped
from coterie.turn_store import Claim, StaleClaim

from .fake_model import FakeModel
from .oracle import Oracle, Violation, complaints
from .world import AGENTS, RULES, SECRET, World

STEPS = 110
WORKERS = 4
DRAIN = 3_000
"""Steps after which an agent that is not idle counts as stuck."""


@dataclass(slots=True)
class Job:
    """A claim that a worker holds, and the event of its action once that is known."""

    claim: Claim
    outcome: tuple[Event, Envelope | None] | None = None


@dataclass(slots=True)
class Worker:
    name: str
    jobs: list[Job] = field(default_factory=list)
    memory: HistoryCache = field(default_factory=HistoryCache)
    """This worker's cache; other workers change the same histories."""
    paused: bool = False
    deferred: list[Callable[[World], None]] = field(default_factory=list)
    """Second transactions of a mutant. The real engine has none."""


@dataclass(slots=True)
class EagerWorker:
    """The `TurnWorker` that the store claims woken agents for."""

    worker: str
    start_turns: Callable[[Sequence[Claim]], None]
    rules: Rules = RULES

    def reserve_slot(self, agent_id: str, for_person: bool) -> bool:
        return True

    def release_slots(self, count: int) -> None: ...

    def wake(self) -> None: ...

    def reconcile_claims(self) -> None: ...

    def abandon_turns(self) -> None: ...


_UNEXPECTED = (TypeError, KeyError, ValueError)
Deferred = list[Callable[[World], None]]


class Simulation:
    """A run that the seed decides completely. `run` raises `Violation`, or returns counters."""

    def __init__(self, seed: int, log: Callable[[str], None] = lambda _: None, world: World | None = None) -> None:
        self.seed, self._log = seed, log
        self._rng = Random(seed)
        self.world = world or World()
        self.model = FakeModel(self._rng)
        self.oracle = Oracle(self.world)
        self.seen: Counter[str] = Counter()
        self.deferred: Deferred = []
        self._workers: list[Worker] = []
        self._started = self._sent = 0
        self._orphans: list[str] = []
        self._withdrawable: list[str] = []

    def run(self) -> Counter[str]:
        broken: tuple[type[Exception], ...] = (*self.world.errors, StoreError, AssertionError, *_UNEXPECTED)
        try:
            for action in (
                Simulation.start_worker,
                Simulation.start_worker,
                Simulation.start_worker,
                Simulation.speak,
                Simulation.speak,
            ):
                self._act(action)
            for _ in range(STEPS):
                self.seen["steps"] += 1
                self._act(self._rng.choices(_ACTIONS, _WEIGHTS)[0])
            self._drain()
            self.oracle.check_final_state(self.model.witness)
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
        self._choose_eager_worker()
        action(self)
        self.world.worker = None
        self.oracle.check_step()

    def _choose_eager_worker(self) -> None:
        """Mostly register a worker for woken agents. Without one, agents are claimed later."""
        active = [worker for worker in self._workers if not worker.paused]
        if active and self._rng.random() < 0.7:
            worker = self._rng.choice(active)
            self.world.worker = EagerWorker(worker.name, lambda claims: self._take_claims(worker, claims))

    def _take_claims(self, worker: Worker, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._log(f"{worker.name} gets {claim.agent_id} with its message")
            self.seen["claimed with the mail"] += 1
            self.world.compare(claim)
            self._hold_claim(worker, claim)
        self._keep_deferred(worker)

    # Workers

    def work(self) -> None:
        """One worker does one thing: claim, perform an action, or write its event."""
        active = [worker for worker in self._workers if not worker.paused]
        if not active:
            return self.start_worker()
        return self._step(self._rng.choice(active))

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
            self._log(f"{worker.name} claims {claim.agent_id} for {claim.action}")
            if claim.agent_id in self._orphans:
                self._orphans.remove(claim.agent_id)
                self.seen["takeovers"] += 1
            self._hold_claim(worker, claim)
        self._keep_deferred(worker)

    def _hold_claim(self, worker: Worker, claim: Claim) -> None:
        self.oracle.claimed(claim)
        worker.memory.apply_claim(claim)
        if not isinstance(claim.action, Rest):
            worker.jobs.append(Job(claim))

    def _perform(self, worker: Worker, job: Job) -> None:
        claim = self.effect_of(job.claim)
        if isinstance(claim.action, AskModel):
            if not self._shows_all(worker, claim):
                worker.jobs.remove(job)
                return
            if self._rng.random() < 0.1 and (complaint := complaints(self.world.history(claim.agent_id))):
                raise Violation(f"H11: {claim.agent_id} asks its model with {complaint}")
            job.outcome = self.model.answer(), None
        else:
            assert isinstance(claim.action, RunCall)
            job.outcome = self.model.run(claim, claim.action.index)
        self._log(f"{claim.agent_id}: {claim.action} -> {job.outcome[0]}")

    def _shows_all(self, worker: Worker, claim: Claim) -> bool:
        """Check that the model is shown the stored history. False: the claim is stale."""
        shown = worker.memory.get(claim.agent_id, claim.history_version)
        if shown is None:
            try:
                shown = worker.memory.put(claim.agent_id, self.world.view(claim.agent_id, claim))
            except StaleClaim:
                self.oracle.fenced(claim)
                self.seen["fenced reads"] += 1
                return False
        else:
            self.seen["shown from memory"] += 1
        if not self.oracle.is_stale(claim):
            stored = self.world.view(claim.agent_id)
            if (shown.summary, shown.items) != (stored.summary, [render_row(row) for row in stored.rows]):
                raise Violation(f"{claim.agent_id}: its model is shown an old history")
        return True

    def effect_of(self, claim: Claim) -> Claim:
        """Return the claim whose action is performed; a mutant replaces it."""
        return claim

    def _advance(self, worker: Worker, job: Job) -> None:
        assert job.outcome is not None
        event, sends = job.outcome
        try:
            after = self.world.advance(job.claim, event, sends)
        except StaleClaim:
            self._log(f"{worker.name} is turned away from {job.claim.agent_id}")
            self.oracle.fenced(job.claim)
            self.seen["fenced"] += 1
            worker.jobs.remove(job)
            return
        self._log(f"{worker.name} writes down {event} for {job.claim.agent_id}: {after.action}")
        self.oracle.advanced(job.claim, after, checked=isinstance(event, ModelAnswered | CallEnded))
        if sends is not None:
            self._acknowledge(sends)
        if self._rng.random() < 0.03:
            self.seen["ambiguous"] += 1
            self._orphans.append(job.claim.agent_id)  # the result of the commit got lost: the worker retries
            return
        worker.memory.apply_claim(after)
        worker.jobs.remove(job)
        if not isinstance(after.action, Rest):
            worker.jobs.append(Job(after))
        self._keep_deferred(worker)

    def _keep_deferred(self, worker: Worker) -> None:
        worker.deferred += self.deferred
        self.deferred.clear()

    def _acknowledge(self, envelope: Envelope) -> None:
        stored = keyed_id(SECRET, envelope.id) if envelope.is_keyed else envelope.id
        if envelope.to in AGENTS and self.world.rows("SELECT 1 FROM messages WHERE id = ?", stored):
            self.oracle.acknowledged[stored] = envelope.to

    def start_worker(self) -> None:
        if len(self._workers) < WORKERS:
            self._started += 1
            self._workers.append(Worker(f"worker {self._started}"))

    def crash(self) -> None:
        """A worker disappears at any point of its work."""
        busy = [worker for worker in self._workers if worker.jobs or worker.deferred]
        if busy:
            self._drop(self._rng.choice(busy))

    def _drop(self, worker: Worker) -> None:
        self._log(f"{worker.name} crashes with {[job.claim.agent_id for job in worker.jobs]}")
        self.seen["crashes"] += 1
        self._workers.remove(worker)
        self._orphans += [job.claim.agent_id for job in worker.jobs]
        self._orphans += [claim for claim in self._left_by(worker) if claim not in self._orphans]

    def _left_by(self, worker: Worker) -> Iterator[str]:
        """Mutants may leave a claimed agent without a worker."""
        if worker.deferred:
            yield from AGENTS

    def kill(self) -> None:
        """The whole process is killed and restarted."""
        for worker in [worker for worker in self._workers if not worker.paused]:
            if worker.jobs or worker.deferred:
                self._drop(worker)
            else:
                self._workers.remove(worker)
        self.world.restart()
        self.seen["restarts"] += 1

    def release(self) -> None:
        """A worker stops in order and releases its claims."""
        active = [worker for worker in self._workers if worker.jobs and not worker.paused and not worker.deferred]
        if active:
            worker = self._rng.choice(active)
            self._log(f"{worker.name} leaves {[job.claim.agent_id for job in worker.jobs]}")
            self.seen["left in order"] += 1
            self._workers.remove(worker)
            self.world.release(worker.name)
            self._orphans += [job.claim.agent_id for job in worker.jobs]

    def expire(self) -> None:
        """Leases of crashed and paused workers expire."""
        silent = [job.claim.agent_id for worker in self._workers if worker.paused for job in worker.jobs]
        for agent_id in dict.fromkeys((*self._orphans, *silent)):
            if self.world.expire(agent_id):
                self._log(f"the lease on {agent_id} runs out")

    def pause(self) -> None:
        active = [worker for worker in self._workers if worker.jobs and not worker.paused]
        if active:
            worker = self._rng.choice(active)
            worker.paused = True
            self._log(f"{worker.name} is paused with {[job.claim.agent_id for job in worker.jobs]}")
            self._orphans += [job.claim.agent_id for job in worker.jobs]
            if self._rng.random() < 0.5:
                self.expire()

    def continue_worker(self) -> None:
        paused = [worker for worker in self._workers if worker.paused]
        if paused:
            worker = self._rng.choice(paused)
            worker.paused = False
            self._log(f"{worker.name} goes on")
            self._step(worker)

    def stop(self) -> None:
        """The person stops a turn; the result of its action is not awaited."""
        jobs = [job for worker in self._workers if not worker.paused for job in worker.jobs]
        if jobs:
            job = self._rng.choice(jobs)
            said = "partly" if isinstance(job.claim.action, AskModel) and self._rng.random() < 0.5 else ""
            job.outcome = Stopped(said and f"{said} {self.seen['steps']}"), None
            self.seen["stops"] += 1

    # People, agents and time

    def speak(self) -> None:
        sender = self._rng.choice((PERSON, PERSON, *AGENTS))
        self._send(sender, self._rng.choice(AGENTS), self._rng.choice((None, None, None, 1, 500, 70_000)))

    def _send(self, sender: str, to: str, delay_ms: int | None = None) -> None:
        self._sent += 1
        text = f"{sender} says {self._sent}"
        envelope = make_envelope(
            sender=sender, to=to, payload={"text": text}, delay_ms=delay_ms, client_id=f"{self.seed}/{self._sent}"
        )
        for _ in range(self._rng.choice((1, 1, 1, 2))):  # the second: the acknowledgement got lost
            try:
                receipt = self.world.send(envelope)
            except Refused as refusal:
                self.seen[refusal.code] += 1
                return
            self._log(f"{text} to {to}: {receipt.state}")
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

    def decide_approval(self) -> None:
        """The person presses a button on an approval question."""
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
        envelope = make_envelope(
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
        self._log(f"the person tells {agent_id} to {('approve', 'deny')[option]}")
        self.oracle.acknowledged[envelope.id] = agent_id
        self.seen["approved" if option == 0 else "denied"] += 1

    def wait(self) -> None:
        self.world.tick(timedelta(milliseconds=self._rng.choice((1, 50, 800, 6_000, 80_000))))

    def promote(self) -> None:
        self.world.promote()

    def promote_early(self) -> None:
        self.seen["early rounds"] += 1
        self.world.promote(early=True)

    def terminate(self) -> None:
        """An agent is terminated in any state. At least two stay."""
        alive = [str(row[0]) for row in self.world.rows("SELECT id FROM agents WHERE state <> 'terminated'")]
        if len(alive) > 3:
            agent_id = self._rng.choice([name for name in alive if name != PERSON])
            self._log(f"{agent_id} is terminated")
            self.world.terminate(agent_id)
            self.oracle.terminated(agent_id)
            self.seen["terminations"] += 1

    def pause_agent(self) -> None:
        """Pause an agent; its turn ends first."""
        self._change_agent(self.world.pause, "paused")

    def resume_agent(self) -> None:
        self._change_agent(self.world.resume, "resumed")

    def _change_agent(self, change: Callable[[str], None], what: str) -> None:
        agent_id = self._rng.choice(AGENTS)
        try:
            change(agent_id)
        except Refused:
            return
        self._log(f"{agent_id} is {what}")
        self.seen[what] += 1

    # The end

    def _drain(self) -> None:
        """Run without faults until all agents are idle."""
        self.model.calm = True
        for agent_id in AGENTS:
            with contextlib.suppress(Refused):
                self.world.resume(agent_id)
        for worker in self._workers:
            worker.paused = False
        while len(self._workers) < WORKERS:
            self.start_worker()
        for _ in range(DRAIN):
            self.expire()
            for worker in self._workers:
                self._act(lambda _, worker=worker: self._step(worker))  # type: ignore[misc]
            if not self._has_work():
                self._act(Simulation.decide_approval)
                self.world.tick(timedelta(minutes=2))
                self._act(Simulation.promote)
                if not self._has_work() and not self._unfinished():
                    return
        raise Violation(f"stuck: {self._unfinished()}")

    def _has_work(self) -> bool:
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
        """Count what happened, from the database."""
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
    Simulation.start_worker: 8,
    Simulation.speak: 12,
    Simulation.crash: 12,
    Simulation.kill: 0.7,
    Simulation.expire: 6,
    Simulation.pause: 6,
    Simulation.continue_worker: 4,
    Simulation.stop: 1,
    Simulation.withdraw: 1.5,
    Simulation.decide_approval: 3,
    Simulation.wait: 4,
    Simulation.promote: 2,
    Simulation.promote_early: 0.2,
    Simulation.terminate: 0.15,
    Simulation.release: 1,
    Simulation.pause_agent: 0.6,
    Simulation.resume_agent: 1,
}
_ACTIONS, _WEIGHTS = list(_CHANCES), list(_CHANCES.values())
