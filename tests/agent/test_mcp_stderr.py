"""What MCP servers write to their standard error is in our log, without their keys, and costs nobody anything."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from coterie.agent.mcp_connection import (
    MAX_HELD_BACK_LINES,
    MAX_LINE_BYTES,
    MAX_LINES_PER_PERIOD,
    PERIOD_SECONDS,
    StderrLog,
)
from coterie.config import McpEntry
from coterie.testing import FakeClock
from tests.agent.mcp_room import Room, as_child, error_of, until
from tests.engines import Engine

KEY = "canary-Zq7Vx2Lm9Tb4"
NOISE = f"""
import sys
from mcp import MCPError
from mcp.server import MCPServer

server = MCPServer("Demo", log_level="ERROR")
print("no message", "{KEY}\\nnor this", flush=True)
print("begun with", "{KEY}", file=sys.stderr, flush=True)


@server.tool()
def refuse() -> str:
    raise MCPError(-32000, "not with {KEY}")


@server.tool()
def flood() -> str:
    for _ in range(100):
        sys.stderr.write("x" * 99_999 + "\\n")
    return "done"


@server.tool()
def die() -> str:
    sys.stderr.write("my last words, " + "{KEY}")
    sys.stderr.flush()
    import os
    os._exit(3)


server.run()
"""


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coterie")


@pytest.fixture
def engine() -> Engine:
    """What a server writes has nothing to do with the store: one kind is enough."""
    return Engine()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "noise.py"
    path.write_text(NOISE)
    return path


def shell(script: str, **more: object) -> McpEntry:
    return McpEntry(id="demo", command="sh", args=("-c", script), **more)  # type: ignore[arg-type]


def wrote(caplog: pytest.LogCaptureFixture) -> list[str]:
    start = "the MCP server demo wrote: "
    return [line.removeprefix(start) for line in caplog.messages if line.startswith(start)]


def open_files() -> set[str]:
    return {f"{one.name} {os.readlink(one)}" for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}


async def test_a_server_that_does_not_start_is_a_problem_that_tells_its_last_line_without_its_keys(
    room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    env = {"DEMO_API_KEY": KEY}
    [problem] = await room.add(shell('echo "first" >&2; echo "no entry with $DEMO_API_KEY" >&2', env=env)).connect()
    assert problem.message == (
        "the MCP server demo cannot be reached: Connection closed; the last it wrote was: no entry with ***"
    )
    assert wrote(caplog) == ["first", "no entry with ***"]
    assert KEY not in caplog.text


async def test_a_key_among_a_servers_arguments_is_taken_out_too(room: Room, caplog: pytest.LogCaptureFixture) -> None:
    said = McpEntry(id="demo", command="sh", args=("-c", 'echo "$0 $1 $2" >&2', "--api-key", KEY, f"--token={KEY}2"))
    [problem] = await room.add(said).connect()
    assert problem.message.endswith("the last it wrote was: --api-key *** --token=***")
    assert wrote(caplog) == ["--api-key *** --token=***"]


@pytest.mark.slow
async def test_a_dying_servers_last_words_are_in_the_log_and_each_start_leaves_nothing_open(
    room: Room, script: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = room.add(as_child(script, env={"DEMO_API_KEY": KEY}))
    before = open_files()
    for life in (1, 2):
        await servers.connect()
        assert "mcp_lost" in error_of(await room.call("demo__die"))
        await until(lambda life=life: len(wrote(caplog)) == 2 * life)  # type: ignore[misc]
        assert wrote(caplog)[-2:] == ["begun with ***", "my last words, ***"]
    await servers.close()
    assert open_files() <= before
    complaints = [line for line in caplog.messages if "that are no MCP messages" in line]
    assert len(complaints) == 2  # once in each life


@pytest.mark.slow
async def test_a_server_that_says_no_says_it_without_its_keys(room: Room, script: Path) -> None:
    await room.add(as_child(script, env={"DEMO_API_KEY": KEY})).connect()
    assert error_of(await room.call("demo__refuse")) == "mcp_error: the MCP server demo says: not with ***"


async def test_a_server_that_cannot_be_run_is_told_without_its_keys(room: Room) -> None:
    [problem] = await room.add(McpEntry(id="demo", command=f"/none/{KEY}", env={"DEMO_API_KEY": KEY})).connect()
    assert "No such file or directory: '/none/***'" in problem.message


@pytest.mark.slow
async def test_a_server_that_floods_its_standard_error_is_not_held_up(room: Room, script: Path) -> None:
    await room.add(as_child(script)).connect()
    assert (await room.call("demo__flood")).text == "done"


# The pipe alone


@pytest.fixture
async def write(clock: FakeClock) -> AsyncIterator[Callable[[str], None]]:
    with StderrLog("demo", (KEY,), clock) as stderr:

        def write(text: str) -> None:
            """Read at once, as if the loop had come round."""
            stderr.writable.write(text)
            stderr.writable.flush()
            while stderr._read():
                pass

        yield write


async def test_a_line_is_shown_when_it_is_whole(write: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    write("one\n\ntwo and ")
    assert wrote(caplog) == ["one"]
    write(f"{KEY[:9]}")
    write(f"{KEY[9:]}\r\n")
    assert wrote(caplog) == ["one", "two and ***"]


async def test_no_part_of_a_key_is_shown_where_a_long_line_is_cut(
    write: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    for before in range(MAX_LINE_BYTES - 25, MAX_LINE_BYTES + 45):
        write(f"{KEY} " + "x" * before + KEY + "y" * 5000 + "\n")
        line = wrote(caplog)[-1]
        assert len(line) <= MAX_LINE_BYTES + 1 and line.startswith("*** xxx") and "xc" not in line, before


async def test_of_an_endless_line_little_is_kept(clock: FakeClock) -> None:
    with StderrLog("demo", (KEY,), clock) as stderr:
        for _ in range(100):
            stderr.writable.write("x" * 50_000)
            stderr.writable.flush()
            while stderr._read():
                pass
        assert sys.getsizeof(stderr._line) < 3 * MAX_LINE_BYTES


async def test_of_a_flood_the_first_lines_are_shown_and_in_the_end_how_many_more_and_the_last(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    with StderrLog("demo", (), clock) as stderr:
        for number in range(1000):
            stderr.writable.write(f"{number}\n")
    shown = [*range(MAX_LINES_PER_PERIOD), *range(1000 - MAX_HELD_BACK_LINES, 1000)]
    assert [int(line) for line in wrote(caplog)] == shown
    assert f"the MCP server demo wrote {1000 - MAX_LINES_PER_PERIOD} more lines: not all are shown" in caplog.messages


async def test_after_a_while_a_server_that_flooded_the_log_is_heard_again(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    with StderrLog("demo", (), clock) as stderr:
        stderr.writable.write("x\n" * (MAX_LINES_PER_PERIOD + 7))
        stderr.writable.flush()
        stderr._drain()
        await clock.advance(seconds=PERIOD_SECONDS)
        stderr.writable.write("y\n")
    assert caplog.messages[-2:] == [
        "the MCP server demo wrote 7 more lines: not all are shown",
        "the MCP server demo wrote: y",
    ]


async def test_a_child_that_the_server_left_behind_keeps_nothing_open(clock: FakeClock) -> None:
    before = open_files()
    with StderrLog("demo", (), clock) as stderr:
        left = os.dup(stderr.writable.fileno())
    with pytest.raises(BrokenPipeError):
        os.write(left, b"still here")
    os.close(left)
    assert open_files() <= before
