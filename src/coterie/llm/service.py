"""The port of an LLM service: requests and completions, capabilities, the protocol and its errors.

History stores `Attachment` references. For each request the router replaces them by `InlineFile` bytes or `TextPart`s,
so a change of model never touches stored data.

UnknownService              no service with that id is configured
ServiceError
├── TransientError          may succeed later; `retry_after` if the service named a delay
├── MalformedResponse       the response cannot be used
├── ContextTooLong          the conversation exceeds the context window
├── UnsupportedCapability   the service refuses `capability`
├── PermanentError          a retry cannot succeed; `category` says what must change
└── CircuitOpen             the request was not sent; the circuit breaker is open for `retry_after`
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, Protocol, Self, TypeVar

from msgspec import Struct

from coterie.artifacts import ArtifactType
from coterie.errors import CoterieError, Refused
from coterie.problem_texts import ProblemText
from coterie.text import one_line


class TextPart(Struct, frozen=True, gc=False):
    text: str


class Attachment(Struct, frozen=True, kw_only=True, gc=False):
    """Reference to a file."""

    artifact_ref: str
    type: ArtifactType
    filename: str
    mime_type: str
    size: int


class InlineFile(Struct, frozen=True, kw_only=True, gc=False):
    """A file's bytes, for a model that can read them."""

    type: ArtifactType
    filename: str
    mime_type: str
    data: bytes


class ToolCall(Struct, frozen=True, kw_only=True, gc=False):
    """A tool call that the model requests."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    invalid_arguments: str | None = None
    """The model's text if it is not a JSON object; `arguments` is then empty and the call fails."""


class SystemMessage(Struct, frozen=True, gc=False):
    text: str
    without_tools: str | None = None
    """The text for a service that does not get the request's tools. None: the same."""


class MessageSource(Struct, frozen=True, gc=False):
    """The message that a user message renders, for a service that is an agent itself."""

    message_id: str
    sender: str
    in_reply_to: str | None = None


class UserMessage(Struct, frozen=True, gc=False):
    parts: tuple[TextPart | Attachment | InlineFile, ...]
    source: MessageSource | None = None
    """None: the runtime wrote it."""


class AssistantMessage(Struct, frozen=True, gc=False):
    text: str
    calls: tuple[ToolCall, ...] = ()


class ToolMessage(Struct, frozen=True, gc=False):
    """Result of one tool call."""

    call_id: str
    text: str
    attachments: tuple[Attachment, ...] = ()
    """Files of the result. Services accept only text here, so the router puts the files after the results."""


ChatMessage = SystemMessage | UserMessage | AssistantMessage | ToolMessage


class ToolSpec(Struct, frozen=True, kw_only=True, gc=False):
    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments object."""


MAX_TEMPERATURE = 2
_RESERVED = ("model", "messages", "tools", "stream", "stream_options")
"""Keys of a request that the runtime sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a model generates its answer. None: the default of the service."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    reasoning_effort: str | None = None
    extra_body: str = ""
    """A JSON object with more keys of the request. As text, so that it can be compared and hashed."""

    def extra_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.extra_body) if self.extra_body else {}
        return fields

    def override_with(self, other: Sampling) -> Sampling:
        """Return these values, replaced by those that `other` has."""
        changed = {
            name: value
            for name in ("temperature", "top_p", "max_tokens", "reasoning_effort")
            if (value := getattr(other, name)) is not None
        }
        extra = json.dumps(self.extra_fields() | other.extra_fields()) if other.extra_body else self.extra_body
        return replace(self, **changed, extra_body=extra)


DEFAULT_SAMPLING = Sampling()


def check_effort(value: object) -> ProblemText | None:
    """Return what was expected of `reasoningEffort`; None if it is right. Services define their own names."""
    if isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9_-]*", value):
        return None
    return ProblemText("expected_effort")


def check_extra_body(value: Mapping[str, Any]) -> ProblemText | None:
    """Return what was expected of additional keys of a request; None if they are right."""
    if reserved := next((key for key in _RESERVED if key in value), None):
        return ProblemText("expected_no_key", key=reserved)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return ProblemText("expected_json_values")
    return None


class ModelRequest(Struct, frozen=True, kw_only=True, gc=False):
    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    sampling: Sampling = DEFAULT_SAMPLING
    """Overrides the values of the service."""
    answer_schema: str = ""
    """JSON schema of the answer; empty: any text."""
    estimate: int = 0
    """Estimated tokens of `messages` and `tools`. 0: not known. Set it to 0 when you change them."""
    may_have_attachments: bool = True
    """False: no message has an `Attachment`, so none needs to be looked for."""


class TokenUsage(Struct, frozen=True, kw_only=True, gc=False):
    input_tokens: int = 0
    """0: the service did not report it."""
    output_tokens: int = 0
    cached_tokens: int = 0
    """Part of `input_tokens` that the service had in its cache."""
    estimated: bool = False
    """At least one count is our estimate."""
    cost: int | None = None
    """In billionths of the currency. None: the service has no price."""
    model_ms: int = 0
    """Milliseconds from sending the request to its end."""


