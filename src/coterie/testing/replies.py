"""Scripted replies of a `ModelServer`.

Server side of an HTTP/1.1 connection that can also misbehave.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


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


_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Calls:
    """A tool call in a reply. None omits a field, as a bad model does."""

    name: str | None
    arguments: object = field(default_factory=dict)
    """A string is sent unchanged, so it may be invalid JSON."""
    id: str | None = field(default_factory=lambda: f"call_{next(_numbers)}")

    def to_json(self) -> dict[str, Any]:
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
        message["tool_calls"] = [call.to_json() for call in says.calls]
    choice = {"index": 0, "message": message, "finish_reason": _finish(says)}
    return {"object": "chat.completion", **_common(request), "choices": [choice], "usage": usage(says, request)}


def chunk(delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
    """Return one chunk of a streamed reply."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def call_chunks(calls: tuple[Calls, ...]) -> Iterator[dict[str, Any]]:
    """Yield chunks as services stream calls: the name first, then the arguments in pieces."""
    for index, call in enumerate(calls):
        call_json = call.to_json()
        arguments = call_json["function"].pop("arguments")
        yield chunk({"tool_calls": [{"index": index, **call_json}]})
        for piece in _pieces(arguments, max(16, len(arguments) // 64)):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})


def usage(says: Says, request: ReceivedRequest) -> dict[str, int]:
    prompt, completed = count_tokens(request.raw), count_tokens(says.text.encode("utf-8", "replace"))
    return {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed}


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
        await connection.event({**chunk({}), "choices": [], "usage": usage(says, request)})
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
