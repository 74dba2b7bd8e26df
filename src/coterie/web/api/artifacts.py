"""Files that messages carry: in as a stream, out in a form that no browser runs."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response, StreamingResponse

from coterie.artifact_service import ArtifactService
from coterie.artifacts import OCTET_STREAM, Artifact
from coterie.clock import to_rfc3339
from coterie.errors import Refused
from coterie.ids import ID_LENGTH
from coterie.web.endpoint import BODY, COMMON, SocietyDep, Unsatisfiable, matches, problems, wanted
from coterie.web.errors import problem

router = APIRouter(prefix="/artifacts", tags=["artifacts"], responses=COMMON | BODY | problems("unknown_artifact"))

_REF = re.compile(rf"[0-9a-f]{{{ID_LENGTH}}}")
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}},
                }
            }
        },
    }
}
_BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {OCTET_STREAM: {"schema": {"type": "string", "format": "binary"}}}},
    206: {"description": "The part that was asked for"},
    304: {"description": "Unchanged"},
    416: {"description": "Nothing of it is in that range"},
}


@router.post("", status_code=201, summary="Upload a file", openapi_extra=_BODY)
async def upload(request: Request, society: SocietyDep) -> dict[str, Any]:
    # FastAPI's own UploadFile would put the whole body aside before it is looked at.
    async with aclosing(request.app.state.uploads.receive(request)) as coming:
        filename, pieces = await anext(coming)
        async with aclosing(pieces):
            return (await society.artifacts.put(pieces, filename)).to_dict()


@router.get("", summary="Files, newest first")
async def latest(
    society: SocietyDep,
    before: Annotated[str | None, Query(max_length=ID_LENGTH)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> dict[str, Any]:
    found = await society.store.artifacts_before(before, limit + 1)
    shown = found[:limit]
    return {"items": [_meta(artifact) for artifact in shown], "next": shown[-1].ref if len(found) > limit else None}


@router.get("/{ref}/meta", summary="What a file is")
async def describe(ref: str, society: SocietyDep) -> dict[str, Any]:
    return _meta(await _find(society.artifacts, ref))


@router.get("/{ref}", summary="The file itself", responses=_BYTES, response_class=Response)
async def download(
    ref: str,
    society: SocietyDep,
    range_: Annotated[str | None, Header(alias="range")] = None,
    if_range: Annotated[str | None, Header()] = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    artifact = await _find(society.artifacts, ref)
    headers, etag = _headers(artifact), f'"{artifact.sha256}"'
    if matches(if_none_match, etag):
        return Response(status_code=304, headers=headers)
    try:
        part = wanted(range_ if if_range in (None, etag) else None, artifact.size)
    except Unsatisfiable:
        outside = {"Content-Range": f"bytes */{artifact.size}"}
        return problem(416, "range_invalid", f"the file has {artifact.size:,} bytes", headers=outside)
    start, end = part or (0, artifact.size)
    headers["Content-Length"] = str(end - start)
    if part:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{artifact.size}"
    pieces = await _begun(society.artifacts.open(ref, start, end))
    return StreamingResponse(pieces, 206 if part else 200, headers, _shown_as(artifact))


async def _find(library: ArtifactService, ref: str) -> Artifact:
    if not _REF.fullmatch(ref):
        raise Refused("unknown_artifact", "there is no such artifact")
    return await library.describe(ref)


async def _begun(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """With the first piece at hand: bytes that cannot be read are told of while there is still a status to choose."""
    first = await anext(pieces, b"")

    async def all_of_them() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return all_of_them()


def _meta(artifact: Artifact) -> dict[str, Any]:
    return {**artifact.to_dict(), "createdAt": to_rfc3339(artifact.created_at)}


def _shown_as(artifact: Artifact) -> str:
    """Only the four kinds of pictures, told from their bytes, are what they are; all else is bytes."""
    return artifact.mime_type if artifact.type == "image" else OCTET_STREAM


def _headers(artifact: Artifact) -> dict[str, str]:
    way = "inline" if artifact.type == "image" else "attachment"
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", artifact.filename)
    return {
        "ETag": f'"{artifact.sha256}"',
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "Content-Disposition": f"{way}; filename=\"{plain}\"; filename*=UTF-8''{quote(artifact.filename, safe='')}",
        "Content-Security-Policy": "default-src 'none'; sandbox",
    }
