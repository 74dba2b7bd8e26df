"""What has been done and said, for people to look at: tool runs, costs, words, files."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from coterie.artifacts import Artifact
from coterie.clock import EPOCH, from_ms
from coterie.errors import Refused
from coterie.overview import CallRecord, PlanRecord, Usage
from coterie.store import Page
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.rows import ARTIFACT, to_artifact

_PLAN = "seq, agent_id, turn_no, step_no, text, outcome, interrupted_by, at"
_PLANS = f"SELECT {_PLAN} FROM plans WHERE ?1 IS NULL OR seq < ?1 ORDER BY seq DESC LIMIT ?2"
# The same order for one agent, along the index that has its plans together.
_PLANS_OF = f"""
SELECT {_PLAN} FROM plans WHERE agent_id = ?3 AND (?1 IS NULL OR seq < ?1)
 ORDER BY turn_no DESC, step_no DESC LIMIT ?2
"""
_CALLS = """
SELECT call_id, name, arguments, state, result, started_at, ended_at FROM calls
 WHERE agent_id = ? AND turn_no = ? AND step_no = ? ORDER BY idx
"""
_USAGE = """
SELECT at / 86400000 AS day, agent_id, service, count(*), count(*) FILTER (WHERE outcome = 'withdrawn'),
       sum(input_tokens), sum(output_tokens),
       coalesce(sum(input_tokens + output_tokens) FILTER (WHERE estimated = 1), 0)
  FROM llm_calls WHERE at >= ? GROUP BY day, agent_id, service ORDER BY day DESC, agent_id, service
"""
MAX_WORDS, MAX_WORD = 16, 200


def runs(db: Connection, page: Page, agent_id: str | None) -> list[PlanRecord]:
    if agent_id is None:
        plans = db.execute(_PLANS, (page.before, page.limit)).fetchall()
    else:
        plans = db.execute(_PLANS_OF, (page.before, page.limit, agent_id)).fetchall()
    return [_plan(row, db.execute(_CALLS, row[1:4])) for row in plans]


def usage(db: Connection, since: int) -> list[Usage]:
    return [
        Usage(
            day=(EPOCH + timedelta(days=day)).strftime("%Y-%m-%d"),
            agent_id=agent_id,
            service=service,
            requests=requests,
            withdrawn=withdrawn,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            estimated_tokens=estimated_tokens,
        )
        for day, agent_id, service, requests, withdrawn, input_tokens, output_tokens, estimated_tokens in db.execute(
            _USAGE, (since,)
        )
    ]


def patterns(words: str) -> list[str]:
    """What a text must be like, each of them, to have all the words in it."""
    return [f"%{_escaped(word[:MAX_WORD])}%" for word in words.casefold().split()[:MAX_WORDS]]


def artifacts_before(db: Connection, ref: str | None, limit: int) -> list[Artifact]:
    place: tuple[Any, ...] = (1 << 62, "")
    if ref is not None:
        place = db.execute("SELECT created_at, ref FROM artifacts WHERE ref = ?", (ref,)).fetchone()
        if place is None:
            raise Refused("unknown_artifact", f"there is no artifact {ref!r}")
    rows = db.execute(
        f"SELECT {ARTIFACT} FROM artifacts WHERE (created_at, ref) < (?, ?) ORDER BY created_at DESC, ref DESC LIMIT ?",
        (*place, limit),
    )
    return [to_artifact(row) for row in rows]


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _plan(row: tuple[Any, ...], calls: Iterable[tuple[Any, ...]]) -> PlanRecord:
    seq, agent_id, turn_no, step_no, text, outcome, interrupted_by, at = row
    return PlanRecord(
        seq=seq,
        agent_id=agent_id,
        turn_no=turn_no,
        step_no=step_no,
        text=text,
        outcome=outcome,
        interrupted_by=interrupted_by,
        at=from_ms(at),
        calls=[_call(*call) for call in calls],
    )


def _call(
    call_id: str, name: str, arguments: str, state: str, result: str, started_at: int | None, ended_at: int | None
) -> CallRecord:
    return CallRecord(
        call_id=call_id,
        name=name,
        arguments=arguments,
        state=state,
        result=result,
        started_at=None if started_at is None else from_ms(started_at),
        ended_at=None if ended_at is None else from_ms(ended_at),
    )
