"""The panel's files. They need no credentials and contain nothing about the society."""

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
from starlette.requests import Request
from starlette.responses import Response

from coterie.web.auth import AccessDep, exchange_code
from coterie.web.errors import problem
from coterie.web.routing import Header, Id, Router, etag_matches

router = Router(is_described=False)

MEDIA_TYPES = {
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
"""Media types by file extension; other files are not served."""
COMPRESSIBLE = frozenset({"html", "css", "js", "mjs", "json", "svg", "webmanifest", "txt"})
MAX_PATH_PARTS = 6
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]*(\.[a-zA-Z0-9_-]+)*")


@dataclass(frozen=True, slots=True)
class StaticFile:
    data: bytes
    etag: str
    gzipped: bytes | None
    """None if compression does not make the file smaller."""


@router.get("/")
async def get_panel(
    request: Request,
    access: AccessDep,
    code: Id | None = None,
    if_none_match: Annotated[str | None, Header()] = None,
    accept: Annotated[str, Header()] = "",
    accept_encoding: Annotated[str, Header()] = "",
) -> Response:
    """The page. With `code`: a redirect that signs the browser in.

    With a code that was used already, browsers also get the page: it opens if the browser is signed in, and otherwise
    says how to sign in. Programs get the problem as JSON.
    """
    if code is None:
        return _respond("index.html", if_none_match, accept_encoding)
    answer = exchange_code(request, access, code)
    if answer.status_code == 303 or "text/html" not in accept:
        return answer
    page = _respond("index.html", None, accept_encoding)
    page.status_code = answer.status_code
    page.headers["Cache-Control"] = "no-store"
    return page


@router.get("/sw.js")
async def get_service_worker(
    if_none_match: Annotated[str | None, Header()] = None, accept_encoding: Annotated[str, Header()] = ""
) -> Response:
    """At the root, because a service worker controls only pages below its own path."""
    return _respond("sw.js", if_none_match, accept_encoding)


@router.get("/static/{path:path}")
async def get_static_file(
    path: str,
    if_none_match: Annotated[str | None, Header()] = None,
    accept_encoding: Annotated[str, Header()] = "",
) -> Response:
    return _respond(path, if_none_match, accept_encoding)


def _respond(path: str, if_none_match: str | None, accept_encoding: str) -> Response:
    file = _read(path) if _is_allowed(path) else None
    if file is None:
        return problem(404, "not_found", "there is no such file")
    gzipped = file.gzipped if _accepts_gzip(accept_encoding) else None
    # The compressed form is another representation, so it has its own tag.
    etag = f'"{file.etag}.gz"' if gzipped else f'"{file.etag}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if file.gzipped:
        headers["Vary"] = "Accept-Encoding"
    if etag_matches(if_none_match, etag):
        return Response(status_code=304, headers=headers)
    if gzipped:
        headers["Content-Encoding"] = "gzip"
    return Response(gzipped or file.data, headers=headers, media_type=MEDIA_TYPES[_extension(path)])


def _accepts_gzip(accept_encoding: str) -> bool:
    return any(
        name.strip().lower() in ("gzip", "*") and not re.fullmatch(r"\s*q=0(\.0*)?\s*", weight)
        for name, _, weight in (item.partition(";") for item in accept_encoding.split(","))
    )


def _is_allowed(path: str) -> bool:
    """True for plain names joined by slashes: no hidden files, no `..`, and a known extension."""
    names = path.split("/")
    return (
        len(names) <= MAX_PATH_PARTS
        and len(path) <= 200
        and all(_NAME.fullmatch(name) for name in names)
        and _extension(names[-1]) in MEDIA_TYPES
    )


def _extension(path: str) -> str:
    return path.rpartition(".")[2]


@cache
def _folder() -> Traversable:
    return files("coterie.web") / "static"


def _read(path: str) -> StaticFile | None:
    try:
        data = _folder().joinpath(*path.split("/")).read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    return _prepare(_extension(path), data)


@lru_cache(maxsize=256)
def _prepare(extension: str, data: bytes) -> StaticFile:
    """Minify scripts, hash and compress."""
    if extension in ("js", "mjs"):
        data = rjsmin.jsmin(data.decode()).encode()
    etag = hashlib.sha256(data).hexdigest()[:32]
    gzipped = gzip.compress(data, 9, mtime=0) if extension in COMPRESSIBLE else data
    return StaticFile(data=data, etag=etag, gzipped=gzipped if len(gzipped) < len(data) else None)
