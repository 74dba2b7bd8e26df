"""Files of messages: upload as a stream, download in a form that no browser runs."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated
from urllib.parse import quote

from fastapi import Header, Query, Request
from starlette.responses import Response, StreamingResponse

from coterie import artifacts
from coterie.artifact_service import ArtifactService
from coterie.artifacts import OCTET_STREAM
from coterie.errors import Refused
from coterie.ids import ID_LENGTH
from coterie.web.errors import problem
from coterie.web.routing import (
    BODY_PROBLEMS,
    BYTES_SCHEMA,
    COMMON_PROBLEMS,
    Limit,
    Responses,
    Router,
    SocietyDep,
    described_body,
    etag_matches,
    problems,
)  # fmt: skip
from coterie.web.schemas import Artifact, ArtifactPage

router = Router(prefix="/artifacts", tags=["artifacts"], responses=COMMON_PROBLEMS | problems("unknown_artifact"))

_REF = re.compile(rf"[0-9a-f]{{{ID_LENGTH}}}")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_FORM = {"type": "object", "required": ["file"], "properties": {"file": BYTES_SCHEMA}}
_BYTES: Responses = {
    200: {"content": {OCTET_STREAM: {"schema": BYTES_SCHEMA}}},
    206: {"description": "The range that was asked for", "content": {OCTET_STREAM: {"schema": BYTES_SCHEMA}}},
    304: {"description": "Unchanged"},
    **problems(_416="`range_invalid`"),
}


class RangeNotSatisfiable(Exception):
    pass


@router.post(
    "",
    status_code=201,
    summary="Upload a file",
    openapi_extra=described_body("multipart/form-data", _FORM),
    responses=BODY_PROBLEMS
    | problems("artifact_too_large", _408="`upload_stalled`", _429="`too_many_requests`, `too_many_uploads`"),
)
async def upload_artifact(request: Request, society: SocietyDep) -> Artifact:
    # FastAPI's UploadFile would buffer the whole body first.
    async with aclosing(request.app.state.uploads.receive(request)) as upload:
        filename, chunks = await anext(upload)
        async with aclosing(chunks):
            return Artifact.of(await society.artifacts.put(chunks, filename))


@router.get("", summary="List files, newest first")
async def list_artifacts(
    society: SocietyDep, before: Annotated[str | None, Query(max_length=ID_LENGTH)] = None, limit: Limit = 50
) -> ArtifactPage:
    found = await society.store.artifacts_before(before, limit + 1)
    page = found[:limit]
    return ArtifactPage(
        items=[Artifact.of(artifact) for artifact in page], next=page[-1].ref if len(found) > limit else None
    )


@router.get("/{ref}/meta", summary="Describe a file")
async def get_artifact(ref: str, society: SocietyDep) -> Artifact:
    return Artifact.of(await _find(society.artifacts, ref))


@router.get("/{ref}", summary="Download a file", responses=_BYTES)
async def download_artifact(
    ref: str,
    society: SocietyDep,
    range_: Annotated[str | None, Header(alias="range")] = None,
    if_range: Annotated[str | None, Header()] = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    artifact = await _find(society.artifacts, ref)
    headers, etag = _headers(artifact), f'"{artifact.sha256}"'
    if etag_matches(if_none_match, etag):
        return Response(status_code=304, headers=headers)
    try:
        part = parse_range(range_ if if_range in (None, etag) else None, artifact.size)
    except RangeNotSatisfiable:
        content_range = {"Content-Range": f"bytes */{artifact.size}"}
        return problem(416, "range_invalid", f"the file has {artifact.size:,} bytes", headers=content_range)
    start, end = part or (0, artifact.size)
    headers["Content-Length"] = str(end - start)
    if part:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{artifact.size}"
    # Only the four image types, detected from their bytes, keep their media type.
    media_type = artifact.mime_type if artifact.type == "image" else OCTET_STREAM
    chunks = await _with_first_chunk(society.artifacts.open(ref, start, end))
    return StreamingResponse(chunks, 206 if part else 200, headers, media_type)


async def _find(service: ArtifactService, ref: str) -> artifacts.Artifact:
    if not _REF.fullmatch(ref):
        raise Refused("unknown_artifact", "there is no such artifact")
    return await service.describe(ref)


async def _with_first_chunk(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Read the first chunk at once: a file that cannot be read fails before the status is sent."""
    first = await anext(chunks, b"")

    async def all_chunks() -> AsyncIterator[bytes]:
        yield first
        async for chunk in chunks:
            yield chunk

    return all_chunks()


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and end of the range (RFC 9110, section 14); None: send the whole file.

    Several ranges, and headers that are not understood, count as none.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if first and last and int(first) > int(last):
        return None
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if start >= end:
        raise RangeNotSatisfiable
    return start, end


def _headers(artifact: artifacts.Artifact) -> dict[str, str]:
    disposition = "inline" if artifact.type == "image" else "attachment"
    ascii_name = re.sub(r"[^A-Za-z0-9._-]", "_", artifact.filename)
    utf8_name = quote(artifact.filename, safe="")
    return {
        "ETag": f'"{artifact.sha256}"',
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "Content-Disposition": f"{disposition}; filename=\"{ascii_name}\"; filename*=UTF-8''{utf8_name}",
        "Content-Security-Policy": "default-src 'none'; sandbox",
    }
