"""What an LLM service promises, and how it fails.

UnknownService        no service of that id is configured
ServiceError
├── Transient         try again later, `retry_after` when the service said when
├── Malformed         it answered, but nothing usable
├── TooLong           the conversation does not fit its window
├── Unsupported       it refuses a kind of content, or tools: `what` names it
├── Terminal          trying again changes nothing: `category` says whose move it is
└── Local             we did not ask: budget spent, or the circuit is open until `retry_after`
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol

from coterie.artifacts import ArtifactType
from coterie.errors import CoterieError, Refused
from coterie.llm.types import Answer, Delta, Request
from coterie.text import one_line


class SocietyPaused(CoterieError):
    """The whole society is paused: the request was not begun."""


Direction = Literal["input", "output"]
Passing = Literal["unreachable", "late", "busy", "cut"]
"""What may pass by itself: no connection, no answer in time, a service that says "not now", half an answer."""
STANDARD = frozenset({"text", "vision", "audio", "file", "structured_output", "tool_calling"})
NEEDS: dict[ArtifactType, str] = {"image": "vision", "audio": "audio", "file": "file"}
"""What a model must be able to take in, to be sent an attachment of that type as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    input: frozenset[str] = frozenset({"text"})
    output: frozenset[str] = frozenset({"text"})
    inferred: bool = False
    """The configuration does not say; text in, text out is assumed."""

    def has(self, capability: str, direction: Direction) -> bool:
        # People file tool calling under what a model takes or under what it gives; both mean the same.
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

    def generate(self, request: Request) -> AsyncIterator[Delta | Answer]:
        """Text as it comes, then exactly one `Answer`; or a `ServiceError`, after which nothing counts as said.

        Closing the iterator ends the request. Attachments must have been routed: only `Text` and `Inline` parts.
        """
        ...

    async def close(self) -> None: ...


class UnknownService(Refused):
    """No service of that id is configured."""

    def __init__(self, service_id: str, known: Iterable[str]) -> None:
        self.service_id = service_id
        there = ", ".join(known) or "none"
        sentence = f'no service "{one_line(service_id)}" is configured (llmservices.json has: {there})'
        super().__init__("unknown_service", sentence)


class ServiceNotAllowed(UnknownService):
    """The service exists, but is not among the rights of the agent that made this one."""

    def __init__(self, service_id: str, maker: str, *, gone: bool = False) -> None:
        """`gone`: the maker is not described any more, so nobody knows its rights."""
        self.service_id = service_id
        words = (
            f"{one_line(maker)}, which made this agent, is no longer described in coterie.toml: put it back"
            if gone
            else f'{one_line(maker)} may not use the service "{one_line(service_id)}": leave it out, or add it to'
            " `services` of the agent in coterie.toml"
        )
        Refused.__init__(self, "service_not_allowed", words)


class ServiceError(CoterieError):
    """One sentence that says what is wrong and where to mend it. Never holds a key."""


class Transient(ServiceError):
    def __init__(self, message: str, *, retry_after: timedelta | None = None, why: Passing = "busy") -> None:
        self.retry_after, self.why = retry_after, why
        super().__init__(message)


class Malformed(ServiceError): ...


class TooLong(ServiceError): ...


class Unsupported(ServiceError):
    def __init__(self, message: str, *, what: str) -> None:
        self.what = what
        """The capability it says it lacks: `vision`, `audio`, `file` or `tool_calling`."""
        super().__init__(message)


class Terminal(ServiceError):
    def __init__(self, message: str, *, category: Literal["auth", "model", "quota", "content", "request"]) -> None:
        self.category = category
        super().__init__(message)


class Local(ServiceError):
    def __init__(self, message: str, *, retry_after: timedelta | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message)
