"""Fixtures for tests with several processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coterie.agents import Agent
from coterie.stores.postgres import PostgresStore
from coterie.testing import FakeClock
from tests.engines import Postgres

from .processes import Opener

PEOPLE = [Agent(id="user", name="You", kind="person"), *(Agent(id=name, name=name) for name in ("ada", "bob", "cyd"))]


@pytest.fixture
async def process(shared: Postgres, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Opener]:
    """Opens stores on one database, each like a separate process."""
    opened: list[PostgresStore] = []

    async def another() -> PostgresStore:
        store = await PostgresStore.open(shared.url(tmp_path), clock)
        opened.append(store)
        await store.add_agents(PEOPLE)
        return store

    yield another
    assert [violation async for violation in opened[0].violations()] == []
    await asyncio.gather(*(store.close() for store in opened))
