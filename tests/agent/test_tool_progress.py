"""The progress of tool calls: shown to watchers, not stored, and the deadline starts again with each report."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coterie.agent.tools import CallTimer, ToolContext, tool
from coterie.live import CallProgress
from coterie.testing.model_server import Calls, Says
from tests.agent.stage import Bell, stage
from tests.agent.tool_calls import call, error_of, toolbox_of
from tests.engines import Engine

TOOLS = """
from coterie import ToolContext, tool
from tests.agent.stage import Bell

@tool
async def copy(*, ctx: ToolContext) -> str:
    "Copy files."
    await ctx.report_progress(float("nan"))
    await ctx.report_progress(2, 5, "the second\\nfile" + "!" * 1000)
    await ctx.report_progress(3, 5, "the third\\nfile" + "!" * 1000)
    return await Bell.rung("copy")
"""


@pytest.fixture
def engine() -> Engine:
    """Progress is not stored: SQLite only."""
    return Engine()


async def test_the_progress_of_a_call_is_known_until_the_call_ends(tmp_path: Path) -> None:
    async with stage(tmp_path, tools=TOOLS) as here:
        Bell.may_end.clear()
        reported: list[CallProgress | None] = []
        here.society.live.subscribe_progress(lambda agent, progress: reported.append(progress))
        here.server.script(Says(calls=(Calls("copy", {}),)), "done")
        await here.say("copy")
        await Bell.rang.wait()
        [now] = here.society.live.progress
        assert (now.agent_id, now.call_id, now.tool) == ("ada", "call_1_1_0", "copy")
        assert (now.progress, now.total) == (3, 5)
        assert now.message.startswith("the third") and "\n" not in now.message and len(now.message) <= 200
        Bell.may_end.set()
        assert await here.texts() == ["done"]
        assert here.society.live.progress == ()
        assert [one and one.progress for one in reported] == [2, 3, None]


async def test_keys_are_removed_from_the_progress_of_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_API_KEY", "sesame-open-8142")
    tools = TOOLS.replace('"the second\\nfile"', '"sesame-open-8142"')
    async with stage(tmp_path, tools=tools) as here:
        reported: list[str] = []
        here.society.live.subscribe_progress(lambda _, progress: reported.append(progress.message if progress else ""))
        here.server.script(Says(calls=(Calls("copy", {}),)), "done")
        await here.say("copy")
        await here.texts()
        assert reported[0].startswith("***!") and "sesame" not in str(reported)


async def test_a_stopped_call_has_no_progress_left(tmp_path: Path) -> None:
    async with stage(tmp_path, tools=TOOLS) as here:
        Bell.may_end.clear()
        here.server.script(Says(calls=(Calls("copy", {}),)), "done")
        await here.say("copy")
        await Bell.rang.wait()
        assert here.society.live.progress
        here.society.stop_turn("ada")
        await here.state("ada", "idle")
        assert here.society.live.progress == ()


def reporting(ctx: ToolContext) -> ToolContext:
    """A context whose reports restart its timer, as those of the runner do."""

    async def report(progress: float, total: float | None = None, message: str | None = None) -> None:
        ctx.timer.restart()

    return replace(ctx, report_progress=report)


@tool
async def tick(seconds: float, *, ctx: ToolContext) -> str:
    """Report progress all the time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        await ctx.report_progress(loop.time())
        await asyncio.sleep(0.01)
    return "ticked"


@tool
async def tick_and_hang(*, ctx: ToolContext) -> str:
    """Report progress once, and never end."""
    await ctx.report_progress(1)
    await asyncio.Event().wait()
    return ""


@pytest.mark.slow
async def test_a_call_that_reports_progress_may_take_longer_than_its_deadline(ctx: ToolContext) -> None:
    done = await call(toolbox_of(tick), "tick", reporting(ctx), timedelta(seconds=1), seconds=1.5)
    assert done.text == "ticked"


async def test_a_call_whose_progress_ends_is_stopped_at_its_deadline(ctx: ToolContext) -> None:
    late = await call(toolbox_of(tick_and_hang), "tick_and_hang", reporting(ctx), timedelta(milliseconds=200))
    assert error_of(late).startswith("tool_timeout: tick_and_hang made no further progress within 0.2 s")


async def test_progress_does_not_prolong_a_call_for_ever(ctx: ToolContext) -> None:
    limited: Any = replace(ctx, timer=CallTimer(timedelta(milliseconds=400)))
    late = await call(toolbox_of(tick), "tick", reporting(limited), timedelta(milliseconds=200), seconds=3600)
    assert error_of(late).startswith("tool_timeout")
