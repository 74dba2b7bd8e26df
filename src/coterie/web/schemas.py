"""JSON bodies of the HTTP API: each type validates requests, serializes answers and describes itself in /openapi.json.

`X.of(...)` builds an answer from a domain object. A field whose value is `UNSET` is left out of the JSON. The bus
validates messages and answers with error codes of its own, so those request fields accept any JSON value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from coterie import agents, artifacts, messages, store, tasks
from coterie.clock import to_rfc3339
from coterie.errors import CoterieError, Problem
from coterie.llm.service import INFERRED
from coterie.running_configuration import ConfigurationHealth
from coterie.society import Society
from coterie.text import one_line
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


class ErrorText(Schema):
    message: str
    code: Annotated[str, Meta(description="What is wrong with a setting, for programs.")] | UnsetType = UNSET
    values: Annotated[dict[str, str], Meta(description="In the sentence for the code.")] | UnsetType = UNSET
    parts: Annotated[dict[str, list[ErrorText]], Meta(description="The values with a code.")] | UnsetType = UNSET


class ErrorPlace(ErrorText, kw_only=True):
    place: str

    @classmethod
    def of_all(cls, problems: Sequence[Problem]) -> list[Self]:
        return [msgspec.convert(problem.to_dict(), cls) for problem in problems]


class ConfigurationState(Schema):
    """The owner's files as they were last read."""

    applied: Annotated[bool, Meta(description="False: they could not be read. The settings of before stay in use.")]
    problems: list[ErrorPlace]

    @classmethod
    def of(cls, health: ConfigurationHealth) -> Self:
        return cls(applied=health.is_applied, problems=ErrorPlace.of_all(health.problems))


class Answer(Schema):
    """The message that answered a question, and which quick reply it chose; null: free text."""

    message_id: str
    option: int | None
    closed: Annotated[Literal["stopped"], Meta(description="Its task was stopped.")] | UnsetType = UNSET

    @classmethod
    def of(cls, answer: messages.QuestionAnswer) -> Self:
        return msgspec.convert(answer.to_dict(), cls)


class ProblemDocument(Schema):
    """Every error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: Annotated[str, Meta(description="One sentence for people.")]
    code: Annotated[str, Meta(description="For programs.")]
    id: Annotated[str, Meta(description="`internal_error`: the incident's id in the log.")] | UnsetType = UNSET
    places: Annotated[list[ErrorPlace], Meta(description="`request_invalid`: wrong fields.")] | UnsetType = UNSET
    problems: Annotated[list[ErrorPlace], Meta(description="A refused change: wrong settings.")] | UnsetType = UNSET
    answer: Annotated[Answer, Meta(description="`already_answered`: the answer that counts.")] | UnsetType = UNSET


class OpenAIError(Schema, rename="lower"):
    message: Annotated[str, Meta(description="One sentence for people.")]
    type: str
    param: str | None
    code: Annotated[str | None, Meta(description="For programs.")]


class OpenAIErrorDocument(Schema, rename="lower"):
    """Every error below /v1, in the form of OpenAI's API."""

    error: OpenAIError


# Messages


class Attachment(Schema):
    """A file of a message. A request needs only `artifactRef`; the runtime fills in the rest."""

    artifact_ref: str
    filename: str | UnsetType | None = UNSET
    type: artifacts.ArtifactType | UnsetType = UNSET
    mime_type: str | UnsetType = UNSET
    size: int | UnsetType = UNSET


class BudgetUsed(Schema):
    turns: int
    input_tokens: int
    output_tokens: int
    cost: float | None
    model_ms: int


class BudgetRequest(Schema):
    """The question whether a task may go on. Quick reply 0 grants one more budget, 1 stops the task."""

    task: str
    reason: tasks.BudgetReason
    limit: float
    about: str
    agents: Annotated[list[str], Meta(description="Names of the agents that worked on it.")]
    used: BudgetUsed


class ApprovalRequest(Schema):
    """A tool call to approve. Quick reply 0 approves it, 1 denies it."""

    call_id: str
    tool: str
    arguments: Annotated[dict[str, Any], Meta(description="All of them, or how they begin and then `argumentsRef`.")]
    arguments_ref: Annotated[str, Meta(description="The artifact that has all arguments.")] | UnsetType = UNSET
    arguments_sha256: str | UnsetType = UNSET


