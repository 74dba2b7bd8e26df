"""Append-only log of what clients were promised, kept outside the database under test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Note = dict[str, Any]


class Witness:
    """Writes one JSON line per note with one system call: a SIGKILL cannot undo it.

    A SIGKILL can cut a write at a page boundary. Then the writer died before it acknowledged anything, and the next one
    starts a new line.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def note(self, **fact: Any) -> None:
        os.write(self._file, json.dumps(fact).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


class Reader:
    """Reads the notes incrementally."""

    def __init__(self, path: Path) -> None:
        self._path, self._upto = path, 0
        self._notes: list[Note] = []

    def notes(self) -> list[Note]:
        self.new_notes()
        return self._notes

    def new_notes(self) -> list[Note]:
        """Notes written since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._upto)
            written = file.read()
        whole = written[: written.rfind(b"\n") + 1]
        self._upto += len(whole)
        new = [note for line in whole.split(b"\n") if (note := _decode(line)) is not None]
        self._notes += new
        return new


def _decode(line: bytes) -> Note | None:
    """Decode a line; None if it is empty, or was cut by a SIGKILL."""
    try:
        return json.loads(line)  # type: ignore[no-any-return]
    except json.JSONDecodeError:
        return None


def read_notes(path: Path) -> list[Note]:
    return Reader(path).notes()
