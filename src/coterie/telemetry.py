"""Tracing of turns, model requests and tool calls, and the context of log lines.

Tracing is on if the environment names an OpenTelemetry collector, or the host program has set up a tracer. Then
`coterie.otel` implements it; otherwise OpenTelemetry is not imported. Traces never contain message text.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar, Token
from typing import Protocol, TypeVar

from coterie.llm.config import ServiceEntry
from coterie.llm.service import LLMService
from coterie.messages import Message

log = logging.getLogger(__name__)

T = TypeVar("T")
FindMessage = Callable[[str], Awaitable[Message | None]]
_COLLECTORS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class TurnTrace(Protocol):
    """Traces an agent from a claim to its release."""

    async def set_cause(self, cause: str | None) -> None:
        """Start a span for the work caused by this message, unless it is the current cause."""
        ...

    def end(self) -> None: ...


class Tracing:
    """Tracing that does nothing. The methods never fail, also in `coterie.otel`."""

    def turn(self, agent_id: str, name: str) -> TurnTrace:
        """Use the result in one task only: spans of that task and of tasks it starts become children."""
        return _NO_TURN_TRACE

    def tool(self, name: str, call_id: str, work: Awaitable[T], is_ok: Callable[[T], bool]) -> Awaitable[T]:
        """Return `work`, awaited in the span of a tool call."""
        return work

    def service(self, service: LLMService, entry: ServiceEntry) -> LLMService:
        """`service` with a span for each request."""
        return service

    async def close(self) -> None:
        """Send the remaining spans, with a timeout."""


class _NoTurnTrace:
    async def set_cause(self, cause: str | None) -> None: ...

    def end(self) -> None: ...


_NO_TURN_TRACE = _NoTurnTrace()


def make_tracing(find: FindMessage, environ: Mapping[str, str] = os.environ) -> Tracing:
    """The tracing that the environment asks for. `find` looks up a message by id."""
    collector = any(environ.get(name, "").strip() for name in _COLLECTORS)
    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    # A host program that has set up a tracer has imported this module.
    if disabled or not (collector or "opentelemetry.trace" in sys.modules):
        return Tracing()
    try:
        from coterie.otel import open_tracing
    except ImportError:
        if collector:
            log.warning('a trace collector is set, but OpenTelemetry is missing: run pip install "coterie[otel]"')
        return Tracing()
    return open_tracing(find, collector=collector) or Tracing()


_current: ContextVar[Mapping[str, str]] = ContextVar("coterie_log_context", default={})  # noqa: B039 - never written to


class log_context:  # noqa: N801 - used like a function; a class, because it runs at every step and is fast
    """Add these values to every log record made inside. Nested contexts add to the outer one."""

    __slots__ = ("_token", "_values")
    _token: Token[Mapping[str, str]]

    def __init__(self, *, agent: str | None = None, message: str | None = None, turn: int | None = None) -> None:
        self._values = {**_current.get()}
        for key, value in (("agent", agent), ("message", message), ("turn", turn)):
            if value is not None:
                self._values[key] = str(value)

    def __enter__(self) -> None:
        self._token = _current.set(self._values)

    def __exit__(self, *exc: object) -> None:
        _current.reset(self._token)


class LogContextFilter(logging.Filter):
    """Copies the context into each record when it is made, because handlers may run in another thread."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.context = _current.get()
        return True


def log_context_of(record: logging.LogRecord) -> Mapping[str, str]:
    context = getattr(record, "context", None)
    return context if isinstance(context, Mapping) else {}
