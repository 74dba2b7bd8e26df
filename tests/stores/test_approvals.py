"""What every storage engine promises about calls that need the word of the person."""

from __future__ import annotations

from typing import Any

import pytest

from coterie.agent.turn import (
    NOT_EXECUTED,
    Ask,
    Rest,
    Run,
)
from coterie.errors import Refused

from .steps import (
    RULES,
    Society,
    answer,
    ask,
    asked_for_approval,
    call,
    done,
    go_on,
    says,
    state,
    take,
    told,
)


async def test_a_gated_call_runs_when_the_person_approves_it_and_its_plan_goes_on(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", gated=True, arguments={"sum": 3}), call("b"))
    assert question.payload["approval"]["tool"] == "pay"
    assert question.payload["approval"]["arguments"] == {"sum": 3}
    assert await store.claim("w", RULES, 1) == []
    await answer(store, question, 0)
    claim = await take(store)
    assert claim.effect == Run(0)
    claim = await go_on(store, claim, done(0, "paid"))
    assert claim.effect == Run(1)  # the person's word on the first is no interruption of the second
    await go_on(store, claim, done(1, "b"))
    assert (await told(store))[2:] == ["tool: paid", "tool: b", "user: Approve"]


async def test_a_denied_call_does_not_run(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", gated=True))
    await answer(store, question, 1)
    assert (await take(store)).effect == Ask()
    assert "denied" in (await told(store))[2]


async def test_each_gated_call_has_a_question_of_its_own(store: Society) -> None:
    first = await asked_for_approval(store, call("pay", gated=True), call("fire", gated=True))
    await answer(store, first, 0)
    await go_on(store, await take(store), done())
    assert await state(store) == "wait_approval"
    (_, second) = await store.waiting("user")
    assert second.payload["approval"]["tool"] == "fire"
    await answer(store, second, 0)
    assert (await take(store)).effect == Run(1)


@pytest.mark.parametrize("in_reply", [True, False])
async def test_any_other_word_makes_the_question_void(store: Society, in_reply: bool) -> None:
    question = await asked_for_approval(store, call("pay", gated=True))
    await ask(store, text="why?", in_reply_to=question.id if in_reply else None)
    with pytest.raises(Refused) as late:
        await answer(store, question, 0)
    assert late.value.code == "already_answered"
    claim = await take(store)
    assert claim.effect == Ask()
    assert (await told(store))[2:] == [f"tool: {NOT_EXECUTED}", "user: why?"]


async def test_a_stale_approval_is_refused_and_starts_nothing(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", gated=True))
    await ask(store, text="no")
    await go_on(store, await take(store), says("very well"))
    with pytest.raises(Refused) as late:
        await answer(store, question, 0)
    assert late.value.code == "already_answered"
    assert await store.claim("w", RULES, 1) == []


@pytest.mark.parametrize("arguments", [{"n": 10**30}, {"text": "x" * (1 << 20)}], ids=["too wide", "too long"])
async def test_arguments_that_no_message_can_carry_are_shown_shortened(
    store: Society, arguments: dict[str, Any]
) -> None:
    question = await asked_for_approval(store, call("pay", gated=True, arguments=arguments))
    assert list(question.payload["approval"]["arguments"]) == ["shortened"]
    await answer(store, question, 0)
    claim = await take(store)
    assert claim.call is not None and claim.call.call.arguments == arguments


async def test_agents_that_talk_without_pause_cannot_keep_a_question_from_being_answered(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", gated=True))
    for _ in range(RULES.max_withdrawals):
        await ask(store, text="psst", sender="bob")
        claim = await take(store)
        assert claim.effect == Ask()
        await go_on(store, claim, says("", call("pay", gated=True)))
        question = (await store.waiting("user"))[-1]
    await ask(store, text="psst", sender="bob")
    assert (await take(store)).effect == Rest()
    await answer(store, question, 0)
    assert (await take(store)).effect == Run(0)
