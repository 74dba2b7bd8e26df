"""Pictures that tools return, in the requests of a society: for models with and without vision, and after a restart."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coterie import Society
from coterie.testing import Calls, Says
from tests.agent.stage import Stage, each, stage

PNG = "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"
TOOLS = f"""
from coterie import tool

@tool(effect="pure")
def draw() -> bytes:
    "Draw a picture."
    return bytes.fromhex("{PNG}")
"""
SEES = {"input": ["text", "vision"], "output": ["text", "tool_calling"]}
BLIND = {"input": ["text"], "output": ["text", "tool_calling"]}
DRAW = Says(calls=(Calls("draw"),))


def roles(request: Any) -> list[str]:
    return [message["role"] for message in request.body["messages"]]


def pictures(request: Any) -> list[str]:
    """Return the URLs of the pictures in user messages. All other messages have text only."""
    found = []
    for message in request.body["messages"]:
        if message["role"] == "user" and isinstance(message["content"], list):
            found += [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
        else:
            assert message["content"] is None or isinstance(message["content"], str)
    return found


@pytest.fixture
async def seeing(tmp_path: Path) -> AsyncIterator[Stage]:
    async with stage(tmp_path, tools=TOOLS, capabilities=SEES) as here:
        yield here


async def test_a_picture_of_a_tool_reaches_a_model_with_vision_after_the_results(seeing: Stage, tmp_path: Path) -> None:
    seeing.server.default = each(ada=[Says(calls=(Calls("draw"), Calls("draw"))), "a dot", "the same dot"])
    await seeing.say("draw")
    assert await seeing.texts() == ["a dot"]
    asked = seeing.server.requests[-1]
    assert roles(asked)[-4:] == ["assistant", "tool", "tool", "user"]
    urls = pictures(asked)
    assert len(urls) == 2 and all(url.startswith("data:image/png;base64,iVBOR") for url in urls)

    # The history holds references only, and a new process builds the same request from it.
    rows = [row for row in await seeing.society.store.history("ada") if row.role == "tool"]
    assert [[item["type"] for item in row.attachments] for row in rows] == [["image"], ["image"]]
    await seeing.society.stop()
    async with Society.open(tmp_path) as again:
        seeing.society = again
        await seeing.say("again")
        await seeing.texts(2)
    assert seeing.server.requests[-1].body["messages"][1:6] == asked.body["messages"][1:6]


async def test_a_picture_that_an_agent_reads_reaches_its_model(seeing: Stage) -> None:
    ref = (await seeing.society.artifacts.put(bytes.fromhex(PNG), "kept.png", maker="ada")).ref
    seeing.server.default = each(ada=[Says(calls=(Calls("read_artifact", {"artifactRef": ref}),)), "seen"])
    await seeing.say("look at it")
    assert await seeing.texts() == ["seen"]
    assert len(pictures(seeing.server.requests[-1])) == 1


async def test_a_picture_of_a_tool_is_described_to_a_model_without_vision(tmp_path: Path) -> None:
    async with stage(tmp_path, tools=TOOLS, capabilities=BLIND) as here:
        here.server.default = each(ada=[DRAW, "who can see it?"])
        await here.say("draw")
        await here.texts()
        asked = here.server.requests[-1]
        assert roles(asked)[-1] == "tool" and pictures(asked) == []
        result, described = asked.body["messages"][-1]["content"].splitlines()
        content = json.loads(described)["attachment"]
        assert content["unsupported"] == "vision" and content["artifactRef"] == json.loads(result)["artifactRef"]
