"""Questions of tools to the person (`ctx.ask`)."""

from __future__ import annotations

import asyncio
from pathlib import Path

from coterie.bus import WATCHER_QUEUE_SIZE
from coterie.testing import Calls, Says
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
