"""Uploads: reads a multipart body as a stream and never buffers it whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from coterie.errors import Refused
from coterie.web.errors import RequestRejected

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
