"""What an MCP server may ask for during a call: an answer of the person ("elicitation"), or of a model ("sampling").

Elicitation: each field of the server's form becomes one question with quick replies. The person may also answer freely.

Sampling, if the owner allows it: the model sees only what the server sends, not the conversation of the agent. Each
call has a limited number of requests, one at a time, of limited length.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
import math
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coterie.agent.tools import AskFunction, ToolContext
from coterie.errors import CoterieError
from coterie.llm.service import (
    AssistantMessage,
    Attachment,
    ChatMessage,
    Completion,
    ModelRequest,
    Sampling,
    SystemMessage,
    TextPart,
    UserMessage,
)
from coterie.messages import MAX_QUICK_REPLIES
from coterie.text import one_line, to_storable

if TYPE_CHECKING:  # imported only where a server is connected
    import mcp

log = logging.getLogger(__name__)

DECLINE, ACCEPT, DONE = "Decline", "Accept", "Done"
_YES, _NO, _SKIP = "Yes", "No", "Skip"
MAX_TRIES = 3
"""Answers to one question. If the last one is unusable too, the question is cancelled."""
MAX_FIELDS = 20
MAX_REQUESTS = 10
"""Of one tool call."""
MAX_TOKENS = 4096
"""Of one answer. A server that asks for more gets an answer that ends there."""
MAX_REQUEST_CHARACTERS = 400_000
REFUSED = -1
"""The specification's error code for a request that the person or the owner rejected."""
_INVALID, _FAILED = -32602, -32603


# Questions to the person


class _WrongAnswer(Exception):
    """The answer does not fit the field; the message says what is expected."""


class _Declined(Exception):
    """The person declined."""


class _Cancelled(Exception):
    """There is no usable answer."""


async def answer_elicitation(params: Any, *, server: str, ask: AskFunction) -> mcp.types.ElicitResult:
    """Ask the person what the server wants to know; return the answer."""
    from mcp.types import ElicitResult

    about = f"The tool server {server} asks: {to_storable(params.message)}"
    try:
        if params.mode == "url":
            await _ask_field({"enum": [DONE]}, f"{about}\nOpen this address only if you trust it: {params.url}", ask)
            return ElicitResult(action="accept")
        fields: Mapping[str, Any] = params.requested_schema.get("properties") or {}
        if not fields:
            await _ask_field({"enum": [ACCEPT]}, about, ask)
            return ElicitResult(action="accept", content={})
        if len(fields) > MAX_FIELDS:
            return ElicitResult(action="cancel")
        required = params.requested_schema.get("required") or []
        content: dict[str, Any] = {}
        for name, schema in fields.items():
            label = _label(name, schema, is_optional=name not in required)
            value = await _ask_field(schema, f"{about}\n{label}", ask, is_optional=name not in required)
            if value is not None:
                content[name] = value
        return ElicitResult(action="accept", content=content)
    except _Declined:
        return ElicitResult(action="decline")
    except _Cancelled:
        return ElicitResult(action="cancel")


def _label(name: str, schema: Mapping[str, Any], *, is_optional: bool) -> str:
    title = one_line(str(schema.get("title") or name), 100)
    described = one_line(str(schema.get("description") or ""), 500)
    text = f"{title}: {described}" if described else title
    return f"{text} (optional)" if is_optional else text


async def _ask_field(schema: Mapping[str, Any], text: str, ask: AskFunction, *, is_optional: bool = False) -> Any:
    """Ask until the answer fits the field. None: the person skipped an optional field."""
    choices = [_shown(title) for title in _choices(schema)]
    buttons = [_SKIP, DECLINE] if is_optional else [DECLINE]
    if schema.get("type") == "array" and (several := _choices(schema.get("items") or {})):
        text = f"{text}\nAny of these, separated by commas: {', '.join(map(_shown, several))}"
    elif len(choices) + len(buttons) > MAX_QUICK_REPLIES or not all(choices):  # a button needs a text
        text = f"{text}\nOne of: {', '.join(choices)}"
    else:
        buttons = [*choices, *buttons]
    problem = ""
    for _ in range(MAX_TRIES):
        answer = await ask(f"{problem}{text}", buttons)
        if answer is None:
            raise _Cancelled
        match answer.strip().casefold():
            case choice if choice == DECLINE.casefold():
                raise _Declined
            case choice if is_optional and choice in ("", _SKIP.casefold()):
                return None
        try:
            return _parse(schema, answer.strip())
        except _WrongAnswer as expected:
            problem = f"That cannot be used: {expected}.\n"
    raise _Cancelled


def _shown(title: str) -> str:
    """Return the title of a choice as a button shows it."""
    return one_line(title, 100)


