"""A scripted model server: real HTTP on loopback, and strict validation of requests.

`Says`, `Calls`, `Status` and `CustomReply` script its replies. `ServerConnection` is the server's side of an HTTP/1.1
connection that can also misbehave.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from coterie.testing.dialects import check_openai_chat, check_strict_alternation

ALL_CAPABILITIES = frozenset({"vision", "audio", "file", "tool_calling"})
_CAPABILITY_BY_PART = {"image_url": "vision", "input_audio": "audio", "file": "file"}


class ModelServer:
    """Speaks OpenAI chat completions at `base_url` while its context lasts.

        async with ModelServer() as server:
            server.script("Hello!", Says(calls=(Calls("look_up", {"city": "Oslo"}),)), Status(429))

    Scripted replies are sent in order, then `default`; a callable gets the request and returns the reply. An invalid
    request is refused as a real service would do, whatever the script says; the errors are kept in `refused`.
    """

    def __init__(
        self,
        *,
        models: Set[str] = frozenset(),
        api_key: str | None = None,
        capabilities: Set[str] = ALL_CAPABILITIES,
        alternate: bool = False,
        context_tokens: int | None = None,
        unknown_keys: Set[str] = frozenset(),
    ) -> None:
        """`models` empty: accept any. `unknown_keys`: request keys to refuse, such as `stream_options`."""
        self.default: Reply | Callable[[ReceivedRequest], Reply] = "ok"
        self.requests: list[ReceivedRequest] = []
        self.refused: list[str] = []
        self.connections = 0
        """Number of connections ever accepted."""
        self.base_url = ""
        self._models, self._api_key, self._capabilities = models, api_key, capabilities
        self._alternate, self._context_tokens, self._unknown_keys = alternate, context_tokens, unknown_keys
        self._script: deque[Reply | Callable[[ReceivedRequest], Reply]] = deque()
        self._request_arrived = asyncio.Condition()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1024)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None  # noqa: S101
        self._server.close()
        await self.close_connections()
        await self._server.wait_closed()

    async def close_connections(self) -> None:
        """Abort all connections."""
        ending = list(self._connections)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def script(self, *replies: Reply | Callable[[ReceivedRequest], Reply]) -> None:
        """Add replies. `TypeError`: one of them is no reply; sent, it would look like a lost connection."""
        for reply in replies:
            _check_reply(reply)
        self._script.extend(replies)

    async def wait_for_request(self, count: int = 1) -> ReceivedRequest:
        """Wait for the `count`-th request, counted from 1, and return it."""
        async with self._request_arrived:
            await self._request_arrived.wait_for(lambda: len(self.requests) >= count)
        return self.requests[count - 1]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101
        self._connections.add(task)
        self.connections += 1
        try:
            # Many tests close the client in the middle of a reply.
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while request := await receive_request(reader):
                    connection = ServerConnection(reader, writer)
                    await self._answer(request, connection)
                    if not connection.reusable:
                        break
        except asyncio.CancelledError:
            # The server is closing: drop unsent data.
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, request: ReceivedRequest, connection: ServerConnection) -> None:
        if request.method == "GET" and request.path == "/v1/models":
            await self._list_models(request, connection)
            return
        async with self._request_arrived:
            self.requests.append(request)
            self._request_arrived.notify_all()
        error = self._check_request(request)
        if error:
            self.refused.append(str(error.error))
            await send_reply(error, request, connection)
            return
        reply = self._script.popleft() if self._script else self.default
        await send_reply(reply(request) if callable(reply) else reply, request, connection)

    async def _list_models(self, request: ReceivedRequest, connection: ServerConnection) -> None:
        """Answer `GET /v1/models`. It is not among `requests`: no completion was asked for."""
        if error := self._check_key(request):
            await send_reply(error, request, connection)
            return
        models = [{"id": name, "object": "model"} for name in sorted(self._models or {"m"})]
        await connection.respond(200, json.dumps({"object": "list", "data": models}).encode())

    def _check_key(self, request: ReceivedRequest) -> Status | None:
        if self._api_key is None or request.headers.get("authorization") == f"Bearer {self._api_key}":
            return None
        shown = request.headers.get("authorization", "").removeprefix("Bearer ")
        return Status(401, f"Incorrect API key provided: {shown}.", code="invalid_api_key")

    def _check_request(self, request: ReceivedRequest) -> Status | None:
        """Return the error of a real service, in its order of checks; None if the request is valid."""
        if request.method != "POST" or request.path != "/v1/chat/completions":
            return Status(404, f"Invalid URL ({request.method} {request.path})")
        if error := self._check_key(request):
            return error
        try:
            body = request.body
        except (ValueError, RecursionError):
            return Status(400, "We could not parse the JSON body of your request.")
        return self._check_body(body, count_tokens(request.raw))

    def _check_body(self, body: dict[str, Any], size: int) -> Status | None:
        model = body.get("model")
        if not model or (self._models and model not in self._models):
            return Status(404, f"The model `{model}` does not exist", code="model_not_found")
        if unknown := self._unknown_keys & body.keys():
            return Status(400, f"Unrecognized request argument supplied: {', '.join(sorted(unknown))}")
        error = check_openai_chat(body.get("messages"), body.get("tools"))
        if not error and self._alternate:
            error = check_strict_alternation(body["messages"])
        error = error or self._check_capabilities(body)
        if error:
            return Status(400, error)
        if self._context_tokens and size > self._context_tokens:
            message = f"This model's maximum context length is {self._context_tokens} tokens, you sent {size}."
            return Status(400, message, code="context_length_exceeded")
        return None

    def _check_capabilities(self, body: dict[str, Any]) -> str | None:
        if body.get("tools") and "tool_calling" not in self._capabilities:
            return f"{body['model']} does not support tools"
        contents = (message["content"] for message in body["messages"])
        parts = (part["type"] for content in contents if isinstance(content, list) for part in content)
        refused = next(
            (kind for kind in parts if _CAPABILITY_BY_PART.get(kind, kind) not in {*self._capabilities, "text"}), None
        )
        return refused and f"Invalid content type. {refused} is only supported by certain models."


# Requests and connections


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRequest:
    method: str
    path: str
    headers: Mapping[str, str]
    """By lower-case name."""
    raw: bytes = field(repr=False)

    @property
    def body(self) -> Any:
        """Decoded JSON; raises ValueError if it is none."""
        return json.loads(self.raw)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return list(self.body["messages"])

    @property
    def last_text(self) -> str:
        """Text parts of the last message."""
        content = self.messages[-1]["content"]
        if isinstance(content, str):
            return content
        return "\n\n".join(part["text"] for part in content or () if part["type"] == "text")


async def receive_request(reader: asyncio.StreamReader) -> ReceivedRequest | None:
    """Return the next request on a connection; None if the client closed it."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, path, _ = first.split(" ", 2)
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    return ReceivedRequest(method=method, path=path, headers=headers, raw=raw)


