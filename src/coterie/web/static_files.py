"""What a browser gets before anybody has said who they are: a shell that knows nothing of the society."""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated

import rjsmin
from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from coterie.web.auth import AccessDep, exchange
from coterie.web.endpoint import matches
from coterie.web.errors import problem

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
TEXT = frozenset({"html", "css", "js", "mjs", "json", "svg", "webmanifest", "txt"})
"""What compresses well."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A file as it goes over the line."""

    data: bytes
    etag: str
    packed: bytes | None
    """Compressed; None where that gains nothing."""


@router.get("/")
async def shell(
    request: Request,
    access: AccessDep,
    code: Annotated[str | None, Query(max_length=200)] = None,
    if_none_match: Annotated[str | None, Header()] = None,
    accept_encoding: Annotated[str, Header()] = "",
) -> Response:
    if code is not None:
        return exchange(request, access, code)
    return _file("index.html", if_none_match, accept_encoding)


@router.get("/static/{path:path}")
async def static(
    path: str,
    if_none_match: Annotated[str | None, Header()] = None,
    accept_encoding: Annotated[str, Header()] = "",
) -> Response:
    return _file(path, if_none_match, accept_encoding)


def _file(path: str, if_none_match: str | None, accept_encoding: str) -> Response:
    parcel = _read(path) if _is_plain(path) else None
    if parcel is None:
        return problem(404, "not_found", "there is no such file")
    packed = parcel.packed if _takes_gzip(accept_encoding) else None
    # Two ways of saying the same are two things to a cache.
    etag = f'"{parcel.etag}.gz"' if packed else f'"{parcel.etag}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if parcel.packed:
        headers["Vary"] = "Accept-Encoding"
    if matches(if_none_match, etag):
        return Response(status_code=304, headers=headers)
    if packed:
        headers["Content-Encoding"] = "gzip"
    return Response(packed or parcel.data, headers=headers, media_type=TYPES[_ending(path)])


def _takes_gzip(accept_encoding: str) -> bool:
    return any(
        name.strip().lower() in ("gzip", "*") and not re.fullmatch(r"\s*q=0(\.0*)?\s*", weight)
        for name, _, weight in (one.partition(";") for one in accept_encoding.split(","))
    )


def _is_plain(path: str) -> bool:
    """Names joined by slashes, none of them hidden or a way up, and of a type we ship."""
    names = path.split("/")
    return (
        len(names) <= DEEPEST
        and len(path) <= 200
        and all(_NAME.fullmatch(name) for name in names)
        and _ending(names[-1]) in TYPES
    )


def _ending(path: str) -> str:
    return path.rpartition(".")[2]


@cache
def _folder() -> Traversable:
    return files("coterie.web") / "static"


def _read(path: str) -> Parcel | None:
    try:
        data = _folder().joinpath(*path.split("/")).read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    return _parcel(_ending(path), data)


@lru_cache(maxsize=256)
def _parcel(ending: str, data: bytes) -> Parcel:
    """Scripts go without comments and indentation; in the folder they stay as they were written."""
    if ending in ("js", "mjs"):
        data = rjsmin.jsmin(data.decode()).encode()
    etag = hashlib.sha256(data).hexdigest()[:32]
    packed = gzip.compress(data, 9, mtime=0) if ending in TEXT else data
    return Parcel(data=data, etag=etag, packed=packed if len(packed) < len(data) else None)
