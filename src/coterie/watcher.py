"""One reader of the event log, with a bounded queue: it may be slow, but it makes nobody wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from coterie.errors import Lagged
from coterie.events import Event
from coterie.store import Store


class Watcher:
    def __init__(self, store: Store, seen: int, size: int) -> None:
        self._store, self._seen, self._size = store, seen, size
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._lagged = False

    async def catch_up(self) -> None:
        """Queue what is new. A full queue is marked and left alone: the log keeps what does not fit."""
        while not self._lagged:
            events = await self._store.events(self._seen, self._size)
            for event in events:
                if self._queue.qsize() >= self._size:
                    self._lagged = True
                    self._queue.put_nowait(None)
                    return
                self._queue.put_nowait(event)
                self._seen = event.seq
            if len(events) < self._size:
                return

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def batch(self, limit: int) -> Sequence[Event]:
        """What is new, at least one and at most `limit`; ends and lags as the iteration does."""
        events = [await anext(self)]
        while len(events) < limit and not self._queue.empty():
            event = self._queue.get_nowait()
            if event is None:
                self._queue.put_nowait(None)  # the end is for the next call
                break
            events.append(event)
        return events

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        event = await self._queue.get()
        if event is not None:
            return event
        if self._lagged:
            raise Lagged(self._seen)
        raise StopAsyncIteration
