"""What every storage engine promises about calls that need the word of the person."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any

import pytest

from coterie.artifacts import Artifact
from coterie.errors import Refused
from coterie.messages import Answer
from coterie.turn import NOT_EXECUTED, UNKNOWN, ArgumentsFile, Ask, Rest, Run, Stopped, ToolChanged

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
    stored,
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


DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"in": DEEP}


@pytest.mark.parametrize("odd", [{"n": 10**30}, DEEP], ids=["too wide", "too deep"])
async def test_arguments_that_no_payload_can_carry_are_shown_whole_as_json(store: Society, odd: dict[str, Any]) -> None:
    arguments = {"text": "x" * 10_000, "last": odd}
    question = await asked_for_approval(store, call("pay", gated=True, arguments=arguments))
    assert json.loads(question.payload["approval"]["arguments"]["json"]) == arguments
    await answer(store, question, 0)
    claim = await take(store)
    assert claim.call is not None and claim.call.call.arguments == arguments


async def test_arguments_too_long_for_a_question_are_asked_about_with_the_file_that_holds_them(store: Society) -> None:
    await ask(store)
    long = call("pay", gated=True, arguments={"text": "x" * (1 << 20)})
    claim = await go_on(store, await take(store), says("", long))
    assert claim.effect == Run(0) and claim.call is not None and not claim.call.gated
    file = await keep(store, "pay-arguments.json", size=(1 << 20) + 11)
    claim = await go_on(store, claim, ToolChanged(index=0, effect="unsafe", gated=True, file=file))
    assert (claim.effect, await state(store)) == (Rest(), "wait_approval")
    (question,) = await store.waiting("user")
    assert question.payload["attachments"][0]["artifactRef"] == file.artifact_ref
    assert "1,048,587 bytes" in question.payload["text"]
    await answer(store, question, 0)
    claim = await take(store)
    assert claim.effect == Run(0) and claim.call is not None and claim.call.gated


async def test_rules_that_changed_before_a_call_ran_are_kept_with_it(store: Society) -> None:
    await ask(store)
    claim = await go_on(store, await take(store), says("", call("look", "pure")))
    assert claim.effect == Run(0)
    claim = await go_on(store, claim, ToolChanged(index=0, effect="unsafe", gated=False))
    assert claim.effect == Run(0)
    await store.release("w", failed=True)
    assert (await take(store, "other")).effect == Ask()  # an unsafe call is not run again
    assert UNKNOWN in (await told(store))[2]


async def test_the_answer_that_a_call_runs_by_cannot_be_withdrawn(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", gated=True), call("b"))
    pressed = await answer(store, question, 0)
    claim = await take(store)
    for event in (done(0, "paid"), done(1, "b")):
        await refused(store.withdraw(pressed, "user"), "already_taken")
        assert (await stored(store, question.id)).answer == Answer(pressed, 0)
        claim = await go_on(store, claim, event)


async def test_the_answer_that_denied_a_call_cannot_be_withdrawn(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", gated=True), call("b"))
    pressed = await answer(store, question, 1)
    assert (await take(store)).effect == Run(1)
    await refused(store.withdraw(pressed, "user"), "already_taken")


async def test_the_answer_that_a_call_has_run_by_cannot_be_withdrawn_though_it_still_waits(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", gated=True))
    pressed = await answer(store, question, 0)
    claim = await take(store)
    await store.pause("ada")
    await go_on(store, claim, Stopped())
    assert (await state(store), (await stored(store, pressed)).state) == ("paused", "pending")
    await refused(store.withdraw(pressed, "user"), "already_taken")


async def test_an_answer_that_was_not_acted_on_is_withdrawn_and_the_question_is_open_again(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", gated=True))
    await store.withdraw(await answer(store, question, 0), "user")
    assert (await stored(store, question.id)).answer is None
    await answer(store, question, 0)
    assert (await take(store)).effect == Run(0)


async def test_an_answer_that_came_too_late_is_withdrawn_and_the_question_stays_closed(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", gated=True))
    pressed = await answer(store, question, 0)
    assert await store.stop("ada")
    await store.withdraw(pressed, "user")
    assert (await stored(store, question.id)).answer == Answer(question.id, None)
    await refused(answer(store, question, 0), "already_answered")


@pytest.mark.parametrize("by", ["stop", "an agent"])
async def test_a_question_about_a_call_that_was_cancelled_is_closed(store: Society, by: str) -> None:
    question = await asked_for_approval(store, call("pay", gated=True))
    if by == "stop":
        assert await store.stop("ada")
    else:
        await ask(store, text="psst", sender="bob")
        await go_on(store, await take(store), says("very well"))
    assert (await stored(store, question.id)).answer == Answer(question.id, None)
    refusal = await refused(answer(store, question, 0), "already_answered")
    assert refusal.details["answer"] == {"messageId": question.id, "option": None}
    assert await state(store) == "idle"
    await ask(store, text="why did you stop?", in_reply_to=question.id)  # words are never refused
    assert await state(store) == "ready"


async def keep(store: Society, filename: str, size: int) -> ArgumentsFile:
    sha256 = "0" * 64
    artifact = Artifact(
        ref="file-of-arguments",
        filename=filename,
        type="file",
        mime_type="text/plain",
        size=size,
        sha256=sha256,
        created_at=datetime(2030, 1, 1, tzinfo=UTC),
    )
    await store.add_artifact(artifact, maker="ada")
    return ArgumentsFile(artifact.ref, filename, artifact.mime_type, size, sha256)


async def refused(sending: Awaitable[object], code: str) -> Refused:
    with pytest.raises(Refused) as refusal:
        await sending
    assert refusal.value.code == code
    return refusal.value


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
