"""Small files, replaced as a whole or not at all; most of them are for their owner's eyes only.

How much room is left where the society is kept, and what is still done with how much.
"""

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


LOW = 64 << 20
"""Bytes. With less, what comes from outside is turned away: what agents have begun needs far less."""
HARD = 16 << 20
"""Bytes. With less, no agent begins anything: what is left is for those who have."""
LOOK_EVERY = 1.0
"""Seconds."""


class Disk:
    def __init__(self, folder: Path | None, clock: Clock) -> None:
        """`folder`: None where a server of its own keeps the society, and knows its disk better."""
        self._folder, self._clock = folder, clock
        self._low, self._full, self._looked = False, False, -LOOK_EVERY
        self._missing: str | None = None

    def is_low(self) -> bool:
        self._look()
        return self._low

    def is_full(self) -> bool:
        self._look()
        return self._full

    @property
    def missing(self) -> str | None:
        """Why the folder cannot be used, in one sentence; None while it is there."""
        self._look()
        return self._missing

    def _look(self) -> None:
        now = self._clock.monotonic()
        if not self._folder or now - self._looked < LOOK_EVERY:
            return
        self._looked = now
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            if self._missing is None:
                self._missing = f"{self._folder} cannot be used ({error.strerror}): put it back, or restore a backup"
                log.critical("%s", self._missing)
            return
        self._missing = None
        was = (self._low, self._full)
        self._low, self._full = free < LOW, free < HARD
        if was != (self._low, self._full):
            log.log(logging.WARNING if self._low else logging.INFO, "%s", self.sentence)

    @property
    def sentence(self) -> str:
        """What there is, and what that means."""
        if self._full:
            return (
                f"fewer than {HARD:,} bytes of the disk are free, so no agent begins anything:"
                " make room; nothing was lost, no restart is needed"
            )
        if self._low:
            return f"fewer than {LOW:,} bytes of the disk are free: make room; nothing was lost, no restart is needed"
        return "there is room on the disk again"
