"""One seed: simulated workers on one store, and a random order of everything that can happen."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random

from msgspec.structs import replace

from coterie.agent.context import HistoryCache, render_row
from coterie.errors import Refused, StoreError
from coterie.ids import keyed_id
from coterie.messages import PERSON, Envelope, make_envelope
from coterie.stores.sql.inbox import MESSAGE_COST
from coterie.tasks import CONTINUE, STOP, Budget, StoppedTask
from coterie.turn import (
    AskModel,
    CallEnded,
    Event,
    Interrupted,
    ModelAnswered,
    Rest,
    Rules,
    RunCall,
    Stopped,
    may_cut,
)
from coterie.turn_store import Claim, Interruption, StaleClaim

from .fake_model import FakeModel
from .oracle import Oracle, Violation, first_error
from .world import AGENTS, RULES, SECRET, World

STEPS = 110
EVERY = ("1m", "2m", "* * * * * UTC")
BUDGETS = (Budget(), Budget(turns=1), Budget(turns=2, tokens=60), Budget(turns=0, cost=3e-5, minutes=0.001))
"""Of tasks, by seed. All but the first are reached in most runs."""
WORKERS = 4
CHECKED_SEEDS = 5
"""One seed of so many checks all invariants of tasks after every step, not only at the end: it takes twice as long."""
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
    running_turns: int = 0
    max_turns: int = 1_000

    def reserve_slot(self, agent_id: str, for_person: bool) -> bool:
        return True

    def release_slots(self, agent_ids: object) -> None: ...

    def interrupt(self, interruption: Interruption) -> None: ...

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
        self.world.rules = replace(RULES, budget=BUDGETS[seed % len(BUDGETS)])
        if seed % 3 == 0:  # mail is taken one or two messages at a time
            self.world.rules = replace(self.world.rules, mail_budget=lambda _: 2 * MESSAGE_COST + 60)
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
        if self.seed % CHECKED_SEEDS == 0 and (found := self.world.violations("T")):
            raise Violation("; ".join(found[:3]))

    def _choose_eager_worker(self) -> None:
        """Mostly register a worker for woken agents. Without one, agents are claimed later."""
        active = [worker for worker in self._workers if not worker.paused]
        if active and self._rng.random() < 0.7:
            worker = self._rng.choice(active)
            self.world.worker = EagerWorker(
                worker.name, lambda claims: self._take_claims(worker, claims), self.world.rules
            )

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
            if self._rng.random() < 0.1 and (error := first_error(self.world.history(claim.agent_id))):
                raise Violation(f"H11: {claim.agent_id} asks its model with {error}")
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
            if isinstance(event, ModelAnswered) and event.usage.input_tokens and self._rng.random() < 0.5:
                self.world.add_usage(job.claim, event.usage)  # a request that was made is paid for
            return
        self._log(f"{worker.name} writes down {event} for {job.claim.agent_id}: {after.action}")
        self.oracle.advanced(job.claim, after, checked=isinstance(event, ModelAnswered | CallEnded))
        if isinstance(event, Interrupted):
            self.oracle.was_cut(after, event)
            self.seen["cut answers"] += 1
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

    def cut(self) -> None:
        """The person speaks while a model answers, and the worker cuts the answer."""
        jobs = [job for worker in self._workers if not worker.paused for job in worker.jobs if _is_answering(job)]
        if not jobs:
            return
        job = self._rng.choice(jobs)
        self._send(PERSON, job.claim.agent_id)
        newer = "SELECT 1 FROM messages WHERE recipient = ? AND sender = ? AND in_seq > ?"
        if self.world.rows(newer, job.claim.agent_id, PERSON, job.claim.newest_position):
            job.outcome = self.model.cut(), None

    # People, agents and time

    def speak(self) -> None:
        sender = self._rng.choice((PERSON, PERSON, *AGENTS))
        self._send(sender, self._rng.choice(AGENTS), self._rng.choice((None, None, None, 1, 500, 70_000)))

    def remind(self) -> None:
        """An agent sends a delayed message that an answer to an earlier message of it withdraws."""
        sender = self._rng.choice(AGENTS)
        if self._rng.random() < 0.5:
            self._sent += 1
            envelope = make_envelope(
                sender=sender, to=PERSON, payload={"text": f"well {self._sent}?"}, quick_replies=["Yes"]
            )
            self.world.send(envelope)
        asked = self.world.rows(
            "SELECT id FROM messages WHERE sender = ? AND (recipient <> ? OR question = 1) ORDER BY seq DESC LIMIT 3",
            sender,
            PERSON,
        )
        if asked:
            question = str(self._rng.choice(asked)[0])
            delay = self._rng.choice((300, 5_000, 70_000, 70_000))
            self._send(sender, self._rng.choice((*AGENTS, PERSON)), delay, unless_answered=question)

    def _send(
        self,
        sender: str,
        to: str,
        delay_ms: int | None = None,
        every: str | None = None,
        unless_answered: str | None = None,
    ) -> None:
        self._sent += 1
        text = f"{sender} says {self._sent}"
        envelope = make_envelope(
            sender=sender,
            to=to,
            payload={"text": text},
            delay_ms=delay_ms,
            every=every,
            unless_answered=unless_answered,
            client_id=f"{self.seed}/{self._sent}",
        )
        expected = self.oracle.expected_task(envelope)
        for _ in range(self._rng.choice((1, 1, 1, 2))):  # the second: the acknowledgement got lost
            try:
                receipt = self.world.send(envelope)
            except Refused as refusal:
                self.seen[refusal.code] += 1
                return
            self._log(f"{text} to {to}: {receipt.state}")
            self.oracle.check_receipt(receipt, expected)
            if receipt.state == "withdrawn":
                self.oracle.moot.add(receipt.message_id)
                self.seen["moot reminders"] += 1
            if not every and to in AGENTS:  # a pause or the end of the schedule withdraws it
                self.oracle.acknowledged[receipt.message_id] = to
        self._withdrawable.append(keyed_id(SECRET, envelope.id))

    def recur(self) -> None:
        """Send a recurring message, or change, pause, resume or end one."""
        rows = self.world.rows("SELECT id FROM schedules WHERE state <> 'ended' ORDER BY id")
        if not rows or self._rng.random() < 0.5:
            self._send(
                self._rng.choice((PERSON, *AGENTS)), self._rng.choice((*AGENTS, PERSON)), every=self._rng.choice(EVERY)
            )
            return
        schedule_id = str(self._rng.choice(rows)[0])
        every, paused = self._rng.choice((None, *EVERY)), self._rng.choice((None, True, False))
        with contextlib.suppress(Refused):  # its recipient was terminated
            if self._rng.random() < 0.2:
                self.world.end_schedule(schedule_id)
            else:
                self.world.change_schedule(schedule_id, every=every, paused=paused)

    def withdraw(self) -> None:
        if self._withdrawable:
            newest = self._rng.randrange(1, min(8, len(self._withdrawable)) + 1)
            message_id = self._withdrawable.pop(-newest)
            try:
                self.world.withdraw(message_id)
            except Refused:
                return
            self.oracle.withdrawn.add(message_id)
            self.seen["withdrawn messages"] += 1

    def reschedule(self) -> None:
        """The person moves a delayed message, also beyond the minute that decides about its task."""
        rows = self.world.rows(
            "SELECT id FROM messages WHERE state = 'delayed' AND schedule_id IS NULL ORDER BY seq DESC LIMIT 5"
        )
        if rows:
            message_id = str(self._rng.choice(rows)[0])
            self.world.reschedule(message_id, timedelta(milliseconds=self._rng.choice((200, 2_000, 90_000))))
            self.oracle.rescheduled.add(message_id)
            self.seen["moved"] += 1

    # Tasks

    def send_late(self) -> None:
        """A tool sends for a turn that may have ended long ago."""
        rows = self.world.rows(
            "SELECT id, recipient, coalesce(task, id) FROM messages WHERE state = 'taken' AND recipient <> ?"
            " ORDER BY seq DESC LIMIT 8",
            PERSON,
        )
        if not rows:
            return
        cause, sender, task = map(str, self._rng.choice(rows))
        to, delay = self._rng.choice((*AGENTS, PERSON)), self._rng.choice((None, 1_000, 80_000))
        self._sent += 1
        envelope = make_envelope(
            sender=sender, to=to, payload={"text": f"late {self._sent}"}, cause=cause, delay_ms=delay
        )
        try:
            self.world.send(envelope)
        except Refused as refusal:
            self.seen[refusal.code] += 1
            if refusal.code == "task_stopped" and not self.oracle.is_stopped(task):
                raise Violation(f"{sender} may not send for {task}, which goes on") from refusal
        else:
            if self.oracle.is_stopped(task):
                raise Violation(f"{sender} has sent for {task}, which was stopped")

    def stop_task(self) -> None:
        tasks = self.world.rows("SELECT id FROM tasks WHERE state <> 'done' ORDER BY seq DESC LIMIT 6")
        if not tasks:
            return
        task = str(self._rng.choice(tasks)[0])
        stopped = self.world.stop_task(task)
        self._log(f"the task {task} is stopped: {stopped}")
        self.seen["stopped tasks"] += 1
        self.seen["turns of stopped tasks"] += stopped.turns
        self.seen["messages of stopped tasks"] += stopped.messages
        self.oracle.task_stopped(task)
        if self.world.stop_task(task) != StoppedTask():
            raise Violation(f"{task} was stopped twice")

    def decide_budget(self) -> None:
        """The person answers a budget question with a button, or grants a budget."""
        tasks = self.world.rows(
            "SELECT id, budget_question FROM tasks WHERE budget_question IS NOT NULL ORDER BY seq DESC LIMIT 3"
        )
        if not tasks:
            return
        task, question = map(str, self._rng.choice(tasks))
        if self._rng.random() < 0.2:
            self.world.continue_task(task)
            self.seen["continued"] += 1
            return
        self._press(task, question, self._rng.choice((CONTINUE, CONTINUE, STOP)))

    def _press(self, task: str, question: str, option: int) -> None:
        agent_id = str(self.world.rows("SELECT sender FROM messages WHERE id = ?", question)[0][0])
        text = ("Continue", "Stop")[option]
        envelope = make_envelope(
            sender=PERSON, to=agent_id, payload={"text": text}, in_reply_to=question, option=option
        )
        try:
            receipt = self.world.send(envelope)
        except Refused as refusal:
            if refusal.code != "recipient_terminated":
                raise
            self.world.continue_task(task) if option == CONTINUE else self.world.stop_task(task)
        else:
            self.oracle.check_receipt(receipt, task)
            if option == CONTINUE:
                self.oracle.acknowledged[receipt.message_id] = agent_id
                self._withdrawable.append(receipt.message_id)
        self._log(f"the person answers {question} with {text}")
        if option == STOP:
            self.oracle.task_stopped(task)
        self.seen["continued" if option == CONTINUE else "stopped at the limit"] += 1

    def _open_approvals(self) -> list[tuple[str, str]]:
        """Approval questions without an answer, and the agents that asked them."""
        rows = self.world.rows(
            "SELECT q.id, q.sender FROM messages q JOIN agents a ON a.id = q.sender"
            " WHERE q.recipient = ? AND a.state IN ('wait_approval', 'llm') AND q.payload LIKE '%\"approval\"%'"
            " AND NOT EXISTS (SELECT 1 FROM messages r WHERE r.in_reply_to = q.id AND coalesce(r.option, 0) >= 0)"
            " ORDER BY q.seq",
            PERSON,
        )
        return [(str(question), str(agent_id)) for question, agent_id in rows]

    def ask_back(self) -> None:
        """The person asks about a call that waits for approval, and decides nothing."""
        if not (questions := self._open_approvals()):
            return
        question, agent_id = questions[-1]
        envelope = make_envelope(
            sender=PERSON, to=agent_id, payload={"text": "why?"}, in_reply_to=question, asks_back=True
        )
        try:
            self.world.send(envelope)
        except Refused:
            return
        self._log(f"the person asks {agent_id} back")
        self.oracle.acknowledged[envelope.id] = agent_id
        self.seen["asked back"] += 1

    def decide_approval(self) -> None:
        """The person presses a button on an approval question."""
        if not (questions := self._open_approvals()):
            return
        question, agent_id = questions[-1]
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
        for (schedule_id,) in self.world.rows("SELECT id FROM schedules WHERE state <> 'ended'"):
            self.world.end_schedule(str(schedule_id))
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
                for task, question in self.world.rows("SELECT id, budget_question FROM tasks WHERE state = 'waiting'"):
                    if question:
                        self._press(str(task), str(question), CONTINUE)
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


def _is_answering(job: Job) -> bool:
    """True if the model is asked, has not answered yet, and may be cut."""
    is_asked = isinstance(job.claim.action, AskModel) and job.outcome is None
    return is_asked and may_cut(RULES, None, job.claim.cuts)


_CANCELLED = "SELECT count(*) FROM calls c JOIN plans p USING (agent_id, turn_no, step_no) WHERE c.state = 'cancelled'"
_INTERRUPTED = _CANCELLED.replace("count(*)", "count(DISTINCT agent_id || '/' || turn_no || '/' || step_no)")
_RECORDS = {
    "retracted, k = 0": "SELECT count(*) FROM plans p WHERE outcome = 'withdrawn' AND EXISTS (SELECT 1 FROM calls c"
    " WHERE (c.agent_id, c.turn_no, c.step_no) = (p.agent_id, p.turn_no, p.step_no))",
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
    "recurring messages": "SELECT count(*) FROM messages WHERE schedule_id IS NOT NULL AND delivered_at IS NOT NULL",
    "budget questions": "SELECT coalesce(sum(budget_asks), 0) FROM tasks",
    "reminders that fired": "SELECT count(*) FROM messages WHERE unless_answered IS NOT NULL AND delivered_at > 0",
    "reminders withdrawn": "SELECT count(*) FROM messages WHERE withdrawn_by IS NOT NULL",
    "tasks of tasks": "SELECT count(*) FROM tasks WHERE parent IS NOT NULL",
    "joined tasks": "SELECT count(*) FROM messages WHERE task IS NOT NULL AND sender = 'user' AND in_reply_to IS NULL",
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
    Simulation.cut: 4,
    Simulation.withdraw: 1.5,
    Simulation.decide_approval: 3,
    Simulation.ask_back: 2,
    Simulation.wait: 4,
    Simulation.promote: 2,
    Simulation.promote_early: 0.2,
    Simulation.terminate: 0.15,
    Simulation.release: 1,
    Simulation.pause_agent: 0.6,
    Simulation.resume_agent: 1,
    Simulation.recur: 0.7,
    Simulation.remind: 2,
    Simulation.reschedule: 0.7,
    Simulation.send_late: 1,
    Simulation.stop_task: 0.7,
    Simulation.decide_budget: 3,
}
_ACTIONS, _WEIGHTS = list(_CHANCES), list(_CHANCES.values())
