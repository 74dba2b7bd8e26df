"""Keys of model services: a type that never shows one, and the file where the setup page puts them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from coterie.errors import ConfigError, Problem
from coterie.private_file import readable_by_others, write_private

FindKey = Callable[[str], "str | None"]
"""The key of that name, wherever keys are kept."""
MAX_BYTES = 1 << 20
_SHOWN = 4


class Secret:
    """A key. Nothing that prints, logs or encodes it sees it; who needs it says `reveal()`."""

    __slots__ = ("_value", "name")

    def __init__(self, value: str, name: str = "") -> None:
        self._value = value
        self.name = name
        """Where it came from: an error about the key can say what to set."""

    def reveal(self) -> str:
        return self._value

    @property
    def masked(self) -> str:
        """For people who compare it with the one they hold: the last four characters, none of a short one."""
        return "…" + (self._value[-_SHOWN:] if len(self._value) >= 4 * _SHOWN else "")

    def __repr__(self) -> str:
        return "Secret(…)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


class SecretsFile:
    """`data/secrets.json`: names and keys, for its owner's eyes only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[dict[str, str], list[Problem]]:
        """The keys by name, and what is wrong with the file. Problems never quote its content."""
        try:
            if self.path.stat().st_size > MAX_BYTES:
                return {}, [self._wrong(f"more than {MAX_BYTES:,} bytes; not read")]
            found = json.loads(self.path.read_bytes())
            exposed = readable_by_others(self.path)
        except FileNotFoundError:
            return {}, []
        except OSError as error:
            return {}, [self._wrong(f"cannot be read: {error.strerror}")]
        except (ValueError, RecursionError):
            return {}, [self._wrong("is no JSON; delete it and enter the keys again")]
        if not isinstance(found, dict):
            return {}, [self._wrong('expected an object such as {"NAME": "key"}')]
        keys = {name: key for name, key in found.items() if isinstance(key, str)}
        problems = [self._wrong("expected a string", f": {name}") for name in found if name not in keys]
        if exposed:
            problems.append(self._wrong(f"others can read it; run: chmod 600 {self.path.name}"))
        return keys, problems

    def put(self, name: str, key: str) -> None:
        self._write(self._whole() | {name: key})

    def remove(self, name: str) -> None:
        keys = self._whole()
        if keys.pop(name, None) is not None:
            self._write(keys)

    def _whole(self) -> dict[str, str]:
        keys, problems = self.read()
        # Writing over a file that could not be read would lose the keys that are still in it.
        if problems and not keys:
            raise ConfigError(problems)
        return keys

    def _write(self, keys: Mapping[str, str]) -> None:
        write_private(self.path, json.dumps(keys, indent=2).encode())

    def _wrong(self, message: str, inside: str = "") -> Problem:
        return Problem(f"{self.path.parent.name}/{self.path.name}{inside}", message)


def keys_from(environ: Mapping[str, str], stored: Mapping[str, str]) -> FindKey:
    """The environment first: what is set for one start wins over what was kept. Blank is not set."""

    def find(name: str) -> str | None:
        return environ.get(name, "").strip() or stored.get(name, "").strip() or None

    return find
