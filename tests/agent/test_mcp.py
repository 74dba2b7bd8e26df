"""MCP servers as tools, against real ones made with the SDK: as a child process, and over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from coterie.agent.mcp import McpServers, tool_name
from coterie.agent.tool_context import ToolContext
from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import NAME, ToolResult
from coterie.config import McpEntry
from coterie.testing import FakeClock

pytestmark = pytest.mark.slow

SERVER = '''
import asyncio, os, socket, sys
from pathlib import Path

import uvicorn
from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.types import ToolAnnotations

server = MCPServer("Demo", log_level="ERROR")
lives = Path(__file__).with_name("lives")


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def pid() -> str:
    return str(os.getpid())


@server.tool()
def greeting() -> str:
    return os.environ.get("GREETING", "none")


@server.tool()
def fail() -> str:
    raise ValueError("no such city")


@server.tool()
def draw() -> list:
    return ["a picture", Image(data=b"\\x89PNG\\r\\n\\x1a\\n" + bytes(20), format="png")]


@server.tool()
def long() -> str:
    return "x" * 100_000


@server.tool()
async def hang() -> str:
    await asyncio.Event().wait()


@server.tool()
def die() -> str:
    with lives.open("a") as witness:
        witness.write("died\\n")
    os._exit(3)


@server.tool()
def refuse() -> str:
    raise MCPError(-32000, "not on a Sunday")


@server.tool(annotations=ToolAnnotations(idempotentHint=True))
def die_once() -> str:
    if not lives.exists():
        lives.touch()
        os._exit(3)
    return "alive"


@server.tool(name="odd name/with ünicode")
def odd() -> str:
    return "odd"


async def over_http(port: int) -> None:
    listening = socket.create_server(("127.0.0.1", port))
    print(listening.getsockname()[1], flush=True)
    app = server.streamable_http_app()
    await uvicorn.Server(uvicorn.Config(app, log_level="error")).serve(sockets=[listening])


if len(sys.argv) > 1:
    asyncio.run(over_http(int(sys.argv[1])))
else:
    server.run()
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return path


@dataclass
class Room:
    """A toolbox with servers in it."""

    ctx: ToolContext
    clock: FakeClock
    box: Toolbox = field(default_factory=Toolbox)
    servers: list[McpServers] = field(default_factory=list)

    def add(self, *entries: McpEntry, start: timedelta = timedelta(seconds=30)) -> McpServers:
        self.servers.append(McpServers(entries, self.clock, self.box.adopt, start=start))
        return self.servers[-1]

    async def call(self, name: str, deadline: timedelta = timedelta(seconds=30), **arguments: object) -> ToolResult:
        return await self.box.call(name, arguments, self.ctx, deadline, patterns=["*"])

    def names(self) -> list[str]:
        return [spec.name for spec in self.box.specs(["*"])]


@pytest.fixture
async def room(ctx: ToolContext, clock: FakeClock) -> AsyncIterator[Room]:
    made = Room(ctx, clock)
    yield made
    for servers in made.servers:
        await servers.close()


def as_child(script: Path, **more: object) -> McpEntry:
    return McpEntry(id="demo", command=sys.executable, args=(str(script),), **more)  # type: ignore[arg-type]


class HttpServer:
    def __init__(self, script: Path) -> None:
        self._script, self._port = script, 0
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(self._script), str(self._port)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout
        self._port = int(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def entry(self) -> McpEntry:
        return McpEntry(id="demo", url=f"http://127.0.0.1:{self._port}/mcp")


@pytest.fixture
def http(script: Path) -> Iterator[HttpServer]:
    server = HttpServer(script)
    yield server
    server.stop()


def error_of(result: ToolResult) -> str:
    assert not result.ok
    told = json.loads(result.text)
    return f"{told['error']}: {told['message']}"


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


async def test_a_server_that_runs_as_a_child_offers_its_tools(room: Room, script: Path) -> None:
    servers = room.add(as_child(script, env={"GREETING": "hello"}))
    assert await servers.connect() == [] and servers.connected == ["demo"]
    await try_everything(room)
    assert (await room.call("demo__greeting")).text == "hello"


async def test_a_server_over_http_offers_its_tools(room: Room, http: HttpServer) -> None:
    assert await room.add(http.entry).connect() == []
    await try_everything(room)


async def test_a_child_knows_nothing_of_our_environment_but_what_it_needs(
    room: Room, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GREETING", "a secret")
    await room.add(as_child(script)).connect()
    assert (await room.call("demo__greeting")).text == "none"


async def test_a_server_that_died_while_nobody_called_is_there_again_for_the_next_call(
    room: Room, script: Path
) -> None:
    servers = room.add(as_child(script))
    await servers.connect()
    first = int((await room.call("demo__pid")).text)
    os.kill(first, signal.SIGKILL)
    await until(lambda: servers.connected == [])
    again = await room.call("demo__pid")
    assert again.ok and int(again.text) != first


async def test_a_server_that_dies_during_an_unsafe_call_leaves_its_outcome_unknown_and_comes_back(
    room: Room, script: Path
) -> None:
    await room.add(as_child(script)).connect()
    assert error_of(await room.call("demo__die")).startswith("mcp_lost: the MCP server demo went away during the call")
    assert (await room.call("demo__add", a=1, b=1)).text == "2"
    assert script.with_name("lives").read_text() == "died\n"


async def test_a_server_that_says_no_is_not_taken_for_one_that_went_away(room: Room, script: Path) -> None:
    await room.add(as_child(script)).connect()
    first = (await room.call("demo__pid")).text
    assert error_of(await room.call("demo__refuse")) == "mcp_error: the MCP server demo says: not on a Sunday"
    assert (await room.call("demo__pid")).text == first


async def test_a_call_that_may_be_repeated_is_repeated_when_the_server_dies_on_it(room: Room, script: Path) -> None:
    await room.add(as_child(script)).connect()
    assert (await room.call("demo__die_once")).text == "alive"


async def test_a_server_that_does_not_come_back_is_an_error_result_and_is_left_in_peace_for_a_while(
    room: Room, script: Path, clock: FakeClock
) -> None:
    await room.add(as_child(script)).connect()
    script.rename(script.with_suffix(".away"))
    assert "mcp_lost" in error_of(await room.call("demo__die"))

    assert error_of(await room.call("demo__add", a=1, b=1)).startswith("mcp_unavailable: the MCP server demo cannot be")
    script.with_suffix(".away").rename(script)
    assert "is not there" in error_of(await room.call("demo__add", a=1, b=1))
    assert "next try in 1 s" in error_of(await room.call("demo__add", a=1, b=1))
    await clock.advance(seconds=1)
    assert (await room.call("demo__add", a=1, b=1)).text == "2"


async def test_each_try_that_fails_makes_the_rest_longer_up_to_a_minute(room: Room, clock: FakeClock) -> None:
    servers = room.add(McpEntry(id="gone", command="/nothing/of/the/kind"))
    rests = []
    for _ in range(8):
        await servers.connect()
        [problem] = await servers.connect()
        rests.append(int(problem.message.split("next try in ")[1].split(" s")[0]))
        await clock.advance(seconds=rests[-1])
    assert rests == [1, 2, 4, 8, 16, 32, 60, 60]


async def test_an_http_server_that_went_away_is_an_error_result_until_it_is_back(
    room: Room, http: HttpServer, clock: FakeClock
) -> None:
    await room.add(http.entry).connect()
    http.stop()
    assert error_of(await room.call("demo__pid")).startswith("mcp_")
    assert error_of(await room.call("demo__add", a=1, b=1)).startswith("mcp_unavailable")
    http.start()
    await clock.advance(minutes=1)
    assert (await room.call("demo__add", a=1, b=1)).text == "2"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (McpEntry(id="gone", command="/nothing/of/the/kind"), "No such file or directory"),
        (McpEntry(id="gone", command="true"), "cannot be reached: Connection closed"),
        (McpEntry(id="gone", url="http://127.0.0.1:9/mcp"), "cannot be reached: All connection attempts failed"),
        (McpEntry(id="gone", url="nonsense"), "cannot be reached: "),
        (McpEntry(id="gone"), "the entry names neither a command nor a url"),
    ],
)
async def test_a_server_that_is_not_there_is_a_problem_of_its_own(room: Room, entry: McpEntry, words: str) -> None:
    [problem] = await room.add(entry).connect()
    assert problem.place == "coterie.toml: mcp.gone" and words in problem.message and not problem.fatal
    assert room.names() == []


async def test_a_server_that_never_answers_is_given_up_after_a_time(room: Room) -> None:
    silent = McpEntry(id="gone", command="sleep", args=("60",))
    [problem] = await room.add(silent, start=timedelta(seconds=0.3)).connect()
    assert "did not tell its tools within 0.3 s" in problem.message


async def test_one_server_that_is_not_there_keeps_no_other_away(room: Room, script: Path) -> None:
    problems = await room.add(McpEntry(id="gone", command="/nothing/of/the/kind"), as_child(script)).connect()
    assert len(problems) == 1 and (await room.call("demo__add", a=1, b=1)).ok


async def test_many_calls_that_meet_a_dead_server_start_it_once(room: Room, script: Path) -> None:
    servers = room.add(as_child(script))
    await servers.connect()
    os.kill(int((await room.call("demo__pid")).text), signal.SIGKILL)
    await until(lambda: servers.connected == [])
    answers = await asyncio.gather(*(room.call("demo__pid") for _ in range(5)))
    assert len({answer.text for answer in answers}) == 1 and answers[0].ok


async def test_without_the_sdk_servers_are_absent_and_nothing_else(
    room: Room, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    [problem] = await room.add(as_child(script)).connect()
    assert "mcp" in problem.message


async def test_closing_ends_the_children(room: Room, script: Path) -> None:
    servers = room.add(as_child(script))
    await servers.connect()
    child = int((await room.call("demo__pid")).text)
    await servers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_the_sdk_is_loaded_only_when_a_server_is() -> None:
    code = "import sys, coterie.agent.mcp; print('mcp' in sys.modules or 'pydantic' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("tool", "taken", "name"),
    [
        ("read", (), "files__read"),
        ("a.b c/ü", (), "files__a_b_c__"),
        ("x" * 57, (), "files__" + "x" * 57),
        ("x" * 58, (), "files__" + "x" * 48 + "_"),
        ("a.b", ("files__a_b",), "files__a_b_"),
    ],
)
def test_names_are_made_of_what_every_service_takes(tool: str, taken: tuple[str, ...], name: str) -> None:
    made = tool_name("files", tool, taken)
    assert made.startswith(name) and NAME.fullmatch(made) and made not in taken
    assert made == tool_name("files", tool, taken)


async def until(true: Callable[[], bool]) -> None:
    """What happens to another process is seen here a moment later."""
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0)
