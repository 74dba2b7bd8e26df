"""`/v1/models` and `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal, cast

from msgspec import UNSET, Meta, UnsetType, convert
from starlette.requests import Request
from starlette.responses import Response

from coterie.agents import Agent
from coterie.clock import to_ms
from coterie.errors import Refused
from coterie.messages import Message, Receipt
from coterie.society import Society
from coterie.task_following import Delta, Piece, Progress, Said, Silence, Superseded, TaskStream
from coterie.tasks import Task
from coterie.web.auth import CallerDep
from coterie.web.caller_scope import CallerScope
from coterie.web.errors import OPENAI
from coterie.web.openai.answering import (
    DONE_FRAME,
    KEEP_ALIVE_FRAME,
    AnswerStream,
    FollowingDep,
    Outcome,
    answer_or_stop,
    collect,
    follow,
    frame,
    is_failure_report,
    record,
    stop_on_disconnect,
    unsent_text,
    wants_stop,
)
from coterie.web.openai.asking import Ask, AskingDep, find_model, unknown_model
from coterie.web.openai.content import answer_text, extra_fields, read_message
from coterie.web.openapi import openai_problems
from coterie.web.routing import ClockDep, Header, Id, Router, SocietyDep, json_response
from coterie.web.schemas import Attachment, Schema

router = Router(prefix=OPENAI, tags=["OpenAI"], responses=openai_problems(401, 403, 404, 421, 429, 500, 503))
CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "object", "properties": {"type": {"type": "string"}}}},
    ]
}
MESSAGES_SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": {"role": {"type": "string"}, "content": CONTENT_SCHEMA}},
}
TOOLS_SCHEMA = {"type": ["array", "null"], "items": {"type": "object", "properties": {"type": {"type": "string"}}}}
CHOICE_SCHEMA = {"type": ["string", "object", "null"]}
OBJECT_SCHEMA = {"type": ["object", "null"]}


class OpenAISchema(Schema, rename="lower"):
    """Names with underscores, as OpenAI writes them."""


class Model(OpenAISchema, kw_only=True):
    """An agent."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "coterie"
    name: str
    description: str


