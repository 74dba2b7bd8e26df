"""MCP servers as tools, against real ones made with the SDK: as a child process, and over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from coterie.agent.mcp import tool_name
from coterie.agent.tools import NAME
from coterie.config import McpEntry
from coterie.testing import FakeClock
from tests.agent.mcp_room import HttpServer, Room, as_child, error_of, until
from tests.engines import Engine

pytestmark = pytest.mark.slow


@pytest.fixture
def engine() -> Engine:
    """A server has nothing to do with the store: one kind is enough."""
    return Engine()


async def test_a_child_knows_nothing_of_our_environment_but_what_it_needs(
    room: Room, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GREETING", "a secret")
    await room.add(as_child(script)).connect()
    assert (await room.call("demo__greeting")).text == "none"


async def test_a_server_that_died_while_nobody_called_is_there_again_for_the_next_call(
    room: Room, script: Path
) -> None:
    servers = room.add(as_child(script))
    await servers.connect()
    first = int((await room.call("demo__pid")).text)
    os.kill(first, signal.SIGKILL)
    await until(lambda: servers.connected == [])
    again = await room.call("demo__pid")
    assert again.ok and int(again.text) != first


async def test_a_server_that_dies_during_an_unsafe_call_leaves_its_outcome_unknown_and_comes_back(
    room: Room, script: Path
) -> None:
    await room.add(as_child(script)).connect()
    assert error_of(await room.call("demo__die")).startswith("mcp_lost: the MCP server demo went away during the call")
    assert (await room.call("demo__add", a=1, b=1)).text == "2"
    assert script.with_name("lives").read_text() == "died\n"


async def test_a_server_that_says_no_is_not_taken_for_one_that_went_away(room: Room, script: Path) -> None:
    await room.add(as_child(script)).connect()
    first = (await room.call("demo__pid")).text
    assert error_of(await room.call("demo__refuse")) == "mcp_error: the MCP server demo says: not on a Sunday"
    assert (await room.call("demo__pid")).text == first


async def test_a_call_that_may_be_repeated_is_repeated_when_the_server_dies_on_it(room: Room, script: Path) -> None:
    await room.add(as_child(script)).connect()
    assert (await room.call("demo__die_once")).text == "alive"


async def test_a_server_that_does_not_come_back_is_an_error_result_and_is_left_in_peace_for_a_while(
    room: Room, script: Path, clock: FakeClock
) -> None:
    await room.add(as_child(script)).connect()
    script.rename(script.with_suffix(".away"))
    assert "mcp_lost" in error_of(await room.call("demo__die"))

    assert error_of(await room.call("demo__add", a=1, b=1)).startswith("mcp_unavailable: the MCP server demo cannot be")
    script.with_suffix(".away").rename(script)
    assert "is not there" in error_of(await room.call("demo__add", a=1, b=1))
    assert "next try in 1 s" in error_of(await room.call("demo__add", a=1, b=1))
    await clock.advance(seconds=1)
    assert (await room.call("demo__add", a=1, b=1)).text == "2"


async def test_each_try_that_fails_makes_the_rest_longer_up_to_a_minute(room: Room, clock: FakeClock) -> None:
    servers = room.add(McpEntry(id="gone", command="/nothing/of/the/kind"))
    rests = []
    for _ in range(8):
        await servers.connect()
        [problem] = await servers.connect()
        rests.append(int(problem.message.split("next try in ")[1].split(" s")[0]))
        await clock.advance(seconds=rests[-1])
    assert rests == [1, 2, 4, 8, 16, 32, 60, 60]


async def test_an_http_server_that_went_away_is_an_error_result_until_it_is_back(
    room: Room, http: HttpServer, clock: FakeClock
) -> None:
    await room.add(http.entry).connect()
    http.stop()
    assert error_of(await room.call("demo__pid")).startswith("mcp_")
    assert error_of(await room.call("demo__add", a=1, b=1)).startswith("mcp_unavailable")
    http.start()
    await clock.advance(minutes=1)
    assert (await room.call("demo__add", a=1, b=1)).text == "2"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (McpEntry(id="gone", command="/nothing/of/the/kind"), "No such file or directory"),
        (McpEntry(id="gone", command="true"), "cannot be reached: Connection closed"),
        (McpEntry(id="gone", url="http://127.0.0.1:9/mcp"), "cannot be reached: All connection attempts failed"),
        (McpEntry(id="gone", url="nonsense"), "cannot be reached: "),
        (McpEntry(id="gone"), "the entry names neither a command nor a url"),
    ],
)
async def test_a_server_that_is_not_there_is_a_problem_of_its_own(room: Room, entry: McpEntry, words: str) -> None:
    [problem] = await room.add(entry).connect()
    assert problem.place == "coterie.toml: mcp.gone" and words in problem.message and not problem.fatal
    assert room.names() == []


async def test_a_server_that_never_answers_is_given_up_after_a_time(room: Room) -> None:
    silent = McpEntry(id="gone", command="sleep", args=("60",))
    [problem] = await room.add(silent, start=timedelta(seconds=0.3)).connect()
    assert "did not tell its tools within 0.3 s" in problem.message


async def test_one_server_that_is_not_there_keeps_no_other_away(room: Room, script: Path) -> None:
    problems = await room.add(McpEntry(id="gone", command="/nothing/of/the/kind"), as_child(script)).connect()
    assert len(problems) == 1 and (await room.call("demo__add", a=1, b=1)).ok


async def test_many_calls_that_meet_a_dead_server_start_it_once(room: Room, script: Path) -> None:
    servers = room.add(as_child(script))
    await servers.connect()
    os.kill(int((await room.call("demo__pid")).text), signal.SIGKILL)
    await until(lambda: servers.connected == [])
    answers = await asyncio.gather(*(room.call("demo__pid") for _ in range(5)))
    assert len({answer.text for answer in answers}) == 1 and answers[0].ok


async def test_without_the_sdk_servers_are_absent_and_nothing_else(
    room: Room, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    [problem] = await room.add(as_child(script)).connect()
    assert "mcp" in problem.message


async def test_closing_ends_the_children(room: Room, script: Path) -> None:
    servers = room.add(as_child(script))
    await servers.connect()
    child = int((await room.call("demo__pid")).text)
    await servers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_the_sdk_is_loaded_only_when_a_server_is() -> None:
    code = "import sys, coterie.agent.mcp; print('mcp' in sys.modules or 'pydantic' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("tool", "taken", "name"),
    [
        ("read", (), "files__read"),
        ("a.b c/ü", (), "files__a_b_c__"),
        ("x" * 57, (), "files__" + "x" * 57),
        ("x" * 58, (), "files__" + "x" * 48 + "_"),
        ("a.b", ("files__a_b",), "files__a_b_"),
    ],
)
def test_names_are_made_of_what_every_service_takes(tool: str, taken: tuple[str, ...], name: str) -> None:
    made = tool_name("files", tool, taken)
    assert made.startswith(name) and NAME.fullmatch(made) and made not in taken
    assert made == tool_name("files", tool, taken)
