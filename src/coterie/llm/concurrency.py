"""Request queues of model services: limited concurrency, requests for the person first.

When several processes share one database, a service's limit applies to all of them together. A process keeps a slot
for a short time after a request unless another process waits for it. This saves a database call per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from datetime import timedelta

from coterie.clock import Clock
from coterie.errors import StoreError
from coterie.slot_sharing import SlotSharing
from coterie.supervision import supervise

log = logging.getLogger(__name__)

POLL_INTERVAL = timedelta(seconds=1)
"""How often slots are exchanged even if no notification arrives."""
MAX_PERSON_REQUESTS_IN_A_ROW = 4
"""After this many requests for the person, a waiting agent's request goes next."""


class ServiceQueues:
    """The queues of all services in this process."""

    def __init__(self, clock: Clock, sharing: SlotSharing | None = None) -> None:
        """`sharing`: required if other processes use the same services."""
        self._clock, self._sharing = clock, sharing
        self._queues: dict[str, ServiceQueue] = {}
        if sharing:
            sharing.subscribe_slots(self._wake_all)

    def queue_for(self, service: str, limit: int) -> ServiceQueue:
        """Return the service's queue. A changed limit keeps the queue, because it counts running requests."""
        queue = self._queues.setdefault(service, ServiceQueue(service, self._clock, self._sharing))
        queue.set_limit(limit)
        return queue

    async def close(self) -> None:
        for queue in self._queues.values():
            await queue.close()

    def _wake_all(self) -> None:
        for queue in self._queues.values():
            queue.wake()


class ServiceQueue:
    """The queue of one service: `acquire` before a request, `release` after it."""

    def __init__(self, service: str, clock: Clock, sharing: SlotSharing | None = None) -> None:
        self._limit = 1
        self._service, self._sharing, self._clock = service, sharing, clock
        self._running = 0
        self._granted = 0
        """Slots this process holds when slots are shared."""
        self._peak = 0
        """Most requests running at once since the last exchange."""
        self.others_wait = False
        """Another process waits for a slot."""
        self._person_waiters: deque[asyncio.Future[None]] = deque()
        self._agent_waiters: deque[asyncio.Future[None]] = deque()
        self._person_in_a_row = 0
        """Requests for the person admitted while agents waited."""
        self._woken = asyncio.Event()
        self._exchange_task: asyncio.Task[None] | None = None

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return len(self._person_waiters) + len(self._agent_waiters)

    def set_limit(self, limit: int) -> None:
        self._limit = limit
        if self._sharing is None:
            self._admit()

    def wake(self) -> None:
        """Exchange slots with the other processes now."""
        if self._exchange_task:
            self._woken.set()

    async def close(self) -> None:
        """Give all slots back. No request may be running."""
        if self._sharing is None:
            return
        if self._exchange_task:
            self._exchange_task.cancel()
            await asyncio.gather(self._exchange_task, return_exceptions=True)
        with contextlib.suppress(StoreError):
            await self._sharing.request_slots(self._service, self._limit, 0, 0)

    @property
    def _available(self) -> int:
        return self._limit if self._sharing is None else self._granted

    async def acquire(self, *, for_person: bool = False) -> None:
        """Wait for a slot. `for_person`: the request answers a message of the person."""
        if self._running < self._available and not self.waiting:
            self._start()
            return
        waiters = self._person_waiters if for_person else self._agent_waiters
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters.append(waiter)
        self._start_exchange()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()  # the slot was granted at the moment of cancellation
            else:
                with contextlib.suppress(ValueError):  # `_admit` may have removed it
                    waiters.remove(waiter)
                self.wake()  # tell other processes that this request no longer waits
            raise

    def _start(self) -> None:
        self._running += 1
        self._peak = max(self._peak, self._running)

    def release(self) -> None:
        """Give the slot back after the request."""
        self._running -= 1
        if self.others_wait:
            self._woken.set()
        else:
            self._admit()

    def _admit(self, at_most: int | None = None) -> None:
        """Start waiting requests while slots are free."""
        admitted = 0
        while self.waiting and self._running < self._available and admitted != at_most:
            waiter = self._pop_waiter()
            if not waiter.done():
                self._start()
                waiter.set_result(None)
                admitted += 1

    def _pop_waiter(self) -> asyncio.Future[None]:
        agent_is_next = self._agent_waiters and self._person_in_a_row >= MAX_PERSON_REQUESTS_IN_A_ROW
        if self._person_waiters and not agent_is_next:
            self._person_in_a_row += bool(self._agent_waiters or self.others_wait)
            return self._person_waiters.popleft()
        self._person_in_a_row = 0
        return self._agent_waiters.popleft()

    def _start_exchange(self) -> None:
        if self._sharing is None:
            return
        self._woken.set()
        if self._exchange_task is None or self._exchange_task.done():
            exchanging = supervise(
                f"sharing the service {self._service}",
                self._exchange_until_idle,
                self._clock,
                first_pause=POLL_INTERVAL,
            )
            self._exchange_task = asyncio.create_task(exchanging, name=f"coterie-slots-{self._service}")

    async def _exchange_until_idle(self) -> None:
        """Exchange slots until this process holds none and needs none."""
        while True:
            self._woken.clear()
            try:
                if await self._exchange() and not self.waiting:
                    return
            except StoreError as error:
                log.warning("cannot get a slot of service %s, will retry: %s", self._service, error)
            await self._clock.wait(self._woken, POLL_INTERVAL)

    async def _exchange(self) -> bool:
        """Report and request slots once. Return True if this process holds none and requested none."""
        assert self._sharing is not None  # noqa: S101
        held = self._running if self.others_wait else max(self._running, min(self._peak, self._granted))
        self._granted, self._peak = held, self._running
        # After enough requests for the person in a row, agents of other processes get their share.
        enough = self._person_in_a_row >= MAX_PERSON_REQUESTS_IN_A_ROW
        urgent = 0 if enough else len(self._person_waiters)
        waiting = self.waiting
        grant = await self._sharing.request_slots(self._service, self._limit, held, waiting, urgent)
        self._granted, self.others_wait = held + grant.granted, grant.others_wait
        if enough and not self._agent_waiters:
            self._person_in_a_row = 0
        # If another process waits, a slot freed during the call goes back: its request may be for the person.
        self._admit(grant.granted if grant.others_wait else None)
        if grant.others_wait and self._running < self._granted:
            self._woken.set()
        return not (waiting or self._granted)