class ServerConnection:
    """Writes a response: whole by `respond`, or streamed by `begin`, `send` or `event`, and `end`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._chunked = False
        self.reusable = False
        """The response ended correctly, so the connection can be used again."""

    async def respond(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        sent = {"content-type": "application/json", "content-length": str(len(body))} | dict(headers or {})
        await self._write(_head(status, sent) + body)
        self.reusable = sent["content-length"] == str(len(body))

    async def begin(self, status: int = 200, content_type: str = "text/event-stream; charset=utf-8") -> None:
        """Send the head of a chunked response."""
        self._chunked = True
        await self._write(_head(status, {"content-type": content_type, "transfer-encoding": "chunked"}))

    async def send(self, data: bytes) -> None:
        await self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def event(self, payload: object) -> None:
        """Send one server-sent event: a string unchanged, anything else as JSON."""
        data = payload if isinstance(payload, str) else json.dumps(payload)
        await self.send(f"data: {data}\n\n".encode("utf-8", "surrogatepass"))

    async def end(self) -> None:
        await self._write(b"0\r\n\r\n")
        self.reusable = True

    async def wait_for_close(self) -> None:
        """Send nothing until the client closes the connection."""
        await self._reader.read()

    def reset(self) -> None:
        """Reset the connection, so that the client gets an error instead of end of file."""
        linger = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.transport.abort()

    async def _write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


# Scripted replies

_numbers = itertools.count(1)
CachedAs = Literal["openai", "deepseek", "moonshot", "llama.cpp"]
"""Where a server reports cached tokens: in `prompt_tokens_details`, in the usage itself, or in `timings`."""


@dataclass(frozen=True, slots=True)
class Calls:
    """A tool call in a reply. None omits a field, as a bad model does."""

    name: str | None
    arguments: object = field(default_factory=dict)
    """A string is sent unchanged, so it may be invalid JSON."""
    id: str | None = field(default_factory=lambda: f"call_{next(_numbers)}")

    def to_dict(self) -> dict[str, Any]:
        arguments = self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)
        function = {"name": self.name, "arguments": arguments}
        call = {"id": self.id, "type": "function", "function": {k: v for k, v in function.items() if v is not None}}
        return {key: value for key, value in call.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Says:
    """A well-formed reply, streamed if the request asks for it."""

    text: str = ""
    calls: tuple[Calls, ...] = ()
    finish: str | None = None
    """None: `tool_calls` if there are calls, else `stop`."""
    gate: asyncio.Event | None = None
    """The reply starts when this event is set."""
    token_delay: float = 0
    """Seconds between two tokens."""
    token_size: int | None = None
    """Characters per token; None: one word."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the server had in its cache; None: it does not report them."""
    cached_as: CachedAs = "openai"
    """Whose way of reporting them."""


