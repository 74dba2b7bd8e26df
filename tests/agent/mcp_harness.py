"""MCP servers of the SDK, as a child process or over HTTP, and a toolbox with their tools."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from coterie.agent.mcp import McpServers
from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import ToolContext, ToolResult
from coterie.clock import Clock
from coterie.config import McpEntry
from coterie.testing import FakeClock

SERVER = '''
import asyncio, json, os, signal, socket, sys
from typing import Annotated

import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver import Image
from mcp.server.mcpserver import Resolve, Sample
from mcp.server.streamable_http import EventStore
from mcp.types import CreateMessageResult, ImageContent, ResourceLink, SamplingMessage, TextContent, ToolAnnotations

server = MCPServer("Demo", log_level="ERROR")


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


@server.tool(annotations=ToolAnnotations(idempotentHint=True))
def die_once() -> str:
    return "alive"


@server.tool(annotations=ToolAnnotations(idempotentHint=True, destructiveHint=True))
def wipe() -> str:
    return "wiped"


@server.tool()
async def grow(ctx: Context) -> str:
    """Add a tool."""
    server.add_tool(lambda: "grown", name="grown")
    await ctx.notify_tools_changed()
    await ctx.session.send_tool_list_changed()
    return "ok"


@server.tool()
async def order(ctx: Context) -> str:
    size = {"type": "string", "enum": ["small", "large"]}
    count = {"type": "integer", "title": "How many?", "maximum": 9}
    schema = {"type": "object", "properties": {"size": size, "count": count}, "required": ["size", "count"]}
    answer = await ctx.session.elicit_form("What shall I order?", schema)
    return f"{answer.action} {json.dumps(answer.content)}"


@server.tool()
async def roots(ctx: Context) -> str:
    return " ".join(str(root.uri) for root in (await ctx.session.list_roots()).roots)


@server.tool()
def photo() -> Image:
    """A picture of 2 MiB, larger than the SDK's limit of an event."""
    return Image(data=b"\\x89PNG\\r\\n\\x1a\\n" + bytes(2 << 20), format="png")


@server.tool()
async def copy(files: int, until: str, ctx: Context) -> str:
    """Report the progress of each file, and end when the file `until` exists."""
    for number in range(1, files + 1):
        await ctx.report_progress(number, files, f"file {number} {os.environ.get('GREETING', '')}".strip())
    while not os.path.exists(until):
        await asyncio.sleep(0.02)
    return "copied"


