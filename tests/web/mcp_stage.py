"""A society with a scripted model on a real server, and the SDK's MCP client of it in both revisions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client
from mcp.client.extension import ClientExtension
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult

from coterie.cli.server import SocietyServer
from coterie.config import ServerSettings
from tests.agent.stage import Stage, stage
from tests.web.conftest import TOKEN

PREVIOUS, CURRENT = "legacy", "2026-07-28"
"""The SDK's names of the revision with sessions (2025-11-25) and of the one without."""


@dataclass
class McpStage:
    stage: Stage
    base: str

    @asynccontextmanager
    async def client(
        self,
        mode: Any = CURRENT,
        *,
        token: str = TOKEN,
        elicit: Any = None,
        extensions: Sequence[ClientExtension] | None = None,
    ) -> AsyncIterator[Client]:
        timeout = httpx2.Timeout(30)
        async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=timeout) as http:
            transport = streamable_http_client(f"{self.base}/mcp", http_client=http)
            async with Client(transport, mode=mode, elicitation_callback=elicit, extensions=extensions) as client:
                yield client

    async def make_key(self, name: str, **more: Any) -> str:
        async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
            made = await http.post(f"{self.base}/api/v1/keys", json={"name": name, **more})
            return str(made.json()["token"])

    async def asked(self) -> list[str]:
        """The texts of the person's messages, oldest first."""
        thread = await self.stage.society.store.thread("ada", limit=200)
        return [message.payload["text"] for message in thread if message.sender == "user"]


@asynccontextmanager
async def mcp_stage(folder: Path, **options: Any) -> AsyncIterator[McpStage]:
    async with stage(folder, **options) as here:
        server = SocietyServer.bind(ServerSettings(port=0), TOKEN)
        await server.start(here.society, TOKEN)
        try:
            yield McpStage(here, server.addresses.local)
        finally:
            await server.end_streams()
            await server.stop()


def said(result: CallToolResult) -> str:
    """The text of a result, for a model."""
    return "\n".join(block.text for block in result.content if block.type == "text")
