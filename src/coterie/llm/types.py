"""A conversation as a model sees it, and what a model says: the words that history, router and providers share.

History keeps `Attachment`s, which are references. For one request the router turns each into `Inline` bytes or into
`Text`, so a change of model, or of what it can read, never touches what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from coterie.artifacts import ArtifactType


class Text(Struct, frozen=True):
    text: str


class Attachment(Struct, frozen=True, kw_only=True):
    """A file somebody sent, by reference."""

    artifact_ref: str
    type: ArtifactType
    filename: str
    mime_type: str
    size: int


class Inline(Struct, frozen=True, kw_only=True):
    """A file's bytes, for a model that can read them."""

    type: ArtifactType
    filename: str
    mime_type: str
    data: bytes


class Call(Struct, frozen=True, kw_only=True):
    """A tool call the model asks for."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    raw: str | None = None
    """What the model wrote, where that was no JSON object. `arguments` is empty then, and the answer is an error."""


class SystemSaid(Struct, frozen=True):
    text: str


class UserSaid(Struct, frozen=True):
    parts: tuple[Text | Attachment | Inline, ...]


class AssistantSaid(Struct, frozen=True):
    text: str
    calls: tuple[Call, ...] = ()


class ToolSaid(Struct, frozen=True):
    call_id: str
    text: str


Said = SystemSaid | UserSaid | AssistantSaid | ToolSaid


class ToolSpec(Struct, frozen=True, kw_only=True):
    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments object."""


class Request(Struct, frozen=True, kw_only=True):
    said: tuple[Said, ...]
    tools: tuple[ToolSpec, ...] = ()


class Usage(Struct, frozen=True, kw_only=True):
    input_tokens: int = 0
    """0: the service did not report them."""
    output_tokens: int = 0
    estimated: bool = False
    """At least one of the counts is our own estimate."""


class Delta(Struct, frozen=True):
    """A piece of the text, as it streams."""

    text: str


class Answer(Struct, frozen=True, kw_only=True):
    """The whole of what the model said; the last thing a stream yields, and the only thing that is acted on."""

    text: str
    calls: tuple[Call, ...] = ()
    usage: Usage = Usage()
    service: str = ""
    """The id of the service that gave it; a fallback may have."""
    finish: Literal["stop", "tool_calls", "length", "content_filter"] = "stop"
