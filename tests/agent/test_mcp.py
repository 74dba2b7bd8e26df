"""Life cycle of MCP servers: start, restart, errors and shutdown, with servers of the SDK."""

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
from tests.agent.mcp_harness import HttpServer, McpHarness, as_child
from tests.agent.tool_calls import LifePipe, error_of, wait_until
from tests.engines import Engine

pytestmark = pytest.mark.slow


@pytest.fixture
def engine() -> Engine:
    """The life cycle does not depend on the engine: SQLite only."""
    return Engine()


async def test_a_child_server_does_not_inherit_our_environment(
    mcp: McpHarness, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GREETING", "a secret")
    await mcp.add(as_child(script)).connect()
    assert (await mcp.call("demo__greeting")).text == "none"


async def test_a_killed_server_restarts_for_the_next_call(mcp: McpHarness, script: Path) -> None:
    servers = mcp.add(as_child(script))
    await servers.connect()
    first = int((await mcp.call("demo__pid")).text)
    os.kill(first, signal.SIGKILL)
    await wait_until(lambda: servers.connected_ids == [])
    again = await mcp.call("demo__pid")
    assert again.ok and int(again.text) != first


async def test_a_server_that_exits_during_an_unsafe_call_gives_an_unknown_outcome_and_restarts(
    mcp: McpHarness, script: Path
) -> None:
    await mcp.add(as_child(script)).connect()
    lost = await mcp.call("demo__die")
    assert error_of(lost).startswith("mcp_lost: the MCP server demo disconnected during the call")
    assert lost.is_outcome_unknown and json.loads(lost.text)["status"] == "unknown"
    assert (await mcp.call("demo__add", a=1, b=1)).text == "2"
    assert script.with_name("exits").read_text() == "exited\n"


async def test_an_mcp_error_does_not_restart_the_server(mcp: McpHarness, script: Path) -> None:
    await mcp.add(as_child(script)).connect()
    first = (await mcp.call("demo__pid")).text
    assert error_of(await mcp.call("demo__refuse")) == "mcp_error: the MCP server demo says: not allowed"
    assert (await mcp.call("demo__pid")).text == first


async def test_an_idempotent_call_is_repeated_when_the_server_exits(mcp: McpHarness, script: Path) -> None:
    await mcp.add(as_child(script)).connect()
    assert (await mcp.call("demo__die_once")).text == "alive"


async def test_a_server_that_cannot_restart_is_retried_only_after_a_delay(
    mcp: McpHarness, script: Path, clock: FakeClock
) -> None:
    await mcp.add(as_child(script)).connect()
    script.rename(script.with_suffix(".away"))
    assert "mcp_lost" in error_of(await mcp.call("demo__die"))

    assert error_of(await mcp.call("demo__add", a=1, b=1)).startswith("mcp_unavailable: the MCP server demo cannot be")
    script.with_suffix(".away").rename(script)
    assert "is not connected" in error_of(await mcp.call("demo__add", a=1, b=1))
    assert "next try in 1 s" in error_of(await mcp.call("demo__add", a=1, b=1))
    await clock.advance(seconds=1)
    assert (await mcp.call("demo__add", a=1, b=1)).text == "2"


async def test_the_delay_between_connection_attempts_doubles_up_to_a_minute(mcp: McpHarness, clock: FakeClock) -> None:
    servers = mcp.add(McpEntry(id="gone", command="/no/such/program"))
    delays = []
    for _ in range(8):
        await servers.connect()
        [problem] = await servers.connect()
        delays.append(int(problem.message.split("next try in ")[1].split(" s")[0]))
        await clock.advance(seconds=delays[-1])
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]


async def test_calls_to_an_http_server_fail_until_it_is_back(
    mcp: McpHarness, http: HttpServer, clock: FakeClock
) -> None:
    await mcp.add(http.entry).connect()
    http.stop()
    assert error_of(await mcp.call("demo__pid")).startswith("mcp_")
    assert error_of(await mcp.call("demo__add", a=1, b=1)).startswith("mcp_unavailable")
    http.start()
    await clock.advance(minutes=1)
    assert (await mcp.call("demo__add", a=1, b=1)).text == "2"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (McpEntry(id="gone", command="/no/such/program"), "No such file or directory"),
        (McpEntry(id="gone", command="true"), "cannot be reached: Connection closed"),
        (McpEntry(id="gone", url="http://127.0.0.1:9/mcp"), "cannot be reached: All connection attempts failed"),
        (McpEntry(id="gone", url="nonsense"), "cannot be reached: "),
        (McpEntry(id="gone"), "the entry names neither a command nor a url"),
    ],
)
async def test_an_unreachable_server_is_a_problem_that_is_not_fatal(
    mcp: McpHarness, entry: McpEntry, message: str
) -> None:
    [problem] = await mcp.add(entry).connect()
    assert problem.location == "coterie.toml: mcp.gone" and message in problem.message and not problem.fatal
    assert mcp.names() == []


