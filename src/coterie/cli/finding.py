"""The way to the running server: found by a note in the society's folder, asked with the token that lies beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from coterie import __version__
from coterie.address import Address, find_address
from coterie.errors import ServerUnusable, StoreOwned
from coterie.inspection import owner, require_society
from coterie.web.access import FILE as TOKEN
from coterie.web.addresses import is_loopback

if TYPE_CHECKING:
    from coterie.cli.client import Client


def find_server(folder: Path, token: str | None = None) -> Client | None:
    """The server that runs the society in `folder`; None when nobody runs it."""
    place = require_society(folder)
    pid = owner(place)
    if pid is None:
        return None
    address = find_address(place.data)
    if address is None or address.pid != pid:
        # Another command, a program, or a server that does not listen yet.
        raise StoreOwned(folder, pid if pid > 0 else None)
    _check(address)
    # Only now: a society that nobody runs shall not wait for an HTTP client to be imported.
    from coterie.cli.client import Client

    return Client(address, token or address.token or _kept_token(place.data))


def _check(address: Address) -> None:
    host = urlsplit(address.url).hostname or ""
    if not is_loopback(host):
        raise ServerUnusable(
            f"the server listens on {host} only, which commands do not use: set server.host to 127.0.0.1 or 0.0.0.0"
        )
    if address.version.split(".")[:2] != __version__.split(".")[:2]:
        raise ServerUnusable(
            f"the server is coterie {address.version}, this command is coterie {__version__}: restart the server"
        )


def _kept_token(data: Path) -> str:
    path = data / TOKEN
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        raise ServerUnusable(
            f"the token of the running server is not in {path}: give it with --token or COTERIE_TOKEN"
        ) from None
