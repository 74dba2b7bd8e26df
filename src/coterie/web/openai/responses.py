"""`/v1/responses`: a response is what one message of the client set off. Its id is that of the message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, field
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from coterie.clock import to_ms
from coterie.errors import Refused
from coterie.messages import PERSON, Message, Receipt
from coterie.task_following import Delta, Piece, Progress, Said, Silence, Superseded, TaskFollowing, TaskStream
from coterie.tasks import Task
from coterie.web.auth import Caller, CallerDep
from coterie.web.errors import OPENAI
from coterie.web.openai.answering import (
    KEEP_ALIVE_FRAME,
    AnswerStream,
    FollowingDep,
    Outcome,
    answer_or_stop,
    collect,
    follow,
    frame,
    is_failure_report,
    read_outcome,
    record,
    stop_on_disconnect,
    unsent_text,
    wants_stop,
)
from coterie.web.openai.asking import Ask, AskingDep, find_model
from coterie.web.openai.chat import (
    CHOICE_SCHEMA,
    MESSAGES_SCHEMA,
    OBJECT_SCHEMA,
    TOOLS_SCHEMA,
    Extra,
    OpenAISchema,
    check_options,
    conversation_of,
    make_extra,
)
from coterie.web.openai.content import ClientMessage, answer_text, read_message
from coterie.web.openapi import openai_problems
from coterie.web.routing import Header, Id, Router, SocietyDep

router = Router(prefix=OPENAI, tags=["OpenAI"], responses=openai_problems(401, 403, 404, 421, 429, 500, 503))
PREFIX = "resp_"
SKIPPED_ITEMS = frozenset({"reasoning", "item_reference"})
"""Items of an input that repeat what the agent knows."""

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"]


class ResponseRequest(OpenAISchema, kw_only=True):
    """Fields of OpenAI that are not here are accepted and ignored: an agent has its own settings and tools."""

    model: Annotated[Any, Meta(extra_json_schema={"type": "string"}, description="Id of an agent.")] = None
    input: Annotated[Any, Meta(extra_json_schema={"anyOf": [{"type": "string"}, MESSAGES_SCHEMA]})] = None
    instructions: str | None = None
    previous_response_id: Annotated[
        str | None, Meta(description="Then everything in `input` is new, and nothing else is sent.")
    ] = None
    background: Annotated[bool | None, Meta(description="Answer at once; GET the response later.")] = None
    stream: bool | None = None
    user: str | None = None
    metadata: Annotated[Any, Meta(extra_json_schema=OBJECT_SCHEMA)] = None
    conversation: Annotated[Any, Meta(extra_json_schema=CHOICE_SCHEMA, description="A name for it.")] = None
    tools: Annotated[Any, Meta(extra_json_schema=TOOLS_SCHEMA, description="Ignored: an agent has its own.")] = None
    tool_choice: Annotated[
        Any, Meta(extra_json_schema=CHOICE_SCHEMA, description="`required` and the name of a tool are refused.")
    ] = None
    text: Annotated[Any, Meta(extra_json_schema=OBJECT_SCHEMA, description="Only the format `text`.")] = None
    coterie: Annotated[Any, Meta(extra_json_schema=OBJECT_SCHEMA)] = None


class OutputText(OpenAISchema, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[str] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)


class OutputMessage(OpenAISchema, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class InputDetails(OpenAISchema, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(OpenAISchema, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(OpenAISchema, kw_only=True):
    """Tokens of all requests to models that the task has needed so far, by all agents."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, task: Task) -> ResponseUsage:
        return cls(
            input_tokens=task.input_tokens,
            input_tokens_details=InputDetails(cached_tokens=task.cached_tokens),
            output_tokens=task.output_tokens,
            output_tokens_details=OutputDetails(),
            total_tokens=task.input_tokens + task.output_tokens,
        )


class ResponseError(OpenAISchema, kw_only=True):
    code: Literal["server_error"] = "server_error"
    message: str


class IncompleteDetails(OpenAISchema, kw_only=True):
    reason: Literal["max_output_tokens", "content_filter"]


