"""Checks that all API validators share."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_INVALID_UNICODE = re.compile("[\x00\ud800-\udfff]")
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,", re.A)


class Invalid(Exception):
    """The message is the service's error message."""


def first_error(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Invalid as error:
        return str(error)
    return None


def require(condition: object, message: str) -> None:
    if not condition:
        raise Invalid(message)


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


def has_invalid_unicode(value: object) -> bool:
    values = [value]
    for item in values:  # grows during the loop
        if isinstance(item, str):
            if _INVALID_UNICODE.search(item):
                return True
        elif isinstance(item, dict):
            values += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            values += item
    return False


def parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message["content"]
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content or []
