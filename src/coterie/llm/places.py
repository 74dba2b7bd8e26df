"""Places at a model service that several processes share: as many requests run at once as the service allows, in all.

A process keeps a place for a moment after its request, unless somebody else wants it. So one that asks again and again
does not go through the database each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from coterie.clock import Clock
from coterie.errors import StoreError
from coterie.supervision import supervise

log = logging.getLogger(__name__)

LOOK = timedelta(seconds=1)
"""However a hint may get lost, places are told of and looked for so often."""


@dataclass(frozen=True, slots=True)
class Share:
    granted: int
    """So many more may begin."""
    wanted: bool = False
    """Others wait for a place."""


class Sharing(Protocol):
    room: Callable[[], None]
    """Called on the event loop when somebody wants a place, or has given one back; set by whoever wants to know."""

    async def share(self, service: str, limit: int, keeps: int, waiting: int) -> Share:
        """This process keeps so many places at a service, and waits for more: how many it may have besides.

        Of free places those get the next who have the fewest. Whoever dies has none once its lease is over.
        """
        ...


def fair(limit: int, keeps: int, waiting: int, others: Iterable[tuple[int, int]]) -> Share:
    """`others`: what each of them keeps, and waits for."""
    others = list(others)
    free, granted = limit - keeps - sum(kept for kept, _ in others), 0
    while granted < waiting:
        mine = keeps + granted
        theirs = sum(min(waits, mine - kept) for kept, waits in others if kept < mine)
        if free - granted - theirs <= 0:
            break
        granted += 1
    return Share(granted, wanted=any(waits for _, waits in others))


class SharedPlaces:
    """Those of all services, of one process."""

    def __init__(self, sharing: Sharing, clock: Clock) -> None:
        self._sharing, self._clock = sharing, clock
        self._queues: dict[str, Queue] = {}
        sharing.room = self._look

    def at(self, service: str, limit: int) -> Queue:
        """The same queue again when only the limit has changed: it knows who is inside."""
        queue = self._queues.setdefault(service, Queue(service, self._sharing, self._clock))
        queue.limit = limit
        return queue

    async def close(self) -> None:
        for queue in self._queues.values():
            await queue.close()

    def _look(self) -> None:
        for queue in self._queues.values():
            queue.look()


class Queue:
    """For one service: `async with` it while a request runs."""

    def __init__(self, service: str, sharing: Sharing, clock: Clock) -> None:
        self.limit = 1
        self._service, self._sharing, self._clock = service, sharing, clock
        self._running = self._kept = self._most = 0
        """Requests under way; places that are ours; the most that were used since the others were last told."""
        self._wanted = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._wake = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if self._running < self._kept and not self._waiting:
            self._begin()
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._ask()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._end()  # it was given to us and nobody uses it
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(place)
            raise

    async def __aexit__(self, *_: Any) -> None:
        self._end()

    def look(self) -> None:
        if self._keeper:
            self._wake.set()

    async def close(self) -> None:
        """Nobody is inside any more."""
        if self._keeper:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        with contextlib.suppress(StoreError):
            await self._sharing.share(self._service, self.limit, 0, 0)

    def _begin(self) -> None:
        self._running += 1
        self._most = max(self._most, self._running)

    def _end(self) -> None:
        self._running -= 1
        if self._wanted:
            self._wake.set()
        else:
            self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._running < self._kept:
            place = self._waiting.popleft()
            if not place.done():
                self._begin()
                place.set_result(None)

    def _ask(self) -> None:
        self._wake.set()
        if self._keeper is None or self._keeper.done():
            keeping = supervise(f"sharing the service {self._service}", self._keep, self._clock, first_pause=LOOK)
            self._keeper = asyncio.create_task(keeping, name=f"coterie-places-{self._service}")

    async def _keep(self) -> None:
        """As long as we have places or want some."""
        while self._waiting or self._running or self._kept:
            self._wake.clear()
            try:
                await self._tell()
            except StoreError as error:
                log.warning("no place at %s can be had for now: %s", self._service, error)
            await self._clock.wait(self._wake, LOOK)

    async def _tell(self) -> None:
        keeps = self._running if self._wanted else max(self._running, min(self._most, self._kept))
        self._kept, self._most = keeps, self._running
        share = await self._sharing.share(self._service, self.limit, keeps, len(self._waiting))
        self._kept, self._wanted = keeps + share.granted, share.wanted
        self._let_in()