class TextDelta(Struct, frozen=True, gc=False):
    """A streamed piece of text."""

    text: str


class Completion(Struct, frozen=True, kw_only=True, gc=False):
    """The model's whole answer. It is the last item of a stream and the only one that is acted on."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    usage: TokenUsage = TokenUsage()
    service: str = ""
    """Id of the service that answered; may be a fallback."""
    model: str = ""
    """The model that answered, as the service names it; empty if it does not."""
    finish_reason: Literal["stop", "tool_calls", "length", "content_filter"] = "stop"
    files: tuple[InlineFile, ...] = ()
    """Files of the answer; not with calls."""


Direction = Literal["input", "output"]
STANDARD_CAPABILITIES = frozenset({"text", "vision", "audio", "file", "structured_output", "tool_calling"})
CAPABILITY_BY_TYPE: dict[ArtifactType, str] = {"image": "vision", "audio": "audio", "file": "file"}
"""The input capability that a model needs to receive an attachment of that type as bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    input: frozenset[str] = frozenset({"text"})
    output: frozenset[str] = frozenset({"text"})
    inferred: bool = False
    """The configuration does not declare capabilities; text input and output are assumed."""

    def has(self, capability: str, direction: Direction) -> bool:
        # Users declare tool calling as an input or as an output; both mean the same.
        if capability == "tool_calling":
            return capability in self.input | self.output
        match direction:
            case "input":
                return capability in self.input
            case "output":
                return capability in self.output
        raise ValueError(f'direction must be "input" or "output", got {direction!r}')


INFERRED = Capabilities(inferred=True)


STOPPED = "stopped"
"""Argument of the `CancelledError` of a request whose turn was stopped."""


class LLMService(Protocol):
    """One model at one address."""

    @property
    def id(self) -> str: ...

    def generate(self, request: ModelRequest) -> AsyncIterator[TextDelta | Completion]:
        """Yield text deltas, then exactly one `Completion`; or raise `ServiceError`, which voids the deltas.

        Closing the iterator aborts the request. A `CancelledError` with the argument `STOPPED` says that the turn was
        stopped, so work elsewhere should stop, too; any other one that the request may come again. User messages may
        contain only `TextPart` and `InlineFile`.
        """
        ...

    async def close(self) -> None: ...


class UnknownService(Refused):
    """No service with that id is configured."""

    def __init__(self, service_id: str, known: Iterable[str]) -> None:
        self.service_id = service_id
        configured = ", ".join(known) or "none"
        message = f'no service "{one_line(service_id)}" is configured (llmservices.json has: {configured})'
        super().__init__("unknown_service", message)


class ServiceNotAllowed(UnknownService):
    """The service exists, but the agent that created this agent has no right to use it."""

    def __init__(self, service_id: str, maker: str, *, gone: bool = False) -> None:
        """`gone`: the creating agent is no longer configured, so its rights are unknown."""
        self.service_id = service_id
        message = (
            f"{one_line(maker)}, which made this agent, is no longer described in coterie.toml: put it back"
            if gone
            else f'{one_line(maker)} may not use the service "{one_line(service_id)}": leave it out, or add it to'
            " `services` of the agent in coterie.toml"
        )
        Refused.__init__(self, "service_not_allowed", message)


class ServiceError(CoterieError):
    """A failed request. The message is one sentence with the cause and the remedy; it never contains a key."""

    service: str = ""
    """Id of the service that failed; may be a fallback. The gateway sets it."""
    status: int | None = None
    """HTTP status of the answer. None: there was none."""


TransientReason = Literal["unreachable", "timeout", "busy", "truncated"]


class TransientError(ServiceError):
    def __init__(self, message: str, *, retry_after: timedelta | None = None, reason: TransientReason = "busy") -> None:
        self.retry_after, self.reason = retry_after, reason
        super().__init__(message)


class MalformedResponse(ServiceError): ...


class ContextTooLong(ServiceError):
    def __init__(self, message: str, *, limit: int | None = None, sent: int | None = None) -> None:
        """`limit`, `sent`: tokens of the context window and of the request, if the service named them."""
        self.limit, self.sent = limit, sent
        super().__init__(message)


class UnsupportedCapability(ServiceError):
    def __init__(
        self,
        message: str,
        *,
        capability: str,
        types: Set[str] = frozenset(),
        is_content: bool = False,
        is_size: bool = False,
    ) -> None:
        self.capability = capability
        """`vision`, `audio`, `file`, `tool_calling` or `structured_output`."""
        self.types = types
        """MIME types that the service refused. Empty: it refused the capability."""
        self.is_content = is_content
        """The service refused the content of a file, which it does not name."""
        self.is_size = is_size
        """The service refused the size of the whole request, which has files."""
        super().__init__(message)


