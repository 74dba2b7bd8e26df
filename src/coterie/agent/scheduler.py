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
        self._turns: set[asyncio.Task[None]] = set()
        self._ending = False
        self._loop: asyncio.Task[None] | None = None

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

    async def _claim_for_ever(self) -> None:
        while not self._ending:
            self.wake.clear()
            if not await self._claim_some():
                await self._clock.wait(self.wake, SWEEP)

    async def _claim_some(self) -> bool:
        """Whether there may be more."""
        room = AT_ONCE - len(self._turns)
        try:
            claims = await self._store.claim(self._worker, self._rules, room) if room else []
        except StoreError as error:
            log.error("cannot look for work for now: %s", error)
            return False
        for claim in claims:
            self._begin(claim)
        return bool(room) and len(claims) == room

    def _begin(self, claim: Claim) -> None:
        turn = asyncio.create_task(self._handler.work(claim), name=f"coterie-turn-{claim.agent_id}")
        self._turns.add(turn)
        turn.add_done_callback(self._ended)

    def _ended(self, turn: asyncio.Task[None]) -> None:
        self._turns.discard(turn)
        self.wake.set()
        if not turn.cancelled() and (error := turn.exception()):
            # The store still says that the agent is at work; the next start resumes it, and counts.
            log.error("a turn ended in an error nobody planned for", exc_info=error)
