"""Contract of every storage engine: a person's message that ends the answer which a model is writing."""

from __future__ import annotations

import asyncio

import pytest

from coterie.clock import UNIX_EPOCH
from coterie.llm.service import TokenUsage
from coterie.messages import make_envelope
from coterie.store import Page
from coterie.stores.sql.store import SqlStore
from coterie.testing import FakeClock
from coterie.turn import AskModel, Interrupted, Rest
from coterie.turn_store import StaleClaim

from .processes import Opener
from .steps import RULES, Society, advance, ask, call, claim_agent, done, history_lines, received, says, state
from .workers import TIMEOUT_SECONDS, ManualWorker

SPENT = TokenUsage(input_tokens=40, output_tokens=5, estimated=True)
CUT = Interrupted(partial_text="The answer be", usage=SPENT, service="main")


async def test_a_cut_answer_is_a_record_and_not_in_the_history_and_all_mail_is_taken_in_order(store: SqlStore) -> None:
    await ask(store)
    claim = await claim_agent(store)
    await ask(store, sender="bob", text="psst")
    second = await ask(store, text="wait")
    claim = await advance(store, claim, CUT)
    assert (claim.action, claim.cuts, await state(store)) == (AskModel(), 1, "llm")
    assert await history_lines(store) == ["user: hello", "user: psst", "user: wait"]
    assert await store.waiting("ada") == []
    (record,) = await store.runs(Page(limit=5))
    assert (record.text, record.outcome, record.interrupted_by, record.calls) == (
        "The answer be", "withdrawn", second, [],
    )  # fmt: skip
    (usage,) = await store.usage(UNIX_EPOCH)
    assert (usage.requests, usage.withdrawn, usage.estimated_tokens) == (1, 1, 45)

    claim = await advance(store, claim, says("to both"))
    assert claim.action == Rest()
    assert (await received(store, "user"))[-1] == ("ada", "to both", second)
    assert claim.cuts == 1


async def test_mail_that_joins_an_unsent_request_leaves_no_record_and_frees_its_reserved_tokens(
    store: SqlStore,
) -> None:
    await ask(store)
    claim = await claim_agent(store)
    await store.reserve_tokens(claim, "main", 100, limit=1_000)
    await ask(store, text="wait")
    claim = await advance(store, claim, Interrupted())
    assert (claim.action, claim.cuts) == (AskModel(), 1)
    assert await history_lines(store) == ["user: hello", "user: wait"]
    assert (list(await store.runs(Page(limit=5))), list(await store.usage(UNIX_EPOCH))) == ([], [])


async def test_of_two_outcomes_of_a_request_only_the_first_counts(store: Society) -> None:
    await ask(store)
    claim = await claim_agent(store)
    after = await advance(store, claim, CUT)
    with pytest.raises(StaleClaim):
        await advance(store, claim, CUT)
    with pytest.raises(StaleClaim):
        await advance(store, claim, says("the whole answer"))
    await advance(store, after, says("the answer"))
    assert await history_lines(store) == ["user: hello", "assistant: the answer"]


async def test_the_next_owner_knows_the_cuts_of_the_turn_and_the_next_turn_has_none(store: Society) -> None:
    await ask(store)
    claim = await claim_agent(store)
    await ask(store, text="wait")
    claim = await advance(store, claim, CUT, says("", call()), done())
    assert claim.cuts == 1
    await store.release_claims("w", failed=False)
    claim = await claim_agent(store, "other")
    assert claim.cuts == 1
    await ask(store, text="next")
    claim = await advance(store, claim, says("answer"))
    assert (claim.action, claim.cuts) == (AskModel(), 0)


async def test_only_messages_of_the_person_to_an_agent_whose_model_is_asked_are_reported(store: Society) -> None:
    worker = ManualWorker("w")
    store.register_worker(worker)
    await ask(store)
    claim = await worker.next()
    assert worker.interruptions.empty()
    await ask(store, sender="bob", text="psst")
    assert worker.interruptions.empty()
    await ask(store, text="wait")
    assert worker.interruptions.get_nowait() == ("ada", claim.newest_position + 2)
    claim = await advance(store, claim, CUT)
    assert claim.newest_position == 3
    claim = await advance(store, claim, says("", call()))
    await ask(store, text="during a call")
    assert worker.interruptions.empty()
    claim = await advance(store, claim, done())
    await store.pause("ada")
    await ask(store, text="to a paused agent")
    assert worker.interruptions.empty()


async def test_a_delayed_message_of_the_person_is_reported_when_it_falls_due(store: Society, clock: FakeClock) -> None:
    worker = ManualWorker("w")
    store.register_worker(worker)
    await ask(store)
    claim = await worker.next()
    await ask(store, text="later", delay_ms=1_000)
    assert worker.interruptions.empty()
    await clock.advance(seconds=2)
    await store.promote_due(10)
    assert worker.interruptions.get_nowait() == ("ada", claim.newest_position + 1)


async def test_a_message_at_another_process_is_reported_to_the_process_that_asks_the_model(process: Opener) -> None:
    here, there = await process(), await process()
    worker = ManualWorker("w")
    here.register_worker(worker)
    await here.send(make_envelope(sender="user", to="ada", payload={"text": "hello"}))
    claim = await worker.next()
    await there.send(make_envelope(sender="user", to="ada", payload={"text": "wait"}))
    async with asyncio.timeout(TIMEOUT_SECONDS):
        assert await worker.interruptions.get() == ("ada", claim.newest_position + 1)
    await here.advance(claim, CUT, RULES)
    assert await history_lines(here) == ["user: hello", "user: wait"]
