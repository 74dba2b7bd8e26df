"""`coterie mcp` with the SDK's own client: for a folder with and without a server, and for a URL."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Coroutine
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters

from .commands import coterie
from .environment import TIMEOUT_SECONDS, Environment


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 2 * TIMEOUT_SECONDS))


def command(*args: str | Path, **env: str) -> StdioServerParameters:
    arguments = ["-m", "coterie", "mcp", *map(str, args)]
    return StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ) | env)


async def ask(server: StdioServerParameters, mode: Any = "auto") -> str:
    async with Client(server, mode=mode) as client:
        assert {agent["id"] for agent in (await client.call_tool("list_agents", {})).structured_content["agents"]} == {
            "ada",
            "bob",
        }
        result = await client.call_tool("send", {"agent": "ada", "text": "What is it?"})
        return str(result.structured_content["answer"])


def test_a_folder_and_a_url_in_both_revisions(env: Environment) -> None:
    env.script("It is 42.", "It is 43.", "It is 44.")

    assert run(ask(command("--dir", env.folder))) == "It is 42."  # no server runs: it runs the society itself

    env.serve("a-token-for-the-test-of-mcp")
    assert run(ask(command("--dir", env.folder), "legacy")) == "It is 43."
    assert env.society is not None
    url = (env.folder / "data" / "server.json").read_text().split('"url": "')[1].split('"')[0]
    elsewhere = command("--url", f"{url}/mcp", COTERIE_TOKEN="a-token-for-the-test-of-mcp")
    assert run(ask(elsewhere)) == "It is 44."


def test_wrong_options_say_what_is_wrong(env: Environment) -> None:
    assert "needs a token or a key" in coterie("mcp", "--url", "http://127.0.0.1:1").failure
    assert "must be an address" in coterie("mcp", "--url", "127.0.0.1:1", "--token", "x").failure


async def refusal(server: StdioServerParameters) -> str:
    """What the client is told when it connects."""
    try:
        async with Client(server, mode="legacy"):
            return "connected"
    except BaseException as error:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return str(error)


def test_a_wrong_token_is_an_error_that_says_so(env: Environment) -> None:
    env.serve("a-token-for-the-test-of-mcp")

    assert "needs the token" in run(refusal(command("--dir", env.folder, "--token", "wrong")))


def test_another_program_at_the_address_is_an_error_that_says_so() -> None:
    class Page(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>Log in</html>")

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            assert "another program than Coterie" in run(refusal(command("--url", url, "--token", "any")))
        finally:
            server.shutdown()


def test_it_ends_when_its_client_closes_the_input(env: Environment) -> None:
    relay = [sys.executable, "-m", "coterie", "mcp", "--dir", str(env.folder)]
    assert subprocess.run(relay, input=b"", timeout=2 * TIMEOUT_SECONDS).returncode == 0
