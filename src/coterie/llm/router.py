"""CapabilityRouter: for one request and one service, which parts go through as they are.

What it makes is a view. The history it is made from keeps references, so the next request, to the same service or to
another, starts from the originals again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from coterie.artifacts import Artifact, Bytes, tidy_filename
from coterie.errors import CoterieError
from coterie.llm.adapter import ContentAdapter, tool_runs_as_text
from coterie.llm.chat import AssistantSaid, Attachment, Inline, Request, Said, Text, UserSaid
from coterie.llm.refusals import Refusals
from coterie.llm.service import NEEDS
from coterie.llm.service_entry import ServiceEntry


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
