"""What providers refused although the configuration says their model can do it.

Remembered, with what was said and when, until the service's entry changes: then the owner may have mended it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import msgspec

from coterie.clock import Clock
from coterie.llm.service import Capabilities
from coterie.llm.service_entry import ServiceEntry
from coterie.private_file import write_private
from coterie.text import clean, one_line

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    capability: str
    source: str
    """What the provider said."""
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    entry: str
    """The digest of the entry they belong to; under any other they count no more."""
    refusals: dict[str, Refusal] = field(default_factory=dict)


class Refusals:
    def __init__(self, clock: Clock, file: Path | None = None) -> None:
        self._clock, self._file = clock, file
        self._kept = _read(file) if file else {}
        self.edition = 0
        """How many were noted since the start."""

    def note(self, entry: ServiceEntry, capability: str, source: str) -> None:
        refusal = Refusal(capability=capability, source=one_line(clean(source), 200), at=self._clock.now())
        self._kept[entry.id] = _Kept(entry=entry.digest, refusals=self._current(entry) | {capability: refusal})
        self.edition += 1
        log.warning("service %s refused %s and is not sent it any more: %s", entry.id, capability, refusal.source)
        self._write()

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
        kept = self._kept.get(entry.id)
        return kept.refusals if kept and kept.entry == entry.digest else {}

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            write_private(self._file, msgspec.json.encode(self._kept))
        except OSError as error:
            # Losing this costs one more refused request after a restart.
            log.warning("%s cannot be written: %s", self._file.name, error.strerror)


def _read(file: Path) -> dict[str, _Kept]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, _Kept])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("%s cannot be read and begins anew: %s", file.name, type(error).__name__)
        return {}
