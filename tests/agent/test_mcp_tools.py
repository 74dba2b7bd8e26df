"""What servers offer is a tool like any other; what it leaves behind is kept, in a store of either kind."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from coterie.agent.tools import NAME, ToolResult
from tests.agent.mcp_room import HttpServer, Room, as_child, error_of

pytestmark = pytest.mark.slow


async def test_a_server_that_runs_as_a_child_offers_its_tools(room: Room, script: Path) -> None:
    servers = room.add(as_child(script, env={"GREETING": "hello"}))
    assert await servers.connect() == [] and servers.connected_ids == ["demo"]
    await try_everything(room)
    assert (await room.call("demo__greeting")).text == "hello"


async def test_a_server_over_http_offers_its_tools(room: Room, http: HttpServer) -> None:
    assert await room.add(http.entry).connect() == []
    await try_everything(room)


async def try_everything(room: Room) -> None:
    assert {"demo__add", "demo__pid", "demo__odd_name_with__nicode"} <= set(room.names())
    assert all(NAME.fullmatch(name) for name in room.names())
    effects = {name: found.effect for name in room.names() if (found := room.box.find(name, ["*"]))}
    assert (effects["demo__add"], effects["demo__die_once"], effects["demo__pid"]) == ("pure", "idempotent", "unsafe")
    spec = next(spec for spec in room.box.specs(["*"]) if spec.name == "demo__add")
    assert spec.description == "Add two numbers." and set(spec.parameters["properties"]) == {"a", "b"}

    assert await room.call("demo__add", a=1, b=2) == ToolResult(ok=True, text="3")
    assert (await room.call("demo__odd_name_with__nicode")).text == "odd"
    bad = await room.call("demo__add", a="one")
    assert not bad.ok and "valid integer" in bad.text
    assert not (await room.call("demo__fail")).ok

    words, artifact = (await room.call("demo__draw")).text.splitlines()
    described = json.loads(artifact)
    assert words == "a picture" and (described["type"], described["filename"]) == ("image", "draw.png")
    assert (await room.ctx.artifacts.read(described["artifactRef"])).startswith(b"\x89PNG")
    long = await room.call("demo__long")
    assert long.artifact_ref and len(long.text) < 20_000

    assert error_of(await room.call("demo__hang", timedelta(milliseconds=150))).startswith("tool_timeout: ")
    assert (await room.call("demo__add", a=2, b=2)).text == "4"
