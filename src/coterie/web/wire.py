"""Nouns as they go over the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from coterie.agent.context import QUARANTINED_NOTE
from coterie.agents import Agent, AgentState
from coterie.clock import to_rfc3339
from coterie.errors import CoterieError, Refused
from coterie.llm.service import INFERRED, Capabilities
from coterie.messages import Message
from coterie.society import Society
from coterie.store import CallRecord, PlanRecord, Thread, Usage
from coterie.text import one_line
from coterie.turn_store import HistoryRow
from coterie.web.markdown import rendered

PREVIEW = 120
"""Characters."""

_PHASES: dict[AgentState, str] = {
    "ready": "starting",
    "llm": "thinking",
    "tools": "tool",
    "wait_approval": "approval",
    "wait_retry": "retry",
}


def message(one: Message) -> dict[str, Any]:
    """As people see it, with its text as a tree."""
    text = one.payload.get("text")
    return one.to_dict() | {"rendered": rendered(text) if isinstance(text, str) and text else []}


def messages(many: Iterable[Message]) -> list[dict[str, Any]]:
    return [message(one) for one in many]


def preview(one: Message) -> str:
    return one_line(str(one.payload.get("text", "")), PREVIEW)


def agent(society: Society, one: Agent, unread: int | None = None) -> dict[str, Any]:
    service, capabilities = _mind(society, one)
    wire = {"id": one.id, "name": one.name} | state(one)
    wire |= {
        "service": service,
        "capabilities": capabilities
        and {
            "input": sorted(capabilities.input),
            "output": sorted(capabilities.output),
            "inferred": capabilities.inferred,
        },
        "parent": one.parent,
        "role": _role(one),
        "waiting": one.waiting,
        "delayed": one.delayed,
    }
    if one.kind != "agent":
        wire["kind"] = one.kind
    if unread is not None:
        wire["unread"] = unread
    return wire


def state(one: Agent) -> dict[str, Any]:
    """What it is doing. The store's states of work are one to people, with a phase."""
    phase = _PHASES.get(one.state)
    optional = {"phase": phase, "tool": one.tool, "step": one.tool_position, "why": one.state_reason}
    return {
        "state": "active" if phase else one.state,
        "since": to_rfc3339(one.state_since),
        **{key: value for key, value in optional.items() if value is not None},
    }


def _mind(society: Society, one: Agent) -> tuple[str | None, Capabilities | None]:
    """Its service and what that can do; of a person nothing, of an agent without a model what is assumed."""
    if one.kind == "person":
        return None, None
    try:
        return society.agents.service_of(one.id).id, society.agents.capabilities_of(one.id)
    except CoterieError:
        return None, INFERRED


class _Made(msgspec.Struct):
    role: str | None = None


_made = msgspec.json.Decoder(_Made).decode


def _role(one: Agent) -> str | None:
    """What it was made after; None for whom a person or the owner's file made."""
    return _made(one.profile).role if one.profile else None


def thread(one: Thread) -> dict[str, Any]:
    return {
        "agent": one.agent_id,
        "last": message(one.last),
        "unread": one.unread,
        "firstUnread": one.first_unread,
    }


def run(plan: PlanRecord) -> dict[str, Any]:
    return {
        "agent": plan.agent_id,
        "turn": plan.turn_no,
        "step": plan.step_no,
        "text": plan.text,
        "outcome": plan.outcome,
        "interruptedBy": plan.interrupted_by,
        "at": to_rfc3339(plan.at),
        "calls": [call(one) for one in plan.calls],
    }


def call(one: CallRecord) -> dict[str, Any]:
    return {
        "callId": one.call_id,
        "name": one.name,
        "arguments": one.arguments,
        "state": one.state,
        "result": one.result,
        "startedAt": to_rfc3339(one.started_at),
        "endedAt": to_rfc3339(one.ended_at),
    }


class _Kept(msgspec.Struct, rename="camel"):
    artifact_ref: str


_kept = msgspec.json.Decoder(_Kept).decode


def artifact_of(result: str) -> str | None:
    """The artifact that the result of a call names: what it made, or what was too long to be shown whole."""
    try:
        return _kept(result).artifact_ref if result.startswith("{") else None
    except msgspec.DecodeError:
        return None


def usage(one: Usage) -> dict[str, Any]:
    return {
        "day": one.day,
        "agent": one.agent_id,
        "service": one.service,
        "requests": one.requests,
        "withdrawn": one.withdrawn,
        "inputTokens": one.input_tokens,
        "outputTokens": one.output_tokens,
        "estimatedTokens": one.estimated_tokens,
    }


def said(row: HistoryRow) -> dict[str, Any]:
    """One row of a history, under the role that the model sees it in."""
    wire: dict[str, Any] = {"seq": row.seq, "turn": row.turn_no, "role": row.role, "content": row.text}
    if row.role == "assistant" and row.calls:
        wire["calls"] = [{"id": one.id, "name": one.name, "arguments": one.arguments} for one in row.calls]
    elif row.role == "tool":
        wire["callId"] = row.call_id
    elif row.role == "user":
        wire |= _heard(row)
    return wire


def _heard(row: HistoryRow) -> dict[str, Any]:
    if row.hidden or row.message is None:
        return {"content": QUARANTINED_NOTE, "hidden": True}
    payload = row.message.payload
    return {
        "content": payload.get("text", ""),
        "messageId": row.message.id,
        "from": row.message.sender,
        "payload": payload,
    }


def known(one: Agent | None, agent_id: str) -> Agent:
    """An agent, not the person; `Refused` when there is none."""
    if one is None or one.kind == "person":
        raise Refused("unknown_agent", f'there is no agent "{one_line(agent_id)}": GET /api/v1/agents lists them')
    return one
