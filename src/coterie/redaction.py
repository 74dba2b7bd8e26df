"""Removal of secrets from text that comes from elsewhere: tool results, provider errors, server logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from urllib.parse import parse_qsl, urlsplit

MIN_SECRET_LENGTH = 8
"""Shorter values occur in too many harmless texts."""
REDACTED = "***"
_FRAGMENT_LENGTH = 8
_MIN_KEY_LENGTH = 5
_MASK_SHOWS = 4
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.I)


def redact(text: str, secrets: Iterable[str], *, fragments: bool = False) -> str:
    """Replace each secret. `fragments`: also parts of a secret of at least 8 characters, which costs more.

    With `fragments`, secrets shorter than 5 characters are ignored: values such as `none` are no keys.
    """
    for secret in secrets:
        if fragments:
            text = _redact_fragments(text, secret)
        elif secret in text:
            text = text.replace(secret, REDACTED)
    return text


def _redact_fragments(text: str, secret: str) -> str:
    size = min(_FRAGMENT_LENGTH, len(secret))
    if size < _MIN_KEY_LENGTH:
        return text
    pieces = {secret[i : i + size] for i in range(len(secret) - size + 1)}
    result: list[str] = []
    copied = end = 0
    for start in range(len(text) - size + 1):
        if text[start : start + size] in pieces:
            if start > end or not result:
                result += [text[copied:start], REDACTED]
            copied = end = start + size
    return "".join(result) + text[copied:]


def mask(secret: str) -> str:
    """Return the last four characters for comparison, or none of a short secret."""
    return "…" + (secret[-_MASK_SHOWS:] if len(secret) >= 4 * _MASK_SHOWS else "")


def find_secrets(*values: Mapping[str, str] | tuple[str, ...] | str | None) -> tuple[str, ...]:
    """Return the secrets in environment variables, command options and URLs, longest first.

    Of variables and options, those with a name such as `API_KEY`; of a URL, its password and its query.
    """
    secrets: set[str] = set()
    for value in values:
        if isinstance(value, str):
            url = urlsplit(value)
            secrets |= {url.password or "", url.query, *(part for _, part in parse_qsl(url.query))}
        elif value:
            named = _options(value) if isinstance(value, tuple) else value.items()
            secrets |= {secret for name, secret in named if _SECRET_NAME.search(name)}
    # Logs are redacted line by line, so each line of a secret counts.
    secrets |= {line for secret in secrets for line in secret.splitlines()}
    return tuple(sorted((secret for secret in secrets if len(secret) >= MIN_SECRET_LENGTH), key=len, reverse=True))


def _options(arguments: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return names and values of both `--api-key X` and `--api-key=X`."""
    joined = [argument.partition("=") for argument in arguments]
    return [(name, value) for name, _, value in joined] + list(pairwise(arguments))
