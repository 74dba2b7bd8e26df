"""Chat messages, requests and completions, shared by history, router and providers.

History stores `Attachment` references. For each request the router replaces them by `InlineFile` bytes or `TextPart`s,
so a change of model never touches stored data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from coterie.artifacts import ArtifactType


class TextPart(Struct, frozen=True):
    text: str


class Attachment(Struct, frozen=True, kw_only=True):
    """Reference to a file."""

    artifact_ref: str
    type: ArtifactType
    filename: str
    mime_type: str
    size: int


class InlineFile(Struct, frozen=True, kw_only=True):
    """A file's bytes, for a model that can read them."""

    type: ArtifactType
    filename: str
    mime_type: str
    data: bytes


class ToolCall(Struct, frozen=True, kw_only=True):
    """A tool call that the model requests."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    invalid_arguments: str | None = None
    """The model's text if it is not a JSON object; `arguments` is then empty and the call fails."""


class SystemMessage(Struct, frozen=True):
    text: str


class UserMessage(Struct, frozen=True):
    parts: tuple[TextPart | Attachment | InlineFile, ...]


class AssistantMessage(Struct, frozen=True):
    text: str
    calls: tuple[ToolCall, ...] = ()


class ToolMessage(Struct, frozen=True):
    """Result of one tool call."""

    call_id: str
    text: str


ChatMessage = SystemMessage | UserMessage | AssistantMessage | ToolMessage


class ToolSpec(Struct, frozen=True, kw_only=True):
    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments object."""


class ModelRequest(Struct, frozen=True, kw_only=True):
    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()


class TokenUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int = 0
    """0: the service did not report it."""
    output_tokens: int = 0
    estimated: bool = False
    """At least one count is our estimate."""


class TextDelta(Struct, frozen=True):
    """A streamed piece of text."""

    text: str


class Completion(Struct, frozen=True, kw_only=True):
    """The model's whole answer. It is the last item of a stream and the only one that is acted on."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    usage: TokenUsage = TokenUsage()
    service: str = ""
    """Id of the service that answered; may be a fallback."""
    finish_reason: Literal["stop", "tool_calls", "length", "content_filter"] = "stop"
