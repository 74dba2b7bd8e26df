"""Hundreds of agents that wait for one slow service do not delay agents of another service, nor the person."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coterie import Society
from coterie.llm.gateway import ModelGateway
from coterie.testing import ModelServer
from coterie.testing.model_server import CustomReply, ReceivedRequest, ServerConnection, chunk
from tests.agent.tool_calls import HANG_SECONDS, wait_until
from tests.engines import Engine, Postgres

WAITING_AGENTS = 320
"""More than `MAX_TURN_SLOTS` and the extra slots of the person together."""


class HeldServer(ModelServer):
    """A service that answers only after the test has released the request."""

    def __init__(self) -> None:
        super().__init__()
        self.default = self._hold
        self.asking: list[str] = []
        """The agents in the order of their requests."""
        self._released = asyncio.Semaphore(0)

    def release(self, count: int) -> None:
        for _ in range(count):
            self._released.release()

    def _hold(self, request: ReceivedRequest) -> CustomReply:
        self.asking.append(asking(request))

        async def play(wire: ServerConnection) -> None:
            await self._released.acquire()
            await wire.begin()
            await wire.event(chunk({"role": "assistant", "content": "answer"}, "stop"))
            await wire.event("[DONE]")
            await wire.end()

        return CustomReply(play)


def asking(request: ReceivedRequest) -> str:
    found = re.search(r"\(id: ([\w-]+)\)", request.body["messages"][0]["content"])
    assert found
    return found[1]


@dataclass
class BusyService:
    """Societies in which agents wait for the slow service."""

    slow: HeldServer
    quick: ModelServer
    societies: list[Society]
    waiting: list[str] = field(default_factory=list)

    async def fill(self, count: int = WAITING_AGENTS) -> None:
        """Send a message of an agent to `count` agents of the slow service."""
        self.waiting = [f"a{number:03}" for number in range(count)]
        sending = [
            self.societies[number % len(self.societies)].bus.send(sender="boss", to=one, payload={"text": "work"})
            for number, one in enumerate(self.waiting)
        ]
        await asyncio.gather(*sending)

    async def wait_for_answer(self, agent: str, society: Society) -> None:
        async for message in society.inbox():
            if message.sender == agent:
                return


@asynccontextmanager
async def open_busy_service(
    folder: Path, engine: Engine, *, processes: int = 1, max_requests: int = 8, count: int = WAITING_AGENTS
) -> AsyncIterator[BusyService]:
    slow_agents = "".join(f'[agents.a{number:03}]\nservice = "slow"\n' for number in range(count))
    more = '[agents.boss]\nservice = "quick"\n[agents.free]\nservice = "quick"\n[agents.late]\nservice = "slow"\n'
    async with HeldServer() as slow, ModelServer() as quick, AsyncExitStack() as stack:
        entries = [
            {"id": "slow", "baseURL": slow.base_url, "model": "m", "maxConcurrentRequests": max_requests},
            {"id": "quick", "baseURL": quick.base_url, "model": "m"},
        ]
        societies = []
        for number in range(processes):
            home = folder / f"home{number}"
            home.mkdir()
            store = f"[store]\nurl = {json.dumps(engine.url(folder))}\n" if isinstance(engine, Postgres) else ""
            (home / "coterie.toml").write_text(f"{slow_agents}{more}[shutdown]\ndrain_seconds = 0\n{store}")
            (home / "llmservices.json").write_text(json.dumps({"services": entries}))
            societies.append(await stack.enter_async_context(Society.open(home)))
        async with asyncio.timeout(HANG_SECONDS):
            yield BusyService(slow, quick, societies)


@pytest.mark.parametrize("max_requests", [8, 400])
async def test_an_agent_of_a_free_service_answers_while_hundreds_wait_for_another_service(
    engine: Engine, tmp_path: Path, max_requests: int
) -> None:
    """With a limit of 8 the agents wait for slots of the service; with 400 they wait for its answers."""
    async with open_busy_service(tmp_path, engine, max_requests=max_requests) as here:
        [society] = here.societies
        await here.fill()
        await here.slow.wait_for_request(min(max_requests, 250))

        await society.send(to="free", text="are you there?")
        await here.wait_for_answer("free", society)


async def test_both_processes_serve_agents_of_a_free_service(shared: Postgres, tmp_path: Path) -> None:
    async with open_busy_service(tmp_path, shared, processes=2, count=2 * WAITING_AGENTS) as here:
        await here.fill(2 * WAITING_AGENTS)
        await here.slow.wait_for_request(8)

        for number, society in enumerate(here.societies):
            await society.send(to="free" if number else "boss", text="are you there?")
            await here.wait_for_answer("free" if number else "boss", society)


@pytest.mark.slow
async def test_all_waiting_agents_are_served_once(engine: Engine, tmp_path: Path) -> None:
    async with open_busy_service(tmp_path, engine) as here:
        await here.fill()
        await here.slow.wait_for_request(8)
        here.slow.release(WAITING_AGENTS)
        await here.slow.wait_for_request(WAITING_AGENTS)

        assert sorted(here.slow.asking) == here.waiting


@pytest.mark.parametrize("processes", [1, 2])
async def test_the_message_of_the_person_is_served_before_waiting_agents(
    engine: Engine, tmp_path: Path, processes: int
) -> None:
    if processes > 1 and not isinstance(engine, Postgres):
        pytest.skip("one process on SQLite")
    async with open_busy_service(tmp_path, engine, processes=processes, max_requests=1) as here:
        await here.fill()
        await here.slow.wait_for_request(1)
        await here.societies[-1].send(to="late", text="urgent")
        # Any process may have claimed the turn.
        await wait_until(lambda: [_waits_for_person(one) for one in here.societies].count(True) == 1)
        if processes > 1:  # the process with the slot must know of the waiting request, through the database
            with engine.behind(tmp_path) as db:
                await wait_until(lambda: db.execute("SELECT sum(urgent) FROM places").fetchone() == (1,))
            others = [one for one in here.societies if not _waits_for_person(one)]
            await wait_until(lambda: all(_models(one).queue("slow").others_wait for one in others))

        here.slow.release(1)
        await here.slow.wait_for_request(2)
        assert here.slow.asking[1] == "late"


def _waits_for_person(society: Society) -> bool:
    return _models(society).count_waiting("slow", for_person=True) == 1


def _models(society: Society) -> ModelGateway:
    return society._require_runtime()._models
