"""MCP clients from npm against a running society: the inspector's command line, and the conformance tests."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from starlette.types import Receive, Scope, Send

from coterie.clock import SystemClock
from coterie.web.addresses import addresses
from coterie.web.app import build_app
from coterie.web.auth import Access
from tests.agent.stage import Stage, stage
from tests.web.conftest import TOKEN

pytestmark = pytest.mark.real

CACHE = Path(__file__).parents[2] / ".tools" / "real" / "mcp" / "npm"
INSPECTOR = "@modelcontextprotocol/inspector@2.12.0"
CONFORMANCE = "@modelcontextprotocol/conformance@0.2.0-alpha.12"
NODE = "node@22"
"""Both need this version or a newer one; many systems have an older one."""
REVISIONS = ("2025-11-25", "2026-07-28")
FIXTURES = (
    "tools-call-",
    "resources-read-",
    "resources-templates-read",
    "prompts-get-",
    "input-required-result-",
    "elicitation-sep",
    "json-schema-2020-12",
    "http-custom-header",
    "server-sse-polling",
    "tasks-",
)
"""Scenarios that call tools, prompts or resources of the suite's own test server."""
NOT_OFFERED = {"completion-complete", "logging-set-level", "resources-subscribe", "resources-unsubscribe"}
"""Scenarios of optional features that the server does not declare."""
UNTESTABLE = {
    "sep-2575-server-rejects-undeclared-capability",
    "sep-2575-missing-capability-http-400",
    "sep-2575-http-server-no-independent-requests-on-stream",
    "sep-2575-server-no-log-without-loglevel",
}
"""Single checks of other scenarios that need such a tool. docs/mcp.md lists all of these."""


def npm(package: str, program: str) -> Path:
    """Install a package of npm; return its program."""
    found = CACHE / "node_modules" / ".bin" / program
    if not found.exists():
        installer = shutil.which("npm")
        assert installer, "npm is needed for these tests: install Node.js"
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [installer, "install", "--no-audit", "--no-fund", "--prefix", str(CACHE), NODE, package]
        subprocess.run(command, check=True)
    return found


@asynccontextmanager
async def served(folder: Path, *, token: str | None = None) -> AsyncIterator[tuple[Stage, str]]:
    """A society and its address. `token`: added to every request, for a client that cannot send one."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    async with stage(folder) as here:
        clock = SystemClock()
        access = Access(TOKEN, here.society.store.info.log_id, clock)
        app = build_app(here.society, access, where=addresses("127.0.0.1", port), clock=clock)

        async def with_token(scope: Scope, receive: Receive, send: Send) -> None:
            if token is not None and scope["type"] == "http":
                scope["headers"] = [*scope["headers"], (b"authorization", f"Bearer {token}".encode())]
            await app(scope, receive, send)

        server = uvicorn.Server(uvicorn.Config(with_token, log_level="critical", lifespan="off"))
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = asyncio.create_task(server.serve([listener]))
        yield here, f"http://127.0.0.1:{port}/mcp"
        for hook in app.state.on_shutdown:
            await hook(0)
        server.should_exit = True
        await serving


async def run(program: Path, *args: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        program,
        *args,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"PATH": os.pathsep.join([str(program.parent), os.environ["PATH"]])},
    )
    async with asyncio.timeout(300):
        output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_the_inspector_talks_to_an_agent(tmp_path: Path) -> None:
    program = npm(INSPECTOR, "mcp-inspector")
    async with served(tmp_path) as (here, url):
        here.server.default = "It is 42."
        common = ["--cli", url, "--transport", "http", "--header", f"Authorization: Bearer {TOKEN}"]

        async def inspect(*args: str) -> dict[str, Any]:
            code, output = await run(program, *common, *args)
            assert code == 0, output
            found: dict[str, Any] = json.loads(output[output.index("{") :])
            return found

        listed = await inspect("--method", "tools/list")
        assert "send" in {tool["name"] for tool in listed["tools"]}
        called = ["--method", "tools/call", "--tool-name", "send", "--tool-arg", "agent=ada", "--tool-arg", "text=Hi"]
        assert (await inspect(*called))["structuredContent"]["answer"] == "It is 42."
        templates = await inspect("--method", "resources/templates/list")
        assert templates["resourceTemplates"][0]["uriTemplate"] == "coterie://artifacts/{artifactRef}"


@pytest.mark.parametrize("revision", REVISIONS)
async def test_conformance(tmp_path: Path, revision: str) -> None:
    program = npm(CONFORMANCE, "conformance")
    requirements = CACHE / "node_modules" / "@modelcontextprotocol" / "conformance" / "requirements"
    required = yaml.safe_load((requirements / f"{revision}.yaml").read_text())
    others = [entry["scenario"] for entry in required["not_scored"] if entry["leg"] == "server"]
    scenarios = [
        name for name in (*required["server"], *others) if not name.startswith(FIXTURES) and name not in NOT_OFFERED
    ]
    (tmp_path / "society").mkdir()
    async with served(tmp_path / "society", token=TOKEN) as (here, url):
        await here.society.artifacts.put(b"A text", "a.txt")
        failed, passed = [], 0
        for scenario in scenarios:
            folder = tmp_path / scenario
            arguments = ["server", "--url", url, "--scenario", scenario, "--spec-version", revision]
            await run(program, *arguments, "--output-dir", str(folder))
            (file,) = folder.rglob("checks.json")
            for check in json.loads(file.read_text()):
                if check["status"] == "FAILURE" and check["id"] not in UNTESTABLE:
                    failed.append((scenario, check["id"], check.get("errorMessage")))
                passed += check["status"] == "SUCCESS"
        print(f"{revision}: {len(scenarios)} scenarios, {passed} checks passed: {', '.join(scenarios)}")
        assert failed == []
