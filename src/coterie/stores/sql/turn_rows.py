"""Rows of `plans`, `calls` and `llm_calls`, and the question that asks the person to approve a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from coterie.errors import Refused
from coterie.ids import id_for
from coterie.llm.service import TokenUsage, ToolCall
from coterie.messages import encode_payload, validate_payload
from coterie.plan import ENDED_STATES, ArgumentsFile, CallState, Effect, Plan, PlannedCall
from coterie.stores.sql.rows import Connection, insert

PlanKey = tuple[int, int]
"""Turn and step in which a plan was made."""
_CALLS = (
    "calls (agent_id, turn_no, step_no, idx, call_id, name, arguments, raw, effect, gated, state, result, started_at,"
    " ended_at, attachments)"
)
_UPDATE_CALL = """
UPDATE calls SET state = :state, effect = :effect, gated = :gated, result = :result, attachments = :attachments,
       started_at = coalesce(started_at, :started_at), ended_at = :ended_at
 WHERE agent_id = :agent_id AND turn_no = :turn_no AND step_no = :step_no AND idx = :idx
"""
_SELECT_CALLS = """
SELECT call_id, name, arguments, raw, effect, gated, state, result, attachments FROM calls
 WHERE agent_id = :agent_id AND turn_no = :turn_no AND step_no = :step_no ORDER BY idx
"""
_SELECT_CALL_STATE = """
SELECT state, result FROM calls
 WHERE agent_id = :agent_id AND turn_no = :turn_no AND step_no = :step_no AND idx = :idx
"""
_PLANS = "plans (agent_id, turn_no, step_no, text, outcome, interrupted_by, at, task)"
_CLOSE_PLAN = """
UPDATE plans SET outcome = 'closed', interrupted_by = :interrupted_by WHERE agent_id = :agent_id AND outcome = 'open'
"""
# The newest message of the task that the turn counts for. Retention may have deleted it; then the newest of all.
_SELECT_CAUSE = """
SELECT history.message_id FROM history LEFT JOIN messages ON messages.id = history.message_id
 WHERE history.agent_id = :agent_id AND history.turn_no = :turn_no AND history.message_id IS NOT NULL
 ORDER BY CASE WHEN messages.id = :task OR messages.task = :task THEN 0 ELSE 1 END, history.seq DESC LIMIT 1
"""
_COUNT_CUTS = """
SELECT count(*) FROM plans
 WHERE agent_id = :agent_id AND turn_no = :turn_no AND outcome = 'withdrawn'
   AND NOT EXISTS (SELECT 1 FROM calls WHERE calls.agent_id = plans.agent_id AND calls.turn_no = plans.turn_no
                                         AND calls.step_no = plans.step_no)
"""
_UPSERT_USAGE = """
INSERT INTO llm_calls (agent_id, turn_no, step_no, service, input_tokens, output_tokens, outcome, at, estimated, task,
                       cached_tokens, cost, model_ms)
VALUES (:agent_id, :turn_no, :step_no, :service, :input_tokens, :output_tokens, :outcome, :at, :estimated, :task,
        :cached_tokens, :cost, :model_ms)
    ON CONFLICT (agent_id, turn_no, step_no, call_no) DO UPDATE
   SET service = excluded.service, input_tokens = excluded.input_tokens, output_tokens = excluded.output_tokens,
       outcome = excluded.outcome, at = excluded.at, estimated = excluded.estimated, task = excluded.task,
       cached_tokens = excluded.cached_tokens, cost = excluded.cost, model_ms = excluded.model_ms
"""
_DELETE_RESERVED_TOKENS = """
DELETE FROM llm_calls
 WHERE agent_id = :agent_id AND turn_no = :turn_no AND step_no = :step_no AND call_no = 0 AND task IS NULL