class AgentProblem(Schema):
    """Why an agent is blocked or waits for a retry, for clients with a language of their own."""

    category: Annotated[
        str,
        Meta(
            description="auth, quota, daily_limit, rate_limit, network, timeout, server, malformed, model, request,"
            " context_length, content, no_service, no_agent, silent, runtime, budget, damaged"
        ),
    ]
    service: str | UnsetType = UNSET
    status: Annotated[int, Meta(description="HTTP status of the model service.")] | UnsetType = UNSET
    retry_at: Time | UnsetType = UNSET


class ProblemNotice(AgentProblem):
    """Which agent cannot go on, and why."""

    agent: str | UnsetType = UNSET


class Payload(Schema):
    """The content of a message. Senders may add fields of their own."""

    text: str | UnsetType = UNSET
    attachments: list[Attachment] | UnsetType = UNSET
    quick_replies: list[str] | UnsetType = UNSET
    approval: ApprovalRequest | UnsetType = UNSET
    budget: BudgetRequest | UnsetType = UNSET
    problem: Annotated[ProblemNotice, Meta(description="On a notice of the runtime.")] | UnsetType = UNSET


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
    every: Annotated[
        Any,
        Meta(
            extra_json_schema={"type": ["string", "null"]},
            description='Makes it recurring: "15m", "daily 08:00", "weekdays 08:00", "mon,thu 18:30", "monthly 1 09:00"'
            " or five cron fields. With `delayMs`: from then on.",
        ),
    ] = None
    time_zone: Annotated[
        Any,
        Meta(
            extra_json_schema={"type": ["string", "null"]},
            description="With `every`: an IANA name such as Europe/Berlin; the server's time zone if left out.",
        ),
    ] = None
    unless_answered: Annotated[
        Any,
        Meta(
            extra_json_schema={"type": ["string", "null"]},
            description="With `delayMs`: the id of a message of the person to an agent; an answer to it withdraws this"
            " message.",
        ),
    ] = None
    in_reply_to: Annotated[Any, Meta(extra_json_schema={"type": ["string", "null"]})] = None
    option: Annotated[Any, Meta(extra_json_schema={"type": ["integer", "null"]})] = None
    asks_back: Annotated[
        Any,
        Meta(
            extra_json_schema={"type": ["boolean", "null"]},
            description="With `inReplyTo`, an approval question: the agent answers this message, and its call keeps"
            " waiting for the decision. Without it, a message cancels the call.",
        ),
    ] = None


class NewDelay(Schema):
    delay_ms: Annotated[Any, Meta(extra_json_schema={"type": "number"}, description="Milliseconds from now.")]


class Receipt(Schema):
    message_id: str
    state: Annotated[
        Literal["pending", "queued", "delayed", "withdrawn"],
        Meta(
            description="`queued`: the recipient is working and reads the message at its next step. `withdrawn`:"
            " it is not delivered: the question of `unlessAnswered` is answered, or it stopped its task."
        ),
    ]
    task: Annotated[str, Meta(description="The task that it belongs to; its own id if it starts one.")]
    scheduled_delivery_time: Annotated[Time, Meta(description="Only when delayed.")] | UnsetType = UNSET
    schedule_id: Annotated[str, Meta(description="Only when recurring.")] | UnsetType = UNSET

    @classmethod
    def of(cls, receipt: messages.Receipt) -> Self:
        return msgspec.convert(receipt.to_dict(), cls)


