"""The server is killed while an agent answers a client of a door: its retry gets the answer, asked once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import httpx2
import pytest
from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
from a2a.client.errors import A2AClientError
from a2a.types import a2a_pb2 as a2a
from a2a.utils.errors import A2AError
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from coterie.testing import ModelServer
from tests.agent.held_answer import HeldAnswer

from .harness import scaled_timeout

TOKEN = "a-token-of-the-tests-0123456789abcdef"
CLIENTS = ("2026-07-28", "a2a", "stdio", "legacy")
"""MCP over HTTP in the current revision, A2A, MCP over stdio, and MCP in the previous revision."""


class Served:
    """`coterie serve` as a process of its own that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "coterie", "serve", str(self._folder), "--port", "0",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"COTERIE_TOKEN": TOKEN},
        )  # fmt: skip
        assert self._process.stdout is not None
        async with asyncio.timeout(scaled_timeout()):
            while not (line := await self._process.stdout.readline()).startswith(b"Ready"):
                assert line, "the server did not start"

    async def kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    @property
    def url(self) -> str:
        return str(json.loads((self._folder / "data" / "server.json").read_text())["url"])

    @asynccontextmanager
    async def client(self, kind: str) -> AsyncIterator[Client]:
        if kind == "stdio":
            command = StdioServerParameters(
                command=sys.executable,
                args=["-m", "coterie", "mcp", "--dir", str(self._folder)],
                env=dict(os.environ) | {"COTERIE_TOKEN": TOKEN},
            )
            async with Client(command) as client:
                yield client
            return
        async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=180) as http:
            transport = streamable_http_client(f"{self.url}/mcp", http_client=http)
            async with Client(transport, mode=kind) as client:
                yield client


async def ask_a2a(served: Served, text: str, is_writing: asyncio.Event) -> str:
    """Send the message, with the same id, again until its task has ended."""
    message = a2a.Message(message_id=text, role=a2a.ROLE_USER, parts=[a2a.Part(text=text)])
    while True:
        try:
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=180) as http:
                card = await A2ACardResolver(http, f"{served.url}/a2a/ada").get_agent_card()
                client = ClientFactory(ClientConfig(httpx_client=http)).create(card)
                async for event in client.send_message(a2a.SendMessageRequest(message=message)):
                    said = [part.text for part in event.status_update.status.message.parts]
                    if any("The answer" in one for one in said):
                        is_writing.set()
                    artifact = event.artifact_update.artifact if event.HasField("artifact_update") else None
                    for answer in [artifact] if artifact else event.task.artifacts:
                        return str(answer.parts[0].text)
        except (A2AError, A2AClientError, httpx.TransportError):
            await asyncio.sleep(0.1)


async def ask_mcp(served: Served, kind: str, text: str, is_writing: asyncio.Event) -> str:
    """Call `send` again until it has an answer. Over stdio one call must be enough: the relay repeats it."""

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        if message and "The answer" in message:
            is_writing.set()

    while True:
        try:
            async with served.client(kind) as client:
                arguments = {"agent": "ada", "text": text, "waitSeconds": 60}
                result = await client.call_tool("send", arguments, progress_callback=on_progress)
                if not result.is_error:
                    return str(result.structured_content["answer"])
        except* (MCPError, httpx2.TransportError, OSError, ConnectionError) as group:
            if kind == "stdio":
                raise group.exceptions[0] from None
        await asyncio.sleep(0.1)


async def survive(folder: Path, kills: int, clients: Sequence[str] = CLIENTS) -> None:
    folder.mkdir()
    (folder / "coterie.toml").write_text("[agents.ada]\n")
    async with ModelServer() as model:
        service = {"id": "main", "baseURL": model.base_url, "model": "m"}
        (folder / "llmservices.json").write_text(json.dumps({"services": [service]}))
        served = Served(folder)
        await served.start()
        try:
            async with asyncio.timeout(scaled_timeout(60 + 10 * kills)):
                for number in range(kills):
                    held, is_writing = HeldAnswer("The answer", f" to {number}"), asyncio.Event()
                    model.default = held
                    kind, text = clients[number % len(clients)], f"Question {number}"
                    work = (
                        ask_a2a(served, text, is_writing) if kind == "a2a" else ask_mcp(served, kind, text, is_writing)
                    )
                    asking = asyncio.create_task(work)
                    await is_writing.wait()
                    await served.kill()
                    held.may_end.set()
                    await served.start()
                    assert await asking == f"The answer to {number}"
        finally:
            await served.kill()
    with contextlib.closing(sqlite3.connect(folder / "data" / "coterie.db")) as db:
        asked = [json.loads(row[0])["text"] for row in db.execute("SELECT payload FROM messages WHERE sender = 'user'")]
    assert sorted(asked) == sorted(f"Question {number}" for number in range(kills))


async def test_after_a_kill_the_retry_gets_the_answer_of_the_one_message(tmp_path: Path) -> None:
    await survive(tmp_path / "home", 3)


@pytest.mark.full
@pytest.mark.parametrize("client", CLIENTS)
async def test_after_fifty_kills_every_message_was_sent_once(tmp_path: Path, client: str) -> None:
    await survive(tmp_path / "home", 50, [client])
