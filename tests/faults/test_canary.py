"""Keys that stand in files, in the environment and in addresses: nothing that the society writes or says holds one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from coterie.testing import ModelServer
from coterie.testing.model_faults import document, error_in_stream
from coterie.testing.replies import Calls, Reply, Says, Status
from coterie.testing.wire import Received

CANARIES = {
    name: f"canary-{number}-{name}-Zq7Vx2Lm9Tb4"
    for number, name in enumerate(("file", "environment", "token", "mcp", "address", "shell", "password"))
}
PATIENCE = 60
"""Seconds. Nothing waits that long; it only keeps what hangs from hanging the tests."""
TROUBLES = ("status-401", "status-400", "status-500", "status-404", "stream", "page", "tools")
"""One agent for each; what its model does."""
MEANT_TO_HOLD_THEM = {"coterie.toml", "llmservices.json", "data/token"}

TOOLS = """
import os
from coterie import tool

@tool
async def leak() -> str:
    "Fail."
    raise RuntimeError("cannot log in with " + os.environ["SHELL_API_KEY"] + " and " + os.environ["CANARY_API_KEY"])

@tool(process=True)
def leak_apart() -> str:
    "Fail elsewhere."
    raise RuntimeError("cannot log in with " + os.environ["SHELL_API_KEY"])

@tool
def show() -> str:
    "Say too much, and so much that it is kept as a file."
    return str(dict(os.environ)) + "x" * 100_000
"""

SERVER = """
import os
from mcp.server import MCPServer

server = MCPServer("Demo", log_level="ERROR")

@server.tool()
def leak() -> str:
    raise ValueError("cannot log in with " + os.environ["DEMO_API_KEY"])

