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
from .harness import patience
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

    async def _take_back(self) -> None:
        with contextlib.suppress(StoreError):
            await super()._take_back()


class RetryingApprover(Approver):
    async def work(self, owed: list[Note]) -> None:
        while True:
            with contextlib.suppress(StoreError, Refused):
                await super().work(owed)


@contextmanager
def conditions(witness: Witness, lease: float, *, sure: bool) -> Iterator[None]:
    """Shorten the lease below the configurable minimum, and note fenced steps.

    `sure`: the process never drops its claims by itself, so that only the fence stops late writes.
    """
    advance, view = claims.advance, queries.read_history_view

    def watched(db: Any, post: Any, claim: Claim, *rest: Any) -> Claim:
        try:
            return advance(db, post, claim, *rest)
        except StaleClaim:
            witness.note(fenced=claim.agent_id, pid=os.getpid())
            raise

    def watched_view(db: Any, agent_id: str, claim: Claim | None = None) -> HistoryView:
        try:
            return view(db, agent_id, claim)
        except StaleClaim:
            witness.note(fenced=agent_id, pid=os.getpid())
            raise

    def shortened(folder: Path) -> Config:
        config = read_config(folder)
        return replace(config, store=replace(config.store, lease_seconds=lease))  # type: ignore[arg-type]

    doubt = 1e9 if sure else cluster.LEASE_AT_RISK_FRACTION
    with (
        patch.object(claims, "advance", watched),
        patch.object(queries, "read_history_view", watched_view),
        patch("coterie.society.read_config", shortened),
        patch.object(cluster, "LEASE_AT_RISK_FRACTION", doubt),
    ):
        yield


async def work_together(
    folder: Path,
    seed: int,
    name: str,
    owed: list[Note],
    witness: Witness,
    ready: int,
    nameless: float,
    pause: float,
) -> None:
    """One of several that work for the same agents, with clients of its own, until killed."""
    ToolEffects.witness = witness
    whim = RandomModel(random.Random(f"{seed}/{name}"), AGENTS, witness)
    with compared(folder, witness) as comparing, fake_models(lambda _: comparing(whim)):
        society = await start_society(folder, witness)
        assert society._runtime
        witness.note(hired=name, worker=society._runtime._scheduler.worker)
        os.write(ready, b"r")
        async with asyncio.TaskGroup() as group:
            judge = RetryingApprover(
                society, random.Random(f"{seed}/{name}/judge"), name, witness, pause=APPROVAL_DELAY_SECONDS
            )
            group.create_task(judge.work([]))
            for number in range(CLIENTS):
                rng = random.Random(f"{seed}/{name}/{number}")
                client = RetryingClient(society, rng, f"{name}.{number}", witness, pause=pause, nameless=nameless)
                group.create_task(client.work(owed[number::CLIENTS]))


async def wait_until_idle_and_copy(folder: Path, seed: int, witness: Witness) -> None:
    """Let all that was asked be answered, and all that is delayed fall due; then a copy, for whoever examines it."""
    ToolEffects.witness = witness
    whim = RandomModel(random.Random(f"{seed}/rest"), AGENTS, witness, calm=True)
    with compared(folder, witness) as comparing, fake_models(lambda _: comparing(whim)):
        society = await start_society(folder, witness)
        judge = RetryingApprover(society, random.Random(f"{seed}/judge"), "rest", witness, pause=APPROVAL_DELAY_SECONDS)
        judging = asyncio.create_task(judge.work([]))
        try:
            async with asyncio.timeout(patience(REST)):
                await wait_until_idle(society)
        finally:
            states = {agent.id: agent.state for agent in await society.store.agents()}
            witness.note(resting=states)
        judging.cancel()
        await asyncio.gather(judging, return_exceptions=True)
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
