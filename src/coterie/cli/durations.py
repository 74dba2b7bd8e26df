"""Durations as people write and read them."""

from __future__ import annotations

import re
from datetime import timedelta

_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_SHOWN = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def to_ms(text: str) -> float:
    """`500ms`, `10s`, `5m`, `2h`, `1d`; ValueError says what was expected."""
    written = _WRITTEN.fullmatch(text.strip().lower())
    if not written:
        raise ValueError(f"expected a duration such as 500ms, 10s, 5m, 2h or 1d, got {text!r}")
    return float(written[1]) * _MS[written[2]]


def shown(duration: timedelta) -> str:
    """The two units that matter: `2 h 5 min`; `now` when it is over."""
    seconds = -(-duration // timedelta(seconds=1))
    if seconds <= 0:
        return "now"
    parts = []
    for unit, size in _SHOWN:
        count, seconds = divmod(seconds, size)
        parts.append(f"{count} {unit}" if count else "")
    first = next(place for place, part in enumerate(parts) if part)
    return " ".join(filter(None, parts[first : first + 2]))
