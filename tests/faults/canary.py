"""A society in which every key is a canary, and services, tools and MCP servers repeat the keys they get."""

from __future__ import annotations

import json
import re
import sys

import httpx

from coterie.testing.model_faults import document, error_in_stream
from coterie.testing.model_server import Calls, ReceivedRequest, Reply, Says, Status
from tests.cli.environment import TIMEOUT_SECONDS, Environment

CANARIES = {
    name: f"canary-{number}-{name}-Zq7Vx2Lm9Tb4"
    for number, name in enumerate(
        ("file", "environment", "token", "mcp", "argument", "address", "shell", "password", "panel")
    )
}
ENVIRON = {
    "CANARY_API_KEY": CANARIES["environment"],
    "SHELL_API_KEY": CANARIES["shell"],
    "COTERIE_TOKEN": CANARIES["token"],
}
SECRET_FILES = {"coterie.toml", "llmservices.json", "data/token", "data/secrets.json", "data/server.json"}
FAILURES = ("status-401", "status-400", "status-500", "status-404", "stream", "page", "tools")
"""How a model fails. Each has one agent with a key from the file and one with a key from the environment."""
LAST_TOOL = "demo__die"
AGENTS = [f"{kind}{name}" for name in FAILURES for kind in ("", "env-")]

TOOLS = """
import asyncio, os
from coterie import tool

@tool
async def leak() -> str:
    "Fail."
    raise RuntimeError("cannot log in with " + os.environ["SHELL_API_KEY"] + " and " + os.environ["CANARY_API_KEY"])

@tool(process=True)
def leak_apart() -> str:
    "Fail in another process."
    raise RuntimeError("cannot log in with " + os.environ["SHELL_API_KEY"])

@tool
async def wait() -> None:
    "Wait a little."
    await asyncio.sleep(0.5)

@tool
def show() -> str:
    "Return the environment and so much text that the result is stored as a file."
    return str(dict(os.environ)) + "x" * 100_000
"""

SERVER = """
import os, sys
from mcp.server import MCPServer

server = MCPServer("Demo")
keys = os.environ["DEMO_API_KEY"] + " and " + sys.argv[-1]
print(os.environ["DEMO_API_KEY"], flush=True)  # short, so that an error of the SDK shows it whole
print("begun with " + keys, file=sys.stderr, flush=True)

@server.tool()
def leak() -> str:
    raise ValueError("cannot log in with " + keys)

@server.tool()
def die() -> str:
    print("died with " + keys, end="", file=sys.stderr, flush=True)
    os._exit(3)

server.run("stdio")
"""


def make_society(env: Environment) -> None:
    folder, base_url = env.folder, env.model.base_url
    env.model.default = answer
    agents = "".join(f"[agents.{one}]\n[agents.env-{one}]\nservice = 'second'\n" for one in FAILURES)
    command = f"command = {sys.executable!r}\nenv = {{ DEMO_API_KEY = {CANARIES['mcp']!r} }}\n"
    (folder / "coterie.toml").write_text(
        f"{agents}[mcp.demo]\n{command}args = ['server.py', '--token', {CANARIES['argument']!r}]\n".replace(
            "server.py", str(folder / "server.py")
        )
        + f"[mcp.broken]\n{command}args = ['-c', 'import os; os.nothing(os.environ[\"DEMO_API_KEY\"])']\n"
        f"[mcp.far]\nurl = '{base_url.removesuffix('/v1')}/mcp?token={CANARIES['address']}'\n"
    )
    keys = {"main": CANARIES["file"], "second": "${CANARY_API_KEY}"}
    services = [{"id": one, "baseURL": base_url, "model": "m", "apiKey": key} for one, key in keys.items()]
    (folder / "llmservices.json").write_text(json.dumps({"services": services}))
    (folder / "tools.py").write_text(TOOLS)
    (folder / "server.py").write_text(SERVER)


def answer(request: ReceivedRequest) -> Reply:
    """Fail as the id of the agent says, with an error that repeats the key of the request."""
    said = f"no luck with {request.headers['authorization'].removeprefix('Bearer ')}"
    messages = request.body["messages"]
    found = re.search(r"\(id: ([\w-]+)\)", str(messages[0]["content"]))
    match found[1].removeprefix("env-") if found else "status-401":  # a health check has no agent
        case "stream":
            return error_in_stream({"message": said, "type": "invalid_request_error"})
        case "page":
            return document(f"<html><p>{said}".encode(), status=400, content_type="text/html")
        case "tools" if LAST_TOOL not in str(request.body["tools"]):  # the MCP server has not started yet
            return Says(calls=(Calls("wait"),))
        case "tools" if LAST_TOOL not in str(messages[1:]):
            return Says(calls=tuple(Calls(name) for name in ("leak", "leak_apart", "show", "demo__leak", LAST_TOOL)))
        case "tools":
            return "done"
        case status:
            return Status(int(status.removeprefix("status-")), said)


class Visitor:
    """Sends messages, reads every resource and makes mistakes; `received` has all responses by kind."""

    def __init__(self, address: str) -> None:
        headers = {"Authorization": f"Bearer {CANARIES['token']}"}
        self._client = httpx.Client(base_url=f"{address}/api/v1", headers=headers, timeout=TIMEOUT_SECONDS)
        self._address = address
        self.received: dict[str, str] = {"events": "", "answers": "", "history": "", "errors": "", "artifacts": ""}

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()

    def send_messages(self) -> None:
        with self._client.stream("GET", "/events") as events:
            stream = events.iter_text()
            for name in AGENTS:
                self._note("answers", self._client.post("/messages", json={"to": name, "payload": {"text": "go"}}))
            while not self._settled():
                self.received["events"] += next(stream)

    def read_everything(self) -> None:
        lists = ("agents", "snapshot", "dead-letters", "messages", "services", "runs", "usage", "artifacts", "delayed")
        for path in (*(f"/{name}" for name in lists), f"{self._address}/metrics"):
            self._note("answers", self._client.get(path))
        for name in AGENTS:
            self._note("history", self._client.get(f"/agents/{name}/history"))
            self._note("history", self._client.get(f"/threads/{name}/export"))
        for one in self._client.get("/artifacts").json()["items"]:
            self._note("artifacts", self._client.get(f"/artifacts/{one['artifactRef']}"))

    def make_mistakes(self) -> None:
        client, key, url = self._client, CANARIES["panel"], "http://127.0.0.1:9/v1"
        self._note("errors", client.get("/agents", headers={"Authorization": f"Bearer {CANARIES['token']}x"}))
        self._note("errors", client.post("/messages", json={"to": "tools", "payload": 1}))
        self._note("errors", client.put("/services/third", json={"baseURL": 1, "model": "m", "key": key}))
        self._note("errors", client.put("/services/third", json={"baseURL": url, "model": "m", "key": [key]}))
        self._note("answers", client.put("/services/third", json={"baseURL": url, "model": "m", "key": key}))
        self._note("answers", client.post("/services/third/test"))
        self._note("answers", client.post("/services/main/test"))
        self._note("answers", client.post("/reload"))

    def _settled(self) -> bool:
        agents = self._client.get("/agents", params={"limit": 50}).json()["items"]
        states = {one["id"]: (one["state"], one.get("phase")) for one in agents}
        # An agent that waits for a retry has reported its error.
        return all(states[name] in (("idle", None), ("blocked", None), ("active", "retry")) for name in AGENTS)

    def _note(self, kind: str, answer: httpx.Response) -> None:
        assert answer.is_success is (kind != "errors"), (answer.url, answer.text)
        self.received[kind] += f"{answer.headers}\n{answer.text}\n"
