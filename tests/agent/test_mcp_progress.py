"""Progress that MCP servers report during a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from coterie.agent.tools import ToolContext
from coterie.config import McpEntry
from tests.agent.mcp_harness import HttpServer, McpHarness, as_child
from tests.engines import Engine

pytestmark = pytest.mark.slow

KEY = "sesame-open-8142"
Report = tuple[float, float | None, str | None]


@pytest.fixture
def engine() -> Engine:
    """None of this depends on the engine: SQLite only."""
    return Engine()


@pytest.fixture
def entry_of(sdk_script: Path) -> Iterator[Callable[[str], McpEntry]]:
    started: list[HttpServer] = []

    def make(transport: str) -> McpEntry:
        if transport == "child":
            return as_child(sdk_script, env={"GREETING": "with ${DEMO_TOKEN}"})
        started.append(
            HttpServer(sdk_script, "404" if transport == "http with sessions" else "", GREETING=f"with {KEY}")
        )
        return replace(started[-1].entry, headers={"X-Key": "${DEMO_TOKEN}"})

    yield make
    for server in started:
        server.close()


class Reports(list[Report]):
    """Collects the reports of a call. The last one creates the file that the call waits for."""

    def __init__(self, last: int, file: Path) -> None:
        self._last, self._file = last, file

    async def __call__(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        self.append((progress, total, message))
        if progress == self._last:
            self._file.touch()


@pytest.mark.parametrize("transport", ["child", "http", "http with sessions"])
async def test_the_progress_of_a_call_is_reported_while_it_runs_without_keys(
    mcp: McpHarness, entry_of: Callable[[str], McpEntry], ctx: ToolContext, transport: str, tmp_path: Path
) -> None:
    mcp.keys["DEMO_TOKEN"] = KEY
    await mcp.add(entry_of(transport)).connect()
    reports = Reports(3, tmp_path / "go-on")
    mcp.ctx = replace(ctx, report_progress=reports)
    # The call ends only if its last report arrives before its result.
    done = await mcp.call("demo__copy", files=3, until=str(tmp_path / "go-on"))
    assert done.text == "copied"
    assert sorted(reports) == [(n, 3.0, f"file {n} with ***") for n in (1, 2, 3)]


async def test_progress_of_a_server_prolongs_the_deadline_of_the_call(
    mcp: McpHarness, sdk_script: Path, ctx: ToolContext
) -> None:
    async def report(progress: float, total: float | None = None, message: str | None = None) -> None:
        ctx.timer.restart()

    await mcp.add(as_child(sdk_script)).connect()
    mcp.ctx = replace(ctx, report_progress=report)
    assert (await mcp.call("demo__tick", timedelta(seconds=1), seconds=1.5)).text == "ticked"
