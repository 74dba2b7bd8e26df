"""What a process remembers of the database, changed by another one that it does not follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.agent.service import AgentDirectory, AgentService
from coterie.errors import Refused
from coterie.llm.config import ServiceEntry, ServiceRegistry
from coterie.llm.learned_limits import LearnedLimits
from coterie.messages import PERSON
from coterie.store import Store
from coterie.stores.postgres import PostgresStore
from coterie.testing import FakeClock
from tests.engines import Engine

from .processes import Opener, envelope


async def test_a_row_that_another_program_changed_is_read_again(store: Store, engine: Engine, tmp_path: Path) -> None:
    await store.pause("bob")
    await store.resume("bob")  # its row is remembered now
    with engine.behind(tmp_path / "data") as db:
        db.execute("DELETE FROM agents WHERE id = 'bob'")
    with pytest.raises(Refused) as refusal:
        await store.send(envelope("user", "bob"))
    assert refusal.value.code == "unknown_recipient"


def service_of(store: PostgresStore) -> AgentService:
    services = ServiceRegistry([ServiceEntry(id="main", base_url="http://127.0.0.1:9/v1", model="m")])
    return AgentService(store, AgentDirectory(services, LearnedLimits(FakeClock()), ()))


async def create(service: AgentService, agent_id: str, parent: str | None = None) -> None:
    await service.create(id=agent_id, name=None, prompt="", service=None, tools=None, parent=parent)


async def test_agents_that_another_process_created_count_as_parents_and_are_terminated_with_theirs(
    process: Opener,
) -> None:
    first, second = await process(), await process()
    here, there = service_of(first), service_of(second)
    await create(here, "boss")
    await create(there, "clerk", parent="boss")  # made by the other process, and not in this directory yet
    await create(there, "helper", parent="clerk")

    assert set(await here.terminate("boss", by=PERSON)) == {"boss", "clerk", "helper"}

    states = {agent.id: agent.state for agent in await second.agents()}
    assert {states[one] for one in ("boss", "clerk", "helper")} == {"terminated"}
