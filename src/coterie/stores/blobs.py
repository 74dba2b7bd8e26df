"""Artifact bytes as files in a folder. A file's name is the SHA-256 of its content."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import os
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

from coterie.artifacts import HEAD_BYTES, StoredBlob
from coterie.errors import Refused, StoreUnavailable, StoreUnusable
from coterie.failpoints import hit
from coterie.ids import new_id

T = TypeVar("T")
CHUNK_BYTES = 256 * 1024
"""PostgreSQL stores blobs in chunks of this size, so it must not change."""
DELETE_GRACE = timedelta(hours=1)
"""Blobs uploaded within this time are not deleted: another process may be about to reference them."""
STALE_UPLOAD_AGE = timedelta(days=1)
"""An upload that has not grown for this long was aborted."""
_HASH = re.compile(r"[0-9a-f]{64}")
_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class FolderBlobStore:
    """Blob store in a folder that one process owns."""

    def __init__(self, folder: Path) -> None:
        """Create the folders if missing and delete aborted uploads."""
        self._set_folder(folder)
        try:
            for path in (folder, self._incoming):
                path.mkdir(exist_ok=True, mode=0o700)
            self._delete_aborted_uploads()
        except OSError as error:
            raise StoreUnusable(
                f"{error.filename} cannot be used ({error.strerror}): make {folder} yours and writable"
            ) from error

    @classmethod
    def open_read_only(cls, folder: Path) -> Self:
        """Open for reading beside the owning process; create and delete nothing."""
        reader = cls.__new__(cls)
        reader._set_folder(folder)
        return reader

    def _set_folder(self, folder: Path) -> None:
        self._folder, self._incoming = folder, folder / "incoming"

    def _delete_aborted_uploads(self) -> None:
        for upload in self._incoming.iterdir():
            upload.unlink(missing_ok=True)

    async def put(self, chunks: AsyncIterable[bytes], limit: int) -> StoredBlob:
        temporary = self._incoming / new_id()
        digest, size, head = hashlib.sha256(), 0, b""
        try:
            # Unbuffered: closing a buffered file writes again, and would raise the error of a full disk a second time.
            with await _run_in_thread(_create_private, temporary) as file:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > limit:
                        raise Refused(
                            "artifact_too_large", f"the file is larger than {limit:,} bytes, the most allowed"
                        )
                    if len(head) < HEAD_BYTES:
                        head += chunk[: HEAD_BYTES - len(head)]
                    await _run_in_thread(_hash_and_write, file, digest, chunk)
                await _run_in_thread(os.fsync, file.fileno())
            hit("artifact.before_rename")
            await _run_in_thread(_rename_durably, temporary, self._path(digest.hexdigest()))
        finally:
            with contextlib.suppress(OSError):  # do not hide an error of the upload
                temporary.unlink(missing_ok=True)
        return StoredBlob(sha256=digest.hexdigest(), size=size, head=head)

    async def open(self, sha256: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        file = await asyncio.to_thread(self._path(sha256).open, "rb")
        try:
            file.seek(start)
            remaining = (end if end is not None else os.fstat(file.fileno()).st_size) - start
            while remaining > 0 and (chunk := await asyncio.to_thread(file.read, min(CHUNK_BYTES, remaining))):
                remaining -= len(chunk)
                yield chunk
        finally:
            file.close()

    async def size(self, sha256: str) -> int | None:
        try:
            return (await asyncio.to_thread(self._path(sha256).stat)).st_size
        except FileNotFoundError:
            return None

    async def delete(self, sha256: str) -> None:
        await asyncio.to_thread(self._path(sha256).unlink, missing_ok=True)

    async def find_old(self, prefix: str) -> Sequence[str]:
        return await asyncio.to_thread(self._find_old, prefix)

    def _find_old(self, prefix: str) -> list[str]:
        try:
            with os.scandir(self._folder / prefix) as files:
                stored = {file.name: file.stat().st_mtime for file in files if _HASH.fullmatch(file.name)}
            before = self._filesystem_time() - DELETE_GRACE.total_seconds() if stored else 0.0
        except OSError:
            return []  # no such part, or a full disk, which must not end the deletion of old data
        return [sha256 for sha256, stored_at in stored.items() if stored_at <= before]

    def _filesystem_time(self) -> float:
        """Current time of the clock that stamps these files; the machines' clocks may differ from it."""
        probe = self._incoming / new_id()
        with _create_private(probe) as file:
            now = os.fstat(file.fileno()).st_mtime
        probe.unlink()
        return now

    def _path(self, sha256: str) -> Path:
        return blob_path(self._folder, sha256)


class SharedFolderBlobStore(FolderBlobStore):
    """Blob store in a folder that several processes and machines write to. Recent files are never deleted."""

    async def delete(self, sha256: str) -> None:
        await asyncio.to_thread(self._delete_if_older, self._path(sha256), DELETE_GRACE)

    def _delete_aborted_uploads(self) -> None:
        for upload in self._incoming.iterdir():
            self._delete_if_older(upload, STALE_UPLOAD_AGE)

    def _delete_if_older(self, path: Path, age: timedelta) -> None:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime <= self._filesystem_time() - age.total_seconds():
                path.unlink()

    def _find_old(self, prefix: str) -> list[str]:
        # Another society may use the folder, too, such as a restored copy: its files have no artifacts here.
        return []


def blob_path(folder: Path, sha256: str) -> Path:
    return folder / sha256[:2] / sha256


def read_blob(folder: Path, sha256: str) -> Iterator[bytes] | None:
    """Chunks of the blob; None if the folder does not have it."""
    try:
        file = blob_path(folder, sha256).open("rb")
    except FileNotFoundError:
        return None
    return _read_chunks(file)


def write_blob(folder: Path, sha256: str, chunks: Iterator[bytes]) -> list[Path]:
    """Write the blob durably, whole or not at all. Return its path if it is new, else nothing."""
    final, temporary = blob_path(folder, sha256), folder / "incoming" / new_id()
    temporary.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    existed = final.exists()
    try:
        with _create_private(temporary) as file:
            for chunk in chunks:
                _write(file, chunk)
            os.fsync(file.fileno())
        _rename_durably(temporary, final)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return [] if existed else [final]


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


async def _run_in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Run disk work in a thread; an `OSError` of it becomes `StoreUnavailable`.

    Errors of the uploading connection are `OSError` as well, so they must not be raised inside `work`.
    """
    try:
        return await asyncio.to_thread(work, *arguments)
    except OSError as error:
        raise StoreUnavailable(
            f"the file could not be stored ({error.strerror}): nothing of it was saved; free some disk space or"
            " check the disk, then upload it again",
            full=error.errno in _DISK_FULL_ERRNOS,
        ) from error


def _hash_and_write(file: io.FileIO, digest: hashlib._Hash, chunk: bytes) -> None:
    digest.update(chunk)
    _write(file, chunk)


def _write(file: io.FileIO, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[file.write(remaining) :]


def _rename_durably(temporary: Path, final: Path) -> None:
    final.parent.mkdir(exist_ok=True, mode=0o700)
    temporary.replace(final)
    fsync_folder(final.parent)
    fsync_folder(final.parent.parent)


def _create_private(path: Path) -> io.FileIO:
    """New unbuffered file that only its owner can read."""
    return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
