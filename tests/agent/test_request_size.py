"""The fixed cost of a request: system prompt, built-in tools, and the frame of each message."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.agent.stage import stage

FIXED_CHARACTERS = 3_370
"""6,239 before they were shortened; since then recurring messages, descriptions of agents and `unlessAnswered` were
added."""
FRAME_CHARACTERS = 60
"""Half of the 121 characters of a frame before."""
BUILT_IN = {
    "send_message", "list_agents", "find_agents", "list_delayed", "withdraw_message", "put_artifact", "read_artifact",
    "list_artifacts", "create_role", "spawn_agent", "terminate_agent",
}  # fmt: skip


async def test_prompt_tools_and_frames_have_a_size_limit(tmp_path: Path) -> None:
    async with stage(tmp_path, agents='[agents.ada]\nname = "Ada"\n[agents.bob]\n', tools="") as here:
        await here.say("hi")
        await here.heard(1)
        body = here.server.requests[0].body
        system, user = body["messages"]
        described = [tool for tool in body["tools"] if tool["function"]["name"] in BUILT_IN]
        assert len(described) == len(BUILT_IN)
        tools = json.dumps(described, separators=(",", ":"), ensure_ascii=False)
        assert len(system["content"]) + len(tools) <= FIXED_CHARACTERS
        assert len(user["content"]) - len("hi") <= FRAME_CHARACTERS


async def test_prompt_and_built_in_tools_are_in_english(tmp_path: Path) -> None:
    async with stage(tmp_path, tools="") as here:
        await here.say("hi")
        await here.heard(1)
        body = here.server.requests[0].body
        assert not re.search("[\u2e80-\uffff]", json.dumps([body["messages"][0], body["tools"]], ensure_ascii=False))


async def test_a_service_without_tools_gets_neither_tools_nor_instructions_about_them(tmp_path: Path) -> None:
    async with stage(tmp_path, capabilities={"input": ["text"], "output": ["text"]}) as here:
        await here.say("hi")
        await here.heard(1)
        body = here.server.requests[0].body
        assert "tools" not in body
        prompt = body["messages"][0]["content"]
        assert "send_message" not in prompt and "call" not in prompt and "You can write to" not in prompt
        assert prompt == here.society.system_prompt("ada")


async def test_tools_that_an_agent_may_not_use_are_not_described(tmp_path: Path) -> None:
    async with stage(tmp_path, agents='[agents.ada]\ntools = ["look"]\n') as here:
        await here.say("hi")
        await here.heard(1)
        body = here.server.requests[0].body
        names = {tool["function"]["name"] for tool in body["tools"]}
        assert {"look", "send_message"} <= names and "ring" not in names and "dangerous" not in names
        assert "ring" not in body["messages"][0]["content"].split()
