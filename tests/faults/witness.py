"""What was promised to whom, kept outside the database under test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Note = dict[str, Any]


class Witness:
    """One line a note, each written by one call to a file opened for appending: a SIGKILL cannot take it back."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(self, **fact: Any) -> None:
        os.write(self._file, json.dumps(fact).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read_notes(path: Path, start: int = 0) -> list[Note]:
    """Those that begin at byte `start` or later."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes()[start:].splitlines()]
