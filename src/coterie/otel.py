"""Tracing with OpenTelemetry, following its semantic conventions for generative AI.

Each task is one trace. The trace id is derived from the id of the task, so it is the same after a restart and in other
processes, and nothing about it needs to be stored. A task that another one scheduled has a link to that one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar, Token
from typing import Any, TypeVar
from urllib.parse import urlsplit

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Tracer, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode, TraceFlags

from coterie.llm.config import ServiceEntry
from coterie.llm.price import BILLION
from coterie.llm.service import Completion, LLMService, ModelRequest, ServiceError, TextDelta, failure_code
from coterie.telemetry import FindMessage, T, Tracing, TurnTrace
from coterie.text import one_line

log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")

CACHE_SIZE = 4096
"""Entries in the cache of parent spans."""
EXPORT_TIMEOUT_SECONDS = 3.0
"""Time for sending the last spans at a stop."""

_root_ids: ContextVar[tuple[int, int] | None] = ContextVar("coterie_root", default=None)
"""Trace id and span id for the root span that is being started."""
_current_task: ContextVar[str | None] = ContextVar("coterie_task", default=None)
"""The task that the current turn works on."""


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
        self,
        name: str,
        attributes: dict[str, Any],
        *,
        parent: Context | None = None,
        client: bool = False,
        links: Sequence[Link] = (),
    ) -> Span:
        """`parent`: None for the current span. `client`: the span is a request to another system."""
        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        if task := _current_task.get():
            attributes |= {"coterie.task": task}
        return self.tracer.start_span(name, parent, kind, attributes, links)

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
        """Start the span of an agent's work on the message `cause`, in the trace of its task."""
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": "coterie",
            "gen_ai.agent.id": agent_id,
            "gen_ai.agent.name": name,
        }
        label = f"invoke_agent {one_line(name)}"
        message = await self._find(cause) if cause else None
        if cause is None or message is None:
            _current_task.set(None)
            return self.start(label, attributes, parent=Context())
        task = message.task or message.id
        _current_task.set(task)
        attributes |= {"coterie.message.id": cause}
        root_ids = _derive_root_ids(task)
        parent = self._spans.get((agent_id, cause)) or self._spans.get((message.sender, message.cause))
        if parent is not None and parent.trace_id != root_ids[0]:
            parent = None  # the message starts a task of its own
        links = [Link(_remote_span(_derive_root_ids(message.parent_task)))] if message.parent_task else []
        if parent is None and task == cause:
            span = self._start_trace(label, attributes, root_ids, links)
        else:
            span = self.start(label, attributes, parent=_child_of(parent or _remote_span(root_ids)), links=links)
        _cache(self._spans, (agent_id, cause), span.get_span_context())
        return span

    def _start_trace(self, name: str, attributes: dict[str, Any], ids: tuple[int, int], links: Sequence[Link]) -> Span:
        if not isinstance(self.tracer, Tracer):
            return self.start(name, attributes, parent=_child_of(_remote_span(ids)), links=links)
        token = _root_ids.set(ids)
        try:
            return self.start(name, attributes, parent=Context(), links=links)
        finally:
            _root_ids.reset(token)


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
        attributes = _request_attributes(self._entry, request)
        span = self._tracing.start(f"chat {self._entry.model}", attributes, client=True)
        pieces, answered, started = self._service.generate(request), False, time.monotonic()
        has_begun = False
        try:
            async for piece in pieces:
                if not has_begun:
                    has_begun = True
                    span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - started)
                if isinstance(piece, Completion):
                    answered = True
                    span.set_attributes(_response_attributes(piece, self._entry))
                yield piece
        except ServiceError as error:
            _fail(span, failure_code(error))
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


def _response_attributes(answer: Completion, entry: ServiceEntry) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.response.finish_reasons": [answer.finish_reason],
        "gen_ai.usage.input_tokens": answer.usage.input_tokens,
        "gen_ai.usage.output_tokens": answer.usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": answer.usage.cached_tokens,
    }
    if entry.price and answer.usage.input_tokens:  # 0: the service did not report its usage
        attributes["coterie.cost"] = entry.price.cost(answer.usage) / BILLION
        attributes["coterie.currency"] = entry.price.currency
    return attributes | ({"gen_ai.response.model": answer.model} if answer.model else {})


def _request_attributes(entry: ServiceEntry, request: ModelRequest) -> dict[str, Any]:
    url = urlsplit(entry.base_url)
    sampling = entry.sampling.override_with(request.sampling)
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": entry.provider,
        "gen_ai.request.model": entry.model,
        "gen_ai.request.stream": True,
        "coterie.service.id": entry.id,
        "coterie.service.name": entry.name or entry.id,
    }
    chosen = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p}
    attributes |= {f"gen_ai.request.{name}": value for name, value in chosen.items() if value is not None}
    if url.hostname:
        attributes["server.address"] = url.hostname
        attributes["server.port"] = url.port or (443 if url.scheme == "https" else 80)
    return attributes


def _derive_root_ids(task: str) -> tuple[int, int]:
    """Trace id and root span id of a task. 0 would be invalid; its probability is negligible."""
    digest = hashlib.blake2b(task.encode(), digest_size=24, person=b"coterie-trace").digest()
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
