"""A worker that only keeps its claims, so that a test can run its turns step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from coterie.turn_store import Claim, Interruption

from .steps import RULES

TIMEOUT_SECONDS = 180
"""Timeout of a wait, also on a loaded machine."""


class ManualWorker:
    """A `TurnWorker` without a limit of slots."""

    rules = RULES
    running_turns, max_turns = 0, 1_000

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.claims: asyncio.Queue[Claim] = asyncio.Queue()
        self.interruptions: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.reserved = 0
        """Slots that the store has reserved and neither used nor released."""
        self.checks = 0
        """Calls of `reconcile_claims`."""

    def reserve_slot(self, agent_id: str, for_person: bool) -> bool:
        self.reserved += 1
        return True

    def release_slots(self, agent_ids: Collection[str]) -> None:
        self.reserved -= len(agent_ids)

    def start_turns(self, claims: Sequence[Claim]) -> None:
        self.reserved -= len(claims)
        for claim in claims:
            self.claims.put_nowait(claim)

    def abandon_turns(self) -> None:
        pass

    def interrupt(self, interruption: Interruption) -> None:
        self.interruptions.put_nowait((interruption.agent_id, interruption.position))

    def wake(self) -> None:
        pass

    def reconcile_claims(self) -> None:
        self.checks += 1

    async def next(self) -> Claim:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await self.claims.get()
