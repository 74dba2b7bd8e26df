"""The tools of the MCP server: arguments, results and descriptions. `calls` executes those that wait for agents."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import mcp.types as types
import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from coterie import messages
from coterie.artifacts import Artifact
from coterie.clock import to_rfc3339
from coterie.errors import Refused
from coterie.llm.service import Direction
from coterie.messages import MAX_QUICK_REPLIES
from coterie.task_following import TaskOutcome, is_open_question
from coterie.tasks import TaskState
from coterie.web import schemas, task_schemas

DEFAULT_WAIT_SECONDS = 45.0
"""Less than the 60 seconds after which many clients give up and cancel a call."""
MAX_WAIT_SECONDS = 3600.0
MAX_READ_BYTES = 4_000_000
"""The largest file that a result contains. Larger ones: GET /api/v1/artifacts/REF."""
URI = "coterie://artifacts/"
MAX_LISTED = 200

Text = Annotated[str, Meta(max_length=messages.MAX_PAYLOAD_BYTES)]
AgentId = Annotated[str, Meta(max_length=64, description="Id of an agent, from list_agents.")]
MessageId = Annotated[str, Meta(max_length=200)]
Wait = Annotated[
    float,
    Meta(
        ge=0,
        le=MAX_WAIT_SECONDS,
        description="Wait at most this many seconds until nothing of the task runs any more. 0: do not wait.",
    ),
]


class Schema(Struct, rename="camel", kw_only=True):
    """Arguments or result of a tool. Not a `schemas.Schema`, because the HTTP API does not have it."""


# Arguments


class ListAgents(Schema, forbid_unknown_fields=True):
    pass


class FindAgents(Schema, forbid_unknown_fields=True):
    capability: Annotated[str, Meta(max_length=100, description="Such as vision, audio, text or tool_calling.")]
    direction: Annotated[Direction, Meta(description="What the model can read, or what it can produce.")] = "input"


class Send(Schema, forbid_unknown_fields=True):
    agent: AgentId
    text: Text
    attachments: Annotated[
        list[str], Meta(max_length=50, description="Artifact references, from put_artifact or an earlier message.")
    ] = msgspec.field(default_factory=list)
    quick_replies: Annotated[
        list[str], Meta(max_length=MAX_QUICK_REPLIES, description="Answers that you offer to the agent.")
    ] = msgspec.field(default_factory=list)
    delay_ms: Annotated[float, Meta(ge=0, description="Deliver it so many milliseconds from now.")] = 0
    wait_seconds: Wait | None = None
    key: (
        Annotated[
            str, Meta(max_length=200, description="The same key sends the message once, however often it is repeated.")
        ]
        | None
    ) = None


class ReadInbox(Schema, forbid_unknown_fields=True):
    agent: Annotated[str, Meta(max_length=64, description="Only messages from this agent.")] | None = None
    after: Annotated[MessageId, Meta(description="Only messages after this one.")] | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED)] = 20
    mark_read: Annotated[
        bool, Meta(description="Do not list them as unread again. A program with a key marks nothing: use `after`.")
    ] = True


class AnswerQuestion(Schema, forbid_unknown_fields=True):
    question: Annotated[MessageId, Meta(description="Id of the message that asks.")]
    option: Annotated[int, Meta(ge=0, description="Index of the chosen option, from 0.")] | None = None
    text: Annotated[Text, Meta(description="An answer in your own words.")] | None = None
    wait_seconds: Wait | None = None


class TaskStatus(Schema, forbid_unknown_fields=True):
    task: Annotated[MessageId, Meta(description="Id of a task, or of any of its messages.")]
    tree: Annotated[bool, Meta(description="Also all messages between agents, turns and tool calls.")] = False
    wait_seconds: Wait = 0


class ListTasks(Schema, forbid_unknown_fields=True):
    state: TaskState | None = None
    agent: Annotated[str, Meta(max_length=64)] | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED)] = 20


class StopTask(Schema, forbid_unknown_fields=True):
    task: Annotated[MessageId, Meta(description="Id of a task, or of any of its messages.")]


class ReadArtifact(Schema, forbid_unknown_fields=True):
    artifact_ref: Annotated[MessageId, Meta(description="From an attachment or a resource.")]


class PutArtifact(Schema, forbid_unknown_fields=True):
    filename: Annotated[str, Meta(max_length=255)]
    text: Annotated[str | None, Meta(description="The content of a text file.")] = None
    base64: Annotated[str | None, Meta(description="The content of any other file.")] = None


# Results


class AgentList(Schema):
    agents: list[schemas.Agent]


class AgentMessage(Schema, kw_only=True):
    """A message to the person."""

    id: str
    sender: str = msgspec.field(name="from")
    text: str
    created_at: str
    task: str
    in_reply_to: str | None
    attachments: list[schemas.Attachment] = msgspec.field(default_factory=list)
    options: Annotated[list[str], Meta(description="Quick replies that it offers.")] = msgspec.field(
        default_factory=list
    )
    is_open: Annotated[bool, Meta(description="It is a question without an answer.")] = False

    @classmethod
    def of(cls, message: messages.Message) -> AgentMessage:
        payload = message.payload
        return cls(
            id=message.id,
            sender=message.sender,
            text=str(payload.get("text", "")),
            created_at=to_rfc3339(message.created_at) or "",
            task=message.task or message.id,
            in_reply_to=message.in_reply_to,
            attachments=msgspec.convert(payload.get("attachments") or [], list[schemas.Attachment]),
            options=list(payload.get("quickReplies") or ()),
            is_open=is_open_question(message),
        )


class Sent(Schema, kw_only=True):
    """A message and what came of it."""

    message_id: str
    task: str
    state: Annotated[
        Literal["working", "waiting", "done", "failed", "stopped", "delayed", "lost"],
        Meta(description="`waiting`: an agent asks. `lost`: the message will not be read."),
    ]
    answer: Annotated[str | None, Meta(description="The newest text to you; null: none yet.")]
    messages: Annotated[list[AgentMessage], Meta(description="Everything that was sent to you for it, in order.")]
    problem: Annotated[str, Meta(description="Who has to act before it goes on.")] | UnsetType = UNSET
    deliver_at: str | UnsetType = UNSET


class Inbox(Schema):
    messages: list[AgentMessage]
    more: Annotated[bool, Meta(description="There are more unread ones.")]


class Status(Schema, kw_only=True):
    task: task_schemas.Task
    messages: Annotated[list[AgentMessage], Meta(description="What was sent to you for it, in order.")]
    nodes: Annotated[
        list[Any],
        Meta(description="With `tree`: messages and turns in the order of time, as GET /api/v1/tasks/ID has them."),
    ] = msgspec.field(default_factory=list)
    problem: str | UnsetType = UNSET


class TaskList(Schema):
    tasks: list[task_schemas.Task]


class StoredArtifact(Schema):
    artifact_ref: str
    uri: str
    filename: str
    mime_type: str
    size: int

    @classmethod
    def of(cls, artifact: Artifact) -> StoredArtifact:
        return cls(
            artifact_ref=artifact.ref,
            uri=URI + artifact.ref,
            filename=artifact.filename,
            mime_type=artifact.mime_type,
            size=artifact.size,
        )


# The table


class ToolEntry(Struct, frozen=True, kw_only=True):
    name: str
    title: str
    description: str
    arguments: type[Schema]
    result: type[Struct]
    is_read_only: bool = False
    is_idempotent: bool = False
    is_destructive: bool = False


TOOLS: Mapping[str, ToolEntry] = {
    entry.name: entry
    for entry in (
        ToolEntry(
            name="list_agents",
            title="List agents",
            description="List the agents that you can send messages to: what each is for, what it does now, and what"
            " its model can read and produce.",
            arguments=ListAgents,
            result=AgentList,
            is_read_only=True,
        ),
        ToolEntry(
            name="find_agents",
            title="Find agents by capability",
            description="List the agents whose model has a capability, such as vision.",
            arguments=FindAgents,
            result=AgentList,
            is_read_only=True,
        ),
        ToolEntry(
            name="send",
            title="Send a message",
            description="Send a message to an agent and wait for what comes of it. The agent remembers the"
            " conversation, so send only what is new. Agents may ask other agents; all of this is one task. If the"
            " time is over, the work goes on: ask for it with task_status. If an agent asks something, answer with"
            " answer_question. The same call again, before its answer was returned, waits for the same message and"
            " does not send it twice.",
            arguments=Send,
            result=Sent,
        ),
        ToolEntry(
            name="read_inbox",
            title="Read unread messages",
            description="Read the unread messages that agents have sent, oldest first.",
            arguments=ReadInbox,
            result=Inbox,
        ),
        ToolEntry(
            name="answer_question",
            title="Answer a question",
            description="Answer a question of an agent, by one of its options or in other words, and wait for what"
            " comes of it.",
            arguments=AnswerQuestion,
            result=Sent,
            is_idempotent=True,
        ),
        ToolEntry(
            name="task_status",
            title="Get a task",
            description="Get the state of a task, what it has used and what was sent to you. It can wait until the"
            " task no longer works.",
            arguments=TaskStatus,
            result=Status,
            is_read_only=True,
        ),
        ToolEntry(
            name="list_tasks",
            title="List tasks",
            description="List tasks, newest first.",
            arguments=ListTasks,
            result=TaskList,
            is_read_only=True,
        ),
        ToolEntry(
            name="stop_task",
            title="Stop a task",
            description="Stop everything that runs or would run for a task. What tools have done stays done.",
            arguments=StopTask,
            result=task_schemas.StoppedTask,
            is_idempotent=True,
            is_destructive=True,
        ),
        ToolEntry(
            name="read_artifact",
            title="Read a file",
            description="Read a file that an agent made or that was attached to a message.",
            arguments=ReadArtifact,
            result=StoredArtifact,
            is_read_only=True,
        ),
        ToolEntry(
            name="put_artifact",
            title="Store a file",
            description="Store a file, to attach it to a message with send. Give either text or base64.",
            arguments=PutArtifact,
            result=StoredArtifact,
        ),
    )
}


def list_tools() -> list[types.Tool]:
    return [
        types.Tool(
            name=entry.name,
            title=entry.title,
            description=entry.description,
            input_schema=_object_schema(entry.arguments),
            output_schema=_object_schema(entry.result),
            annotations=types.ToolAnnotations(
                read_only_hint=entry.is_read_only,
                destructive_hint=entry.is_destructive,
                idempotent_hint=entry.is_idempotent or entry.is_read_only,
                open_world_hint=entry.name in ("send", "answer_question"),
            ),
        )
        for entry in TOOLS.values()
    ]


def _object_schema(kind: type[Struct]) -> dict[str, Any]:
    """The JSON schema of a struct, with `type: object` at the root, as MCP demands."""
    schema = msgspec.json.schema(kind)
    definitions = schema.get("$defs", {})
    root = dict(definitions.pop(schema["$ref"].rpartition("/")[2])) if "$ref" in schema else dict(schema)
    root.pop("title", None)
    root.pop("description", None)
    return root | ({"$defs": definitions} if definitions else {})


def parse_arguments(entry: ToolEntry, arguments: Mapping[str, Any] | None) -> Any:
    """`Refused("payload_invalid")` names the argument and what it must be."""
    try:
        return msgspec.convert(arguments or {}, entry.arguments)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        place = where.rstrip("`").lstrip(".")
        where = f"{place}: " if place else ""
        raise Refused("payload_invalid", f"wrong arguments for {entry.name}: {where}{what}") from error


# Results as content


def structured(value: Struct, *blocks: types.ContentBlock, is_error: bool = False) -> types.CallToolResult:
    """A result for programs and, in `blocks`, for models. Without blocks: the same JSON as text."""
    data = msgspec.to_builtins(value)
    content = list(blocks) or [text_block(msgspec.json.encode(value).decode())]
    return types.CallToolResult(content=content, structured_content=data, is_error=is_error)


def failure(error: Refused) -> types.CallToolResult:
    return types.CallToolResult(content=[text_block(f"{error.message} ({error.code})")], is_error=True)


def text_block(text: str) -> types.TextContent:
    return types.TextContent(type="text", text=text)


def sent_result(message: messages.Message, outcome: TaskOutcome) -> types.CallToolResult:
    received = [AgentMessage.of(one) for one in outcome.messages]
    sent = Sent(
        message_id=message.id,
        task=message.task or message.id,
        state=outcome.state,
        answer=received[-1].text if received else None,
        messages=received,
        problem=outcome.problem or UNSET,
        deliver_at=to_rfc3339(message.deliver_at) or UNSET if outcome.state == "delayed" else UNSET,
    )
    return structured(
        sent, *message_blocks(received), text_block(_explain(sent)), is_error=outcome.state in ("failed", "lost")
    )  # fmt: skip


def message_blocks(received: Sequence[AgentMessage]) -> list[types.ContentBlock]:
    """The messages as a model reads them, then links to their files."""
    blocks: list[types.ContentBlock] = []
    for one in received:
        name = f"{one.sender}: " if len(received) > 1 else ""
        options = "".join(f"\n{index}. {option}" for index, option in enumerate(one.options))
        asks = f"\n(answer_question with question {one.id} and an option from 0)" if one.is_open else ""
        blocks.append(text_block(f"{name}{one.text}{options}{asks}"))
        blocks += [
            types.ResourceLink(
                type="resource_link",
                name=str(file.filename or file.artifact_ref),
                uri=URI + file.artifact_ref,
                mime_type=file.mime_type or None,
                size=file.size or None,
            )
            for file in one.attachments
        ]
    return blocks


def _explain(sent: Sent) -> str:
    match sent.state:
        case "working":
            reason = sent.problem or "agents are still at work"
            return f"[{reason}; task_status with task {sent.task} waits for more]"
        case "delayed":
            return f"[delivered at {sent.deliver_at}; message {sent.message_id}]"
        case "lost":
            return f"[{sent.problem}]"
    return f"[task {sent.task}: {sent.state}]"


def decode_content(args: PutArtifact) -> bytes:
    if (args.text is None) == (args.base64 is None):
        raise Refused("payload_invalid", "give either text or base64")
    if args.text is not None:
        return args.text.encode("utf-8", "replace")
    try:
        return base64.b64decode(args.base64 or "", validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused("payload_invalid", f"base64 cannot be decoded: {error}") from error
