"""Lost MCP sessions: restarted servers, refused sessions, servers that hang, and restarts under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from coterie.agent.tools import ToolResult
from coterie.clock import SystemClock
from coterie.testing import FakeClock
from tests.agent.mcp_harness import HttpServer, McpHarness, as_child
from tests.agent.tool_calls import HANG_SECONDS, error_of, wait_until
from tests.engines import Engine

pytestmark = pytest.mark.slow

LONG_WAIT = timedelta(minutes=2)
"""Longer than a loaded machine needs to start a server."""
MakeServer = Callable[..., HttpServer]


@pytest.fixture
def engine() -> Engine:
    """Connections do not depend on the engine: SQLite only."""
    return Engine()


@pytest.fixture
def serve(sdk_script: Path) -> Iterator[MakeServer]:
    started: list[HttpServer] = []

    def start(refusal: str = "", **env: str) -> HttpServer:
        started.append(HttpServer(sdk_script, refusal, **env))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.mark.parametrize(
    "refusal", ["", "404", *(pytest.param(one, marks=pytest.mark.full) for one in ("400", "410", "plain"))]
)
async def test_a_call_after_a_restart_of_an_http_server_runs_in_a_new_session(
    mcp: McpHarness, serve: MakeServer, refusal: str
) -> None:
    server = serve(refusal)
    await mcp.add(server.entry).connect()
    before = await mcp.call("demo__pid")
    server.restart()
    after = await mcp.call("demo__pid")  # unsafe, but the server refused the session before it ran anything
    assert before.ok and after.ok and before.text != after.text


async def test_concurrent_calls_after_a_restart_all_run_in_a_new_session(mcp: McpHarness, serve: MakeServer) -> None:
    server = serve("404")
    await mcp.add(server.entry).connect()
    assert (await mcp.call("demo__pid")).ok
    server.restart()
    # Each call learns itself that the server refused it, also if another one has opened a new session meanwhile.
    answers = await asyncio.gather(*(mcp.call("demo__pid") for _ in range(8)))
    assert [error_of(answer) for answer in answers if not answer.ok] == []
    assert len({answer.text for answer in answers}) == 1


@pytest.mark.parametrize("refusal", ["404", "400"])
async def test_a_call_that_the_server_had_begun_is_not_sent_again(
    mcp: McpHarness, serve: MakeServer, tmp_path: Path, refusal: str
) -> None:
    """The client tries to read the answer on, and the restarted server refuses that, because it lost the session."""
    server, noted = serve(refusal, RESUMABLE="1"), tmp_path / "noted"
    await mcp.add(server.entry).connect()
    calling = asyncio.create_task(mcp.call("demo__note", LONG_WAIT, path=str(noted)))
    await wait_until(lambda: noted.exists() and noted.read_text() == "noted\n")
    await asyncio.to_thread(server.restart)
    lost = await calling
    assert error_of(lost).startswith("mcp_lost") and lost.is_outcome_unknown
    assert noted.read_text() == "noted\n"
    assert (await mcp.call("demo__add", a=1, b=1)).text == "2"


async def test_a_reload_reconnects_a_restarted_server(mcp: McpHarness, serve: MakeServer) -> None:
    server = serve("400")
    servers = mcp.add(server.entry)
    await servers.connect()
    server.stop()
    [problem] = await servers.refresh()
    assert "cannot be reached" in problem.message and servers.connected_ids == []
    server.start()
    assert await servers.refresh() == [] and servers.connected_ids == ["demo"]  # without the delay after a failure
    server.restart()
    assert await servers.refresh() == []
    assert (await mcp.call("demo__add", a=1, b=1)).text == "2"


async def test_a_call_waits_for_a_server_that_restarts(mcp: McpHarness, serve: MakeServer) -> None:
    server = serve("404")
    await mcp.add(server.entry, max_wait=LONG_WAIT, clock=SystemClock()).connect()
    server.stop()
    waiting = asyncio.create_task(mcp.call("demo__pid", LONG_WAIT))
    await asyncio.to_thread(server.start)
    assert (await waiting).ok


async def test_a_call_fails_clearly_when_the_server_stays_away(
    mcp: McpHarness, serve: MakeServer, clock: FakeClock
) -> None:
    server = serve("404")
    await mcp.add(server.entry, max_wait=timedelta(seconds=5)).connect()
    server.stop()
    calling = asyncio.create_task(mcp.call("demo__pid"))
    seconds = 0
    while not calling.done():  # it connects after 1, 2 and 4 seconds, of which it waits for the first two
        await asyncio.wait({calling}, timeout=0.05)
        await clock.advance(seconds=1)
        seconds += 1
    assert error_of(await calling).startswith("mcp_unavailable: the MCP server demo cannot be reached")
    assert seconds >= 3


async def test_a_server_that_hangs_is_replaced_after_a_call_past_its_deadline(
    mcp: McpHarness, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.agent.mcp_connection.PROBE_SECONDS", 0.3)
    await mcp.add(as_child(script)).connect()
    pid = int((await mcp.call("demo__pid")).text)
    os.kill(pid, signal.SIGSTOP)
    late = await mcp.call("demo__add", timedelta(milliseconds=200), a=1, b=1)
    assert error_of(late).startswith("tool_timeout")
    again = await mcp.call("demo__pid")
    assert again.ok and int(again.text) != pid


async def test_a_reload_replaces_a_server_that_hangs(
    mcp: McpHarness, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.agent.mcp.RELIST_TIMEOUT", timedelta(milliseconds=300))
    servers = mcp.add(as_child(script))
    await servers.connect()
    pid = int((await mcp.call("demo__pid")).text)
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(HANG_SECONDS):
        assert await servers.refresh() == []
    assert int((await mcp.call("demo__pid")).text) != pid


async def test_a_wrong_key_is_an_error_that_names_the_status(mcp: McpHarness, serve: MakeServer) -> None:
    server = serve("404", DEMO_KEY="Bearer sesame-open")
    [problem] = await mcp.add(server.entry).connect()
    assert "HTTP 401" in problem.message


CLEAR_ERRORS = {"mcp_unavailable", "mcp_lost", "not run"}


def outcome(result: ToolResult) -> str:
    if result.ok:
        return "result"
    content = json.loads(result.text)
    return "not run" if "did not run the call" in content["message"] else str(content["error"])


async def under_load(mcp: McpHarness, server: HttpServer, restarts: int) -> Counter[str]:
    """Restart the server while agents call it; return how the calls ended."""
    ended, stop = Counter[str](), asyncio.Event()

    async def work(tool: str, **arguments: int) -> None:
        while not stop.is_set():
            result = await mcp.call(tool, LONG_WAIT, **arguments)
            ended[outcome(result)] += 1
            await asyncio.sleep(0.005)

    async def works() -> ToolResult:
        """Call until a call works: within the delay after a failed attempt, calls fail."""
        while not (result := await mcp.call("demo__pid", LONG_WAIT)).ok:
            assert outcome(result) in CLEAR_ERRORS, result.text
            await asyncio.sleep(0.05)
        return result

    async with asyncio.timeout(HANG_SECONDS * (restarts + 1)), asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(work("demo__add", a=number, b=1))
            tasks.create_task(work("demo__pid"))
        for number in range(restarts):
            before = (await works()).text
            await asyncio.to_thread(server.stop)
            if number % 10 == 1:  # stay away until calls fail
                failed = ended["mcp_unavailable"]
                while ended["mcp_unavailable"] == failed:
                    await asyncio.sleep(0.01)
            await asyncio.to_thread(server.start)
            while (await works()).text == before:
                pass
        stop.set()
    return ended


@pytest.mark.parametrize(
    ("refusal", "restarts"),
    [("404", 2), *(pytest.param(refusal, 20, marks=pytest.mark.full) for refusal in ("", "404", "400"))],
)
async def test_restarts_under_load_end_every_call_with_a_result_or_a_clear_error(
    mcp: McpHarness, serve: MakeServer, refusal: str, restarts: int
) -> None:
    server = serve(refusal)
    await mcp.add(server.entry, max_wait=timedelta(seconds=5), clock=SystemClock()).connect()
    ended = await under_load(mcp, server, restarts)
    assert ended["result"] > restarts
    assert set(ended) <= {"result", *CLEAR_ERRORS}, ended
