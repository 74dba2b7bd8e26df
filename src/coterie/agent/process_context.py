"""Tools that run in their own process (`process=True`): the process, and the `ToolContext` that the tool gets there.

All descendants of the process are killed when the call ends. It has the plain fields of the context. `send` and the
methods of `artifacts` are calls to the runtime, with the same checks as any other call. They run one after the other
over a socket, as msgpack frames after four bytes with their size. The runtime executes nothing that the process sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import msgspec

from coterie.agent.child_process import PROGRAM
from coterie.agent.tools import InProcess, NoToolResult, ToolContext, ToolProcessDied, ToolResult
from coterie.artifacts import Artifact
from coterie.errors import CoterieError, Refused
from coterie.llm.service import Capabilities
from coterie.messages import Payload, Receipt

_SIZE_BYTES = 4
_PIECE_BYTES = 1 << 20
"""Bytes of an artifact that one call reads."""
_MAX_OTHER_BYTES = 4 << 20
"""Of a frame, besides the bytes of a file."""
MAX_OUTPUT_BYTES = 64 << 20
"""A larger result is an error, and its process is stopped."""
_SWEEP_SECONDS = 2.0
"""Time for the keeper to kill the tool's descendants, before its process group is killed."""
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


async def run_in_process(run: InProcess, arguments: Mapping[str, Any], ctx: ToolContext) -> str | bytes | ToolResult:
    """Run a tool in its own process. The process and its descendants are gone when this returns or raises."""
    if not run.takes_context:
        return await _run_process(run, arguments, ctx, None)
    async with serve_context(ctx) as (descriptor, described):
        return await _run_process(run, arguments, ctx, described, descriptor)


async def _run_process(
    run: InProcess,
    arguments: Mapping[str, Any],
    ctx: ToolContext,
    described: Mapping[str, Any] | None,
    *descriptors: int,
) -> str | bytes | ToolResult:
    # Our own socket pair instead of asyncio's pipes: it can be closed while a descendant still holds the other end.
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", PROGRAM, "tool", str(os.getpid())),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                pass_fds=descriptors,
                start_new_session=True,
                env={**os.environ, "COTERIE_AGENT_ID": ctx.agent_id, "COTERIE_IDEMPOTENCY_KEY": ctx.idempotency_key},
            )
            theirs.close()
            try:
                return await _request(process, reader, writer, run, arguments, described)
            finally:
                writer.transport.abort()  # the keeper reads the end of its input, and kills all descendants
                await _wait_or_kill(process)
        finally:
            writer.transport.abort()


async def _request(
    process: asyncio.subprocess.Process,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    run: InProcess,
    arguments: Mapping[str, Any],
    described: Mapping[str, Any] | None,
) -> str | bytes | ToolResult:
    request = {
        "module": run.module,
        "file": run.file,
        "name": run.name,
        "memoryMb": run.memory_mb,
        "path": sys.path,
        "arguments": dict(arguments),
        "context": described,
    }
    writer.write(json.dumps(request).encode() + b"\n")
    try:
        await writer.drain()
        header = json.loads(await reader.readuntil(b"\n"))
        if header["size"] > MAX_OUTPUT_BYTES:
            raise NoToolResult(f"it returned {header['size']:,} bytes, the most is {MAX_OUTPUT_BYTES:,}")
        payload = await reader.readexactly(header["size"])
    except (asyncio.IncompleteReadError, ConnectionError):
        raise ToolProcessDied(f"its process {_describe_exit(await process.wait())} without a result") from None
    match header["kind"]:
        case "bytes":
            return payload
        case "text":
            return payload.decode()
    return ToolResult(ok=False, text=payload.decode())


def _describe_exit(status: int) -> str:
    number = -status if status < 0 else status - 128
    try:
        return f"was ended by {signal.Signals(number).name}"
    except ValueError:
        return f"ended with status {status}"


async def _wait_or_kill(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of the process; kill its process group if it takes too long. Completes even if cancelled."""
    ended = asyncio.create_task(process.wait())
    try:
        await asyncio.wait({ended}, timeout=_SWEEP_SECONDS)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(ended)


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
