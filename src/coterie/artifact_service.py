"""The society's artifacts: bytes kept by content, described by the store, in that order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import replace
from datetime import timedelta

from coterie.artifacts import Artifact, Bytes, sniff, tidy_filename
from coterie.clock import Clock
from coterie.errors import Refused
from coterie.ids import keyed_id, new_id
from coterie.store import Pruned, Retention, Store

log = logging.getLogger(__name__)


class Library:
    def __init__(self, store: Store, kept: Bytes, clock: Clock, *, limit: int) -> None:
        """`limit`: the most bytes that one file may have."""
        self._store, self._bytes, self._clock, self.limit = store, kept, clock, limit
        self._deleting = asyncio.Lock()
        self._coming_in = 0

    async def put(
        self,
        chunks: AsyncIterable[bytes] | bytes,
        filename: str | None,
        key: str | None = None,
        *,
        maker: str | None = None,
    ) -> Artifact:
        """Keep a file. It is durable, and can be named in messages, when this returns.

        Put again with the same `key`, it is the same artifact. `maker`: the agent that made it; None: the person.
        """
        async with self._deleting:
            self._coming_in += 1
        try:
            return await self._take_in(chunks, filename, key, maker)
        finally:
            self._coming_in -= 1

    async def _take_in(
        self, chunks: AsyncIterable[bytes] | bytes, filename: str | None, key: str | None, maker: str | None
    ) -> Artifact:
        stored = await self._bytes.put(_one(chunks) if isinstance(chunks, bytes) else chunks, self.limit)
        type_, mime_type = sniff(stored.head)
        return await self._store.add_artifact(
            Artifact(
                ref=new_id() if key is None else keyed_id(self._store.info.secret, "artifact", key),
                filename=tidy_filename(filename),
                type=type_,
                mime_type=mime_type,
                size=stored.size,
                sha256=stored.sha256,
                created_at=self._clock.now(),
            ),
            maker,
        )

    async def describe(self, ref: str, *, reader: str | None = None) -> Artifact:
        """`reader`: an agent. A file that it may not read is as unknown as one that does not exist."""
        found = await self._store.artifacts([ref], reader=reader)
        if ref not in found:
            raise Refused("unknown_artifact", f"there is no artifact {ref!r}")
        return found[ref]

    async def latest(self, limit: int = 50, *, reader: str | None = None) -> Sequence[Artifact]:
        """Newest first; with `reader` those that this agent may read."""
        return await self._store.latest_artifacts(limit, reader=reader)

    async def open(
        self, ref: str, start: int = 0, end: int | None = None, *, reader: str | None = None
    ) -> AsyncIterator[bytes]:
        """Its bytes, in pieces."""
        artifact = await self.describe(ref, reader=reader)
        async for piece in self._bytes.open(artifact.sha256, start, end):
            yield piece

    async def read(self, ref: str) -> bytes:
        """All of it at once: for what is known to be small enough."""
        return b"".join([piece async for piece in self.open(ref)])

    async def tidy(self, retention: Retention) -> None:
        """Let go of what nobody needs any more."""
        while True:
            pruned = await self._tidy_once(retention)
            if not (pruned.messages or pruned.events or pruned.bytes_to_delete):
                return
            log.info("removed %d old messages and %d old events", pruned.messages, pruned.events)

    async def _tidy_once(self, retention: Retention) -> Pruned:
        async with self._deleting:
            if self._coming_in:
                # The same bytes may be coming in again and be kept already, but not yet named: next time, then.
                retention = replace(retention, loose_artifacts=timedelta.max)
            pruned = await self._store.prune(retention)
            for sha256 in pruned.bytes_to_delete:
                await self._bytes.delete(sha256)
        return pruned


class AgentLibrary:
    """The artifacts as one agent and its tools see them: what they put is the agent's, what they read it may read.

    An agent may read what it made and what it took in a message; everything if the society shares its artifacts.
    """

    def __init__(self, whole: Library, agent_id: str, *, shared: bool = False) -> None:
        self._whole, self._agent = whole, agent_id
        self._reader = None if shared else agent_id

    @property
    def limit(self) -> int:
        """The most bytes that one file may have."""
        return self._whole.limit

    async def put(self, chunks: AsyncIterable[bytes] | bytes, filename: str | None, key: str | None = None) -> Artifact:
        """As `Library.put`."""
        return await self._whole.put(chunks, filename, key, maker=self._agent)

    async def describe(self, ref: str) -> Artifact:
        return await self._whole.describe(ref, reader=self._reader)

    async def latest(self, limit: int = 50) -> Sequence[Artifact]:
        """Newest first."""
        return await self._whole.latest(limit, reader=self._reader)

    async def open(self, ref: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Its bytes, in pieces."""
        async for piece in self._whole.open(ref, start, end, reader=self._reader):
            yield piece

    async def read(self, ref: str) -> bytes:
        """All of it at once: for what is known to be small enough."""
        return b"".join([piece async for piece in self.open(ref)])


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data
