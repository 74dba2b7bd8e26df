"""Artifact bytes as files in a folder, each under its content hash."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from coterie.artifacts import HEAD_BYTES, StoredBytes
from coterie.errors import Refused, StoreUnavailable, StoreUnusable
from coterie.failpoints import hit
from coterie.ids import new_id

T = TypeVar("T")
PIECE = 256 * 1024
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class FolderBytes:
    def __init__(self, folder: Path) -> None:
        self._folder, self._incoming = folder, folder / "incoming"
        try:
            for place in (folder, self._incoming):
                place.mkdir(exist_ok=True, mode=0o700)
            for left in self._incoming.iterdir():  # uploads that a crash cut off
                left.unlink()
        except OSError as error:
            raise StoreUnusable(
                f"{error.filename} cannot be used ({error.strerror}): make {folder} yours and writable"
            ) from error

    async def put(self, chunks: AsyncIterable[bytes], limit: int) -> StoredBytes:
        temporary = self._incoming / new_id()
        digest, size, head = hashlib.sha256(), 0, b""
        try:
            with await _on_disk(_create, temporary) as file:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > limit:
                        raise Refused(
                            "artifact_too_large", f"the file is larger than {limit:,} bytes, the most allowed"
                        )
                    if len(head) < HEAD_BYTES:
                        head += chunk[: HEAD_BYTES - len(head)]
                    await _on_disk(_take, file, digest, chunk)
                await _on_disk(_flush, file)
            hit("artifact.before_rename")
            await _on_disk(_settle, temporary, self._path(digest.hexdigest()))
        finally:
            temporary.unlink(missing_ok=True)
        return StoredBytes(sha256=digest.hexdigest(), size=size, head=head)

    async def open(self, sha256: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        file = await asyncio.to_thread(self._path(sha256).open, "rb")
        try:
            file.seek(start)
            left = (end if end is not None else os.fstat(file.fileno()).st_size) - start
            while left > 0 and (piece := await asyncio.to_thread(file.read, min(PIECE, left))):
                left -= len(piece)
                yield piece
        finally:
            file.close()

    async def size(self, sha256: str) -> int | None:
        try:
            return (await asyncio.to_thread(self._path(sha256).stat)).st_size
        except FileNotFoundError:
            return None

    async def delete(self, sha256: str) -> None:
        await asyncio.to_thread(self._path(sha256).unlink, missing_ok=True)

    def _path(self, sha256: str) -> Path:
        return self._folder / sha256[:2] / sha256


async def _on_disk(work: Callable[..., T], *arguments: object) -> T:
    """In a thread. The disk's failures become ours here, and only those: a sender who hangs up is another matter."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except OSError as error:
        raise StoreUnavailable(
            f"the file could not be kept ({error.strerror}): nothing of it stays", full=error.errno in _FULL
        ) from error


def _take(file: BinaryIO, digest: hashlib._Hash, chunk: bytes) -> None:
    digest.update(chunk)
    file.write(chunk)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _settle(temporary: Path, final: Path) -> None:
    """Under its final name, durably: the directory entry needs a flush of its own."""
    final.parent.mkdir(exist_ok=True, mode=0o700)
    temporary.replace(final)
    for folder in (final.parent, final.parent.parent):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _create(path: Path) -> BinaryIO:
    """A new file that only its owner can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
