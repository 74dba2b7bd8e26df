"""A file on its way in: the multipart body read as a stream, so that its size is nobody's memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from coterie.errors import Refused
from coterie.web.errors import Rejected

FIELD = b"file"
AROUND = 1 << 20
"""Bytes of a body that may be something else than the file: boundaries, headers, other fields."""
IDLE_SECONDS = 30.0
"""A sender that is silent for so long has left."""
UNDER_WAY = 32
"""Files coming in at a time."""
BOUNDARY_BYTES = 256


class Uploads:
    """Takes files in, so many at a time."""

    def __init__(self, limit: int) -> None:
        self._limit, self._under_way = limit, 0

    async def receive(self, request: Request) -> AsyncGenerator[tuple[str, AsyncGenerator[bytes, None]], None]:
        """One pair: the name of the file, and its bytes. They end only when the whole body was there, and in order."""
        if self._under_way >= UNDER_WAY:
            raise Rejected(429, "too_many_uploads", "too many files are coming in at once: try again shortly")
        if int(request.headers.get("content-length", "0")) > self._limit + AROUND:
            raise too_large(self._limit)
        self._under_way += 1
        try:
            parts = Parts(request.headers.get("content-type", ""))
            async with aclosing(_body(request, self._limit)) as body:
                filename = await parts.until_file(body)
                yield filename, parts.file(body)
        finally:
            self._under_way -= 1


def too_large(limit: int) -> Refused:
    return Refused("artifact_too_large", f"the file is larger than {limit:,} bytes, the most allowed")


async def _body(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    size, stream = 0, request.stream()
    while True:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Rejected(408, "upload_stalled", "nothing came for half a minute: send the file again") from None
        size += len(piece)
        if size > limit + AROUND:
            raise too_large(limit)
        yield piece


class Parts:
    """The parts of a multipart body, of which one is the file. Filled by the parser's callbacks."""

    def __init__(self, content_type: str) -> None:
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if not 0 < len(boundary) <= BOUNDARY_BYTES:
            raise invalid("the content type names no boundary")
        self._name, self._value, self._disposition = b"", b"", b""
        self._filename: str | None = None
        self._is_file = self._ended = False
        self._pieces: list[bytes] = []
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._take_name,
                "on_header_value": self._take_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._take_data,
                "on_end": self._end,
            },
        )

    async def until_file(self, body: AsyncIterator[bytes]) -> str:
        async for piece in body:
            self._feed(piece)
            if self._filename is not None:
                return self._filename
        raise invalid('there is no part named "file" in the body')

    async def file(self, body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        while True:
            if self._pieces:
                pieces, self._pieces = self._pieces, []
                yield b"".join(pieces)
            try:
                self._feed(await anext(body))
            except StopAsyncIteration:
                break
        if not self._ended:
            raise invalid("the body ends before its last boundary")

    def _feed(self, piece: bytes) -> None:
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise invalid(f"the body is not multipart ({error})") from error

    def _begin_part(self) -> None:
        self._disposition, self._is_file = b"", False

    def _take_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._is_file = options.get(b"name") == FIELD
        if not self._is_file:
            return
        if self._filename is not None:
            raise invalid("one file at a time: send the others in requests of their own")
        self._filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pieces.append(data[start:end])

    def _end(self) -> None:
        self._ended = True


def invalid(sentence: str) -> Rejected:
    return Rejected(422, "request_invalid", f"this is no upload: {sentence}", places=[])
