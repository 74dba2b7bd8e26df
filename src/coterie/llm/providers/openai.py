"""Service provider for OpenAI-compatible chat completions endpoints.

`Dialect` renders a request as a chat completions body. `OpenAIService` sends it and reads the response.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from coterie.clock import Clock, SystemClock
from coterie.llm.providers import errors
from coterie.llm.providers.errors import ErrorResponse, RequestContext
from coterie.llm.providers.http_transport import MAX_IDLE_CONNECTIONS, make_transport
from coterie.llm.providers.openai_stream import CompletionBuilder, ResponseReader, decode, stream_completion
from coterie.llm.routing import TOOL_FILES_NOTE, to_single_line_json
from coterie.llm.service import (
    CAPABILITY_BY_TYPE,
    DEFAULT_SAMPLING,
    DEFAULT_TIMEOUT,
    AssistantMessage,
    Attachment,
    ChatMessage,
    Completion,
    DeadlineExceeded,
    Deadlines,
    DeadlineTimer,
    InlineFile,
    ModelRequest,
    Sampling,
    ServiceError,
    SystemMessage,
    TextDelta,
    TextPart,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
)
from coterie.text import to_storable

Json = dict[str, Any]
MAX_RESPONSE_BYTES = 16_000_000
_MAX_ERROR_BYTES = 64_000
_ERROR_BODY_SECONDS = 1.0
"""For the body of an error response. The status is enough to act on, and a fallback may wait."""
_DEFAULT_DEADLINES = Deadlines.from_timeout(DEFAULT_TIMEOUT)
_AUDIO_FORMAT = {"mpeg": "mp3", "mp3": "mp3", "wav": "wav", "x-wav": "wav", "wave": "wav", "vnd.wave": "wav"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one server deviates from OpenAI's API. Learned from its error messages by `adapt_to`."""

    stream_options: bool = True
    """Accepts `stream_options`."""
    max_tokens_key: str = "max_tokens"
    system_role: bool = True
    """Has a system role; otherwise the system text is sent as a user message."""
    strict_alternation: bool = False
    """Requires alternating user and assistant messages, and tool results answered before the next user message."""

    def adapt_to(self, error_text: str) -> Dialect:
        """Return the dialect that avoids this error; the same one if the error has another cause."""
        if self.stream_options and "stream_options" in error_text:
            return replace(self, stream_options=False)
        if self.max_tokens_key == "max_tokens" and "max_completion_tokens" in error_text:
            return replace(self, max_tokens_key="max_completion_tokens")
        if self.system_role and re.search(r"system role (is )?not supported", error_text, re.I):
            return replace(self, system_role=False)
        if not self.strict_alternation and re.search(r"roles must alternate|after role|last role", error_text, re.I):
            return replace(self, strict_alternation=True)
        return self

    def body(self, request: ModelRequest, model: str, sampling: Sampling | None, *, stream: bool) -> Json:
        """`sampling`: of the service; that of the request overrides it."""
        body: Json = {"model": model, "messages": self.messages(request)}
        if request.tools:
            body["tools"] = [_tool(tool) for tool in request.tools]
        if request.answer_schema:
            schema = {"name": "answer", "schema": msgspec.json.decode(request.answer_schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        chosen = (sampling or DEFAULT_SAMPLING).override_with(request.sampling)
        values = {
            "temperature": chosen.temperature,
            "top_p": chosen.top_p,
            self.max_tokens_key: chosen.max_tokens,
            "reasoning_effort": chosen.reasoning_effort,
        }
        body |= {key: value for key, value in values.items() if value is not None}
        body |= chosen.extra_fields()
        if stream:
            body["stream"] = True
            if self.stream_options:
                body["stream_options"] = {"include_usage": True}
        return body

    def messages(self, request: ModelRequest) -> list[Json]:
        messages: Iterable[ChatMessage] = request.messages
        if not request.tools:
            messages = _calls_as_text(messages)
        if not self.system_role:
            messages = (UserMessage((TextPart(m.text),)) if isinstance(m, SystemMessage) else m for m in messages)
        messages = _merge_consecutive(messages)
        if self.strict_alternation:
            messages = _alternate(messages)
        return [_message(message) for message in messages]


def capabilities_sent(request: ModelRequest) -> frozenset[str]:
    """Return the capabilities that the body of a request uses. Without tools, past calls are sent as text."""
    parts = (part for message in request.messages if isinstance(message, UserMessage) for part in message.parts)
    used = {CAPABILITY_BY_TYPE[part.type] for part in parts if isinstance(part, InlineFile)}
    used |= {"tool_calling"} if request.tools else set()
    return frozenset(used | {"structured_output"}) if request.answer_schema else frozenset(used)


def file_types_sent(request: ModelRequest) -> Mapping[str, str]:
    """Return the MIME types of the files that a request contains, and the capability that each needs."""
    parts = (part for message in request.messages if isinstance(message, UserMessage) for part in message.parts)
    return {part.mime_type: CAPABILITY_BY_TYPE[part.type] for part in parts if isinstance(part, InlineFile)}


def call_ids(request: ModelRequest) -> set[str]:
    return {call.id for message in request.messages if isinstance(message, AssistantMessage) for call in message.calls}


def api_name(name: str) -> str:
    """Return the tool name in the form that the API allows. A model may have invented any name."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64] or "unnamed"


def names_by_api_name(tools: Iterable[ToolSpec]) -> Mapping[str, str]:
    return {api_name(tool.name): tool.name for tool in tools}


def _merge_consecutive(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """Join consecutive messages of one role, and drop empty ones."""
    previous: ChatMessage | None = None
    for message in messages:
        match previous, message:
            case _, AssistantMessage(text, ()) if not text.strip():
                continue
            case UserMessage(parts), UserMessage(more):
                previous = UserMessage((*parts, *more))
                continue
            case AssistantMessage(text, ()), AssistantMessage(more_text, calls):
                previous = AssistantMessage(_join((text, more_text)), calls)
                continue
        if previous:
            yield previous
        previous = message
    if previous:
        yield previous


def _alternate(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """Insert the messages that strict servers require."""
    previous: ChatMessage | None = None
    for message in messages:
        match previous, message:
            case ToolMessage(), UserMessage((TextPart(text), *_)) if text == TOOL_FILES_NOTE:
                yield AssistantMessage("(I look at the files of the results.)")
            case ToolMessage(), UserMessage():
                yield AssistantMessage("(I was interrupted here.)")
            case ((None | SystemMessage()), AssistantMessage()):
                yield UserMessage((TextPart("(The conversation goes on from here.)"),))
        yield message
        previous = message
    if not isinstance(previous, UserMessage | ToolMessage):
        yield UserMessage((TextPart("(Go on.)"),))


def _calls_as_text(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """Replace past tool calls by text: without `tools` in the request, servers refuse them."""
    names: dict[str, str] = {}
    for message in messages:
        match message:
            case AssistantMessage(text, calls) if calls:
                names.update((call.id, call.name) for call in calls)
                yield AssistantMessage(_join((text, *(f"[called {c.name} with {_arguments(c)}]" for c in calls))))
            case ToolMessage(call_id, text):
                # One JSON line, so that a result cannot imitate the frame of a message.
                result = {"tool": names.get(call_id, "unknown"), "result": text}
                yield UserMessage((TextPart(to_single_line_json({"toolResult": result})),))
            case _:
                yield message


def _message(message: ChatMessage) -> Json:
    match message:
        case SystemMessage(text):
            return {"role": "system", "content": to_storable(text)}
        case UserMessage(parts):
            return {"role": "user", "content": _content(parts)}
        case AssistantMessage(text, ()):
            return {"role": "assistant", "content": to_storable(text)}
        case AssistantMessage(text, calls):
            return {
                "role": "assistant",
                "content": to_storable(text) if text.strip() else None,
                "tool_calls": [_call(call) for call in calls],
            }
        case ToolMessage(call_id, text):
            return {"role": "tool", "tool_call_id": call_id, "content": to_storable(text)}


def _content(parts: Iterable[TextPart | Attachment | InlineFile]) -> str | list[Json]:
    """Return one string if all parts are text, because many servers accept nothing else."""
    filled = [part for part in parts if not (isinstance(part, TextPart) and not part.text.strip())]
    texts = [part.text for part in filled if isinstance(part, TextPart)]
    if len(texts) == len(filled):
        return to_storable(_join(texts)) or "(empty)"
    return [_part(part) for part in filled]


def _part(part: TextPart | Attachment | InlineFile) -> Json:
    match part:
        case TextPart(text):
            return {"type": "text", "text": to_storable(text)}
        case InlineFile(type="image"):
            return {"type": "image_url", "image_url": {"url": _data_url(part)}}
        case InlineFile(type="audio"):
            kind = part.mime_type.partition("/")[2]
            audio = {"data": b64encode(part.data).decode(), "format": _AUDIO_FORMAT.get(kind, kind)}
            return {"type": "input_audio", "input_audio": audio}
        case InlineFile():
            return {"type": "file", "file": {"filename": to_storable(part.filename), "file_data": _data_url(part)}}
        case Attachment():
            raise TypeError(f"{part.filename} is a reference: CapabilityRouter.fit must replace it before the request")


def _call(call: ToolCall) -> Json:
    function = {"name": api_name(call.name), "arguments": _arguments(call)}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: ToolSpec) -> Json:
    function = {
        "name": api_name(tool.name),
        "description": to_storable(tool.description),
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}


def _arguments(call: ToolCall) -> str:
    return msgspec.json.encode(dict(call.arguments)).decode()


def _data_url(part: InlineFile) -> str:
    return f"data:{part.mime_type};base64,{b64encode(part.data).decode()}"


def _join(texts: Iterable[str]) -> str:
    return "\n\n".join(text for text in texts if text)


class OpenAIService:
    """One model at one address: `POST {base_url}/chat/completions`."""

    def __init__(
        self,
        *,
        id: str,  # noqa: A002
        base_url: str,
        model: str,
        api_key: str = "",
        key_name: str = "",
        deadlines: Deadlines = _DEFAULT_DEADLINES,
        sampling: Sampling = DEFAULT_SAMPLING,
        headers: Mapping[str, str] | None = None,
        secrets: Iterable[str] = (),
        max_bytes: int = MAX_RESPONSE_BYTES,
        stream: bool = True,
        clock: Clock | None = None,
    ) -> None:
        """`key_name`: environment variable of the key, for error messages. `secrets`: in `headers`."""
        self._id, self._model = id, model
        path, mark, query = base_url.partition("?")
        self._url = f"{path.rstrip('/')}/chat/completions{mark}{query}"
        self._key = api_key.strip()
        self._context = RequestContext(
            service=id,
            address=_without_credentials(base_url),
            model=model,
            key=self._key,
            key_name=key_name,
            secrets=tuple(secrets),
        )
        self.deadlines = deadlines
        self._sampling, self._headers = sampling, dict(headers or {})
        self._max_bytes, self._stream = max_bytes, stream
        self._clock = clock or SystemClock()
        self._dialect = Dialect()
        self._client: httpx.AsyncClient | None = None

    @property
    def id(self) -> str:
        return self._id

    async def generate(self, request: ModelRequest) -> AsyncIterator[TextDelta | Completion]:
        context = replace(self._context, capabilities=capabilities_sent(request), file_types=file_types_sent(request))
        builder = CompletionBuilder(taken_ids=call_ids(request), tool_names=names_by_api_name(request.tools))
        reader = ResponseReader(context, builder, self._clock.now())
        with DeadlineTimer(self.deadlines) as timer:
            response = await self._send(request, context, timer)
            body = _LimitedBody(response, context, timer, self._max_bytes)
            async with aclosing(body), aclosing(stream_completion(body, reader)) as pieces:
                async for piece in pieces:
                    yield piece

    async def close(self) -> None:
        client, self._client = self._client, None
        if client:
            await client.aclose()

    async def _send(self, request: ModelRequest, context: RequestContext, timer: DeadlineTimer) -> httpx.Response:
        """Return the successful response. Repeat the request only after learning the server's dialect."""
        while True:
            dialect = self._dialect
            body = dialect.body(request, self._model, self._sampling, stream=self._stream)
            response = await self._post(msgspec.json.encode(body), context, timer)
            if response.is_success:
                return response
            error = await _read_error(response, context, timer)
            learned = dialect.adapt_to(error.text)
            if learned == dialect or error.status not in (400, 422, 500):
                raise errors.classify(context, error, self._clock.now())
            self._dialect = learned

    async def _post(self, body: bytes, context: RequestContext, timer: DeadlineTimer) -> httpx.Response:
        if not re.fullmatch(r"[!-~]*", self._key):
            raise errors.invalid_key(context)
        try:
            client = self._client = self._client or self._create_client()
            request = client.build_request("POST", self._url, content=body)
            return await timer.await_first(lambda: client.send(request, stream=True))
        except DeadlineExceeded as error:
            raise errors.timed_out(context, error) from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            raise errors.invalid_address(context) from error
        except httpx.HTTPError as error:
            raise errors.unreachable(context, error) from error

    def _create_client(self) -> httpx.AsyncClient:
        # No compression: a compressed chunk could expand beyond any limit before it is counted.
        headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "coterie"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        headers |= {name.lower(): value for name, value in self._headers.items()}
        ssl_context = _ssl_context()
        return httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=self.deadlines.connect.total_seconds()),
            transport=make_transport(self._url, ssl_context),
            # `limits` and `verify` are for proxies only; otherwise the transport above decides.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=MAX_IDLE_CONNECTIONS),
            verify=ssl_context,
        )


