"""MCP servers of coterie.toml in a society: calls by agents, exits and restarts."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from coterie.testing import FakeClock
from coterie.testing.model_server import Calls, Says
from tests.agent.mcp_harness import HttpServer
from tests.agent.stage import Stage, each, stage
from tests.agent.tool_calls import HANG_SECONDS

pytestmark = pytest.mark.slow

ADD = Says(calls=(Calls("demo__add", {"a": 1, "b": 2}),))
PID = Says(calls=(Calls("demo__pid"),))
DIE = Says(calls=(Calls("demo__die"),))
DIE_ONCE = Says(calls=(Calls("demo__die_once"),))


@pytest.fixture(autouse=True)
def long_start_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine a society still waits for its servers before it starts turns.

    Calls do not wait for a server: the clock of these tests stands still.
    """
    monkeypatch.setattr("coterie.agent_runtime.MCP_START_TIMEOUT", timedelta(minutes=10))
    monkeypatch.setattr("coterie.agent.mcp.MAX_WAIT", timedelta(0))


@pytest.fixture
async def child(tmp_path: Path, script: Path, clock: FakeClock) -> AsyncIterator[Stage]:
    """Ada has the tools of the server; bob has no tools."""
    entry = f'[mcp.demo]\ncommand = "{sys.executable}"\nargs = ["{script}"]\n'
    async with stage(tmp_path, agents=f"[agents.ada]\n[agents.bob]\ntools = []\n{entry}", clock=clock) as here:
        yield here


@pytest.fixture
async def over_http(tmp_path: Path, http: HttpServer, clock: FakeClock) -> AsyncIterator[Stage]:
    agents = f'[agents.ada]\ntools = ["demo__*"]\n[agents.bob]\n[mcp.demo]\nurl = "{http.entry.url}"\n'
    async with stage(tmp_path, agents=agents, clock=clock) as here:
        yield here


async def results(here: Stage, *replies: Says) -> list[str]:
    """Let ada's model make these calls one after the other; return their results."""
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


async def test_an_agent_calls_tools_of_a_child_server_and_their_effects_are_stored(
    child: Stage, tmp_path: Path
) -> None:
    sum_, pid, alive = await results(child, ADD, PID, DIE_ONCE)
    assert (sum_, pid.isdigit(), alive) == (
        "3",
        True,
        "alive",
    )  # the server exits during the third call, which is idempotent
    assert effects(tmp_path) == {"demo__add": "pure", "demo__pid": "unsafe", "demo__die_once": "idempotent"}


async def test_an_agent_calls_a_tool_of_an_http_server(over_http: Stage, tmp_path: Path) -> None:
    assert await results(over_http, ADD) == ["3"]
    assert effects(tmp_path) == {"demo__add": "pure"}


async def test_the_tools_of_a_server_are_offered_only_to_agents_that_may_use_them(child: Stage) -> None:
    child.server.default = each(ada=[Says("yes")], bob=[Says("yes")])
    offered = dict[str, set[str]]()
    for name in ("ada", "bob"):
        await child.say("what can you do?", to=name)
        await child.heard(len(offered) + 1)
        offered[name] = {tool["function"]["name"] for tool in child.server.requests[-1].body["tools"]}
    assert "demo__add" in offered["ada"] and offered["bob"] == {"send_message"}


async def test_a_child_server_that_exits_is_an_error_result_and_restarts_for_the_next_call(
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


async def test_calls_to_a_stopped_http_server_are_error_results_until_it_is_back(
    over_http: Stage, http: HttpServer, clock: FakeClock
) -> None:
    assert await results(over_http, ADD) == ["3"]
    http.stop()
    lost, absent = await results(over_http, PID, ADD)
    assert error_in(lost).startswith("mcp_") and error_in(absent) == "mcp_unavailable"

    http.start()
    await clock.advance(minutes=1)
    assert await results(over_http, ADD) == ["3"]


@pytest.fixture
async def with_sessions(tmp_path: Path, sdk_script: Path, clock: FakeClock) -> AsyncIterator[Stage]:
    server = HttpServer(sdk_script, "404")
    agents = f'[agents.ada]\n[mcp.demo]\nurl = "{server.entry.url}"\n'
    try:
        async with stage(tmp_path, agents=agents, clock=clock) as here:
            yield here
    finally:
        server.close()


async def test_what_a_server_asks_becomes_questions_with_quick_replies(with_sessions: Stage) -> None:
    here = with_sessions
    here.server.default = each(ada=[Says(calls=(Calls("demo__order"),)), Says("ordered")])
    await here.say("order")
    [size] = await here.heard(1)
    assert size.sender == "ada" and "The tool server demo asks: What shall I order?" in size.payload["text"]
    assert size.payload["quickReplies"] == ["small", "large", "Decline"]
    await here.say("large", in_reply_to=size.id, option=1)
    count = (await here.heard(2))[1]
    assert "How many?" in count.payload["text"] and count.payload["quickReplies"] == ["Decline"]
    await here.say("many")
    assert "expected a whole number" in (await here.texts(3))[2]
    await here.say("3")
    assert (await here.texts(4))[3] == "ordered"
    result = next(one for one in here.server.requests[-1].body["messages"] if one["role"] == "tool")
    assert result["content"] == 'accept {"size": "large", "count": 3}'


async def test_a_declined_question_is_declined_to_the_server(with_sessions: Stage) -> None:
    here = with_sessions
    here.server.default = each(ada=[Says(calls=(Calls("demo__order"),)), Says("as you wish")])
    await here.say("order")
    await here.heard(1)
    await here.say("decline")
    await here.texts(2)
    result = next(one for one in here.server.requests[-1].body["messages"] if one["role"] == "tool")
    assert result["content"].startswith("decline")


async def test_a_society_starts_without_its_mcp_server_and_connects_later(
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
        async with asyncio.timeout(HANG_SECONDS):
            while await results(here, ADD) != ["3"]:
                await asyncio.sleep(0.1)  # no event says that the server is connected
