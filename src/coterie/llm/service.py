"""The port of an LLM service, its capabilities and its errors.

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

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol

from coterie.artifacts import ArtifactType
from coterie.errors import CoterieError, Refused
from coterie.llm.types import Completion, ModelRequest, TextDelta
from coterie.text import one_line


class SocietyPaused(CoterieError):
    """The whole society is paused; the request was not sent."""


Direction = Literal["input", "output"]
TransientReason = Literal["unreachable", "timeout", "busy", "truncated"]
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


class LLMService(Protocol):
    """One model at one address."""

    @property
    def id(self) -> str: ...

    def generate(self, request: ModelRequest) -> AsyncIterator[TextDelta | Completion]:
        """Yield text deltas, then exactly one `Completion`; or raise `ServiceError`, which voids the deltas.

        Closing the iterator aborts the request. User messages may contain only `TextPart` and `InlineFile`.
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


class TransientError(ServiceError):
    def __init__(self, message: str, *, retry_after: timedelta | None = None, reason: TransientReason = "busy") -> None:
        self.retry_after, self.reason = retry_after, reason
        super().__init__(message)


class MalformedResponse(ServiceError): ...


class ContextTooLong(ServiceError): ...


class UnsupportedCapability(ServiceError):
    def __init__(self, message: str, *, capability: str) -> None:
        self.capability = capability
        """`vision`, `audio`, `file` or `tool_calling`."""
        super().__init__(message)


class PermanentError(ServiceError):
    def __init__(self, message: str, *, category: Literal["auth", "model", "quota", "content", "request"]) -> None:
        self.category = category
        super().__init__(message)


class CircuitOpen(ServiceError):
    def __init__(self, message: str, *, retry_after: timedelta | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message)