async def test_a_silent_server_exceeds_the_start_timeout(mcp: McpHarness) -> None:
    silent = McpEntry(id="gone", command="sleep", args=("60",))
    [problem] = await mcp.add(silent, start=timedelta(seconds=0.3)).connect()
    assert "did not list its tools within 0.3 s" in problem.message


async def test_an_unreachable_server_does_not_affect_another(mcp: McpHarness, script: Path) -> None:
    problems = await mcp.add(McpEntry(id="gone", command="/no/such/program"), as_child(script)).connect()
    assert len(problems) == 1 and (await mcp.call("demo__add", a=1, b=1)).ok


async def test_concurrent_calls_to_a_killed_server_start_it_once(mcp: McpHarness, script: Path) -> None:
    servers = mcp.add(as_child(script))
    await servers.connect()
    os.kill(int((await mcp.call("demo__pid")).text), signal.SIGKILL)
    await wait_until(lambda: servers.connected_ids == [])
    answers = await asyncio.gather(*(mcp.call("demo__pid") for _ in range(5)))
    assert len({answer.text for answer in answers}) == 1 and answers[0].ok


async def test_without_the_sdk_a_server_is_a_problem(
    mcp: McpHarness, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    [problem] = await mcp.add(as_child(script)).connect()
    assert "mcp" in problem.message


async def test_closing_ends_child_servers(mcp: McpHarness, script: Path) -> None:
    servers = mcp.add(as_child(script))
    await servers.connect()
    child = int((await mcp.call("demo__pid")).text)
    await servers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


async def test_an_unsafe_call_past_its_deadline_has_an_unknown_outcome(mcp: McpHarness, script: Path) -> None:
    await mcp.add(as_child(script)).connect()
    late = await mcp.call("demo__hang", deadline=timedelta(milliseconds=200))
    assert error_of(late).startswith("tool_timeout") and "verify before repeating" in late.text
    assert late.is_outcome_unknown and json.loads(late.text)["status"] == "unknown"


@pytest.fixture
def life(tmp_path: Path) -> Iterator[LifePipe]:
    made = LifePipe(tmp_path / "life")
    yield made
    made.close()


@pytest.mark.parametrize("how", ["closed", "lost"])
async def test_a_server_that_ignores_sigterm_is_killed_with_its_child_processes(
    mcp: McpHarness, script: Path, life: LifePipe, how: str
) -> None:
    servers = mcp.add(as_child(script))
    await servers.connect()
    pid = int((await mcp.call("demo__ignore_signals", pipe=life.path)).text)
    assert await life.read() == b"up"
    if how == "closed":
        await servers.close()
    else:
        os.kill(pid, signal.SIGKILL)
    assert await life.read() == b""
    await wait_until(lambda: not is_alive(pid))


RUNTIME = """
import asyncio, os, sys
from coterie.agent.mcp_connection import McpConnection, resolve_server
from coterie.clock import SystemClock
from coterie.config import McpEntry
from datetime import timedelta

async def main():
    entry = McpEntry(id="demo", command=sys.executable, args=(sys.argv[1],))
    connection = McpConnection(resolve_server(entry, dict().get), SystemClock())
    await connection.wait_ready(timedelta(seconds=60))
    result = await connection.request(lambda client: client.call_tool("ignore_signals", {"pipe": sys.argv[2]}))
    print(result.content[0].text, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_killing_the_runtime_kills_its_servers(script: Path, life: LifePipe) -> None:
    command = [sys.executable, "-c", RUNTIME, str(script), life.path]
    runtime = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert runtime.stdout
        pid = int(await asyncio.to_thread(runtime.stdout.readline))
        assert await life.read() == b"up"
    finally:
        runtime.kill()
        runtime.communicate()
    assert await life.read() == b""
    await wait_until(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # init reaps the zombie of a dead parent some time later.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_sdk_is_imported_only_for_a_server() -> None:
    code = "import sys, coterie.agent.mcp; print('mcp' in sys.modules or 'pydantic' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


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
def test_tool_names_have_only_characters_that_every_service_accepts(
    tool: str, taken: tuple[str, ...], name: str
) -> None:
    made = tool_name("files", tool, taken)
    assert made.startswith(name) and NAME.fullmatch(made) and made not in taken
    assert made == tool_name("files", tool, taken)
