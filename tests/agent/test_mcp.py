"""MCP servers as tools, against real ones made with the SDK: as a child process, and over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from coterie.agent.mcp import tool_name
from coterie.agent.tools import NAME
from coterie.config import McpEntry
from coterie.testing import FakeClock
from tests.agent.mcp_room import HttpServer, Room, as_child, error_of, until
from tests.agent.test_toolbox import Witness
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
    await until(lambda: servers.connected_ids == [])
    again = await room.call("demo__pid")
    assert again.ok and int(again.text) != first


async def test_a_server_that_dies_during_an_unsafe_call_leaves_its_outcome_unknown_and_comes_back(
    room: Room, script: Path
) -> None:
    await room.add(as_child(script)).connect()
    lost = await room.call("demo__die")
    assert error_of(lost).startswith("mcp_lost: the MCP server demo disconnected during the call")
    assert lost.is_outcome_unknown and json.loads(lost.text)["status"] == "unknown"
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
    assert "is not connected" in error_of(await room.call("demo__add", a=1, b=1))
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
    assert problem.location == "coterie.toml: mcp.gone" and words in problem.message and not problem.fatal
    assert room.names() == []


async def test_a_server_that_never_answers_is_given_up_after_a_time(room: Room) -> None:
    silent = McpEntry(id="gone", command="sleep", args=("60",))
    [problem] = await room.add(silent, start=timedelta(seconds=0.3)).connect()
    assert "did not list its tools within 0.3 s" in problem.message


async def test_one_server_that_is_not_there_keeps_no_other_away(room: Room, script: Path) -> None:
    problems = await room.add(McpEntry(id="gone", command="/nothing/of/the/kind"), as_child(script)).connect()
    assert len(problems) == 1 and (await room.call("demo__add", a=1, b=1)).ok


async def test_many_calls_that_meet_a_dead_server_start_it_once(room: Room, script: Path) -> None:
    servers = room.add(as_child(script))
    await servers.connect()
    os.kill(int((await room.call("demo__pid")).text), signal.SIGKILL)
    await until(lambda: servers.connected_ids == [])
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


async def test_an_unsafe_call_that_takes_too_long_may_have_happened(room: Room, script: Path) -> None:
    await room.add(as_child(script)).connect()
    late = await room.call("demo__hang", deadline=timedelta(milliseconds=200))
    assert error_of(late).startswith("tool_timeout") and "verify before repeating" in late.text
    assert late.is_outcome_unknown and json.loads(late.text)["status"] == "unknown"


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Witness]:
    made = Witness(tmp_path / "witness")
    yield made
    made.close()


@pytest.mark.parametrize("how", ["closed", "lost"])
async def test_a_server_that_ignores_everything_is_killed_with_all_that_it_started(
    room: Room, script: Path, witness: Witness, how: str
) -> None:
    servers = room.add(as_child(script))
    await servers.connect()
    stubborn = int((await room.call("demo__settle_in", witness=witness.path)).text)
    assert await witness.says() == b"up"
    if how == "closed":
        await servers.close()
    else:
        os.kill(stubborn, signal.SIGKILL)
    assert await witness.says() == b""
    await until(lambda: not is_alive(stubborn))


RUNTIME = """
import asyncio, os, sys
from coterie.agent.mcp_connection import McpConnection
from coterie.clock import SystemClock
from coterie.config import McpEntry
from datetime import timedelta

async def main():
    entry = McpEntry(id="demo", command=sys.executable, args=(sys.argv[1],))
    connection = McpConnection(entry, SystemClock())
    await connection.wait_ready(timedelta(seconds=60))
    said = await connection.call("settle_in", {"witness": sys.argv[2]})
    print(said.content[0].text, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_server_does_not_outlive_a_runtime_that_was_killed(script: Path, witness: Witness) -> None:
    command = [sys.executable, "-c", RUNTIME, str(script), witness.path]
    runtime = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert runtime.stdout
        stubborn = int(await asyncio.to_thread(runtime.stdout.readline))
        assert await witness.says() == b"up"
    finally:
        runtime.kill()
        runtime.communicate()
    assert await witness.says() == b""
    await until(lambda: not is_alive(stubborn))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie whose parent has gone is reaped by the system, at a time of its own.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


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
