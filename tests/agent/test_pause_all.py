"""`pause_all`: no turn, request or tool call begins after the pause is acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coterie import Society
from coterie.stores.sql.rows import Connection
from coterie.testing import Calls, ModelServer, Says
from coterie.testing.model_server import ReceivedRequest, Reply
from tests.agent.stage import Bell, stage
from tests.agent.tool_calls import wait_until
from tests.engines import Engine, Postgres

PARENTS, CHILDREN_EACH = 15, 40
MAX_REQUESTS = 32
CHILDREN = "FROM agents WHERE parent IS NOT NULL"
EPOCHS = "SELECT id, epoch FROM agents"
"""Only a claim increments the epoch."""
AT_WORK = "SELECT count(*) FROM agents WHERE state IN ('llm', 'tools') AND worker IS NOT NULL"


@contextlib.asynccontextmanager
async def open_societies(engine: Engine, folder: Path, server: ModelServer) -> AsyncIterator[list[Society]]:
    """One process on SQLite, two on PostgreSQL."""
    shared = isinstance(engine, Postgres)
    store = f"url = {json.dumps(engine.url(folder))}\n" if isinstance(engine, Postgres) else 'durability = "relaxed"\n'
    agents = "".join(f"[agents.p{n}]\n" for n in range(PARENTS))
    service = {"id": "main", "baseURL": server.base_url, "model": "m", "maxConcurrentRequests": MAX_REQUESTS}
    async with contextlib.AsyncExitStack() as stack:
        societies = []
        for name in ("one", "two") if shared else ("one",):
            home = folder / name
            home.mkdir()
            (home / "coterie.toml").write_text(f"[store]\n{store}[shutdown]\ndrain_seconds = 0\n{agents}")
            (home / "llmservices.json").write_text(json.dumps({"services": [service]}))
            societies.append(await stack.enter_async_context(Society.open(home)))
        yield societies


def answer(request: ReceivedRequest, gate: asyncio.Event) -> Reply:
    """A parent spawns children, each with a task. Children answer when the gate is open."""
    asking = re.search(r"\(id: ([\w-]+)\)", request.body["messages"][0]["content"])
    assert asking is not None
    if not re.fullmatch(r"p\d+", asking[1]):
        return Says(text="ok", gate=gate)
    if len(request.body["messages"]) > 2:
        return "ok"
    role = Calls("create_role", {"name": f"role-{asking[1]}", "prompt": "You help."})
    children = [
        Calls("spawn_agent", {"role": f"role-{asking[1]}", "id": f"{asking[1]}-{n}", "task": "work"})
        for n in range(CHILDREN_EACH)
    ]
    return Says(calls=(role, *children))


async def wait_until_zero(society: Society, db: Connection, count: str) -> None:
    """Wait until the query `count` returns 0; checked after every event."""
    async with society.bus.watch() as watcher:
        while db.execute(count).fetchone()[0]:
            await anext(watcher)


@pytest.mark.slow
async def test_no_turn_begins_after_pause_all_while_agents_are_being_spawned(engine: Engine, tmp_path: Path) -> None:
    async with ModelServer() as server:
        gate = asyncio.Event()
        server.default = lambda request: answer(request, gate)
        async with open_societies(engine, tmp_path, server) as societies:
            first, last = societies[0], societies[-1]
            with engine.behind(tmp_path if isinstance(engine, Postgres) else tmp_path / "one" / "data") as db:
                for n in range(PARENTS):
                    await first.send(to=f"p{n}", text="go")
                await wait_until_zero(first, db, f"SELECT CASE WHEN count(*) < 60 THEN 1 ELSE 0 END {CHILDREN}")

                await last.pause_all()
                before = dict(db.execute(EPOCHS).fetchall())
                # Until the other process learns of the pause, it may send requests that it had decided on.
                await wait_until(lambda: all(society.store.seen_paused for society in societies))
                gate.set()
                for society in societies:
                    await wait_until_zero(society, db, AT_WORK)
                after = dict(db.execute(EPOCHS).fetchall())

                assert 60 <= len(after) - 1 - PARENTS < PARENTS * CHILDREN_EACH, (
                    "the pause did not come while children were spawned"
                )
                assert after == {one: before.get(one, 0) for one in after}, "an agent was claimed during the pause"
                assert len(server.requests) <= PARENTS + MAX_REQUESTS, "a request was sent during the pause"
                agents = [one for one in await last.store.agents(limit=2_000) if one.kind == "agent"]
                assert {one.state for one in agents} == {"paused"}

                await last.resume_all()
                await wait_until_zero(first, db, f"SELECT count(*) {CHILDREN} AND turn_no = 0")
            assert [broken async for broken in first.store.violations()] == []


async def test_a_paused_plan_stops_before_its_next_call_and_continues_there(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        Bell.may_end.clear()
        here.server.script(Says(calls=(Calls("ring", {"name": "one"}), Calls("ring", {"name": "two"}))), "done")
        await here.say("ring both")
        await Bell.rang.wait()
        await here.society.pause_all()
        Bell.may_end.set()
        await here.state("ada", "paused")
        assert (Bell.rings, len(here.server.requests)) == (["one"], 1)

        await here.society.resume_all()
        assert await here.texts() == ["done"]
        assert Bell.rings == ["one", "two"], "a call ran twice"
        results = [
            message["content"] for message in here.server.requests[1].body["messages"] if message["role"] == "tool"
        ]
        assert results == ["one rang", "two rang"]


async def test_a_running_call_ends_during_the_pause_and_messages_wait(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        Bell.may_end.clear()
        here.server.script(Says(calls=(Calls("ring", {"name": "one"}),)), "done", "hello")
        await here.say("ring")
        await Bell.rang.wait()
        await here.society.pause_all()
        await here.say("and bob?", to="bob")
        Bell.may_end.set()
        await here.state("ada", "paused")
        await here.state("bob", "paused")
        assert len(here.server.requests) == 1

        await here.society.resume_all()
        assert sorted(await here.texts(2)) == ["done", "hello"]


async def test_turns_that_wait_for_a_slot_of_their_service_send_no_request_while_paused(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with stage(tmp_path, agents="".join(f"[agents.a{n}]\n" for n in range(5)), maxConcurrentRequests=1) as here:
        here.server.script(Says(text="first", gate=gate))
        for n in range(5):
            await here.say("hello", to=f"a{n}")
        await here.server.wait_for_request(1)
        for n in range(5):
            await here.state(f"a{n}", "llm")

        await here.society.pause_all()

        async def all_but_one_paused() -> bool:
            agents = await here.society.store.agents()
            return [one.state for one in agents if one.kind == "agent"].count("paused") == 4

        await here.until(all_but_one_paused)
        gate.set()
        for n in range(5):
            await here.state(f"a{n}", "paused")
        assert len(here.server.requests) == 1

        await here.society.resume_all()
        assert sorted(await here.texts(5)) == ["first", "ok", "ok", "ok", "ok"]
