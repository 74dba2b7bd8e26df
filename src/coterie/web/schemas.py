"""JSON bodies of the HTTP API: each type validates requests, serializes answers and describes itself in /openapi.json.

`X.of(...)` builds an answer from a domain object. A field whose value is `UNSET` is left out of the JSON. The bus
validates messages and answers with error codes of its own, so those request fields accept any JSON value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from coterie import agents, artifacts, messages, store
from coterie.agent.context import QUARANTINED_NOTE
from coterie.clock import to_rfc3339
from coterie.errors import CoterieError, Problem
from coterie.llm.service import INFERRED
from coterie.society import Society
from coterie.text import one_line
from coterie.turn_store import HistoryRow
from coterie.web import markdown

REFERENCE = "#/components/schemas/{name}"
"""Where OpenAPI keeps schemas."""
PREVIEW_CHARACTERS = 120

T = TypeVar("T")
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
"""RFC 3339 in UTC, with milliseconds."""
ShortText = Annotated[str, Meta(max_length=200)]


class Schema(Struct, rename="camel", kw_only=True):
    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


def _or_unset(value: T | None) -> T | UnsetType:
    return UNSET if value is None else value


class ErrorPlace(Schema):
    place: str
    message: str

    @classmethod
    def of_all(cls, problems: Sequence[Problem]) -> list[Self]:
        return [cls(place=problem.location, message=problem.message) for problem in problems]


class Answer(Schema):
    """The message that answered a question, and which quick reply it chose; null: free text."""

    message_id: str
    option: int | None

    @classmethod
    def of(cls, answer: messages.QuestionAnswer) -> Self:
        return cls(message_id=answer.message_id, option=answer.option)


class ProblemDocument(Schema):
    """Every error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: Annotated[str, Meta(description="One sentence for people.")]
    code: Annotated[str, Meta(description="For programs.")]
    id: Annotated[str, Meta(description="`internal_error`: the incident's id in the log.")] | UnsetType = UNSET
    places: Annotated[list[ErrorPlace], Meta(description="`request_invalid`: wrong fields.")] | UnsetType = UNSET
    problems: Annotated[list[ErrorPlace], Meta(description="`config_invalid`: wrong settings.")] | UnsetType = UNSET
    answer: Annotated[Answer, Meta(description="`already_answered`: the answer that counts.")] | UnsetType = UNSET


# Messages


class Attachment(Schema):
    """A file of a message. A request needs only `artifactRef`; the runtime fills in the rest."""

    artifact_ref: str
    filename: str | UnsetType | None = UNSET
    type: artifacts.ArtifactType | UnsetType = UNSET
    mime_type: str | UnsetType = UNSET
    size: int | UnsetType = UNSET


class Payload(Schema):
    """The content of a message. Senders may add fields of their own."""

    text: str | UnsetType = UNSET
    attachments: list[Attachment] | UnsetType = UNSET
    quick_replies: list[str] | UnsetType = UNSET
    approval: Annotated[Any, Meta(description="A tool call to approve: `callId`, `tool`, `arguments`.")] = UNSET
    problem: Annotated[Any, Meta(description="On a notice of the runtime: `agent` is the agent concerned.")] = UNSET


# A plain dict: decoding it as the struct would drop the fields that senders added.
PayloadObject = Annotated[Any, Meta(extra_json_schema={"$ref": REFERENCE.format(name="Payload")})]


class NewMessage(Schema):
    """A message of the person. The runtime sets the sender."""

    to: Annotated[Any, Meta(extra_json_schema={"type": "string"})] = None
    payload: PayloadObject = None
    client_id: str | None = None
    delay_ms: Annotated[Any, Meta(extra_json_schema={"type": ["number", "null"]})] = None
    quick_replies: Annotated[Any, Meta(extra_json_schema={"type": ["array", "null"], "items": {"type": "string"}})] = (
        None
    )
    in_reply_to: Annotated[Any, Meta(extra_json_schema={"type": ["string", "null"]})] = None
    option: Annotated[Any, Meta(extra_json_schema={"type": ["integer", "null"]})] = None


class NewDelay(Schema):
    delay_ms: Annotated[Any, Meta(extra_json_schema={"type": "number"}, description="Milliseconds from now.")]


class Receipt(Schema):
    message_id: str
    state: Annotated[
        Literal["pending", "queued", "delayed"],
        Meta(description="`queued`: the recipient is working and gets the message as an interjection."),
    ]
    scheduled_delivery_time: Annotated[Time, Meta(description="Only when delayed.")] | UnsetType = UNSET

    @classmethod
    def of(cls, receipt: messages.Receipt) -> Self:
        return cls(
            message_id=receipt.message_id,
            state=receipt.state,
            scheduled_delivery_time=to_rfc3339(receipt.scheduled_delivery_time) or UNSET,
        )


