"""Gives every agent that has something to do a worker, as many at a time as allowed.

How many turns of this process do something at once, and which agents may begin a turn.

A turn that asks its model holds no slot: not while it waits in the queue of its service, and not while the service
answers. The service's own limit bounds those. So a slow service keeps no other agent waiting.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

from coterie.agent.runner import LlmHandler
from coterie.agent.service import Directory
from coterie.clock import Clock
from coterie.errors import Refused, StoreError
from coterie.files import Disk
from coterie.llm.gateway import Models
from coterie.supervision import Shutdown, supervise
from coterie.telemetry import turn_context
from coterie.turn import Rules
from coterie.turn_store import Admits, Claim, TurnStore

log = logging.getLogger(__name__)

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


SWEEP = timedelta(seconds=1)
"""A retry that falls due, or a wake-up that got lost, is found within this."""
RELEASE_TRIES = 3
"""A failed release leaves turns to the next start, or to the end of the lease, and counts as a crash."""
ROUND = 128
"""Agents claimed in one transaction at most. Slots that a round sets aside are not there for turns that run tools."""


class Scheduler:
    """A `Taker`: the store hands it whoever gets mail; it looks itself for those who are due for other reasons."""

    def __init__(
        self,
        store: TurnStore,
        handler: LlmHandler,
        clock: Clock,
        rules: Rules,
        worker: str,
        disk: Disk,
        admission: ServiceAdmission,
    ) -> None:
        self._admission = admission
        self._store, self._handler, self._clock, self._disk = store, handler, clock, disk
        self.rules, self.worker = rules, worker
        self._wake = asyncio.Event()
        self._turns: dict[asyncio.Task[None], str] = {}
        self._slots = Slots()
        self._held = {False: False, True: False}
        """Agents wait for a slot already, without and with a message of the person: newcomers go behind them."""
        self._mislaid = False
        """Agents may be claimed in our name that nobody works on."""
        self._dropped: set[asyncio.Task[None]] = set()
        """Turns that others may have taken over meanwhile; where nobody has, they are let go in order."""
        self._ending, self._stopping = False, asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._complaint: str | None = None

    def adopt(self, rules: Rules) -> None:
        self.rules = rules

    def start(self) -> None:
        self._store.attend(self)
        claiming = supervise("looking for work", self._claim_for_ever, self._clock, stopping=self._stopping)
        self._loop = asyncio.create_task(claiming, name="coterie-scheduler")

    async def stop_claiming(self) -> None:
        """Once is enough."""
        self._ending = True
        self._stopping.set()
        self._slots.close()
        self._wake.set()
        if self._loop:
            await self._loop

    async def finish(self, drain: timedelta) -> None:
        """Let turns go on for `drain`, then leave them as they are: the next start resumes them."""
        shutdown = Shutdown()
        # Otherwise a turn that is released below could be claimed here once more.
        await shutdown.step("claim no more turns", self.stop_claiming)
        if self._turns:
            await shutdown.step("drain", partial(asyncio.wait, {*self._turns}, timeout=drain.total_seconds()))
        for turn in self._turns:
            turn.cancel()
        if self._turns:
            await shutdown.step("end turns", partial(asyncio.wait, {*self._turns}))
        await shutdown.step("release turns", self._release_all)
        shutdown.finish()

    async def _release_all(self) -> None:
        for left in reversed(range(RELEASE_TRIES)):
            try:
                await self._store.release(self.worker, failed=False)
                return
            except StoreError as error:
                if not left:
                    log.warning("what was cut off counts as a crash at the next start: %s", error)

    # What the store does with us

    def reserve(self, agent_id: str, person: bool) -> bool:
        if self._held[person] or not self._admission.admits(agent_id, person):
            return False
        return self._slots.take(1, person=person) == 1

    def give_back(self, places: int) -> None:
        self._slots.give_back(places)

    def take(self, claims: Sequence[Claim]) -> None:
        if self._ending:
            return  # they are in our name, and are let go with the rest
        for claim in claims:
            self._begin(claim)

    def drop(self) -> None:
        self._dropped |= self._turns.keys()
        for turn in self._turns:
            turn.cancel()
        self._wake.set()

    def look(self) -> None:
        self._wake.set()

    def check_claims(self) -> None:
        self._mislaid = True
        self._wake.set()

    def on_room(self, service: str, person: bool) -> None:
        """Fewer turns wait for this service. Called on the event loop."""
        if self._admission.is_awaited(service, person):
            self._wake.set()

    # What it finds by itself

    async def _claim_for_ever(self) -> None:
        while not self._ending:
            self._wake.clear()
            if not await self._claim_some():
                await self._clock.wait(self._wake, SWEEP)

    async def _claim_some(self) -> bool:
        """Whether there may be more."""
        # On a full disk there is no slot for anybody: who gets mail waits as if all were taken.
        full = self._disk.is_full()
        left = 0 if full else self._slots.free(person=False)
        room = 0 if full else self._slots.take(ROUND, person=True)
        others = min(room, left)
        claims: Sequence[Claim] = ()
        try:
            if self._mislaid or self._dropped:
                await self._let_go()
            claims = await self._claim(room, others) if room else []
        except StoreError as error:
            if self._complaint != str(error):  # once, and not every second
                log.error("cannot look for work for now: %s", error)
            self._complaint = str(error)
            return False
        except Exception:  # whatever it is, the next round may pass; without rounds no agent ever works
            log.exception("looking for work failed; trying again")
            self._mislaid = True  # it may have been written all the same
            return False
        finally:
            self._slots.give_back(room - len(claims))
        self._complaint = None
        self.take(claims)
        agents = sum(not claim.person for claim in claims)
        self._held = {False: agents >= others, True: len(claims) == room}
        return (0 < others <= agents) or 0 < room == len(claims)

    async def _claim(self, room: int, others: int) -> Sequence[Claim]:
        return await self._store.claim(self.worker, self.rules, room, others=others, admission=self._admission)

    async def _let_go(self) -> None:
        """Of what is in our name and nobody works on."""
        if self._dropped:
            await asyncio.wait(self._dropped)
        await self._store.release(self.worker, busy=[*self._turns.values()], failed=self._mislaid)
        self._mislaid = False
        self._dropped.clear()

    def _begin(self, claim: Claim) -> None:
        slot = Slot(self._slots, self._on_release)
        turn = self._handler.begin(claim, slot)
        self._turns[turn] = claim.agent_id
        turn.add_done_callback(lambda ended: self._ended(ended, slot))

    def _on_release(self) -> None:
        if any(self._held.values()):
            self._wake.set()  # others have waited for this slot

    def _ended(self, turn: asyncio.Task[None], slot: Slot) -> None:
        agent_id = self._turns.pop(turn)
        slot.release()
        if not turn.cancelled() and (error := turn.exception()):
            # The store still says that the agent is at work; so it is claimed anew, which counts as a crash.
            self._mislaid = True
            self._wake.set()
            with turn_context(agent=agent_id):
                log.error("a turn ended in an error nobody planned for", exc_info=error)
