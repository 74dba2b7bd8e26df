"""Turns in the database: who may go on, and the steps they take.

A worker that waits for agents: whoever gets mail is claimed for it in the transaction of that mail.

So a message to an agent at rest costs one flush until its turn is under way, and not two.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from coterie.errors import CoterieError
from coterie.failpoints import FailpointHit, hit
from coterie.llm.types import Answer, Usage
from coterie.messages import Envelope
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.poison import Unclaimable
from coterie.stores.sql.queries import tokens_since
from coterie.stores.sql.turn_transaction import CRASHES, TurnTransaction
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.text import clean
from coterie.turn import Event, Rules
from coterie.turn_store import Admission, Admits, Claim, Taker

log = logging.getLogger(__name__)

# A crash cuts off every turn under way, but one of them at most is to blame. Those that two crashes found at the same
# step are suspects: they go on one at a time, and who has got a step further is cleared. So a turn that kills the
# runtime each time takes nobody else's along with it.
_SUSPECT = f"state IN ('llm', 'tools') AND worker IS NOT NULL AND crash_step = step_no AND crashes = {CRASHES - 2}"
_ON_TRIAL = (
    "state IN ('llm', 'tools') AND (runnable_at IS NULL OR runnable_at > ?1)"
    f" AND crash_step = step_no AND crashes = {CRASHES - 1}"
)
LONGEST_RETRY = 600_000
"""Milliseconds: the longest wait that a service may ask for. For waits of a version that did not note the length."""
LONGEST_LEASE = 3_600_000
"""Milliseconds: the most that `store.lease_seconds` allows."""
# A wait is a length, but what is stored is its end. When the clock is set back, the end is further away than the wait
# is long. One second of tolerance: another process may have written a moment after our transaction began.
_OVERLONG = (
    "runnable_at > ?1 + 1000 AND (state NOT IN ('llm', 'tools', 'wait_retry')"
    f" OR (state = 'wait_retry' AND runnable_at > ?1 + coalesce(retry_ms, {LONGEST_RETRY}))"
    f" OR (state IN ('llm', 'tools') AND runnable_at > ?1 + {LONGEST_LEASE}))"
)
# Whoever was paused between two steps rests where it is; a turn that was under way ends first.
_RESTS = "hold = 1 AND state NOT IN ('llm', 'tools')"


_CAN_GO_ON = f"runnable_at <= ? AND NOT ({_SUSPECT}) AND NOT ({_RESTS})"
_ORDER = "ORDER BY person DESC, runnable_at"


def claim(
    db: Connection,
    post: UnitOfWork,
    worker: str,
    rules: Rules,
    limit: int,
    *,
    others: int | None = None,
    admission: Admission | None = None,
) -> list[Claim]:
    if post.society_paused:
        return []
    others = limit if others is None else others
    if admits := admission.begin_round() if admission else None:
        found = _lock_admitted(db, post.now, limit, others, admits)
    else:
        found = db.execute(
            f"SELECT id, person FROM agents WHERE {_CAN_GO_ON} {_ORDER} LIMIT ? /*+ FOR UPDATE SKIP LOCKED */",
            (post.now, limit),
        )
    suspects = db.execute(
        f"SELECT id FROM agents WHERE runnable_at <= ?1 AND {_SUSPECT}"
        f" AND NOT EXISTS (SELECT 1 FROM agents WHERE {_ON_TRIAL}) ORDER BY runnable_at LIMIT ?2"
        " /*+ FOR UPDATE SKIP LOCKED */",
        (post.now, 1),
    )
    overlong = db.execute(
        f"SELECT id FROM agents WHERE {_OVERLONG} ORDER BY id /*+ FOR UPDATE SKIP LOCKED */", (post.now,)
    )
    # All are looked at when all are asked: that is one round trip where there are any.
    free = _within(list(found), limit, others)
    on_trial = [agent_id for (agent_id,) in suspects][: limit - len(free)]
    waiting = [agent_id for (agent_id,) in overlong]
    post.foresee([*free, *on_trial, *waiting])
    for agent_id in waiting:
        _shorten(post, agent_id)
    claims = [_claim_one(db, post, agent_id, worker, rules) for agent_id in free]
    claims += [
        msgspec.structs.replace(_claim_one(db, post, agent_id, worker, rules), on_trial=True) for agent_id in on_trial
    ]
    if claims:
        hit("turn.claimed")
    return claims


def _shorten(post: UnitOfWork, agent_id: str) -> None:
    mailbox = post.mailbox(agent_id)
    match mailbox.state:
        case "wait_retry":
            length = mailbox.retry_ms if mailbox.retry_ms is not None else LONGEST_RETRY
        case "llm" | "tools":
            length = LONGEST_LEASE
        case _:
            length = 0
    mailbox.runnable_at = post.now + length
    log.warning("%s waited for a time further away than its wait is long: the clock was set back", agent_id)


def _lock_admitted(db: Connection, now: int, limit: int, others: int, admits: Admits) -> Iterable[tuple[str, int]]:
    """Lock the agents that `admits` lets through. The others are looked at without a lock, since they may be many."""
    runnable = db.execute(f"SELECT id, person FROM agents WHERE {_CAN_GO_ON} {_ORDER}", (now,))
    admitted = _within(((one, person) for one, person in runnable if admits(one, person == 1)), limit, others)
    if not admitted:
        return ()
    marks = ", ".join("?" * len(admitted))
    return db.execute(
        f"SELECT id, person FROM agents WHERE {_CAN_GO_ON} AND id IN ({marks}) {_ORDER} /*+ FOR UPDATE SKIP LOCKED */",
        (now, *admitted),
    )


def _within(found: Iterable[tuple[str, int]], limit: int, others: int) -> list[str]:
    """The first `limit` of them, but no more than `others` without a message of the person."""
    taken: list[str] = []
    for agent_id, person in found:
        if len(taken) >= limit or (person != 1 and others <= 0):
            break
        others -= person != 1
        taken.append(agent_id)
    return taken


def claim_ready(db: Connection, post: UnitOfWork, agent_id: str, taker: Taker) -> Claim:
    """One that has just got its mail."""
    claimed = TurnTransaction(db, post, agent_id, taker.rules).claim(taker.worker)
    hit("turn.claimed")
    return claimed


def _claim_one(db: Connection, post: UnitOfWork, agent_id: str, worker: str, rules: Rules) -> Claim:
    """One agent that cannot be claimed must not keep all the others waiting."""
    try:
        return TurnTransaction(db, post, agent_id, rules).claim(worker)
    except db.IntegrityError as error:
        raise Unclaimable(agent_id) from error
    except (db.Error, CoterieError, FailpointHit):
        raise  # the engine's trouble, or one that has a name
    except Exception as error:
        raise Unclaimable(agent_id) from error


def release(db: Connection, post: UnitOfWork, worker: str, busy: Sequence[str], failed: bool) -> None:
    found = db.execute("SELECT id FROM agents WHERE worker = ? AND state IN ('llm', 'tools') ORDER BY id", (worker,))
    for agent_id in [agent_id for (agent_id,) in found if agent_id not in busy]:
        # One UPDATE of all rows would wait for locks in any order, and deadlock with batches that take them in order.
        row = post.mailbox(agent_id)
        if row.worker != worker or row.state not in ("llm", "tools"):
            continue  # another process has taken it over since it was found
        # A worker that let go in order leaves no name behind: that tells its turns from those cut off by a crash.
        row.runnable_at, row.worker = post.now, worker if failed else None
    post.frees = True


def advance(db: Connection, post: UnitOfWork, claim: Claim, event: Event, rules: Rules, sends: Envelope | None) -> Claim:
    desk = TurnTransaction(db, post, claim.agent_id, rules)
    desk.go_on(claim)
    hit("turn.fenced")
    if claim.on_trial:
        desk.acquit()
    return desk.step(event, sends)


def summarise(db: Connection, post: UnitOfWork, claim: Claim, upto: int, text: str, answer: Answer | None) -> Claim:
    desk = TurnTransaction(db, post, claim.agent_id, Rules())
    desk.fence(claim)
    desk.row.history_version += 1
    db.execute(
        "INSERT INTO summaries (agent_id, upto, text, at) VALUES (?, ?, ?, ?)",
        (claim.agent_id, upto, clean(text), post.stamp),
    )
    if answer:
        db.execute(
            "INSERT INTO llm_calls"
            " (agent_id, turn_no, step_no, call_no, service, input_tokens, output_tokens, outcome, at, estimated)"
            " SELECT ?1, ?2, ?3, 1 + coalesce(max(call_no), 0), ?4, ?5, ?6, 'used', ?7, ?8 FROM llm_calls"
            " WHERE agent_id = ?1 AND turn_no = ?2 AND step_no = ?3",
            (claim.agent_id, claim.turn_no, claim.step_no, answer.service, answer.usage.input_tokens,
             answer.usage.output_tokens, post.stamp, int(answer.usage.estimated)),
        )  # fmt: skip
    return msgspec.structs.replace(claim, history_version=desk.row.history_version)


def set_aside(db: Connection, post: UnitOfWork, claim: Claim, service: str, tokens: int, since: int, limit: int) -> bool:
    desk = TurnTransaction(db, post, claim.agent_id, Rules())
    desk.fence(claim)
    desk.give_back()
    if tokens_since(db, since) >= limit:
        return False
    desk.note_usage(service, Usage(input_tokens=tokens, estimated=True), "used")
    return True


class RunAgain(Exception):
    """Raised by a job: what it did shall be undone, and it be run once more."""


@dataclass(frozen=True, slots=True)
class Attended:
    """What one run of a transaction body found for the worker. It counts only if that run was committed."""

    claims: Sequence[Claim] = ()
    look: bool = False
    """Agents were left unclaimed: the worker must look for them."""


class Attendance:
    """Claims agents for a worker, in the transaction of the mail that wakes them.

    One object serves all runs of one job and keeps no result of any run. `serve` returns what its run found, and
    `settle` gets it back from the run that was committed.
    """

    def __init__(self, taker: Taker) -> None:
        self._taker = taker
        self._reserved: set[str] = set()
        """Agents that a slot is held for. A run that is undone leaves its slots to the next run."""
        self._gave_up = False
        """A claim failed: further runs store the mail and claim nobody."""

    def serve(self, db: Connection, post: UnitOfWork) -> Attended:
        """Claim those that a turn can begin for; the others are left to the scheduler. Before `post` is closed."""
        woken = post.woken()
        ready = [agent_id for agent_id, state in woken if state == "ready"]
        if ready and (self._gave_up or post.society_paused):
            ready = []
        ready = [agent_id for agent_id in ready if self._reserve(agent_id, post)]
        look = post.frees or len(ready) < len(woken)
        try:
            return Attended([claim_ready(db, post, agent_id, self._taker) for agent_id in ready], look)
        except (db.OperationalError, FailpointHit):
            raise  # the engine's trouble: the whole batch is undone
        except Exception as error:
            # What goes wrong with somebody's turn must not undo the message that began it.
            log.exception("agents could not be claimed with their mail; the scheduler tries again")
            self._gave_up = True
            raise RunAgain from error

    def settle(self, attended: Attended | None) -> None:
        """`attended`: of the run that was committed. None: nothing was written. Called once, on the event loop."""
        if attended is None and self._reserved:
            # The error may have come after the commit: then agents are claimed that nobody works on.
            self._taker.check_claims()
        attended = attended or Attended()
        self._taker.give_back(len(self._reserved) - len(attended.claims))
        if attended.claims:
            self._taker.take(attended.claims)
        if attended.look:
            self._taker.look()

    def _reserve(self, agent_id: str, post: UnitOfWork) -> bool:
        if agent_id in self._reserved:
            return True
        if not self._taker.reserve(agent_id, post.mailbox(agent_id).person == 1):
            return False
        self._reserved.add(agent_id)
        return True
