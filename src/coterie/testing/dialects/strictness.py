"""What the checks of all dialects share."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,", re.A)


class Wrong(Exception):
    """The complaint."""


def complaint(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Wrong as wrong:
        return str(wrong)
    return None


def need(holds: object, complaint: str) -> None:
    if not holds:
        raise Wrong(complaint)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def is_data_url(url: str, kind: str = "") -> bool:
    head = _DATA_URL.match(url)
    return head is not None and url.startswith(f"data:{kind}") and is_base64(url[head.end() :])


def is_base64(data: str) -> bool:
    try:
        return bool(base64.b64decode(data, validate=True)) or data == ""
    except binascii.Error:
        return False


def unstorable(value: object) -> bool:
    left = [value]
    for one in left:  # which grows by what is inside
        if isinstance(one, str):
            if _UNSTORABLE.search(one):
                return True
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            left += one
    return False


def parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message["content"]
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content or []
