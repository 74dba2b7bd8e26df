"""Fixtures: a tool context with a real artifact service, and MCP servers."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.agent.service import AgentDirectory
from coterie.agent.tools import ToolContext
from coterie.agents import Profile
from coterie.artifact_service import ArtifactService
from coterie.llm.config import ServiceEntry, ServiceRegistry
from coterie.llm.learned_limits import LearnedLimits
from coterie.llm.routing import CapabilityRouter, ContentAdapter
from coterie.llm.service import Capabilities
from coterie.messages import Payload, Receipt
from coterie.store import Store
from coterie.stores.blobs import FolderBlobStore
from coterie.testing import FakeClock
from tests.agent import stdio_server
from tests.agent.mcp_harness import SERVER, HttpServer, McpHarness


@pytest.fixture
def directory(clock: FakeClock) -> AgentDirectory:
    """`ada` reads text; `bob` also has vision."""
    vision = Capabilities(input=frozenset({"text", "vision"}), output=frozenset({"text", "tool_calling"}))
    services = ServiceRegistry(
        [
            ServiceEntry(id="plain", base_url="http://127.0.0.1:9/v1", model="m"),
            ServiceEntry(id="vision", base_url="http://127.0.0.1:9/v1", model="m", capabilities=vision),
        ]
    )
    agents = [Profile(id="ada", name="Ada"), Profile(id="bob", name="Bob", service="vision")]
    return AgentDirectory(services, LearnedLimits(clock), agents)


@pytest.fixture
def artifact_service(store: Store, clock: FakeClock, tmp_path: Path) -> ArtifactService:
    (tmp_path / "artifacts").mkdir()
    return ArtifactService(store, FolderBlobStore(tmp_path / "artifacts"), clock, max_file_bytes=60_000_000)


@pytest.fixture
def ctx(
    store: Store, artifact_service: ArtifactService, directory: AgentDirectory, clock: FakeClock, tmp_path: Path
) -> ToolContext:
    """The context of a call by `ada`."""

    async def send(to: str, payload: Payload, **options: Any) -> Receipt:
        raise NotImplementedError

    router = CapabilityRouter(
        store, FolderBlobStore(tmp_path / "artifacts"), ContentAdapter(directory), LearnedLimits(clock)
    )
    return ToolContext(
        agent_id="ada",
        capabilities=directory.capabilities_of("ada"),
        router=router,
        send=send,
        artifacts=artifact_service,
        idempotency_key="turn-1/0",
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A server that starts fast."""
    return Path(shutil.copy(stdio_server.__file__, tmp_path / "server.py"))


@pytest.fixture
def sdk_script(tmp_path: Path) -> Path:
    """A server of the SDK, for standard input and output or for HTTP."""
    path = tmp_path / "sdk_server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture
async def mcp(ctx: ToolContext, clock: FakeClock) -> AsyncIterator[McpHarness]:
    made = McpHarness(ctx, clock)
    yield made
    for servers in made.servers:
        await servers.close()


@pytest.fixture
def http(sdk_script: Path) -> Iterator[HttpServer]:
    server = HttpServer(sdk_script)
    yield server
    server.close()
