"""Agents with much mail: one request at a time, every message read once and in order, plans still run."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.testing import Calls, ModelServer, Says
from coterie.testing.model_server import CustomReply, ReceivedRequest, Reply, ServerConnection, send_reply
from tests.agent.stage import Bell, Stage, stage

from .harness import ForkServer

SPOKEN = re.compile(r"^word (\d+)$", re.M)
MAX_GROWTH_MB = 150
MAX_BATCHES = 60


class RecordingModel:
    """Slow model that records the texts it gets and the number of concurrent requests."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.seen: list[int] = []
        """The words in the newest request."""
        self.problems: list[str] = []
        self.requests = self.at_once = self.most_at_once = 0

    def __call__(self, request: ReceivedRequest) -> Reply:
        return CustomReply(lambda wire: self._answer(request, wire))

    async def _answer(self, request: ReceivedRequest, wire: ServerConnection) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.requests += 1
        self._look(request.body["messages"])
        await asyncio.sleep(self._seconds)
        await send_reply("noted", request, wire)
        self.at_once -= 1

    def _look(self, messages: list[dict[str, Any]]) -> None:
        seen = [
            int(word)
            for message in messages
            if message["role"] == "user"
            for word in SPOKEN.findall(message["content"])
        ]
        if seen[: len(self.seen)] != self.seen:
            self.problems.append(f"request {self.requests} does not begin with what the last one had")
        if len(seen) == len(self.seen):
            self.problems.append(f"request {self.requests} brings nothing new")
        self.seen = seen


async def burst(server: ForkServer, folder: Path, count: int) -> tuple[dict[str, Any], RecordingModel]:
    """Send `count` messages to an agent from another process while the agent works."""
    recorder = RecordingModel(0.02)
    async with ModelServer() as model:
        model.default = recorder
        (folder / "coterie.toml").write_text(f"[limits]\nmailbox = {count}\n[agents.ada]\n")
        services = {"services": [{"id": "main", "baseURL": model.base_url, "model": "m", "timeout": 60_000}]}
        (folder / "llmservices.json").write_text(json.dumps(services))
        report = await asyncio.to_thread(server.run, "burst", folder, count=count)
        assert model.refused == []
    assert "returned" in report, report
    return report["returned"], recorder


def assert_one_sequence(report: dict[str, Any], recorder: RecordingModel, count: int) -> None:
    assert recorder.problems == []
    assert recorder.most_at_once == 1
    assert recorder.seen == list(range(count))
    assert recorder.requests <= MAX_BATCHES
    assert report["violations"] == []
    assert report["answers"] == recorder.requests


async def test_a_burst_to_a_working_agent_is_read_once_and_in_order_by_one_request_at_a_time(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    report, recorder = await burst(fork_server, tmp_path, 500)

    assert_one_sequence(report, recorder, 500)
    assert report["grown_mb"] < MAX_GROWTH_MB, report


@pytest.mark.full
async def test_10000_messages_to_a_working_agent_are_read_once_and_in_order_in_bounded_memory(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    report, recorder = await burst(fork_server, tmp_path, 10_000)

    assert_one_sequence(report, recorder, 10_000)
    assert report["grown_mb"] < MAX_GROWTH_MB, report


# Interruptions

RING = Calls("ring", {"name": "x"})


def interrupted(here: Stage, speak: Callable[[], Awaitable[object]], times: int) -> Callable[[ReceivedRequest], Reply]:
    """Ada's model plans a call at each request; during the first `times` requests a message arrives."""
    asked = Counter[str]()

    def answer(request: ReceivedRequest) -> Reply:
        async def play(wire: ServerConnection) -> None:
            asked["plans"] += 1
            if asked["plans"] <= times:
                await speak()
            await send_reply(Says(calls=(RING,)), request, wire)

        return "done" if request.body["messages"][-1]["role"] == "tool" or Bell.rings else CustomReply(play)

    return answer


async def test_constant_messages_of_an_agent_cannot_keep_another_from_running_its_plan(tmp_path: Path) -> None:
    async with stage(tmp_path, agents="[interruption]\nmax_withdrawals = 3\n[agents.ada]\n[agents.bob]\n") as here:
        here.server.default = interrupted(here, lambda: here.say("listen!", sender="bob"), times=1_000)
        await here.say("ring, please")
        assert (await here.texts())[0] == "done"
        assert Bell.rings == ["x"]
        roles = [role for role, _ in await here.history()]
        assert roles[:7] == ["user", "user", "user", "user", "assistant", "tool", "user"]


async def test_messages_of_the_person_withdraw_the_plan_every_time(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.default = interrupted(here, lambda: here.say("not yet"), times=12)
        await here.say("ring, please")
        assert (await here.texts())[0] == "done"
        assert len(here.server.requests) == 14
        assert [role for role, _ in await here.history()] == ["user"] * 13 + ["assistant", "tool", "assistant"]


async def test_a_message_of_the_person_withdraws_a_plan_that_agents_can_no_longer_withdraw(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:

        async def both() -> None:
            await here.say("listen!", sender="bob")
            if len(here.server.requests) == 4:  # messages of bob can no longer withdraw this plan
                await here.say("stop it")

        here.server.default = interrupted(here, both, times=4)
        await here.say("ring, please")
        await here.server.wait_for_request(5)
        assert Bell.rings == []
        await here.heard()
        assert Bell.rings == ["x"]
