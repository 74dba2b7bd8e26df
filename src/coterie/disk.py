"""How much room is left where the society is kept: what comes from outside is turned away before there is none."""

from __future__ import annotations

import shutil
from pathlib import Path

from coterie.clock import Clock

LOW = 64 << 20
"""Bytes. What agents have begun can be written down with far less."""
LOOK_EVERY = 1.0
"""Seconds."""


class Disk:
    def __init__(self, folder: Path | None, clock: Clock) -> None:
        """`folder`: None where a server of its own keeps the society, and knows its disk better."""
        self._folder, self._clock = folder, clock
        self._low, self._looked = False, -LOOK_EVERY

    def is_low(self) -> bool:
        now = self._clock.monotonic()
        if self._folder and now - self._looked >= LOOK_EVERY:
            self._looked, self._low = now, shutil.disk_usage(self._folder).free < LOW
        return self._low
