"""Tracing that is on: spans of OpenTelemetry, named after its conventions for generative AI."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar, Token
from typing import Any, TypeVar
from urllib.parse import urlsplit

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Tracer, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode, TraceFlags

from coterie.llm.config import ServiceEntry
from coterie.llm.service import LLMService, ServiceError, Terminal
from coterie.llm.types import Answer, Delta, Request
from coterie.telemetry import FindMessage, T, Tracing, Turn
from coterie.text import one_line

log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")

REMEMBERED = 4096
"""Messages whose chain is known without looking it up, and spans that later ones may be children of."""
MAX_CHAIN = 100
PATIENCE = 3.0
"""Seconds that a collector has to take the last spans."""

_ROOT: ContextVar[tuple[int, int] | None] = ContextVar("coterie_root", default=None)
"""The ids of the span that begins a trace, while it is being made."""


def open_spans(find: FindMessage, *, collector: bool) -> Spans | None:
    """By the tracer that the program around us has set up, else by one of our own; None: there is no use for either."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, trace.ProxyTracerProvider):
        return Spans(find, provider)
    if not collector:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say comes on top of this.
    own = TracerProvider(resource=Resource({SERVICE_NAME: "coterie"}).merge(Resource.create()))
    own.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(find, own, ours=own)


