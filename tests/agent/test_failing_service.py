"""What agents do while their service or the store fails, recovers, or is repaired during a request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from coterie.artifacts import Artifact
from coterie.errors import StoreUnavailable
from coterie.llm.gateway import FIRST_OPEN_SECONDS, MAX_FAILURES
from coterie.testing import Calls, FakeClock, Says, Status
from coterie.testing.model_server import CustomReply, ReceivedRequest, Reply, ServerConnection, chunk
from tests.agent.stage import stage
from tests.agent.tool_calls import HANG_SECONDS


class Held:
    """Holds each answer of the server until `may_end` is set."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    def __call__(self, request: ReceivedRequest) -> Reply:
        return CustomReply(self._play)

    async def _play(self, wire: ServerConnection) -> None:
        await self.may_end.wait()
        await wire.begin()
        await wire.event(chunk({"role": "assistant", "content": "back"}, "stop"))
        await wire.event("[DONE]")
        await wire.end()


AGENTS = [f"a{number}" for number in range(MAX_FAILURES)]
"""Their first requests fail, and open the circuit."""


async def test_all_agents_wait_while_one_request_finds_out_whether_the_service_works_again(tmp_path: Path) -> None:
    clock, held = FakeClock(), Held()
    agents = "".join(f"[agents.{agent}]\n" for agent in AGENTS)
    async with stage(tmp_path, agents=agents, clock=clock) as here, asyncio.timeout(HANG_SECONDS):
        here.server.script(*[Status(503, "not now")] * MAX_FAILURES)
        for agent in AGENTS:
            await here.say("hello", to=agent)
        for agent in AGENTS:
            await here.state(agent, "wait_retry")
        here.server.default = held
        await clock.advance(seconds=FIRST_OPEN_SECONDS + 2)
        await here.server.wait_for_request(MAX_FAILURES + 1)
        for _ in range(30):
            await clock.advance(seconds=2)
        held.may_end.set()

        assert await here.texts(len(AGENTS)) == ["back"] * len(AGENTS)


async def test_an_agent_is_not_blocked_by_an_error_of_the_service_as_it_was_before_a_reload(tmp_path: Path) -> None:
    may_refuse = asyncio.Event()

    async def refuse(wire: ServerConnection) -> None:
        await may_refuse.wait()
        await wire.respond(401, b"no")

    async with stage(tmp_path, apiKey="an-old-key") as here, asyncio.timeout(HANG_SECONDS):
        here.server.script(CustomReply(refuse))
        await here.say("hello")
        await here.server.wait_for_request()
        file = tmp_path / "llmservices.json"
        file.write_text(file.read_text().replace("an-old-key", "a-new-key"))
        await here.society.reload()
        may_refuse.set()

        assert await here.texts() == ["ok"]
        assert here.server.requests[-1].headers["authorization"] == "Bearer a-new-key"


async def test_an_outage_of_the_store_while_an_attachment_is_looked_up_is_no_crash_of_the_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, failures = FakeClock(), list[str]()
    async with stage(tmp_path, clock=clock) as here, asyncio.timeout(HANG_SECONDS):
        artifacts = here.society.store.artifacts
        kept = await here.society.artifacts.put(b"a plan", "plan.txt")

        async def fail_at_first(refs: Sequence[str]) -> Mapping[str, Artifact]:
            if len(failures) < 4:
                failures.extend(refs)
                raise StoreUnavailable("the database cannot be reached")
            return await artifacts(refs)

        def forward(request: ReceivedRequest) -> Reply:
            monkeypatch.setattr(here.society.store, "artifacts", fail_at_first)
            payload = {"text": "Here.", "attachments": [{"artifactRef": kept.ref}]}
            return Says(calls=(Calls("send_message", {"to": "user", "payload": payload}),))

        here.server.script(forward, "")
        await here.say("send it back", attachments=[kept.ref])
        heard = asyncio.create_task(here.texts())
        while not heard.done():
            await clock.advance(seconds=1)
            await asyncio.sleep(0)

        assert await heard == ["Here."]
