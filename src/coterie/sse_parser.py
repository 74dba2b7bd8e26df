"""Incremental parser for server-sent events (WHATWG HTML, section 9.2), used for model streams and by the commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class ServerSentEvent(NamedTuple):
    data: bytes
    kind: str = "message"
    """The `event` field."""
    id: str | None = None


class SseParser:
    """Turns chunks of bytes into events as soon as each is complete.

    Lines that belong to no event stream are kept in `other`. A server may answer a request for a stream with one JSON
    document, or end a stream with one.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._data: list[bytes] = []
        self._fields: dict[bytes, str] = {}
        self._other: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[ServerSentEvent]:
        self._buffer += chunk
        start = 0
        while (end := self._buffer.find(b"\n", max(start, self._searched))) >= 0:
            line = bytes(self._buffer[start:end]).rstrip(b"\r")
            start = end + 1
            if line:
                self._add_line(line)
            elif self._data:
                yield self._take_event()
            else:
                self._fields.clear()
        del self._buffer[:start]
        # A long line that comes in many chunks is searched once, not again with every chunk.
        self._searched = len(self._buffer)

    def end(self) -> Iterator[ServerSentEvent]:
        """Yield the event that the end of the stream completes, if any. It may be cut."""
        if self._buffer:
            self._add_line(bytes(self._buffer).rstrip(b"\r"))
            self._buffer.clear()
        if self._data:
            yield self._take_event()

    @property
    def other(self) -> bytes:
        """The lines that were no events."""
        return b"\n".join(self._other)

    def _add_line(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field in (b"event", b"id"):
            self._fields[field] = value.decode(errors="replace")
        elif field not in (b"", b"retry"):
            self._other.append(line)

    def _take_event(self) -> ServerSentEvent:
        fields = self._fields
        event = ServerSentEvent(b"\n".join(self._data), fields.get(b"event") or "message", fields.get(b"id"))
        self._data.clear()
        fields.clear()
        return event
