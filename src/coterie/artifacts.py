"""Artifacts: files attached to messages, the port that stores their bytes, and file type detection."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol, runtime_checkable

from coterie.text import to_storable

ArtifactType = Literal["image", "audio", "file"]
MAX_FILENAME = 255
HEAD_BYTES = 8192
"""Bytes at the start of a file that its type is detected from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    ref: str
    filename: str
    """The sender's name for it. Only displayed, never used as a path."""
    type: ArtifactType
    mime_type: str
    """Detected from the bytes, not from the name."""
    size: int
    sha256: str
    created_at: datetime

    def to_dict(self) -> dict[str, Any]:
        return {
            "artifactRef": self.ref,
            "type": self.type,
            "filename": self.filename,
            "mimeType": self.mime_type,
            "size": self.size,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlob:
    sha256: str
    size: int
    head: bytes
    """The first `HEAD_BYTES` bytes."""


class BlobStore(Protocol):
    """Stores bytes under their SHA-256. Equal bytes are stored once."""

    async def put(self, chunks: AsyncIterable[bytes], limit: int) -> StoredBlob:
        """Store the bytes durably. `Refused("artifact_too_large")` for more than `limit` bytes; then none are kept."""
        ...

    def open(self, sha256: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Stream the bytes from `start` up to, not including, `end`."""
        ...

    async def size(self, sha256: str) -> int | None:
        """Number of bytes; None if not stored."""
        ...

    async def delete(self, sha256: str) -> None:
        """Delete the bytes with this hash.

        A store in the database deletes all bytes whose hash begins with `sha256`, but none that an artifact names.
        """
        ...


@runtime_checkable
class FileBlobStore(BlobStore, Protocol):
    """A blob store in files. It does not know which of them artifacts name."""

    async def find_old(self, prefix: str) -> Sequence[str]:
        """Hashes that begin with these two characters, of bytes that were stored long ago."""
        ...


def sanitize_filename(name: str | None) -> str:
    """The last path component of `name` without control characters; `file` if nothing but dots and spaces is left.

    A leading dot stays: `.gitignore` is a name. `.` and `..`, which mean folders, do not.
    """
    last = to_storable(name or "").replace("\\", "/").rsplit("/", 1)[-1]
    safe = "".join(c for c in last if c.isprintable()).lstrip(" ").rstrip(" .")
    if len(safe) > MAX_FILENAME:
        stem, dot, suffix = safe.rpartition(".")
        safe = stem[: MAX_FILENAME - 1 - len(suffix)] + dot + suffix if 0 < len(suffix) <= 16 else safe[:MAX_FILENAME]
    return safe or "file"


OCTET_STREAM = "application/octet-stream"
# puremagic returns these when it cannot tell without a file name.
_UNSPECIFIC = {"", "application/x-binary", "application/octetstream"}
_IMAGES = {"image/png", "image/jpeg", "image/gif", "image/webp"}


def detect_type(head: bytes) -> tuple[ArtifactType, str]:
    """The artifact type and the MIME type of a file that starts with `head`."""
    mime = _mime_type(head)
    if mime in _IMAGES:
        return "image", mime
    return ("audio" if mime.startswith("audio/") else "file"), mime


def _mime_type(head: bytes) -> str:
    if not head:
        return "application/x-empty"
    if mime := _match_signature(head):
        return mime
    if _is_text(head):
        return "text/plain"
    import puremagic  # slow to import, rarely needed

    try:
        best = puremagic.magic_string(head)[0]
    except puremagic.PureError:
        return OCTET_STREAM
    return OCTET_STREAM if best.mime_type in _UNSPECIFIC or best.confidence < 0.3 else best.mime_type


def _match_signature(head: bytes) -> str | None:
    """MIME type of the formats that models or pages treat specially, by full signature; else None."""
    match head:
        case _ if head.startswith(b"\x89PNG\r\n\x1a\n"):
            return "image/png"
        case _ if head.startswith(b"\xff\xd8\xff"):
            return "image/jpeg"
        case _ if head.startswith((b"GIF87a", b"GIF89a")):
            return "image/gif"
        case _ if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
            return "image/webp"
        case _ if head.startswith(b"RIFF") and head[8:12] == b"WAVE":
            return "audio/wav"
        case _ if head.startswith(b"ID3") or head[:2] in (b"\xff\xfb", b"\xff\xf3", b"\xff\xf2"):
            return "audio/mpeg"
        case _ if head.startswith(b"fLaC"):
            return "audio/flac"
        case _ if head.startswith(b"OggS"):
            return "audio/ogg"
        case _ if head[4:8] == b"ftyp" and head[8:12] in (b"M4A ", b"M4B "):
            return "audio/mp4"
        case _ if head.startswith(b"%PDF-"):
            return "application/pdf"
        case _ if head.startswith(b"PK\x03\x04"):
            return _zip_type(head)
    return None


def _zip_type(head: bytes) -> str:
    """MIME type of a ZIP archive: an office document if it starts with the parts of one."""
    for folder, kind in ((b"word/", "wordprocessingml.document"), (b"xl/", "spreadsheetml.sheet")):
        if b"[Content_Types].xml" in head and folder in head:
            return f"application/vnd.openxmlformats-officedocument.{kind}"
    return "application/zip"


def _is_text(head: bytes) -> bool:
    if b"\x00" in head:
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        # The end of `head` may split a character.
        return error.reason == "unexpected end of data" and error.start > len(head) - 4
    return True
