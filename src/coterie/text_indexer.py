"""Keeps the text index up to date while the society runs, in short transactions with pauses between them.

A send does not index its message: that would take longer than the send. A search reads what is not indexed yet.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Protocol

from coterie.clock import Clock
from coterie.errors import StoreUnavailable
from coterie.supervision import Pace, supervise

INTERVAL = timedelta(minutes=1)


class IndexedStore(Protocol):
    @property
    def write_count(self) -> int: ...

    async def index_messages(self) -> bool: ...


class TextIndexer:
    def __init__(self, store: IndexedStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._stopping = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Index new messages every minute, until `stop`."""
        self._loop = asyncio.create_task(self._run_regularly(), name="coterie-text-index")

    async def stop(self) -> None:
        """End after the current step."""
        self._stopping.set()
        if self._loop:
            await self._loop

    async def _run_regularly(self) -> None:
        while not await self._clock.wait(self._stopping, INTERVAL):
            await supervise("indexing messages", self._index_all, self._clock, stopping=self._stopping)

    async def _index_all(self) -> None:
        pace = Pace(self._clock, self._stopping, lambda: self._store.write_count)
        while True:
            try:
                if not await self._store.index_messages():
                    return
            except StoreUnavailable:
                return  # the store has logged why; the next round goes on from the stored position
            if await pace.pause():
                return
