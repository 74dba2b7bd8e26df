"""A conversation as a model sees it, and what a model says: the words that history, router and providers share.

History keeps `Attachment`s, which are references. For one request the router turns each into `Inline` bytes or into
`Text`, so a change of model, or of what it can read, never touches what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from coterie.artifacts import ArtifactType


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A file somebody sent, by reference."""

    artifact_ref: str
    type: ArtifactType
    filename: str
    mime_type: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inline:
    """A file's bytes, for a model that can read them."""

    type: ArtifactType
    filename: str
    mime_type: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call the model asks for."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    raw: str | None = None
    """What the model wrote, where that was no JSON object. `arguments` is empty then, and the answer is an error."""


@dataclass(frozen=True, slots=True)
class SystemSaid:
    text: str


@dataclass(frozen=True, slots=True)
class UserSaid:
    parts: tuple[Text | Attachment | Inline, ...]


@dataclass(frozen=True, slots=True)
class AssistantSaid:
    text: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolSaid:
    call_id: str
    text: str


Said = SystemSaid | UserSaid | AssistantSaid | ToolSaid


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    said: tuple[Said, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the text, as it streams."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The whole of what the model said; the last thing a stream yields, and the only thing that is acted on."""

    text: str
    calls: tuple[Call, ...] = ()
    usage: Usage = Usage()
    service: str = ""
    """The id of the service that gave it; a fallback may have."""
    finish: Literal["stop", "tool_calls", "length", "content_filter"] = "stop"
