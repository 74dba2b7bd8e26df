"""Small text helpers: storable text, truncation, suggestions."""

from __future__ import annotations

import re

# PostgreSQL text cannot hold NUL; UTF-8 cannot encode lone surrogates.
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
BLANK_CHARACTERS = r"\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200d\u2028\u2029\u202f\u205f\u2060\u3000\ufeff"
"""White space and zero-width characters, for a regular expression. `web/static/state.js` has the same: Python's `strip`
and the page's `trim` disagree about some of them."""
_BLANK = re.compile(f"[{BLANK_CHARACTERS}]*")


def is_blank(text: str) -> bool:
    """True if nothing of `text` is visible."""
    return _BLANK.fullmatch(text) is not None


def to_storable(text: str) -> str:
    """`text` with characters that some engine cannot store replaced by U+FFFD."""
    if text.isascii() and "\x00" not in text:
        return text
    return _UNSTORABLE.sub("\ufffd", text)


def truncate(text: str, width: int) -> str:
    """`text`, cut to `width` characters with "…" at the end if it is longer."""
    return text if len(text) <= width else text[: width - 1] + "…"


def closest_match(word: str, known: frozenset[str] | set[str]) -> str | None:
    """The word of `known` that `word` is probably a misspelling of."""
    from difflib import get_close_matches  # only needed for error messages

    return next(iter(get_close_matches(word, known, n=1, cutoff=0.6)), None)


def one_line(text: str, width: int = 80) -> str:
    """The start of `text` on one line, at most `width` characters, control characters as spaces."""
    return truncate(" ".join("".join(c if c.isprintable() else " " for c in text[: width * 4]).split()), width)
