"""What a tool is given, with a real library behind it; and servers with tools."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

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
from tests.agent.mcp_room import SERVER, HttpServer, Room


@pytest.fixture
def directory(clock: FakeClock) -> AgentDirectory:
    """`ada` reads text, `bob` sees pictures too."""
    seeing = Capabilities(input=frozenset({"text", "vision"}), output=frozenset({"text", "tool_calling"}))
    services = ServiceRegistry(
        [
            ServiceEntry(id="plain", base_url="http://127.0.0.1:9/v1", model="m"),
            ServiceEntry(id="seeing", base_url="http://127.0.0.1:9/v1", model="m", capabilities=seeing),
        ]
    )
    agents = [Profile(id="ada", name="Ada"), Profile(id="bob", name="Bob", service="seeing")]
    return AgentDirectory(services, LearnedLimits(clock), agents)


@pytest.fixture
def library(store: Store, clock: FakeClock, tmp_path: Path) -> ArtifactService:
    (tmp_path / "artifacts").mkdir()
    return ArtifactService(store, FolderBlobStore(tmp_path / "artifacts"), clock, max_file_bytes=60_000_000)


@pytest.fixture
def ctx(
    store: Store, library: ArtifactService, directory: AgentDirectory, clock: FakeClock, tmp_path: Path
) -> ToolContext:
    """A call of `ada`'s."""

    async def send(
        to: str, payload: Payload, *, delay_ms: float | None = None, quick_replies: list[str] | None = None
    ) -> Receipt:
        raise NotImplementedError

    router = CapabilityRouter(
        store, FolderBlobStore(tmp_path / "artifacts"), ContentAdapter(directory), LearnedLimits(clock)
    )
    return ToolContext(
        agent_id="ada",
        capabilities=directory.capabilities_of("ada"),
        router=router,
        send=send,
        artifacts=library,
        idempotency_key="turn-1/0",
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture
async def room(ctx: ToolContext, clock: FakeClock) -> AsyncIterator[Room]:
    made = Room(ctx, clock)
    yield made
    for servers in made.servers:
        await servers.close()


@pytest.fixture
def http(script: Path) -> Iterator[HttpServer]:
    server = HttpServer(script)
    yield server
    server.stop()
