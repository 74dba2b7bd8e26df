"""Which bytes of a file somebody asks for (RFC 9110, section 14)."""

from __future__ import annotations

import re

_ONE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class Unsatisfiable(Exception):
    """There is nothing of the file in that range."""


def wanted(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and the one behind the last. None: all of it, as for several ranges or none."""
    found = _ONE.fullmatch(header.strip()) if header else None
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if first and last and int(first) > int(last):
        return None
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if start >= end:
        raise Unsatisfiable
    return start, end


def matches(header: str | None, etag: str) -> bool:
    """Whether one of the tags in `If-None-Match` is this one."""
    tags = [tag.strip().removeprefix("W/") for tag in (header or "").split(",")]
    return "*" in tags or etag in tags
