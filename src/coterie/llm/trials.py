"""Which services were tried out, and how that went: a service that nobody tried is marked as such."""

from __future__ import annotations

from pathlib import Path

from coterie.llm.notebook import Notebook
from coterie.llm.service_entry import ServiceEntry
from coterie.llm.trial import Trial


class Trials:
    def __init__(self, file: Path) -> None:
        self._notes = Notebook(file, Trial)
        self._drafts: dict[ServiceEntry, Trial] = {}
        """Of entries that are not saved yet, with their keys: only in memory."""

    def note(self, entry: ServiceEntry, trial: Trial) -> None:
        self._notes.write(entry, trial)

    def note_draft(self, entry: ServiceEntry, trial: Trial) -> None:
        self._drafts = {entry: trial}

    def saved(self, entry: ServiceEntry, *, new_key: bool) -> None:
        """The entry is in the file now. A trial of just this draft is one of it; with a new key, no other counts."""
        if trial := self._drafts.pop(entry, None):
            self.note(entry, trial)
        elif new_key:
            self._notes.erase(entry)

    def of(self, entry: ServiceEntry) -> Trial | None:
        return self._notes.of(entry)
