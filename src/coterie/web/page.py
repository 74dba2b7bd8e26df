"""What a browser gets before anybody has said who they are: a shell that knows nothing of the society."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from coterie.web.dependencies import AccessDep
from coterie.web.problems import problem
from coterie.web.ranges import matches
from coterie.web.session import exchange

router = APIRouter(include_in_schema=False)

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "png": "image/png",
    "ico": "image/x-icon",
    "webp": "image/webp",
    "woff2": "font/woff2",
    "webmanifest": "application/manifest+json",
    "txt": "text/plain; charset=utf-8",
}
"""Of the files we ship; one of another type is not served."""
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]*(\.[a-zA-Z0-9_-]+)*")
DEEPEST = 6


@router.get("/")
async def shell(
    request: Request,
    access: AccessDep,
    code: Annotated[str | None, Query(max_length=200)] = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    if code is not None:
        return exchange(request, access, code)
    return _file("index.html", if_none_match)


@router.get("/static/{path:path}")
async def static(path: str, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    return _file(path, if_none_match)


def _file(path: str, if_none_match: str | None) -> Response:
    found = _read(path) if _is_plain(path) else None
    if found is None:
        return problem(404, "not_found", "there is no such file")
    data, etag = found
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if matches(if_none_match, etag):
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=TYPES[path.rpartition(".")[2]])


def _is_plain(path: str) -> bool:
    """Names joined by slashes, none of them hidden or a way up, and of a type we ship."""
    names = path.split("/")
    return (
        len(names) <= DEEPEST
        and len(path) <= 200
        and all(_NAME.fullmatch(name) for name in names)
        and names[-1].rpartition(".")[2] in TYPES
    )


@cache
def _folder() -> Traversable:
    return files("coterie.web") / "static"


def _read(path: str) -> tuple[bytes, str] | None:
    try:
        data = _folder().joinpath(*path.split("/")).read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    return data, f'"{hashlib.sha256(data).hexdigest()[:32]}"'
