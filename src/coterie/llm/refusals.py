"""What providers refused although the configuration says their model can do it.

Remembered, with what was said and when, until the service's entry changes: then the owner may have mended it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from coterie.clock import Clock
from coterie.llm.notebook import Notebook
from coterie.llm.service import Capabilities
from coterie.llm.service_entry import ServiceEntry
from coterie.text import clean, one_line

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    capability: str
    source: str
    """What the provider said."""
    at: datetime


class Refusals:
    def __init__(self, clock: Clock, file: Path | None = None) -> None:
        self._clock = clock
        self._notes: Notebook[dict[str, Refusal]] = Notebook(file, dict[str, Refusal])
        self.edition = 0
        """How many were noted since the start."""

    def note(self, entry: ServiceEntry, capability: str, source: str) -> None:
        refusal = Refusal(capability=capability, source=one_line(clean(source), 200), at=self._clock.now())
        self._notes.write(entry, self._current(entry) | {capability: refusal})
        self.edition += 1
        log.warning("service %s refused %s and is not sent it any more: %s", entry.id, capability, refusal.source)

    def of(self, entry: ServiceEntry) -> Sequence[Refusal]:
        return list(self._current(entry).values())

    def refuses(self, entry: ServiceEntry, capability: str) -> bool:
        return capability in self._current(entry)

    def left(self, entry: ServiceEntry) -> Capabilities:
        """What the service can do: what its entry says, less what its provider refused."""
        refused, declared = self._current(entry).keys(), entry.capabilities
        if not refused:
            return declared
        return replace(declared, input=declared.input - refused, output=declared.output - refused)

    def _current(self, entry: ServiceEntry) -> dict[str, Refusal]:
        return self._notes.of(entry) or {}
