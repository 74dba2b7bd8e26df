"""What most tests need: a clock they move, a store of every engine, a society in a folder of its own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import settings

from coterie.agents import Agent
from coterie.bus import MessageBus
from coterie.runtime import Society
from coterie.store import Limits, Store
from coterie.stores.sqlite import SqliteStore
from coterie.testing import FakeClock

# The gate must say the same thing twice; who works on the code gets new examples every time.
settings.register_profile("gate", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("gate")

# Any number of servers run beside each other in the tests, and perhaps a real one.
os.environ["COTERIE_PORT"] = "0"

ENGINES = ["sqlite"]
PEOPLE = [Agent(id="user", name="You", kind="person"), Agent(id="ada", name="Ada"), Agent(id="bob", name="Bob")]


@pytest.fixture
async def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def store(engine: str, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Store]:
    """An open store with `user`, `ada` and `bob` in it; whatever a test did, the invariants hold at its end."""
    assert engine == "sqlite"
    opened = await SqliteStore.open(tmp_path / "data", clock, limits=Limits(max_hops=3, mailbox=5))
    await opened.add_agents(PEOPLE)
    yield opened
    assert [violation async for violation in opened.violations()] == []
    await opened.close()


@pytest.fixture
async def bus(store: Store, clock: FakeClock) -> AsyncIterator[MessageBus]:
    """A running bus on that store."""
    bus = MessageBus(store, clock)
    bus.start()
    yield bus
    await bus.stop(deliver_delayed=False)


@pytest.fixture
async def society(tmp_path: Path, clock: FakeClock) -> AsyncIterator[Society]:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "coterie.toml").write_text('[agents.ada]\nname = "Ada"\n[agents.bob]\nname = "Bob"\n')
    async with Society.open(folder, clock=clock, work=False) as opened:
        yield opened
