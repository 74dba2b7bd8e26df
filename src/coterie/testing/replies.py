"""What a stand-in model says, well or badly."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.testing.wire import Received, Wire

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Calls:
    """A tool call in an answer. Give None for what a bad model leaves out."""

    name: str | None
    arguments: object = field(default_factory=dict)
    """A string goes out as it is, so it may be no JSON."""
    id: str | None = field(default_factory=lambda: f"call_{next(_numbers)}")

    def to_wire(self) -> dict[str, Any]:
        arguments = self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)
        function = {"name": self.name, "arguments": arguments}
        call = {"id": self.id, "type": "function", "function": {k: v for k, v in function.items() if v is not None}}
        return {key: value for key, value in call.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Says:
    """A well-formed answer, streamed where a stream was asked for."""

    text: str = ""
    calls: tuple[Calls, ...] = ()
    finish: str | None = None
    """None: `stop`, or `tool_calls` where there are some."""
    gate: asyncio.Event | None = None
    """The answer begins when it is set, so a test says when."""
    token_delay: float = 0
    """Seconds between two tokens."""
    token_size: int | None = None
    """Characters in one; None: words."""


@dataclass(frozen=True, slots=True)
class Status:
    """A refusal. A string is the message of an error in the service's own shape, bytes are the whole body."""

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
class Plays:
    """Anything at all: a coroutine that has the wire to itself."""

    play: Callable[[Wire], Awaitable[None]]


Reply = str | Says | Status | Plays


async def perform(reply: Reply, request: Received, wire: Wire) -> None:
    match reply:
        case str():
            await perform(Says(reply), request, wire)
        case Status():
            await wire.respond(reply.status, reply.body(), reply.headers)
        case Plays():
            await reply.play(wire)
        case Says():
            if reply.gate:
                await reply.gate.wait()
            await (_stream if request.body.get("stream") else _whole)(reply, request, wire)


def completion(says: Says, request: Received) -> dict[str, Any]:
    """The answer as one document."""
    message: dict[str, Any] = {"role": "assistant", "content": says.text or None}
    if says.calls:
        message["tool_calls"] = [call.to_wire() for call in says.calls]
    choice = {"index": 0, "message": message, "finish_reason": _finish(says)}
    return {"object": "chat.completion", **_common(request), "choices": [choice], "usage": usage(says, request)}


def chunk(delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
    """One piece of a streamed answer."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def call_chunks(calls: tuple[Calls, ...]) -> Iterator[dict[str, Any]]:
    """As services stream them: first the name, then the arguments in pieces."""
    for index, call in enumerate(calls):
        wired = call.to_wire()
        arguments = wired["function"].pop("arguments")
        yield chunk({"tool_calls": [{"index": index, **wired}]})
        for piece in _pieces(arguments, max(16, len(arguments) // 64)):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})


def usage(says: Says, request: Received) -> dict[str, int]:
    prompt, completed = tokens(request.raw), tokens(says.text.encode("utf-8", "replace"))
    return {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed}


def tokens(data: bytes) -> int:
    """About as many as a tokenizer would count, and always the same."""
    return len(data) // 4 + 1


async def _whole(says: Says, request: Received, wire: Wire) -> None:
    await wire.respond(200, json.dumps(completion(says, request)).encode())


async def _stream(says: Says, request: Received, wire: Wire) -> None:
    await wire.begin()
    await wire.event(chunk({"role": "assistant", "content": ""}))
    loop = asyncio.get_running_loop()
    due = loop.time()
    for piece in _pieces(says.text, says.token_size):
        if says.token_delay:
            due += says.token_delay
            await asyncio.sleep(due - loop.time())
        await wire.event(chunk({"content": piece}))
    for piece_of_call in call_chunks(says.calls):
        await wire.event(piece_of_call)
    await wire.event(chunk({}, _finish(says)))
    if (request.body.get("stream_options") or {}).get("include_usage"):
        await wire.event({**chunk({}), "choices": [], "usage": usage(says, request)})
    await wire.event("[DONE]")
    await wire.end()


def _finish(says: Says) -> str:
    return says.finish or ("tool_calls" if says.calls else "stop")


def _common(request: Received) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "created": 1, "model": request.body.get("model", "")}


def _pieces(text: str, size: int | None) -> list[str]:
    if size is None:
        return re.findall(r"\s*\S+|\s+$", text)
    return [text[i : i + size] for i in range(0, len(text), size)]
