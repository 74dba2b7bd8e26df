"""Incremental parser of server-sent events (WHATWG HTML, section 9.2): bytes in, events out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class ServerSentEvent(NamedTuple):
    data: bytes
    """The `data` lines, joined by newlines."""
    type: str = "message"
    id: str | None = None
    """The event's own id; None if it has none."""


class SseParser:
    """Parses a stream that arrives in arbitrary chunks.

    The parser has no size limit: the caller must limit the bytes it feeds. Lines that belong to no event are collected
    in `other_lines`, because some servers answer a stream request with a plain JSON document.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._data: list[bytes] = []
        self._type = "message"
        self._id: str | None = None
        self._other: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[ServerSentEvent]:
        """Yield the events that `chunk` completes. The iterator must be exhausted before the next call."""
        self._buffer += chunk
        start = 0
        while (end := self._buffer.find(b"\n", max(start, self._searched))) >= 0:
            line = bytes(self._buffer[start:end]).rstrip(b"\r")
            start = end + 1
            if line[:6] == b"data: ":  # by far the most frequent line
                self._data.append(line[6:])
            elif line:
                self._parse_line(line)
            elif event := self._take_event():
                yield event
        del self._buffer[:start]
        # An unfinished line is searched once, not again with every chunk.
        self._searched = len(self._buffer)

    def finish(self) -> Iterator[ServerSentEvent]:
        """Yield the unterminated event at the end of the stream, if any. It may be incomplete."""
        if self._buffer:
            self._parse_line(bytes(self._buffer).rstrip(b"\r"))
            self._buffer.clear()
        if event := self._take_event():
            yield event

    @property
    def other_lines(self) -> bytes:
        return b"\n".join(self._other)

    def _parse_line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._type = value.decode("utf-8", "replace")
        elif name == b"id":
            self._id = value.decode("utf-8", "replace")
        elif name not in (b"", b"retry"):
            self._other.append(line)

    def _take_event(self) -> ServerSentEvent | None:
        event = ServerSentEvent(b"\n".join(self._data), self._type, self._id) if self._data else None
        self._data.clear()
        self._type, self._id = "message", None
        return event
