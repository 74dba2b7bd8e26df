"""What happens in the society, told to OpenTelemetry: turns, requests to models, tool calls.

One trace for every chain of messages: its id is made from the id of the message that began it, so it is the same after
a restart and in another process, and nothing about it is stored. What was said is never told, only who did what, when.

It is on when the environment names a collector, or the program around us has set up a tracer. Off, it does nothing.

Which agent, message and turn a line of the log is about. Set once around the work, carried along by its tasks.
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


class Turn(Protocol):
    """An agent at work, from one claim on it to the end of that."""

    async def follows(self, cause: str | None) -> None:
        """What is done from now on was brought about by this message; the same again changes nothing."""
        ...

    def end(self) -> None: ...


class Tracing:
    """The one that is off; `spans.Spans` is the one that is on. Nothing here ever fails, whatever the tracer does."""

    def turn(self, agent_id: str, name: str) -> Turn:
        """To be followed and ended in the same task: what runs in it, and in tasks it starts, belongs to the turn."""
        return _NO_TURN

    def tool(self, name: str, call_id: str, work: Awaitable[T], went_well: Callable[[T], bool]) -> Awaitable[T]:
        """`work`, told as the call of a tool."""
        return work

    def service(self, service: LLMService, entry: ServiceEntry) -> LLMService:
        """`service`, each of its requests told as one."""
        return service

    async def close(self) -> None:
        """What was told reaches the collector, if that takes it soon."""


class _NoTurn:
    async def follows(self, cause: str | None) -> None: ...

    def end(self) -> None: ...


_NO_TURN = _NoTurn()


def tracing_for(find: FindMessage, environ: Mapping[str, str] = os.environ) -> Tracing:
    """The tracing that this process wants. `find`: looks messages up."""
    collector = any(environ.get(name, "").strip() for name in _COLLECTORS)
    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    # A program that has set up a tracer has imported this; if nobody has, we need not either.
    if disabled or not (collector or "opentelemetry.trace" in sys.modules):
        return Tracing()
    try:
        from coterie.otel import open_spans
    except ImportError:
        if collector:
            log.warning('a collector for traces is named, but nothing can reach it: run pip install "coterie[otel]"')
        return Tracing()
    return open_spans(find, collector=collector) or Tracing()


KEYS = ("agent", "message", "turn")
_current: ContextVar[Mapping[str, str]] = ContextVar("coterie_log_context", default={})  # noqa: B039 - never written to


class turn_context:  # noqa: N801 - read as a verb: with turn_context(...). Entered at every step, so it is no generator
    """Whatever is logged inside carries these; what an outer one said and this one does not stays."""

    __slots__ = ("_said", "_token")
    _token: Token[Mapping[str, str]]

    def __init__(self, *, agent: str | None = None, message: str | None = None, turn: int | None = None) -> None:
        self._said = {**_current.get()}
        for key, value in (("agent", agent), ("message", message), ("turn", turn)):
            if value is not None:
                self._said[key] = str(value)

    def __enter__(self) -> None:
        self._token = _current.set(self._said)

    def __exit__(self, *exc: object) -> None:
        _current.reset(self._token)


class Context(logging.Filter):
    """Writes the context into every record, where and when it is made: a handler may look at it elsewhere."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.context = _current.get()
        return True


def context_of(record: logging.LogRecord) -> Mapping[str, str]:
    found = getattr(record, "context", None)
    return found if isinstance(found, Mapping) else {}
