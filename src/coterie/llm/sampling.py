"""Checks of sampling values, which llmservices.json and coterie.toml share."""

from __future__ import annotations

import json
import re
from typing import Any, TypeGuard

MAX_TEMPERATURE = 2
_RESERVED = ("model", "messages", "tools", "stream", "stream_options")


def is_number(value: object, most: float) -> TypeGuard[float]:
    """True for a number from 0 to `most`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


def check_effort(value: object) -> str | None:
    """Return what was expected of `reasoningEffort`; None if it is right. Services define their own names."""
    if isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9_-]*", value):
        return None
    return "expected a word such as none, minimal, low, medium, high"


def check_extra_body(value: Any, kind: str) -> str | None:
    """Return what was expected of additional keys of a request; None if they are right. `kind`: the file's word."""
    if not isinstance(value, dict):
        return f"expected {kind}"
    if reserved := next((key for key in _RESERVED if key in value), None):
        return f'expected no "{reserved}", which the runtime sets itself'
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return "expected only values that JSON has"
    return None
