"""Contract of every storage engine: messages that arrive while an agent works."""

from __future__ import annotations

import pytest

from coterie.errors import Refused
from coterie.messages import make_envelope
from coterie.plan import INTERRUPTED_RESULT
from coterie.testing import FakeClock
from coterie.turn import AskModel, Rest, RunCall

from .steps import (
    RULES,
    Society,
    advance,
    ask,
    call,
    claim_agent,
    done,
    history_lines,
    message_to,
    received,
    run_send,
    says,
    state,
)


async def test_a_message_to_an_agent_at_work_waits_as_an_interjection(store: Society) -> None:
    await ask(store)
    await claim_agent(store)
    receipt = await store.send(make_envelope(sender="user", to="ada", payload={"text": "wait"}))
    assert receipt.state == "queued"
    assert [m.payload["text"] for m in await store.waiting("ada")] == ["wait"]


async def test_before_the_first_call_interjections_withdraw_the_plan_and_all_are_read_in_order(store: Society) -> None:
    await ask(store)
    claim = await claim_agent(store)
    for text in ("no", "wait", "stop"):
        await ask(store, text=text)
    claim = await advance(store, claim, says("I shall", call(), call()))
    assert (claim.action, await state(store)) == (AskModel(), "llm")
    assert await history_lines(store) == ["user: hello", "user: no", "user: wait", "user: stop"]
    assert await store.waiting("ada") == []


async def test_two_messages_during_one_request_need_one_more_request(store: Society) -> None:
    await ask(store)
    claim = await claim_agent(store)
    await ask(store, text="a")
    await ask(store, text="b")
    asks = 1
    for event in (says("", call()), says("done")):
        claim = await advance(store, claim, event)
        asks += claim.action == AskModel()
    assert (asks, claim.action) == (2, Rest())


async def test_a_message_after_a_call_cancels_the_rest_and_keeps_the_result(store: Society) -> None:
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", call("a"), call("b"), call("c")))
    await ask(store, text="stop")
    claim = await advance(store, claim, done(0, "happened"))
    assert await history_lines(store) == [
        "user: hello",
        "assistant: ",
        "tool: happened",
        f"tool: {INTERRUPTED_RESULT}",
        f"tool: {INTERRUPTED_RESULT}",
        "user: stop",
    ]
    assert claim.action == AskModel()


async def test_a_withdrawn_plan_leaves_everything_before_it_as_it_was(store: Society) -> None:
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("first", call("a")), done(0, "one"))
    before = await store.history("ada")
    await ask(store, text="wait")
    await advance(store, claim, says("second", call("b")))
    after = await store.history("ada")
    assert after[: len(before)] == before
    assert [row.role for row in after[len(before) :]] == ["user"]


async def test_a_text_without_calls_is_never_withdrawn(store: Society) -> None:
    """004-5.1: neither a text that ends its turn while mail waits, nor the text of an earlier turn."""
    await ask(store)
    claim = await claim_agent(store)
    await ask(store, text="more")
    claim = await advance(store, claim, says("first answer"))
    await ask(store, text="wait")
    await advance(store, claim, says("I shall", call()))
    assert await history_lines(store) == ["user: hello", "assistant: first answer", "user: more", "user: wait"]


async def test_messages_that_wait_at_the_end_of_a_turn_start_the_next_turn_with_their_own_askers(
    store: Society,
) -> None:
    first = await ask(store)
    claim = await claim_agent(store)
    second = await ask(store, text="and you?", sender="bob")
    claim = await advance(store, claim, says("to the person"))
    assert (claim.action, await state(store)) == (AskModel(), "llm")
    assert await history_lines(store) == ["user: hello", "assistant: to the person", "user: and you?"]
    await advance(store, claim, says("to bob"))
    assert await received(store, "user") == [("ada", "to the person", first)]
    assert await received(store, "bob") == [("ada", "to bob", second)]


async def test_a_delayed_message_that_falls_due_interrupts_like_any_other(store: Society, clock: FakeClock) -> None:
    await ask(store, text="later", delay_ms=1_000)
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", call("a"), call("b")))
    await clock.advance(seconds=1)
    await store.promote_due(10)
    await advance(store, claim, done())
    assert (await history_lines(store))[-1] == "user: later"


async def test_a_stream_of_agent_messages_cannot_prevent_calls_but_a_person_can(store: Society) -> None:
    await ask(store)
    claim = await claim_agent(store)
    for _ in range(RULES.max_withdrawals):
        await ask(store, text="psst", sender="bob")
        claim = await advance(store, claim, says("", call("a"), call("b")))
        assert claim.action == AskModel()
    await ask(store, text="psst again", sender="bob")
    claim = await advance(store, claim, says("", call("a"), call("b"), call("c")), done(0))
    assert claim.action == RunCall(1)
    await ask(store, text="stop")
    claim = await advance(store, claim, done(1))
    assert claim.action == AskModel()
    assert (await history_lines(store))[-3:] == [f"tool: {INTERRUPTED_RESULT}", "user: psst again", "user: stop"]