def _choices(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values to choose from, by their titles."""
    if schema.get("type") == "boolean":
        return {_YES: True, _NO: False}
    titled = schema.get("oneOf") or schema.get("anyOf")
    if titled:
        return {str(one.get("title") or one["const"]): one["const"] for one in titled if "const" in one}
    values = schema.get("enum") or []
    return dict(zip(map(str, schema.get("enumNames") or values), values, strict=False))


def _parse(schema: Mapping[str, Any], answer: str) -> Any:
    """Return the value of an answer. `_WrongAnswer`: it does not fit."""
    if schema.get("type") == "array":
        return [_parse(schema.get("items") or {}, part.strip()) for part in answer.split(",") if part.strip()]
    if choices := _choices(schema):
        for title, value in choices.items():
            if answer.casefold() in (title.casefold(), _shown(title).casefold(), str(value).casefold()):
                return value
        raise _WrongAnswer(f"expected one of {', '.join(choices)}")
    match schema.get("type"):
        case "integer" | "number" as kind:
            return _number(schema, answer, kind)
    if not answer:
        raise _WrongAnswer("expected a text")
    if not schema.get("minLength", 0) <= len(answer) <= schema.get("maxLength", len(answer)):
        raise _WrongAnswer("the text is too short or too long")
    return answer


def _number(schema: Mapping[str, Any], answer: str, kind: str) -> float:
    try:
        value: float = int(answer) if kind == "integer" else float(answer)
    except ValueError:
        raise _WrongAnswer("expected a whole number" if kind == "integer" else "expected a number") from None
    if kind != "integer" and not math.isfinite(value):
        raise _WrongAnswer("expected a number")
    least, most = schema.get("minimum", value), schema.get("maximum", value)
    if not least <= value <= most:
        raise _WrongAnswer(f"expected a number from {least} to {most}")
    return value


# Requests to the model


class _Unusable(Exception):
    """The request cannot be made; the message says why."""

    def __init__(self, message: str, code: int = _INVALID) -> None:
        self.code = code
        super().__init__(message)


class Sampler:
    """Answers the requests of one tool call. `ctx`: its context, with the agent's model."""

    def __init__(self, server: str, ctx: ToolContext) -> None:
        self._server, self._ctx = server, ctx
        self._requests, self._one_at_a_time = 0, asyncio.Lock()

    async def answer(self, params: Any) -> mcp.types.CreateMessageResult | mcp.types.ErrorData:
        from mcp.types import CreateMessageResult, ErrorData, TextContent

        try:
            async with self._one_at_a_time:
                request = await self._build(params)
                assert self._ctx.sample is not None  # noqa: S101 - _build refuses otherwise
                answer = await self._ctx.sample(request)
        except _Unusable as error:
            log.warning("a request of the MCP server %s to a model was refused: %s", self._server, error)
            return ErrorData(code=error.code, message=str(error))
        except (CoterieError, OSError) as error:
            log.warning("a request of the MCP server %s to a model failed: %s", self._server, error)
            return ErrorData(code=_FAILED, message=one_line(str(error), 500))
        text, reason = _cut_at_stop(answer, params.stop_sequences or ())
        content = TextContent(type="text", text=text)
        return CreateMessageResult(
            role="assistant", content=content, model=answer.model or answer.service, stop_reason=reason
        )

    async def _build(self, params: Any) -> ModelRequest:
        if self._ctx.sample is None:
            raise _Unusable("this call has no model to ask", REFUSED)
        self._requests += 1
        if self._requests > MAX_REQUESTS:
            raise _Unusable(f"a tool call may ask the model at most {MAX_REQUESTS} times", REFUSED)
        if params.tools:
            raise _Unusable("tools in sampling requests are not supported: leave them out")
        if params.max_tokens < 1:
            raise _Unusable(f"maxTokens must be at least 1, got {params.max_tokens}")
        messages = [await self._message(one, number) for number, one in enumerate(params.messages)]
        if not messages:
            raise _Unusable("messages must not be empty")
        if params.system_prompt:
            messages.insert(0, SystemMessage(to_storable(params.system_prompt)))
        if sum(map(_size, messages)) > MAX_REQUEST_CHARACTERS:
            raise _Unusable(f"the messages have more than {MAX_REQUEST_CHARACTERS:,} characters")
        sampling = Sampling(temperature=params.temperature, max_tokens=min(params.max_tokens, MAX_TOKENS))
        return ModelRequest(messages=tuple(messages), sampling=sampling)

    async def _message(self, message: Any, number: int) -> ChatMessage:
        parts = [await self._part(block, f"{number}.{index}") for index, block in enumerate(message.content_as_list)]
        if message.role != "assistant":
            return UserMessage(tuple(parts))
        return AssistantMessage("\n".join(part.text for part in parts if isinstance(part, TextPart)))

    async def _part(self, block: Any, name: str) -> TextPart | Attachment:
        match block.type:
            case "text":
                return TextPart(to_storable(block.text))
            case "image" | "audio":
                return await self._attachment(block, name)
        raise _Unusable(f"content of the type {one_line(block.type, 40)} is not supported: use text, image or audio")

    async def _attachment(self, block: Any, name: str) -> Attachment:
        """Store a picture or sound as a file, from which the router takes what the agent's model can read."""
        try:
            data = b64decode(block.data, validate=True)
        except (ValueError, binascii.Error):
            raise _Unusable(f"the data of message {name} is no base64") from None
        key = f"{self._ctx.idempotency_key}/sampling/{self._requests}/{name}"
        kept = await self._ctx.artifacts.put(data, f"{self._server}-{block.type}", key=key)
        return Attachment(
            artifact_ref=kept.ref, type=kept.type, filename=kept.filename, mime_type=kept.mime_type, size=kept.size
        )


def _size(message: ChatMessage) -> int:
    match message:
        case UserMessage(parts):
            return sum(len(part.text) for part in parts if isinstance(part, TextPart))
        case SystemMessage(text) | AssistantMessage(text):
            return len(text)
    return 0


def _cut_at_stop(answer: Completion, stop_sequences: Sequence[str]) -> tuple[str, str]:
    """Return the text up to the first stop sequence, and why it ends. Not every service knows stop sequences."""
    ends = [end for stop in stop_sequences if stop and (end := answer.text.find(stop)) >= 0]
    if ends:
        return answer.text[: min(ends)], "stopSequence"
    return answer.text, "maxTokens" if answer.finish_reason == "length" else "endTurn"
