"""The `ToolContext` of a tool that runs in its own process.

The process has the plain fields. `send` and the methods of `artifacts` are calls to the runtime, with the same checks
as any other call. They run one after the other over a socket, as msgpack frames after four bytes with their size. The
runtime executes nothing that the process sends.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import msgspec

from coterie.agent.tools import ToolContext
from coterie.artifacts import Artifact
from coterie.errors import CoterieError, Refused
from coterie.llm.service import Capabilities
from coterie.messages import Payload, Receipt

_SIZE_BYTES = 4
_PIECE_BYTES = 1 << 20
"""Bytes of an artifact that one call reads."""
_MAX_OTHER_BYTES = 4 << 20
"""Of a frame, besides the bytes of a file."""
_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


class _Send(msgspec.Struct, tag="send"):
    to: Any
    payload: Any
    delay_ms: Any
    quick_replies: Any
    every: Any
    time_zone: Any
    unless_answered: Any


class _Put(msgspec.Struct, tag="put"):
    data: bytes
    filename: str | None
    key: str | None


class _Describe(msgspec.Struct, tag="describe"):
    ref: str


class _Latest(msgspec.Struct, tag="latest"):
    limit: int


class _Read(msgspec.Struct, tag="read"):
    ref: str
    start: int
    end: int


class _Progress(msgspec.Struct, tag="progress"):
    progress: float
    total: float | None
    message: str | None


_Call = _Send | _Put | _Describe | _Latest | _Read | _Progress
_decode_call = msgspec.msgpack.Decoder(_Call).decode


class _Reply(msgspec.Struct):
    value: bytes = b""
    """The result, as msgpack."""
    error: str | None = None
    code: str | None = None
    """Of a `Refused`."""


_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


# In the runtime


@asynccontextmanager
async def serve_context(ctx: ToolContext) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """Answer the calls of one process. Yields the file descriptor that it needs, and what `make_context` needs."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        serving = asyncio.create_task(_serve(reader, writer, ctx), name="coterie-tool-context")
        try:
            yield theirs.fileno(), _describe(ctx, theirs.fileno())
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            writer.transport.abort()


def _describe(ctx: ToolContext, fd: int) -> dict[str, Any]:
    can = ctx.capabilities
    return {
        "fd": fd,
        "agentId": ctx.agent_id,
        "idempotencyKey": ctx.idempotency_key,
        "input": sorted(can.input),
        "output": sorted(can.output),
        "inferred": can.inferred,
        "tools": sorted(ctx.tools),
        "maxFileBytes": ctx.artifacts.max_file_bytes,
    }


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ctx: ToolContext) -> None:
    try:
        while True:
            size = int.from_bytes(await reader.readexactly(_SIZE_BYTES), "big")
            if size > ctx.artifacts.max_file_bytes + _MAX_OTHER_BYTES:
                return
            frame = await reader.readexactly(size)
            writer.write(_frame(await _answer(ctx, frame)))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    finally:
        writer.transport.abort()  # so that the process does not wait for an answer


async def _answer(ctx: ToolContext, frame: bytes) -> _Reply:
    try:
        return _Reply(value=_encode(await _run(ctx, _decode_call(frame))))
    except Refused as refusal:
        return _Reply(error=refusal.message, code=refusal.code)
    except Exception as error:  # the process must get an answer to every call
        return _Reply(error=f"{type(error).__name__}: {error}")


async def _run(ctx: ToolContext, call: _Call) -> object:
    match call:
        case _Send():
            return await ctx.send(
                call.to,
                call.payload,
                delay_ms=call.delay_ms,
                quick_replies=call.quick_replies,
                every=call.every,
                time_zone=call.time_zone,
                unless_answered=call.unless_answered,
            )
        case _Put():
            return await ctx.artifacts.put(call.data, call.filename, call.key)
        case _Describe():
            return await ctx.artifacts.describe(call.ref)
        case _Latest():
            return list(await ctx.artifacts.latest(call.limit))
        case _Read():
            end = min(call.end, call.start + _PIECE_BYTES)
            return b"".join([piece async for piece in ctx.artifacts.open(call.ref, call.start, end)])
        case _Progress():
            await ctx.report_progress(call.progress, call.total, call.message)
            return None


