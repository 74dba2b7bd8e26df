"""Scripted replies that reproduce failures of model services."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from coterie.testing.model_server import Calls, CustomReply, ServerConnection, Status, call_chunks, chunk

_HELLO = chunk({"role": "assistant", "content": "Hello"})


def document(body: bytes, *, status: int = 200, content_type: str = "application/json") -> Status:
    """A whole response of any bytes."""
    return Status(status, body, {"content-type": content_type})


def events(*payloads: object, end: bool = True) -> CustomReply:
    """A stream of these events; without `end` the connection is cut."""

    async def write(connection: ServerConnection) -> None:
        await connection.begin()
        for payload in payloads:
            await connection.event(payload)
        if end:
            await connection.end()

    return CustomReply(write)


def deltas(*items: Mapping[str, Any], finish: str | None = "stop", done: bool = True) -> CustomReply:
    """A stream of these deltas."""
    last = [chunk({}, finish)] if finish else []
    return events(*map(chunk, items), *last, *(["[DONE]"] if done else []))


def error_in_stream(error: object) -> CustomReply:
    return events(_HELLO, {"error": error})


def no_first_byte() -> CustomReply:
    return CustomReply(ServerConnection.wait_for_close)


def head_and_nothing() -> CustomReply:
    async def write(connection: ServerConnection) -> None:
        await connection.begin()
        await connection.wait_for_close()

    return CustomReply(write)


def stall() -> CustomReply:
    """Starts, then sends nothing more and keeps the connection open."""

    async def write(connection: ServerConnection) -> None:
        await connection.begin()
        await connection.event(_HELLO)
        await connection.wait_for_close()

    return CustomReply(write)


def drip(every: float) -> CustomReply:
    """A well-formed stream, one byte at a time."""
    return _repeat(b": still here\n", every, size=1)


def never_ending(every: float = 0.001) -> CustomReply:
    return _repeat(b"data: " + json.dumps(chunk({"content": "and so on "})).encode() + b"\n\n", every)


def flood() -> CustomReply:
    """Sends as many bytes as the client reads."""
    return _repeat(b": " + b"x" * 100_000 + b"\n", 0)


def reset(after: int = 0) -> CustomReply:
    """Resets the connection after that many tokens."""
    return _broken(after, ServerConnection.reset)


def cut(after: int = 1) -> CustomReply:
    """Closes the connection after that many tokens, in the middle of the stream."""
    return _broken(after, lambda _: None)


def cut_in_arguments() -> CustomReply:
    """Ends the HTTP response correctly, but in the middle of a tool call's arguments."""
    return events(*list(call_chunks((Calls("look_up", {"city": "Oslo", "days": 3}),)))[:-1])


def nested(depth: int = 100_000) -> Status:
    return document(b'{"choices":' + b"[" * depth + b"]" * depth + b"}")


def huge(size: int = 50_000_000) -> Status:
    return document(b'{"choices":[{"message":{"content":"' + b"x" * size + b'"}}]}')


def html() -> Status:
    return document(b"<!doctype html>\n<title>Gateway</title>\n<p>Hello: world", content_type="text/html")


def _repeat(data: bytes, every: float, size: int | None = None) -> CustomReply:
    async def write(connection: ServerConnection) -> None:
        await connection.begin()
        step = size or len(data)
        while True:
            for at in range(0, len(data), step):
                await connection.send(data[at : at + step])
                await asyncio.sleep(every)

    return CustomReply(write)


def _broken(after: int, end: Callable[[ServerConnection], None]) -> CustomReply:
    async def write(connection: ServerConnection) -> None:
        if after:
            await connection.begin()
        for _ in range(after):
            await connection.event(_HELLO)
        end(connection)

    return CustomReply(write)
