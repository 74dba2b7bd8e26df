"""The scheduler's door: a turn can be stopped from the moment it is claimed, and a stop ends no other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from coterie.agent.scheduler import Scheduler
from coterie.live import LiveReply
from coterie.testing.replies import CustomReply, ReceivedRequest, Reply, ServerConnection, chunk
from coterie.turn_store import Claim
from tests.agent.stage import Stage, stage

PATIENCE = 20
"""Seconds. Nothing waits that long; it only keeps what hangs from hanging the tests."""

Moment = Literal["claimed", "taken", "asked", "speaking", "answered", "written"]
SAID: dict[Moment, list[str]] = {
    "claimed": [],
    "taken": [],
    "asked": [],
    "speaking": ["one"],
    "answered": ["one and more"],
    "written": ["one and more"],
}
"""What is left of the answer to a turn that is stopped then."""


@pytest.mark.parametrize("moment", list(SAID))
async def test_whatever_moment_a_turn_is_stopped_at_it_ends_and_the_next_message_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: Moment
) -> None:
    async with stage(tmp_path) as here, asyncio.timeout(PATIENCE):
        stop = Stop(here)
        _at(moment, here, monkeypatch, stop)
        await here.say("one")
        was_at_work = await stop.came
        await here.state("ada", "idle")
        await here.say("two")

        assert was_at_work
        assert await here.texts(len(SAID[moment]) + 1) == [*SAID[moment], "two and more"]


class Stop:
    """Asked for once, as a door asks for it."""

    def __init__(self, here: Stage) -> None:
        self._society = here.society
        self._asking: asyncio.Task[None] | None = None
        self.came: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether it found a turn to end."""

    def now(self) -> None:
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(self._society.stop_turn("ada")))

    async def _ask(self, stopped: bool) -> None:
        self.came.set_result(stopped or await self._society.stop_waiting("ada"))


def _at(moment: Moment, here: Stage, monkeypatch: pytest.MonkeyPatch, stop: Stop) -> None:
    """Stop the turn exactly then."""
    store = here.society.store
    take, advance = Scheduler.start_turns, store.advance

    def taking(scheduler: Scheduler, claims: Sequence[Claim]) -> None:
        if moment == "claimed" and claims:  # that is written, and on its way to us
            stop.now()
        take(scheduler, claims)
        if moment == "taken" and claims:  # its task has yet to take its first step
            stop.now()

    def answering(request: ReceivedRequest) -> Reply:
        if moment == "asked":
            stop.now()
        if "two" in str(request.body["messages"][-1]["content"]):
            return "two and more"
        if moment == "claimed":
            return CustomReply(nothing_before)  # the stop has to wait for the store, and must not find the answer there
        return CustomReply(only_half) if moment == "speaking" else "one and more"

    async def nothing_before(_: ServerConnection) -> None:
        await stop.came

    async def only_half(wire: ServerConnection) -> None:
        await wire.begin()
        await wire.event(chunk({"role": "assistant", "content": "one"}))
        await stop.came

    def hearing(draft: LiveReply) -> None:
        if moment == "speaking" and draft.outcome is None:
            stop.now()

    async def advancing(*step: Any, **more: Any) -> Claim:
        if moment == "answered":
            stop.now()
        after = await advance(*step, **more)
        if moment == "written":
            stop.now()
        return after

    monkeypatch.setattr(Scheduler, "start_turns", taking)
    monkeypatch.setattr(store, "advance", advancing)
    here.server.default = answering
    here.society.live.subscribe(hearing)
