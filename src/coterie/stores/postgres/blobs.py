"""Artifact bytes in the database, in pieces, under their content hash."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterable, AsyncIterator, Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from coterie.artifacts import HEAD_BYTES, StoredBytes
from coterie.errors import Refused, StoreError
from coterie.failpoints import hit
from coterie.ids import new_id
from coterie.stores.postgres.connection import CLOCK, PgConnection

T = TypeVar("T")
PIECE = 256 * 1024
GRACE = timedelta(hours=1)
"""Bytes that were brought again within this are not deleted: another process may be about to name them."""

# Each of these can be done twice: when an answer is lost, it is.
_BEGIN = f"INSERT INTO blobs (sha256, size, at) VALUES (?, 0, {CLOCK}) ON CONFLICT DO NOTHING"
_PUT = "INSERT INTO pieces (sha256, start, bytes) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
# Under its final name in one statement: the bytes are there whole, or not at all.
_SETTLE = f"""
WITH blob AS (
    INSERT INTO blobs (sha256, size, at) VALUES (?1, ?2, {CLOCK})
    ON CONFLICT (sha256) DO UPDATE SET at = excluded.at RETURNING xmax = 0 AS is_new)
UPDATE pieces SET sha256 = ?1 WHERE sha256 = ?3 AND (SELECT is_new FROM blob)
"""
_GET = "SELECT start, bytes FROM pieces WHERE sha256 = ? AND start > ? ORDER BY start LIMIT 1"
# Also what uploads have left that a crash cut off.
_DELETE = f"""
DELETE FROM blobs b WHERE (sha256 = ?1 OR sha256 LIKE 'incoming %') AND at <= {CLOCK} - ?2
   AND NOT EXISTS (SELECT 1 FROM artifacts a WHERE a.sha256 = b.sha256)
"""


class Runner(Protocol):
    async def __call__(self, run: Callable[[PgConnection], T], /) -> T: ...


class DatabaseBytes:
    def __init__(self, run: Runner, grace: timedelta = GRACE) -> None:
        """`run`: lends a connection for a moment."""
        self._run, self._grace = run, grace // timedelta(milliseconds=1)

    async def put(self, chunks: AsyncIterable[bytes], limit: int) -> StoredBytes:
        upload, digest, size, head, rest = f"incoming {new_id()}", hashlib.sha256(), 0, b"", b""
        await self._do(_BEGIN, upload)
        try:
            async for chunk in chunks:
                size += len(chunk)
                if size > limit:
                    raise Refused("artifact_too_large", f"the file is larger than {limit:,} bytes, the most allowed")
                head += chunk[: max(0, HEAD_BYTES - len(head))]
                digest.update(chunk)
                rest += chunk
                while len(rest) >= PIECE:
                    await self._do(_PUT, upload, size - len(rest), rest[:PIECE])
                    rest = rest[PIECE:]
            if rest:
                await self._do(_PUT, upload, size - len(rest), rest)
            hit("artifact.before_rename")
            await self._do(_SETTLE, digest.hexdigest(), size, upload)
        finally:
            with contextlib.suppress(StoreError):  # an error of the upload is the one to report; tidying finds the rest
                await self._do("DELETE FROM blobs WHERE sha256 = ?", upload)
        return StoredBytes(sha256=digest.hexdigest(), size=size, head=head)

    async def open(self, sha256: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        # Pieces are PIECE long, but for the last one.
        place = start - start % PIECE - 1
        while row := await self._row(_GET, sha256, place):
            place, piece = row
            if end is not None and place >= end:
                return
            if part := piece[max(0, start - place) : None if end is None else end - place]:
                yield part

    async def size(self, sha256: str) -> int | None:
        row = await self._row("SELECT size FROM blobs WHERE sha256 = ?", sha256)
        return int(row[0]) if row else None

    async def delete(self, sha256: str) -> None:
        await self._do(_DELETE, sha256, self._grace)

    async def _row(self, sql: str, *values: Any) -> Any:
        return await self._run(lambda db: db.execute(sql, values).fetchone())

    async def _do(self, sql: str, *values: Any) -> None:
        await self._run(lambda db: db.execute(sql, values))
