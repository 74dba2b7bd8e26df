"""A model behind an OpenAI-compatible chat completions endpoint.

A request as OpenAI-compatible chat completions want it.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from coterie.clock import Clock, SystemClock
from coterie.llm.providers import errors
from coterie.llm.providers.deadlines import Deadlines, Late, Watch
from coterie.llm.providers.errors import Asked, Complaint
from coterie.llm.providers.openai_stream import Assembly, Reading, decode, read_answer
from coterie.llm.providers.sockets import use_asyncio
from coterie.llm.routing import on_one_line
from coterie.llm.service import ServiceError
from coterie.llm.types import (
    Answer,
    AssistantSaid,
    Attachment,
    Call,
    Delta,
    Inline,
    Request,
    Said,
    SystemSaid,
    Text,
    ToolSaid,
    ToolSpec,
    UserSaid,
)
from coterie.text import clean

Json = dict[str, Any]
_CAPABILITY = {"image": "vision", "audio": "audio", "file": "file"}
_AUDIO_FORMAT = {"mpeg": "mp3", "mp3": "mp3", "wav": "wav", "x-wav": "wav", "wave": "wav", "vnd.wave": "wav"}
_PARAGRAPH = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What one server makes of the common language. It is found out by its refusals, see `after`."""

    usage: bool = True
    """Takes `stream_options`."""
    limit_key: str = "max_tokens"
    system: bool = True
    """Has a system role; otherwise the system's text leads the first message of the user."""
    alternate: bool = False
    """Demands user and assistant in strict turn, tool results answered before the user speaks."""

    def after(self, complaint: str) -> Dialect:
        """The dialect of a server that refused a request with these words; the same if they concern something else."""
        if self.usage and "stream_options" in complaint:
            return replace(self, usage=False)
        if self.limit_key == "max_tokens" and "max_completion_tokens" in complaint:
            return replace(self, limit_key="max_completion_tokens")
        if self.system and re.search(r"system role (is )?not supported", complaint, re.I):
            return replace(self, system=False)
        if not self.alternate and re.search(r"roles must alternate|after role|last role", complaint, re.I):
            return replace(self, alternate=True)
        return self

    def body(self, request: Request, model: str, max_tokens: int | None, *, stream: bool) -> Json:
        body: Json = {"model": model, "messages": self.messages(request)}
        if request.tools:
            body["tools"] = [_tool(tool) for tool in request.tools]
        if max_tokens:
            body[self.limit_key] = max_tokens
        if stream:
            body["stream"] = True
            if self.usage:
                body["stream_options"] = {"include_usage": True}
        return body

    def messages(self, request: Request) -> list[Json]:
        said = request.said if request.tools else tuple(_without_calls(request.said))
        said = said if self.system else _lead_in(said)
        said = tuple(_merged(said))
        if self.alternate:
            said = tuple(_in_turn(said))
        return [_message(one) for one in said]


def carried(request: Request) -> frozenset[str]:
    """The capabilities that a request makes use of."""
    parts = (part for said in request.said if isinstance(said, UserSaid) for part in said.parts)
    kinds = {_CAPABILITY[part.type] for part in parts if isinstance(part, Inline)}
    return frozenset(kinds | {"tool_calling"}) if request.tools else frozenset(kinds)


def call_ids(request: Request) -> set[str]:
    return {call.id for said in request.said if isinstance(said, AssistantSaid) for call in said.calls}


def wire_name(name: str) -> str:
    """The name as the dialect allows it; a model may have made up one that it does not."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64] or "unnamed"


def names(tools: Iterable[ToolSpec]) -> Mapping[str, str]:
    """The tools' own names by those on the wire."""
    return {wire_name(tool.name): tool.name for tool in tools}


def _merged(said: Iterable[Said]) -> Iterator[Said]:
    """Nobody speaks twice in a row, and nobody says nothing."""
    before: Said | None = None
    for one in said:
        match before, one:
            case _, AssistantSaid(text, ()) if not text.strip():
                continue
            case UserSaid(parts), UserSaid(more):
                before = UserSaid((*parts, *more))
                continue
            case AssistantSaid(text, ()), AssistantSaid(more_text, calls):
                before = AssistantSaid(_joined((text, more_text)), calls)
                continue
        if before:
            yield before
        before = one
    if before:
        yield before


def _in_turn(said: Iterable[Said]) -> Iterator[Said]:
    before: Said | None = None
    for one in said:
        match before, one:
            case ToolSaid(), UserSaid():
                yield AssistantSaid("(I was interrupted here.)")
            case ((None | SystemSaid()), AssistantSaid()):
                yield UserSaid((Text("(The conversation goes on from here.)"),))
        yield one
        before = one
    if not isinstance(before, UserSaid | ToolSaid):
        yield UserSaid((Text("(Go on.)"),))


