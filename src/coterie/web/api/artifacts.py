"""Files of messages: upload as a stream that is never buffered whole, download in a form that no browser runs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated
from urllib.parse import quote

from msgspec import Meta
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from coterie import artifacts
from coterie.artifact_service import ArtifactService
from coterie.artifacts import OCTET_STREAM
from coterie.errors import Refused
from coterie.ids import ID_LENGTH
from coterie.web.errors import RequestRejected, problem
from coterie.web.openapi import BODY_PROBLEMS, BYTES_SCHEMA, COMMON_PROBLEMS, Responses, described_body, problems
from coterie.web.routing import API, Header, Id, Limit, Router, SocietyDep, etag_matches
from coterie.web.schemas import Artifact, ArtifactPage

router = Router(prefix=f"{API}/artifacts", tags=["artifacts"], responses=COMMON_PROBLEMS | problems("unknown_artifact"))

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
    body=described_body("multipart/form-data", _FORM),
    responses=BODY_PROBLEMS
    | problems("artifact_too_large", _408="`upload_stalled`", _429="`too_many_requests`, `too_many_uploads`"),
)
async def upload_artifact(request: Request, society: SocietyDep) -> Artifact:
    # Starlette's form parser would buffer the whole body first.
    async with aclosing(request.app.state.uploads.receive(request)) as upload:
        filename, chunks = await anext(upload)
        async with aclosing(chunks):
            return Artifact.of(await society.artifacts.put(chunks, filename))


@router.get("", summary="List files, newest first")
async def list_artifacts(
    society: SocietyDep,
    before: Annotated[str, Meta(max_length=ID_LENGTH)] | None = None,
    limit: Limit = 50,
    agent: Id | None = None,
) -> ArtifactPage:
    """With `agent`: the newest of those that this agent made or received, on one page."""
    if agent is not None:
        latest = await society.artifacts.latest(limit, reader=agent)
        return ArtifactPage(items=[Artifact.of(artifact) for artifact in latest], next=None)
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


# Uploads: the multipart body is read as a stream

FIELD = b"file"
MAX_OVERHEAD_BYTES = 1 << 20
"""Bytes of a body besides the file: boundaries, headers, other fields."""
IDLE_TIMEOUT_SECONDS = 30.0
MAX_UPLOADS = 32
"""Concurrent uploads."""
MAX_BOUNDARY_BYTES = 256


class Uploads:
    """Receives files, at most `MAX_UPLOADS` at a time."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._count = max_bytes, 0

    async def receive(self, request: Request) -> AsyncGenerator[tuple[str, AsyncGenerator[bytes, None]], None]:
        """Yield one pair: the file's name and its chunks. The chunks end only if the whole body was valid."""
        if self._count >= MAX_UPLOADS:
            raise RequestRejected(429, "too_many_uploads", "too many uploads at once: try again shortly")
        if int(request.headers.get("content-length", "0")) > self._max_bytes + MAX_OVERHEAD_BYTES:
            raise _too_large(self._max_bytes)
        self._count += 1
        try:
            form = _Form(request.headers.get("content-type", ""))
            async with aclosing(_body(request, self._max_bytes)) as body:
                filename = await form.read_filename(body)
                yield filename, form.read_file(body)
        finally:
            self._count -= 1


def _too_large(limit: int) -> Refused:
    return Refused("artifact_too_large", f"the file is larger than {limit:,} bytes, the most allowed")


async def _body(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    size, stream = 0, request.stream()
    while True:
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_SECONDS):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise RequestRejected(408, "upload_stalled", "no data for 30 seconds: send the file again") from None
        size += len(chunk)
        if size > max_bytes + MAX_OVERHEAD_BYTES:
            raise _too_large(max_bytes)
        yield chunk


class _Form:
    """A multipart body with one file. The parser's callbacks fill it."""

    def __init__(self, content_type: str) -> None:
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
            raise _invalid("the content type names no boundary")
        self._name, self._value, self._disposition = b"", b"", b""
        self._filename: str | None = None
        self._is_file = self._ended = False
        self._chunks: list[bytes] = []
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_name,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_end,
                "on_part_data": self._on_data,
                "on_end": self._on_end,
            },
        )

    async def read_filename(self, body: AsyncIterator[bytes]) -> str:
        async for chunk in body:
            self._parse(chunk)
            if self._filename is not None:
                return self._filename
        raise _invalid('there is no part named "file" in the body')

    async def read_file(self, body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        while True:
            if self._chunks:
                chunks, self._chunks = self._chunks, []
                yield b"".join(chunks)
            try:
                self._parse(await anext(body))
            except StopAsyncIteration:
                break
        if not self._ended:
            raise _invalid("the body ends before its last boundary")

    def _parse(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _invalid(f"the body is not multipart ({error})") from error

    def _on_part_begin(self) -> None:
        self._disposition, self._is_file = b"", False

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name = self._value = b""

    def _on_headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._is_file = options.get(b"name") == FIELD
        if not self._is_file:
            return
        if self._filename is not None:
            raise _invalid("one file at a time: send the others in requests of their own")
        self._filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._chunks.append(data[start:end])

    def _on_end(self) -> None:
        self._ended = True


def _invalid(reason: str) -> RequestRejected:
    return RequestRejected(422, "request_invalid", f"invalid upload: {reason}", places=[])
