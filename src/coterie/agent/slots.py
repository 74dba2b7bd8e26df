"""How many turns of this process do something at once, and which agents may begin a turn.

A turn that asks its model holds no slot: not while it waits in the queue of its service, and not while the service
answers. The service's own limit bounds those. So a slow service keeps no other agent waiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from coterie.agent.directory import Directory
from coterie.errors import Refused
from coterie.llm.models import Models
from coterie.turns import Admits

AT_ONCE = 256
"""Turns that begin or run tools at once."""
FOR_PERSON = 32
"""So many more, only for messages of the person: agents in long tool calls must not keep the person waiting."""


class Slots:
    """Counts slots. The store's own thread takes some too."""

    def __init__(self, count: int = AT_ONCE, for_person: int = FOR_PERSON) -> None:
        self._free = {False: count, True: count + for_person}
        """What is left, for agents' turns and for the person's. Every slot in use counts in both."""
        self._closed = False
        self._lock = threading.Lock()
        self._waiting: dict[bool, deque[asyncio.Future[None]]] = {False: deque(), True: deque()}
        self._loop: asyncio.AbstractEventLoop | None = None

    def free(self, *, person: bool) -> int:
        """How many could be taken now. Turns that wait for a slot come before turns that have yet to begin."""
        if self._closed or self._waiting[person]:
            return 0
        return max(0, self._free[person])

    def take(self, wanted: int, *, person: bool) -> int:
        """Take up to `wanted` slots at once; how many there were."""
        with self._lock:
            taken = min(wanted, self.free(person=person))
            self._use(taken)
            return taken

    def give_back(self, count: int) -> None:
        with self._lock:
            self._use(-count)
            if self._loop and (self._waiting[True] or self._waiting[False]):
                self._loop.call_soon_threadsafe(self._serve)

    def close(self) -> None:
        """No turn begins any more. Turns under way still get slots."""
        with self._lock:
            self._closed = True

    def _use(self, count: int) -> None:
        self._free[False] -= count
        self._free[True] -= count

    async def acquire(self, *, person: bool) -> None:
        """Wait for one slot, in order. A cancelled caller holds none."""
        self._loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = self._loop.create_future()
        with self._lock:
            self._waiting[person].append(place)
        self._serve()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give_back(1)
            else:
                with self._lock, suppress(ValueError):  # `_serve` came across it already
                    self._waiting[person].remove(place)
            raise

    def _serve(self) -> None:
        with self._lock:
            for person in (True, False):
                while self._waiting[person] and self._free[person] > 0:
                    place = self._waiting[person].popleft()
                    if not place.done():
                        self._use(1)
                        place.set_result(None)


class Slot:
    """The slot of one turn. It may be given back and taken again."""

    def __init__(self, slots: Slots, on_release: Callable[[], None]) -> None:
        """The slot is held already."""
        self._slots, self._on_release = slots, on_release
        self._held = True

    async def acquire(self, *, person: bool) -> None:
        if not self._held:
            await self._slots.acquire(person=person)
            self._held = True

    def release(self) -> None:
        if self._held:
            self._held = False
            self._slots.give_back(1)
            self._on_release()


class ServiceAdmission:
    """Lets agents begin a turn while few turns wait for their service.

    The turns of a full service stay unclaimed, where they cost no memory and another process may take them. The
    person's messages are counted apart: agents' turns never fill the queue for them.
    """

    def __init__(self, models: Models, directory: Directory) -> None:
        self._models, self._directory = models, directory
        self._held: set[tuple[str, bool]] = set()
        """Services, and whether for the person, for which an agent waits unclaimed. Newcomers go behind it."""

    def admits(self, agent_id: str, person: bool) -> bool:
        """Whether an agent that got mail just now may begin. Called from any thread."""
        key = self._key(agent_id, person)
        if key is None or (key not in self._held and self._models.has_room(*key)):
            return True
        self._held.add(key)
        return False

    def begin_round(self) -> Admits | None:
        self._held.clear()
        return self._admits_in_round if self._models.is_any_full() else None

    def is_awaited(self, service: str, person: bool) -> bool:
        """Whether an agent waits unclaimed until this service has room."""
        return (service, person) in self._held

    def _admits_in_round(self, agent_id: str, person: bool) -> bool:
        key = self._key(agent_id, person)
        if key is None or self._models.has_room(*key):
            return True
        self._held.add(key)
        return False

    def _key(self, agent_id: str, person: bool) -> tuple[str, bool] | None:
        """None: the agent has no service, and its turn says so."""
        try:
            return self._directory.service_of(agent_id).id, person
        except Refused:
            return None
