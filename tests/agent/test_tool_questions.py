"""Questions of tools to the person (`ctx.ask`)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coterie import Message
from coterie.bus import WATCHER_QUEUE_SIZE
from coterie.errors import StoreUnavailable
from coterie.testing import Calls, FakeClock, Says
from tests.agent.stage import stage
from tests.agent.tool_calls import HANG_SECONDS

TOOLS = """
from coterie import ToolContext, tool

@tool
async def choose(*, ctx: ToolContext) -> str:
    "Ask the person for a colour."
    return f"the person said {await ctx.ask('Which one?', ['Red', 'Blue'])}"
"""


async def test_a_question_of_a_tool_gets_its_answer_also_after_a_burst_of_other_messages(tmp_path: Path) -> None:
    async with stage(tmp_path, tools=TOOLS) as here, asyncio.timeout(HANG_SECONDS):
        here.server.script(Says(calls=(Calls("choose"),)), "done")
        await here.say("choose a colour")
        [question] = await here.heard()
        await here.society.pause("bob")
        others = [here.say(f"{number}", to="bob") for number in range(2 * WATCHER_QUEUE_SIZE)]
        await asyncio.gather(*others)
        await here.say("Blue", in_reply_to=question.id, option=1)
        await here.heard(2)

        [result] = [row for row in await here.society.store.history("ada") if row.role == "tool"]
        assert result.text == "the person said Blue"


async def test_a_question_of_a_tool_gets_its_answer_also_after_an_outage_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, failed = FakeClock(), list[str]()
    async with stage(tmp_path, tools=TOOLS, clock=clock) as here, asyncio.timeout(HANG_SECONDS):
        here.server.script(Says(calls=(Calls("choose"),)), "done")
        await here.say("choose a colour")
        [question] = await here.heard()
        message = here.society.store.message

        async def fail_once(message_id: str) -> Message | None:
            if not failed:
                failed.append(message_id)
                raise StoreUnavailable("the database cannot be reached")
            return await message(message_id)

        monkeypatch.setattr(here.society.store, "message", fail_once)
        await here.say("Blue", in_reply_to=question.id, option=1)
        heard = asyncio.create_task(here.heard(2))
        while not heard.done():
            await clock.advance(seconds=1)
            await asyncio.sleep(0)

        [result] = [row for row in await here.society.store.history("ada") if row.role == "tool"]
        assert failed and result.text == "the person said Blue"
