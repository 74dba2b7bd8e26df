"""Text that every engine stores alike."""

from __future__ import annotations

import re

# PostgreSQL has no NUL in text, UTF-8 has no lone surrogates: both become U+FFFD before any engine sees them.
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def clean(text: str) -> str:
    """`text` with what cannot be stored everywhere replaced by U+FFFD."""
    if text.isascii() and "\x00" not in text:
        return text
    return _UNSTORABLE.sub("\ufffd", text)


def shortened(text: str, width: int) -> str:
    """`text`, or its first characters and "…" where it has more than `width`."""
    return text if len(text) <= width else text[: width - 1] + "…"


def nearest(word: str, known: frozenset[str] | set[str]) -> str | None:
    """The known word that `word` was probably meant to be."""
    from difflib import get_close_matches  # needed only when something is wrong

    return next(iter(get_close_matches(word, known, n=1, cutoff=0.6)), None)


def one_line(text: str, width: int = 80) -> str:
    """The start of `text` on one line, control characters made visible as spaces."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text[: width * 4]).split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"
