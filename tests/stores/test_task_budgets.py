"""Contract of every storage engine: the budget of a task, and the one question at its limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coterie.agents import Agent
from coterie.errors import Refused
from coterie.messages import Message
from coterie.tasks import BUDGET_OPTIONS, CONTINUE, STOP
from coterie.testing import FakeClock
from coterie.turn import AskModel, Rest
from tests.conftest import PEOPLE
from tests.engines import Engine

from .processes import Opener, envelope
from .steps import call, done, history_lines, message_to, says, state
from .task_steps import (
    Society,
    claim,
    claims,
    message,
    press,
    questions,
    run_send,
    said,
    send,
    step,
    task_of,
    with_budget,
)

ONE_TURN = with_budget(turns=1)


@pytest.fixture
async def store(engine: Engine, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Any]:
    opened = await engine.open(tmp_path / "data", clock)
    await opened.add_agents([*PEOPLE, Agent(id="cyd", name="Cyd")])
    yield opened
    assert [violation async for violation in opened.violations()] == []
    await opened.close()


async def at_the_limit(store: Society, *helpers: str) -> tuple[str, Message]:
    """A task of one turn, in which ada asks `helpers`; each of them comes to the limit."""
    task = (await send(store)).task
    plan = says("", *(message_to(name, f"help me, {name}") for name in helpers or ("bob",)))
    claimed = await step(store, await claim(store, rules=ONE_TURN), plan, rules=ONE_TURN)
    for _ in helpers or ("bob",):
        claimed = await run_send(store, claimed, ONE_TURN)
    await step(store, claimed, said("please wait"), rules=ONE_TURN)
    for name, found in (await claims(store, ONE_TURN)).items():
        assert (found.action, await state(store, name)) == (Rest(), "blocked")
    (question,) = await questions(store)
    return task, question


async def test_at_the_limit_of_turns_the_person_is_asked_with_what_it_was_about(store: Society) -> None:
    task, question = await at_the_limit(store)
    assert (question.sender, question.task) == ("bob", task)
    assert question.payload["quickReplies"] == [*BUDGET_OPTIONS]
    budget = question.payload["budget"]
    assert (budget["task"], budget["reason"], budget["limit"], budget["about"]) == (task, "turns", 1, "hello")
    assert (budget["agents"], budget["used"]["turns"], budget["used"]["inputTokens"]) == (["Ada", "Bob"], 1, 10)
    found = await task_of(store, task)
    assert (found.state, found.budget_question, found.budgets, found.turns) == ("waiting", question.id, 1, 2)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"tokens": 20}, "tokens"), ({"cost": 2e-6}, "cost"), ({"minutes": 0.001}, "minutes")],
    ids=lambda value: str(value),
)
async def test_tokens_cost_and_minutes_are_checked_before_every_request(
    store: Society, limits: dict[str, Any], reason: str
) -> None:
    rules = with_budget(turns=0, **limits)
    task = (await send(store)).task
    claimed = await claim(store, rules=rules)
    requests = 0
    while claimed.action == AskModel() and requests < 9:
        answer = said("", tokens=9, cost=1_000, model_ms=30)
        event = answer.__class__(text="", calls=(call("look"),), usage=answer.usage)
        claimed = await step(store, claimed, event, done(), rules=rules)
        requests += 1
    assert (requests, claimed.action, await state(store)) == (2, Rest(), "blocked")
    (question,) = await questions(store)
    assert question.payload["budget"]["reason"] == reason
    await press(store, question, CONTINUE)
    claimed = await claim(store, rules=rules)
    assert claimed.action == AskModel()
    await step(store, claimed, said(tokens=1), rules=rules)
    assert ((await task_of(store, task)).state, (await task_of(store, task)).budgets) == ("done", 2)


async def test_without_limits_no_budget_stops_a_task(store: Society) -> None:
    rules = with_budget(turns=0)
    await send(store)
    claimed = await claim(store, rules=rules)
    for _ in range(4):
        claimed = await step(store, claimed, says("", call()), done(), rules=rules)
    assert claimed.action == AskModel()


async def test_several_agents_at_the_limit_ask_once(store: Society) -> None:
    task, question = await at_the_limit(store, "bob", "cyd")
    assert [await state(store, name) for name in ("bob", "cyd")] == ["blocked", "blocked"]
    assert (await task_of(store, task)).questions == 1
    await press(store, question, CONTINUE)
    woken = await claims(store, with_budget(turns=2))
    assert [woken[name].action for name in ("bob", "cyd")] == [AskModel(), AskModel()]


async def test_a_second_question_is_asked_only_after_the_next_budget(store: Society) -> None:
    task, first = await at_the_limit(store, "bob", "cyd")
    await store.continue_task(task)  # two turns are granted, three have begun
    woken = await claims(store, ONE_TURN)
    assert {name: one.action for name, one in woken.items()} == {"bob": Rest(), "cyd": Rest()}
    (second,) = await questions(store)
    assert (second.id != first.id, (await task_of(store, task)).budgets) == (True, 2)
    await store.continue_task(task)
    assert {one.action for one in (await claims(store, ONE_TURN)).values()} == {AskModel()}
    assert (await questions(store), (await message(store, second.id)).answer is not None) == ([], True)
    assert (await task_of(store, task)).budget_question is None


async def test_a_pressed_continue_reaches_the_agent_and_cannot_be_taken_back(store: Society) -> None:
    task, question = await at_the_limit(store)
    receipt = await press(store, question, CONTINUE)
    assert (receipt.task, receipt.state) == (task, "pending")
    with pytest.raises(Refused, match="decided about the budget") as refused:
        await store.withdraw(receipt.message_id, "user")
    assert refused.value.code == "already_taken"
    await step(store, await claim(store, "bob", rules=ONE_TURN), said("I did"), rules=ONE_TURN)
    assert "user: Continue" in await history_lines(store, "bob")


async def test_the_button_stop_stops_the_task_and_is_itself_withdrawn(store: Society) -> None:
    task, question = await at_the_limit(store, "bob", "cyd")
    receipt = await press(store, question, STOP)
    assert (receipt.state, receipt.task) == ("withdrawn", task)
    assert (await message(store, receipt.message_id)).state == "withdrawn"
    found = await task_of(store, task)
    assert (found.state, found.questions, found.active, found.queued, found.budget_question) == (
        "stopped", 0, 0, 0, None,
    )  # fmt: skip
    assert [await state(store, name) for name in ("ada", "bob", "cyd")] == ["idle", "idle", "idle"]
    assert await claims(store) == {}
    with pytest.raises(Refused) as refused:
        await store.continue_task(task)
    assert refused.value.code == "task_stopped"


async def test_continue_without_a_question_grants_a_budget_ahead(store: Society) -> None:
    task = (await send(store)).task
    claimed = await step(store, await claim(store, rules=ONE_TURN), says("", message_to("bob")), rules=ONE_TURN)
    await store.continue_task(task)
    await step(store, await run_send(store, claimed, ONE_TURN), said("wait"), rules=ONE_TURN)
    assert (await claim(store, "bob", rules=ONE_TURN)).action == AskModel()
    with pytest.raises(Refused) as refused:
        await store.continue_task("nothing")
    assert refused.value.code == "unknown_task"


async def test_the_persons_own_message_is_let_through_and_asks_again_afterwards(store: Society) -> None:
    task, first = await at_the_limit(store)
    written = await send(store, "bob", "why?")
    assert written.task == task
    claimed = await claim(store, "bob", rules=ONE_TURN)
    assert claimed.action == AskModel()
    plan = says("", message_to("cyd"))
    claimed = await run_send(store, await step(store, claimed, plan, rules=ONE_TURN), ONE_TURN)
    assert (claimed.action, await state(store, "bob")) == (AskModel(), "llm")  # the turn was let through
    await step(store, claimed, said("because"), rules=ONE_TURN)
    assert {one.action for one in (await claims(store, ONE_TURN)).values()} == {Rest()}
    (second,) = await questions(store)
    assert (second.sender != "bob", second.id != first.id) == (True, True)


async def test_a_text_leaves_no_other_agent_blocked_without_a_question(store: Society) -> None:
    _, first = await at_the_limit(store, "bob", "cyd")
    other = "cyd" if first.sender == "bob" else "bob"
    await send(store, first.sender, "hm")
    found = await claims(store, ONE_TURN)
    assert (found[first.sender].action, found[other].action) == (AskModel(), Rest())
    (second,) = await questions(store)
    assert second.sender == other


async def test_clearing_the_conversation_with_the_question_leaves_no_other_agent_blocked(store: Society) -> None:
    _, first = await at_the_limit(store, "bob", "cyd")
    await store.clear_thread(first.sender)
    other = "cyd" if first.sender == "bob" else "bob"
    assert {name: one.action for name, one in (await claims(store, ONE_TURN)).items()} == {other: Rest()}
    (second,) = await questions(store)
    assert second.sender == other


async def test_the_question_is_open_again_after_its_text_is_withdrawn(store: Society) -> None:
    task, first = await at_the_limit(store)
    await store.pause("bob")
    written = await send(store, "bob", "hm")
    assert (await questions(store), (await task_of(store, task)).budget_question) == ([], None)
    await store.withdraw(written.message_id, "user")
    assert [one.id for one in await questions(store)] == [first.id]
    await press(store, first, STOP)
    assert (await task_of(store, task)).state == "stopped"


async def test_other_tasks_of_a_blocked_agent_go_on(store: Society) -> None:
    task, question = await at_the_limit(store)
    other = await send(store, "bob", "and mine?", "cyd")
    claimed = await claim(store, "bob", rules=ONE_TURN)
    assert (claimed.action, claimed.task) == (AskModel(), other.task)
    await step(store, claimed, said("to both"), rules=ONE_TURN)
    assert [one.id for one in await questions(store)] == [question.id]
    assert (await store.waiting("cyd"))[-1].task == other.task
    assert (await task_of(store, task)).state == "working"  # ada got its answer in its own task


async def test_a_turn_that_goes_on_for_another_task_sends_in_that_task(store: Society) -> None:
    task, _ = await at_the_limit(store)
    await store.pause("cyd")
    other = await send(store, "cyd", "and mine?", "bob")
    await send(store, "cyd", "help me, too", "ada", cause=task)
    await store.resume("cyd")
    claimed = await claim(store, "cyd", rules=ONE_TURN)
    assert (claimed.action, claimed.task) == (AskModel(), other.task)
    claimed = await step(store, claimed, says("", message_to("user")), rules=ONE_TURN)
    await run_send(store, claimed, ONE_TURN)
    assert (await store.waiting("user"))[-1].task == other.task


async def test_an_agent_between_two_tasks_that_have_no_budget_left_asks_about_each(store: Society) -> None:
    first, question = await at_the_limit(store)
    second = (await send(store, "cyd")).task
    claimed = await step(store, await claim(store, "cyd", rules=ONE_TURN), says("", message_to("bob")), rules=ONE_TURN)
    await step(store, await run_send(store, claimed, ONE_TURN), said("wait"), rules=ONE_TURN)
    assert (await claim(store, "bob", rules=ONE_TURN)).action == Rest()
    assert [one.payload["budget"]["task"] for one in await questions(store)] == [first, second]
    await store.stop_task(second)
    assert (await claim(store, "bob", rules=ONE_TURN)).action == Rest()
    assert [one.id for one in await questions(store)] == [question.id]


async def test_a_blocked_agent_takes_a_message_of_the_same_task_and_asks_no_model(store: Society) -> None:
    task, question = await at_the_limit(store)
    await send(store, "bob", "hurry", "cyd", cause=task)
    assert (await claim(store, "bob", rules=ONE_TURN)).action == Rest()
    assert (await task_of(store, task)).state == "waiting"
    await press(store, question, CONTINUE)
    assert (await claim(store, "bob", rules=ONE_TURN)).action == AskModel()


@pytest.mark.parametrize("how", ["resume", "unblock", "resume all"])
async def test_a_resumed_agent_is_still_over_the_budget(store: Society, how: str) -> None:
    _, question = await at_the_limit(store)
    match how:
        case "resume":
            await store.resume("bob")
        case "unblock":
            await store.unblock(["bob"])
        case _:
            await store.resume_all()
    assert (await claim(store, "bob", rules=ONE_TURN)).action == Rest()
    assert [one.id for one in await questions(store)] == [question.id]


async def test_a_paused_agent_goes_on_after_continue_and_its_own_resume(store: Society) -> None:
    _, question = await at_the_limit(store)
    await store.pause("bob")
    await press(store, question, CONTINUE)
    assert await claims(store, ONE_TURN) == {}
    await store.resume("bob")
    assert (await claim(store, "bob", rules=ONE_TURN)).action == AskModel()


async def test_a_terminated_asker_leaves_its_question_to_the_store(store: Society) -> None:
    task, question = await at_the_limit(store, "bob", "cyd")
    other = "cyd" if question.sender == "bob" else "bob"
    await store.terminate(question.sender)
    await store.continue_task(task)
    assert (await claims(store, with_budget(turns=2)))[other].action == AskModel()


async def test_two_processes_at_the_limit_ask_once(process: Opener) -> None:
    """Both find the limit at the same time; the second finds the question of the first."""
    first, second = await process(), await process()
    names = ("ada", "bob", "cyd")
    task = (await first.send(envelope("user", "ada"))).task
    rules = with_budget(turns=1)
    claimed = await step(first, await claim(first, rules=rules), says("", *map(message_to, names[1:])), rules=rules)
    await run_send(first, await run_send(first, claimed, rules), rules)
    both = await asyncio.gather(first.claim_ready("one", rules, 1), second.claim_ready("two", rules, 1))
    assert [one.action for found in both for one in found] == [Rest(), Rest()]
    assert len(await questions(first)) == 1
    assert (await task_of(first, task)).turns == 3
    answered = [press(store, (await questions(first))[0], CONTINUE) for store in (first, second)]
    outcomes = await asyncio.gather(*answered, return_exceptions=True)
    assert sum(isinstance(one, Refused) for one in outcomes) == 1
    assert (await task_of(first, task)).budgets == 2
