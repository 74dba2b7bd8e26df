"""One client of the event stream: a bounded buffer, and the task that empties it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

Write = Callable[[bytes], Awaitable[None]]

EVENTS = 256
BYTES = 1 << 20
"""What waits for one client at most. Who needs more is let go, and goes on from the log."""
PIECE = 64 << 10
"""Bytes handed over at once."""


class Listener:
    def __init__(self, write: Write) -> None:
        """Made by the task that serves it, which ends when it is dropped."""
        self._write, self._task = write, asyncio.current_task()
        self._frames: deque[bytes] = deque()
        self._size = 0
        self._news = asyncio.Event()
        self._ended = self._pinged = False
        self.dropped = False
        self.live = False
        """It has caught up, and gets what comes."""
        self.seen = 0
        """The event of the log up to which it was told everything."""

    def put(self, frame: bytes) -> None:
        if self._frames and (len(self._frames) >= EVENTS or self._size + len(frame) > BYTES):
            self.drop()
            return
        self._frames.append(frame)
        self._size += len(frame)
        self._news.set()

    def put_new(self, frames: Iterable[tuple[int, bytes]]) -> None:
        """Those behind what it has seen."""
        for seq, frame in frames:
            if seq > self.seen:
                self.seen = seq
                self.put(frame)

    def ping(self, frame: bytes) -> None:
        """One that has taken nothing since the last ping is dead, though its socket may not know yet."""
        if self._pinged:
            self.drop()
            return
        self._pinged = True
        if self.live:
            self.put(frame)

    def end(self) -> None:
        """After what it has in its buffer."""
        self._ended = True
        self._news.set()

    def drop(self) -> None:
        if not self.dropped and self._task:
            self.dropped = True
            self._frames.clear()
            self._task.cancel()

    async def write(self, data: bytes) -> None:
        await self._write(data)
        self._pinged = False

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._frames:
                await self.write(self._take())
            if self._ended:
                return

    def _take(self) -> bytes:
        taken: list[bytes] = []
        size = 0
        while self._frames and (not taken or size + len(self._frames[0]) <= PIECE):
            taken.append(self._frames.popleft())
            size += len(taken[-1])
        self._size -= size
        return b"".join(taken)