@server.tool()
async def tick(seconds: float, ctx: Context) -> str:
    """Report progress often, for so many seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        await ctx.report_progress(loop.time())
        await asyncio.sleep(0.02)
    return "ticked"


@server.tool()
async def note(path: str) -> str:
    """Write a line, and never end."""
    with open(path, "a") as file:
        file.write("noted\\n")
    await asyncio.Event().wait()


def question(text: str) -> SamplingMessage:
    return SamplingMessage(role="user", content=TextContent(type="text", text=text))


@server.tool()
async def ask_model(
    text: str, ctx: Context, times: int = 1, max_tokens: int = 50, picture: str = "", in_response: bool = False
) -> str:
    """Ask the model of the client, so many times at once."""
    messages = [question(text)]
    if picture:
        messages[0].content = [messages[0].content, ImageContent(type="image", data=picture, mimeType="image/png")]

    async def ask() -> str:
        answer = await ctx.session.create_message(
            messages,
            max_tokens=max_tokens,
            system_prompt="You serve a tool.",
            temperature=0.5,
            stop_sequences=["END"],
            related_request_id=ctx.request_id if in_response else None,
        )
        return f"{answer.content.text}|{answer.stop_reason}"

    answers = await asyncio.gather(*(ask() for _ in range(times)), return_exceptions=True)
    return "\\n".join(map(str, answers))


@server.tool()
async def ask_model_later(text: str, until: str, ctx: Context) -> str:
    """Ask the model of the client when the file `until` exists, over HTTP in the response to this call."""
    while not os.path.exists(until):
        await asyncio.sleep(0.02)
    return await ask_model(text, ctx, in_response=True)


async def sampled(text: str) -> Sample:
    return Sample([question(text)], max_tokens=50)


@server.tool()
async def ask_model_first(text: str, answer: Annotated[CreateMessageResult, Resolve(sampled)]) -> str:
    """Ask the model of the client, as the newest protocol does: in the result of the call."""
    return answer.content.text


@server.resource("demo://notes", mime_type="text/plain")
def notes() -> str:
    """Notes of the demo."""
    return "remember the milk"


@server.tool()
def link() -> ResourceLink:
    return ResourceLink(uri="demo://notes", name="notes", type="resource_link")


@server.tool(name="odd name/with ünicode")
def odd() -> str:
    return "odd"


async def respond(send, status, body):
    kind = b"application/json" if isinstance(body, dict) else b"text/plain"
    data = json.dumps(body).encode() if isinstance(body, dict) else body.encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": data})


class Events(EventStore):
    """Lets clients read the answer to a call on after the connection broke, as long as this process lives."""

    def __init__(self):
        self.stored = []

    async def store_event(self, stream_id, message):
        self.stored.append((stream_id, message))
        return str(len(self.stored))

    async def replay_events_after(self, last_event_id, send_callback):
        return None


class Legacy:
    """Rejects the newest protocol version, so that clients open a session, which ends with this process.

    `refusal`: the answer to a request of an unknown session, in the words of different servers.
    """

    def __init__(self, app, refusal):
        self.app, self.refusal = app, refusal

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        key = dict(scope["headers"]).get(b"authorization", b"").decode()
        if os.environ.get("DEMO_KEY", key) != key:
            return await respond(send, 401, "who are you?")
        body, more = b"", scope["method"] == "POST"
        while more:
            part = await receive()
            body, more = body + part.get("body", b""), part.get("more_body", False)
        if b"server/discover" in body:
            error = {"code": -32601, "message": "Method not found"}
            return await respond(send, 200, {"jsonrpc": "2.0", "id": json.loads(body)["id"], "error": error})
        parts = [{"type": "http.request", "body": body}] if body else []
        is_refused = False

        async def replay():
            return parts.pop() if parts else await receive()

        async def reply(message):
            nonlocal is_refused
            if message["type"] == "http.response.start" and message["status"] == 404:
                is_refused = True
                error = {"code": -32000, "message": "Bad Request: No valid session ID provided"}
                answer = {"jsonrpc": "2.0", "id": None, "error": error}
                match self.refusal:
                    case "400":
                        await respond(send, 400, answer)
                    case "410":
                        await respond(send, 410, "gone")
                    case "404":
                        await respond(send, 404, answer)
                    case "plain":
                        await respond(send, 404, "Session not found")
            elif not is_refused:
                await send(message)

        await self.app(scope, replay, reply)


async def serve_http(listening: socket.socket, refusal: str) -> None:
    app = server.streamable_http_app(event_store=Events() if "RESUMABLE" in os.environ else None, retry_interval=50)
    if refusal:
        app = Legacy(app, refusal)
    await uvicorn.Server(uvicorn.Config(app, log_level="error")).serve(sockets=[listening])


def serve_on_command(refusal: str) -> None:
    """Serve HTTP in a child process. Each line on standard input ends it; "start" starts the next one at once.

    The imports, which take a second, are done once.
    """
    port = child = 0
    for line in iter(sys.stdin.readline, ""):
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            child = 0
        if line.strip() == "start":
            listening = socket.create_server(("127.0.0.1", port))
            port = listening.getsockname()[1]
            if not (child := os.fork()):
                asyncio.run(serve_http(listening, refusal))
                os._exit(0)
            listening.close()
        print(port, flush=True)
    if child:
        os.kill(child, signal.SIGKILL)


if len(sys.argv) > 1:
    serve_on_command(sys.argv[1].removeprefix("http"))
else:
    server.run()
'''


@dataclass
class McpHarness:
    """A toolbox with the tools of MCP servers."""

    ctx: ToolContext
    clock: FakeClock
    box: Toolbox = field(default_factory=Toolbox)
    servers: list[McpServers] = field(default_factory=list)

    keys: dict[str, str] = field(default_factory=dict)
    patterns: Sequence[str] = ("*",)
    """The tools that the agent may use."""

    def add(
        self,
        *entries: McpEntry,
        start: timedelta | None = timedelta(seconds=30),
        max_wait: timedelta = timedelta(0),
        clock: Clock | None = None,
    ) -> McpServers:
        servers = McpServers(
            entries,
            clock or self.clock,
            self.box.replace_tools,
            find_key=self.keys.get,
            start_timeout=start,
            max_wait=max_wait,
        )
        self.servers.append(servers)
        return servers

    async def call(self, name: str, deadline: timedelta = timedelta(seconds=30), **arguments: object) -> ToolResult:
        ctx = replace(self.ctx, tools=self.box.given_names(self.patterns))
        return await self.box.call(name, arguments, ctx, deadline, patterns=self.patterns)

    def names(self) -> list[str]:
        return [spec.name for spec in self.box.specs(["*"])]


def as_child(script: Path, **more: object) -> McpEntry:
    return McpEntry(id="demo", command=sys.executable, args=(str(script),), **more)  # type: ignore[arg-type]


class HttpServer:
    """A server of the SDK over HTTP. `refusal`: it has sessions, and refuses unknown ones so; see `Legacy`."""

    def __init__(self, script: Path, refusal: str = "", **env: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script), f"http{refusal}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | env,
        )
        self._port = 0
        self.start()

    def start(self) -> None:
        self._port = self._command("start")

    def restart(self) -> None:
        """Kill the server, and start another one on its port."""
        self.start()

    def stop(self) -> None:
        """Kill the server."""
        self._command("stop")

    def close(self) -> None:
        self._process.communicate()

    def _command(self, line: str) -> int:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    @property
    def entry(self) -> McpEntry:
        return McpEntry(id="demo", url=f"http://127.0.0.1:{self._port}/mcp")
