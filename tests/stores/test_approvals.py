"""Contract of every storage engine: calls that need approval."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any

import pytest

from coterie.artifacts import Artifact
from coterie.errors import Refused
from coterie.messages import Message, QuestionAnswer
from coterie.plan import INTERRUPTED_RESULT, UNKNOWN_RESULT, ArgumentsFile
from coterie.turn import AskModel, ModelFailed, Rest, RunCall, Stopped, ToolRulesChanged

from .steps import (
    RULES,
    Society,
    advance,
    answer,
    ask,
    asked_for_approval,
    call,
    claim_agent,
    done,
    history_lines,
    received,
    says,
    state,
    stored,
)


async def test_a_gated_call_runs_after_approval_and_its_plan_continues(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True, arguments={"sum": 3}), call("b"))
    assert question.payload["approval"]["tool"] == "pay"
    assert question.payload["approval"]["arguments"] == {"sum": 3}
    assert await store.claim_ready("w", RULES, 1) == []
    await answer(store, question, 0)
    claim = await claim_agent(store)
    assert claim.action == RunCall(0)
    claim = await advance(store, claim, done(0, "paid"))
    assert claim.action == RunCall(1)  # the person's word on the first is no interruption of the second
    await advance(store, claim, done(1, "b"))
    assert (await history_lines(store))[2:] == ["tool: paid", "tool: b", "user: Approve"]


async def test_a_denied_call_does_not_run(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    await answer(store, question, 1)
    assert (await claim_agent(store)).action == AskModel()
    assert "denied" in (await history_lines(store))[2]


async def test_each_gated_call_has_a_question_of_its_own(store: Society) -> None:
    first = await asked_for_approval(store, call("pay", needs_approval=True), call("fire", needs_approval=True))
    await answer(store, first, 0)
    await advance(store, await claim_agent(store), done())
    assert await state(store) == "wait_approval"
    (_, second) = await store.waiting("user")
    assert second.payload["approval"]["tool"] == "fire"
    await answer(store, second, 0)
    assert (await claim_agent(store)).action == RunCall(1)


@pytest.mark.parametrize("in_reply", [True, False])
async def test_any_other_message_makes_the_question_void(store: Society, in_reply: bool) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    await ask(store, text="why?", in_reply_to=question.id if in_reply else None)
    with pytest.raises(Refused) as late:
        await answer(store, question, 0)
    assert late.value.code == "already_answered"
    claim = await claim_agent(store)
    assert claim.action == AskModel()
    assert (await history_lines(store))[2:] == [f"tool: {INTERRUPTED_RESULT}", "user: why?"]


async def test_a_stale_approval_is_refused_and_starts_nothing(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    await ask(store, text="no")
    await advance(store, await claim_agent(store), says("very well"))
    with pytest.raises(Refused) as late:
        await answer(store, question, 0)
    assert late.value.code == "already_answered"
    assert await store.claim_ready("w", RULES, 1) == []


DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"in": DEEP}


@pytest.mark.parametrize("odd", [{"n": 10**30}, DEEP], ids=["too wide", "too deep"])
async def test_arguments_that_no_payload_can_carry_are_shown_whole_as_json(store: Society, odd: dict[str, Any]) -> None:
    arguments = {"text": "x" * 10_000, "last": odd}
    question = await asked_for_approval(store, call("pay", needs_approval=True, arguments=arguments))
    assert json.loads(question.payload["approval"]["arguments"]["json"]) == arguments
    await answer(store, question, 0)
    claim = await claim_agent(store)
    assert claim.call is not None and claim.call.call.arguments == arguments


async def test_arguments_too_long_for_a_question_are_asked_about_with_the_file_that_holds_them(store: Society) -> None:
    await ask(store)
    long = call("pay", needs_approval=True, arguments={"text": "x" * (1 << 20)})
    claim = await advance(store, await claim_agent(store), says("", long))
    assert claim.action == RunCall(0) and claim.call is not None and not claim.call.needs_approval
    file = await keep(store, "pay-arguments.json", size=(1 << 20) + 11)
    claim = await advance(store, claim, ToolRulesChanged(index=0, effect="unsafe", needs_approval=True, file=file))
    assert (claim.action, await state(store)) == (Rest(), "wait_approval")
    (question,) = await store.waiting("user")
    assert question.payload["attachments"][0]["artifactRef"] == file.artifact_ref
    assert "1,048,587 bytes" in question.payload["text"]
    await answer(store, question, 0)
    claim = await claim_agent(store)
    assert claim.action == RunCall(0) and claim.call is not None and claim.call.needs_approval


async def test_rules_that_changed_before_a_call_ran_are_kept_with_it(store: Society) -> None:
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", call("look", "pure")))
    assert claim.action == RunCall(0)
    claim = await advance(store, claim, ToolRulesChanged(index=0, effect="unsafe", needs_approval=False))
    assert claim.action == RunCall(0)
    await store.release_claims("w", failed=True)
    assert (await claim_agent(store, "other")).action == AskModel()  # an unsafe call is not run again
    assert UNKNOWN_RESULT in (await history_lines(store))[2]


async def test_the_approval_of_a_running_call_cannot_be_withdrawn(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True), call("b"))
    pressed = await answer(store, question, 0)
    claim = await claim_agent(store)
    for event in (done(0, "paid"), done(1, "b")):
        await refused(store.withdraw(pressed, "user"), "already_taken")
        assert (await stored(store, question.id)).answer == QuestionAnswer(pressed, 0)
        claim = await advance(store, claim, event)


async def test_the_answer_that_denied_a_call_cannot_be_withdrawn(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True), call("b"))
    pressed = await answer(store, question, 1)
    assert (await claim_agent(store)).action == RunCall(1)
    await refused(store.withdraw(pressed, "user"), "already_taken")


async def test_the_approval_of_an_ended_call_cannot_be_withdrawn_while_it_waits(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    pressed = await answer(store, question, 0)
    claim = await claim_agent(store)
    await store.pause("ada")
    await advance(store, claim, Stopped())
    assert (await state(store), (await stored(store, pressed)).state) == ("paused", "pending")
    await refused(store.withdraw(pressed, "user"), "already_taken")


async def test_an_answer_that_was_not_acted_on_is_withdrawn_and_the_question_is_open_again(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    await store.withdraw(await answer(store, question, 0), "user")
    assert (await stored(store, question.id)).answer is None
    await answer(store, question, 0)
    assert (await claim_agent(store)).action == RunCall(0)


async def test_an_answer_that_came_too_late_is_withdrawn_and_the_question_stays_closed(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    pressed = await answer(store, question, 0)
    assert await store.stop_waiting_turn("ada")
    await store.withdraw(pressed, "user")
    assert (await stored(store, question.id)).answer == QuestionAnswer(question.id, None)
    await refused(answer(store, question, 0), "already_answered")


@pytest.mark.parametrize("by", ["stop", "an agent"])
async def test_a_question_about_a_call_that_was_cancelled_is_closed(store: Society, by: str) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    if by == "stop":
        assert await store.stop_waiting_turn("ada")
    else:
        await ask(store, text="psst", sender="bob")
        await advance(store, await claim_agent(store), says("very well"))
    assert (await stored(store, question.id)).answer == QuestionAnswer(question.id, None)
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


async def test_a_stream_of_agent_messages_cannot_prevent_an_approval(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    for _ in range(RULES.max_withdrawals):
        await ask(store, text="psst", sender="bob")
        claim = await claim_agent(store)
        assert claim.action == AskModel()
        await advance(store, claim, says("", call("pay", needs_approval=True)))
        question = (await store.waiting("user"))[-1]
    await ask(store, text="psst", sender="bob")
    assert (await claim_agent(store)).action == Rest()
    await answer(store, question, 0)
    assert (await claim_agent(store)).action == RunCall(0)


# The person asks back before deciding


async def ask_back(store: Society, question: Message, text: str = "why?") -> str:
    return await ask(store, text=text, in_reply_to=question.id, asks_back=True)


async def test_a_question_about_a_call_is_answered_and_the_call_keeps_waiting(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    asked = await ask_back(store, question)
    claim = await claim_agent(store)
    assert claim.action == AskModel() and claim.plan is not None
    claim = await advance(store, claim, says("because it is due"))
    assert (claim.action, await state(store)) == (Rest(), "wait_approval")
    assert (await received(store, "user"))[1:] == [("ada", "because it is due", asked)]
    assert (await stored(store, question.id)).answer is None
    assert await store.claim_ready("w", RULES, 1) == []
    await answer(store, question, 0)
    claim = await claim_agent(store)
    assert claim.action == RunCall(0)
    await advance(store, claim, done(0, "paid"), says("all done"))
    assert (await history_lines(store))[1:] == [
        "user: why?", "assistant: because it is due", "assistant: ", "tool: paid", "user: Approve",
        "assistant: all done",
    ]  # fmt: skip


async def test_a_message_that_asks_back_says_so_when_it_is_read_again(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    message = await stored(store, await ask_back(store, question))
    assert (message.asks_back, message.option, message.in_reply_to) == (True, None, question.id)
    assert message.to_dict()["asksBack"] is True and message.task == question.task


async def test_a_decision_during_the_answer_counts_after_it(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    await ask_back(store, question)
    claim = await claim_agent(store)
    await answer(store, question, 1)
    await advance(store, claim, says("because"))
    assert (await claim_agent(store)).action == AskModel()
    assert "denied" in (await history_lines(store))[4]


async def test_an_ordinary_message_during_the_answer_cancels_the_call(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    await ask_back(store, question)
    claim = await claim_agent(store)
    await ask(store, text="leave it")
    await advance(store, claim, says("because"))
    assert (await claim_agent(store)).action == AskModel()
    assert (await history_lines(store))[4:] == [f"tool: {INTERRUPTED_RESULT}", "user: leave it"]


async def test_calls_in_an_answer_about_a_call_do_not_run(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    await ask_back(store, question)
    claim = await advance(store, await claim_agent(store), says("", call("fire")))
    assert (claim.action, await state(store)) == (Rest(), "wait_approval")
    assert "still waits for your decision" in (await received(store, "user"))[1][1]


async def test_a_model_that_fails_at_a_question_about_a_call_does_not_cancel_the_call(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    asked = await ask_back(store, question)
    await advance(store, await claim_agent(store), ModelFailed(message="no network", recovery="retry"))
    assert (await received(store, "user"))[1:] == [("system", "no network", asked)]
    await answer(store, question, 0)
    assert (await claim_agent(store)).action == RunCall(0)


async def test_an_answer_about_a_call_goes_on_after_its_worker_was_lost(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    asked = await ask_back(store, question)
    await claim_agent(store)
    await store.release_claims("w", failed=True)
    claim = await claim_agent(store, "w2")
    assert claim.action == AskModel() and claim.plan is not None
    await advance(store, claim, says("because"))
    assert (await received(store, "user"))[1:] == [("ada", "because", asked)]
    assert await state(store) == "wait_approval"


async def test_stopping_an_answer_about_a_call_ends_the_turn_and_keeps_its_text(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    asked = await ask_back(store, question)
    await advance(store, await claim_agent(store), Stopped("because it"))
    assert (await received(store, "user"))[1:] == [("ada", "because it", asked)]
    assert await state(store) == "idle"
    assert (await stored(store, question.id)).answer is not None


async def test_the_answer_about_a_call_goes_to_the_person_only(store: Society) -> None:
    await ask(store, sender="bob", text="pay it")
    await advance(store, await claim_agent(store), says("", call("pay", needs_approval=True)))
    (question,) = await store.waiting("user")
    asked = await ask_back(store, question)
    await advance(store, await claim_agent(store), says("because"))
    assert (await received(store, "user"))[1:] == [("ada", "because", asked)]
    assert await received(store, "bob") == []


async def test_asking_back_is_refused_where_no_call_waits(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    await answer(store, question, 0)
    with pytest.raises(Refused) as late:
        await ask_back(store, question)
    assert late.value.code == "already_answered"
    plain = await ask(store, to="bob")
    with pytest.raises(Refused) as other:
        await ask(store, in_reply_to=plain, asks_back=True)
    assert other.value.code == "asksBack_invalid"


@pytest.mark.parametrize("wrong", [{}, {"in_reply_to": "m", "option": 0}, {"in_reply_to": "m", "delay_ms": 5}])
async def test_asking_back_needs_a_question_and_nothing_else(store: Society, wrong: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        await ask(store, asks_back=True, **wrong)
    assert refused.value.code == "asksBack_invalid"


async def test_a_message_after_many_questions_about_a_call_still_cancels_it(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    for index in range(4):
        await ask_back(store, question, f"why {index}?")
    await ask(store, text="leave it")
    assert (await claim_agent(store)).action == AskModel()
    lines = await history_lines(store)
    assert lines[2] == f"tool: {INTERRUPTED_RESULT}" and lines[-1] == "user: leave it"