Rendered = Annotated[
    msgspec.Raw,
    Meta(
        description="The Markdown of the text as a tree of nodes.",
        extra_json_schema={"type": "array", "items": {"$ref": REFERENCE.format(name="MarkdownNode")}},
    ),
]


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
    task: Annotated[str, Meta(description="The task that it belongs to: the id of the task's first message.")]
    parent_task: (
        Annotated[str, Meta(description="The task that scheduled it. It starts a task of its own when it is due.")]
        | UnsetType
    ) = UNSET
    unless_answered: Annotated[str, Meta(description="An answer to this message withdraws it.")] | UnsetType = UNSET
    via: Annotated[str, Meta(description="The key with which a program sent it.")] | UnsetType = UNSET
    hops: int
    early: bool
    stopped: Annotated[bool, Meta(description="The person stopped the agent in the middle of this answer.")]
    cut_off: (
        Annotated[messages.CutOff, Meta(description="The model service ended the answer before it was complete.")]
        | UnsetType
    ) = UNSET
    option: int | UnsetType = UNSET
    asks_back: (
        Annotated[bool, Meta(description="It asks about a call that needs approval, and does not decide.")] | UnsetType
    ) = UNSET
    reason: str | UnsetType = UNSET
    replay_of: str | UnsetType = UNSET
    answer: Answer | UnsetType = UNSET
    schedule_id: Annotated[str, Meta(description="The recurring message that it is part of.")] | UnsetType = UNSET
    every: Annotated[str, Meta(description="Its recurrence, with the time zone.")] | UnsetType = UNSET
    missed: (
        Annotated[int, Meta(description="Due times that passed without a delivery; it stands for them.")] | UnsetType
    ) = UNSET
    rendered: Rendered

    @classmethod
    def of(cls, message: messages.Message) -> Self:
        text = message.payload.get("text")
        rendered = markdown.render_json(text) if isinstance(text, str) and text else EMPTY_LIST
        return msgspec.convert(message.to_dict() | {"rendered": rendered}, cls)

    @classmethod
    def of_all(cls, many: Iterable[messages.Message]) -> list[Self]:
        return [cls.of(message) for message in many]


EMPTY_LIST = msgspec.Raw(b"[]")


class MessagePage(Schema):
    items: list[Message]
    next: str | None


class DelayedPage(Schema):
    items: list[Message]
    next: str | None
    count: int


class Schedule(Schema, kw_only=True):
    """A recurring message. `messageId` is its next delayed message, which can be moved or withdrawn by itself."""

    id: str
    sender: str = field(name="from")
    to: str
    payload: PayloadObject
    every: Annotated[str, Meta(description="The recurrence with its time zone: `weekdays 08:00 Europe/Berlin`.")]
    state: messages.ScheduleState
    created_at: Time | None
    message_id: str
    deliver_at: Annotated[Time | None, Meta(description="When the next one is due by the recurrence; null: never.")]
    next_at: Annotated[Time | None, Meta(description="When the next one is delivered, also if it was moved itself.")]

    @classmethod
    def of(cls, schedule: messages.Schedule) -> Self:
        return msgspec.convert(schedule.to_dict(), cls)


class SchedulePage(Schema):
    items: list[Schedule]
    next: str | None


class ScheduleChange(Schema):
    """Fields left out stay as they are."""

    every: Annotated[Any, Meta(extra_json_schema={"type": ["string", "null"]})] = None
    time_zone: Annotated[Any, Meta(extra_json_schema={"type": ["string", "null"]})] = None
    paused: bool | None = None
    delay_ms: Annotated[
        Any,
        Meta(
            extra_json_schema={"type": ["number", "null"]},
            description="The next one is the first that is due no earlier than so many milliseconds from now; of an"
            " interval, the one due then. Of a paused one, only together with `paused: false`.",
        ),
    ] = None


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


_decode_problem = msgspec.json.Decoder(AgentProblem).decode


class AgentStatus(Schema, kw_only=True):
    """What an agent does now. The store's states of a running turn are one state here, with a phase."""

    state: Literal["idle", "active", "paused", "blocked", "terminated"]
    since: Time | None
    phase: Phase | UnsetType = UNSET
    tool: str | UnsetType = UNSET
    step: Annotated[list[int], Meta(description="Number of the call, from 1, and calls in all.")] | UnsetType = UNSET
    why: str | UnsetType = UNSET
    problem: AgentProblem | UnsetType = UNSET

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
        "problem": _decode_problem(agent.problem) if agent.problem and agent.state_reason else UNSET,
    }


class Capabilities(Schema):
    input: list[str]
    output: list[str]
    inferred: bool


