"""Which model services there are and what each can do."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from coterie.errors import ConfigError, Problem
from coterie.llm.secrets import SecretsFile, keys_from
from coterie.llm.service import Capabilities, Direction, UnknownService
from coterie.llm.service_entry import ServiceEntry
from coterie.llm.services_file import FILE, MAX_BYTES, read_services


class Services:
    """The services in the order of their file. `adopt` makes a reload visible to everyone who holds this object."""

    def __init__(self, entries: Sequence[ServiceEntry] = (), problems: Sequence[Problem] = ()) -> None:
        self._entries = {entry.id: entry for entry in entries}
        self.problems = tuple(problems)

    @classmethod
    def load(cls, folder: Path, environ: Mapping[str, str] = os.environ) -> Services:
        """What the society in `folder` has; no file, no services. `ConfigError` when the file cannot be read at all."""
        stored, problems = SecretsFile(folder / "data" / "secrets.json").read()
        data = read_file(folder / FILE)
        if data is None:
            return cls(problems=problems)
        entries, more = read_services(data, keys_from(environ, stored))
        return cls(entries, [*more, *problems])

    def adopt(self, other: Services) -> None:
        self._entries, self.problems = other._entries, other.problems

    def __iter__(self) -> Iterator[ServiceEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, service_id: object) -> bool:
        return service_id in self._entries

    def entry(self, service_id: str | None = None) -> ServiceEntry:
        """The service of that id; without one, the first."""
        if service_id is None and self._entries:
            return next(iter(self))
        try:
            return self._entries[service_id or ""]
        except KeyError:
            raise UnknownService(service_id or "", self._entries) from None

    def has_capability(self, service_id: str, capability: str, direction: Direction) -> bool:
        return self.get_capabilities(service_id).has(capability, direction)

    def get_capabilities(self, service_id: str) -> Capabilities:
        """What its entry declares, or what is inferred where that says nothing."""
        return self.entry(service_id).capabilities


def read_file(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            # One byte more than allowed is enough to know that it is too long.
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError([Problem(FILE, f"cannot be read: {error.strerror}", fatal=True)]) from error
