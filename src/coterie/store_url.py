"""`store.url`: where a society is kept, as people may see it, and as it stands in coterie.toml."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from coterie.errors import StoreUnusable

SQLITE = "sqlite"
SHARED = ("postgresql://", "postgres://")
_URL_LINE = re.compile(r"^[ \t]*(store\.)?url[ \t]*=.*$", re.MULTILINE)
_TABLE_LINE = re.compile(r"^[ \t]*\[[ \t]*store[ \t]*\].*$", re.MULTILINE)


def is_shared_url(text: str) -> bool:
    return text.startswith(SHARED)


def without_password(url: str) -> str:
    """The same place; who goes there brings the password from PGPASSWORD or ~/.pgpass."""
    # Put together from its own letters: PostgreSQL does not read every spelling that other URLs may have.
    place, _, settings = url.partition("?")
    scheme, _, rest = place.partition("://")
    authority, slash, name = rest.partition("/")
    user, at, host = authority.rpartition("@")
    kept = "&".join(one for one in settings.split("&") if one.partition("=")[0] != "password")
    return f"{scheme}://{user.partition(':')[0]}{at}{host}{slash}{name}" + (f"?{kept}" if kept else "")


def shown(url: str) -> str:
    """For messages: neither a password nor settings."""
    return without_password(url).partition("?")[0] if is_shared_url(url) else url


def written_in(text: str) -> str:
    """What a coterie.toml says; one that cannot be read says nothing."""
    try:
        url = tomllib.loads(text).get("store", {}).get("url", SQLITE)
    except (tomllib.TOMLDecodeError, AttributeError):
        return SQLITE
    return url if isinstance(url, str) else SQLITE


def with_store_url(text: str, url: str) -> str:
    """The text of a coterie.toml that names another store, and is otherwise what it was to the letter."""
    before = _parsed(text)
    if before is not None and isinstance(table := before.get("store", {}), dict):
        wanted = before | {"store": table | {"url": url}}
        for changed in _attempts(text, url):
            if _parsed(changed) == wanted:
                return changed
    raise StoreUnusable("coterie.toml cannot be read or changed by machine: write store.url on a line of its own in it")


def _attempts(text: str, url: str) -> Iterator[str]:
    """Wherever it may have to stand; only the right one means what is wanted."""
    line = f"url = {json.dumps(url)}"
    for found in _URL_LINE.finditer(text):
        yield f"{text[: found.start()]}{found[1] or ''}{line}{text[found.end() :]}"
    for found in _TABLE_LINE.finditer(text):
        yield f"{text[: found.end()]}\n{line}{text[found.end() :]}"
    yield f"{text.rstrip()}\n\n[store]\n{line}\n".lstrip()


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
