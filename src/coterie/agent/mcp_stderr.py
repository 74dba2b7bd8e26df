"""What an MCP server writes to its standard error, in our log: line by line, without its keys."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from typing import Self, TextIO

from coterie.clock import Clock
from coterie.redaction import redact
from coterie.text import clean, one_line

log = logging.getLogger(__name__)

MAX_LINE = 2000
"""Bytes of a line that are shown."""
LINES, PERIOD = 200, 10.0
"""So many lines are shown in so many seconds; whoever writes more is counted, and read all the same."""
LAST = 10
"""Of the lines that were held back, so many are shown when the server ends: they may say why."""
_PIECE = 1 << 13
"""Bytes read at once: a flood takes its turn with everything else that happens here."""
_MOST_AT_THE_END = 1 << 20
"""Bytes. What a server leaves in the pipe is less; a child that it left behind may go on writing for ever."""


class Stderr:
    """A pipe of ours, read on the event loop; when it is left, all that the server had written is in the log."""

    writable: TextIO
    """For the server. To be closed here when the server has it."""

    def __init__(self, server: str, secrets: tuple[str, ...], clock: Clock) -> None:
        self._server, self._secrets, self._clock = server, secrets, clock
        self._longest = max((len(one.encode()) for one in secrets), default=0)
        self._line, self._last = bytearray(), b""
        self._since, self._shown = clock.monotonic(), 0
        self._held_back, self._skipped = deque[bytes](maxlen=LAST), 0

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
        self._admit()
        for line in self._held_back:
            self._show(line)

    @property
    def last(self) -> str:
        """The last line that says something, as people may see it."""
        return one_line(self._without_keys(bytes(self._line.strip()) or self._last), 300)

    def _drain(self) -> None:
        read = 0
        while read < _MOST_AT_THE_END and (size := self._read()):
            read += size

    def _read(self) -> int:
        """How many bytes there were; 0 when there is nothing now, or no more."""
        try:
            piece = os.read(self._readable, _PIECE)
        except BlockingIOError:
            return 0
        if not piece:  # it would be told for ever
            asyncio.get_running_loop().remove_reader(self._readable)
        *ends, rest = piece.split(b"\n")
        for end in ends:
            self._grow(end)
            self._end_line()
        self._grow(rest)
        return len(piece)

    def _grow(self, piece: bytes) -> None:
        # One byte more than is looked at tells that the line goes on; of an endless one no more is kept.
        self._line += piece[: MAX_LINE + self._longest + 1 - len(self._line)]

    def _end_line(self) -> None:
        line = bytes(self._line).rstrip()
        self._line.clear()
        if not line:
            return
        self._last = line
        now = self._clock.monotonic()
        if now - self._since >= PERIOD:
            self._since, self._shown = now, 0
            self._admit()
            self._held_back.clear()
        if self._shown < LINES:
            self._shown += 1
            self._show(line)
        else:
            self._skipped += 1
            self._held_back.append(line)

    def _admit(self) -> None:
        if self._skipped:
            log.info("the MCP server %s wrote %d more lines: not all are shown", self._server, self._skipped)
        self._skipped = 0

    def _show(self, line: bytes) -> None:
        log.info("the MCP server %s wrote: %s", self._server, self._without_keys(line))

    def _without_keys(self, line: bytes) -> str:
        words = redact(clean(line.decode("utf-8", "replace")), self._secrets)
        if len(line) > MAX_LINE + self._longest:
            words = words[: -self._longest - 1]  # a key that was cut in two is not found
        return words if len(words) <= MAX_LINE else words[:MAX_LINE] + "…"
