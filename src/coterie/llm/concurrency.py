"""The queue of each model service: as many requests run at once as the service allows, the person's first.

Where several processes share one database, the limit of a service counts for all of them together. A process keeps a
slot for a moment after its request, unless another process waits for it. So a process that asks again and again does
not go through the database each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from coterie.clock import Clock
from coterie.errors import StoreError
from coterie.supervision import supervise

log = logging.getLogger(__name__)

LOOK = timedelta(seconds=1)
"""However a hint may get lost, slots are told of and looked for so often."""
PERSONS_IN_A_ROW = 4
"""After so many requests for the person, one of the agents that wait goes next."""


@dataclass(frozen=True, slots=True)
class Share:
    granted: int
    """So many more requests may begin."""
    wanted: bool = False
    """Other processes wait for a slot."""


@dataclass(frozen=True, slots=True)
class Other:
    """Another process at the same service."""

    kept: int
    waiting: int = 0
    urgent: int = 0
    """So many of those that wait are for the person."""


class Sharing(Protocol):
    room: Callable[[], None]
    """Called on the event loop when another process wants a slot or has given one back."""

    async def share(self, service: str, limit: int, keeps: int, waiting: int, urgent: int = 0) -> Share:
        """Report the slots that this process keeps and the requests that wait; return how many more slots it gets.

        `urgent`: so many of those that wait are for the person. A process that died has none once its lease is over.
        """
        ...


def fair(
    limit: int, keeps: int, waiting: int, others: Iterable[Other], *, urgent: int = 0, gave_back: bool = False
) -> Share:
    """Divide the free slots: the person's requests first, then the process with the fewest slots.

    `gave_back`: this process gives a slot back in the same call. Then another process with as many slots goes first;
    otherwise the only slot of a service would never leave a process whose queue is long.
    """
    others = list(others)
    wanted = any(one.waiting for one in others)
    free, granted = limit - keeps - sum(one.kept for one in others), 0
    theirs = [[one.kept, one.waiting, one.urgent] for one in others]
    while free > 0 and granted < waiting:
        mine = (urgent <= granted, keeps + granted + gave_back)
        rivals = [one for one in theirs if one[1] > 0 and (one[2] <= 0, one[0]) < mine]
        if rivals:
            first = min(rivals, key=lambda one: (one[2] <= 0, one[0]))
            first[0], first[1], first[2] = first[0] + 1, first[1] - 1, first[2] - 1
        else:
            granted += 1
        free -= 1
    return Share(granted, wanted=wanted)


class ServiceQueues:
    """The queues of all services, in one process."""

    def __init__(self, clock: Clock, sharing: Sharing | None = None) -> None:
        """`sharing`: where other processes ask the same services."""
        self._clock, self._sharing = clock, sharing
        self._queues: dict[str, Queue] = {}
        if sharing:
            sharing.room = self._look

    def at(self, service: str, limit: int) -> Queue:
        """The queue of a service. It stays the same when only the limit changes, because it counts who is inside."""
        queue = self._queues.setdefault(service, Queue(service, self._clock, self._sharing))
        queue.set_limit(limit)
        return queue

    async def close(self) -> None:
        for queue in self._queues.values():
            await queue.close()

    def _look(self) -> None:
        for queue in self._queues.values():
            queue.look()


class Queue:
    """The queue of one service: `async with queue.slot():` while a request runs."""

    def __init__(self, service: str, clock: Clock, sharing: Sharing | None = None) -> None:
        self._limit = 1
        self._service, self._sharing, self._clock = service, sharing, clock
        self._running = self._granted = self._most = 0
        """Requests under way; slots that other processes leave us; the most in use since they were last told."""
        self.wanted = False
        """Another process waits for a slot."""
        self._persons: deque[asyncio.Future[None]] = deque()
        self._agents: deque[asyncio.Future[None]] = deque()
        self._in_a_row = 0
        """Requests for the person that went before an agent's that waited."""
        self._wake = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return len(self._persons) + len(self._agents)

    def set_limit(self, limit: int) -> None:
        self._limit = limit
        if self._sharing is None:
            self._let_in()

    @asynccontextmanager
    async def slot(self, *, person: bool = False) -> AsyncIterator[None]:
        """Wait for a slot and hold it. `person`: the request is for a message of the person."""
        await self._enter(person)
        try:
            yield
        finally:
            self._leave()

    def look(self) -> None:
        if self._keeper:
            self._wake.set()

    async def close(self) -> None:
        """No request is under way any more."""
        if self._sharing is None:
            return
        if self._keeper:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        with contextlib.suppress(StoreError):
            await self._sharing.share(self._service, self._limit, 0, 0)

    @property
    def _kept(self) -> int:
        return self._limit if self._sharing is None else self._granted

    async def _enter(self, person: bool) -> None:
        if self._running < self._kept and not self.waiting:
            self._begin()
            return
        line = self._persons if person else self._agents
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(place)
        self._ask()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave()  # the slot was granted and nobody uses it
            else:
                with contextlib.suppress(ValueError):  # `_let_in` came across it already
                    line.remove(place)
                self.look()  # other processes no longer stand back for this request
            raise

    def _begin(self) -> None:
        self._running += 1
        self._most = max(self._most, self._running)

    def _leave(self) -> None:
        self._running -= 1
        if self.wanted:
            self._wake.set()
        else:
            self._let_in()

    def _let_in(self, at_most: int | None = None) -> None:
        let_in = 0
        while self.waiting and self._running < self._kept and let_in != at_most:
            place = self._next()
            if not place.done():
                self._begin()
                place.set_result(None)
                let_in += 1

    def _next(self) -> asyncio.Future[None]:
        if self._persons and not (self._agents and self._in_a_row >= PERSONS_IN_A_ROW):
            self._in_a_row += bool(self._agents or self.wanted)
            return self._persons.popleft()
        self._in_a_row = 0
        return self._agents.popleft()

    def _ask(self) -> None:
        if self._sharing is None:
            return
        self._wake.set()
        if self._keeper is None or self._keeper.done():
            keeping = supervise(f"sharing the service {self._service}", self._keep, self._clock, first_pause=LOOK)
            self._keeper = asyncio.create_task(keeping, name=f"coterie-places-{self._service}")

    async def _keep(self) -> None:
        """Until the other processes know that we have no slots and want none."""
        while True:
            self._wake.clear()
            try:
                if await self._tell() and not self.waiting:
                    return
            except StoreError as error:
                log.warning("no slot at %s can be had for now: %s", self._service, error)
            await self._clock.wait(self._wake, LOOK)

    async def _tell(self) -> bool:
        """True: the other processes were told that we have no slots and want none."""
        assert self._sharing is not None  # noqa: S101
        keeps = self._running if self.wanted else max(self._running, min(self._most, self._granted))
        self._granted, self._most = keeps, self._running
        # Agents of other processes get their share once the person had enough requests in a row.
        enough = self._in_a_row >= PERSONS_IN_A_ROW
        urgent = 0 if enough else len(self._persons)
        waiting = self.waiting
        share = await self._sharing.share(self._service, self._limit, keeps, waiting, urgent)
        self._granted, self.wanted = keeps + share.granted, share.wanted
        if enough and not self._agents:
            self._in_a_row = 0
        # A slot that came free during the call goes back if another process waits: its request may be the person's.
        self._let_in(share.granted if share.wanted else None)
        if share.wanted and self._running < self._granted:
            self._wake.set()
        return not (waiting or self._granted)
