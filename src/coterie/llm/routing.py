"""CapabilityRouter: for one request and one service, which parts go through as they are.

What it makes is a view. The history it is made from keeps references, so the next request, to the same service or to
another, starts from the originals again.

ContentAdapter: what a model cannot read becomes text that tells it what there is and who can read it.

Every description is one JSON object on one line: it can be parsed, and nothing inside can pass for anything else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec.structs import replace

from coterie.artifacts import Artifact, ArtifactType, Bytes, tidy_filename
from coterie.errors import CoterieError
from coterie.llm.config import ServiceEntry
from coterie.llm.learned_limits import Refusals
from coterie.llm.service import NEEDS
from coterie.llm.types import AssistantSaid, Attachment, Call, Inline, Request, Said, Text, ToolSaid, UserSaid

Why = Literal["ability", "size", "missing"]
"""Why the bytes do not go to the model: it cannot read such content, there is too much of it, or it is kept no more."""

MAX_NAMED = 20
"""Capable agents named in a description; one is enough to forward to, and a society may have thousands."""

# Beyond JSON's own rules: what ends a line, hides or reorders text, or opens a tag. A name stays a name in any frame.
_UNRULY = re.compile("[<>\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


class Readers(Protocol):
    async def readers_of(self, kind: ArtifactType, size: int) -> Sequence[str]:
        """The agents, none of them terminated, whose models take such a file as it is."""
        ...


class ContentAdapter:
    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def describe(self, attachment: Attachment, why: Why, *, reader: str, limit: int = 0) -> Text:
        """`attachment` in words for the agent `reader`; `limit`: the bytes its model would have taken."""
        capable = [] if why == "missing" else await self._others(attachment, reader)
        told: dict[str, Any] = {
            "artifactRef": attachment.artifact_ref,
            "contentType": attachment.type,
            "filename": tidy_filename(attachment.filename),
            "mimeType": attachment.mime_type,
            "size": attachment.size,
            "unsupported": NEEDS[attachment.type] if why == "ability" else why,
            "capableAgents": capable,
            "suggestion": _suggestion(attachment, why, bool(capable), limit),
        }
        return Text(on_one_line({"attachment": told}))

    async def _others(self, attachment: Attachment, reader: str) -> list[str]:
        readers = await self._readers.readers_of(attachment.type, attachment.size)
        return [agent for agent in readers if agent != reader][:MAX_NAMED]


def _suggestion(attachment: Attachment, why: Why, capable: bool, limit: int) -> str:
    kind = attachment.type
    if why == "missing":
        return f"This {kind} is no longer kept. Ask whoever sent it, or the person (user), to send it again."
    said = f"Your model does not take this {kind} as it is."
    if why == "size":
        said = f"This {kind} has {attachment.size:,} bytes; your model takes up to {limit:,}."
    if kind == "file":
        said += " If it is text, read it with read_artifact."
    if capable:
        return (
            f"{said} To have it read, forward it with send_message to one of capableAgents: "
            "put its artifactRef into payload.attachments and say in payload.text what you want to know."
        )
    return f"{said} No other agent can read it: ask the person (user) what it shows, or for another form of it."


def tool_runs_as_text(said: Sequence[Said]) -> Iterator[Said]:
    """The same conversation for a model that may not be shown tool calls: what each call gave is told to it."""
    calls: dict[str, Call] = {}
    for one in said:
        match one:
            case AssistantSaid(text, asked) if asked:
                calls |= {call.id: call for call in asked}
                if text:
                    yield AssistantSaid(text)
            case ToolSaid(call_id, text):
                call = calls.get(call_id)
                told = {"tool": call.name, "arguments": dict(call.arguments)} if call else {}
                yield UserSaid((Text(on_one_line({"toolResult": told | {"result": text}})),))
            case _:
                yield one


def on_one_line(value: object) -> str:
    return _UNRULY.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


class ArtifactIndex(Protocol):
    """The part of a `Store` that knows artifacts."""

    async def artifacts(self, refs: Sequence[str]) -> Mapping[str, Artifact]: ...


class CapabilityRouter:
    def __init__(self, artifacts: ArtifactIndex, kept: Bytes, adapter: ContentAdapter, refusals: Refusals) -> None:
        self._artifacts, self._kept, self._adapter, self._refusals = artifacts, kept, adapter, refusals

    async def fit(self, request: Request, entry: ServiceEntry, *, reader: str) -> Request:
        """`request` as the service can take it: no `Attachment` is left, and no tools where it has no use for them.

        `reader` is the agent that asks: descriptions never send it to itself.
        """
        views = await self._views(request.said, entry, reader)
        said = tuple(_shown(one, views) for one in request.said) if views else request.said
        if self.takes_tools(entry):
            return replace(request, said=said) if views else request
        return Request(said=tuple(tool_runs_as_text(said)), tools=())

    def takes_tools(self, entry: ServiceEntry) -> bool:
        """An entry that says nothing of capabilities may be an old one whose model always had tools."""
        if self._refusals.refuses(entry, "tool_calling"):
            return False
        return entry.capabilities.inferred or entry.capabilities.has("tool_calling", "input")

    async def _views(self, said: Sequence[Said], entry: ServiceEntry, reader: str) -> dict[Attachment, Text | Inline]:
        attachments = dict.fromkeys(_attachments(said))
        if not attachments:
            return {}
        known = await self._artifacts.artifacts([one.artifact_ref for one in attachments])
        return {one: await self._view(one, known.get(one.artifact_ref), entry, reader) for one in attachments}

    async def _view(
        self, attachment: Attachment, artifact: Artifact | None, entry: ServiceEntry, reader: str
    ) -> Text | Inline:
        if artifact is None:
            return await self._adapter.describe(attachment, "missing", reader=reader)
        # What a message says of its attachment was told by somebody; what the artifact says was told by its bytes.
        facts = Attachment(
            artifact_ref=attachment.artifact_ref,
            type=artifact.type,
            filename=tidy_filename(attachment.filename or artifact.filename),
            mime_type=artifact.mime_type,
            size=artifact.size,
        )
        limit = entry.limits.of(facts.type)
        if not self._refusals.left(entry).has(NEEDS[facts.type], "input"):
            return await self._adapter.describe(facts, "ability", reader=reader)
        if facts.size > limit:
            return await self._adapter.describe(facts, "size", reader=reader, limit=limit)
        data = await self._read(artifact)
        if data is None:
            return await self._adapter.describe(facts, "missing", reader=reader)
        return Inline(type=facts.type, filename=facts.filename, mime_type=facts.mime_type, data=data)

    async def _read(self, artifact: Artifact) -> bytes | None:
        try:
            if await self._kept.size(artifact.sha256) != artifact.size:
                return None
            data = b"".join([piece async for piece in self._kept.open(artifact.sha256)])
        except (OSError, CoterieError):
            # A file that cannot be read today must not keep its reader from talking.
            return None
        return data if len(data) == artifact.size else None


def uses(request: Request) -> frozenset[str]:
    """The capabilities that a fitted request asks of its service, beyond text."""
    parts = (part for one in request.said if isinstance(one, UserSaid) for part in one.parts)
    needed = {NEEDS[part.type] for part in parts if isinstance(part, Inline)}
    shows_calls = any(isinstance(one, AssistantSaid) and one.calls for one in request.said)
    return frozenset(needed | ({"tool_calling"} if request.tools or shows_calls else set()))


def _attachments(said: Sequence[Said]) -> list[Attachment]:
    turns = [one for one in said if isinstance(one, UserSaid)]
    return [part for one in turns for part in one.parts if isinstance(part, Attachment)]


def _shown(one: Said, views: Mapping[Attachment, Text | Inline]) -> Said:
    if not isinstance(one, UserSaid):
        return one
    return UserSaid(tuple(views[part] if isinstance(part, Attachment) else part for part in one.parts))