class ModelResponse(OpenAISchema, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool = False
    previous_response_id: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: Literal["auto"] = "auto"
    tools: list[str] = field(default_factory=list)
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    coterie: Extra


@router.post(
    "/responses",
    summary="Ask an agent",
    responses={
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
        **openai_problems(400, 409, 413, 415, 502, 507),
    },
)
async def create_response(
    request: Request,
    body: ResponseRequest,
    society: SocietyDep,
    caller: CallerDep,
    asking: AskingDep,
    following: FollowingDep,
    idempotency_key: Annotated[Id | None, Header()] = None,
) -> ModelResponse | HttpResponse:
    """The rules of chat completions hold. With `background` the answer comes at once, and a GET returns the rest."""
    text_format = body.text.get("format") if isinstance(body.text, dict) else None
    ignored = check_options(None, body.tools, body.tool_choice, text_format)
    stops = wants_stop(body.coterie)
    previous = None
    if body.previous_response_id:
        previous = await _find_asked(following, caller, body.previous_response_id, "previous_response_id")
    agent_id = find_model(body.model)
    if previous and previous.to != agent_id:
        other = "previous_response_id: a response of another model. An agent knows only its own conversation"
        raise Refused("payload_invalid", other, param="previous_response_id")
    ask = Ask(
        agent_id=agent_id,
        messages=_read_input(body.input, body.instructions),
        conversation=_conversation(body),
        user=body.user or "",
        idempotency_key=idempotency_key or "",
        previous=previous,
        may_wait=bool(body.background),
    )
    echo = {
        "background": bool(body.background),
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "metadata": body.metadata if isinstance(body.metadata, dict) else {},
        "user": body.user,
    }
    if body.stream or body.background:
        sent = (await asking.ask(caller, ask)).receipt
        asked = await _find_asked(following, caller, PREFIX + sent.message_id, "id")
        renderer = _ResponseRenderer(asked, sent, ignored, echo)
        if not body.stream:
            return renderer.render(await read_outcome(following, asked))
        on_disconnect = stop_on_disconnect(society, stops, sent)
        return AnswerStream(_EventWriter(renderer).frames(following.stream(ask.agent_id)), on_disconnect)
    with following.stream(ask.agent_id, with_text=False) as stream:
        new = await asking.ask(caller, ask, stream)
        asked = await _find_asked(following, caller, PREFIX + new.receipt.message_id, "id")
        pieces = stream.follow(new.receipt, is_new=new.is_new)
        on_disconnect = stop_on_disconnect(society, stops, new.receipt)
        outcome = await answer_or_stop(request, collect(pieces), on_disconnect)
    renderer = _ResponseRenderer(asked, new.receipt, ignored, echo)
    if failure := outcome.failure():
        raise failure
    return renderer.render(outcome, is_over=True)


@router.get(
    "/responses/{response_id}",
    summary="Get a response, finished or not",
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}, **openai_problems(400)},
)
async def get_response(
    response_id: str,
    caller: CallerDep,
    following: FollowingDep,
    stream: bool = False,
    starting_after: Annotated[int, Meta(description="Not supported: a stream begins with its start.")] | None = None,
) -> ModelResponse | HttpResponse:
    """With `stream` its events from the start, until it has ended."""
    if starting_after is not None:
        raise Refused(
            "payload_invalid", "starting_after: a stream begins with its start: leave it out", param="starting_after"
        )
    asked = await _find_asked(following, caller, response_id, "response_id")
    renderer = _ResponseRenderer(asked, Receipt(message_id=asked.id, state="pending", task=asked.task), [])
    if stream:
        return AnswerStream(_EventWriter(renderer).frames(following.stream(asked.to)))
    return renderer.render(await read_outcome(following, asked))


@router.post("/responses/{response_id}/cancel", summary="Stop everything that a response set off")
async def cancel_response(
    response_id: str, society: SocietyDep, caller: CallerDep, following: FollowingDep
) -> ModelResponse:
    """What tools have done stays done. A response that has ended stays as it is. Idempotent."""
    asked = await _find_asked(following, caller, response_id, "response_id")
    renderer = _ResponseRenderer(asked, Receipt(message_id=asked.id, state="pending", task=asked.task), [])
    outcome = await read_outcome(following, asked)
    if renderer.status(outcome) in ("queued", "in_progress"):
        await society.stop_task(asked.task)
        outcome = await read_outcome(following, asked)
    return renderer.render(outcome)