def _without_calls(said: Iterable[Said]) -> Iterator[Said]:
    """Where no tools are offered, calls of the past are told as text: a service without tools has no words for them."""
    called: dict[str, str] = {}
    for one in said:
        match one:
            case AssistantSaid(text, calls) if calls:
                called.update((call.id, call.name) for call in calls)
                yield AssistantSaid(_joined((text, *(f"[called {c.name} with {_arguments(c)}]" for c in calls))))
            case ToolSaid(call_id, text):
                # One JSON line: a result must not be able to open the frame of a message.
                told = {"tool": called.get(call_id, "unknown"), "result": text}
                yield UserSaid((Text(on_one_line({"toolResult": told})),))
            case _:
                yield one


def _lead_in(said: Iterable[Said]) -> tuple[Said, ...]:
    return tuple(UserSaid((Text(one.text),)) if isinstance(one, SystemSaid) else one for one in said)


def _message(said: Said) -> Json:
    match said:
        case SystemSaid(text):
            return {"role": "system", "content": clean(text)}
        case UserSaid(parts):
            return {"role": "user", "content": _content(parts)}
        case AssistantSaid(text, ()):
            return {"role": "assistant", "content": clean(text)}
        case AssistantSaid(text, calls):
            return {
                "role": "assistant",
                "content": clean(text) if text.strip() else None,
                "tool_calls": [_call(call) for call in calls],
            }
        case ToolSaid(call_id, text):
            return {"role": "tool", "tool_call_id": call_id, "content": clean(text)}


def _content(parts: Iterable[Text | Attachment | Inline]) -> str | list[Json]:
    """One string where it is all text, since many servers take nothing else."""
    said = [part for part in parts if not (isinstance(part, Text) and not part.text.strip())]
    texts = [part.text for part in said if isinstance(part, Text)]
    if len(texts) == len(said):
        return clean(_joined(texts)) or "(empty)"
    return [_part(part) for part in said]


def _part(part: Text | Attachment | Inline) -> Json:
    match part:
        case Text(text):
            return {"type": "text", "text": clean(text)}
        case Inline(type="image"):
            return {"type": "image_url", "image_url": {"url": _data_url(part)}}
        case Inline(type="audio"):
            kind = part.mime_type.partition("/")[2]
            audio = {"data": b64encode(part.data).decode(), "format": _AUDIO_FORMAT.get(kind, kind)}
            return {"type": "input_audio", "input_audio": audio}
        case Inline():
            return {"type": "file", "file": {"filename": clean(part.filename), "file_data": _data_url(part)}}
        case Attachment():
            raise TypeError(f"{part.filename} is a reference: the router makes bytes or text of it before a request")


def _call(call: Call) -> Json:
    function = {"name": wire_name(call.name), "arguments": _arguments(call)}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: ToolSpec) -> Json:
    function = {
        "name": wire_name(tool.name),
        "description": clean(tool.description),
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}


def _arguments(call: Call) -> str:
    return msgspec.json.encode(dict(call.arguments)).decode()


def _data_url(part: Inline) -> str:
    return f"data:{part.mime_type};base64,{b64encode(part.data).decode()}"


def _joined(texts: Iterable[str]) -> str:
    return _PARAGRAPH.join(text for text in texts if text)


MAX_BYTES = 16_000_000
_MAX_COMPLAINT = 64_000
_COMPLAINT_SECONDS = 1.0
"""For the text of a refusal. The status alone is enough to act on, and a fallback may wait."""
_TWO_MINUTES = Deadlines.within(timedelta(minutes=2))


