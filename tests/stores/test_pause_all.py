"""The pause of the society is one stored flag, which every claim reads in its transaction."""

from __future__ import annotations

import asyncio
import threading

import pytest

from coterie.agents import Agent
from coterie.store import Store
from coterie.stores.sql import claims
from coterie.stores.sql.store import SqlStore
from coterie.turn import Rules

from .processes import Opener, envelope


async def states(store: Store) -> dict[str, str]:
    return {one.id: one.state for one in await store.agents() if one.kind == "agent"}


async def test_no_agent_is_claimed_and_new_agents_are_paused_until_the_society_is_resumed(store: SqlStore) -> None:
    await store.pause("bob")
    await store.pause_all()
    await store.add_agents([Agent(id="new", name="New")])
    await store.send(envelope("user", "new"))
    assert await store.claim_ready("w", Rules(), 10) == []
    assert await states(store) == {"ada": "paused", "bob": "paused", "new": "paused"}
    assert (await store.snapshot()).paused and await store.is_paused()

    await store.resume_all()
    assert await states(store) == {"ada": "idle", "bob": "paused", "new": "ready"}
    assert [claim.agent_id for claim in await store.claim_ready("w", Rules(), 10)] == ["new"]


async def test_pausing_and_resuming_one_agent_meanwhile_counts_afterwards(store: SqlStore) -> None:
    await store.send(envelope("user", "ada"))
    await store.pause_all()
    await store.resume("ada")
    await store.pause("bob")
    assert await store.claim_ready("w", Rules(), 10) == []
    await store.resume_all()
    assert [claim.agent_id for claim in await store.claim_ready("w", Rules(), 10)] == ["ada"]
    assert (await states(store))["bob"] == "paused"


async def test_a_claim_that_started_before_the_pause_and_commits_after_it_is_void(
    process: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await process(), await process()
    await one.send(envelope("user", "ada"))
    looked, paused = threading.Event(), threading.Event()

    def hit(name: str) -> None:
        if name == "turn.claimed" and not looked.is_set():
            looked.set()
            assert paused.wait(120)

    monkeypatch.setattr(claims, "hit", hit)
    claiming = asyncio.ensure_future(one.claim_ready("w", Rules(), 10))
    await asyncio.to_thread(looked.wait, 10)
    await two.pause_all()
    paused.set()
    assert await claiming == []
    assert await one.claim_ready("w", Rules(), 10) == []
    await one.resume_all()
    assert [claim.agent_id for claim in await two.claim_ready("w", Rules(), 10)] == ["ada"]
