from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from coterie.admin.inspect import Inspection
from coterie.messages import Message
from coterie.society import Society

from .commands import coterie
from .environment import Environment

DAY_MS = 86_400_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A new society of one agent, `assistant`."""
    path = tmp_path / "society"
    assert coterie("init", path).code == 0
    return path


def schedule(folder: Path, count: int) -> None:
    """Send `count` messages to the assistant, due tomorrow."""

    async def send() -> None:
        async with Society.open_offline(folder) as society:
            await asyncio.gather(
                *(society.send(to="assistant", text=f"{n}", delay_ms=DAY_MS + n) for n in range(count))
            )

    asyncio.run(send())


def waiting(folder: Path) -> Sequence[Message]:
    async def read() -> Sequence[Message]:
        async with Inspection.open(folder) as society:
            return await society.store.waiting("assistant", limit=1_000_000)

    return asyncio.run(read())


def delayed(folder: Path) -> Sequence[Message]:
    async def read() -> Sequence[Message]:
        async with Inspection.open(folder) as society:
            return await society.store.delayed("assistant", limit=1_000_000)

    return asyncio.run(read())


@pytest.fixture
def env(tmp_path: Path) -> Iterator[Environment]:
    """A society that runs after `env.serve()`."""
    with Environment(tmp_path / "home") as made:
        yield made


@pytest.fixture(params=["with a server", "without one"])
def either(request: pytest.FixtureRequest, env: Environment) -> Environment:
    """A society with a running server, and one without."""
    if request.param == "with a server":
        env.serve()
    return env
