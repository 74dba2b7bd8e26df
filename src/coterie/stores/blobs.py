"""Artifact bytes as files in a folder, each under its content hash."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

from coterie.artifacts import HEAD_BYTES, StoredBytes
from coterie.errors import Refused, StoreUnavailable, StoreUnusable
from coterie.failpoints import hit
from coterie.ids import new_id

T = TypeVar("T")
PIECE = 256 * 1024
GRACE = timedelta(hours=1)
"""Bytes that were brought again within this are not deleted: another process may be about to name them."""
UPLOADING = timedelta(days=1)
"""An upload that has not grown for so long was cut off."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class FolderBytes:
    """In a folder that one process owns."""

    def __init__(self, folder: Path) -> None:
        self._use(folder)
        try:
            for place in (folder, self._incoming):
                place.mkdir(exist_ok=True, mode=0o700)
            self._tidy()
        except OSError as error:
            raise StoreUnusable(
                f"{error.filename} cannot be used ({error.strerror}): make {folder} yours and writable"
            ) from error

    @classmethod
    def beside(cls, folder: Path) -> Self:
        """To read from, beside its owner: nothing is made or tidied up."""
        reader = cls.__new__(cls)
        reader._use(folder)
        return reader

    def _use(self, folder: Path) -> None:
        self._folder, self._incoming = folder, folder / "incoming"

    def _tidy(self) -> None:
        for left in self._incoming.iterdir():  # uploads that a crash cut off
            left.unlink(missing_ok=True)

    async def put(self, chunks: AsyncIterable[bytes], limit: int) -> StoredBytes:
        temporary = self._incoming / new_id()
        digest, size, head = hashlib.sha256(), 0, b""
        try:
            # Unbuffered: closing a buffered file writes again, and would raise the error of a full disk a second time.
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
                await _on_disk(os.fsync, file.fileno())
            hit("artifact.before_rename")
            await _on_disk(_settle, temporary, self._path(digest.hexdigest()))
        finally:
            with contextlib.suppress(OSError):  # an error of the upload is the one to report
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
        return path_of(self._folder, sha256)


class SharedFolderBytes(FolderBytes):
    """In a folder that several processes write to, on several machines: what is young may be another's work."""

    async def delete(self, sha256: str) -> None:
        await asyncio.to_thread(self._delete_old, self._path(sha256), GRACE)

    def _tidy(self) -> None:
        for left in self._incoming.iterdir():
            self._delete_old(left, UPLOADING)

    def _delete_old(self, path: Path, age: timedelta) -> None:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime <= self._now() - age.total_seconds():
                path.unlink()

    def _now(self) -> float:
        """By the clock that stamps these files: those of the machines may differ."""
        probe = self._incoming / new_id()
        with _create(probe) as file:
            now = os.fstat(file.fileno()).st_mtime
        probe.unlink()
        return now


def path_of(folder: Path, sha256: str) -> Path:
    return folder / sha256[:2] / sha256


def read_bytes(folder: Path, sha256: str) -> Iterator[bytes] | None:
    """In pieces; None: they are not kept there."""
    try:
        file = path_of(folder, sha256).open("rb")
    except FileNotFoundError:
        return None
    return _pieces(file)


def place_bytes(folder: Path, sha256: str, pieces: Iterator[bytes]) -> list[Path]:
    """Durably under their hash, whole or not at all; the file, if it was not there before."""
    final, temporary = path_of(folder, sha256), folder / "incoming" / new_id()
    temporary.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    known = final.exists()
    try:
        with _create(temporary) as file:
            for piece in pieces:
                _write(file, piece)
            os.fsync(file.fileno())
        _settle(temporary, final)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return [] if known else [final]


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(PIECE):
            yield piece


async def _on_disk(work: Callable[..., T], *arguments: object) -> T:
    """In a thread. The disk's failures become ours here, and only those: a sender who hangs up is another matter."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except OSError as error:
        raise StoreUnavailable(
            f"the file could not be kept ({error.strerror}): nothing of it stays", full=error.errno in _FULL
        ) from error


def _take(file: io.FileIO, digest: hashlib._Hash, chunk: bytes) -> None:
    digest.update(chunk)
    _write(file, chunk)


def _write(file: io.FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


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


def _create(path: Path) -> io.FileIO:
    """A new file that only its owner can read."""
    return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
