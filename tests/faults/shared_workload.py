"""Workload for forked workers of one society on PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from coterie.config import Config, read_config
from coterie.errors import Refused, StoreError
from coterie.messages import PERSON, Receipt
from coterie.society import Society
from coterie.stores.postgres import cluster
from coterie.stores.sql import claims, queries
from coterie.turn_store import Claim, HistoryView, StaleClaim

from .fake_model import RandomModel, ToolEffects, fake_models
from .harness import scaled_timeout
from .requests import compared
from .scenarios import AGENTS, Client, wait_until_idle
from .witness import Note, Witness
from .workload import APPROVAL_DELAY_SECONDS, CLIENTS, Approver, history_errors, start_society

RETRY_SECONDS = 0.02
REST = 60.0
"""Seconds within which all agents become idle, on an idle machine."""


class RetryingClient(Client):
    """Retries with the same client id while the database is unreachable."""

    async def _send(self, note: Note, *, again: bool = False) -> Receipt:
        while True:
            try:
                return await super()._send(note, again=again)
            except StoreError:
                self._witness.note(refused=note["wanted"])
                again = True
                await asyncio.sleep(RETRY_SECONDS)

    async def _withdraw_one(self) -> None:
        with contextlib.suppress(StoreError):
            await super()._withdraw_one()


class RetryingApprover(Approver):
    async def work(self, to_repeat: list[Note]) -> None:
        while True:
            with contextlib.suppress(StoreError, Refused):
                await super().work(to_repeat)


@contextmanager
def conditions(witness: Witness, lease: float, *, keeps_claims: bool) -> Iterator[None]:
    """Shorten the lease below the configurable minimum, and note fenced steps.

    `keeps_claims`: the process never drops its claims by itself, so that only the fence stops late writes.
    """
    advance, view = claims.advance, queries.read_history_view

    def noted(db: Any, unit: Any, claim: Claim, *rest: Any) -> Claim:
        try:
            return advance(db, unit, claim, *rest)
        except StaleClaim:
            witness.note(fenced=claim.agent_id, pid=os.getpid())
            raise

    def noted_view(db: Any, agent_id: str, claim: Claim | None = None) -> HistoryView:
        try:
            return view(db, agent_id, claim)
        except StaleClaim:
            witness.note(fenced=agent_id, pid=os.getpid())
            raise

    def shortened(folder: Path) -> Config:
        config = read_config(folder)
        return replace(config, store=replace(config.store, lease_seconds=lease))  # type: ignore[arg-type]

    risk_fraction = 1e9 if keeps_claims else cluster.LEASE_AT_RISK_FRACTION
    with (
        patch.object(claims, "advance", noted),
        patch.object(queries, "read_history_view", noted_view),
        patch("coterie.society.read_config", shortened),
        patch("coterie.configuration.read_config", shortened),
        patch.object(cluster, "LEASE_AT_RISK_FRACTION", risk_fraction),
    ):
        yield


async def run_worker(
    folder: Path,
    seed: int,
    name: str,
    to_repeat: list[Note],
    witness: Witness,
    ready: int,
    anonymous_share: float,
    pause: float,
) -> None:
    """Run one of several workers, with its own clients, until killed."""
    ToolEffects.witness = witness
    model = RandomModel(random.Random(f"{seed}/{name}"), AGENTS, witness)
    with compared(folder, witness) as comparing, fake_models(lambda _: comparing(model)):
        society = await start_society(folder, witness)
        assert society._runtime
        witness.note(started=name, worker=society._runtime._scheduler.worker)
        os.write(ready, b"r")
        async with asyncio.TaskGroup() as group:
            approver = RetryingApprover(
                society, random.Random(f"{seed}/{name}/judge"), name, witness, pause=APPROVAL_DELAY_SECONDS
            )
            group.create_task(approver.work([]))
            for number in range(CLIENTS):
                rng = random.Random(f"{seed}/{name}/{number}")
                client = RetryingClient(
                    society, rng, f"{name}.{number}", witness, pause=pause, anonymous_share=anonymous_share
                )
                group.create_task(client.work(to_repeat[number::CLIENTS]))


async def wait_until_idle_and_copy(folder: Path, seed: int, witness: Witness) -> None:
    """Run until all agents are idle and nothing is delayed, then copy the database for the verification."""
    ToolEffects.witness = witness
    model = RandomModel(random.Random(f"{seed}/rest"), AGENTS, witness, calm=True)
    with compared(folder, witness) as comparing, fake_models(lambda _: comparing(model)):
        society = await start_society(folder, witness)
        approver = RetryingApprover(
            society, random.Random(f"{seed}/judge"), "rest", witness, pause=APPROVAL_DELAY_SECONDS
        )
        approver.stops_tasks = False
        approving = asyncio.create_task(approver.work([]))
        try:
            async with asyncio.timeout(scaled_timeout(REST)):
                await wait_until_idle(society)
        finally:
            states = {agent.id: agent.state for agent in await society.store.agents()}
            witness.note(states=states)
        approving.cancel()
        await asyncio.gather(approving, return_exceptions=True)
        wrong = [violation async for violation in society.store.violations()]
        wrong += [
            complaint for agent in states if agent != PERSON for complaint in await history_errors(society, agent)
        ]
        await _copy(society, folder)
        await society.stop()
    witness.note(rested=True, violations=wrong)


async def _copy(society: Society, folder: Path) -> None:
    target = folder / "data" / "coterie.db"
    target.parent.mkdir(exist_ok=True)
    await society.store.backup(target)
