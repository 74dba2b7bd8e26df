"""Tracing with OpenTelemetry, following its semantic conventions for generative AI.

Each chain of messages is one trace. The trace id is derived from the id of the chain's first message, so it is the same
after a restart and in other processes, and nothing about it needs to be stored.
"""

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
from coterie.llm.service import LLMService, PermanentError, ServiceError
from coterie.llm.types import Completion, ModelRequest, TextDelta
from coterie.telemetry import FindMessage, T, Tracing, TurnTrace
from coterie.text import one_line

log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")

CACHE_SIZE = 4096
"""Entries in the cache of chain roots, and in the cache of parent spans."""
MAX_CHAIN = 100
EXPORT_TIMEOUT_SECONDS = 3.0
"""Time for sending the last spans at a stop."""

_root_ids: ContextVar[tuple[int, int] | None] = ContextVar("coterie_root", default=None)
"""Trace id and span id for the root span that is being started."""


def open_tracing(find: FindMessage, *, collector: bool) -> OtelTracing | None:
    """Trace with the host program's tracer, or with our own if a collector is set; None if there is neither."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, trace.ProxyTracerProvider):
        return OtelTracing(find, provider)
    if not collector:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override this.
    own = TracerProvider(resource=Resource({SERVICE_NAME: "coterie"}).merge(Resource.create()))
    own.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OtelTracing(find, own, own_provider=own)


class OtelTracing(Tracing):
    def __init__(
        self, find: FindMessage, provider: trace.TracerProvider, own_provider: TracerProvider | None = None
    ) -> None:
        """`own_provider`: shut down by `close`."""
        self._find, self._own_provider = find, own_provider
        self.tracer = provider.get_tracer("coterie")
        if isinstance(self.tracer, Tracer):
            # Affects only this tracer: get_tracer makes a new one at each call.
            self.tracer.id_generator = _RootIdGenerator(self.tracer.id_generator)
        self._roots: OrderedDict[str, str] = OrderedDict()
        """First message of the chain, by message."""
        self._spans: OrderedDict[tuple[str, str | None], SpanContext] = OrderedDict()
        """Span of an agent's work, by agent and cause."""

    def turn(self, agent_id: str, name: str) -> TurnTrace:
        return _OtelTurnTrace(self, agent_id, name)

    async def tool(self, name: str, call_id: str, work: Awaitable[T], is_ok: Callable[[T], bool]) -> T:
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": one_line(name),
            "gen_ai.tool.call.id": call_id,
            "gen_ai.tool.type": "function",
        }
        with self._span(f"execute_tool {one_line(name)}", attributes) as span:
            result = await work
            if not is_ok(result):
                _fail(span, "tool_error")
            return result

    def service(self, service: LLMService, entry: ServiceEntry) -> LLMService:
        return _TracedService(self, service, entry)

    async def close(self) -> None:
        if self._own_provider is None:
            return
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def shut_down(provider: TracerProvider) -> None:
            provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is closed after the timeout
                loop.call_soon_threadsafe(done.set)

        # A daemon thread: an unreachable collector must not delay the exit.
        threading.Thread(target=shut_down, args=(self._own_provider,), name="coterie-spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXPORT_TIMEOUT_SECONDS):
                await done.wait()

    def start(
        self, name: str, attributes: dict[str, Any], *, parent: Context | None = None, client: bool = False
    ) -> Span:
        """`parent`: None for the current span. `client`: the span is a request to another system."""
        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        return self.tracer.start_span(name, parent, kind, attributes)

    @contextlib.contextmanager
    def _span(self, name: str, attributes: dict[str, Any]) -> Iterator[Span]:
        span = self.start(name, attributes)
        token = context.attach(trace.set_span_in_context(span))
        try:
            yield span
        except BaseException as error:
            _fail(span, "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__)
            raise
        finally:
            context.detach(token)
            span.end()

    async def start_turn(self, agent_id: str, name: str, cause: str | None) -> Span:
        """Start the span of an agent's work on the message `cause`, in the trace of its chain."""
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": "coterie",
            "gen_ai.agent.id": agent_id,
            "gen_ai.agent.name": name,
        }
        label = f"invoke_agent {one_line(name)}"
        message = await self._find(cause) if cause else None
        if cause is None or message is None:
            return self.start(label, attributes, parent=Context())
        root = await self._find_root(message.id, message.cause)
        attributes |= {"coterie.message.id": cause, "coterie.chain.id": root}
        root_ids = _derive_root_ids(root)
        parent = self._spans.get((agent_id, cause)) or self._spans.get((message.sender, message.cause))
        if parent is None and root == cause:
            span = self._start_trace(label, attributes, root_ids)
        else:
            span = self.start(label, attributes, parent=_child_of(parent or _remote_span(root_ids)))
        _cache(self._spans, (agent_id, cause), span.get_span_context())
        return span

    def _start_trace(self, name: str, attributes: dict[str, Any], ids: tuple[int, int]) -> Span:
        if not isinstance(self.tracer, Tracer):
            return self.start(name, attributes, parent=_child_of(_remote_span(ids)))
        token = _root_ids.set(ids)
        try:
            return self.start(name, attributes, parent=Context())
        finally:
            _root_ids.reset(token)

    async def _find_root(self, message_id: str, cause: str | None) -> str:
        """Id of the first message of the chain; if that was pruned, of the oldest one known."""
        chain = [message_id]
        while cause and cause not in self._roots and len(chain) < MAX_CHAIN:
            chain.append(cause)
            message = await self._find(cause)
            cause = message.cause if message else None
        root = self._roots.get(cause, cause) if cause else chain[-1]
        for passed_id in chain:
            _cache(self._roots, passed_id, root)
        return root


class _OtelTurnTrace:
    def __init__(self, tracing: OtelTracing, agent_id: str, name: str) -> None:
        self._tracing, self._agent_id, self._name = tracing, agent_id, name
        self._cause: str | None = None
        self._span: Span | None = None
        self._token: Token[Context] | None = None

    async def set_cause(self, cause: str | None) -> None:
        if self._span is not None and cause == self._cause:
            return
        self.end()
        try:
            self._span = await self._tracing.start_turn(self._agent_id, self._name, cause)
        except Exception:  # tracing must not stop a turn
            log.exception("tracing the turn of %s failed", self._agent_id)
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
    def __init__(self, tracing: OtelTracing, service: LLMService, entry: ServiceEntry) -> None:
        self._tracing, self._service, self._entry = tracing, service, entry

    @property
    def id(self) -> str:
        return self._service.id

    async def generate(self, request: ModelRequest) -> AsyncIterator[TextDelta | Completion]:
        span = self._tracing.start(f"chat {self._entry.model}", _request_attributes(self._entry), client=True)
        pieces, answered = self._service.generate(request), False
        try:
            async for piece in pieces:
                if isinstance(piece, Completion):
                    answered = True
                    span.set_attribute("gen_ai.usage.input_tokens", piece.usage.input_tokens)
                    span.set_attribute("gen_ai.usage.output_tokens", piece.usage.output_tokens)
                yield piece
        except ServiceError as error:
            _fail(span, error.category if isinstance(error, PermanentError) else type(error).__name__)
            raise
        except BaseException as error:
            if not answered:  # a caller that has the answer closes the generator; that is no failure
                _fail(span, "cancelled" if not isinstance(error, Exception) else type(error).__name__)
            raise
        finally:
            span.end()
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()

    async def close(self) -> None:
        await self._service.close()


class _RootIdGenerator(IdGenerator):
    """Gives a root span its derived ids; all other ids come from `default`."""

    def __init__(self, default: IdGenerator) -> None:
        self._default = default

    def generate_trace_id(self) -> int:
        ids = _root_ids.get()
        return ids[0] if ids else self._default.generate_trace_id()

    def generate_span_id(self) -> int:
        ids = _root_ids.get()
        return ids[1] if ids else self._default.generate_span_id()


def _request_attributes(entry: ServiceEntry) -> dict[str, Any]:
    url = urlsplit(entry.base_url)
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": entry.provider,
        "gen_ai.request.model": entry.model,
        "gen_ai.request.stream": True,
        "coterie.service.id": entry.id,
    }
    if entry.max_tokens:
        attributes["gen_ai.request.max_tokens"] = entry.max_tokens
    if url.hostname:
        attributes["server.address"] = url.hostname
        attributes["server.port"] = url.port or (443 if url.scheme == "https" else 80)
    return attributes


def _derive_root_ids(root: str) -> tuple[int, int]:
    """Trace id and root span id of a chain. 0 would be invalid; its probability is negligible."""
    digest = hashlib.blake2b(root.encode(), digest_size=24, person=b"coterie-trace").digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:])


def _remote_span(ids: tuple[int, int]) -> SpanContext:
    return SpanContext(*ids, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _child_of(parent: SpanContext) -> Context:
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())


def _fail(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR)


def _cache(cache: OrderedDict[K, V], key: K, value: V) -> None:
    cache[key] = value
    if len(cache) > CACHE_SIZE:
        cache.popitem(last=False)
