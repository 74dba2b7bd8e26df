"""Artifact bytes in the database: one row per chunk, keyed by the SHA-256 of the content."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterable, AsyncIterator, Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from coterie.artifacts import HEAD_BYTES, StoredBlob
from coterie.errors import Refused, StoreError
from coterie.failpoints import hit
from coterie.ids import new_id
from coterie.stores.blobs import CHUNK_BYTES, DELETE_GRACE
from coterie.stores.postgres.connection import CLOCK, PgConnection

T = TypeVar("T")
# Every statement is idempotent: it is repeated when a response is lost.
_BEGIN_UPLOAD = f"INSERT INTO blobs (sha256, size, at) VALUES (?, 0, {CLOCK}) ON CONFLICT DO NOTHING"
_WRITE_CHUNK = "INSERT INTO pieces (sha256, start, bytes) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
# One statement moves all chunks to the final key: the blob exists whole or not at all.
_FINISH_UPLOAD = f"""
WITH blob AS (
    INSERT INTO blobs (sha256, size, at) VALUES (?1, ?2, {CLOCK})
    ON CONFLICT (sha256) DO UPDATE SET at = excluded.at RETURNING xmax = 0 AS is_new)
UPDATE pieces SET sha256 = ?1 WHERE sha256 = ?3 AND (SELECT is_new FROM blob)
"""
_READ_CHUNK = "SELECT start, bytes FROM pieces WHERE sha256 = ? AND start > ? ORDER BY start LIMIT 1"
# Also deletes chunks of aborted uploads.
_DELETE = f"""
DELETE FROM blobs b WHERE (sha256 = ?1 OR sha256 LIKE 'incoming %') AND at <= {CLOCK} - ?2
   AND NOT EXISTS (SELECT 1 FROM artifacts a WHERE a.sha256 = b.sha256)
"""


class Runner(Protocol):
    async def __call__(self, run: Callable[[PgConnection], T], /) -> T: ...


class PostgresBlobStore:
    """Blob store in the society's database."""

    def __init__(self, run: Runner, grace: timedelta = DELETE_GRACE) -> None:
        """`run`: calls a function with a connection."""
        self._run, self._grace_ms = run, grace // timedelta(milliseconds=1)

    async def put(self, chunks: AsyncIterable[bytes], limit: int) -> StoredBlob:
        upload, digest, size, head, rest = f"incoming {new_id()}", hashlib.sha256(), 0, b"", b""
        await self._execute(_BEGIN_UPLOAD, upload)
        try:
            async for chunk in chunks:
                size += len(chunk)
                if size > limit:
                    raise Refused("artifact_too_large", f"the file is larger than {limit:,} bytes, the most allowed")
                head += chunk[: max(0, HEAD_BYTES - len(head))]
                digest.update(chunk)
                rest += chunk
                while len(rest) >= CHUNK_BYTES:
                    await self._execute(_WRITE_CHUNK, upload, size - len(rest), rest[:CHUNK_BYTES])
                    rest = rest[CHUNK_BYTES:]
            if rest:
                await self._execute(_WRITE_CHUNK, upload, size - len(rest), rest)
            hit("artifact.before_rename")
            await self._execute(_FINISH_UPLOAD, digest.hexdigest(), size, upload)
        finally:
            with contextlib.suppress(StoreError):  # do not hide an error of the upload; a later delete retries
                await self._execute("DELETE FROM blobs WHERE sha256 = ?", upload)
        return StoredBlob(sha256=digest.hexdigest(), size=size, head=head)

    async def open(self, sha256: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        # All chunks but the last have CHUNK_BYTES.
        offset = start - start % CHUNK_BYTES - 1
        while row := await self._fetchone(_READ_CHUNK, sha256, offset):
            offset, chunk = row
            if end is not None and offset >= end:
                return
            if part := chunk[max(0, start - offset) : None if end is None else end - offset]:
                yield part

    async def size(self, sha256: str) -> int | None:
        row = await self._fetchone("SELECT size FROM blobs WHERE sha256 = ?", sha256)
        return int(row[0]) if row else None

    async def delete(self, sha256: str) -> None:
        await self._execute(_DELETE, sha256, self._grace_ms)

    async def _fetchone(self, sql: str, *values: Any) -> Any:
        return await self._run(lambda db: db.execute(sql, values).fetchone())

    async def _execute(self, sql: str, *values: Any) -> None:
        await self._run(lambda db: db.execute(sql, values))
