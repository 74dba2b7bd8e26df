"""The way to the running server: found by a note in the society's folder, asked with the token that lies beside it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from coterie import __version__
from coterie.admin.inspect import owner, require_society
from coterie.config import Address, find_address, read_config
from coterie.errors import ConfigError, ServerUnusable, StoreOwned
from coterie.stores.open import is_shared
from coterie.web.addresses import is_loopback
from coterie.web.auth import FILENAME as TOKEN_FILENAME

if TYPE_CHECKING:
    from coterie.cli.client import Client

SECONDS = 2.0
"""A server on the same machine takes no longer to say that it is there."""


def find_server(folder: Path, token: str | None = None) -> Client | None:
    """The server that runs the society in `folder`; None when nobody runs it."""
    place = require_society(folder)
    pid, address = owner(place), find_address(place.data)
    if pid is None and not (address and _is_shared(folder) and _listens(address)):
        return None
    if address is None or pid not in (None, address.pid):
        # Another command, a program, or a server that does not listen yet.
        raise StoreOwned(folder, pid if pid and pid > 0 else None)
    _check(address)
    # Only now: a society that nobody runs shall not wait for an HTTP client to be imported.
    from coterie.cli.client import Client

    return Client(address, token or address.token or _kept_token(place.data))


def _is_shared(folder: Path) -> bool:
    """A society that PostgreSQL keeps has no owner: several processes may run it, this one server among them."""
    with suppress(ConfigError):
        return is_shared(read_config(folder))
    return False


def _listens(address: Address) -> bool:
    """The process is there, is ours, and lets us in: a note that a crash left behind leads to nobody else's door."""
    where = urlsplit(address.url)
    try:
        os.kill(address.pid, 0)
        socket.create_connection((where.hostname or "", where.port or 80), timeout=SECONDS).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


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
    path = data / TOKEN_FILENAME
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        raise ServerUnusable(
            f"the token of the running server is not in {path}: give it with --token or COTERIE_TOKEN"
        ) from None