"""
_decode, _encode = msgspec.json.decode, msgspec.json.encode


class _CallRow(NamedTuple):
    """Columns of `_SELECT_CALLS`."""

    call_id: str
    name: str
    arguments: str
    raw: str | None
    effect: Effect
    gated: int
    state: CallState
    result: str
    attachments: str | None

    def to_planned_call(self) -> PlannedCall:
        call = ToolCall(id=self.call_id, name=self.name, arguments=_decode(self.arguments), invalid_arguments=self.raw)
        return PlannedCall(
            call=call,
            effect=self.effect,
            needs_approval=bool(self.gated),
            state=self.state,
            result=self.result,
            attachments=decode_attachments(self.attachments),
        )


def encode_attachments(attachments: Sequence[Mapping[str, Any]]) -> str | None:
    return _encode(attachments).decode() if attachments else None


def decode_attachments(column: str | None) -> tuple[dict[str, Any], ...]:
    return tuple(_decode(column)) if column else ()


def assign_call_ids(plan: Plan, key: PlanKey) -> Plan:
    """Replace the provider's call ids, which repeat, with ids that are unique for the agent."""
    calls = [
        replace(planned, call=replace(planned.call, id=f"call_{key[0]}_{key[1]}_{idx}"))
        for idx, planned in enumerate(plan.calls)
    ]
    return replace(plan, calls=tuple(calls))


def read_open_plan(db: Connection, agent_id: str) -> tuple[PlanKey, Plan] | None:
    row = db.execute(
        "SELECT turn_no, step_no, text FROM plans WHERE agent_id = :agent_id AND outcome = 'open'",
        {"agent_id": agent_id},
    ).fetchone()
    if row is None:
        return None
    turn_no, step_no, text = row
    calls = db.execute(_SELECT_CALLS, {"agent_id": agent_id, "turn_no": turn_no, "step_no": step_no})
    return (turn_no, step_no), Plan(text=text, calls=tuple(_CallRow._make(call).to_planned_call() for call in calls))


def read_call_state(db: Connection, agent_id: str, call_id: str) -> tuple[str, str]:
    """Return state and result of a call. A call without a row counts as cancelled."""
    key = call_id.removeprefix("call_").split("_")
    if len(key) == 3 and all(number.isascii() and number.isdecimal() and len(number) < 19 for number in key):
        turn_no, step_no, idx = map(int, key)
        row = db.execute(
            _SELECT_CALL_STATE, {"agent_id": agent_id, "turn_no": turn_no, "step_no": step_no, "idx": idx}
        ).fetchone()
        if row:
            return row[0], row[1]
    return "cancelled", ""


def read_cause(db: Connection, agent_id: str, turn_no: int, task: str | None) -> str | None:
    """Return the message that causes what the turn sends, so that it belongs to the task of the turn."""
    row = db.execute(_SELECT_CAUSE, {"agent_id": agent_id, "turn_no": turn_no, "task": task}).fetchone()
    return row[0] if row else None


def count_cuts(db: Connection, agent_id: str, turn_no: int) -> int:
    """Return the answers of a turn that were cut. A request that was replaced before it was sent left no record."""
    return int(db.execute(_COUNT_CUTS, {"agent_id": agent_id, "turn_no": turn_no}).fetchone()[0])


def insert_plan(
    db: Connection,
    agent_id: str,
    key: PlanKey,
    plan: Plan,
    outcome: str,
    timestamp: int,
    task: str | None,
    by: str | None = None,
) -> None:
    insert(db, _PLANS, [(agent_id, *key, plan.text, outcome, by, timestamp, task)])
    insert(
        db,
        _CALLS,
        [
            (agent_id, *key, idx, planned.call.id, planned.call.name, _encode(planned.call.arguments).decode(),
             planned.call.invalid_arguments, planned.effect, planned.needs_approval, planned.state, planned.result,
             timestamp if planned.state == "started" else None, timestamp if planned.state in ENDED_STATES else None,
             encode_attachments(planned.attachments))
            for idx, planned in enumerate(plan.calls)
        ],
    )  # fmt: skip


