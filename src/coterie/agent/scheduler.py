"""Gives every agent that has something to do a worker, as many at a time as allowed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from coterie.agent.llm_handler import LlmHandler
from coterie.agent.slots import ServiceAdmission, Slot, Slots
from coterie.agent.turn import Rules
from coterie.clock import Clock
from coterie.disk import Disk
from coterie.errors import StoreError
from coterie.logctx import turn_context
from coterie.supervision import Shutdown, supervise
from coterie.turns import Claim, TurnStore

log = logging.getLogger(__name__)

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
