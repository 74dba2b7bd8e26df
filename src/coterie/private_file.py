"""Small files, replaced as a whole or not at all; most of them are for their owner's eyes only."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """`path` holds `data`, mode 0600; whoever reads meanwhile sees the old content or the new, never half of it."""
    _replace(path, data, 0o600)


def write_whole(path: Path, data: bytes) -> None:
    """The same for a file of the owner's: who may read it stays as it was, and a link stays a link."""
    path = path.resolve()
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        mode = 0o600
    _replace(path, data, mode)


def _replace(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        # Made private first: a later chmod that takes rights away would leave a moment in which others could open it.
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            os.fchmod(file.fileno(), mode)
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
