"""Server-sent events out of whatever bytes a server sends."""

from __future__ import annotations

from collections.abc import Iterator


class EventReader:
    """Takes bytes as they come and gives the data of each event that is complete.

    Lines that belong to no event stream are kept aside: a server that answers a request for a stream with one JSON
    document, or breaks a stream off with one, is understood by what it sent and not by the content type it claims.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._data: list[bytes] = []
        self._other: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        self._buffer += chunk
        start = 0
        while (end := self._buffer.find(b"\n", max(start, self._searched))) >= 0:
            line = bytes(self._buffer[start:end]).rstrip(b"\r")
            start = end + 1
            if line:
                self._take(line)
            elif self._data:
                yield self._event()
        del self._buffer[:start]
        # The rest of a long line is searched once, not again with every chunk that adds to it.
        self._searched = len(self._buffer)

    def end(self) -> Iterator[bytes]:
        """The event that the end of the stream completes, if any; it may have been cut."""
        if self._buffer:
            self._take(bytes(self._buffer).rstrip(b"\r"))
            self._buffer.clear()
        if self._data:
            yield self._event()

    @property
    def other(self) -> bytes:
        """The lines that were no events."""
        return b"\n".join(self._other)

    def _take(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value[1:] if value[:1] == b" " else value)
        elif field not in (b"", b"event", b"id", b"retry"):
            self._other.append(line)

    def _event(self) -> bytes:
        data = b"\n".join(self._data)
        self._data.clear()
        return data
