"""Files that people attach."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

PIECE = 1 << 20


def check_file(file: Path) -> None:
    """Before anything is written: a typo in the second name must not leave the first file behind."""
    with file.open("rb"):
        pass


def home_of(name: str) -> Path:
    """The file that `name` means to a person, who may write ~ for their own folder."""
    return Path(name).expanduser()


async def pieces(path: Path) -> AsyncIterator[bytes]:
    import asyncio

    file = await asyncio.to_thread(path.open, "rb")
    try:
        while piece := await asyncio.to_thread(file.read, PIECE):
            yield piece
    finally:
        file.close()