class Message(Schema, kw_only=True):
    id: str
    sender: str = field(name="from")
    to: str
    payload: PayloadObject
    created_at: Time | None
    deliver_at: Time | None
    delivered_at: Time | None
    taken_at: Time | None
    state: messages.State
    in_reply_to: str | None
    cause: str | None
    hops: int
    early: bool
    stopped: bool
    option: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    replay_of: str | UnsetType = UNSET
    answer: Answer | UnsetType = UNSET
    rendered: Annotated[
        msgspec.Raw,
        Meta(
            description="The Markdown of `payload.text` as a tree of nodes.",
            extra_json_schema={"type": "array", "items": {"$ref": REFERENCE.format(name="MarkdownNode")}},
        ),
    ]

    @classmethod
    def of(cls, message: messages.Message) -> Self:
        text = message.payload.get("text")
        return cls(
            id=message.id,
            sender=message.sender,
            to=message.to,
            payload=message.payload,
            created_at=to_rfc3339(message.created_at),
            deliver_at=to_rfc3339(message.deliver_at),
            delivered_at=to_rfc3339(message.delivered_at),
            taken_at=to_rfc3339(message.taken_at),
            state=message.state,
            in_reply_to=message.in_reply_to,
            cause=message.cause,
            hops=message.hops,
            early=message.early,
            stopped=message.stopped,
            option=_or_unset(message.option),
            reason=_or_unset(message.reason),
            replay_of=_or_unset(message.replay_of),
            answer=Answer.of(message.answer) if message.answer else UNSET,
            rendered=markdown.render_json(text) if isinstance(text, str) and text else _EMPTY_LIST,
        )

    @classmethod
    def of_all(cls, many: Iterable[messages.Message]) -> list[Self]:
        return [cls.of(message) for message in many]


_EMPTY_LIST = msgspec.Raw(b"[]")


class MessagePage(Schema):
    items: list[Message]
    next: str | None


class DelayedPage(Schema):
    items: list[Message]
    next: str | None
    count: int


def preview(message: messages.Message) -> str:
    return one_line(str(message.payload.get("text", "")), PREVIEW_CHARACTERS)


# Agents


Phase = Literal["starting", "thinking", "tool", "approval", "retry"]
_PHASES: dict[agents.AgentState, Phase] = {
    "ready": "starting",
    "llm": "thinking",
    "tools": "tool",
    "wait_approval": "approval",
    "wait_retry": "retry",
}


class AgentStatus(Schema, kw_only=True):
    """What an agent does now. The store's states of a running turn are one state here, with a phase."""

    state: Literal["idle", "active", "paused", "blocked", "terminated"]
    since: Time | None
    phase: Phase | UnsetType = UNSET
    tool: str | UnsetType = UNSET
    step: Annotated[list[int], Meta(description="Number of the call, from 1, and calls in all.")] | UnsetType = UNSET
    why: str | UnsetType = UNSET

    @classmethod
    def of(cls, agent: agents.Agent) -> Self:
        return cls(**_status(agent))


def _status(agent: agents.Agent) -> dict[str, Any]:
    phase = _PHASES.get(agent.state)
    return {
        "state": "active" if phase else agent.state,
        "since": to_rfc3339(agent.state_since),
        "phase": _or_unset(phase),
        "tool": _or_unset(agent.tool),
        "step": list(agent.tool_position) if agent.tool_position else UNSET,
        "why": _or_unset(agent.state_reason),
    }


class Capabilities(Schema):
    input: list[str]
    output: list[str]
    inferred: bool


class Agent(AgentStatus, kw_only=True):
    id: str
    name: str
    kind: Literal["person"] | UnsetType = UNSET
    service: str | None
    capabilities: Capabilities | None
    parent: str | None
    role: Annotated[str | None, Meta(description="The role it was created with, if any.")]
    waiting: int
    delayed: int
    unread: int | UnsetType = UNSET

    @classmethod
    def in_society(cls, society: Society, agent: agents.Agent, unread: int | None = None) -> Self:
        service, capabilities = None, None
        if agent.kind != "person":
            try:
                service = society.agents.service_of(agent.id).id
                found = society.agents.capabilities_of(agent.id)
            except CoterieError:  # the agent has no model service
                found = INFERRED
            capabilities = Capabilities(input=sorted(found.input), output=sorted(found.output), inferred=found.inferred)
        return cls(
            **_status(agent),
            id=agent.id,
            name=agent.name,
            kind="person" if agent.kind == "person" else UNSET,
            service=service,
            capabilities=capabilities,
            parent=agent.parent,
            role=_decode_profile(agent.profile).role if agent.profile else None,
            waiting=agent.waiting,
            delayed=agent.delayed,
            unread=_or_unset(unread),
        )


class _StoredProfile(Struct):
    role: str | None = None


_decode_profile = msgspec.json.Decoder(_StoredProfile).decode


class AgentPage(Schema):
    items: list[Agent]
    next: str | None


class NewAgent(Schema, kw_only=True):
    id: Annotated[str, Meta(max_length=64)] | None = None
    name: ShortText | None = None
    prompt: Annotated[str, Meta(max_length=200_000)]
    service: str | None = None
    tools: list[str] | None = None
    parent: str | None = None


class SocietyState(Schema):
    paused: Annotated[bool, Meta(description="The whole society is paused: no turn, model call or tool starts.")]


