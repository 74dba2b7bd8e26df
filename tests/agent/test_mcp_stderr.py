"""The standard error of MCP servers is logged: redacted, limited in size, and without blocking the server."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import termios
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coterie.agent.mcp_stderr import (
    MAX_HELD_BACK_LINES,
    MAX_LINE_BYTES,
    MAX_LINES_PER_PERIOD,
    PERIOD_SECONDS,
    StderrLog,
)
from coterie.config import McpEntry
from coterie.testing import FakeClock
from tests.agent.mcp_harness import McpHarness, as_child
from tests.agent.tool_calls import error_of, wait_until
from tests.engines import Engine

KEY = "canary-Zq7Vx2Lm9Tb4"
NOISE = f"""
import sys
from mcp import MCPError
from mcp.server import MCPServer

server = MCPServer("Demo", log_level="ERROR")
print("not JSON-RPC", "{KEY}\\nnor this", flush=True)
print("started with", "{KEY}", file=sys.stderr, flush=True)


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
    sys.stderr.write("last line, " + "{KEY}")
    sys.stderr.flush()
    import os
    os._exit(3)


server.run()
"""


@pytest.fixture(autouse=True)
def log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coterie")


@pytest.fixture
def engine() -> Engine:
    """The log does not depend on the engine: SQLite only."""
    return Engine()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "noise.py"
    path.write_text(NOISE)
    return path


def shell(script: str, **more: object) -> McpEntry:
    return McpEntry(id="demo", command="sh", args=("-c", script), **more)  # type: ignore[arg-type]


def logged_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    start = "the MCP server demo wrote: "
    return [line.removeprefix(start) for line in caplog.messages if line.startswith(start)]


def open_files() -> set[str]:
    return {f"{one.name} {os.readlink(one)}" for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}


async def test_a_server_that_does_not_start_is_reported_with_its_last_line_redacted(
    mcp: McpHarness, caplog: pytest.LogCaptureFixture
) -> None:
    env = {"DEMO_API_KEY": KEY}
    [problem] = await mcp.add(shell('echo "first" >&2; echo "cannot start with $DEMO_API_KEY" >&2', env=env)).connect()
    assert problem.message == (
        "the MCP server demo cannot be reached: Connection closed; the last it wrote was: cannot start with ***"
    )
    assert logged_lines(caplog) == ["first", "cannot start with ***"]
    assert KEY not in caplog.text


async def test_a_key_in_the_arguments_of_a_server_is_redacted(
    mcp: McpHarness, caplog: pytest.LogCaptureFixture
) -> None:
    entry = McpEntry(id="demo", command="sh", args=("-c", 'echo "$0 $1 $2" >&2', "--api-key", KEY, f"--token={KEY}2"))
    [problem] = await mcp.add(entry).connect()
    assert problem.message.endswith("the last it wrote was: --api-key *** --token=***")
    assert logged_lines(caplog) == ["--api-key *** --token=***"]


@pytest.mark.slow
async def test_the_last_line_of_a_server_that_exits_is_logged_and_no_descriptor_stays_open(
    mcp: McpHarness, script: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = mcp.add(as_child(script, env={"DEMO_API_KEY": KEY}))
    before = open_files()
    for start in (1, 2):
        await servers.connect()
        assert "mcp_lost" in error_of(await mcp.call("demo__die"))
        await wait_until(lambda start=start: len(logged_lines(caplog)) == 2 * start)  # type: ignore[misc]
        assert logged_lines(caplog)[-2:] == ["started with ***", "last line, ***"]
    await servers.close()
    assert open_files() <= before
    warnings = [line for line in caplog.messages if "that are no MCP messages" in line]
    assert len(warnings) == 2  # one for each start


@pytest.mark.slow
async def test_keys_in_the_error_message_of_a_server_are_redacted(mcp: McpHarness, script: Path) -> None:
    await mcp.add(as_child(script, env={"DEMO_API_KEY": KEY})).connect()
    assert error_of(await mcp.call("demo__refuse")) == "mcp_error: the MCP server demo says: not with ***"


async def test_keys_in_the_command_of_a_server_that_cannot_start_are_redacted(mcp: McpHarness) -> None:
    [problem] = await mcp.add(McpEntry(id="demo", command=f"/none/{KEY}", env={"DEMO_API_KEY": KEY})).connect()
    assert "No such file or directory: '/none/***'" in problem.message


@pytest.mark.slow
async def test_a_server_that_writes_10_mb_to_stderr_is_not_blocked(mcp: McpHarness, script: Path) -> None:
    await mcp.add(as_child(script)).connect()
    assert (await mcp.call("demo__flood")).text == "done"


# The pipe, without a server


@pytest.fixture
async def stderr(clock: FakeClock) -> AsyncIterator[StderrLog]:
    with StderrLog("demo", (KEY,), clock) as opened:
        yield opened


async def write(stderr: StderrLog, text: str) -> None:
    """Write to the pipe, and wait until the event loop has read all of it."""
    stderr.writable.write(text)
    stderr.writable.flush()
    unread = bytearray(4)
    while not fcntl.ioctl(stderr.writable.fileno(), termios.FIONREAD, unread) and any(unread):
        await asyncio.sleep(0)


async def test_a_line_is_logged_when_it_is_complete(stderr: StderrLog, caplog: pytest.LogCaptureFixture) -> None:
    await write(stderr, "one\n\ntwo and ")
    assert logged_lines(caplog) == ["one"]
    await write(stderr, KEY[:9])
    await write(stderr, f"{KEY[9:]}\r\n")
    assert logged_lines(caplog) == ["one", "two and ***"]


async def test_no_part_of_a_key_is_logged_where_a_long_line_is_cut(
    stderr: StderrLog, caplog: pytest.LogCaptureFixture
) -> None:
    for before in range(MAX_LINE_BYTES - 25, MAX_LINE_BYTES + 45):
        await write(stderr, f"{KEY} " + "x" * before + KEY + "y" * 5000 + "\n")
        line = logged_lines(caplog)[-1]
        assert len(line) <= MAX_LINE_BYTES + 1 and line.startswith("*** xxx") and "xc" not in line, before


async def test_an_endless_line_uses_bounded_memory(stderr: StderrLog) -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(100):
            await write(stderr, "x" * 50_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 200_000, "5 MB were written"


async def test_of_many_lines_the_first_the_last_and_the_number_skipped_are_logged(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    with StderrLog("demo", (), clock) as stderr:
        for number in range(1000):
            stderr.writable.write(f"{number}\n")
    shown = [*range(MAX_LINES_PER_PERIOD), *range(1000 - MAX_HELD_BACK_LINES, 1000)]
    assert [int(line) for line in logged_lines(caplog)] == shown
    assert f"the MCP server demo wrote {1000 - MAX_LINES_PER_PERIOD} more lines: not all are shown" in caplog.messages


async def test_lines_are_logged_again_after_the_period_ends(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    with StderrLog("demo", (), clock) as stderr:
        await write(stderr, "x\n" * (MAX_LINES_PER_PERIOD + 7))
        await clock.advance(seconds=PERIOD_SECONDS)
        stderr.writable.write("y\n")
    assert caplog.messages[-2:] == [
        "the MCP server demo wrote 7 more lines: not all are shown",
        "the MCP server demo wrote: y",
    ]


async def test_a_child_process_of_the_server_does_not_keep_the_pipe_open(clock: FakeClock) -> None:
    before = open_files()
    with StderrLog("demo", (), clock) as stderr:
        left = os.dup(stderr.writable.fileno())
    with pytest.raises(BrokenPipeError):
        os.write(left, b"still here")
    os.close(left)
    assert open_files() <= before