class _LimitedBody:
    """A response body with deadlines and a size limit."""

    def __init__(self, response: httpx.Response, context: RequestContext, timer: DeadlineTimer, limit: int) -> None:
        self._response, self._context, self._timer, self._left = response, context, timer, limit
        # The stream itself: `aiter_raw` adds a tenth to the cost of reading a token.
        self._chunks = aiter(response.stream)  # type: ignore[arg-type]
        self._wait = timer.await_first

    async def read(self) -> bytes:
        """Return the next bytes, empty at the end."""
        try:
            chunk = await self._wait(self._chunks.__anext__)
        except StopAsyncIteration:
            return b""
        except DeadlineExceeded as error:
            raise errors.timed_out(self._context, error) from None
        except httpx.HTTPError as error:
            raise errors.truncated(self._context) from error
        self._wait = self._timer.await_next
        self._left -= len(chunk)
        if self._left < 0:
            raise errors.malformed(self._context, "it is far too large")
        return chunk

    async def finish(self) -> None:
        """Read the end of the response, so that the connection can be reused."""
        with suppress(StopAsyncIteration, DeadlineExceeded, httpx.HTTPError):
            await self._timer.await_end(self._chunks.__anext__)

    async def aclose(self) -> None:
        await self._response.aclose()


async def _read_error(response: httpx.Response, context: RequestContext, timer: DeadlineTimer) -> ErrorResponse:
    data = bytearray()
    # The status is enough if the body cannot be read.
    with suppress(ServiceError, TimeoutError):
        async with (
            asyncio.timeout(_ERROR_BODY_SECONDS),
            aclosing(_LimitedBody(response, context, timer, _MAX_ERROR_BYTES)) as body,
        ):
            while chunk := await body.read():
                data += chunk
    try:
        content = decode(bytes(data))
    except ValueError:
        content = data.decode("utf-8", "replace")
    return errors.parse_error_body(response.status_code, content, response.headers.get("retry-after"))


def _without_credentials(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.scheme else url


@cache
def _ssl_context() -> ssl.SSLContext:
    """Created once: loading the certificates takes longer than most responses."""
    return httpx.create_ssl_context()
