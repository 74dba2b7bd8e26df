"""Rows of `plans` and `calls`, and the question that asks the person to approve a call."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from coterie.errors import Refused
from coterie.ids import id_for
from coterie.llm.types import ToolCall
from coterie.messages import encode_payload, validate_payload
from coterie.stores.sql.rows import Connection, insert
from coterie.turn import ENDED_STATES, ArgumentsFile, Plan, PlannedCall

PlanKey = tuple[int, int]
"""Turn and step in which a plan was made."""
_CALLS = (
    "calls (agent_id, turn_no, step_no, idx, call_id, name, arguments, raw, effect, gated, state, result, started_at,"
    " ended_at)"
)
_UPDATE_CALL = """
UPDATE calls SET state = ?, effect = ?, gated = ?, result = ?, started_at = coalesce(started_at, ?), ended_at = ?
 WHERE agent_id = ? AND turn_no = ? AND step_no = ? AND idx = ?
"""
_decode, _encode = msgspec.json.decode, msgspec.json.encode


def assign_call_ids(plan: Plan, key: PlanKey) -> Plan:
    """Replace the provider's call ids, which repeat, with ids that are unique for the agent."""
    calls = [
        replace(planned, call=replace(planned.call, id=f"call_{key[0]}_{key[1]}_{idx}"))
        for idx, planned in enumerate(plan.calls)
    ]
    return replace(plan, calls=tuple(calls))


def read_open_plan(db: Connection, agent_id: str) -> tuple[PlanKey, Plan] | None:
    row = db.execute(
        "SELECT turn_no, step_no, text FROM plans WHERE agent_id = ? AND outcome = 'open'", (agent_id,)
    ).fetchone()
    if row is None:
        return None
    key, text = (row[0], row[1]), row[2]
    calls = db.execute(
        "SELECT call_id, name, arguments, raw, effect, gated, state, result FROM calls"
        " WHERE agent_id = ? AND turn_no = ? AND step_no = ? ORDER BY idx",
        (agent_id, *key),
    ).fetchall()
    return key, Plan(text=text, calls=tuple(_to_planned_call(*call) for call in calls))


def read_call_state(db: Connection, agent_id: str, call_id: str) -> tuple[str, str]:
    """Return state and result of a call. A call without a row counts as cancelled."""
    key = call_id.removeprefix("call_").split("_")
    if len(key) == 3 and all(number.isascii() and number.isdecimal() and len(number) < 19 for number in key):
        row = db.execute(
            "SELECT state, result FROM calls WHERE agent_id = ? AND turn_no = ? AND step_no = ? AND idx = ?",
            (agent_id, *map(int, key)),
        ).fetchone()
        if row:
            return row[0], row[1]
    return "cancelled", ""


def insert_plan(
    db: Connection, agent_id: str, key: PlanKey, plan: Plan, outcome: str, timestamp: int, by: str | None = None
) -> None:
    db.execute(
        "INSERT INTO plans (agent_id, turn_no, step_no, text, outcome, interrupted_by, at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (agent_id, *key, plan.text, outcome, by, timestamp),
    )
    insert(
        db,
        _CALLS,
        [
            (agent_id, *key, idx, planned.call.id, planned.call.name, _encode(planned.call.arguments).decode(),
             planned.call.invalid_arguments, planned.effect, planned.needs_approval, planned.state, planned.result,
             timestamp if planned.state == "started" else None, timestamp if planned.state in ENDED_STATES else None)
            for idx, planned in enumerate(plan.calls)
        ],
    )  # fmt: skip


def update_calls(db: Connection, agent_id: str, key: PlanKey, before: Plan, after: Plan, timestamp: int) -> None:
    """Write the calls that differ between `before` and `after`."""
    for idx, (old, new) in enumerate(zip(before.calls, after.calls, strict=True)):
        if new is not old and new != old:
            started_at = timestamp if new.state == "started" else None
            ended_at = timestamp if new.state in ENDED_STATES else None
            db.execute(
                _UPDATE_CALL,
                (new.state, new.effect, new.needs_approval, new.result, started_at, ended_at, agent_id, *key, idx),
            )


def close_plan(db: Connection, agent_id: str, by: str | None) -> None:
    db.execute(
        "UPDATE plans SET outcome = 'closed', interrupted_by = ? WHERE agent_id = ? AND outcome = 'open'",
        (by, agent_id),
    )


def _to_planned_call(
    call_id: str, name: str, arguments: str, raw: str | None, effect: Any, gated: int, state: Any, result: str
) -> PlannedCall:
    call = ToolCall(id=call_id, name=name, arguments=_decode(arguments), invalid_arguments=raw)
    return PlannedCall(call=call, effect=effect, needs_approval=bool(gated), state=state, result=result)


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
