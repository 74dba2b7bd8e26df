"""What every route has in common: JSON out, places in a list, and which problems it may answer with.

What a route asks for in its signature.

Which bytes of a file somebody asks for (RFC 9110, section 14).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, cast

import msgspec
from fastapi import Depends, Query, Request
from starlette.responses import Response

from coterie.clock import Clock
from coterie.errors import HTTP_STATUS
from coterie.society import Society

JSON = "application/json"
PROBLEM = "application/problem+json"

Limit = Annotated[int, Query(ge=1, le=200, description="How many items at most.")]
Id = Annotated[str, Query(max_length=200)]
"""An id in a query."""
Cursor = Annotated[str, Query(max_length=200, description="The `next` of the page before.")]

Responses = dict[int | str, dict[str, Any]]
"""What FastAPI calls a route's `responses`."""

_encode = msgspec.json.Encoder().encode
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "One sentence for people."},
        "code": {"type": "string", "description": "For programs."},
    },
}


def answer(value: Any, status: int = 200) -> Response:
    return Response(_encode(value), status, media_type=JSON)


def nothing() -> Response:
    return Response(status_code=204)


def listing(items: Sequence[Any], following: str | int | None, **more: Any) -> Response:
    return answer({**more, "items": items, "next": None if following is None else str(following)})


def gives(model: type, status: int = 200, **more: Any) -> Responses:
    return {status: {"model": model, **more}}


def problems(*codes: str, **statuses: str) -> Responses:
    """For a route's `responses`: each refusal it may answer with, by its code; others as `_401="…"`."""
    described: dict[int, list[str]] = {}
    for code in codes:
        described.setdefault(HTTP_STATUS[code], []).append(f"`{code}`")
    for status, words in statuses.items():
        described.setdefault(int(status.removeprefix("_")), []).append(words)
    return {status: _described(", ".join(words)) for status, words in described.items()}


def _described(words: str) -> dict[str, Any]:
    return {"description": words, "content": {PROBLEM: {"schema": _SCHEMA}}}


COMMON = problems(
    _401="`unauthorized`",
    _403="`foreign_origin`",
    _421="`unknown_host`",
    _422="`request_invalid`",
    _429="`too_many_requests`",
    _500="`internal_error`",
    _503="`store_unavailable`, `stopping`",
    _507="`store_full`",
)
"""Of the gate and the store: any route may."""
BODY = problems(_400="`json_invalid`", _413="`body_too_large`", _415="`unsupported_media_type`")
"""Of routes with a body."""


# Coroutines all, though none waits: FastAPI takes a plain function to another thread.


async def _society(request: Request) -> Society:
    return cast(Society, request.app.state.society)


async def _clock(request: Request) -> Clock:
    return cast(Clock, request.app.state.clock)


SocietyDep = Annotated[Society, Depends(_society)]
ClockDep = Annotated[Clock, Depends(_clock)]


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
