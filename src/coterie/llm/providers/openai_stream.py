"""Reading of chat completion responses: streamed events or one JSON document, tolerant of deviating servers.

`ResponseReader` turns bytes into text and a `Completion`; it does no I/O. `CompletionBuilder` assembles the chunks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol

import msgspec

from coterie.ids import new_id
from coterie.llm.providers import errors
from coterie.llm.providers.errors import RequestContext
from coterie.llm.service import Completion, TextDelta, TokenUsage, ToolCall, TransientError
from coterie.sse_parser import ServerSentEvent, SseParser
from coterie.text import to_storable

MAX_CALLS = 64
MAX_DEPTH = 64
_MAX_NAME_LENGTH = 256
_MAX_INVALID_ARGUMENTS = 100_000
_DONE = b"[DONE]"
_VALID_ID = re.compile(r"[!-~]{1,64}")
_FinishReason = Literal["stop", "tool_calls", "length", "content_filter"]
_FINISH_REASONS: dict[str, _FinishReason] = {
    "length": "length",
    "max_tokens": "length",
    "content_filter": "content_filter",
    "safety": "content_filter",
}


class UnusableResponse(Exception):
    """The chunks form no completion; the message says why."""


@dataclass(slots=True)
class _PartialCall:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class CompletionBuilder:
    """Builds a `Completion` from decoded stream chunks or one decoded document."""

    def __init__(self, *, taken_ids: Collection[str] = (), tool_names: Mapping[str, str] | None = None) -> None:
        """`taken_ids`: call ids of the conversation. `tool_names`: our tool names by the names in the API."""
        self.has_choices = False
        self.finish_reason: str | None = None
        self._text: list[str] = []
        self._refusal: list[str] = []
        self._calls: list[_PartialCall] = []
        self._by_index: dict[int, _PartialCall] = {}
        self._usage = TokenUsage()
        self._cached_in_timings = 0
        self._model = ""
        self._taken_ids = set(taken_ids)
        self._tool_names = tool_names or {}

    def add(self, chunk: object) -> str:
        """Add a chunk and return its text."""
        if not isinstance(chunk, dict):
            raise UnusableResponse("a piece of it is no JSON object")
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = _usage(usage)
        if isinstance(timings := chunk.get("timings"), dict):  # of llama.cpp, in a chunk of its own or with the usage
            self._cached_in_timings = _count(timings, "cache_n")
        if isinstance(model := chunk.get("model"), str) and model:
            self._model = to_storable(model)[:_MAX_NAME_LENGTH]
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return ""
        self.has_choices = True
        if isinstance(reason := choice.get("finish_reason"), str) and reason:
            self.finish_reason = reason
        if isinstance(message := choice.get("message"), dict):
            return self._add_message(message, is_whole=True)
        delta = choice.get("delta")
        return self._add_message(delta) if isinstance(delta, dict) else ""

    def build(self, service: str) -> Completion:
        if not self.has_choices:
            raise UnusableResponse("it holds no choices")
        calls = tuple(self._build_call(call) for call in self._calls)
        text = "".join(self._text) or "".join(self._refusal)
        default: _FinishReason = "tool_calls" if calls else "stop"
        reason = _FINISH_REASONS.get((self.finish_reason or "").lower(), default)
        cached = min(self._usage.cached_tokens or self._cached_in_timings, self._usage.input_tokens)
        return Completion(
            text=text,
            calls=calls,
            usage=msgspec.structs.replace(self._usage, cached_tokens=cached),
            service=service,
            model=self._model,
            finish_reason=reason,
        )

    def _add_message(self, message: Mapping[str, Any], *, is_whole: bool = False) -> str:
        if isinstance(refusal := message.get("refusal"), str):
            self._refusal.append(to_storable(refusal))
        if isinstance(calls := message.get("tool_calls"), list):
            for index, call in enumerate(calls):
                self._add_call(call, index if is_whole else None)
        text = to_storable(_content_text(message.get("content")))
        if text:
            self._text.append(text)
        return text

    def _add_call(self, piece: object, index_in_message: int | None) -> None:
        if not isinstance(piece, dict):
            raise UnusableResponse("a tool call in it is no object")
        function = piece.get("function")
        function = function if isinstance(function, dict) else {}
        name, call_id = _string(function.get("name")), _string(piece.get("id"))
        index = piece.get("index") if index_in_message is None else index_in_message
        call = self._call_for(index if isinstance(index, int) else None, call_id, name)
        call.id = call.id or call_id
        call.name = call.name or name
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            call.arguments.append(arguments)
        elif arguments is not None:
            # Some servers send the arguments as a JSON value instead of a string.
            call.arguments.append(_dump(arguments))

    def _call_for(self, index: int | None, call_id: str, name: str) -> _PartialCall:
        """Return the call of a piece, by its index. Some servers repeat one index for all calls, or send none."""
        last = self._calls[-1] if self._calls else None
        known = last if index is None else self._by_index.get(index)
        is_other = index is None or (call_id and known and call_id != known.id)
        if known and not (name and known.name and is_other):
            return known
        if len(self._calls) == MAX_CALLS:
            raise UnusableResponse(f"it holds more than {MAX_CALLS} tool calls")
        call = _PartialCall()
        self._calls.append(call)
        if index is not None:
            self._by_index[index] = call
        return call

    def _build_call(self, call: _PartialCall) -> ToolCall:
        name = to_storable(call.name)[:_MAX_NAME_LENGTH]
        if not name:
            raise UnusableResponse("a tool call in it has no name")
        raw = "".join(call.arguments)
        arguments = _parse_arguments(raw)
        return ToolCall(
            id=self._unique_id(call.id),
            name=self._tool_names.get(name, name),
            arguments=arguments or {},
            invalid_arguments=to_storable(raw)[:_MAX_INVALID_ARGUMENTS] if arguments is None else None,
        )

    def _unique_id(self, call_id: str) -> str:
        """Return the given id if it is valid and unused. Some servers count from zero in every response."""
        if not _VALID_ID.fullmatch(call_id) or call_id in self._taken_ids:
            call_id = f"call_{new_id()[-24:]}"
        self._taken_ids.add(call_id)
        return call_id


class ResponseBody(Protocol):
    async def read(self) -> bytes:
        """Return the next bytes, empty at the end; or raise ServiceError."""
        ...

    async def finish(self) -> None:
        """Called when the completion is read."""
        ...


async def stream_completion(body: ResponseBody, reader: ResponseReader) -> AsyncGenerator[TextDelta | Completion, None]:
    while not reader.is_done:
        try:
            chunk = await body.read()
        except TransientError:
            if not reader.is_complete:
                raise
            chunk = b""
        text = reader.feed(chunk) if chunk else reader.finish()
        if text:
            yield TextDelta(text)
        if not chunk:
            break
    completion = reader.completion()
    await body.finish()
    yield completion


class ResponseReader:
    """Reads a response from bytes, as a stream of events or one document, whatever its content type says."""

    def __init__(self, context: RequestContext, builder: CompletionBuilder, now: datetime) -> None:
        self.is_done = False
        """The server has marked the end of the response."""
        self._context, self._builder, self._now = context, builder, now
        self._parser = SseParser()
        self._has_content = False

    @property
    def is_complete(self) -> bool:
        """The model has finished, so a lost connection loses nothing."""
        return self.is_done or self._builder.finish_reason is not None

    def feed(self, chunk: bytes) -> str:
        """Return the text that `chunk` completes."""
        self._has_content = self._has_content or not chunk.isspace()
        return self._add_events(self._parser.feed(chunk))

    def finish(self) -> str:
        """Handle the end of the bytes. Lines outside events are a document, or an error after a broken stream."""
        text = self._add_events(event for event in self._parser.finish() if event.data == _DONE or _is_json(event.data))
        rest = self._parser.other_lines.strip()
        if rest and not self._builder.has_choices:
            text += self._add(self._decode(rest))
            self.is_done = True
        elif rest and _is_json(rest):
            self._add(decode(rest))
        return text

    def completion(self) -> Completion:
        if not self._has_content:
            raise errors.empty_response(self._context)
        if self._builder.has_choices and not self.is_complete:
            raise errors.truncated(self._context)
        try:
            completion = self._builder.build(self._context.service)
        except UnusableResponse as error:
            raise errors.malformed(self._context, str(error)) from None
        if completion.finish_reason == "content_filter" and not completion.text and not completion.calls:
            raise errors.content_filtered(self._context)
        return completion

    def _add_events(self, events: Iterable[ServerSentEvent]) -> str:
        texts = []
        for event in events:
            if event.data == _DONE:
                self.is_done = True
                break
            texts.append(self._add(self._decode(event.data)))
        return "".join(texts)

    def _decode(self, data: bytes) -> object:
        try:
            return decode(data)
        except ValueError:
            raise errors.malformed(self._context, "it is no JSON") from None

    def _add(self, chunk: object) -> str:
        if isinstance(chunk, dict) and chunk.get("error"):
            raise errors.classify(self._context, errors.parse_error_in_stream(chunk["error"]), self._now)
        try:
            return self._builder.add(chunk)
        except UnusableResponse as error:
            raise errors.malformed(self._context, str(error)) from None


def decode(data: bytes | str) -> Any:
    """Decode JSON or raise ValueError. Accepts lone surrogates and invalid UTF-8, which msgspec refuses."""
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except (ValueError, msgspec.MsgspecError):
        pass
    text = data if isinstance(data, str) else data.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _is_json(data: bytes) -> bool:
    try:
        decode(data)
    except ValueError:
        return False
    return True


def _parse_arguments(raw: str) -> dict[str, Any] | None:
    """Return the arguments object; None if the model wrote something else."""
    if not raw.strip():
        return {}
    try:
        value = _storable(decode(raw))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _dump(value: object) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        return "(nested too deep)"


def _storable(value: Any, depth: int = 0) -> Any:
    """Return `value` in the form that every store keeps; raise ValueError if there is none."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    match value:
        case str():
            return to_storable(value)
        case dict():
            return {to_storable(key): _storable(item, depth + 1) for key, item in value.items()}
        case list():
            return [_storable(item, depth + 1) for item in value]
        case float() if not math.isfinite(value):
            raise ValueError("not a finite number")
    return value


def _content_text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts: Iterable[object] = content if isinstance(content, list) else ()
    return "".join(_string(part.get("text")) for part in parts if isinstance(part, dict))


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""


def _usage(usage: Mapping[str, Any]) -> TokenUsage:
    details = usage.get("prompt_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else 0
    return TokenUsage(
        input_tokens=_count(usage, "prompt_tokens"),
        output_tokens=_count(usage, "completion_tokens"),
        # OpenAI and most others, then DeepSeek, then Moonshot.
        cached_tokens=cached or _count(usage, "prompt_cache_hit_tokens") or _count(usage, "cached_tokens"),
    )


def _count(counts: Mapping[str, Any], key: str) -> int:
    """Return a reported number of tokens; 0 if it is absent or cannot be one."""
    value = counts.get(key)
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0
