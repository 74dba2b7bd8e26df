"""Scripted replies of a `ModelServer`."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.testing.server_connection import ReceivedRequest, ServerConnection

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
