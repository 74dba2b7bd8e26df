"""Claims: which agents may run, and the steps of their turns. Each function is the body of one transaction.

`EagerClaimer` claims an idle agent in the transaction of the message that wakes it. So the message and the start of
its turn cost one disk flush instead of two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from coterie.errors import CoterieError
from coterie.failpoints import FailpointHit, hit
from coterie.llm.service import Completion, TokenUsage
from coterie.messages import Envelope
from coterie.stores.sql.quarantine import UnclaimableAgent
from coterie.stores.sql.queries import count_tokens_of_day
from coterie.stores.sql.rows import Connection, json_keys
from coterie.stores.sql.turn_rows import release_reserved_tokens
from coterie.stores.sql.turn_transaction import MAX_CRASHES, TurnTransaction
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.text import to_storable
from coterie.turn import Event, Rules
from coterie.turn_store import Admission, AdmitFunction, Claim, ClaimKey, Interruption, TurnWorker

log = logging.getLogger(__name__)

# A crash interrupts every running turn, but at most one of them caused it. Turns that two crashes found at the same
# step are suspects: they run one at a time, and progress clears them. So a poison turn quarantines no other turn.
_SUSPECT = f"state IN ('llm', 'tools') AND worker IS NOT NULL AND crash_step = step_no AND crashes = {MAX_CRASHES - 2}"
_SUSPECT_RUNS = (
    "other.state IN ('llm', 'tools') AND (other.runnable_at IS NULL OR other.runnable_at > :now)"
    f" AND other.crash_step = other.step_no AND other.crashes = {MAX_CRASHES - 1}"
)
MAX_RETRY_WAIT_MS = 600_000
"""Longest wait that a service may ask for. Used for rows of an old version, which did not store the length."""
MAX_LEASE_MS = 3_600_000
"""Largest `store.lease_seconds`."""
# The stored end of a wait is too far away after the clock was set back. One second of tolerance: another process may
# have written after our transaction began.
_WAITS_TOO_LONG = (
    "runnable_at > :now + 1000 AND (state NOT IN ('llm', 'tools', 'wait_retry')"
    f" OR (state = 'wait_retry' AND runnable_at > :now + coalesce(retry_ms, {MAX_RETRY_WAIT_MS}))"
    f" OR (state IN ('llm', 'tools') AND runnable_at > :now + {MAX_LEASE_MS}))"
)
# A paused agent finishes the step that runs; otherwise it stays as it is.
_IS_HELD = "hold = 1 AND state NOT IN ('llm', 'tools')"
# `:ready_at`: agents that became ready later are left to other processes.
_IS_CLAIMABLE = (
    f"runnable_at <= :now AND (state <> 'ready' OR runnable_at <= :ready_at) AND NOT ({_SUSPECT}) AND NOT ({_IS_HELD})"
)
_SELECT_CLAIMABLE = f"SELECT id, person FROM agents WHERE {_IS_CLAIMABLE} ORDER BY person DESC, runnable_at"
_LOCK_CLAIMABLE = f"""
SELECT id, person FROM agents WHERE {_IS_CLAIMABLE} ORDER BY person DESC, runnable_at LIMIT :limit
/*+ FOR UPDATE SKIP LOCKED */
"""
_LOCK_ADMITTED = f"""
SELECT id, person FROM agents WHERE {_IS_CLAIMABLE} AND id IN (SELECT key FROM json_each(:ids))
 ORDER BY person DESC, runnable_at /*+ FOR UPDATE SKIP LOCKED */
"""
# The last condition names `agents.id` so that PostgreSQL evaluates it, which reads all agents, only for a suspect.
LOCK_SUSPECT = f"""
SELECT id FROM agents WHERE runnable_at <= :now AND {_SUSPECT}
   AND NOT EXISTS (SELECT 1 FROM agents AS other WHERE {_SUSPECT_RUNS} AND other.id <> agents.id)
 ORDER BY runnable_at LIMIT 1 /*+ FOR UPDATE SKIP LOCKED */
"""
_LOCK_WAITING_TOO_LONG = f"SELECT id FROM agents WHERE {_WAITS_TOO_LONG} ORDER BY id /*+ FOR UPDATE SKIP LOCKED */"
SELECT_CLAIMED = "SELECT id, epoch FROM agents WHERE worker = :worker AND state IN ('llm', 'tools') ORDER BY id"
# The second condition finds messages that the counter has lost. Few agents have positions after the last taken one.
SELECT_FORGOTTEN = """
SELECT id FROM agents
 WHERE kind = 'agent'
   AND ((state = 'idle' AND waiting > 0) OR (state = 'ready' AND runnable_at IS NULL)
        OR (state = 'idle' AND next_in_seq > taken_seq + 1
            AND EXISTS (SELECT 1 FROM messages WHERE messages.recipient = agents.id
                           AND messages.in_seq > agents.taken_seq AND messages.state = 'pending')))
 ORDER BY id
