"""Keys taken out of words that somebody else chose: what a tool returned, why a server could not be reached."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from urllib.parse import parse_qsl, urlsplit

LEAST = 8
"""Characters of a value that counts as a key: shorter ones stand in too many harmless words."""
_NAMED = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.I)


def redact(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, "***")
    return text


def secrets_of(*values: Mapping[str, str] | tuple[str, ...] | str | None) -> tuple[str, ...]:
    """Of variables and of a command's options, those whose names say so; of an address, its password and its query.

    The longest first.
    """
    found: set[str] = set()
    for value in values:
        if isinstance(value, str):
            url = urlsplit(value)
            found |= {url.password or "", url.query, *(part for _, part in parse_qsl(url.query))}
        elif value:
            named = _options(value) if isinstance(value, tuple) else value.items()
            found |= {one for name, one in named if _NAMED.search(name)}
    found |= {line for one in found for line in one.splitlines()}  # what is read line by line has no more of it
    return tuple(sorted((one for one in found if len(one) >= LEAST), key=len, reverse=True))


def _options(arguments: tuple[str, ...]) -> list[tuple[str, str]]:
    """`--api-key X` and `--api-key=X` alike."""
    joined = [one.partition("=") for one in arguments]
    return [(name, value) for name, _, value in joined] + list(pairwise(arguments))
