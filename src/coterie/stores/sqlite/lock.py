"""One process owns the data folder, by an operating-system lock it holds for life."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from coterie.errors import StoreOwned, StoreUnusable


class FolderLock:
    """The lock is the truth; the pid inside the file is only for the message to whoever comes second."""

    def __init__(self, folder: Path) -> None:
        try:
            self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnusable(
                f"{folder / 'lock'} cannot be opened ({error.strerror}): make it yours and writable"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._file, 32, 0).decode(errors="replace").strip()
            os.close(self._file)
            raise StoreOwned(folder.parent, int(owner) if owner.isdigit() else None) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.ftruncate(self._file, 0)
        os.close(self._file)


def owner_of(folder: Path) -> int | None:
    """The pid of the process that runs the society in `folder`, if one does."""
    with contextlib.suppress(FileNotFoundError), (folder / "lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = file.read(32).decode(errors="replace").strip()
            return int(owner) if owner.isdigit() else -1
    return None
