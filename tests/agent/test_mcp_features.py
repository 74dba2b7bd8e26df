"""Settings and features of MCP servers: keys, headers, approval, changed tools, resources, roots, large pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.agent.mcp_connection import resolve_server, secrets_of
from coterie.config import McpEntry
from tests.agent.mcp_harness import HttpServer, McpHarness, as_child
from tests.agent.tool_calls import error_of, wait_until
from tests.engines import Engine

pytestmark = pytest.mark.slow

KEY = "sesame-open-8142"
MakeServer = Callable[..., HttpServer]


@pytest.fixture
def engine() -> Engine:
    """None of this depends on the engine: SQLite only."""
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


# Keys


async def test_a_header_with_a_reference_carries_the_key(mcp: McpHarness, serve: MakeServer) -> None:
    server = serve("404", DEMO_KEY=f"Bearer {KEY}")
    mcp.keys["DEMO_TOKEN"] = KEY
    entry = replace(server.entry, headers={"Authorization": "Bearer ${DEMO_TOKEN}"})
    assert await mcp.add(entry).connect() == []
    assert (await mcp.call("demo__add", a=1, b=1)).text == "2"


async def test_a_key_of_a_reference_is_given_to_the_server_and_redacted_from_its_results(
    mcp: McpHarness, script: Path
) -> None:
    mcp.keys["ANY_NAME"] = KEY
    await mcp.add(as_child(script, env={"GREETING": "hello ${ANY_NAME}"})).connect()
    assert (await mcp.call("demo__greeting")).text == "hello ***"


async def test_a_reference_that_is_not_set_is_a_problem_that_names_it(mcp: McpHarness, script: Path) -> None:
    [problem] = await mcp.add(as_child(script, env={"GREETING": "${MISSING}"})).connect()
    assert "MISSING, which env.GREETING refers to, is set neither in the environment nor in" in problem.message


def test_references_are_resolved_in_args_env_url_and_headers_and_are_secrets() -> None:
    entry = McpEntry(
        id="x",
        command="run",
        args=("--as", "${NAME}", "$${NAME}", "${HOME}/files"),
        env={"A": "a ${NAME}"},
        url="http://127.0.0.1/${NAME}",
        headers={"X-Who": "${NAME}", "Authorization": "Bearer literal-token"},
    )
    keys = {"NAME": KEY, "HOME": "/home/ada"}
    server = resolve_server(entry, keys.get)
    assert server.args == ("--as", KEY, "${NAME}", "/home/ada/files")
    assert (server.env, server.url) == ({"A": f"a {KEY}"}, f"http://127.0.0.1/{KEY}")
    assert server.headers == {"X-Who": KEY, "Authorization": "Bearer literal-token"}
    assert set(server.secrets) == {KEY, "literal-token"}
    assert set(secrets_of(entry, lambda name: None)) == {"literal-token"}


# Tools


async def test_tools_matching_approve_need_approval(mcp: McpHarness, script: Path) -> None:
    await mcp.add(as_child(script, approve=("demo__p*", "greet*"))).connect()
    needs = {name for name in mcp.names() if (tool := mcp.box.find(name, ["*"])) and tool.approval}
    assert needs == {"demo__pid", "demo__greeting"}


async def test_a_tool_that_requires_tasks_is_not_offered_and_the_log_says_so(
    mcp: McpHarness, script: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = mcp.add(as_child(script))
    await servers.connect()
    await servers.refresh()
    assert "demo__add" in mcp.names() and "demo__later" not in mcp.names() and servers.left_out == ["later"]
    told = [record.getMessage() for record in caplog.records if "must run as tasks" in record.getMessage()]
    assert told == ["tools of the MCP server demo are not offered, because they must run as tasks: later"]


async def test_a_tool_that_may_run_as_a_task_is_called_plainly(mcp: McpHarness, script: Path) -> None:
    await mcp.add(as_child(script)).connect()
    assert (await mcp.call("demo__greeting")).text == "none"


async def test_a_destructive_tool_is_unsafe_even_if_it_is_idempotent(mcp: McpHarness, sdk_script: Path) -> None:
    await mcp.add(as_child(sdk_script)).connect()
    wipe = mcp.box.find("demo__wipe", ["*"])
    assert wipe and wipe.effect == "unsafe"


@pytest.mark.parametrize("transport", ["child", "http", "http with sessions"])
async def test_tools_that_a_server_adds_are_offered(
    mcp: McpHarness, sdk_script: Path, serve: MakeServer, transport: str
) -> None:
    match transport:
        case "child":
            entry = as_child(sdk_script)
        case "http":
            entry = serve().entry
        case _:
            entry = serve("404").entry
    await mcp.add(entry).connect()
    assert "demo__grown" not in mcp.names()
    assert (await mcp.call("demo__grow")).ok
    await wait_until(lambda: "demo__grown" in mcp.names())
    assert (await mcp.call("demo__grown")).text == "grown"


async def test_start_seconds_limits_the_start(mcp: McpHarness) -> None:
    silent = McpEntry(id="gone", command="sleep", args=("60",), start_seconds=1)
    [problem] = await mcp.add(silent, start=None).connect()
    assert "did not list its tools within 1 s" in problem.message


# Resources, roots and results


async def test_a_resource_that_a_result_links_to_is_read(mcp: McpHarness, sdk_script: Path) -> None:
    await mcp.add(as_child(sdk_script)).connect()
    link = json.loads((await mcp.call("demo__link")).text.splitlines()[0])
    assert (link["resource"], link["readWith"]) == ("demo://notes", "demo__read_resource")
    assert (await mcp.call(link["readWith"], uri=link["resource"])).text == "remember the milk"
    listed = json.loads((await mcp.call("demo__read_resource")).text)["resources"]
    assert [one["resource"] for one in listed] == ["demo://notes"]
    assert error_of(await mcp.call("demo__read_resource", uri="demo://none")).startswith("mcp_error")


async def test_a_link_names_no_tool_that_the_agent_may_not_use(mcp: McpHarness, sdk_script: Path) -> None:
    await mcp.add(as_child(sdk_script)).connect()
    mcp.patterns = ("demo__*", "!demo__read*")
    result = await mcp.call("demo__link")
    assert json.loads(result.text.splitlines()[0]) == {"resource": "demo://notes", "name": "notes"}


async def test_a_server_without_resources_has_no_tool_for_them(mcp: McpHarness, script: Path) -> None:
    await mcp.add(as_child(script)).connect()
    assert "demo__read_resource" not in mcp.names()


async def test_a_server_is_told_its_roots(mcp: McpHarness, serve: MakeServer, tmp_path: Path) -> None:
    await mcp.add(replace(serve("404").entry, roots=(str(tmp_path),))).connect()
    assert (await mcp.call("demo__roots")).text == tmp_path.as_uri()


@pytest.mark.parametrize("refusal", ["", "404"])
async def test_a_large_picture_over_http_is_attached_to_the_result(
    mcp: McpHarness, serve: MakeServer, refusal: str
) -> None:
    await mcp.add(serve(refusal).entry).connect()
    result = await mcp.call("demo__photo")
    [picture] = result.attachments
    assert result.ok and (picture.type, picture.filename) == ("image", "photo.png") and picture.size > 2 << 20