server.run("stdio")
"""


def mind(request: Received) -> Reply:
    """Whatever goes wrong, the service repeats the key it was given."""
    found = re.search(r"\(id: ([\w-]+)\)", request.body["messages"][0]["content"])
    assert found
    key = request.headers["authorization"].removeprefix("Bearer ")
    said = f"no luck with {key}"
    match found[1].removeprefix("env-"):
        case "stream":
            return error_in_stream({"message": said, "type": "invalid_request_error"})
        case "page":
            return document(f"<html><p>{said}".encode(), status=400, content_type="text/html")
        case "tools" if request.body["messages"][-1]["role"] == "user":
            return Says(calls=tuple(Calls(name) for name in ("leak", "leak_apart", "show", "demo__leak")))
        case "tools":
            return "done"
        case status:
            return Status(int(status.removeprefix("status-")), said)


def furnish(folder: Path, server: ModelServer) -> None:
    folder.mkdir()
    agents = "".join(f"[agents.{one}]\n[agents.env-{one}]\nservice = 'second'\n" for one in TROUBLES)
    origin = server.base_url.removesuffix("/v1")
    (folder / "coterie.toml").write_text(
        f"{agents}"
        f'[mcp.demo]\ncommand = "{sys.executable}"\nargs = ["{folder / "server.py"}"]\n'
        f'env = {{ DEMO_API_KEY = "{CANARIES["mcp"]}" }}\n'
        f'[mcp.far]\nurl = "{origin}/mcp?token={CANARIES["address"]}"\n'
    )
    keys = {"main": CANARIES["file"], "second": "${CANARY_API_KEY}"}
    services = [{"id": one, "baseURL": server.base_url, "model": "m", "apiKey": key} for one, key in keys.items()]
    (folder / "llmservices.json").write_text(json.dumps({"services": services}))
    (folder / "tools.py").write_text(TOOLS)
    (folder / "server.py").write_text(SERVER)


ENVIRON = {
    "CANARY_API_KEY": CANARIES["environment"],
    "SHELL_API_KEY": CANARIES["shell"],
    "COTERIE_TOKEN": CANARIES["token"],
}


class Running:
    """A process, and all it has written. On a terminal the log is lines for people."""

    def __init__(self, *, terminal: bool) -> None:
        self.written = b""
        self._terminal = terminal

    @contextlib.asynccontextmanager
    async def run(
        self, *args: str | Path, stop: signal.Signals = signal.SIGKILL, **environ: str
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        outer, inner = pty.openpty() if self._terminal else os.pipe()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "coterie", *map(str, args)),
            env=os.environ | ENVIRON | environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=inner,
        )
        os.close(inner)
        reading = asyncio.create_task(asyncio.to_thread(self._read, outer))
        try:
            yield process
        finally:
            if process.returncode is None:
                process.send_signal(stop)
            assert process.stdout
            self.written += await process.stdout.read()
            await process.wait()
            await reading

    def _read(self, outer: int) -> None:
        with contextlib.suppress(OSError):  # how the end of a terminal is told
            while piece := os.read(outer, 1 << 16):
                self.written += piece
        os.close(outer)

    async def command(self, *args: str | Path) -> None:
        async with self.run(*args) as process:
            assert process.stdout
            self.written += await process.stdout.read()


async def talk(address: str, heard: list[bytes]) -> None:
    """With everybody, then a look at every list."""
    headers = {"Authorization": f"Bearer {CANARIES['token']}"}
    async with httpx.AsyncClient(base_url=f"{address}/api/v1", headers=headers, timeout=PATIENCE) as client:
        async with client.stream("GET", "/events") as events:
            stream = events.aiter_bytes()
            names = [f"{kind}{one}" for one in TROUBLES for kind in ("", "env-")]
            for name in names:
                body = {"to": name, "payload": {"text": "go"}}
                heard.append((await client.post("/messages", json=body)).content)
            while not await settled(client, names):
                heard.append(await anext(stream))
        paths = ["/agents", "/snapshot", "/threads", "/services", "/runs", "/usage", "/dead-letters", "/artifacts"]
        paths += [f"/agents/{name}/history" for name in names] + [f"/threads/{name}/messages" for name in names]
        answers = [await client.get(path) for path in (*paths, "/nothing", "/threads?limit=x")]
        answers += [
            await client.get(f"{address}{path}") for path in ("/metrics", "/healthz", "/readyz", "/openapi.json")
        ]
        refs = re.findall(r'"artifactRef":"([^"]+)"', answers[paths.index("/artifacts")].text)
        assert refs
        answers += [await client.get(f"/artifacts/{ref}") for ref in refs]
        answers += [await client.get("/agents", headers={"Authorization": f"Bearer {CANARIES['token']}x"})]
        answers += [await client.post("/messages", json={"to": "tools", "payload": 1})]
        heard += [answer.content for answer in answers]


async def settled(client: httpx.AsyncClient, names: list[str]) -> bool:
    agents = (await client.get("/agents", params={"limit": 50})).json()["items"]
    states = {one["id"]: (one["state"], one.get("phase")) for one in agents}
    # Whoever waits to try again has told of its trouble.
    return all(states[name] in (("idle", None), ("blocked", None), ("active", "retry")) for name in names)


@pytest.mark.parametrize("terminal", [False, True], ids=["json", "lines"])
async def test_no_key_comes_out_anywhere(tmp_path: Path, terminal: bool) -> None:
    folder, heard, process = tmp_path / "home", list[bytes](), Running(terminal=terminal)
    async with ModelServer() as server, asyncio.timeout(PATIENCE):
        furnish(folder, server)
        server.default = mind
        debug = {"COTERIE_DEBUG": "1"} if terminal else {}
        async with process.run("serve", folder, **debug) as serving:
            assert serving.stdout
            while not (line := await serving.stdout.readline()).startswith(b"Ready"):
                process.written += line
            address = json.loads((folder / "data" / "server.json").read_text())["url"]
            await talk(address, heard)
            await process.command("check", "--dir", folder)
            await process.command("export", "tools", "--dir", folder)
    for wrong in (
        f'[mcp.demo]\nenv = "{CANARIES["mcp"]}"',
        f'[store]\nurl = "postgre://me:{CANARIES["password"]}@x/y"',
    ):
        (folder / "coterie.toml").write_text(wrong)
        await process.command("check", "--dir", folder)
        await process.command("serve", folder)

    said = b"\n".join([process.written, *heard])
    assert b"no luck with" in said and b"cannot log in with" in said
    assert [name for name, canary in CANARIES.items() if canary.encode() in said] == []
    kept = [path for path in folder.rglob("*") if path.is_file()]
    kept = [path for path in kept if str(path.relative_to(folder)) not in MEANT_TO_HOLD_THEM]
    found = {(path.name, name) for path in kept for name, one in CANARIES.items() if one.encode() in path.read_bytes()}
    assert found == set()
