"""Contract of every storage engine: claims, fences, steps and messages of calls."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from coterie import failpoints
from coterie.agents import ACTIVE_STATES, Agent
from coterie.messages import make_envelope
from coterie.testing import FakeClock
from coterie.turn import AskModel, CallEnded, Event, ModelFailed, Rest
from coterie.turn_store import StaleClaim
from tests.engines import Engine

from .steps import (
    RULES,
    Society,
    advance,
    answer,
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

# Claiming


async def test_a_claimed_agent_is_at_work_and_all_its_mail_is_in_its_history(store: Society) -> None:
    for text in ("one", "two", "three"):
        await ask(store, text=text)
    assert await state(store) == "ready"
    claim = await claim_agent(store)
    assert (claim.agent_id, claim.action, await state(store)) == ("ada", AskModel(), "llm")
    assert await history_lines(store) == ["user: one", "user: two", "user: three"]
    assert await store.waiting("ada") == []


async def test_an_agent_at_work_is_not_claimed_again(store: Society) -> None:
    await ask(store)
    await claim_agent(store)
    assert await store.claim_ready("other", RULES, 10) == []
    await ask(store, text="more")
    assert await store.claim_ready("other", RULES, 10) == []


async def test_an_agent_without_messages_is_not_claimed(store: Society) -> None:
    assert await store.claim_ready("w", RULES, 10) == []


async def test_several_agents_are_claimed_at_once_up_to_the_limit(store: Society) -> None:
    await ask(store, "ada")
    await ask(store, "bob")
    assert len(await store.claim_ready("w", RULES, 1)) == 1
    assert len(await store.claim_ready("w", RULES, 5)) == 1


async def test_working_agents_are_those_in_the_states_llm_and_tools(store: Society) -> None:
    async def at_work() -> list[str]:
        return [agent.id for agent in await store.agents() if agent.state in ("llm", "tools")]

    assert await at_work() == []
    await ask(store)
    claim = await claim_agent(store)
    assert await at_work() == ["ada"]
    claim = await advance(store, claim, says("", call()))
    assert await at_work() == ["ada"]
    await advance(store, claim, done(), says("that is all"))
    assert await at_work() == []


async def test_files_of_a_result_stay_with_it_over_a_takeover_and_in_the_history(store: Society) -> None:
    picture = {"artifactRef": "art_1", "type": "image", "filename": "a.png", "mimeType": "image/png", "size": 3}
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", call(), call("look", "pure")))
    ended = CallEnded(index=0, ok=True, result="drawn", attachments=(picture,))
    claim = await advance(store, claim, ended)
    await store.release_claims("w", failed=False)
    claim = await claim_agent(store, "other")
    assert claim.plan is not None and claim.plan.calls[0].attachments == (picture,)
    claim = await advance(store, claim, CallEnded(index=1, ok=True, result="nothing"))
    expected = [(), (), (picture,), ()]
    assert [tuple(row.attachments) for row in await store.history("ada")] == expected
    assert [tuple(row.attachments) for row in claim.added_rows or ()] == expected[1:]


async def test_the_agents_at_work_are_those_with_an_unfinished_turn(store: Society) -> None:
    """004-1.1: also an agent that waits for an approval or for a retry has not finished its request sequence."""

    async def at_work() -> list[str]:
        return [agent.id for agent in await store.agents() if agent.state in ACTIVE_STATES]

    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", call(needs_approval=True)))
    assert (await at_work(), claim.action) == (["ada"], Rest())
    (question,) = await store.waiting("user")
    await answer(store, question, 0)
    claim = await advance(store, await claim_agent(store), done())
    assert await at_work() == ["ada"]
    failed = ModelFailed(message="busy", recovery="retry", delay=timedelta(0))
    await advance(store, claim, failed)
    assert await at_work() == ["ada"]
    assert (await store.send(make_envelope(sender="bob", to="ada", payload={"text": "x"}))).state == "queued"
    claim = await advance(store, await claim_agent(store), says("that is all"))
    assert (await at_work(), claim.action) == ([], Rest())


async def test_a_claim_has_its_cause_and_its_call(store: Society) -> None:
    await ask(store)
    newest = await ask(store, text="newest")
    claim = await claim_agent(store)
    assert (claim.cause, claim.call) == (newest, None)
    claim = await advance(store, claim, says("", call("look", arguments={"at": 1})))
    assert claim.call is not None
    assert (claim.call.call.name, claim.call.call.arguments, claim.plan_key != (0, 0)) == ("look", {"at": 1}, True)


# The fence


async def test_a_claim_is_good_for_one_step(store: Society) -> None:
    await ask(store)
    claim = await claim_agent(store)
    await advance(store, claim, says("", call()))
    with pytest.raises(StaleClaim):
        await advance(store, claim, says("", call()))


async def test_a_stale_claim_writes_nothing(engine: Engine, tmp_path: Path, clock: FakeClock) -> None:
    path = tmp_path / "shared"
    first = await engine.open(path, clock)
    await first.add_agents([Agent(id="user", name="You", kind="person"), Agent(id="ada", name="Ada")])
    await ask(first)
    stale = await claim_agent(first)
    await first.close()
    second = await engine.open(path, clock)
    claim = await claim_agent(second)
    assert claim.epoch > stale.epoch and claim.action == AskModel()
    before = await history_lines(second)
    sends = make_envelope(sender="ada", to="user", payload={"text": "from the grave"})
    with pytest.raises(StaleClaim):
        await second.advance(stale, says("late"), RULES, sends=sends)
    assert await history_lines(second) == before
    assert await second.waiting("user") == []
    await advance(second, claim, says("in time"))
    assert await received(second, "user") == [("ada", "in time", (await second.history("ada"))[0].message.id)]  # type: ignore[union-attr]
    await second.close()


async def test_a_step_that_fails_leaves_no_trace(store: Society) -> None:
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", call()))
    before = await history_lines(store)
    with pytest.raises(Exception):  # noqa: B017 - whatever it is
        await store.advance(claim, CallEnded(index=7, ok=True, result=""), RULES)
    assert (await history_lines(store), await state(store)) == (before, "tools")
    await advance(store, claim, done(), says("fine"))


# A turn without interruptions


@pytest.mark.parametrize("at", ["turn.replied", "turn.group_closed", "turn.before_save", "flush.done", "commit.before"])
async def test_a_step_that_fails_after_its_first_writes_leaves_no_trace(store: Society, at: str) -> None:
    """004-6.3: the answer, the reply, the state and the mail that it takes are stored together or not at all."""
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", call()))
    event: Event = done()
    if at == "turn.replied":
        claim, event = await advance(store, claim, done()), says("fine")
    await ask(store, text="and this")

    async def everything() -> tuple[object, ...]:
        return await history_lines(store), await state(store), await received(store, "user"), await store.waiting("ada")

    before = await everything()
    failpoints.arm(f"{at}:1:raise")
    try:
        with pytest.raises(failpoints.FailpointHit):
            await store.advance(claim, event, RULES)
    finally:
        failpoints.arm("")
    assert await everything() == before
    await advance(store, claim, event)
    assert await everything() != before


async def test_a_text_ends_the_turn_and_answers_the_asker(store: Society) -> None:
    asked = await ask(store)
    claim = await advance(store, await claim_agent(store), says("42"))
    assert (claim.action, await state(store)) == (Rest(), "idle")
    assert await history_lines(store) == ["user: hello", "assistant: 42"]
    assert await received(store, "user") == [("ada", "42", asked)]


async def test_calls_and_results_enter_the_history_together_when_all_have_ended(store: Society) -> None:
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("wait", call("a"), call("b")), done(0, "one"))
    assert await history_lines(store) == ["user: hello"]
    claim = await advance(store, claim, done(1, "two"))
    assert await history_lines(store) == ["user: hello", "assistant: wait", "tool: one", "tool: two"]
    rows = await store.history("ada")
    assert [one.id for one in rows[1].calls] == [rows[2].call_id, rows[3].call_id]
    assert (claim.action, await state(store)) == (AskModel(), "llm")


async def test_call_ids_are_unique_even_if_the_service_repeats_them(store: Society) -> None:
    await ask(store)
    claim = await advance(
        store, await claim_agent(store), says("", call(), call()), done(0), done(1), says("", call()), done()
    )
    ids = [row.call_id for row in await store.history("ada") if row.call_id]
    assert len(set(ids)) == len(ids) == 3
    await advance(store, claim, says("end"))


async def test_an_empty_text_is_neither_stored_nor_sent(store: Society) -> None:
    await ask(store)
    await advance(store, await claim_agent(store), says("  \n"))
    assert await history_lines(store) == ["user: hello"]
    assert (await received(store, "user"), await state(store)) == ([], "idle")


# Sending with a call's result


async def test_a_message_a_call_sends_exists_exactly_when_its_result_does(store: Society) -> None:
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", message_to("bob")))
    after = await run_send(store, claim)
    with pytest.raises(StaleClaim):
        await run_send(store, claim)
    assert len(await store.waiting("bob")) == 1
    (sent,) = await store.waiting("bob")
    assert sent.cause == claim.cause and sent.hops == 1
    assert sent.id in (await history_lines(store))[-1]
    await advance(store, after, says("asked bob"))


async def test_a_message_that_is_refused_is_an_error_the_model_reads(store: Society) -> None:
    await ask(store)
    claim = await run_send(store, await advance(store, await claim_agent(store), says("", message_to("nobody"))))
    assert "unknown_recipient" in (await history_lines(store))[-1]
    await advance(store, claim, says("nobody there"))