"""
_COUNT_WAITING = """
SELECT count(*), coalesce(sum(length(payload)), 0), coalesce(max(CASE WHEN sender = 'user' THEN 1 ELSE 0 END), 0)
  FROM messages WHERE recipient = :recipient AND in_seq > :taken_seq AND state = 'pending'
"""
_INSERT_SUMMARY = "INSERT INTO summaries (agent_id, upto, text, at) VALUES (:agent_id, :upto, :text, :at)"
_INSERT_FURTHER_USAGE = """
INSERT INTO llm_calls
       (agent_id, turn_no, step_no, call_no, service, input_tokens, output_tokens, outcome, at, estimated, task,
        cached_tokens, cost, model_ms)
SELECT :agent_id, :turn_no, :step_no, 1 + coalesce(max(call_no), 0), :service, :input_tokens, :output_tokens, 'used',
       :at, :estimated, :task, :cached_tokens, :cost, :model_ms
  FROM llm_calls WHERE agent_id = :agent_id AND turn_no = :turn_no AND step_no = :step_no
"""


def claim_agents(
    db: Connection,
    uow: UnitOfWork,
    worker: str,
    rules: Rules,
    limit: int,
    *,
    others: int | None = None,
    admission: Admission | None = None,
    delay_ms: int = 0,
) -> list[Claim]:
    """`delay_ms`: how long agents are ready before they are claimed here."""
    if uow.is_society_paused:
        return []
    others, ready_at = limit if others is None else others, uow.now - delay_ms
    if admits := admission.begin_round() if admission else None:
        claimable = _lock_admitted(db, uow.now, ready_at, limit, others, admits)
    else:
        claimable = db.execute(_LOCK_CLAIMABLE, {"now": uow.now, "ready_at": ready_at, "limit": limit})
    suspects = db.execute(LOCK_SUSPECT, {"now": uow.now})
    too_long = db.execute(_LOCK_WAITING_TOO_LONG, {"now": uow.now})
    # Results are read after all three queries were sent: PostgreSQL answers them in one round trip.
    agent_ids = _limit_agents(list(claimable), limit, others)
    suspect_ids = [agent_id for (agent_id,) in suspects][: limit - len(agent_ids)]
    too_long_ids = [agent_id for (agent_id,) in too_long]
    uow.prefetch([*agent_ids, *suspect_ids, *too_long_ids])
    for agent_id in too_long_ids:
        _shorten_wait(uow, agent_id)
    claims = [_claim_agent(db, uow, agent_id, worker, rules) for agent_id in agent_ids]
    claims += [
        msgspec.structs.replace(_claim_agent(db, uow, agent_id, worker, rules), is_crash_suspect=True)
        for agent_id in suspect_ids
    ]
    if claims:
        hit("turn.claimed")
    return claims


def _shorten_wait(uow: UnitOfWork, agent_id: str) -> None:
    mailbox = uow.mailbox(agent_id)
    match mailbox.state:
        case "wait_retry":
            wait_ms = mailbox.retry_ms if mailbox.retry_ms is not None else MAX_RETRY_WAIT_MS
        case "llm" | "tools":
            wait_ms = MAX_LEASE_MS
        case _:
            wait_ms = 0
    mailbox.runnable_at = uow.now + wait_ms
    log.warning("the clock was set back: the wait of %s was shortened", agent_id)


def _lock_admitted(
    db: Connection, now: int, ready_at: int, limit: int, others: int, admits: AdmitFunction
) -> Iterable[tuple[str, int]]:
    """Lock the claimable agents that `admits` accepts. The others may be many and are not locked."""
    runnable = db.execute(_SELECT_CLAIMABLE, {"now": now, "ready_at": ready_at})
    admitted = _limit_agents(
        ((agent_id, person) for agent_id, person in runnable if admits(agent_id, person == 1)), limit, others
    )
    if not admitted:
        return ()
    return db.execute(_LOCK_ADMITTED, {"now": now, "ready_at": ready_at, "ids": json_keys(admitted)})


def _limit_agents(agents: Iterable[tuple[str, int]], limit: int, others: int) -> list[str]:
    """Return the first `limit` ids, but at most `others` of agents without a message of the person."""
    agent_ids: list[str] = []
    for agent_id, person in agents:
        if len(agent_ids) >= limit or (person != 1 and others <= 0):
            break
        others -= person != 1
        agent_ids.append(agent_id)
    return agent_ids


def claim_woken_agent(db: Connection, uow: UnitOfWork, agent_id: str, worker: TurnWorker) -> Claim:
    """Claim an agent that this transaction made ready."""
    claimed = TurnTransaction(db, uow, agent_id, worker.rules).claim(worker.worker)
    hit("turn.claimed")
    return claimed


def _claim_agent(db: Connection, uow: UnitOfWork, agent_id: str, worker: str, rules: Rules) -> Claim:
    """Claim one agent. Raise `UnclaimableAgent` if its stored turn is damaged, so that other agents are not blocked."""
    try:
        return TurnTransaction(db, uow, agent_id, rules).claim(worker)
    except db.IntegrityError as error:
        raise UnclaimableAgent(agent_id) from error
    except (db.Error, CoterieError, FailpointHit):
        raise  # an error of the engine, or one that callers handle
    except Exception as error:
        raise UnclaimableAgent(agent_id) from error


def wake_forgotten(db: Connection, uow: UnitOfWork, agent_ids: Sequence[str]) -> list[tuple[str, int]]:
    """Make those of `agent_ids` ready that are idle with mail; return each with the number of its messages."""
    woken = []
    for agent_id in agent_ids:
        mailbox = uow.mailbox(agent_id)
        if mailbox.state != "idle" and not (mailbox.state == "ready" and mailbox.runnable_at is None):
            continue  # a message or another process has woken it since
        bounds = {"recipient": agent_id, "taken_seq": mailbox.taken_seq}
        waiting, size, person = db.execute(_COUNT_WAITING, bounds).fetchone()
        mailbox.waiting, mailbox.waiting_bytes, mailbox.person = waiting, int(size), person
        mailbox.first_from_person, mailbox.last_from_person = 0, mailbox.next_in_seq - 1
        mailbox.state, mailbox.runnable_at = ("ready", uow.now) if waiting else ("idle", None)
        uow.record_event("agent.state", agent_id)
        if waiting:
            woken.append((agent_id, waiting))
    return woken


def release_claims(
    db: Connection,
    uow: UnitOfWork,
    *,
    worker: str,
    only: Collection[ClaimKey] | None = None,
    failed: bool,
) -> None:
    claimed = [(agent_id, epoch) for agent_id, epoch in db.execute(SELECT_CLAIMED, {"worker": worker})]
    for agent_id, epoch in claimed:
        if only is not None and (agent_id, epoch) not in only:
            continue
        # One UPDATE of all rows locks in any order, and can deadlock with batches that lock in the order of ids.
        row = uow.mailbox(agent_id)
        if row.epoch != epoch or row.worker != worker or row.state not in ("llm", "tools"):
            continue  # another process took it over since the SELECT
        # An orderly release clears the worker; after a crash its name is left.
        row.runnable_at, row.worker = uow.now, worker if failed else None
    uow.frees_other_agents = True


def advance(db: Connection, uow: UnitOfWork, claim: Claim, event: Event, rules: Rules, sends: Envelope | None) -> Claim:
    turn = TurnTransaction(db, uow, claim.agent_id, rules)
    turn.resume(claim)
    hit("turn.fenced")
    if claim.is_crash_suspect:
        turn.clear_crashes()
    return turn.advance(event, sends)


def summarise(db: Connection, uow: UnitOfWork, claim: Claim, upto: int, text: str, answer: Completion | None) -> Claim:
    turn = TurnTransaction(db, uow, claim.agent_id, Rules())
    turn.check_fence(claim)
    turn.mailbox.history_version += 1
    db.execute(
        _INSERT_SUMMARY, {"agent_id": claim.agent_id, "upto": upto, "text": to_storable(text), "at": uow.timestamp}
    )
    if answer:
        add_usage(db, uow, claim, answer.service, answer.usage)
    return msgspec.structs.replace(claim, history_version=turn.mailbox.history_version)


def add_usage(db: Connection, uow: UnitOfWork, claim: Claim, service: str, usage: TokenUsage) -> None:
    """Write the tokens of a further request of the step: for a summary, for the server of a tool, or one whose step was
    refused. Not fenced: the tokens are paid for in any case."""
    if claim.task:
        uow.tasks.of(claim.task).add_usage(usage)
    db.execute(
        _INSERT_FURTHER_USAGE,
        {
            "agent_id": claim.agent_id,
            "turn_no": claim.turn_no,
            "step_no": claim.step_no,
            "service": service,
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "at": uow.timestamp,
            "estimated": int(usage.estimated),
            "task": claim.task,
            "cached_tokens": usage.cached_tokens,
            "cost": usage.cost,
            "model_ms": usage.model_ms,
        },
    )


def add_refused_usage(db: Connection, uow: UnitOfWork, claim: Claim, service: str, usage: TokenUsage) -> None:
    release_reserved_tokens(db, claim.agent_id, claim.turn_no, claim.step_no)
    if usage.input_tokens:
        add_usage(db, uow, claim, service, usage)


def reserve_tokens(db: Connection, uow: UnitOfWork, claim: Claim, service: str, tokens: int, limit: int) -> bool:
    turn = TurnTransaction(db, uow, claim.agent_id, Rules())
    turn.check_fence(claim)
    release_reserved_tokens(db, claim.agent_id, claim.turn_no, claim.step_no)
    if count_tokens_of_day(db, uow.now) >= limit:
        return False
    turn.record_usage(service, TokenUsage(input_tokens=tokens, estimated=True), "used", is_reserved=True)
    return True


class RetryTransaction(Exception):
    """Raised by a job: roll it back and run it once more."""


class EagerClaims(msgspec.Struct, frozen=True, gc=False):
    """Claims of one run of a transaction. They count only if that run is committed."""

    claims: Sequence[Claim] = ()
    has_unclaimed: bool = False
    """Runnable agents were left: the worker must look for them."""
    interruptions: Sequence[Interruption] = ()
    """The person's messages to agents whose model is asked, and turns that were ended."""

    def __bool__(self) -> bool:
        """True if the worker has something to do."""
        return bool(self.claims or self.has_unclaimed or self.interruptions)