async def _find_asked(following: TaskFollowing, caller: Caller, response_id: str, param: str) -> Message:
    """The message of a response. One of another program does not exist for the caller."""
    asked = await following.store.message(response_id.removeprefix(PREFIX)) if response_id.startswith(PREFIX) else None
    if asked is None or asked.sender != PERSON or not caller.may_see(asked):
        raise Refused("unknown_message", "there is no such response", param=param)
    return asked


def _read_input(value: Any, instructions: str | None) -> list[ClientMessage]:
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise Refused("payload_invalid", "input: expected a text or a list of messages", param="input")
    messages = [read_message({"role": "system", "content": instructions}, "instructions")] if instructions else []
    for index, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if isinstance(kind, str) and kind in SKIPPED_ITEMS:
            continue
        if kind != "message":
            raise Refused("payload_invalid", f"input[{index}].type: expected a message", param=f"input[{index}].type")
        messages.append(read_message(item, f"input[{index}]"))
    return messages


def _conversation(body: ResponseRequest) -> str:
    named = body.conversation.get("id") if isinstance(body.conversation, dict) else body.conversation
    if named is not None and not isinstance(named, str):
        raise Refused("payload_invalid", "conversation: expected a text", param="conversation")
    return named or conversation_of(body.metadata)


class _ResponseRenderer:
    """Renders a response in its current state."""

    def __init__(
        self, asked: Message, sent: Receipt, ignored: list[str], echo: Mapping[str, Any] | None = None
    ) -> None:
        """`echo`: fields of the request that its response repeats. They are not stored."""
        self.asked, self.sent, self._ignored, self._echo = asked, sent, ignored, echo or {}

    def status(self, outcome: Outcome, *, is_over: bool = False) -> Status:
        match outcome.state:
            case "failed":
                return "failed"
            case "stopped":
                return "cancelled"
            case "working" if not (is_over or outcome.is_over):
                return "queued" if self.asked.state in ("pending", "delayed") else "in_progress"
            case "unknown":
                return "cancelled" if self.asked.state in ("withdrawn", "dead") else "failed"
        return "completed" if outcome.finish_reason == "stop" else "incomplete"

    def render(self, outcome: Outcome, *, is_over: bool = False, ids: dict[str, str] | None = None) -> ModelResponse:
        """`ids`: by message, the item id under which it was streamed."""
        status = self.status(outcome, is_over=is_over)
        failure = outcome.failure() if status == "failed" else None
        reasons: dict[str, Any] = {"length": "max_output_tokens", "content_filter": "content_filter"}
        has_ended = status not in ("queued", "in_progress")
        return ModelResponse(
            id=PREFIX + self.asked.id,
            created_at=to_ms(self.asked.created_at) // 1000,
            completed_at=to_ms(outcome.task.last_at) // 1000 if outcome.task and has_ended else None,
            status=status,
            error=ResponseError(message=str(failure.detail)) if failure else None,
            incomplete_details=(
                IncompleteDetails(reason=reasons[outcome.finish_reason]) if status == "incomplete" else None
            ),
            model=self.asked.to,
            output=[self.item(one, (ids or {}).get(one.id)) for one in outcome.answers],
            usage=ResponseUsage.of(outcome.task) if outcome.task and has_ended else None,
            coterie=make_extra(outcome.answers, outcome, self.sent, self._ignored),
            **self._echo,
        )

    def item(self, message: Message, id_: str | None = None) -> OutputMessage:
        text = answer_text(message, self.asked.to)
        status: Literal["completed", "incomplete"] = "incomplete" if message.cut_off else "completed"
        return OutputMessage(id=id_ or f"msg_{message.id}", status=status, content=[OutputText(text=text)])


class _Item:
    """An output message that is being streamed."""

    def __init__(self, id_: str, index: int) -> None:
        self.id, self.index, self.text = id_, index, ""


