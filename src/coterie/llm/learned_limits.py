"""Capabilities that a provider refused although the configuration declares them.

A learned limit holds until the service's entry changes. Records are kept in a private file; they can be learned again,
so a file error is only logged.
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
from coterie.text import one_line, to_storable

log = logging.getLogger(__name__)

MAX_LIMITS = 200
"""Per service. The oldest is forgotten, and learned again if it is needed."""
T = TypeVar("T")


class _Record(msgspec.Struct, Generic[T], frozen=True):
    digest: str = msgspec.field(name="entry")
    """Digest of the service entry; the record is void under any other digest."""
    value: T = msgspec.field(name="said")


class ServiceRecords(Generic[T]):
    """One record per service, in a file; without a file only in memory."""

    def __init__(self, file: Path | None, kind: type[T]) -> None:
        self._file = file
        self._records: dict[str, _Record[T]] = _read(file, dict[str, _Record[kind]]) if file else {}  # type: ignore[valid-type]

    def get(self, entry: ServiceEntry) -> T | None:
        record = self._records.get(entry.id)
        return record.value if record and record.digest == entry.digest else None

    def put(self, entry: ServiceEntry, value: T) -> None:
        self._records[entry.id] = _Record(entry.digest, value)
        self._save()

    def remove(self, entry: ServiceEntry) -> None:
        if self._records.pop(entry.id, None):
            self._save()

    def _save(self) -> None:
        if self._file is None:
            return
        try:
            write_private(self._file, msgspec.json.encode(self._records))
        except OSError as error:
            log.warning("%s cannot be written: %s", self._file.name, error.strerror)


def _read(file: Path, kind: type[dict[str, _Record[T]]]) -> dict[str, _Record[T]]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("%s cannot be read and starts empty: %s", file.name, type(error).__name__)
        return {}


def type_limit(capability: str, mime_type: str) -> str:
    """Return the name of a limit for one type of file: the service takes others."""
    return f"{capability}:{mime_type}"


def content_limit(capability: str, sha256: str) -> str:
    """Return the name of a limit for one content: the service takes others of its type."""
    return f"{capability}#{sha256}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedLimit:
    capability: str
    """A capability, a `type_limit` or a `content_limit`."""
    source: str
    """The provider's error message."""
    at: datetime


class LearnedLimits:
    def __init__(self, clock: Clock, file: Path | None = None) -> None:
        self._clock = clock
        self._records: ServiceRecords[dict[str, LearnedLimit]] = ServiceRecords(file, dict[str, LearnedLimit])
        self.version = 0
        """Number of limits recorded since the start; changes when a cache must be invalidated."""

    def record(self, entry: ServiceEntry, capability: str, source: str) -> None:
        limit = LearnedLimit(capability=capability, source=one_line(to_storable(source), 200), at=self._clock.now())
        limits = self._current(entry) | {capability: limit}
        while len(limits) > MAX_LIMITS:
            del limits[next(iter(limits))]
        self._records.put(entry, limits)
        self.version += 1
        log.warning("service %s refused %s and is not sent it any more: %s", entry.id, capability, limit.source)

    def list_for(self, entry: ServiceEntry) -> Sequence[LearnedLimit]:
        return list(self._current(entry).values())

    def is_refused(self, entry: ServiceEntry, capability: str) -> bool:
        return capability in self._current(entry)

    def takes_file(self, entry: ServiceEntry, capability: str, mime_type: str, sha256: str) -> bool:
        """True unless the service refused this content or files of this type."""
        limits = self._current(entry)
        return content_limit(capability, sha256) not in limits and type_limit(capability, mime_type) not in limits

    def takes_type(self, entry: ServiceEntry, capability: str, mime_type: str) -> bool:
        """True unless the service refused files of this type."""
        return not self.is_refused(entry, type_limit(capability, mime_type))

    def effective_capabilities(self, entry: ServiceEntry) -> Capabilities:
        """Return the declared capabilities without the refused ones."""
        refused, declared = self._current(entry).keys(), entry.capabilities
        if not refused:
            return declared
        return replace(declared, input=declared.input - refused, output=declared.output - refused)

    def _current(self, entry: ServiceEntry) -> dict[str, LearnedLimit]:
        return self._records.get(entry) or {}
