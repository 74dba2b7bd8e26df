"""How much room is left where the society is kept, and what is still done with how much."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from coterie.clock import Clock

log = logging.getLogger(__name__)

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