PermanentCategory = Literal["auth", "model", "quota", "daily_limit", "content", "request"]


class PermanentError(ServiceError):
    def __init__(self, message: str, *, category: PermanentCategory) -> None:
        self.category = category
        super().__init__(message)


class CircuitOpen(ServiceError):
    def __init__(self, message: str, *, retry_after: timedelta | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class SocietyPaused(CoterieError):
    """The whole society is paused; the request was not sent."""


def failure_code(error: ServiceError) -> str:
    """One word for the kind of a failure, for metrics and traces."""
    match error:
        case TransientError(reason=reason):
            return reason
        case PermanentError(category=category):
            return category
        case MalformedResponse():
            return "malformed"
        case ContextTooLong():
            return "context_too_long"
        case UnsupportedCapability():
            return "unsupported_capability"
        case CircuitOpen():
            return "circuit_open"
    return "other"


T = TypeVar("T")
_MAX_CONNECT = timedelta(seconds=10)
_END_SECONDS = 0.1
_FIRST_BYTE_FACTOR = 2.5
"""How much longer than between two pieces a service may be silent before its answer: it may load its model first."""
DEFAULT_TIMEOUT = timedelta(minutes=2)
DEFAULT_TOTAL_TIMEOUT = timedelta(hours=1)


class DeadlineExceeded(Exception):
    """The message names the deadline."""

    def __init__(self, message: str, setting: str) -> None:
        self.setting = setting
        """The key of llmservices.json that sets the deadline."""
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    connect: timedelta
    """For the TCP connection, and again for TLS; `first_byte` includes both."""
    first_byte: timedelta
    """From sending the request to the first byte of the response."""
    idle: timedelta
    """Between two chunks of the response."""
    total: timedelta

    @classmethod
    def from_timeout(
        cls, idle: timedelta, *, first_byte: timedelta | None = None, total: timedelta = DEFAULT_TOTAL_TIMEOUT
    ) -> Deadlines:
        """Derive all deadlines from the longest silence within an answer."""
        first = idle * _FIRST_BYTE_FACTOR if first_byte is None else first_byte
        return cls(connect=min(_MAX_CONNECT, first / 5), first_byte=first, idle=idle, total=total)


class DeadlineTimer:
    """Applies the deadlines to the awaits of one request.

    A slow caller does not use up the idle deadline: it runs only during `await_next`. Times are the event loop's, not
    the `Clock`'s, because the service is remote. One timer serves all awaits: a timer per chunk costs more than reading
    the chunk.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadlines = deadlines
        self._total_ends = self._loop.time() + deadlines.total.total_seconds()
        self._first_ends = self._loop.time() + deadlines.first_byte.total_seconds()
        self._idle = deadlines.idle.total_seconds()
        self._due = 0.0
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._timer:
            self._timer.cancel()

    async def await_first(self, step: Callable[[], Awaitable[T]]) -> T:
        """Await `step()` within the first-byte deadline; raise `DeadlineExceeded` after it."""
        return await self._await(step, self._first_ends)

    async def await_next(self, step: Callable[[], Awaitable[T]]) -> T:
        """Await `step()` within the idle deadline."""
        return await self._await(step, self._loop.time() + self._idle)

    async def await_end(self, step: Callable[[], Awaitable[T]]) -> T:
        """Await `step()` for at most 0.1 s: the end of a response that is already complete."""
        return await self._await(step, self._loop.time() + _END_SECONDS)

    async def _await(self, step: Callable[[], Awaitable[T]], due: float) -> T:
        self._due = due if due < self._total_ends else self._total_ends
        if self._due <= self._loop.time():
            raise self._exceeded()
        self._start_timer()
        task = self._task = asyncio.current_task()
        assert task is not None  # noqa: S101
        cancelling = task.cancelling()
        try:
            result = await step()
        except asyncio.CancelledError:
            if self._expired and task.uncancel() <= cancelling:
                raise self._exceeded() from None
            raise
        finally:
            self._task = None
        if self._expired:  # the step suppressed the cancellation
            task.uncancel()
            raise self._exceeded()
        return result

    def _start_timer(self) -> None:
        # A timer set for an earlier time is kept; it restarts itself when it fires too early.
        if self._timer and self._timer.when() <= self._due:
            return
        if self._timer:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if self._due <= self._loop.time():
            self._expired = True
            self._task.cancel()
        else:
            self._start_timer()

    def _exceeded(self) -> DeadlineExceeded:
        if self._due == self._total_ends:
            return DeadlineExceeded(f"did not finish within {_seconds(self._deadlines.total)}", "totalTimeout")
        if self._due == self._first_ends:
            first = _seconds(self._deadlines.first_byte)
            return DeadlineExceeded(f"did not begin to answer within {first}", "firstTokenTimeout")
        idle = _seconds(self._deadlines.idle)
        return DeadlineExceeded(f"fell silent for {idle} in the middle of its answer", "timeout")


def _seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():g} s"
