"""A model is told of no tool that it is not given: in the prompt, in descriptions of files, and in results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.agent.builtins import built_in_names
from coterie.testing import Calls, Says
from coterie.testing.model_server import ReceivedRequest, Reply, Status
from tests.agent.stage import Stage, stage

PNG = bytes.fromhex("89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489")
BLIND = {"input": ["text", "tool_calling"], "output": ["text", "tool_calling"]}
NO_TOOLS = {"input": ["text"], "output": ["text"]}
SEER = {"id": "seer", "model": "s", "capabilities": {"input": ["text", "vision", "file"], "output": ["text"]}}
SMALL = {"id": "small", "model": "small", "capabilities": NO_TOOLS}


def agents(tools: list[str]) -> str:
    return f'[agents.ada]\nservice = "main"\ntools = {json.dumps(tools)}\n[agents.bob]\nservice = "seer"\n'


def given(request: ReceivedRequest) -> set[str]:
    return {tool["function"]["name"] for tool in request.body.get("tools", ())}


def mentioned(request: ReceivedRequest) -> set[str]:
    """Return the names of built-in tools in the texts of the request; calls of the model itself do not count."""
    texts = json.dumps([message["content"] for message in request.messages])
    return {name for name in built_in_names() if name in texts}


async def send_files(here: Stage) -> None:
    refs = [
        (await here.society.artifacts.put(data, name)).ref
        for data, name in ((PNG, "a.png"), (b"some text", "notes.txt"))
    ]
    await here.say("look", attachments=refs)
    await here.heard()


@pytest.mark.parametrize(
    ("tools", "capabilities", "expected"),
    [
        (["*"], BLIND, {"send_message", "read_artifact"}),
        (["!send_message"], BLIND, {"read_artifact"}),
        (["!read_artifact"], BLIND, {"send_message"}),
        (["!*"], BLIND, set()),
        (["*"], NO_TOOLS, set()),
    ],
)
async def test_a_description_of_a_file_mentions_only_tools_that_the_model_is_given(
    tmp_path: Path, tools: list[str], capabilities: dict[str, Any], expected: set[str]
) -> None:
    async with stage(tmp_path, agents=agents(tools), capabilities=capabilities, services=[SEER]) as here:
        await send_files(here)
        (request,) = here.server.requests

    told = [part for part in request.messages[-1]["content"].splitlines() if "artifactRef" in part]
    described = [json.loads(line)["attachment"] for line in told]
    assert [one["capableAgents"] for one in described] == [["bob"], ["bob"]]
    assert mentioned(request) == expected and expected <= given(request)


async def test_a_fallback_without_tools_is_told_of_none(tmp_path: Path) -> None:
    def answer(request: ReceivedRequest) -> Reply:
        return Says("from the small one") if request.body["model"] == "small" else Status(401, "wrong key")

    services = [SEER, SMALL]
    async with stage(tmp_path, agents=agents(["*"]), services=services, capabilities=BLIND, fallback=["small"]) as here:
        here.server.default = answer
        await send_files(here)
        first, second = here.server.requests

    assert mentioned(first) and mentioned(first) <= given(first)
    assert (second.body["model"], given(second), mentioned(second)) == ("small", set(), set())
    assert "You can write to" not in second.messages[0]["content"]


async def test_a_service_that_refuses_tools_is_told_of_none_in_the_next_request(tmp_path: Path) -> None:
    def answer(request: ReceivedRequest) -> Reply:
        return Status(400, "m does not support tools") if given(request) else Says("without tools")

    async with stage(tmp_path, agents=agents(["*"]), services=[SEER]) as here:
        here.server.default = answer
        await send_files(here)
        first, second = here.server.requests

    assert mentioned(first) and mentioned(first) <= given(first)
    assert (given(second), mentioned(second)) == (set(), set())


@pytest.mark.parametrize(
    ("call", "excluded", "error"),
    [
        (Calls("send_message", {"to": "nobody", "payload": {"text": "x"}}), "list_agents", "unknown_recipient"),
        (Calls("spawn_agent", {"role": "painter"}), "create_role", "unknown_role"),
    ],
)
async def test_an_error_of_a_tool_mentions_no_tool_that_the_model_is_not_given(
    tmp_path: Path, call: Calls, excluded: str, error: str
) -> None:
    async with stage(tmp_path, agents=agents([f"!{excluded}"]), services=[SEER]) as here:
        here.server.script(Says(calls=(call,)), "I could not")
        await here.say("try it")
        await here.heard()
        request = here.server.requests[1]

    result = request.messages[-1]
    assert result["role"] == "tool" and error in result["content"]
    assert mentioned(request) <= given(request) and excluded not in given(request)