class OpenAIService:
    """One model at one address, asked by `POST {base_url}/chat/completions`."""

    def __init__(
        self,
        *,
        id: str,  # noqa: A002
        base_url: str,
        model: str,
        api_key: str = "",
        key_name: str = "",
        deadlines: Deadlines = _TWO_MINUTES,
        max_tokens: int | None = None,
        max_bytes: int = MAX_BYTES,
        stream: bool = True,
        clock: Clock | None = None,
    ) -> None:
        """`key_name` is the environment variable that `api_key` came from: an error about the key tells it."""
        self._id, self._model = id, model
        path, mark, query = base_url.partition("?")
        self._url = f"{path.rstrip('/')}/chat/completions{mark}{query}"
        self._key = api_key.strip()
        self._asked = Asked(service=id, address=_shown(base_url), model=model, key=self._key, key_name=key_name)
        self.deadlines = deadlines
        self._max_tokens, self._max_bytes, self._stream = max_tokens, max_bytes, stream
        self._clock = clock or SystemClock()
        self._dialect = Dialect()
        self._client: httpx.AsyncClient | None = None

    @property
    def id(self) -> str:
        return self._id

    async def generate(self, request: Request) -> AsyncIterator[Delta | Answer]:
        asked = replace(self._asked, carried=carried(request))
        assembly = Assembly(taken_ids=call_ids(request), names=names(request.tools))
        reading = Reading(asked, assembly, self._clock.now())
        with Watch(self.deadlines) as watch:
            body = _Body(await self._ask(request, asked, watch), asked, watch, self._max_bytes)
            async with aclosing(body), aclosing(read_answer(body, reading)) as pieces:
                async for piece in pieces:
                    yield piece

    async def close(self) -> None:
        client, self._client = self._client, None
        if client:
            await client.aclose()

    async def _ask(self, request: Request, asked: Asked, watch: Watch) -> httpx.Response:
        """The response that holds the answer. Asks again only when the service said how it wants to be asked."""
        while True:
            dialect = self._dialect
            body = dialect.body(request, self._model, self._max_tokens, stream=self._stream)
            response = await self._post(msgspec.json.encode(body), asked, watch)
            if response.is_success:
                return response
            said = await _complaint(response, asked, watch)
            learnt = dialect.after(said.text)
            if learnt == dialect or said.status not in (400, 422, 500):
                raise errors.failure(asked, said, self._clock.now())
            self._dialect = learnt

    async def _post(self, body: bytes, asked: Asked, watch: Watch) -> httpx.Response:
        if not re.fullmatch(r"[!-~]*", self._key):
            raise errors.unusable_key(asked)
        self._client = self._client or self._connect()
        client = self._client
        try:
            request = client.build_request("POST", self._url, content=body)
            return await watch.first(lambda: client.send(request, stream=True))
        except Late as error:
            raise errors.late(asked, error) from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            raise errors.unusable_address(asked) from error
        except httpx.HTTPError as error:
            raise errors.unreachable(asked, error) from error

    def _connect(self) -> httpx.AsyncClient:
        # Compressed answers could unfold to any size between two looks at the cap, so none are asked for.
        headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "coterie"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        timeout = httpx.Timeout(None, connect=self.deadlines.connect.total_seconds())
        # How many requests run at once is decided before they come here.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        client = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, verify=_trusted())
        use_asyncio(client)
        return client


class _Body:
    """The bytes of a response, within deadlines and cap."""

    def __init__(self, response: httpx.Response, asked: Asked, watch: Watch, cap: int) -> None:
        self._response, self._asked, self._watch, self._left = response, asked, watch, cap
        # The stream itself and not `aiter_raw`: the layers between cost a tenth of reading a token.
        self._pieces = aiter(response.stream)  # type: ignore[arg-type]
        self._wait = watch.first

    async def read(self) -> bytes:
        """The next bytes; none at the end."""
        try:
            chunk = await self._wait(self._pieces.__anext__)
        except StopAsyncIteration:
            return b""
        except Late as error:
            raise errors.late(self._asked, error) from None
        except httpx.HTTPError as error:
            raise errors.cut(self._asked) from error
        self._wait = self._watch.next
        self._left -= len(chunk)
        if self._left < 0:
            raise errors.malformed(self._asked, "it is far too large")
        return chunk

    async def finish(self) -> None:
        """Sees the end of a response that has nothing more to say, so that its connection can serve again."""
        with suppress(StopAsyncIteration, Late, httpx.HTTPError):
            await self._watch.soon(self._pieces.__anext__)

    async def aclose(self) -> None:
        await self._response.aclose()


async def _complaint(response: httpx.Response, asked: Asked, watch: Watch) -> Complaint:
    data = bytearray()
    # What a service adds to its refusal is welcome, but the refusal stands without it.
    with suppress(ServiceError, TimeoutError):
        async with asyncio.timeout(_COMPLAINT_SECONDS), aclosing(_Body(response, asked, watch, _MAX_COMPLAINT)) as body:
            while chunk := await body.read():
                data += chunk
    try:
        said = decode(bytes(data))
    except ValueError:
        said = data.decode("utf-8", "replace")
    return errors.complaint(response.status_code, said, response.headers.get("retry-after"))


def _shown(url: str) -> str:
    """The address without what may be secret in it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.scheme else url


@cache
def _trusted() -> ssl.SSLContext:
    """Made once: reading the certificates takes longer than most answers' first byte."""
    return httpx.create_ssl_context()