@dataclass(frozen=True, slots=True)
class Status:
    """An error reply. A string becomes the message of an OpenAI error object; bytes are the whole body."""

    status: int
    error: str | bytes | Mapping[str, Any] = "refused"
    headers: Mapping[str, str] = field(default_factory=dict)
    code: str | None = None
    kind: str = "invalid_request_error"

    def body(self) -> bytes:
        if isinstance(self.error, bytes):
            return self.error
        if isinstance(self.error, str):
            error = {"message": self.error, "type": self.kind, "param": None, "code": self.code}
            return json.dumps({"error": error}).encode()
        return json.dumps(self.error).encode()


@dataclass(frozen=True, slots=True)
class CustomReply:
    """A coroutine that writes the reply itself."""

    write: Callable[[ServerConnection], Awaitable[None]]


Reply = str | Says | Status | CustomReply


def _check_reply(reply: object) -> None:
    if not isinstance(reply, Reply) and not callable(reply):
        hint = ": wrap it, as in Says(calls=(Calls(...),))" if isinstance(reply, Calls) else ""
        raise TypeError(f"a reply is a text, Says, Status, CustomReply or a function, not {type(reply).__name__}{hint}")


async def send_reply(reply: Reply, request: ReceivedRequest, connection: ServerConnection) -> None:
    match reply:
        case str():
            await send_reply(Says(reply), request, connection)
        case Status():
            await connection.respond(reply.status, reply.body(), reply.headers)
        case CustomReply():
            await reply.write(connection)
        case Says():
            if reply.gate:
                await reply.gate.wait()
            await (_stream if request.body.get("stream") else _whole)(reply, request, connection)


def completion(says: Says, request: ReceivedRequest) -> dict[str, Any]:
    """Return the reply as one document."""
    message: dict[str, Any] = {"role": "assistant", "content": says.text or None}
    if says.calls:
        message["tool_calls"] = [call.to_dict() for call in says.calls]
    choice = {"index": 0, "message": message, "finish_reason": _finish(says)}
    return {"object": "chat.completion", **_common(request), "choices": [choice], **_counts(says, request)}


def chunk(delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
    """Return one chunk of a streamed reply."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def call_chunks(calls: tuple[Calls, ...]) -> Iterator[dict[str, Any]]:
    """Yield chunks as services stream calls: the name first, then the arguments in pieces."""
    for index, call in enumerate(calls):
        call_fields = call.to_dict()
        arguments = call_fields["function"].pop("arguments")
        yield chunk({"tool_calls": [{"index": index, **call_fields}]})
        for piece in _pieces(arguments, max(16, len(arguments) // 64)):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})


def usage(says: Says, request: ReceivedRequest) -> dict[str, Any]:
    prompt, completed = count_tokens(request.raw), count_tokens(says.text.encode("utf-8", "replace"))
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completed,
        "total_tokens": prompt + completed,
    }
    if says.cached_tokens is None:
        return counts
    match says.cached_as:
        case "openai":
            counts["prompt_tokens_details"] = {"cached_tokens": says.cached_tokens}
        case "deepseek":
            counts["prompt_cache_hit_tokens"] = says.cached_tokens
            counts["prompt_cache_miss_tokens"] = prompt - says.cached_tokens
        case "moonshot":
            counts["cached_tokens"] = says.cached_tokens
    return counts


def _counts(says: Says, request: ReceivedRequest) -> dict[str, Any]:
    """Return the usage, and beside it the timings of llama.cpp."""
    counts = {"usage": usage(says, request)}
    if says.cached_tokens is not None and says.cached_as == "llama.cpp":
        counts["timings"] = {
            "cache_n": says.cached_tokens,
            "prompt_n": counts["usage"]["prompt_tokens"] - says.cached_tokens,
            "predicted_n": counts["usage"]["completion_tokens"],
        }
    return counts


def count_tokens(data: bytes) -> int:
    """Return a deterministic estimate."""
    return len(data) // 4 + 1


async def _whole(says: Says, request: ReceivedRequest, connection: ServerConnection) -> None:
    await connection.respond(200, json.dumps(completion(says, request)).encode())


async def _stream(says: Says, request: ReceivedRequest, connection: ServerConnection) -> None:
    await connection.begin()
    await connection.event(chunk({"role": "assistant", "content": ""}))
    loop = asyncio.get_running_loop()
    due = loop.time()
    for piece in _pieces(says.text, says.token_size):
        if says.token_delay:
            due += says.token_delay
            await asyncio.sleep(due - loop.time())
        await connection.event(chunk({"content": piece}))
    for piece_of_call in call_chunks(says.calls):
        await connection.event(piece_of_call)
    await connection.event(chunk({}, _finish(says)))
    if (request.body.get("stream_options") or {}).get("include_usage"):
        await connection.event({**chunk({}), "choices": [], **_counts(says, request)})
    await connection.event("[DONE]")
    await connection.end()


def _finish(says: Says) -> str:
    return says.finish or ("tool_calls" if says.calls else "stop")


def _common(request: ReceivedRequest) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "created": 1, "model": request.body.get("model", "")}


def _pieces(text: str, size: int | None) -> list[str]:
    if size is None:
        return re.findall(r"\s*\S+|\s+$", text)
    return [text[i : i + size] for i in range(0, len(text), size)]