def _frame(value: object) -> bytes:
    data = _encode(value)
    return len(data).to_bytes(_SIZE_BYTES, "big") + data


# In the process of the tool


def make_context(described: dict[str, Any]) -> ToolContext:
    """Return the context in the process of a tool. `described`: as `serve_context` yielded it."""
    runtime = _Runtime(socket.socket(fileno=described["fd"]))
    capabilities = Capabilities(
        input=frozenset(described["input"]), output=frozenset(described["output"]), inferred=described["inferred"]
    )

    async def send(
        to: str,
        payload: Payload,
        *,
        delay_ms: float | None = None,
        quick_replies: list[str] | None = None,
        every: str | None = None,
        time_zone: str | None = None,
        unless_answered: str | None = None,
    ) -> Receipt:
        sent = _Send(to, payload, delay_ms, quick_replies, every, time_zone, unless_answered)
        return await runtime.call(sent, Receipt)

    async def report_progress(progress: float, total: float | None = None, message: str | None = None) -> None:
        await runtime.call(_Progress(progress, total, message), type(None))

    return ToolContext(
        agent_id=described["agentId"],
        capabilities=capabilities,
        router=cast(Any, _NoRouter()),
        send=send,
        report_progress=report_progress,
        artifacts=cast(Any, ProcessArtifacts(runtime, described["maxFileBytes"])),
        idempotency_key=described["idempotencyKey"],
        tools=frozenset(described["tools"]),
    )


class ProcessArtifacts:
    """`AgentArtifacts` in the process of a tool."""

    def __init__(self, runtime: _Runtime, max_file_bytes: int) -> None:
        self._runtime, self.max_file_bytes = runtime, max_file_bytes

    async def put(self, chunks: AsyncIterable[bytes] | bytes, filename: str | None, key: str | None = None) -> Artifact:
        data = chunks if isinstance(chunks, bytes) else b"".join([chunk async for chunk in chunks])
        if len(data) > self.max_file_bytes:
            raise Refused(
                "artifact_too_large", f"the file has {len(data):,} bytes, the most is {self.max_file_bytes:,}"
            )
        return await self._runtime.call(_Put(data, filename, key), Artifact)

    async def describe(self, ref: str) -> Artifact:
        return await self._runtime.call(_Describe(ref), Artifact)

    async def latest(self, limit: int = 50) -> Sequence[Artifact]:
        return await self._runtime.call(_Latest(limit), list[Artifact])

    async def open(self, ref: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        size = (await self.describe(ref)).size
        last = size if end is None else min(end, size)
        while start < last and (piece := await self._runtime.call(_Read(ref, start, last), bytes)):
            yield piece
            start += len(piece)

    async def read(self, ref: str) -> bytes:
        return b"".join([piece async for piece in self.open(ref)])


class _Runtime:
    """The other end of the socket. Calls block a thread each, and run one after the other."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock = connection, threading.Lock()

    async def call(self, call: _Call, kind: type[T]) -> T:
        reply = await asyncio.to_thread(self._exchange, _frame(call))
        if reply.error is None:
            return msgspec.msgpack.decode(reply.value, type=kind)
        raise Refused(reply.code, reply.error) if reply.code else CoterieError(reply.error)

    def _exchange(self, frame: bytes) -> _Reply:
        with self._lock:
            self._connection.sendall(frame)
            size = int.from_bytes(self._receive(_SIZE_BYTES), "big")
            return _decode_reply(self._receive(size))

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._connection.recv(min(size - len(data), _PIECE_BYTES))
            if not piece:
                raise CoterieError("the runtime has ended the call")
            data += piece
        return bytes(data)


class _NoRouter:
    def __getattr__(self, name: str) -> Any:
        raise CoterieError("ctx.router is not available with process=True: ctx.capabilities, send and artifacts are")
