"""MCP servers from the registries, over stdio and over HTTP, used by an agent with a scripted model.

They are installed once, into .tools/real/mcp of the checkout. Nothing but the installation leaves this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from coterie.live import CallProgress
from coterie.testing import Calls, Says
from coterie.testing.model_server import ReceivedRequest, Reply
from tests.agent.stage import Stage, each, stage

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".tools" / "real" / "mcp"
SEES = {"input": ["text", "vision"], "output": ["text", "tool_calling"]}
BRANCH = "@modelcontextprotocol/server-"


def npm(package: str) -> Path:
    """Install a package of npm; return its program."""
    folder = CACHE / "npm"
    program = folder / "node_modules" / ".bin" / f"mcp-server-{package}"
    if not program.exists():
        found = shutil.which("npm")
        assert found, "npm is needed for these tests: install Node.js"
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [found, "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"{BRANCH}{package}"], check=True
        )
    return program


def pypi(package: str, *others: str) -> Path:
    """Install a package of PyPI, and the others, into its own environment; return its program."""
    folder = CACHE / package
    program = folder / "bin" / package
    if not program.exists():
        found = shutil.which("uv") or shutil.which("uv", path=str(ROOT / ".tools" / "bin"))
        assert found, "uv is needed for these tests: install it, or run ./dev test"
        subprocess.run([found, "venv", "--clear", "--python", sys.executable, str(folder)], check=True)
        install = [found, "pip", "install", "--python", str(folder / "bin" / "python"), package, *others]
        if subprocess.run(install, stderr=subprocess.DEVNULL).returncode:
            # A proxy may use a certificate that only the system store knows.
            subprocess.run(install, env=os.environ | {"UV_SYSTEM_CERTS": "1"}, check=True)
    return program


def entry(name: str, program: Path, *args: object, **env: str) -> str:
    """Return the section of a server in coterie.toml."""
    arguments = json.dumps([str(arg) for arg in args])
    variables = ", ".join(f"{key} = {json.dumps(value)}" for key, value in env.items())
    return f'[mcp.{name}]\ncommand = "{program}"\nargs = {arguments}\nenv = {{ {variables} }}\nstart_seconds = 120\n'


@asynccontextmanager
async def agent_with(folder: Path, *entries: str) -> AsyncIterator[Stage]:
    (folder / "society").mkdir()
    async with asyncio.timeout(300):
        async with stage(folder / "society", agents="[agents.ada]\n" + "".join(entries), capabilities=SEES) as here:
            yield here


async def results(here: Stage, *calls: Calls) -> list[str]:
    """Let the model make the calls one after the other; return their results."""
    before, heard = len(here.server.requests), len(await here.society.waiting("user"))
    here.server.default = each(ada=[*(Says(calls=(call,)) for call in calls), Says("done")])
    await here.say("go on")
    await here.heard(heard + 1)
    asked = here.server.requests[before + 1 :]
    assert len(asked) == len(calls)
    return [[m["content"] for m in request.body["messages"] if m["role"] == "tool"][-1] for request in asked]


async def result(here: Stage, tool: str, **arguments: Any) -> str:
    return (await results(here, Calls(tool, arguments)))[0]


async def offered(here: Stage, prefix: str) -> set[str]:
    """Wait until tools with the prefix are offered to the model; return their names."""
    while True:
        here.server.default = each(ada=["hello"])
        await here.say("what can you do?")
        await here.heard(len(await here.society.waiting("user")) + 1)
        names = {tool["function"]["name"] for tool in here.server.requests[-1].body["tools"]}
        if found := {name for name in names if name.startswith(prefix)}:
            return found
        await asyncio.sleep(0.5)


@pytest.fixture(autouse=True)
def long_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.agent_runtime.MCP_START_TIMEOUT", timedelta(minutes=3))


# Standard input and output


async def test_everything(tmp_path: Path) -> None:
    async with agent_with(tmp_path, entry("all", npm("everything"), "stdio")) as here:
        names = await offered(here, "all__")
        assert {"all__echo", "all__get-tiny-image", "all__get-sum", "all__read_resource"} <= names
        assert "hello" in await result(here, "all__echo", message="hello")
        assert "5" in await result(here, "all__get-sum", a=2, b=3)

        await result(here, "all__get-tiny-image")
        last = here.server.requests[-1].body["messages"][-1]
        assert last["role"] == "user" and any(part["type"] == "image_url" for part in last["content"])

        listed = json.loads(await result(here, "all__read_resource"))["resources"]
        assert listed and await result(here, "all__read_resource", uri=listed[0]["resource"])


async def test_everything_reports_progress_and_asks_the_model(tmp_path: Path) -> None:
    reports: list[CallProgress] = []
    section = entry("all", npm("everything"), "stdio") + "sampling = true\n"
    async with agent_with(tmp_path, section) as here:
        assert "all__trigger-sampling-request" in await offered(here, "all__")
        here.society.live.subscribe_progress(lambda _, progress: reports.append(progress) if progress else None)
        await result(here, "all__trigger-long-running-operation", duration=1, steps=4)
        assert {one.tool for one in reports} == {"all__trigger-long-running-operation"}
        assert [(one.progress, one.total) for one in reports] == [(step, 4) for step in range(1, 5)]

        def answer(request: ReceivedRequest) -> Reply:
            if "(id: ada)" not in str(request.messages[0]["content"]):
                return "the model speaks"
            call = Calls("all__trigger-sampling-request", {"prompt": "Speak", "maxTokens": 20})
            return "done" if request.messages[-1]["role"] == "tool" else Says(calls=(call,))

        heard = len(await here.society.waiting("user"))
        here.server.default = answer
        await here.say("go on")
        await here.heard(heard + 1)
        assert "the model speaks" in str(here.server.requests[-1].messages[-1]["content"])


async def test_filesystem(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "note.txt").write_text("remember the milk")
    approve = 'approve = ["files__write*"]\n'
    async with agent_with(tmp_path, entry("files", npm("filesystem"), files) + approve) as here:
        assert {"files__read_text_file", "files__write_file"} <= await offered(here, "files__")
        text = await result(here, "files__read_text_file", path=str(files / "note.txt"))
        assert "remember the milk" in text
        outside = await result(here, "files__read_text_file", path=str(tmp_path / "secret.txt"))
        assert "denied" in outside.lower()

        heard = len(await here.society.waiting("user"))
        write = Calls("files__write_file", {"path": str(files / "new.txt"), "content": "new"})
        here.server.default = each(ada=[Says(calls=(write,)), Says("written")])
        await here.say("write")
        question = (await here.heard(heard + 1))[-1]
        assert question.payload["quickReplies"] == ["Approve", "Deny"] and not (files / "new.txt").exists()
        await here.say("Approve", in_reply_to=question.id, option=0)
        await here.heard(heard + 2)
        assert (files / "new.txt").read_text() == "new"


async def test_memory(tmp_path: Path) -> None:
    section = entry("memory", npm("memory"), MEMORY_FILE_PATH=str(tmp_path / "memory.json"))
    async with agent_with(tmp_path, section) as here:
        await offered(here, "memory__")
        entity = {"name": "Ada", "entityType": "person", "observations": ["counts"]}
        await result(here, "memory__create_entities", entities=[entity])
        assert "counts" in await result(here, "memory__read_graph")


async def test_sequential_thinking(tmp_path: Path) -> None:
    async with agent_with(tmp_path, entry("think", npm("sequential-thinking"))) as here:
        await offered(here, "think__")
        thought = {"thought": "first", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1}
        assert "thoughtNumber" in await result(here, "think__sequentialthinking", **thought)


async def test_time(tmp_path: Path) -> None:
    async with agent_with(tmp_path, entry("time", pypi("mcp-server-time"), "--local-timezone", "UTC")) as here:
        await offered(here, "time__")
        moved = await result(
            here, "time__convert_time", source_timezone="UTC", time="12:00", target_timezone="Asia/Tokyo"
        )
        assert "21:00" in moved
        assert "error" in (await result(here, "time__get_current_time", timezone="Nowhere")).lower()


async def test_fetch(tmp_path: Path) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if self.path == "/robots.txt" else 200)
            self.send_header("Content-Type", "text/plain")
            self.end_headers()
            self.wfile.write(b"a page on this machine")

    web = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    Thread(target=web.serve_forever, daemon=True).start()
    try:
        async with agent_with(tmp_path, entry("web", pypi("mcp-server-fetch"), "--allow-private-ips")) as here:
            await offered(here, "web__")
            fetched = await result(here, "web__fetch", url=f"http://127.0.0.1:{web.server_port}/")
            assert "a page on this machine" in fetched
    finally:
        web.shutdown()
        web.server_close()


async def test_git(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    (repository / "new.txt").write_text("new")
    async with agent_with(tmp_path, entry("git", pypi("mcp-server-git"), "--repository", repository)) as here:
        await offered(here, "git__")
        assert "new.txt" in await result(here, "git__git_status", repo_path=str(repository))


async def test_sqlite(tmp_path: Path) -> None:
    # It is no longer maintained, and does not start with the SDK of today.
    section = entry("db", pypi("mcp-server-sqlite", "mcp<2"), "--db-path", tmp_path / "data.db")
    async with agent_with(tmp_path, section) as here:
        await offered(here, "db__")
        await result(here, "db__create_table", query="CREATE TABLE t (a INTEGER)")
        await result(here, "db__write_query", query="INSERT INTO t VALUES (42)")
        assert "42" in await result(here, "db__read_query", query="SELECT a FROM t")


# HTTP


class EverythingOverHttp:
    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self._program = npm("everything")

    @property
    def section(self) -> str:
        return f'[mcp.all]\nurl = "http://127.0.0.1:{self._port}/mcp"\n'

    def start(self) -> None:
        self._process = subprocess.Popen(
            [str(self._program), "streamableHttp"],
            env=os.environ | {"PORT": str(self._port)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while self._process.poll() is None:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
        raise AssertionError("the server did not start")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def http() -> Iterator[EverythingOverHttp]:
    server = EverythingOverHttp()
    server.start()
    yield server
    server.stop()


AGENTS = ("ada", "bob", "cleo", "dan")
CLEAR_ERRORS = {"mcp_unavailable", "mcp_lost", "mcp_error"}


def calling(request: ReceivedRequest) -> Reply:
    """Let every agent call `echo` with the last thing that the person said to it, and say what came back."""
    last = request.messages[-1]
    if last["role"] == "tool":
        return str(last["content"])
    return Says(calls=(Calls("all__echo", {"message": request.last_text.splitlines()[1]}),))


def is_clear(text: str) -> bool:
    """True for a result of the server, or an error of ours that says what happened."""
    try:
        return json.loads(text)["error"] in CLEAR_ERRORS
    except ValueError:
        return text.startswith("Echo: ")


async def test_everything_over_http_with_20_restarts_under_load(tmp_path: Path, http: EverythingOverHttp) -> None:
    (tmp_path / "society").mkdir()
    agents = "".join(f"[agents.{name}]\n" for name in AGENTS)
    answers, stop, answered = dict.fromkeys(AGENTS[1:], 0), asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(600), stage(tmp_path / "society", agents=agents + http.section) as here:
        await offered(here, "all__")
        here.server.default = calling

        async def ask(agent: str, text: str) -> str:
            return (await here.society.ask(agent, text)).text

        async def work(agent: str) -> None:
            while not stop.is_set():
                text = await ask(agent, f"hello {answers[agent]}")
                assert is_clear(text), text
                answers[agent] += 1
                answered.set()

        async with asyncio.TaskGroup() as tasks:
            for agent in AGENTS[1:]:
                tasks.create_task(work(agent))
            for number in range(20):
                await asyncio.to_thread(http.stop)
                await asyncio.to_thread(http.start)
                while not (text := await ask("ada", f"after {number}")).startswith("Echo: "):
                    assert is_clear(text), text  # it came while the next attempt to connect was delayed
                assert text == f"Echo: after {number}"
                while min(answers.values()) <= number:  # every agent calls between any two restarts
                    answered.clear()
                    await answered.wait()
            stop.set()
