"""Harness for gateway and router tests: artifacts in memory, fake services with scripted replies."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from coterie.agent.service import AgentDirectory
from coterie.agents import Profile
from coterie.artifacts import Artifact, StoredBlob, detect_type
from coterie.llm.config import ServiceEntry, ServiceRegistry
from coterie.llm.gateway import ModelGateway
from coterie.llm.learned_limits import LearnedLimits
from coterie.llm.routing import CapabilityRouter, ContentAdapter
from coterie.llm.service import (
    Attachment,
    Capabilities,
    Completion,
    InlineFile,
    ModelRequest,
    TextDelta,
    TextPart,
    UserMessage,
)
from coterie.testing.clock import START, FakeClock

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 3
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(range(200))
PDF = b"%PDF-1.7\n" + bytes(range(255, 0, -1))


class MemoryBlobStore:
    """Blobs in a dict; reading a `broken` one raises OSError."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.broken: set[str] = set()
        self.reads = 0

    async def put(self, chunks: AsyncIterable[bytes], limit: int) -> StoredBlob:
        return self.add(b"".join([chunk async for chunk in chunks]))

    def add(self, data: bytes) -> StoredBlob:
        digest = hashlib.sha256(data).hexdigest()
        self.kept[digest] = data
        return StoredBlob(sha256=digest, size=len(data), head=data[:8192])

    async def open(self, sha256: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        self.reads += 1
        if sha256 in self.broken:
            raise OSError(5, "Input/output error")
        data = self.kept[sha256][start:end]
        for start in range(0, len(data), 100):
            yield data[start : start + 100]

    async def size(self, sha256: str) -> int | None:
        return len(self.kept[sha256]) if sha256 in self.kept else None

    async def delete(self, sha256: str) -> None:
        self.kept.pop(sha256, None)


class FakeArtifactStore:
    """Artifact lookup of a store."""

    def __init__(self) -> None:
        self.bytes = MemoryBlobStore()
        self.known: dict[str, Artifact] = {}

    async def artifacts(self, refs: Sequence[str]) -> Mapping[str, Artifact]:
        return {ref: self.known[ref] for ref in refs if ref in self.known}

    def keep(self, data: bytes, filename: str) -> Attachment:
        """Store a file like an upload: its type is derived from the bytes."""
        stored = self.bytes.add(data)
        kind, mime = detect_type(stored.head)
        ref = f"ref-{len(self.known)}"
        self.known[ref] = Artifact(
            ref=ref,
            filename=filename,
            type=kind,
            mime_type=mime,
            size=stored.size,
            sha256=stored.sha256,
            created_at=START,
        )
        return Attachment(artifact_ref=ref, type=kind, filename=filename, mime_type=mime, size=stored.size)


Step = TextDelta | Completion | Exception | Callable[[], Awaitable[None]]


class FakeService:
    """A service that runs one script per request and records the requests. Without a script it answers ok."""

    def __init__(self, entry: ServiceEntry) -> None:
        self.entry = entry
        self.scripts: deque[Sequence[Step]] = deque()
        self.requests: list[ModelRequest] = []
        self.running = self.max_running = self.closed = self.ended = 0
        self.before_close: Callable[[], Awaitable[None]] | None = None

    @property
    def id(self) -> str:
        return self.entry.id

    def script(self, *steps: Step, times: int = 1) -> None:
        self.scripts.extend([steps] * times)

    async def generate(self, request: ModelRequest) -> AsyncIterator[TextDelta | Completion]:
        self.requests.append(request)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            for step in self.scripts.popleft() if self.scripts else (Completion(text="ok"),):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, TextDelta | Completion):
                    yield step
                else:
                    await step()
        finally:
            self.running -= 1
            self.ended += 1

    async def close(self) -> None:
        if self.before_close:
            await self.before_close()
        self.closed += 1


class AutoAdvancingClock(FakeClock):
    """Advances by itself on `sleep`, so it shows the sum of all sleeps."""

    async def sleep(self, duration: timedelta) -> None:
        self._now += duration


class Harness:
    def __init__(
        self,
        *entries: ServiceEntry,
        agents: Mapping[str, str | None] | None = None,
        clock: FakeClock | None = None,
        **models: Any,
    ) -> None:
        self.clock = clock or FakeClock()
        self.services = ServiceRegistry(entries)
        self.learned_limits = LearnedLimits(self.clock)
        profiles = [Profile(id=agent, service=service) for agent, service in (agents or {}).items()]
        self.directory = AgentDirectory(self.services, self.learned_limits, profiles)
        self.artifacts = FakeArtifactStore()
        self.adapter = ContentAdapter(self.directory)
        self.router = CapabilityRouter(self.artifacts, self.artifacts.bytes, self.adapter, self.learned_limits)
        self.fakes: dict[str, FakeService] = {}
        self.creation_errors: dict[str, Exception] = {}
        self.gateway = ModelGateway(self.services, self.router, self.learned_limits, self._make, self.clock, **models)
        for entry in entries:
            self._make(entry)

    def _make(self, entry: ServiceEntry) -> FakeService:
        if error := self.creation_errors.get(entry.id):
            raise error
        known = self.fakes.get(entry.id)
        if known is None or known.entry != entry:
            known = self.fakes[entry.id] = FakeService(entry)
        return known

    async def fit(self, request: ModelRequest, service_id: str, agent_id: str = "ada") -> ModelRequest:
        return await self.router.fit(request, self.services.get(service_id), agent_id=agent_id)

    async def ask(self, service_id: str, request: ModelRequest, agent_id: str = "ada") -> list[TextDelta | Completion]:
        return [piece async for piece in self.gateway.generate(service_id, request, agent_id=agent_id)]


def service(
    service_id: str,
    takes: Sequence[str] | None = None,
    gives: Sequence[str] = ("text", "tool_calling"),
    **more: Any,
) -> ServiceEntry:
    """An entry; without `takes` its capabilities are inferred."""
    if takes is not None:
        more["capabilities"] = Capabilities(input=frozenset({"text", *takes}), output=frozenset(gives))
    return ServiceEntry(id=service_id, base_url="http://127.0.0.1:9/v1", model=f"{service_id}-model", **more)


def user_request(*parts: TextPart | Attachment | InlineFile) -> ModelRequest:
    return ModelRequest(messages=(UserMessage(parts),))


def parts_of(request: ModelRequest) -> list[TextPart | Attachment | InlineFile]:
    return [part for one in request.messages if isinstance(one, UserMessage) for part in one.parts]


def description(part: object) -> dict[str, Any]:
    """Return the parsed attachment object of a description."""
    assert isinstance(part, TextPart)
    found = msgspec.json.decode(part.text, type=dict[str, dict[str, Any]])
    assert list(found) == ["attachment"]
    return found["attachment"]
