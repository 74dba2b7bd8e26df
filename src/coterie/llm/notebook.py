"""What was learnt of services, in a private file. Losing it costs a request or two, so nothing fails over it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from coterie.llm.service_entry import ServiceEntry
from coterie.private_file import write_private

T = TypeVar("T")
log = logging.getLogger(__name__)


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