def update_calls(db: Connection, agent_id: str, key: PlanKey, before: Plan, after: Plan, timestamp: int) -> None:
    """Write the calls that differ between `before` and `after`."""
    for idx, (old, new) in enumerate(zip(before.calls, after.calls, strict=True)):
        if new is not old and new != old:
            db.execute(
                _UPDATE_CALL,
                {
                    "state": new.state,
                    "effect": new.effect,
                    "gated": new.needs_approval,
                    "result": new.result,
                    "attachments": encode_attachments(new.attachments),
                    "started_at": timestamp if new.state == "started" else None,
                    "ended_at": timestamp if new.state in ENDED_STATES else None,
                    "agent_id": agent_id,
                    "turn_no": key[0],
                    "step_no": key[1],
                    "idx": idx,
                },
            )


def close_plan(db: Connection, agent_id: str, by: str | None) -> None:
    db.execute(_CLOSE_PLAN, {"agent_id": agent_id, "interrupted_by": by})


APPROVAL_OPTIONS = ("Approve", "Deny")
APPROVE = 0
MAX_ARGUMENT_CHARS = 4_000
"""Characters of arguments in a question whose file has all of them."""


def approval_payload(call: ToolCall, file: ArgumentsFile | None = None) -> str:
    """Return the JSON payload of the question. It contains all arguments, or refers to `file`, which does."""
    text = f"May I run `{call.name}`?"
    approval: dict[str, Any] = {"callId": call.id, "tool": call.name}
    if file is None:
        payload = {"text": text, "approval": approval, "quickReplies": list(APPROVAL_OPTIONS)}
        try:
            return encode_payload(validate_payload(payload | {"approval": approval | {"arguments": call.arguments}}))
        except Refused:  # numbers too large or objects too deep for a payload: shown as JSON text
            shown = {"json": msgspec.json.encode(call.arguments).decode()}
            return encode_payload(validate_payload(payload | {"approval": approval | {"arguments": shown}}))
    shown = {"shortened": msgspec.json.encode(call.arguments).decode()[:MAX_ARGUMENT_CHARS]}
    attachment = {
        "artifactRef": file.artifact_ref,
        "filename": file.filename,
        "type": "file",
        "mimeType": file.mime_type,
        "size": file.size,
    }
    long: dict[str, Any] = {
        "text": f"{text} Its arguments are {file.size:,} bytes long: the attached file has all of them.",
        "attachments": [attachment],
        "approval": approval | {"arguments": shown, "argumentsRef": file.artifact_ref, "argumentsSha256": file.sha256},
        "quickReplies": list(APPROVAL_OPTIONS),
    }
    return encode_payload(validate_payload(long))


def approval_question_id(agent_id: str, call_id: str) -> str:
    """Return the id of the question about a call that needs approval. Each call has its own."""
    return id_for("approval", agent_id, call_id)


def put_usage(
    db: Connection,
    agent_id: str,
    key: PlanKey,
    service: str,
    usage: TokenUsage,
    outcome: Literal["used", "withdrawn"],
    at: int,
    task: str | None,
) -> None:
    """Write the token usage of a step instead of what was reserved for it."""
    db.execute(
        _UPSERT_USAGE,
        {
            "agent_id": agent_id,
            "turn_no": key[0],
            "step_no": key[1],
            "service": service,
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "outcome": outcome,
            "at": at,
            "estimated": int(usage.estimated),
            "task": task,
            "cached_tokens": usage.cached_tokens,
            "cost": usage.cost,
            "model_ms": usage.model_ms,
        },
    )


def release_reserved_tokens(db: Connection, agent_id: str, turn_no: int, step_no: int) -> None:
    """Delete the tokens reserved for the step."""
    db.execute(_DELETE_RESERVED_TOKENS, {"agent_id": agent_id, "turn_no": turn_no, "step_no": step_no})
