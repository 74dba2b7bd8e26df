"""What the forks do that work for one society on PostgreSQL, and what the last of them does, in peace."""

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
from coterie.turn_store import Claim, StaleOwner, View

from .harness import patience
from .labour import CLIENTS, THOUGHT, Judge, start, unfit
from .mind import Deeds, Whim, minds
from .requests import compared
from .scenarios import AGENTS, Client, at_rest
from .witness import Note, Witness

AGAIN = 0.02
REST = 60.0
"""Seconds within which agents that nobody speaks to come to rest, on a machine with nothing else to do."""


class Patient(Client):
    """Asks again, under the same name, for as long as the database cannot be reached."""

    async def _send(self, note: Note, *, again: bool = False) -> Receipt:
        while True:
            try:
                return await super()._send(note, again=again)
            except StoreError:
                self._witness.note(refused=note["wanted"])
                again = True
                await asyncio.sleep(AGAIN)

    async def _take_back(self) -> None:
        with contextlib.suppress(StoreError):
            await super()._take_back()


class PatientJudge(Judge):
    async def work(self, owed: list[Note]) -> None:
        while True:
            with contextlib.suppress(StoreError, Refused):
                await super().work(owed)


@contextmanager
def conditions(witness: Witness, lease: float, *, sure: bool) -> Iterator[None]:
    """A lease shorter than any that can be configured; steps that come too late are told to the witness.

    `sure`: it never doubts that it holds what it has claimed, so that nothing but the fence keeps it from writing.
    """
    advance, view = claims.advance, queries.view

    def watched(db: Any, post: Any, claim: Claim, *rest: Any) -> Claim:
        try:
            return advance(db, post, claim, *rest)
        except StaleOwner:
            witness.note(fenced=claim.agent_id, pid=os.getpid())
            raise

    def watched_view(db: Any, agent_id: str, claim: Claim | None = None) -> View:
        try:
            return view(db, agent_id, claim)
        except StaleOwner:
            witness.note(fenced=agent_id, pid=os.getpid())
            raise

    def shortened(folder: Path) -> Config:
        config = read_config(folder)
        return replace(config, store=replace(config.store, lease_seconds=lease))  # type: ignore[arg-type]

    doubt = 1e9 if sure else cluster.UNSURE
    with (
        patch.object(claims, "advance", watched),
        patch.object(queries, "view", watched_view),
        patch("coterie.society.read_config", shortened),
        patch.object(cluster, "UNSURE", doubt),
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
    Deeds.witness = witness
    whim = Whim(random.Random(f"{seed}/{name}"), AGENTS, witness)
    with compared(folder, witness) as comparing, minds(lambda _: comparing(whim)):
        society = await start(folder, witness)
        assert society._crew
        witness.note(hired=name, worker=society._crew._scheduler.worker)
        os.write(ready, b"r")
        async with asyncio.TaskGroup() as group:
            judge = PatientJudge(society, random.Random(f"{seed}/{name}/judge"), name, witness, pause=THOUGHT)
            group.create_task(judge.work([]))
            for number in range(CLIENTS):
                rng = random.Random(f"{seed}/{name}/{number}")
                client = Patient(society, rng, f"{name}.{number}", witness, pause=pause, nameless=nameless)
                group.create_task(client.work(owed[number::CLIENTS]))


async def rest_and_copy(folder: Path, seed: int, witness: Witness) -> None:
    """Let all that was asked be answered, and all that is delayed fall due; then a copy, for whoever examines it."""
    Deeds.witness = witness
    whim = Whim(random.Random(f"{seed}/rest"), AGENTS, witness, calm=True)
    with compared(folder, witness) as comparing, minds(lambda _: comparing(whim)):
        society = await start(folder, witness)
        judge = PatientJudge(society, random.Random(f"{seed}/judge"), "rest", witness, pause=THOUGHT)
        judging = asyncio.create_task(judge.work([]))
        try:
            async with asyncio.timeout(patience(REST)):
                await at_rest(society)
        finally:
            states = {agent.id: agent.state for agent in await society.store.agents()}
            witness.note(resting=states)
        judging.cancel()
        await asyncio.gather(judging, return_exceptions=True)
        wrong = [violation async for violation in society.store.violations()]
        wrong += [complaint for agent in states if agent != PERSON for complaint in await unfit(society, agent)]
        await _copy(society, folder)
        await society.stop()
    witness.note(rested=True, violations=wrong)


async def _copy(society: Society, folder: Path) -> None:
    target = folder / "data" / "coterie.db"
    target.parent.mkdir(exist_ok=True)
    await society.store.backup(target)