class HistoryCall(Schema):
    id: str
    name: str
    arguments: dict[str, Any]


class HistoryItem(Schema):
    """One entry of an agent's history, under the role that its model sees."""

    seq: int
    turn: int
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    calls: list[HistoryCall] | UnsetType = UNSET
    call_id: str | UnsetType | None = UNSET
    hidden: bool | UnsetType = UNSET
    message_id: str | UnsetType = UNSET
    sender: str | UnsetType = field(name="from", default=UNSET)
    payload: PayloadObject = UNSET

    @classmethod
    def of(cls, row: HistoryRow) -> Self:
        item = cls(seq=row.seq, turn=row.turn_no, role=row.role, content=row.text)  # type: ignore[arg-type]
        if row.role == "assistant" and row.calls:
            item.calls = [HistoryCall(id=call.id, name=call.name, arguments=dict(call.arguments)) for call in row.calls]
        elif row.role == "tool":
            item.call_id = row.call_id
        elif row.role == "user" and (row.hidden or row.message is None):
            item.content, item.hidden = QUARANTINED_NOTE, True
        elif row.role == "user" and row.message:
            item.content = row.message.payload.get("text", "")
            item.message_id, item.sender = row.message.id, row.message.sender
            item.payload = row.message.payload
        return item


class HistoryPage(Schema):
    items: list[HistoryItem]
    next: str | None


# Threads, runs, usage


class Thread(Schema):
    agent: str
    last: Message
    unread: int
    first_unread: str | None

    @classmethod
    def of(cls, thread: store.Thread) -> Self:
        return cls(
            agent=thread.agent_id,
            last=Message.of(thread.last),
            unread=thread.unread,
            first_unread=thread.first_unread,
        )


class Snapshot(Schema):
    """The state at event `seq`. Each list is cut at 200 items; the count beside it is the whole."""

    epoch: str
    seq: int
    server_time: Time
    paused: Annotated[bool, Meta(description="The whole society is paused: no turn, model call or tool starts.")]
    agents: list[Agent]
    agent_count: int
    threads: list[Thread]
    thread_count: int
    queues: list[Message]
    queue_count: int
    delayed: list[Message]
    delayed_count: int
    open_questions: list[Message]
    open_question_count: int


class ReadMark(Schema):
    thread: ShortText
    upto: Annotated[str, Meta(max_length=200, description="The id of the last message that was read.")]


class ReadCount(Schema):
    read: Annotated[int, Meta(description="Messages that were unread before.")]


class ClearedThread(Schema):
    messages: Annotated[int, Meta(description="Messages that were deleted.")]


class ThreadExport(Schema):
    agent: Agent
    exported_at: Time
    messages: list[Message]


class ToolCall(Schema):
    call_id: str
    name: str
    arguments: str
    state: str
    result: str
    started_at: Time | None
    ended_at: Time | None


class Run(Schema):
    """One plan of an agent: what its model wanted to do at one step, and the tool calls."""

    agent: str
    turn: int
    step: int
    text: str
    outcome: Literal["open", "closed", "withdrawn"]
    interrupted_by: str | None
    at: Time
    calls: list[ToolCall]

    @classmethod
    def of(cls, plan: store.PlanRecord) -> Self:
        return cls(
            agent=plan.agent_id,
            turn=plan.turn_no,
            step=plan.step_no,
            text=plan.text,
            outcome=plan.outcome,
            interrupted_by=plan.interrupted_by,
            at=to_rfc3339(plan.at) or "",
            calls=[
                ToolCall(
                    call_id=call.call_id,
                    name=call.name,
                    arguments=call.arguments,
                    state=call.state,
                    result=call.result,
                    started_at=to_rfc3339(call.started_at),
                    ended_at=to_rfc3339(call.ended_at),
                )
                for call in plan.calls
            ],
        )


class RunPage(Schema):
    items: list[Run]
    next: str | None


class Usage(Schema):
    day: str
    agent_id: str = field(name="agent")
    service: str
    requests: int
    withdrawn: int
    input_tokens: int
    output_tokens: int
    estimated_tokens: Annotated[int, Meta(description="Part of both that the service did not report.")]

    @classmethod
    def of(cls, usage: store.Usage) -> Self:
        return cls(**asdict(usage))


class UsagePage(Schema):
    items: list[Usage]
    next: None


# Artifacts


class Artifact(Schema):
    artifact_ref: str
    type: artifacts.ArtifactType
    filename: str
    mime_type: str
    size: int
    created_at: Time

    @classmethod
    def of(cls, artifact: artifacts.Artifact) -> Self:
        return cls(
            artifact_ref=artifact.ref,
            type=artifact.type,
            filename=artifact.filename,
            mime_type=artifact.mime_type,
            size=artifact.size,
            created_at=to_rfc3339(artifact.created_at) or "",
        )


class ArtifactPage(Schema):
    items: list[Artifact]
    next: str | None


# Sessions and health


class SessionCode(Schema):
    code: Annotated[str, Meta(description="From a one-time link.")]


class SessionLink(Schema):
    url: str


class HealthStatus(Schema):
    status: Literal["alive", "ready"]
