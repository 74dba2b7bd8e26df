"""`store.url`: where a society is kept, as people may see it, and as it stands in coterie.toml."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from coterie.errors import StoreUnusable

SQLITE = "sqlite"
SHARED = ("postgresql://", "postgres://")
_URL_LINE = re.compile(r"^[ \t]*(store\.)?url[ \t]*=.*$", re.MULTILINE)
_TABLE_LINE = re.compile(r"^[ \t]*\[[ \t]*store[ \t]*\].*$", re.MULTILINE)


def is_shared_url(text: str) -> bool:
    return text.startswith(SHARED)


def without_password(url: str) -> str:
    """The same place; who goes there brings the password from PGPASSWORD or ~/.pgpass."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    query = [(key, value) for key, value in parse_qsl(parts.query, keep_blank_values=True) if key != "password"]
    return parts._replace(netloc=user.partition(":")[0] + at + host, query=urlencode(query)).geturl()


def shown(url: str) -> str:
    """For messages: neither a password nor settings."""
    return urlsplit(without_password(url))._replace(query="").geturl() if is_shared_url(url) else url


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