async def test_a_person_interrupts_after_withdrawn_messages_and_behind_those_of_agents(store: Society) -> None:
    await ask(store)
    claim = await claim_agent(store)
    for text in ["psst"] * RULES.max_withdrawals:
        await ask(store, text=text, sender="bob")
        claim = await advance(store, claim, says("", call("a")))
    await ask(store, text="psst again", sender="bob")
    claim = await advance(store, claim, says("", *map(call, "abcde")), done(0))
    await store.withdraw(await ask(store, text="never mind"), "user")
    claim = await advance(store, claim, done(1))
    assert claim.action == RunCall(2), "nobody who can interrupt has said anything"
    withdrawn = await ask(store, text="nor this")
    await ask(store, text="and again", sender="bob")
    await ask(store, text="stop")
    await store.withdraw(withdrawn, "user")
    claim = await advance(store, claim, done(2))
    assert claim.action == AskModel()
    assert (await history_lines(store))[-3:] == ["user: psst again", "user: and again", "user: stop"]


async def test_the_answer_to_a_message_of_a_plan_does_not_interrupt_the_plan(store: Society) -> None:
    await ask(store)
    claim = await advance(
        store, await claim_agent(store), says("", message_to("bob", "?"), call("b"), message_to("ada", "me"))
    )
    claim = await run_send(store, claim)
    bob = await claim_agent(store)
    await advance(store, bob, says("!"))
    assert [m.payload["text"] for m in await store.waiting("ada")] == ["!"]
    claim = await advance(store, claim, done(1))
    assert claim.action == RunCall(2)
    claim = await run_send(store, claim)
    assert claim.action == AskModel()
    # What came before the last call ended is read with it; what the last call itself sent comes next.
    assert (await history_lines(store))[-1] == "user: !"
    await advance(store, claim, says("so"))
    assert (await history_lines(store))[-2:] == ["assistant: so", "user: me"]


async def test_a_withdrawn_message_does_not_interrupt_and_is_never_read(store: Society) -> None:
    await ask(store)
    claim = await claim_agent(store)
    await store.withdraw(await ask(store, text="never mind"), "user")
    claim = await advance(store, claim, says("", call()), done(), says("end"))
    assert (claim.action, await state(store)) == (Rest(), "idle")
    assert "user: never mind" not in await history_lines(store)
    await ask(store, text="again")
    assert (await claim_agent(store)).action == AskModel()
    assert (await history_lines(store))[-1] == "user: again"


async def test_every_agent_has_a_queue_of_its_own(store: Society) -> None:
    await ask(store, "ada")
    await ask(store, "bob")
    ada, bob = sorted(await store.claim_ready("w", RULES, 2), key=lambda claim: claim.agent_id)
    await ask(store, "ada", "for ada")
    bob = await advance(store, bob, says("", call()))
    assert bob.action == RunCall(0)
    assert (await advance(store, ada, says("", call()))).action == AskModel()


async def test_a_full_burst_is_taken_in_one_sequence(store: Society) -> None:
    await ask(store)
    claim = await claim_agent(store)
    for n in range(5):
        await ask(store, text=str(n))
    with pytest.raises(Refused):
        await ask(store, text="too many")
    await advance(store, claim, says("", call()))
    assert (await history_lines(store))[1:] == [f"user: {n}" for n in range(5)]
    await ask(store, text="there is room again")


async def test_the_store_has_no_second_opinion_on_what_interrupts(
    store: Society, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules of `turn.py` alone decide: with other rules the same message has another effect."""
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", call("a"), call("b"), call("c")))
    await ask(store, text="stop")
    with monkeypatch.context() as patch:
        patch.setattr("coterie.stores.sql.inbox.is_echo", lambda *_, **__: True)
        claim = await advance(store, claim, done(0))
        assert claim.action == RunCall(1)
    assert claim.checked_seq
    await ask(store, text="stop!")
    assert (await advance(store, claim, done(1))).action == AskModel()
    assert (await history_lines(store))[-2:] == ["user: stop", "user: stop!"]

    with monkeypatch.context() as patch:
        patch.setattr("coterie.stores.sql.mailbox.wakes", lambda *_, **__: False)
        await ask(store, "bob")
        assert await state(store, "bob") == "idle" and await store.wake_forgotten() == ["bob"]
