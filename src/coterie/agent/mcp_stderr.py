"""`StderrLog` copies a server's stderr to our log: line by line, limited in size and rate, secrets redacted."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from typing import Self, TextIO

from coterie.clock import Clock
from coterie.redaction import redact
from coterie.text import one_line, to_storable

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 2000
"""Longer lines are cut."""
MAX_LINES_PER_PERIOD, PERIOD_SECONDS = 200, 10.0
"""Rate limit of logged lines. Further lines are read and counted, not logged."""
MAX_HELD_BACK_LINES = 10
"""Last unlogged lines, logged when the server ends: they may say why."""
_READ_BYTES = 1 << 13
"""Bytes per read, so that a flood does not block the event loop."""
_MAX_DRAIN_BYTES = 1 << 20
"""Bytes read after the server ended. A pipe holds less, but an orphaned child may write for ever."""


class StderrLog:
    """Context manager with a pipe that is read on the event loop. On exit, the rest of the pipe is logged."""

    writable: TextIO
    """Stderr of the server. The caller closes it after the server has started."""

    def __init__(self, server: str, secrets: tuple[str, ...], clock: Clock) -> None:
        self._server, self._secrets, self._clock = server, secrets, clock
        self._longest_secret = max((len(one.encode()) for one in secrets), default=0)
        self._line, self._last = bytearray(), b""
        self._since, self._logged = clock.monotonic(), 0
        self._held_back, self._skipped = deque[bytes](maxlen=MAX_HELD_BACK_LINES), 0

    def __enter__(self) -> Self:
        self._readable, writable = os.pipe()
        os.set_blocking(self._readable, False)
        self.writable = os.fdopen(writable, "w")
        asyncio.get_running_loop().add_reader(self._readable, self._read)
        return self

    def __exit__(self, *exc: object) -> None:
        self.writable.close()
        self._drain()
        asyncio.get_running_loop().remove_reader(self._readable)
        os.close(self._readable)
        self._end_line()
        self._log_skipped()
        for line in self._held_back:
            self._log_line(line)

    @property
    def last_line(self) -> str:
        """The last non-empty line, redacted."""
        return one_line(self._redact(bytes(self._line.strip()) or self._last), 300)

    def _drain(self) -> None:
        read = 0
        while read < _MAX_DRAIN_BYTES and (size := self._read()):
            read += size

    def _read(self) -> int:
        """Read once; return the number of bytes, 0 if the pipe is empty or closed."""
        try:
            piece = os.read(self._readable, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not piece:  # end of file: the reader would be called for ever
            asyncio.get_running_loop().remove_reader(self._readable)
        *ends, rest = piece.split(b"\n")
        for end in ends:
            self._append(end)
            self._end_line()
        self._append(rest)
        return len(piece)

    def _append(self, piece: bytes) -> None:
        # One byte more than the limit shows that the line is longer. The rest of the line is dropped.
        self._line += piece[: MAX_LINE_BYTES + self._longest_secret + 1 - len(self._line)]

    def _end_line(self) -> None:
        line = bytes(self._line).rstrip()
        self._line.clear()
        if not line:
            return
        self._last = line
        now = self._clock.monotonic()
        if now - self._since >= PERIOD_SECONDS:
            self._since, self._logged = now, 0
            self._log_skipped()
            self._held_back.clear()
        if self._logged < MAX_LINES_PER_PERIOD:
            self._logged += 1
            self._log_line(line)
        else:
            self._skipped += 1
            self._held_back.append(line)

    def _log_skipped(self) -> None:
        if self._skipped:
            log.info("the MCP server %s wrote %d more lines: not all are shown", self._server, self._skipped)
        self._skipped = 0

    def _log_line(self, line: bytes) -> None:
        log.info("the MCP server %s wrote: %s", self._server, self._redact(line))

    def _redact(self, line: bytes) -> str:
        text = redact(to_storable(line.decode("utf-8", "replace")), self._secrets)
        if len(line) > MAX_LINE_BYTES + self._longest_secret:
            text = text[: -self._longest_secret - 1]  # a secret that was cut in two would not be redacted
        return text if len(text) <= MAX_LINE_BYTES else text[:MAX_LINE_BYTES] + "…"
