"""Turns in the database: who may go on, and the steps they take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from coterie.agent.turn import Event, Rules
from coterie.errors import CoterieError
from coterie.failpoints import FailpointHit, hit
from coterie.llm.chat import Answer, Usage
from coterie.messages import Envelope
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.damage import Unclaimable
from coterie.stores.sql.desk import CRASHES, TurnDesk
from coterie.stores.sql.history import tokens_since
from coterie.stores.sql.post import Post
from coterie.text import clean
from coterie.turns import Admission, Admits, Claim, Taker

# A crash cuts off every turn under way, but one of them at most is to blame. Those that two crashes found at the same
# step are suspects: they go on one at a time, and who has got a step further is cleared. So a turn that kills the
# runtime each time takes nobody else's along with it.
_SUSPECT = f"state IN ('llm', 'tools') AND worker IS NOT NULL AND crash_step = step_no AND crashes = {CRASHES - 2}"
_ON_TRIAL = (
    "state IN ('llm', 'tools') AND (runnable_at IS NULL OR runnable_at > ?1)"
    f" AND crash_step = step_no AND crashes = {CRASHES - 1}"
)
# Whoever was paused between two steps rests where it is; a turn that was under way ends first.
_RESTS = "hold = 1 AND state NOT IN ('llm', 'tools')"


_CAN_GO_ON = f"runnable_at <= ? AND NOT ({_SUSPECT}) AND NOT ({_RESTS})"
_ORDER = "ORDER BY person DESC, runnable_at"


def claim(
    db: Connection,
    post: Post,
    worker: str,
    rules: Rules,
    limit: int,
    *,
    others: int | None = None,
    admission: Admission | None = None,
) -> list[Claim]:
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
    # Both are looked at when both are asked: that is one round trip where there are any.
    free = _within(list(found), limit, others)
    on_trial = [agent_id for (agent_id,) in suspects][: limit - len(free)]
    post.foresee([*free, *on_trial])
    claims = [_claim_one(db, post, agent_id, worker, rules) for agent_id in free]
    claims += [
        msgspec.structs.replace(_claim_one(db, post, agent_id, worker, rules), on_trial=True) for agent_id in on_trial
    ]
    if claims:
        hit("turn.claimed")
    return claims


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


def claim_ready(db: Connection, post: Post, agent_id: str, taker: Taker) -> Claim:
    """One that has just got its mail."""
    claimed = TurnDesk(db, post, agent_id, taker.rules).claim(taker.worker)
    hit("turn.claimed")
    return claimed


def _claim_one(db: Connection, post: Post, agent_id: str, worker: str, rules: Rules) -> Claim:
    """One agent that cannot be claimed must not keep all the others waiting."""
    try:
        return TurnDesk(db, post, agent_id, rules).claim(worker)
    except db.IntegrityError as error:
        raise Unclaimable(agent_id) from error
    except (db.Error, CoterieError, FailpointHit):
        raise  # the engine's trouble, or one that has a name
    except Exception as error:
        raise Unclaimable(agent_id) from error


def release(db: Connection, post: Post, worker: str, busy: Sequence[str], failed: bool) -> None:
    # A worker that let go in order leaves no name behind: that is what tells its turns from those cut off by a crash.
    marks = ", ".join("?" * (1 + len(busy)))
    db.execute(
        "UPDATE agents SET runnable_at = ?, worker = CASE WHEN ? = 1 THEN worker END"
        f" WHERE worker = ? AND state IN ('llm', 'tools') AND id NOT IN ({marks})",
        (post.now, failed, worker, "", *busy),
    )
    post.read_anew()
    post.frees = True


def advance(db: Connection, post: Post, claim: Claim, event: Event, rules: Rules, sends: Envelope | None) -> Claim:
    desk = TurnDesk(db, post, claim.agent_id, rules)
    desk.go_on(claim)
    hit("turn.fenced")
    if claim.on_trial:
        desk.acquit()
    return desk.step(event, sends)


def summarise(db: Connection, post: Post, claim: Claim, upto: int, text: str, answer: Answer | None) -> None:
    TurnDesk(db, post, claim.agent_id, Rules()).fence(claim)
    db.execute(
        "INSERT INTO summaries (agent_id, upto, text, at) VALUES (?, ?, ?, ?)",
        (claim.agent_id, upto, clean(text), post.stamp),
    )
    if answer:
        db.execute(
            "INSERT INTO llm_calls"
            " (agent_id, turn_no, step_no, call_no, service, input_tokens, output_tokens, outcome, at)"
            " SELECT ?1, ?2, ?3, 1 + coalesce(max(call_no), 0), ?4, ?5, ?6, 'used', ?7 FROM llm_calls"
            " WHERE agent_id = ?1 AND turn_no = ?2 AND step_no = ?3",
            (claim.agent_id, claim.turn_no, claim.step_no, answer.service, answer.usage.input_tokens,
             answer.usage.output_tokens, post.stamp),
        )  # fmt: skip


def set_aside(db: Connection, post: Post, claim: Claim, service: str, tokens: int, since: int, limit: int) -> bool:
    desk = TurnDesk(db, post, claim.agent_id, Rules())
    desk.fence(claim)
    desk.give_back()
    if tokens_since(db, since) >= limit:
        return False
    desk.note_usage(service, Usage(input_tokens=tokens), "used")
    return True
