"""A crowd that waits for one slow service keeps nobody else waiting, and the person's messages go first."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coterie import Society
from coterie.llm.gateway import ModelGateway
from coterie.testing import ModelServer
from coterie.testing.model_server import CustomReply, ReceivedRequest
from coterie.testing.replies import ServerConnection, chunk
from tests.engines import Engine, Postgres

CROWD = 320
PATIENCE = 60
"""Seconds. Nothing waits that long; it only keeps a hang from lasting for ever."""


class HeldServer(ModelServer):
    """A service that answers a request only after the test has released it."""

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
            await wire.event(chunk({"role": "assistant", "content": "at last"}, "stop"))
            await wire.event("[DONE]")
            await wire.end()

        return CustomReply(play)


def asking(request: ReceivedRequest) -> str:
    found = re.search(r"\(id: ([\w-]+)\)", request.body["messages"][0]["content"])
    assert found
    return found[1]


@dataclass
class Place:
    slow: HeldServer
    quick: ModelServer
    societies: list[Society]
    crowd: list[str] = field(default_factory=list)

    async def fill(self, count: int = CROWD) -> None:
        """Agents write to so many agents of the slow service."""
        self.crowd = [f"a{number:03}" for number in range(count)]
        sending = [
            self.societies[number % len(self.societies)].bus.send(sender="boss", to=one, payload={"text": "work"})
            for number, one in enumerate(self.crowd)
        ]
        await asyncio.gather(*sending)

    async def answer_of(self, agent: str, society: Society) -> None:
        async for message in society.inbox():
            if message.sender == agent:
                return


@asynccontextmanager
async def crowded(
    folder: Path, engine: Engine, *, processes: int = 1, at_once: int = 8, count: int = CROWD
) -> AsyncIterator[Place]:
    crowd = "".join(f'[agents.a{number:03}]\nservice = "slow"\n' for number in range(count))
    more = '[agents.boss]\nservice = "quick"\n[agents.free]\nservice = "quick"\n[agents.late]\nservice = "slow"\n'
    async with HeldServer() as slow, ModelServer() as quick, AsyncExitStack() as stack:
        entries = [
            {"id": "slow", "baseURL": slow.base_url, "model": "m", "maxConcurrentRequests": at_once},
            {"id": "quick", "baseURL": quick.base_url, "model": "m"},
        ]
        societies = []
        for number in range(processes):
            home = folder / f"home{number}"
            home.mkdir()
            store = f"[store]\nurl = {json.dumps(engine.url(folder))}\n" if isinstance(engine, Postgres) else ""
            (home / "coterie.toml").write_text(f"{crowd}{more}[shutdown]\ndrain_seconds = 0\n{store}")
            (home / "llmservices.json").write_text(json.dumps({"services": entries}))
            societies.append(await stack.enter_async_context(Society.open(home)))
        async with asyncio.timeout(PATIENCE):
            yield Place(slow, quick, societies)


@pytest.mark.parametrize("at_once", [8, 400])
async def test_an_agent_whose_own_service_is_free_is_answered_before_any_of_the_crowd(
    engine: Engine, tmp_path: Path, at_once: int
) -> None:
    """With 8 at once the crowd waits in the queue of its service; with 400 it waits for the answers."""
    async with crowded(tmp_path, engine, at_once=at_once) as here:
        [society] = here.societies
        await here.fill()
        await here.slow.wait_for_request(min(at_once, 250))

        await society.send(to="free", text="are you there?")
        await here.answer_of("free", society)


async def test_two_processes_serve_the_free_agent_whichever_of_them_gets_the_message(
    shared: Postgres, tmp_path: Path
) -> None:
    async with crowded(tmp_path, shared, processes=2, count=2 * CROWD) as here:
        await here.fill(2 * CROWD)
        await here.slow.wait_for_request(8)

        for number, society in enumerate(here.societies):
            await society.send(to="free" if number else "boss", text="are you there?")
            await here.answer_of("free" if number else "boss", society)


async def test_the_whole_crowd_is_served_in_the_end_each_once_and_never_more_at_a_time(
    engine: Engine, tmp_path: Path
) -> None:
    async with crowded(tmp_path, engine) as here:
        await here.fill()
        await here.slow.wait_for_request(8)
        here.slow.release(CROWD)
        await here.slow.wait_for_request(CROWD)

        assert sorted(here.slow.asking) == here.crowd


@pytest.mark.parametrize("processes", [1, 2])
async def test_the_persons_message_is_served_before_the_agents_that_wait(
    engine: Engine, tmp_path: Path, processes: int
) -> None:
    if processes > 1 and not isinstance(engine, Postgres):
        pytest.skip("one process on SQLite")
    async with crowded(tmp_path, engine, processes=processes, at_once=1) as here:
        await here.fill()
        await here.slow.wait_for_request(1)
        await here.societies[-1].send(to="late", text="me first")
        await _until(lambda: _models(here.societies[-1]).count_waiting("slow", for_person=True) == 1)
        if processes > 1:  # the request is in the database, and the process that has the slot will look there
            with engine.behind(tmp_path) as db:
                await _until(lambda: db.execute("SELECT sum(urgent) FROM places").fetchone() == (1,))
            await _until(lambda: all(_models(one).queue("slow").others_wait for one in here.societies[:-1]))

        here.slow.release(1)
        await here.slow.wait_for_request(2)
        assert here.slow.asking[1] == "late"


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def _models(society: Society) -> ModelGateway:
    return society._require_runtime()._models