class ModelList(OpenAISchema, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class ChatRequest(OpenAISchema, kw_only=True):
    """Fields of OpenAI that are not here are accepted and ignored: an agent has its own settings and tools."""

    model: Annotated[Any, Meta(extra_json_schema={"type": "string"}, description="Id of an agent.")] = None
    messages: Annotated[
        Any,
        Meta(
            extra_json_schema=MESSAGES_SCHEMA,
            description="Only what is new since an earlier request reaches the agent.",
        ),
    ] = None
    stream: bool | None = None
    stream_options: Annotated[Any, Meta(extra_json_schema=OBJECT_SCHEMA)] = None
    n: int | None = None
    user: str | None = None
    metadata: Annotated[
        Any,
        Meta(
            extra_json_schema=OBJECT_SCHEMA,
            description="`conversation`: a name for the conversation; then all after the last answer is new.",
        ),
    ] = None
    tools: Annotated[Any, Meta(extra_json_schema=TOOLS_SCHEMA, description="Ignored: an agent has its own.")] = None
    functions: Annotated[Any, Meta(extra_json_schema=TOOLS_SCHEMA, description="Ignored.")] = None
    tool_choice: Annotated[
        Any, Meta(extra_json_schema=CHOICE_SCHEMA, description="`required` and the name of a tool are refused.")
    ] = None
    response_format: Annotated[Any, Meta(extra_json_schema=OBJECT_SCHEMA, description="Only the type `text`.")] = None
    coterie: Annotated[
        Any,
        Meta(
            extra_json_schema=OBJECT_SCHEMA,
            description='`{"on_disconnect": "stop"}` stops the task when the client goes away.',
        ),
    ] = None


class ChatMessage(OpenAISchema, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(OpenAISchema, kw_only=True):
    index: int = 0
    message: ChatMessage
    finish_reason: Literal["stop", "length", "content_filter"]
    logprobs: None = None


class TokenDetails(OpenAISchema, kw_only=True):
    cached_tokens: int


class CompletionUsage(OpenAISchema, kw_only=True):
    """Tokens of all requests to models that the task has needed so far, by all agents."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails

    @classmethod
    def of(cls, task: Task) -> CompletionUsage:
        return cls(
            prompt_tokens=task.input_tokens,
            completion_tokens=task.output_tokens,
            total_tokens=task.input_tokens + task.output_tokens,
            prompt_tokens_details=TokenDetails(cached_tokens=task.cached_tokens),
        )


class Extra(OpenAISchema, kw_only=True):
    """What OpenAI's format has no fields for."""

    task: Annotated[str, Meta(description="The task, as in /api/v1/tasks.")]
    state: str
    messages: Annotated[list[str], Meta(description="Ids of the messages that the answer consists of.")]
    quick_replies: Annotated[list[str], Meta(description="Also at the end of the text, numbered from 1.")]
    question: Annotated[str | None, Meta(description="The message with the quick replies.")]
    files: list[Attachment]
    problem: Annotated[str, Meta(description="Who has to act before the task goes on.")] | UnsetType = UNSET
    ignored: Annotated[list[str], Meta(description="Fields of the request that have no effect here.")] | UnsetType = (
        UNSET
    )


class ChatCompletion(OpenAISchema, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: CompletionUsage
    coterie: Extra


@router.get("/models", summary="List the agents that the caller may reach, as models")
async def list_models(society: SocietyDep, caller: CallerDep) -> ModelList:
    return ModelList(data=[_model(society, agent) for agent in await CallerScope(society, caller).offered_agents()])


@router.get("/models/{model}", summary="Get an agent, as a model")
async def get_model(model: str, society: SocietyDep, caller: CallerDep) -> Model:
    agent = await society.store.agent(model) if caller.may_reach(model) else None
    if agent is None or agent.kind != "agent" or agent.state == "terminated":
        raise unknown_model()
    return _model(society, agent)


def _model(society: Society, agent: Agent) -> Model:
    return Model(id=agent.id, name=agent.name, description=society.agents.description_of(agent.id))


@router.post(
    "/chat/completions",
    summary="Ask an agent",
    responses={
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
        **openai_problems(400, 402, 409, 413, 415, 502, 507),
    },
)
async def create_chat_completion(
    request: Request,
    body: ChatRequest,
    society: SocietyDep,
    caller: CallerDep,
    clock: ClockDep,
    asking: AskingDep,
    following: FollowingDep,
    idempotency_key: Annotated[Id | None, Header()] = None,
) -> ChatCompletion | Response:
    """The answer comes when everything that the request set off has ended, or when an agent asks something.

    The same body, or the same `Idempotency-Key`, asks once: while it is worked on, and for a minute after the answer.
    """
    ignored = check_options(body.n, body.tools or body.functions, body.tool_choice, body.response_format)
    wants_usage = isinstance(body.stream_options, dict) and bool(body.stream_options.get("include_usage"))
    stops = wants_stop(body.coterie)
    if not isinstance(body.messages, list):
        raise Refused("payload_invalid", "messages: expected a list of messages", param="messages")
    ask = Ask(
        agent_id=find_model(body.model),
        messages=[read_message(one, f"messages[{index}]") for index, one in enumerate(body.messages)],
        conversation=conversation_of(body.metadata),
        user=body.user or "",
        idempotency_key=idempotency_key or "",
    )
    created = to_ms(clock.now()) // 1000
    if body.stream:
        sent = (await asking.ask(caller, ask)).receipt
        writer = _ChunkWriter(ask.agent_id, sent, created, ignored, wants_usage=wants_usage)
        on_disconnect = stop_on_disconnect(society, stops, sent)
        return AnswerStream(writer.frames(following.stream(ask.agent_id)), on_disconnect)
    with following.stream(ask.agent_id, with_text=False) as stream:
        asked = await asking.ask(caller, ask, stream)
        pieces = stream.follow(asked.receipt, is_new=asked.is_new)
        on_disconnect = stop_on_disconnect(society, stops, asked.receipt)
        outcome = await answer_or_stop(request, collect(pieces), on_disconnect)
    return _completion(outcome, ask.agent_id, asked.receipt, ignored, created)


def check_options(n: int | None, tools: Any, tool_choice: Any, response_format: Any) -> list[str]:
    """Refuse what an agent cannot do; return the names of fields that have no effect."""
    if n not in (None, 1):
        raise Refused("payload_invalid", "n: an agent gives one answer", param="n")
    if tool_choice == "required" or isinstance(tool_choice, dict):
        raise Refused(
            "payload_invalid",
            "tool_choice: an agent uses its own tools and cannot be made to call one of the client",
            param="tool_choice",
        )
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind not in (None, "text"):
        raise Refused(
            "payload_invalid",
            "the format of an answer is a setting of the agent: set answer_schema in coterie.toml",
            param="response_format",
        )
    return ["tools"] if tools else []


def conversation_of(metadata: Any) -> str:
    value = metadata.get("conversation", "") if isinstance(metadata, dict) else ""
    if not isinstance(value, str):
        raise Refused("payload_invalid", "metadata.conversation: expected a text", param="metadata")
    return value


def make_extra(messages: list[Message], outcome: Outcome, sent: Receipt, ignored: list[str]) -> Extra:
    fields = extra_fields(messages, sent.task, outcome.state)
    fields["files"] = convert(fields["files"], list[Attachment])
    return Extra(**fields, problem=outcome.reason or UNSET, ignored=ignored or UNSET)


def _completion(
    outcome: Outcome, agent_id: str, sent: Receipt, ignored: list[str], created: int
) -> ChatCompletion | Response:
    if failure := outcome.failure():
        raise failure
    assert outcome.task is not None  # noqa: S101 - otherwise it is a failure
    answers = outcome.answers
    completion = ChatCompletion(
        id=f"chatcmpl-{sent.message_id}",
        created=created,
        model=agent_id,
        choices=[
            Choice(
                message=ChatMessage(content="\n\n".join(answer_text(one, agent_id) for one in answers)),
                finish_reason=cast(Any, outcome.finish_reason),
            )
        ],
        usage=CompletionUsage.of(outcome.task),
        coterie=make_extra(answers, outcome, sent, ignored),
    )
    return json_response(completion)


class _ChunkWriter:
    """Writes what happens as chunks of one chat completion."""

    def __init__(self, agent_id: str, sent: Receipt, created: int, ignored: list[str], *, wants_usage: bool) -> None:
        self._agent_id, self._sent, self._ignored, self._wants_usage = agent_id, sent, ignored, wants_usage
        self._head = {
            "id": f"chatcmpl-{sent.message_id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": agent_id,
        }
        self._streamed: dict[str, str] = {}
        """Text of each draft that was sent."""
        self._needs_gap = False
        """Text was sent, and the next text is another message."""

    async def frames(self, stream: TaskStream) -> AsyncGenerator[bytes, None]:
        outcome = Outcome(messages=[])
        with stream:
            yield self._chunk({"role": "assistant", "content": ""})
            async for piece in follow(stream, self._sent):
                record(outcome, piece)
                for data in self._write(piece):
                    yield data
        if failure := outcome.failure():
            yield frame({"error": {"message": failure.detail, "type": "server_error", "code": failure.code}})
            yield DONE_FRAME
            return
        extra = make_extra(outcome.answers, outcome, self._sent, self._ignored)
        yield self._chunk({}, outcome.finish_reason, coterie=extra)
        if self._wants_usage and outcome.task:
            yield frame(self._head | {"choices": [], "usage": CompletionUsage.of(outcome.task)})
        yield DONE_FRAME

    def _write(self, piece: Piece) -> list[bytes]:
        match piece:
            case Delta(draft_id, text):
                is_new = draft_id not in self._streamed
                self._streamed[draft_id] = self._streamed.get(draft_id, "") + text
                return self._text(text, is_new=is_new)
            case Superseded():
                self._needs_gap = True
            case Said(message, draft_id):
                if is_failure_report(message):
                    return []
                whole, sent = answer_text(message, self._agent_id), self._streamed.get(draft_id or "", "")
                rest = unsent_text(whole, sent)
                written = self._text(rest, is_new=not sent) if rest else []
                self._needs_gap = True
                return written
            case Progress(task) if others := [agent for agent in task.active_agents if agent != self._agent_id]:
                return [self._chunk({"reasoning_content": f"{', '.join(others)} at work\n"})]
            case Silence():
                return [KEEP_ALIVE_FRAME]
            case _:
                pass
        return []

    def _text(self, text: str, *, is_new: bool) -> list[bytes]:
        gap = "\n\n" if is_new and self._needs_gap else ""
        self._needs_gap = False if is_new else self._needs_gap
        return [self._chunk({"content": gap + text})]

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return frame(self._head | {"choices": [choice], **more})
