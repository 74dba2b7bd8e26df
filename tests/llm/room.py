"""A room for tests of the way to a model: artifacts in memory, services by hand, models that say what they are told."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from coterie.agent.service import Directory
from coterie.agents import Profile
from coterie.artifacts import Artifact, StoredBytes, sniff
from coterie.llm.config import ServiceEntry, Services
from coterie.llm.gateway import Models
from coterie.llm.learned_limits import Refusals
from coterie.llm.routing import CapabilityRouter, ContentAdapter
from coterie.llm.service import Capabilities
from coterie.llm.types import Answer, Attachment, Delta, Inline, Request, Text, UserSaid
from coterie.testing.clock import START, FakeClock

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 3
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(range(200))
PDF = b"%PDF-1.7\n" + bytes(range(255, 0, -1))


class MemoryBytes:
    """Bytes in a dict; `broken` ones fail as a disk does."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.broken: set[str] = set()
        self.reads = 0

    async def put(self, chunks: AsyncIterable[bytes], limit: int) -> StoredBytes:
        return self.add(b"".join([chunk async for chunk in chunks]))

    def add(self, data: bytes) -> StoredBytes:
        digest = hashlib.sha256(data).hexdigest()
        self.kept[digest] = data
        return StoredBytes(sha256=digest, size=len(data), head=data[:8192])

    async def open(self, sha256: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        self.reads += 1
        if sha256 in self.broken:
            raise OSError(5, "Input/output error")
        data = self.kept[sha256][start:end]
        for place in range(0, len(data), 100):
            yield data[place : place + 100]

    async def size(self, sha256: str) -> int | None:
        return len(self.kept[sha256]) if sha256 in self.kept else None

    async def delete(self, sha256: str) -> None:
        self.kept.pop(sha256, None)


class Shelf:
    """What a store knows of artifacts."""

    def __init__(self) -> None:
        self.bytes = MemoryBytes()
        self.known: dict[str, Artifact] = {}

    async def artifacts(self, refs: Sequence[str]) -> Mapping[str, Artifact]:
        return {ref: self.known[ref] for ref in refs if ref in self.known}

    def keep(self, data: bytes, filename: str) -> Attachment:
        """As an upload does it: the type is told from the bytes."""
        stored = self.bytes.add(data)
        kind, mime = sniff(stored.head)
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


Step = Delta | Answer | Exception | Callable[[], Awaitable[None]]


class Puppet:
    """A service that plays one script per request, and remembers what it was asked. Without a script it says ok."""

    def __init__(self, entry: ServiceEntry) -> None:
        self.entry = entry
        self.scripts: deque[Sequence[Step]] = deque()
        self.asked: list[Request] = []
        self.running = self.most = self.closed = self.ended = 0

    @property
    def id(self) -> str:
        return self.entry.id

    def plays(self, *steps: Step, times: int = 1) -> None:
        self.scripts.extend([steps] * times)

    async def generate(self, request: Request) -> AsyncIterator[Delta | Answer]:
        self.asked.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for step in self.scripts.popleft() if self.scripts else (Answer(text="ok"),):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, Delta | Answer):
                    yield step
                else:
                    await step()
        finally:
            self.running -= 1
            self.ended += 1

    async def close(self) -> None:
        self.closed += 1


class HurriedClock(FakeClock):
    """Time goes on by itself while somebody sleeps, so it tells how long all sleeps together took."""

    async def sleep(self, duration: timedelta) -> None:
        self._now += duration


class Room:
    def __init__(
        self,
        *entries: ServiceEntry,
        agents: Mapping[str, str | None] | None = None,
        clock: FakeClock | None = None,
        **models: Any,
    ) -> None:
        self.clock = clock or FakeClock()
        self.services = Services(entries)
        self.refusals = Refusals(self.clock)
        profiles = [Profile(id=agent, service=service) for agent, service in (agents or {}).items()]
        self.directory = Directory(self.services, self.refusals, profiles)
        self.shelf = Shelf()
        self.adapter = ContentAdapter(self.directory)
        self.router = CapabilityRouter(self.shelf, self.shelf.bytes, self.adapter, self.refusals)
        self.puppets: dict[str, Puppet] = {}
        self.models = Models(self.services, self.router, self.refusals, self._make, self.clock, **models)
        for entry in entries:
            self._make(entry)

    def _make(self, entry: ServiceEntry) -> Puppet:
        known = self.puppets.get(entry.id)
        if known is None or known.entry != entry:
            known = self.puppets[entry.id] = Puppet(entry)
        return known

    async def fit(self, request: Request, service_id: str, reader: str = "ada") -> Request:
        return await self.router.fit(request, self.services.entry(service_id), reader=reader)

    async def ask(self, service_id: str, request: Request, reader: str = "ada") -> list[Delta | Answer]:
        return [piece async for piece in self.models.ask(service_id, request, reader=reader)]


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


def said(*parts: Text | Attachment | Inline) -> Request:
    return Request(said=(UserSaid(parts),))


def parts_of(request: Request) -> list[Text | Attachment | Inline]:
    return [part for one in request.said if isinstance(one, UserSaid) for part in one.parts]


def description(part: object) -> dict[str, Any]:
    """The attachment object inside a description, parsed as any program would."""
    assert isinstance(part, Text)
    found = msgspec.json.decode(part.text, type=dict[str, dict[str, Any]])
    assert list(found) == ["attachment"]
    return found["attachment"]
