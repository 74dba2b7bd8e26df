"""MCP servers made with the SDK, as a child process or over HTTP, and a toolbox that has their tools."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from coterie.agent.mcp import McpServers
from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import ToolContext, ToolResult
from coterie.config import McpEntry
from coterie.testing import FakeClock
from tests.faults.harness import patience

SERVER = '''
import asyncio, os, signal, socket, subprocess, sys, threading, time
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


@server.tool()
async def settle_in(witness: str) -> str:
    """Ignore SIGTERM and the end of standard input, and start a child that leaves the process group."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(15, 1); "
    code += f"f = open({witness!r}, 'w'); f.write('up'); f.flush(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdin=subprocess.DEVNULL,
                     stdout=subprocess.DEVNULL)
    threading.Thread(target=time.sleep, args=(600,)).start()  # keeps this process when its input has ended
    return str(os.getpid())


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


@dataclass
class Room:
    """A toolbox with servers in it."""

    ctx: ToolContext
    clock: FakeClock
    box: Toolbox = field(default_factory=Toolbox)
    servers: list[McpServers] = field(default_factory=list)

    def add(self, *entries: McpEntry, start: timedelta = timedelta(seconds=30)) -> McpServers:
        self.servers.append(McpServers(entries, self.clock, self.box.replace_tools, start_timeout=start))
        return self.servers[-1]

    async def call(self, name: str, deadline: timedelta = timedelta(seconds=30), **arguments: object) -> ToolResult:
        return await self.box.call(name, arguments, self.ctx, deadline, patterns=["*"])

    def names(self) -> list[str]:
        return [spec.name for spec in self.box.specs(["*"])]


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


def error_of(result: ToolResult) -> str:
    assert not result.ok
    told = json.loads(result.text)
    return f"{told['error']}: {told['message']}"


async def until(true: Callable[[], bool]) -> None:
    """What happens to another process is seen here a moment later."""
    async with asyncio.timeout(patience(10)):
        while not true():
            await asyncio.sleep(0.01)
