"""Turns that are stopped at any moment, and claims of turns that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from coterie.agent.scheduler import CLAIM_INTERVAL, Scheduler
from coterie.live import LiveReply
from coterie.testing import FakeClock
from coterie.testing.model_server import CustomReply, ReceivedRequest, Reply, ServerConnection, chunk
from coterie.turn import AskModel, Rules
from coterie.turn_store import Claim, ClaimKey
from tests.agent.stage import Stage, stage
from tests.agent.tool_calls import HANG_SECONDS

Moment = Literal["claimed", "started", "requested", "streaming", "answered", "written"]
ANSWERS: dict[Moment, list[str]] = {
    "claimed": [""],
    "started": [""],
    "requested": [""],
    "streaming": ["one"],
    "answered": ["one and more"],
    "written": ["one and more"],
}
"""The messages that a turn has sent when it was stopped at this moment. Before the first word: an empty mark."""


@pytest.mark.parametrize("moment", list(ANSWERS))
async def test_a_turn_stopped_at_any_moment_ends_and_the_next_message_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: Moment
) -> None:
    async with stage(tmp_path) as here, asyncio.timeout(HANG_SECONDS):
        stop = Stop(here)
        stop_at(moment, here, monkeypatch, stop)
        await here.say("one")
        found_turn = await stop.done
        await here.state("ada", "idle")
        await here.say("two")

        assert found_turn
        assert await here.texts(len(ANSWERS[moment]) + 1) == [*ANSWERS[moment], "two and more"]


class Stop:
    """Stops the turn of ada once, as the web API does."""

    def __init__(self, here: Stage) -> None:
        self._society = here.society
        self._task: asyncio.Task[None] | None = None
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """True if a turn was stopped."""

    def now(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(self._society.stop_turn("ada")))

    async def _run(self, stopped: bool) -> None:
        self.done.set_result(stopped or await self._society.stop_waiting("ada"))


def stop_at(moment: Moment, here: Stage, monkeypatch: pytest.MonkeyPatch, stop: Stop) -> None:
    """Arrange that the turn is stopped exactly at `moment`."""
    store = here.society.store
    start_turns, advance = Scheduler.start_turns, store.advance

    def starting(scheduler: Scheduler, claims: Sequence[Claim]) -> None:
        if moment == "claimed" and claims:  # committed, but the scheduler does not know yet
            stop.now()
        start_turns(scheduler, claims)
        if moment == "started" and claims:  # its task has not run yet
            stop.now()

    def answering(request: ReceivedRequest) -> Reply:
        if moment == "requested":
            stop.now()
        if "two" in str(request.body["messages"][-1]["content"]):
            return "two and more"
        if moment == "claimed":
            return CustomReply(silent)  # the stop waits for the store; the turn must not end before
        return CustomReply(half_an_answer) if moment == "streaming" else "one and more"

    async def silent(_: ServerConnection) -> None:
        await stop.done

    async def half_an_answer(wire: ServerConnection) -> None:
        await wire.begin()
        await wire.event(chunk({"role": "assistant", "content": "one"}))
        await stop.done

    def on_draft(draft: LiveReply) -> None:
        if moment == "streaming" and draft.outcome is None:
            stop.now()

    async def advancing(*step: Any, **more: Any) -> Claim:
        if moment == "answered":
            stop.now()
        after = await advance(*step, **more)
        if moment == "written":
            stop.now()
        return after

    monkeypatch.setattr(Scheduler, "start_turns", starting)
    monkeypatch.setattr(store, "advance", advancing)
    here.server.default = answering
    here.society.live.subscribe(on_draft)


class Turns:
    """A handler whose turns end when the test says so, and a store that notes which claims are released."""

    claims_per_round = 10

    def __init__(self) -> None:
        self.ends: dict[int, asyncio.Future[bool]] = {}
        """By epoch."""
        self.stored: set[ClaimKey] = set()
        self.released: asyncio.Queue[ClaimKey] = asyncio.Queue()
        self.may_release = asyncio.Event()

    def start_turn(self, claim: Claim, slot: object) -> asyncio.Task[bool]:
        self.ends[claim.epoch] = asyncio.get_running_loop().create_future()

        async def run() -> bool:
            return await self.ends[claim.epoch]

        return asyncio.create_task(run())

    def register_worker(self, worker: object) -> None: ...

    async def wake_forgotten(self) -> None: ...

    async def claim_ready(self, *_: object, **__: object) -> Sequence[Claim]:
        return ()

    async def claims_of(self, worker: str) -> set[ClaimKey]:
        return set(self.stored)

    async def release_claims(self, worker: str, *, only: set[ClaimKey] | None = None, failed: bool) -> None:
        for key in only or ():
            self.stored.discard(key)
            self.released.put_nowait(key)
        await self.may_release.wait()

    def admits(self, agent_id: str, for_person: bool) -> bool:
        return True

    def is_full(self) -> bool:
        return False


async def test_the_claim_of_a_failed_turn_is_released_whatever_other_turns_do() -> None:
    turns = Turns()
    here: Any = turns
    scheduler = Scheduler(here, here, FakeClock(), Rules(), "w", here, here)
    scheduler.start()
    claims = [claim_of("ada", epoch) for epoch in (1, 2, 3)]
    for claim in claims:
        scheduler.reserve_slot(claim.agent_id, for_person=False)
    scheduler.start_turns(claims)
    async with asyncio.timeout(HANG_SECONDS):
        turns.ends[2].set_exception(RuntimeError("while the agent's earlier turn is still ending"))
        assert await turns.released.get() == ("ada", 2)
        turns.ends[3].set_exception(RuntimeError("while claims are being released"))
        await asyncio.sleep(0)
        turns.may_release.set()
        assert await turns.released.get() == ("ada", 3)
        turns.ends[1].set_result(True)
        await scheduler.stop_claiming()


async def test_the_claim_of_a_turn_that_a_library_has_cancelled_is_released() -> None:
    turns = Turns()
    turns.may_release.set()
    here: Any = turns
    scheduler = Scheduler(here, here, FakeClock(), Rules(), "w", here, here)
    scheduler.start()
    async with asyncio.timeout(HANG_SECONDS):
        scheduler.reserve_slot("ada", for_person=False)
        scheduler.start_turns([claim_of("ada", 1)])
        turns.ends[1].cancel()  # what the turn waits for, not the turn
        assert await turns.released.get() == ("ada", 1)
        await scheduler.stop_claiming()


async def test_a_committed_claim_whose_turn_has_not_started_is_not_released() -> None:
    turns, clock = Turns(), FakeClock()
    turns.may_release.set()
    here: Any = turns
    scheduler = Scheduler(here, here, clock, Rules(), "w", here, here)
    scheduler.start()
    async with asyncio.timeout(HANG_SECONDS):
        scheduler.reserve_slot("ada", for_person=False)
        scheduler.reserve_slot("bob", for_person=False)
        turns.stored |= {("ada", 1), ("bob", 1), ("eve", 1)}
        # The commit of another transaction is uncertain; those of ada and bob are being reported.
        scheduler.reconcile_claims()
        assert await turns.released.get() == ("eve", 1)
        scheduler.start_turns([claim_of("ada", 1)])
        scheduler.release_slots(["bob"])  # the report was lost
        await clock.advance(seconds=CLAIM_INTERVAL.total_seconds())
        assert await turns.released.get() == ("bob", 1)
        assert turns.stored == {("ada", 1)}
        turns.ends[1].set_result(True)
        await scheduler.stop_claiming()


def claim_of(agent_id: str, epoch: int) -> Claim:
    return Claim(agent_id=agent_id, epoch=epoch, step_no=0, turn_no=epoch, action=AskModel())
