"""Keys taken out of words that somebody else chose: what a tool returned, why a server could not be reached."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import parse_qsl, urlsplit

LEAST = 8
"""Characters of a value that counts as a key: shorter ones stand in too many harmless words."""
_NAMED = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.I)


def redact(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, "***")
    return text


def secrets_of(*values: Mapping[str, str] | str | None) -> tuple[str, ...]:
    """Of variables, those whose names say so; of an address, its password and its query. The longest first."""
    found: set[str] = set()
    for value in values:
        if isinstance(value, str):
            url = urlsplit(value)
            found |= {url.password or "", url.query, *(part for _, part in parse_qsl(url.query))}
        elif value:
            found |= {one for name, one in value.items() if _NAMED.search(name)}
    return tuple(sorted((one for one in found if len(one) >= LEAST), key=len, reverse=True))
