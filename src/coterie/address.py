"""Where a running society listens: a note in its folder, for whoever wants to talk to it from the same machine."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from coterie import __version__
from coterie.private_file import write_private

FILE = "server.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    url: str
    """Without a stroke at its end: `http://127.0.0.1:8642`."""
    pid: int
    """Who listens there. The folder's lock says whether that process still runs the society."""
    version: str = __version__
    token: str | None = field(default=None, repr=False)
    """One that was given to the server, which keeps none in its folder; it lies here for as long as it listens."""


def leave_address(data: Path, address: Address) -> None:
    """Once it listens there, and not before."""
    write_private(data / FILE, json.dumps(asdict(address)).encode())


def take_address_back(data: Path) -> None:
    with suppress(FileNotFoundError):
        (data / FILE).unlink()


def find_address(data: Path) -> Address | None:
    """What was left last. Half a note, or one of another kind, is none."""
    try:
        note = json.loads((data / FILE).read_bytes())
        token = note.get("token")
        return Address(
            url=str(note["url"]), pid=int(note["pid"]), version=str(note["version"]), token=token and str(token)
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
