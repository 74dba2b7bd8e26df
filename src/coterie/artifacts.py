"""Files that messages carry: what they are, and where their bytes are kept.

What a file is, told from its first bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol

from coterie.text import clean

ArtifactType = Literal["image", "audio", "file"]
MAX_FILENAME = 255
HEAD_BYTES = 8192
"""How much of a file is looked at to tell its type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    ref: str
    filename: str
    """As its sender called it: shown, never used as a path."""
    type: ArtifactType
    mime_type: str
    """Told from the bytes, not from the name."""
    size: int
    sha256: str
    created_at: datetime

    def to_wire(self) -> dict[str, Any]:
        return {
            "artifactRef": self.ref,
            "type": self.type,
            "filename": self.filename,
            "mimeType": self.mime_type,
            "size": self.size,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBytes:
    sha256: str
    size: int
    head: bytes
    """The first `HEAD_BYTES` of it."""


class Bytes(Protocol):
    """Keeps bytes under their content hash. The same bytes twice are kept once."""

    async def put(self, chunks: AsyncIterable[bytes], limit: int) -> StoredBytes:
        """Durable when it returns. More than `limit` bytes are refused (`artifact_too_large`), and nothing stays."""
        ...

    def open(self, sha256: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """The bytes from `start` up to `end`, in pieces."""
        ...

    async def size(self, sha256: str) -> int | None:
        """None: not kept here."""
        ...

    async def delete(self, sha256: str) -> None: ...


def tidy_filename(name: str | None) -> str:
    """The last part of `name` in a form that is safe to show; `file` when nothing is left of it."""
    last = clean(name or "").replace("\\", "/").rsplit("/", 1)[-1]
    shown = "".join(c for c in last if c.isprintable()).strip(" .")
    if len(shown) > MAX_FILENAME:
        stem, dot, ending = shown.rpartition(".")
        shown = stem[: MAX_FILENAME - 1 - len(ending)] + dot + ending if 0 < len(ending) <= 16 else shown[:MAX_FILENAME]
    return shown or "file"


OCTETS = "application/octet-stream"
# puremagic answers with these where a name would have helped; none of them says anything certain about content.
_VAGUE = {"", "application/x-binary", "application/octetstream"}
_IMAGES = {"image/png", "image/jpeg", "image/gif", "image/webp"}


def sniff(head: bytes) -> tuple[ArtifactType, str]:
    """The kind a model needs to know, and the MIME type."""
    mime = _mime(head)
    if mime in _IMAGES:
        return "image", mime
    return ("audio" if mime.startswith("audio/") else "file"), mime


def _mime(head: bytes) -> str:
    if not head:
        return "application/x-empty"
    if mime := _certain(head):
        return mime
    if _is_text(head):
        return "text/plain"
    import puremagic  # only for what is none of the above

    try:
        found = puremagic.magic_string(head)
    except puremagic.PureError:
        return OCTETS
    best = found[0]
    return OCTETS if best.mime_type in _VAGUE or best.confidence < 0.3 else best.mime_type


def _certain(head: bytes) -> str | None:
    """The types whose treatment differs, each by its full signature: a wrong answer would reach a model or a page."""
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
            return _archive(head)
    return None


def _archive(head: bytes) -> str:
    """A ZIP archive is an office document when it begins with the parts of one."""
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
        # A character cut in two by the end of the head is still text.
        return error.reason == "unexpected end of data" and error.start > len(head) - 4
    return True
