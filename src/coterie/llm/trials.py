"""Which services were tried out, and how that went: a service that nobody tried is marked as such."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec

from coterie.llm.service_entry import ServiceEntry
from coterie.llm.trial import Trial
from coterie.private_file import write_private

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    entry: str
    """The digest of the entry it belongs to; under any other it counts no more."""
    trial: Trial


class Trials:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._kept = _read(file)
        self._drafts: dict[ServiceEntry, Trial] = {}
        """Of entries that are not saved yet, with their keys: only in memory."""

    def note(self, entry: ServiceEntry, trial: Trial) -> None:
        self._kept[entry.id] = _Kept(entry=entry.digest, trial=trial)
        self._write()

    def note_draft(self, entry: ServiceEntry, trial: Trial) -> None:
        self._drafts = {entry: trial}

    def saved(self, entry: ServiceEntry, *, new_key: bool) -> None:
        """The entry is in the file now. A trial of just this draft is one of it; with a new key, no other counts."""
        if trial := self._drafts.pop(entry, None):
            self.note(entry, trial)
        elif new_key and entry.id in self._kept:
            del self._kept[entry.id]
            self._write()

    def of(self, entry: ServiceEntry) -> Trial | None:
        kept = self._kept.get(entry.id)
        return kept.trial if kept and kept.entry == entry.digest else None

    def _write(self) -> None:
        try:
            write_private(self._file, msgspec.json.encode(self._kept))
        except OSError as error:
            # Losing this costs one more trial.
            log.warning("%s cannot be written: %s", self._file.name, error.strerror)


def _read(file: Path) -> dict[str, _Kept]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, _Kept])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("%s cannot be read and begins anew: %s", file.name, type(error).__name__)
        return {}
