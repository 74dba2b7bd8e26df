"""Gives every agent that has something to do a worker, as many at a time as allowed."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

from coterie.agent.llm_handler import LlmHandler
from coterie.agent.turn import Rules
from coterie.clock import Clock
from coterie.errors import StoreError
from coterie.turns import Claim, TurnStore

log = logging.getLogger(__name__)

SWEEP = timedelta(seconds=1)
"""A retry that falls due, or a wake-up that got lost, is found within this."""
AT_ONCE = 256


class Scheduler:
    def __init__(self, store: TurnStore, handler: LlmHandler, clock: Clock, rules: Rules, worker: str) -> None:
        self._store, self._handler, self._clock = store, handler, clock
        self._rules, self._worker = rules, worker
        self.wake = asyncio.Event()
        """Set it when somebody may have something to do."""
        self._turns: dict[asyncio.Task[None], str] = {}
        self._mislaid = False
        """Agents may be claimed in our name that nobody works on."""
        self._ending = False
        self._loop: asyncio.Task[None] | None = None

    def adopt(self, rules: Rules) -> None:
        self._rules = rules

    def start(self) -> None:
        self._loop = asyncio.create_task(self._claim_for_ever(), name="coterie-scheduler")

    async def stop_claiming(self) -> None:
        self._ending = True
        self.wake.set()
        if self._loop:
            await self._loop

    async def finish(self, drain: timedelta) -> None:
        """Let turns go on for `drain`, then leave them as they are: the next start resumes them."""
        if self._turns:
            await asyncio.wait(self._turns, timeout=drain.total_seconds())
        for turn in self._turns:
            turn.cancel()
        await asyncio.gather(*self._turns, return_exceptions=True)
        try:
            await self._store.release(self._worker, failed=False)
        except StoreError as error:
            log.warning("what was cut off counts as a crash at the next start: %s", error)

    async def _claim_for_ever(self) -> None:
        while not self._ending:
            self.wake.clear()
            if not await self._claim_some():
                await self._clock.wait(self.wake, SWEEP)

    async def _claim_some(self) -> bool:
        """Whether there may be more."""
        room = AT_ONCE - len(self._turns)
        try:
            if self._mislaid:
                await self._store.release(self._worker, busy=[*self._turns.values()], failed=True)
                self._mislaid = False
            claims = await self._store.claim(self._worker, self._rules, room) if room else []
        except StoreError as error:
            log.error("cannot look for work for now: %s", error)
            return False
        except Exception:  # whatever it is, the next round may pass; without rounds no agent ever works
            log.exception("looking for work failed; trying again")
            self._mislaid = True  # it may have been written all the same
            return False
        for claim in claims:
            self._begin(claim)
        return bool(room) and len(claims) == room

    def _begin(self, claim: Claim) -> None:
        turn = asyncio.create_task(self._handler.work(claim), name=f"coterie-turn-{claim.agent_id}")
        self._turns[turn] = claim.agent_id
        turn.add_done_callback(self._ended)

    def _ended(self, turn: asyncio.Task[None]) -> None:
        if len(self._turns) == AT_ONCE:
            self.wake.set()  # others may have waited for this place
        del self._turns[turn]
        if not turn.cancelled() and (error := turn.exception()):
            # The store still says that the agent is at work; so it is claimed anew, which counts as a crash.
            self._mislaid = True
            self.wake.set()
            log.error("a turn ended in an error nobody planned for", exc_info=error)
