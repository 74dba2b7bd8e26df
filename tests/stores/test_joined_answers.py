"""Answers of several agents to one plan are read in one turn if they arrive close together, on every engine."""

from __future__ import annotations

import pytest

from coterie.agents import Agent
from coterie.stores.sql.unit_of_work import JOIN_MS
from coterie.testing import FakeClock
from coterie.turn_store import Claim

from .steps import RULES, Society, advance, ask, claim_agent, history_lines, message_to, run_send, says, state


async def ask_all(store: Society, *names: str) -> None:
    """Let ada ask these agents in one plan, and rest."""
    await store.add_agents([Agent(id=name, name=name) for name in names])
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", *(message_to(name, "well?") for name in names)))
    for _ in names:
        claim = await run_send(store, claim)
    await advance(store, claim, says("I asked."))
    assert await state(store) == "idle"


@pytest.fixture
async def asked(store: Society) -> Society:
    """Ada has asked bob and cyd, and rests."""
    await ask_all(store, "bob", "cyd")
    return store


async def claim_all(store: Society) -> dict[str, Claim]:
    return {claim.agent_id: claim for claim in await store.claim_ready("w", RULES, 9)}


async def test_an_answer_waits_for_the_other_one_and_both_are_read_in_one_turn(asked: Society) -> None:
    working = await claim_all(asked)
    await advance(asked, working["bob"], says("one!"))
    assert await claim_all(asked) == {}
    await advance(asked, working["cyd"], says("two!"))
    assert [*await claim_all(asked)] == ["ada"]
    assert (await history_lines(asked))[-2:] == ["user: one!", "user: two!"]


async def test_an_answer_waits_no_longer_than_the_window(asked: Society, clock: FakeClock) -> None:
    working = await claim_all(asked)
    await advance(asked, working["bob"], says("one!"))
    await clock.advance(milliseconds=JOIN_MS - 1)
    assert await claim_all(asked) == {}
    await clock.advance(milliseconds=1)
    assert [*await claim_all(asked)] == ["ada"]
    assert (await history_lines(asked))[-1:] == ["user: one!"]


async def test_the_window_is_not_extended_by_further_answers(store: Society, clock: FakeClock) -> None:
    await ask_all(store, "bob", "cyd", "dan")
    working = await claim_all(store)
    await advance(store, working["bob"], says("one!"))
    await clock.advance(milliseconds=JOIN_MS - 1)
    await advance(store, working["cyd"], says("two!"))
    assert await claim_all(store) == {}
    await clock.advance(milliseconds=1)
    assert [*await claim_all(store)] == ["ada"]
    assert (await history_lines(store))[-2:] == ["user: one!", "user: two!"]


@pytest.mark.parametrize("sender", ["user", "dan"])
async def test_any_other_message_is_read_at_once_together_with_the_answer(asked: Society, sender: str) -> None:
    await asked.add_agents([Agent(id="dan", name="Dan")])
    working = await claim_all(asked)
    await advance(asked, working["bob"], says("one!"))
    await ask(asked, text="well?", sender=sender)
    assert [*await claim_all(asked)] == ["ada"]
    assert (await history_lines(asked))[-2:] == ["user: one!", "user: well?"]


async def test_a_single_answer_does_not_wait(store: Society) -> None:
    await ask_all(store, "bob")
    await advance(store, (await claim_all(store))["bob"], says("one!"))
    assert [*await claim_all(store)] == ["ada"]


async def test_an_answer_does_not_wait_for_an_agent_that_ended_without_one(asked: Society) -> None:
    working = await claim_all(asked)
    await advance(asked, working["cyd"], says(""))
    await advance(asked, working["bob"], says("one!"))
    assert [*await claim_all(asked)] == ["ada"]