class _EventWriter:
    """Writes what happens as the events of one response."""

    def __init__(self, renderer: _ResponseRenderer) -> None:
        self._renderer = renderer
        self._number = self._index = 0
        self._items: dict[str, _Item] = {}
        """By draft."""
        self._ids: dict[str, str] = {}

    async def frames(self, stream: TaskStream) -> AsyncGenerator[bytes, None]:
        outcome = Outcome(messages=[])
        response = replace(self._renderer.render(outcome), status="in_progress", error=None)
        with stream:
            yield self._event("response.created", response=response)
            yield self._event("response.in_progress", response=response)
            async for piece in follow(stream, self._renderer.sent):
                record(outcome, piece)
                for data in self._write(piece):
                    yield data
        failure = outcome.failure()
        final = self._renderer.render(outcome, is_over=True, ids=self._ids)
        if failure and final.status != "cancelled":
            final.status, final.error = "failed", ResponseError(message=str(failure.detail))
        kind = final.status if final.status in ("completed", "incomplete") else "failed"
        yield self._event(f"response.{kind}", response=final)

    def _write(self, piece: Piece) -> list[bytes]:
        match piece:
            case Delta(draft_id, text):
                opened = [] if draft_id in self._items else self._open(draft_id, f"msg_{draft_id}")
                return [*opened, self._delta(self._items[draft_id], text)]
            case Superseded(draft_id) if draft_id in self._items:
                return self._close(self._items.pop(draft_id), "incomplete")
            case Said(message, draft_id):
                return self._say(message, draft_id)
            case Progress(task):
                others = [agent for agent in task.active_agents if agent != self._renderer.asked.to]
                return self._reason(f"{', '.join(others)} at work") if others else []
            case Silence():
                return [KEEP_ALIVE_FRAME]
            case _:
                return []

    def _say(self, message: Message, draft_id: str | None) -> list[bytes]:
        if is_failure_report(message):
            return []
        key = draft_id or message.id
        written = [] if key in self._items else self._open(key, f"msg_{message.id}")
        item, whole = self._items.pop(key), answer_text(message, self._renderer.asked.to)
        if rest := unsent_text(whole, item.text):
            written.append(self._delta(item, rest))
        item.text = whole
        self._ids[message.id] = item.id
        return [*written, *self._close(item, "incomplete" if message.cut_off else "completed")]

    def _open(self, key: str, id_: str) -> list[bytes]:
        item = self._items[key] = _Item(id_, self._index)
        self._index += 1
        added = OutputMessage(id=item.id, status="in_progress", content=[])
        return [
            self._event("response.output_item.added", output_index=item.index, item=added),
            self._event("response.content_part.added", **self._item_fields(item), part=OutputText(text="")),
        ]

    def _delta(self, item: _Item, text: str) -> bytes:
        item.text += text
        return self._event("response.output_text.delta", **self._item_fields(item), delta=text, logprobs=[])

    def _close(self, item: _Item, status: Literal["completed", "incomplete"]) -> list[bytes]:
        part = OutputText(text=item.text)
        done = OutputMessage(id=item.id, status=status, content=[part])
        return [
            self._event("response.output_text.done", **self._item_fields(item), text=item.text, logprobs=[]),
            self._event("response.content_part.done", **self._item_fields(item), part=part),
            self._event("response.output_item.done", output_index=item.index, item=done),
        ]

    def _reason(self, text: str) -> list[bytes]:
        """A finished item that names the agents at work. It is not in the final output."""
        index, id_ = self._index, f"rs_{self._renderer.asked.id}_{self._index}"
        self._index += 1
        fields = {"item_id": id_, "output_index": index, "summary_index": 0}
        part = {"type": "summary_text", "text": text}
        item = {"id": id_, "type": "reasoning", "summary": list[Any]()}
        return [
            self._event("response.output_item.added", output_index=index, item=item),
            self._event("response.reasoning_summary_part.added", **fields, part=part | {"text": ""}),
            self._event("response.reasoning_summary_text.delta", **fields, delta=text),
            self._event("response.reasoning_summary_text.done", **fields, text=text),
            self._event("response.reasoning_summary_part.done", **fields, part=part),
            self._event("response.output_item.done", output_index=index, item=item | {"summary": [part]}),
        ]

    def _item_fields(self, item: _Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": item.index, "content_index": 0}

    def _event(self, kind: str, **data: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return frame({"type": kind, "sequence_number": number, **data}, kind)
