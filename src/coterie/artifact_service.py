"""Stores and reads artifacts. The blob store gets the bytes first; then the store gets the row."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import suppress
from datetime import timedelta

from coterie.artifacts import Artifact, BlobStore, FileBlobStore, detect_type, sanitize_filename
from coterie.clock import Clock
from coterie.errors import Refused
from coterie.ids import keyed_id, new_id
from coterie.store import Store

DELETED_ARTIFACTS = 50
"""Artifacts that one transaction deletes."""
PARTS = 256
"""By the first two characters of their hashes."""


class ArtifactService:
    def __init__(self, store: Store, blobs: BlobStore, clock: Clock, *, max_file_bytes: int) -> None:
        self._store, self._blobs, self._clock, self._max_file_bytes = store, blobs, clock, max_file_bytes
        self._prune_lock = asyncio.Lock()
        self._running_puts = 0
        # Not always the same at a start: a process may run for a few rounds only.
        self._next_part = random.randrange(PARTS)

    @property
    def max_file_bytes(self) -> int:
        return self._max_file_bytes

    def set_max_file_bytes(self, limit: int) -> None:
        """Change the limit for files that are stored from now on."""
        self._max_file_bytes = limit

    async def put(
        self,
        chunks: AsyncIterable[bytes] | bytes,
        filename: str | None,
        key: str | None = None,
        *,
        maker: str | None = None,
    ) -> Artifact:
        """Store a file durably; messages can refer to it when this returns.

        The same `key` gives the same artifact. `maker`: the agent that made it; None: the person.
        """
        async with self._prune_lock:
            self._running_puts += 1
        try:
            return await self._put(_stream(chunks) if isinstance(chunks, bytes) else chunks, filename, key, maker)
        finally:
            self._running_puts -= 1

    async def _put(
        self, chunks: AsyncIterable[bytes], filename: str | None, key: str | None, maker: str | None
    ) -> Artifact:
        stored = await self._blobs.put(chunks, self._max_file_bytes)
        type_, mime_type = detect_type(stored.head)
        return await self._store.add_artifact(
            Artifact(
                ref=new_id() if key is None else keyed_id(self._store.info.secret, "artifact", key),
                filename=sanitize_filename(filename),
                type=type_,
                mime_type=mime_type,
                size=stored.size,
                sha256=stored.sha256,
                created_at=self._clock.now(),
            ),
            maker,
        )

    async def describe(self, ref: str, *, reader: str | None = None) -> Artifact:
        """`Refused("unknown_artifact")` also if the agent `reader` may not read it."""
        artifacts = await self._store.artifacts([ref], reader=reader)
        if ref not in artifacts:
            raise Refused("unknown_artifact", f"there is no artifact {ref!r}")
        return artifacts[ref]

    async def latest(self, limit: int = 50, *, reader: str | None = None) -> Sequence[Artifact]:
        """Newest first. With `reader`: only artifacts that this agent may read."""
        return await self._store.latest_artifacts(limit, reader=reader)

    async def open(
        self, ref: str, start: int = 0, end: int | None = None, *, reader: str | None = None
    ) -> AsyncIterator[bytes]:
        """Stream the bytes from `start` up to, not including, `end`. `Refused("unknown_artifact")` if they are gone."""
        artifact = await self.describe(ref, reader=reader)
        missing = (artifact.size if end is None else min(end, artifact.size)) - start
        with suppress(FileNotFoundError):
            async for chunk in self._blobs.open(artifact.sha256, start, end):
                missing -= len(chunk)
                yield chunk
        if missing > 0:
            gone = f"the bytes of {artifact.filename} are gone, as coterie verify reports: only a backup has them"
            raise Refused("unknown_artifact", gone)

    async def read(self, ref: str) -> bytes:
        """The whole content. For files known to be small."""
        return b"".join([chunk async for chunk in self.open(ref)])

    async def delete_unused(self, age: timedelta, *, dry_run: bool = False) -> AsyncIterator[int]:
        """Delete artifacts older than `age` that nothing refers to, with their bytes.

        Each item is the number that one transaction deleted, or 0 after a read. `dry_run`: only count.
        """
        after: tuple[int, str] | None = (0, "")
        while after is not None:
            unused = await self._store.unused_artifacts(age, after)
            yield 0
            for start in range(0, len(unused.refs), DELETED_ARTIFACTS):
                part = unused.refs[start : start + DELETED_ARTIFACTS]
                yield len(part) if dry_run else await self._delete(part, age)
            after = unused.next

    async def _delete(self, refs: Sequence[str], age: timedelta) -> int:
        async with self._prune_lock:
            if self._running_puts:
                # A running put may have found its bytes stored already, and its row is not written yet.
                return 0
            count, unreferenced_blobs = await self._store.delete_artifacts(refs, age)
            for sha256 in unreferenced_blobs:
                await self._blobs.delete(sha256)
        return count

    async def delete_unnamed_bytes(self, *, full: bool = False) -> AsyncIterator[None]:
        """Delete bytes that no artifact names: a process crashed between the bytes and the row.

        One part of all bytes, another one at each call, or with `full` all. Yields after each part that has bytes.
        """
        blobs = self._blobs
        if full and not isinstance(blobs, FileBlobStore):
            await blobs.delete("")
            yield
            return
        for _ in range(PARTS if full else 1):
            self._next_part = (self._next_part + 1) % PARTS
            prefix = f"{self._next_part:02x}"
            if not isinstance(blobs, FileBlobStore):
                await blobs.delete(prefix)
                yield
            elif old := await blobs.find_old(prefix):
                await self._delete_unnamed(old)
                yield

    async def _delete_unnamed(self, hashes: Sequence[str]) -> None:
        async with self._prune_lock:
            if self._running_puts:
                return  # as in `_delete`
            named = await self._store.named_blobs(hashes)
            for sha256 in hashes:
                if sha256 not in named:
                    await self._blobs.delete(sha256)


class AgentArtifacts:
    """The artifact service with the rights of one agent.

    The agent may read the artifacts it made and those it took in a message. `shared`: it may read all.
    """

    def __init__(self, service: ArtifactService, agent_id: str, *, shared: bool = False) -> None:
        self._service, self._agent = service, agent_id
        self._reader = None if shared else agent_id

    @property
    def max_file_bytes(self) -> int:
        return self._service.max_file_bytes

    async def put(self, chunks: AsyncIterable[bytes] | bytes, filename: str | None, key: str | None = None) -> Artifact:
        """Store a file of this agent; see `ArtifactService.put`."""
        return await self._service.put(chunks, filename, key, maker=self._agent)

    async def describe(self, ref: str) -> Artifact:
        return await self._service.describe(ref, reader=self._reader)

    async def latest(self, limit: int = 50) -> Sequence[Artifact]:
        """Newest first."""
        return await self._service.latest(limit, reader=self._reader)

    async def open(self, ref: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Stream the bytes from `start` up to, not including, `end`."""
        async for chunk in self._service.open(ref, start, end, reader=self._reader):
            yield chunk

    async def read(self, ref: str) -> bytes:
        """The whole content. For files known to be small."""
        return b"".join([chunk async for chunk in self.open(ref)])


async def _stream(data: bytes) -> AsyncIterator[bytes]:
    yield data
