"""What providers refused although the configuration says their model can do it.

Remembered, with what was said and when, until the service's entry changes: then the owner may have mended it.

What was learnt of services, in a private file. Losing it costs a request or two, so nothing fails over it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from coterie.clock import Clock
from coterie.files import write_private
from coterie.llm.config import ServiceEntry
from coterie.llm.service import Capabilities
from coterie.text import clean, one_line

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Note(msgspec.Struct, Generic[T], frozen=True):
    entry: str
    """The digest of the entry it belongs to; under any other it counts no more."""
    said: T


class Notebook(Generic[T]):
    """One note for every service. Without a file it lasts as long as the process."""

    def __init__(self, file: Path | None, kind: type[T]) -> None:
        self._file = file
        self._notes: dict[str, _Note[T]] = _read(file, dict[str, _Note[kind]]) if file else {}  # type: ignore[valid-type]

    def of(self, entry: ServiceEntry) -> T | None:
        note = self._notes.get(entry.id)
        return note.said if note and note.entry == entry.digest else None

    def write(self, entry: ServiceEntry, said: T) -> None:
        self._notes[entry.id] = _Note(entry.digest, said)
        self._save()

    def erase(self, entry: ServiceEntry) -> None:
        if self._notes.pop(entry.id, None):
            self._save()

    def _save(self) -> None:
        if self._file is None:
            return
        try:
            write_private(self._file, msgspec.json.encode(self._notes))
        except OSError as error:
            log.warning("%s cannot be written: %s", self._file.name, error.strerror)


def _read(file: Path, kind: type[dict[str, _Note[T]]]) -> dict[str, _Note[T]]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("%s cannot be read and begins anew: %s", file.name, type(error).__name__)
        return {}


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
