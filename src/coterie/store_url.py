"""The address of the database, `store.url`: without its password, and as a line of coterie.toml."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from coterie.errors import StoreUnusable

SQLITE = "sqlite"
POSTGRES_SCHEMES = ("postgresql://", "postgres://")
_URL_LINE = re.compile(r"^[ \t]*(store\.)?url[ \t]*=.*$", re.MULTILINE)
_TABLE_LINE = re.compile(r"^[ \t]*\[[ \t]*store[ \t]*\].*$", re.MULTILINE)


def is_postgres_url(url: str) -> bool:
    return url.startswith(POSTGRES_SCHEMES)


def without_password(url: str) -> str:
    """The PostgreSQL URL without its password, which PGPASSWORD or ~/.pgpass must then supply."""
    # Split by hand: libpq does not accept every spelling that urllib would write.
    base, _, settings = url.partition("?")
    scheme, _, rest = base.partition("://")
    authority, slash, database = rest.partition("/")
    user, at, host = authority.rpartition("@")
    kept = "&".join(setting for setting in settings.split("&") if setting.partition("=")[0] != "password")
    return f"{scheme}://{user.partition(':')[0]}{at}{host}{slash}{database}" + (f"?{kept}" if kept else "")


def redact_url(url: str) -> str:
    """The URL for messages: without password and settings."""
    return without_password(url).partition("?")[0] if is_postgres_url(url) else url


def read_store_url(text: str) -> str:
    """`store.url` in the text of a coterie.toml; "sqlite" if it is absent or unreadable."""
    try:
        url = tomllib.loads(text).get("store", {}).get("url", SQLITE)
    except (tomllib.TOMLDecodeError, AttributeError):
        return SQLITE
    return url if isinstance(url, str) else SQLITE


def replace_store_url(text: str, url: str) -> str:
    """The text of a coterie.toml with another `store.url`; everything else stays as it is."""
    before = _try_parse(text)
    if before is not None and isinstance(table := before.get("store", {}), dict):
        expected = before | {"store": table | {"url": url}}
        for candidate in _with_url_line(text, url):
            if _try_parse(candidate) == expected:
                return candidate
    raise StoreUnusable("coterie.toml cannot be changed by a program: write store.url on a line of its own")


def _with_url_line(text: str, url: str) -> Iterator[str]:
    """`text` with the URL at each position where it may belong; the caller checks which one is right."""
    line = f"url = {json.dumps(url)}"
    for match in _URL_LINE.finditer(text):
        yield f"{text[: match.start()]}{match[1] or ''}{line}{text[match.end() :]}"
    for match in _TABLE_LINE.finditer(text):
        yield f"{text[: match.end()]}\n{line}{text[match.end() :]}"
    yield f"{text.rstrip()}\n\n[store]\n{line}\n".lstrip()


def _try_parse(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
