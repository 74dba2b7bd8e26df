"""Limits stop agents that trigger each other without end, and other agents keep working."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import pytest

from coterie import Society
from coterie.errors import Lagged
from coterie.testing import ModelServer
from coterie.testing.model_server import Calls, ReceivedRequest, Reply, Says
from tests.agent.stage import Stage
from tests.engines import Engine, Postgres

HOPS = 6
FAMILY = 60
TIMEOUT_SECONDS = 120
"""Timeout in seconds; ends a test that hangs."""


def asking(request: ReceivedRequest) -> str:
    found = re.search(r"\(id: ([\w-]+)\)", request.body["messages"][0]["content"])
    assert found
    return found[1]


def may_act(request: ReceivedRequest) -> bool:
    """True if the last message of the request is not a tool result."""
    return bool(request.body["messages"][-1]["role"] == "user")


def to(name: str) -> Calls:
    return Calls("send_message", {"to": name, "payload": {"text": "and you?"}})


@asynccontextmanager
async def society(
    engine: Engine, folder: Path, answer: Callable[[ReceivedRequest], Reply], *, hops: int = HOPS
) -> AsyncIterator[Stage]:
    """A society of ada, bob, and carol, who takes no part in the cascade."""
    where = f"[store]\nurl = {json.dumps(engine.url(folder))}\n" if isinstance(engine, Postgres) else ""
    toml = f"{where}[limits]\nmax_hops = {hops}\n[agents.ada]\n[agents.bob]\n[agents.carol]\n"
    (folder / "coterie.toml").write_text(toml)
    async with ModelServer() as server, asyncio.timeout(TIMEOUT_SECONDS):
        services = [{"id": "main", "baseURL": server.base_url, "model": "m"}]
        (folder / "llmservices.json").write_text(json.dumps({"services": services}))
        server.default = lambda request: "here I am" if asking(request) == "carol" else answer(request)
        async with Society.open(folder) as opened:
            yield Stage(opened, server)
            assert server.refused == []


async def wait_until_idle(here: Stage) -> None:
    async def is_quiet() -> bool:
        states = [one.state for one in await here.society.store.agents(limit=10_000)]
        return all(one in ("idle", "paused") for one in states)

    while True:
        with suppress(Lagged):  # there are many events
            return await here.until(is_quiet)


async def carol_answers(here: Stage) -> None:
    await answered(here, await here.say("are you there?", to="carol"))


async def answered(here: Stage, asked: str) -> None:
    async with aclosing(here.society.inbox()) as inbox:
        async for message in inbox:
            if message.in_reply_to == asked:
                assert message.payload["text"] == "here I am"
                return


async def test_two_agents_that_write_to_each_other_are_stopped_by_the_hop_limit(engine: Engine, tmp_path: Path) -> None:
    def answer(request: ReceivedRequest) -> Reply:
        other = {"ada": "bob", "bob": "ada"}[asking(request)]
        return Says(calls=(to(other),)) if may_act(request) else "done"

    async with society(engine, tmp_path, answer) as here:
        await here.say("go")
        await carol_answers(here)
        await wait_until_idle(here)
        results = [row.text for name in ("ada", "bob") for row in await here.society.store.history(name)]

        assert any('"hop_limit"' in text for text in results)
        # Each message may cause a message and an answer, both a hop further; each takes two requests.
        assert len(here.server.requests) <= 2 * 2 ** (HOPS + 1)


async def test_agents_that_each_create_two_more_are_stopped_by_the_limit_of_descendants(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.agent.service.MAX_DESCENDANTS", FAMILY)

    def answer(request: ReceivedRequest) -> Reply:
        spawn = Calls("spawn_agent", {"role": "scout", "task": "make two more"})
        role = (Calls("create_role", {"name": "scout", "prompt": "x"}),) if asking(request) == "ada" else ()
        return Says(calls=(*role, spawn, spawn)) if may_act(request) else ""

    async with society(engine, tmp_path, answer, hops=32) as here:
        await here.say("go")
        await carol_answers(here)
        await wait_until_idle(here)
        agents = await here.society.store.agents(limit=10_000)
        await carol_answers(here)

        assert len(agents) == FAMILY + 4  # the person and the three configured agents


async def test_agents_that_answer_one_message_with_six_are_stopped_by_the_limits(
    engine: Engine, tmp_path: Path
) -> None:
    names = ("ada", "bob")

    def answer(request: ReceivedRequest) -> Reply:
        return Says(calls=tuple(to(name) for name in names for _ in range(3))) if may_act(request) else "done"

    async with society(engine, tmp_path, answer) as here:
        await here.say("go")
        await carol_answers(here)
        await wait_until_idle(here)
        await carol_answers(here)
        results = [row.text for name in names for row in await here.society.store.history(name)]

        assert any('"hop_limit"' in text for text in results)


async def test_while_all_agents_are_paused_no_turn_starts_even_after_a_restart(engine: Engine, tmp_path: Path) -> None:
    def answer(request: ReceivedRequest) -> Reply:
        other = {"ada": "bob", "bob": "ada"}[asking(request)]
        return Says(calls=(to(other),)) if may_act(request) else "done"

    async with society(engine, tmp_path, answer, hops=1_000_000) as here:
        await here.say("go")
        await here.server.wait_for_request(20)
        for name in ("ada", "bob", "carol"):
            await here.society.pause(name)
        await wait_until_idle(here)
        asked = len(here.server.requests)
        waits = await here.say("anybody?", to="carol")
        await here.society.stop()
        async with Society.open(tmp_path) as again:
            here.society = again
            await here.say("nobody?", to="ada")
            await again.resume("carol")
            await answered(here, waits)  # all agents that could be claimed were claimed

            assert len(here.server.requests) == asked + 1
            assert len(await again.waiting("ada")) >= 1