class Agent(AgentStatus, kw_only=True):
    id: str
    name: str
    description: Annotated[str, Meta(description="What it is for; empty if there is no description.")]
    kind: Literal["person"] | UnsetType = UNSET
    service: str | None
    capabilities: Capabilities | None
    parent: str | None
    role: Annotated[str | None, Meta(description="The role it was created with, or as the owner named it, if any.")]
    colour: Annotated[agents.AgentColour | None, Meta(description="Of its initials; null: chosen by the id.")]
    initials: Annotated[str, Meta(description="Empty: the first letters of its name.")]
    retired: Annotated[bool, Meta(description="Removed from the configuration: it keeps its mail and does not answer.")]
    remote: Annotated[bool, Meta(description="It runs elsewhere and is reached over A2A.")]
    position: Annotated[int, Meta(description="Its number in the order of coterie.toml, from 0.")] | UnsetType = UNSET
    waiting: int
    delayed: int
    unread: int | UnsetType = UNSET
    worker: (
        Annotated[str | None, Meta(description="The process that runs its turn, `host/pid`; `gone` if it has ended.")]
        | UnsetType
    ) = UNSET

    @classmethod
    def in_society(
        cls,
        society: Society,
        agent: agents.Agent,
        unread: int | None = None,
        worker: str | UnsetType | None = UNSET,
    ) -> Self:
        service, capabilities, description = None, None, ""
        profile, retired, remote = None, False, False
        if agent.kind != "person":
            try:
                description = society.agents.description_of(agent.id)
                profile = society.agents.find(agent.id)
                retired = profile is None and agent.state != "terminated"
                used = society.agents.service_of(agent.id)
                service, remote = used.id, used.is_remote_agent
                found = society.agents.capabilities_of(agent.id)
            except CoterieError:  # the agent has no model service
                found = INFERRED
            capabilities = Capabilities(input=sorted(found.input), output=sorted(found.output), inferred=found.inferred)
        return cls(
            **_status(agent),
            id=agent.id,
            name=agent.name,
            description=description,
            kind="person" if agent.kind == "person" else UNSET,
            service=service,
            capabilities=capabilities,
            parent=agent.parent,
            role=_decode_profile(agent.profile).role if agent.profile else profile.role if profile else None,
            colour=profile.colour if profile else None,
            initials=profile.initials if profile else "",
            retired=retired,
            remote=remote,
            position=next((at for at, one in enumerate(society.config.all_agents) if one.id == agent.id), UNSET),
            waiting=agent.waiting,
            delayed=agent.delayed,
            unread=_or_unset(unread),
            worker=worker,
        )


class _StoredProfile(Struct):
    role: str | None = None


_decode_profile = msgspec.json.Decoder(_StoredProfile).decode


class AgentPage(Schema):
    items: list[Agent]
    next: str | None


class Worker(Schema):
    """A process that runs the society."""

    name: Annotated[str, Meta(description="`host/pid`.")]
    since: Time
    seen_at: Time
    claims: Annotated[int, Meta(description="Agents at work in it.")]
    heartbeats: int
    fenced_writes: int
    lease_takeovers: int

    @classmethod
    def of(cls, worker: store.Worker) -> Self:
        return cls(
            name=worker.name,
            since=to_rfc3339(worker.since) or "",
            seen_at=to_rfc3339(worker.seen_at) or "",
            claims=worker.claims,
            heartbeats=worker.heartbeats,
            fenced_writes=worker.fenced,
            lease_takeovers=worker.takeovers,
        )


class WorkerPage(Schema):
    items: list[Worker]
    next: None


class NewAgent(Schema, kw_only=True):
    id: Annotated[str, Meta(max_length=64)] | None = None
    name: ShortText | None = None
    prompt: Annotated[str, Meta(max_length=200_000)]
    description: Annotated[str, Meta(max_length=agents.MAX_DESCRIPTION, description="What it is for.")] = ""
    service: str | None = None
    tools: list[str] | None = None
    parent: str | None = None


class SocietyState(Schema):
    paused: Annotated[bool, Meta(description="The whole society is paused: no turn, model call or tool starts.")]


# Threads


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


class ReadMark(Schema):
    thread: ShortText
    upto: Annotated[str, Meta(max_length=200, description="The id of the last message that was read.")]


class UnreadMark(Schema):
    thread: ShortText
    since: Annotated[str, Meta(max_length=200, description="The id of the first message that is unread again.")] = (
        field(name="from")
    )


class UnreadCount(Schema):
    unread: Annotated[int, Meta(description="Messages that were read before.")]


class ReadCount(Schema):
    read: Annotated[int, Meta(description="Messages that were unread before.")]


class ClearedThread(Schema):
    messages: Annotated[int, Meta(description="Messages that were deleted.")]


class ThreadExport(Schema):
    agent: Agent
    exported_at: Time
    messages: list[Message]


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
