"""A small file that only its owner may read, replaced as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """`path` holds `data`, mode 0600; whoever reads meanwhile sees the old content or the new, never half of it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        # Made with its final mode: a later chmod would leave a moment in which others could open it.
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def readable_by_others(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o077)
