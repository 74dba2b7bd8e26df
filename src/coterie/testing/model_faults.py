"""The ways in which model services fail, each as a reply that a `ModelServer` can be scripted with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from coterie.testing.replies import Calls, Plays, Status, call_chunks, chunk
from coterie.testing.wire import Wire

_HELLO = chunk({"role": "assistant", "content": "Hello"})


def document(body: bytes, *, status: int = 200, content_type: str = "application/json") -> Status:
    """Any bytes as a whole response."""
    return Status(status, body, {"content-type": content_type})


def events(*payloads: object, end: bool = True) -> Plays:
    """A stream of just these events; without `end` it is cut off as if the service had died."""

    async def play(wire: Wire) -> None:
        await wire.begin()
        for payload in payloads:
            await wire.event(payload)
        if end:
            await wire.end()

    return Plays(play)


def said(*deltas: Mapping[str, Any], finish: str | None = "stop", done: bool = True) -> Plays:
    """A stream of these deltas, ended as asked for."""
    last = [chunk({}, finish)] if finish else []
    return events(*map(chunk, deltas), *last, *(["[DONE]"] if done else []))


def error_in_stream(error: object) -> Plays:
    return events(_HELLO, {"error": error})


def no_first_byte() -> Plays:
    return Plays(Wire.silence)


def head_and_nothing() -> Plays:
    async def play(wire: Wire) -> None:
        await wire.begin()
        await wire.silence()

    return Plays(play)


def stall() -> Plays:
    """Begins well, then says nothing more and keeps the connection open."""

    async def play(wire: Wire) -> None:
        await wire.begin()
        await wire.event(_HELLO)
        await wire.silence()

    return Plays(play)


def drip(every: float) -> Plays:
    """A well-formed stream, one byte at a time."""
    return _for_ever(b": still here\n", every, size=1)


def never_ending(every: float = 0.001) -> Plays:
    return _for_ever(b"data: " + json.dumps(chunk({"content": "and so on "})).encode() + b"\n\n", every)


def flood() -> Plays:
    """As many bytes as the client takes."""
    return _for_ever(b": " + b"x" * 100_000 + b"\n", 0)


def reset(after: int = 0) -> Plays:
    """Breaks the connection after so many tokens; 0: without a word."""
    return _broken(after, Wire.reset)


def cut(after: int = 1) -> Plays:
    """Closes the connection after so many tokens, the stream unfinished."""
    return _broken(after, lambda _: None)


def cut_in_arguments() -> Plays:
    """Ends, as HTTP goes in good order, in the middle of a tool call's arguments."""
    return events(*list(call_chunks((Calls("look_up", {"city": "Oslo", "days": 3}),)))[:-1])


def nested(depth: int = 100_000) -> Status:
    return document(b'{"choices":' + b"[" * depth + b"]" * depth + b"}")


def huge(size: int = 50_000_000) -> Status:
    return document(b'{"choices":[{"message":{"content":"' + b"x" * size + b'"}}]}')


def html() -> Status:
    return document(b"<!doctype html>\n<title>Gateway</title>\n<p>Hello: world", content_type="text/html")


def _for_ever(data: bytes, every: float, size: int | None = None) -> Plays:
    async def play(wire: Wire) -> None:
        await wire.begin()
        step = size or len(data)
        while True:
            for at in range(0, len(data), step):
                await wire.send(data[at : at + step])
                await asyncio.sleep(every)

    return Plays(play)


def _broken(after: int, end: Callable[[Wire], None]) -> Plays:
    async def play(wire: Wire) -> None:
        if after:
            await wire.begin()
        for _ in range(after):
            await wire.event(_HELLO)
        end(wire)

    return Plays(play)
