"""Plans in the database: what a model wants to do, call by call, and what became of it.

The question whether a call may run: asked once, and answered for that very call.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from coterie.errors import Refused
from coterie.ids import id_for
from coterie.llm.types import Call
from coterie.messages import check_payload, encode_payload
from coterie.stores.sql.connection import Connection, insert
from coterie.turn import OVER, ArgumentsFile, Plan, PlannedCall

Key = tuple[int, int]
"""The turn and step at which a plan was made."""
_CALLS = (
    "calls (agent_id, turn_no, step_no, idx, call_id, name, arguments, raw, effect, gated, state, result, started_at,"
    " ended_at)"
)
_SAVE_CALL = """
UPDATE calls SET state = ?, effect = ?, gated = ?, result = ?, started_at = coalesce(started_at, ?), ended_at = ?
 WHERE agent_id = ? AND turn_no = ? AND step_no = ? AND idx = ?
"""
_decode, _encode = msgspec.json.decode, msgspec.json.encode


def named(plan: Plan, key: Key) -> Plan:
    """Providers repeat their ids over time; ours are unique for the agent."""
    calls = [
        replace(one, call=replace(one.call, id=f"call_{key[0]}_{key[1]}_{idx}")) for idx, one in enumerate(plan.calls)
    ]
    return replace(plan, calls=tuple(calls))


def read_open(db: Connection, agent_id: str) -> tuple[Key, Plan] | None:
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
    return key, Plan(text=text, calls=tuple(_call(*call) for call in calls))


def call_state(db: Connection, agent_id: str, call_id: str) -> tuple[str, str]:
    """The state and the result of a call; one whose rows are gone counts as cancelled."""
    key = call_id.removeprefix("call_").split("_")
    if len(key) == 3 and all(number.isascii() and number.isdecimal() and len(number) < 19 for number in key):
        row = db.execute(
            "SELECT state, result FROM calls WHERE agent_id = ? AND turn_no = ? AND step_no = ? AND idx = ?",
            (agent_id, *map(int, key)),
        ).fetchone()
        if row:
            return row[0], row[1]
    return "cancelled", ""


def record(
    db: Connection, agent_id: str, key: Key, plan: Plan, outcome: str, stamp: int, by: str | None = None
) -> None:
    db.execute(
        "INSERT INTO plans (agent_id, turn_no, step_no, text, outcome, interrupted_by, at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (agent_id, *key, plan.text, outcome, by, stamp),
    )
    insert(
        db,
        _CALLS,
        [
            (agent_id, *key, idx, one.call.id, one.call.name, _encode(one.call.arguments).decode(), one.call.raw,
             one.effect, one.gated, one.state, one.result, stamp if one.state == "started" else None,
             stamp if one.state in OVER else None)
            for idx, one in enumerate(plan.calls)
        ],
    )  # fmt: skip


def save_calls(db: Connection, agent_id: str, key: Key, before: Plan, after: Plan, stamp: int) -> None:
    """Those that have changed."""
    for idx, (was, one) in enumerate(zip(before.calls, after.calls, strict=True)):
        if one is not was and one != was:
            began = stamp if one.state == "started" else None
            ended = stamp if one.state in OVER else None
            db.execute(_SAVE_CALL, (one.state, one.effect, one.gated, one.result, began, ended, agent_id, *key, idx))


def close(db: Connection, agent_id: str, by: str | None) -> None:
    db.execute(
        "UPDATE plans SET outcome = 'closed', interrupted_by = ? WHERE agent_id = ? AND outcome = 'open'",
        (by, agent_id),
    )


def _call(
    call_id: str, name: str, arguments: str, raw: str | None, effect: Any, gated: int, state: Any, result: str
) -> PlannedCall:
    call = Call(id=call_id, name=name, arguments=_decode(arguments), raw=raw)
    return PlannedCall(call=call, effect=effect, gated=bool(gated), state=state, result=result)


VERDICTS = ("Approve", "Deny")
APPROVE = 0
SHOWN_OF_ARGUMENTS = 4_000
"""Characters of arguments that the question shows when a file has all of them."""


def question(call: Call, file: ArgumentsFile | None = None) -> str:
    """The payload of the question, as JSON. It shows all arguments, or names `file`, which holds them."""
    text = f"May I run `{call.name}`?"
    asked: dict[str, Any] = {"callId": call.id, "tool": call.name}
    if file is None:
        payload = {"text": text, "approval": asked, "quickReplies": list(VERDICTS)}
        try:
            return encode_payload(check_payload(payload | {"approval": asked | {"arguments": call.arguments}}))
        except Refused:  # numbers too large or objects too deep for a payload: shown as the text of their JSON
            shown = {"json": msgspec.json.encode(call.arguments).decode()}
            return encode_payload(check_payload(payload | {"approval": asked | {"arguments": shown}}))
    shown = {"shortened": msgspec.json.encode(call.arguments).decode()[:SHOWN_OF_ARGUMENTS]}
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
        "approval": asked | {"arguments": shown, "argumentsRef": file.artifact_ref, "argumentsSha256": file.sha256},
        "quickReplies": list(VERDICTS),
    }
    return encode_payload(check_payload(long))


def question_id(agent_id: str, call_id: str) -> str:
    """Names the question about a gated call: an answer to it speaks of that very call, and of no other."""
    return id_for("approval", agent_id, call_id)
