"""MCP servers named in coterie.toml, in a whole society: agents call them, they die, they come back."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from coterie.testing import FakeClock
from coterie.testing.replies import Calls, Says
from tests.agent.mcp_room import HttpServer, until
from tests.agent.stage import Stage, each, stage

pytestmark = pytest.mark.slow

ADD = Says(calls=(Calls("demo__add", {"a": 1, "b": 2}),))
PID = Says(calls=(Calls("demo__pid"),))
DIE = Says(calls=(Calls("demo__die"),))
DIE_ONCE = Says(calls=(Calls("demo__die_once"),))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A society begins when its servers are there or known to be absent, however busy the machine is."""
    monkeypatch.setattr("coterie.agent_runtime.MCP_START_TIMEOUT", timedelta(minutes=10))


@pytest.fixture
async def child(tmp_path: Path, script: Path, clock: FakeClock) -> AsyncIterator[Stage]:
    """Ada has the server's tools; bob may use no tools."""
    entry = f'[mcp.demo]\ncommand = "{sys.executable}"\nargs = ["{script}"]\n'
    async with stage(tmp_path, agents=f"[agents.ada]\n[agents.bob]\ntools = []\n{entry}", clock=clock) as here:
        yield here


@pytest.fixture
async def net(tmp_path: Path, http: HttpServer, clock: FakeClock) -> AsyncIterator[Stage]:
    agents = f'[agents.ada]\ntools = ["demo__*"]\n[agents.bob]\n[mcp.demo]\nurl = "{http.entry.url}"\n'
    async with stage(tmp_path, agents=agents, clock=clock) as here:
        yield here


async def results(here: Stage, *replies: Says) -> list[str]:
    """Ada's model makes these calls, one after the other, and then speaks: what it was told each time."""
    before, asked = len(here.server.requests), len(await here.society.waiting("user"))
    here.server.default = each(ada=[*replies, Says("done")])
    await here.say("go on")
    await here.heard(asked + 1)
    after = [request.body["messages"][-1] for request in here.server.requests[before + 1 :]]
    assert [message["role"] for message in after] == ["tool"] * len(replies)
    return [str(message["content"]) for message in after]


def error_in(result: str) -> str:
    return str(json.loads(result)["error"])


def effects(folder: Path) -> dict[str, str]:
    with closing(sqlite3.connect(f"file:{folder / 'data' / 'coterie.db'}?mode=ro", uri=True)) as db:
        return dict(db.execute("SELECT name, effect FROM calls"))


async def test_an_agent_reads_what_a_tool_of_a_child_server_says_and_the_plan_knows_what_it_may_do_twice(
    child: Stage, tmp_path: Path
) -> None:
    sum_, pid, alive = await results(child, ADD, PID, DIE_ONCE)
    assert (sum_, pid.isdigit(), alive) == ("3", True, "alive")  # it died on the third, which may be repeated
    assert effects(tmp_path) == {"demo__add": "pure", "demo__pid": "unsafe", "demo__die_once": "idempotent"}


async def test_an_agent_reads_what_a_tool_of_an_http_server_says(net: Stage, tmp_path: Path) -> None:
    assert await results(net, ADD) == ["3"]
    assert effects(tmp_path) == {"demo__add": "pure"}


async def test_only_who_may_use_them_is_told_of_a_servers_tools(child: Stage) -> None:
    child.server.default = each(ada=[Says("yes")], bob=[Says("yes")])
    offered = dict[str, set[str]]()
    for name in ("ada", "bob"):
        await child.say("what can you do?", to=name)
        await child.heard(len(offered) + 1)
        offered[name] = {tool["function"]["name"] for tool in child.server.requests[-1].body["tools"]}
    assert "demo__add" in offered["ada"] and offered["bob"] == {"send_message"}


async def test_a_child_server_that_dies_is_an_error_the_model_reads_and_is_there_again_for_the_next_call(
    child: Stage, script: Path, clock: FakeClock
) -> None:
    (before,) = await results(child, PID)
    died, after = await results(child, DIE, PID)
    assert error_in(died) == "mcp_lost" and "verify" in died
    assert after.isdigit() and after != before

    script.rename(script.with_suffix(".away"))
    died, absent = await results(child, DIE, ADD)
    assert (error_in(died), error_in(absent)) == ("mcp_lost", "mcp_unavailable")

    script.with_suffix(".away").rename(script)
    await clock.advance(seconds=1)
    assert await results(child, ADD) == ["3"]


async def test_an_http_server_that_is_gone_is_an_error_the_model_reads_until_it_is_back(
    net: Stage, http: HttpServer, clock: FakeClock
) -> None:
    assert await results(net, ADD) == ["3"]
    http.stop()
    lost, absent = await results(net, PID, ADD)
    assert error_in(lost).startswith("mcp_") and error_in(absent) == "mcp_unavailable"

    http.start()
    await clock.advance(minutes=1)
    assert await results(net, ADD) == ["3"]


async def test_a_society_whose_server_is_not_there_starts_and_works_and_finds_it_later(
    tmp_path: Path, script: Path, clock: FakeClock
) -> None:
    script.rename(script.with_suffix(".away"))
    entry = f'[mcp.demo]\ncommand = "{sys.executable}"\nargs = ["{script}"]\n'
    async with stage(tmp_path, agents=f"[agents.ada]\n{entry}", clock=clock) as here:
        (unknown,) = await results(here, ADD)
        assert error_in(unknown) == "unknown_tool"
        assert await here.texts() == ["done"]
        script.with_suffix(".away").rename(script)
        await clock.advance(minutes=2)
        await until(lambda: "demo" in here.society._require_runtime()._mcp.connected_ids)
        assert await results(here, ADD) == ["3"]
