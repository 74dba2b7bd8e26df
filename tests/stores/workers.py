"""A worker whose turns the test takes step by step: it only keeps the claims that the store hands to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coterie.turn_store import Claim

from .steps import RULES

SOON = 60
"""Seconds after which a test gives up waiting, on a loaded machine too."""


class ManualWorker:
    """A `Taker` with as many places as anybody wants."""

    rules = RULES

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.claims: asyncio.Queue[Claim] = asyncio.Queue()
        self.reserved = 0
        """Places that the store holds and has neither used nor given back."""
        self.checks = 0
        """How often it was told to look for claims that it was never given."""

    def reserve(self, agent_id: str, person: bool) -> bool:
        self.reserved += 1
        return True

    def give_back(self, places: int) -> None:
        self.reserved -= places

    def take(self, claims: Sequence[Claim]) -> None:
        self.reserved -= len(claims)
        for claim in claims:
            self.claims.put_nowait(claim)

    def drop(self) -> None:
        pass

    def look(self) -> None:
        pass

    def check_claims(self) -> None:
        self.checks += 1

    async def next(self) -> Claim:
        async with asyncio.timeout(SOON):
            return await self.claims.get()
