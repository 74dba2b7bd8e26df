"""Tools of MCP servers: schemas, results, artifacts and deadlines, on every engine."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from coterie.agent.tools import NAME, ToolResult
from tests.agent.mcp_harness import HttpServer, McpHarness, as_child
from tests.agent.tool_calls import error_of

pytestmark = pytest.mark.slow


async def test_tools_of_a_child_server(mcp: McpHarness, sdk_script: Path) -> None:
    servers = mcp.add(as_child(sdk_script, env={"GREETING": "hello"}))
    assert await servers.connect() == [] and servers.connected_ids == ["demo"]
    await check_tools(mcp)
    assert (await mcp.call("demo__greeting")).text == "hello"


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)  # the transport does not depend on the engine
async def test_tools_of_an_http_server(mcp: McpHarness, http: HttpServer) -> None:
    assert await mcp.add(http.entry).connect() == []
    await check_tools(mcp)


async def check_tools(mcp: McpHarness) -> None:
    assert {"demo__add", "demo__pid", "demo__odd_name_with__nicode"} <= set(mcp.names())
    assert all(NAME.fullmatch(name) for name in mcp.names())
    effects = {name: found.effect for name in mcp.names() if (found := mcp.box.find(name, ["*"]))}
    assert (effects["demo__add"], effects["demo__die_once"], effects["demo__pid"]) == ("pure", "idempotent", "unsafe")
    spec = next(spec for spec in mcp.box.specs(["*"]) if spec.name == "demo__add")
    assert spec.description == "Add two numbers." and set(spec.parameters["properties"]) == {"a", "b"}

    assert await mcp.call("demo__add", a=1, b=2) == ToolResult(ok=True, text="3")
    assert (await mcp.call("demo__odd_name_with__nicode")).text == "odd"
    bad = await mcp.call("demo__add", a="one")
    assert not bad.ok and "valid integer" in bad.text
    assert not (await mcp.call("demo__fail")).ok

    text, artifact = (await mcp.call("demo__draw")).text.splitlines()
    described = json.loads(artifact)
    assert text == "a picture" and (described["type"], described["filename"]) == ("image", "draw.png")
    assert (await mcp.ctx.artifacts.read(described["artifactRef"])).startswith(b"\x89PNG")
    long = await mcp.call("demo__long")
    assert long.artifact_ref and len(long.text) < 20_000

    assert error_of(await mcp.call("demo__hang", timedelta(milliseconds=150))).startswith("tool_timeout: ")
    assert (await mcp.call("demo__add", a=2, b=2)).text == "4"
