"""Files that messages carry: what they are, and where their bytes are kept."""

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
