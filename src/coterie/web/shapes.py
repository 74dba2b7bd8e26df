"""The shapes on the wire, for /openapi.json. Answers are made in `wire`, and a test holds them against these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Shape(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="allow")


class Receipt(Shape):
    message_id: str
    state: Literal["pending", "queued", "delayed"]
    """`queued`: the recipient is at work and meets it as an interjection."""
    scheduled_delivery_time: str = Field(default="", description="Only when it is delayed.")


class Answer(Shape):
    message_id: str
    option: int | None


class Message(Shape):
    id: str
    from_: str = Field(alias="from")
    to: str
    payload: dict[str, Any]
    created_at: str
    deliver_at: str | None
    delivered_at: str | None
    taken_at: str | None
    state: Literal["delayed", "pending", "taken", "withdrawn", "dead"]
    in_reply_to: str | None
    cause: str | None
    hops: int
    early: bool
    stopped: bool
    option: int | None = None
    reason: str | None = None
    replay_of: str | None = None
    answer: Answer | None = None
    rendered: list[str | dict[str, Any]] = Field(description="The Markdown of `payload.text` as a tree of nodes.")


class Messages(Shape):
    items: list[Message]
    next: str | None


class Delayed(Messages):
    count: int


class Capabilities(Shape):
    input: list[str]
    output: list[str]
    inferred: bool


class Agent(Shape):
    id: str
    name: str
    kind: Literal["person"] | None = None
    state: Literal["idle", "active", "paused", "blocked", "terminated"]
    phase: Literal["starting", "thinking", "tool", "approval", "retry"] | None = None
    tool: str | None = None
    step: list[int] | None = Field(default=None, description="Which call of how many, counted from 1.")
    since: str | None
    why: str | None = None
    service: str | None
    capabilities: Capabilities | None
    parent: str | None
    role: str | None = Field(description="The role it was made after, if it was.")
    waiting: int
    delayed: int
    unread: int | None = None


class Agents(Shape):
    items: list[Agent]
    next: str | None


class NewAgent(Shape):
    model_config = ConfigDict(alias_generator=to_camel, extra="ignore")

    id: str | None = Field(default=None, max_length=64)
    name: str | None = Field(default=None, max_length=200)
    prompt: str = Field(max_length=200_000)
    service: str | None = None
    tools: list[str] | None = None
    parent: str | None = None


class Thread(Shape):
    agent: str
    last: Message
    unread: int
    first_unread: str | None


class SocietyState(Shape):
    paused: bool = Field(description="The whole society is paused: nothing begins.")


class Snapshot(Shape):
    epoch: str
    seq: int
    server_time: str
    paused: bool = Field(description="The whole society is paused: nothing begins.")
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


class Said(Shape):
    seq: int
    turn: int
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class History(Shape):
    items: list[Said]
    next: str | None


class CallRun(Shape):
    call_id: str
    name: str
    arguments: str
    state: str
    result: str
    started_at: str | None
    ended_at: str | None


class Run(Shape):
    agent: str
    turn: int
    step: int
    text: str
    outcome: Literal["open", "closed", "withdrawn"]
    interrupted_by: str | None
    at: str
    calls: list[CallRun]


class Runs(Shape):
    items: list[Run]
    next: str | None


class UsageRow(Shape):
    day: str
    agent: str
    service: str
    requests: int
    withdrawn: int
    input_tokens: int
    output_tokens: int
    estimated_tokens: int
    """Of both; the rest was reported by the service."""


class Usage(Shape):
    items: list[UsageRow]
    next: str | None


class Move(Shape):
    model_config = ConfigDict(alias_generator=to_camel, extra="ignore")

    delay_ms: Any = Field(json_schema_extra={"type": "number"}, description="Milliseconds from now.")


class ReadMark(Shape):
    model_config = ConfigDict(extra="ignore")

    thread: str = Field(max_length=200)
    upto: str = Field(max_length=200, description="The id of the last message that was read.")


class Read(Shape):
    read: int = Field(description="How many messages were new.")


class Cleared(Shape):
    messages: int


class Export(Shape):
    agent: Agent
    exported_at: str
    messages: list[Message]


class NewMessage(Shape):
    """What the person sends. The runtime sets the sender."""

    to: str
    payload: dict[str, Any]
    client_id: str | None = None
    delay_ms: float | None = None
    quick_replies: list[str] | None = None
    in_reply_to: str | None = None
    option: int | None = None


class ProblemFound(Shape):
    place: str
    message: str


class Trial(Shape):
    ok: bool
    code: str
    message: str
    detail: str
    ms: int
    at: str


class Service(Shape):
    id: str
    name: str
    provider: str
    base_url: str = Field(alias="baseURL")
    model: str
    api_key: str | None = Field(description="Masked.")
    capabilities: dict[str, Any]
    problems: list[ProblemFound]
    trial: Trial | None
    used_by: list[str]
    tour: bool


class Services(Shape):
    items: list[Service]
    next: None
    problems: list[ProblemFound]
    offers: list[dict[str, Any]] = Field(description="What was found here and could be set up at once.")
    presets: list[dict[str, Any]] = Field(description="What is known of the usual services; the rest is asked for.")


class Reloaded(Shape):
    problems: list[ProblemFound]