class Spans(Tracing):
    def __init__(self, find: FindMessage, provider: trace.TracerProvider, ours: TracerProvider | None = None) -> None:
        self._find, self._ours = find, ours
        self.tracer = provider.get_tracer("coterie")
        if isinstance(self.tracer, Tracer):
            # Ours alone: each call of get_tracer makes a new one.
            self.tracer.id_generator = _ChosenIds(self.tracer.id_generator)
        self._roots: OrderedDict[str, str] = OrderedDict()
        self._sent_in: OrderedDict[tuple[str, str | None], SpanContext] = OrderedDict()

    def turn(self, agent_id: str, name: str) -> Turn:
        return _Turn(self, agent_id, name)

    async def tool(self, name: str, call_id: str, work: Awaitable[T], went_well: Callable[[T], bool]) -> T:
        told = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": one_line(name),
            "gen_ai.tool.call.id": call_id,
            "gen_ai.tool.type": "function",
        }
        with self._during(f"execute_tool {one_line(name)}", told) as span:
            result = await work
            if not went_well(result):
                _fail(span, "tool_error")
            return result

    def service(self, service: LLMService, entry: ServiceEntry) -> LLMService:
        return _TracedService(self, service, entry)

    async def close(self) -> None:
        if self._ours is None:
            return
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def shut_down(provider: TracerProvider) -> None:
            provider.shutdown()
            with contextlib.suppress(RuntimeError):  # nobody waited so long
                loop.call_soon_threadsafe(done.set)

        # A thread that nobody waits for at exit: an unreachable collector must not hold up a stop.
        threading.Thread(target=shut_down, args=(self._ours,), name="coterie-spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await done.wait()

    def start(self, name: str, told: dict[str, Any], *, parent: Context | None = None, client: bool = False) -> Span:
        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        return self.tracer.start_span(name, parent, kind, told)

    @contextlib.contextmanager
    def _during(self, name: str, told: dict[str, Any]) -> Iterator[Span]:
        span = self.start(name, told)
        token = context.attach(trace.set_span_in_context(span))
        try:
            yield span
        except BaseException as error:
            _fail(span, "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__)
            raise
        finally:
            context.detach(token)
            span.end()

    # Chains

    async def begin(self, agent_id: str, name: str, cause: str | None) -> Span:
        """The span of an agent at work because of `cause`, in the trace of the chain that led to it."""
        told = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": "coterie",
            "gen_ai.agent.id": agent_id,
            "gen_ai.agent.name": name,
        }
        label = f"invoke_agent {one_line(name)}"
        message = await self._find(cause) if cause else None
        if cause is None or message is None:
            return self.start(label, told, parent=Context())
        root = await self._root(message.id, message.cause)
        told |= {"coterie.message.id": cause, "coterie.chain.id": root}
        first = _ids_of(root)
        known = self._sent_in.get((agent_id, cause)) or self._sent_in.get((message.sender, message.cause))
        if known is None and root == cause:
            span = self._begin_trace(label, told, first)
        else:
            span = self.start(label, told, parent=_under(known or _remote(first)))
        _remember(self._sent_in, (agent_id, cause), span.get_span_context())
        return span

    def _begin_trace(self, name: str, told: dict[str, Any], ids: tuple[int, int]) -> Span:
        if not isinstance(self.tracer, Tracer):
            return self.start(name, told, parent=_under(_remote(ids)))
        token = _ROOT.set(ids)
        try:
            return self.start(name, told, parent=Context())
        finally:
            _ROOT.reset(token)

    async def _root(self, message_id: str, cause: str | None) -> str:
        """The message that began the chain; where the older part is kept no more, the oldest that is named."""
        passed = [message_id]
        while cause and cause not in self._roots and len(passed) < MAX_CHAIN:
            passed.append(cause)
            found = await self._find(cause)
            cause = found.cause if found else None
        root = self._roots.get(cause, cause) if cause else passed[-1]
        for one in passed:
            _remember(self._roots, one, root)
        return root


class _Turn:
    def __init__(self, spans: Spans, agent_id: str, name: str) -> None:
        self._spans, self._agent_id, self._name = spans, agent_id, name
        self._cause: str | None = None
        self._span: Span | None = None
        self._token: Token[Context] | None = None

    async def follows(self, cause: str | None) -> None:
        if self._span is not None and cause == self._cause:
            return
        self.end()
        try:
            self._span = await self._spans.begin(self._agent_id, self._name, cause)
        except Exception:  # a turn goes on, whether it can be traced or not
            log.exception("this part of %s's turn is not traced", self._agent_id)
            return
        self._cause = cause
        self._token = context.attach(trace.set_span_in_context(self._span))

    def end(self) -> None:
        if self._token is not None:
            context.detach(self._token)
        if self._span is not None:
            self._span.end()
        self._span = self._token = None


class _TracedService:
    def __init__(self, spans: Spans, service: LLMService, entry: ServiceEntry) -> None:
        self._spans, self._service, self._entry = spans, service, entry

    @property
    def id(self) -> str:
        return self._service.id

    async def generate(self, request: Request) -> AsyncIterator[Delta | Answer]:
        span = self._spans.start(f"chat {self._entry.model}", _asked(self._entry), client=True)
        pieces, answered = self._service.generate(request), False
        try:
            async for piece in pieces:
                if isinstance(piece, Answer):
                    answered = True
                    span.set_attribute("gen_ai.usage.input_tokens", piece.usage.input_tokens)
                    span.set_attribute("gen_ai.usage.output_tokens", piece.usage.output_tokens)
                yield piece
        except ServiceError as error:
            _fail(span, error.category if isinstance(error, Terminal) else type(error).__name__)
            raise
        except BaseException as error:
            if not answered:  # whoever has the answer closes us, and that is no failure
                _fail(span, "cancelled" if not isinstance(error, Exception) else type(error).__name__)
            raise
        finally:
            span.end()
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()

    async def close(self) -> None:
        await self._service.close()


class _ChosenIds(IdGenerator):
    """The ids of the span that begins a chain's trace are made from the chain; all others are as before."""

    def __init__(self, usual: IdGenerator) -> None:
        self._usual = usual

    def generate_trace_id(self) -> int:
        chosen = _ROOT.get()
        return chosen[0] if chosen else self._usual.generate_trace_id()

    def generate_span_id(self) -> int:
        chosen = _ROOT.get()
        return chosen[1] if chosen else self._usual.generate_span_id()


def _asked(entry: ServiceEntry) -> dict[str, Any]:
    url = urlsplit(entry.base_url)
    told: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": entry.provider,
        "gen_ai.request.model": entry.model,
        "gen_ai.request.stream": True,
        "coterie.service.id": entry.id,
    }
    if entry.max_tokens:
        told["gen_ai.request.max_tokens"] = entry.max_tokens
    if url.hostname:
        told["server.address"] = url.hostname
        told["server.port"] = url.port or (443 if url.scheme == "https" else 80)
    return told


def _ids_of(root: str) -> tuple[int, int]:
    """A trace's id and that of its first span. Neither may be 0, which the chance of one in 2^64 takes care of."""
    digest = hashlib.blake2b(root.encode(), digest_size=24, person=b"coterie-trace").digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:])


def _remote(ids: tuple[int, int]) -> SpanContext:
    return SpanContext(*ids, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _under(parent: SpanContext) -> Context:
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())


def _fail(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR)


def _remember(kept: OrderedDict[K, V], key: K, value: V) -> None:
    kept[key] = value
    if len(kept) > REMEMBERED:
        kept.popitem(last=False)
