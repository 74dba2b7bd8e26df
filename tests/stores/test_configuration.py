"""The configuration in the database: versions, conflicts, and agents with ids that two processes choose at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coterie.agents import Agent
from coterie.errors import Refused
from coterie.store import Limits, Store, StoredConfiguration
from coterie.stores.postgres import PostgresStore
from coterie.testing import FakeClock
from tests.engines import Postgres

from .processes import Opener, envelope


async def test_a_write_of_the_configuration_needs_the_version_that_it_replaces(store: Store) -> None:
    assert await store.configuration() == StoredConfiguration(version=0, document="{}")
    start = await store.last_event()

    assert await store.write_configuration('{"agents": {"zoe": {}}}', 0, [Agent(id="zoe", name="Zoe")]) == 1
    assert await store.write_configuration('{"agents": {}}', 1, []) == 2
    with pytest.raises(Refused) as refusal:
        await store.write_configuration('{"agents": {"eve": {}}}', 1, [Agent(id="eve", name="Eve")])

    assert refusal.value.code == "config_changed"
    assert await store.configuration() == StoredConfiguration(version=2, document='{"agents": {}}')
    zoe = await store.agent("zoe")
    assert zoe is not None and zoe.name == "Zoe" and await store.agent("eve") is None
    kinds = [(event.kind, event.subject) for event in await store.events(start)]
    # The configuration comes first: who shows the agent needs it.
    changed = ("configuration.changed", "configuration")
    assert kinds == [changed, ("agent.upsert", "zoe"), changed]


async def test_an_id_is_taken_once(store: Store) -> None:
    await store.create_agent(Agent(id="zoe", name="Zoe", profile='{"id": "zoe"}'))
    for agent_id in ("zoe", "ada"):
        with pytest.raises(Refused, match="is taken"):
            await store.create_agent(Agent(id=agent_id, name="Another"))
    zoe = await store.agent("zoe")
    assert zoe is not None and (zoe.name, zoe.profile) == ("Zoe", '{"id": "zoe"}')


async def test_of_two_processes_that_create_the_same_agent_or_version_at_once_one_is_refused(process: Opener) -> None:
    first, second = await process(), await process()
    for round_ in range(5):
        for results in (
            await asyncio.gather(
                *(one.create_agent(Agent(id=f"zoe{round_}", name=str(n))) for n, one in enumerate((first, second))),
                return_exceptions=True,
            ),
            await asyncio.gather(
                *(one.write_configuration(f'{{"n": {n}}}', round_, []) for n, one in enumerate((first, second))),
                return_exceptions=True,
            ),
        ):
            refused = [result for result in results if isinstance(result, Refused)]
            assert len(refused) == 1, results
    assert (await first.configuration()).version == 5


async def test_limits_that_another_process_wrote_bind_the_next_transaction(
    process: Opener, shared: Postgres, tmp_path: Path, clock: FakeClock
) -> None:
    first = await process()
    url = shared.url(tmp_path)
    second = await PostgresStore.open(url, clock, read_limits=lambda document: Limits(mailbox=int(document)))
    await second.send(envelope("user", "ada"))

    await first.write_configuration("1", 0, [])

    with pytest.raises(Refused) as refusal:
        await second.send(envelope("user", "ada"))
    assert refusal.value.code == "mailbox_full"
    assert second.seen_configuration == 1
    await first.write_configuration("2", 1, [])
    await second.send(envelope("user", "ada"))
    await second.close()
