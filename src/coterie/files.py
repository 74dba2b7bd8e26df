"""Atomic writes of small files, and free disk space."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
from pathlib import Path

from coterie.clock import Clock

log = logging.getLogger(__name__)


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` atomically and durably by `data`, mode 0600."""
    _write_atomically(path, data, 0o600)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file of the owner atomically and durably; keep its mode, follow symbolic links."""
    path = path.resolve()
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        mode = 0o600
    _write_atomically(path, data, mode)


def _write_atomically(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        # Created with 0600: a chmod afterwards would leave a moment in which others could open it.
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_readable_by_others(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o077)


LOW_SPACE_BYTES = 64 << 20
"""With less free space, requests from outside are rejected; running agents need far less."""
MIN_SPACE_BYTES = 16 << 20
"""With less free space, no turn starts; the rest is kept for running turns."""
CHECK_INTERVAL_SECONDS = 1.0


class DiskMonitor:
    def __init__(self, folder: Path | None, clock: Clock) -> None:
        """`folder`: None if a database server stores the society; then the disk is never low."""
        self._folder, self._clock = folder, clock
        self._low, self._full, self._checked_at = False, False, -CHECK_INTERVAL_SECONDS
        self._folder_error: str | None = None

    def is_low(self) -> bool:
        self._check()
        return self._low

    def is_full(self) -> bool:
        self._check()
        return self._full

    @property
    def folder_error(self) -> str | None:
        """Why the folder cannot be used; None if it can."""
        self._check()
        return self._folder_error

    def _check(self) -> None:
        now = self._clock.monotonic()
        if not self._folder or now - self._checked_at < CHECK_INTERVAL_SECONDS:
            return
        self._checked_at = now
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            if self._folder_error is None:
                self._folder_error = (
                    f"{self._folder} cannot be used ({error.strerror}): put it back or restore a backup"
                )
                log.critical("%s", self._folder_error)
            return
        self._folder_error = None
        before = (self._low, self._full)
        self._low, self._full = free < LOW_SPACE_BYTES, free < MIN_SPACE_BYTES
        if before != (self._low, self._full):
            log.log(logging.WARNING if self._low else logging.INFO, "%s", self.status_message)

    @property
    def status_message(self) -> str:
        """The disk's state and what to do, for logs and people."""
        if self._full:
            state = f"fewer than {MIN_SPACE_BYTES:,} bytes of disk are free, so no turn starts"
        elif self._low:
            state = f"fewer than {LOW_SPACE_BYTES:,} bytes of disk are free"
        else:
            return "there is enough free disk space again"
        return f"{state}: free some space; nothing was lost, no restart is needed"