NO_CLAIMS = EagerClaims()


class EagerClaimer:
    """Claims agents for a worker in the transaction of the messages that wake them.

    One object serves all runs of one job. `claim_woken` returns the claims of its run; `settle` gets those of the
    committed run.
    """

    def __init__(self, worker: TurnWorker, should_claim: Callable[[], bool] = lambda: True) -> None:
        """`should_claim`: False while new turns are left to other processes. Called from any thread."""
        self._worker, self._should_claim = worker, should_claim
        self._reserved: set[str] = set()
        """Agents with a reserved slot. A run that is rolled back leaves its slots to the next run."""
        self._has_failed = False
        """A claim failed: further runs store the messages and claim no agent."""

    def claim_woken(self, db: Connection, uow: UnitOfWork) -> EagerClaims:
        """Claim woken agents that have a free slot; leave the others to the scheduler. Call it before `uow.flush`."""
        woken = uow.newly_runnable()
        if not (woken or uow.frees_other_agents or uow.interruptions or uow.ended_epochs):
            return NO_CLAIMS
        ready = [agent_id for agent_id, state in woken if state == "ready"]
        if ready and (self._has_failed or uow.is_society_paused):
            ready = []
        own: list[str] = []
        left_to_others = 0
        for agent_id in ready:
            if agent_id not in self._reserved and not self._should_claim():
                left_to_others += 1
            elif self._reserve(agent_id, uow):
                own.append(agent_id)
        has_unclaimed = uow.frees_other_agents or len(own) + left_to_others < len(woken)
        try:
            return EagerClaims(
                [claim_woken_agent(db, uow, agent_id, self._worker) for agent_id in own],
                has_unclaimed,
                uow.interruption_list(),
            )
        except (db.OperationalError, FailpointHit):
            raise  # an error of the engine: the whole batch is rolled back
        except Exception as error:
            # An error in a turn must not roll back the message that started it.
            log.exception("agents could not be claimed together with their messages; the scheduler tries again")
            self._has_failed = True
            raise RetryTransaction from error

    def settle(self, committed: EagerClaims | None) -> None:
        """Start the turns of the committed run. None: nothing was written. Call it once, on the event loop."""
        if committed is None and self._reserved:
            # The error may have come after the commit: then the database has claims that no worker knows.
            self._worker.reconcile_claims()
        committed = committed or NO_CLAIMS
        if unused := self._reserved.difference(claim.agent_id for claim in committed.claims):
            self._worker.release_slots(unused)
        if committed.claims:
            self._worker.start_turns(committed.claims)
        if committed.has_unclaimed:
            self._worker.wake()
        for interruption in committed.interruptions:
            self._worker.interrupt(interruption)

    def _reserve(self, agent_id: str, uow: UnitOfWork) -> bool:
        if agent_id in self._reserved:
            return True
        if not self._worker.reserve_slot(agent_id, uow.mailbox(agent_id).person == 1):
            return False
        self._reserved.add(agent_id)
        return True
