"""Contract of every storage engine: which task a message belongs to, its state, and what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coterie.agents import Agent
from coterie.llm.service import Completion, TokenUsage
from coterie.store import Limits, Page
from coterie.stores.sql import task_queries
from coterie.tasks import MessageNode, TurnNode
from coterie.testing import FakeClock
from coterie.turn import AskModel, CallEnded, Interrupted, ModelFailed, Stopped
from tests.conftest import PEOPLE
from tests.engines import Engine

from .steps import call, done, message_to, says
from .task_steps import (
    Society,
    claim,
    claims,
    message,
    newest,
    press,
    questions,
    run_send,
    said,
    send,
    step,
    task_of,
)

MINUTE = 60_000


@pytest.fixture
async def store(engine: Engine, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Any]:
    opened = await engine.open(tmp_path / "data", clock)
    await opened.add_agents([*PEOPLE, Agent(id="cyd", name="Cyd")])
    yield opened
    assert [violation async for violation in opened.violations()] == []
    await opened.close()


class ClaimBetween:
    """A connection on which the agent takes its message after the first query."""

    def __init__(self, db: Any, store: Society) -> None:
        self._db, self._store, self._loop = db, store, asyncio.get_running_loop()
        self._is_taken = False

    def execute(self, *statement: Any) -> Any:
        found = self._db.execute(*statement)
        if self._is_taken:
            return found
        self._is_taken = True
        rows = found.fetchall()
        asyncio.run_coroutine_threadsafe(claim(self._store), self._loop).result()
        return SimpleNamespace(fetchall=lambda: rows)


async def test_a_task_is_found_while_its_first_message_is_taken(store: Society, engine: Engine, tmp_path: Path) -> None:
    task = (await send(store)).task
    with engine.behind(tmp_path / "data") as db:
        between: Any = ClaimBetween(db, store)
        found, _ = await asyncio.to_thread(task_queries.read_with_messages, between, task, 0)
    assert found is not None and found.state == "working"


# Definition


@pytest.mark.parametrize("sender", ["user", "bob"])
async def test_a_message_without_a_cause_starts_a_task(store: Society, sender: str) -> None:
    first, second = await send(store, sender=sender), await send(store, sender=sender)
    assert (first.task, second.task) == (first.message_id, second.message_id)
    assert (await message(store, first.message_id)).task == first.message_id
    task = await task_of(store, first.message_id)
    assert (task.sender, task.agent, task.text, task.parent, task.messages) == (sender, "ada", "hello", None, 1)


async def test_a_task_that_an_agent_begins_with_the_person_is_a_task_of_that_agent(store: Society) -> None:
    begun = await send(store, sender="bob", to="user")
    task = await task_of(store, begun.message_id)
    assert (task.sender, task.to, task.agent) == ("bob", "user", "bob")
    assert [one.id for one in await store.tasks(Page(), agent="bob")] == [begun.task]
    assert list(await store.tasks(Page(), agent="ada")) == []


async def test_messages_answers_and_approvals_inherit_the_task_of_their_cause(store: Society) -> None:
    task = (await send(store)).task
    claimed = await step(store, await claim(store), says("", message_to("bob"), call("pay", needs_approval=True)))
    await run_send(store, claimed)
    (asked,) = await questions(store)
    assert ((await newest(store, "bob")).task, asked.task) == (task, task)
    await step(store, await claim(store, "bob"), said("to ada"))
    assert (await newest(store, "ada")).task == task


async def test_an_answer_joins_the_task_of_the_question(store: Society) -> None:
    task = (await send(store)).task
    claimed = await step(store, await claim(store), says("", message_to("user", "Which?", quickReplies=["A", "B"])))
    await step(store, await run_send(store, claimed), said("I asked"))
    (asked,) = await questions(store)
    assert (asked.task, (await task_of(store, task)).state) == (task, "waiting")
    assert (await send(store, "bob")).task != task
    assert (await press(store, asked, 0)).task == task
    assert (await task_of(store, task)).state == "working"


async def test_free_text_joins_the_task_of_the_newest_open_question(store: Society) -> None:
    old, new = [(await send(store, "user", f"{n}?", "ada", quick_replies=["Yes"])).task for n in range(2)]
    answer = await send(store)
    assert (answer.task, (await task_of(store, old)).state) == (new, "done")


async def test_a_persons_message_joins_the_task_of_an_agent_at_work_and_starts_one_at_an_idle_agent(
    store: Society,
) -> None:
    task = (await send(store)).task
    claimed = await claim(store)
    assert (await send(store, text="wait")).task == task
    other = await send(store, sender="bob")
    assert other.task == other.message_id  # only the person steers
    later = await send(store, text="in a second", delay_ms=1_000)
    assert later.task == later.message_id
    await store.withdraw(later.message_id, "user")
    claimed = await step(store, claimed, said())  # takes the waiting messages
    await step(store, claimed, said())
    fresh = await send(store)
    assert fresh.task == fresh.message_id


async def test_a_message_delayed_by_a_minute_starts_a_task_when_it_is_due(store: Society, clock: FakeClock) -> None:
    task = (await send(store)).task
    plan = (message_to("bob", "soon", delayMs=MINUTE - 1), message_to("bob", "later", delayMs=MINUTE))
    claimed = await step(store, await claim(store), says("", *plan))
    await step(store, await run_send(store, await run_send(store, claimed)), said())
    soon, later = (await store.messages(Page(), state="delayed", agent="bob"))[::-1]
    assert (soon.task, soon.parent_task) == (task, None)
    assert (later.task, later.parent_task) == (later.id, task)
    assert await store.tasks_by_id([later.id]) == {}
    assert (await task_of(store, task)).state == "working"

    await clock.advance(seconds=60)
    await store.promote_due(10)
    own = await task_of(store, later.id)
    assert (own.parent, own.state, own.messages) == (task, "working", 1)


async def test_a_delayed_message_that_is_moved_across_the_minute_changes_its_task(
    store: Society, clock: FakeClock
) -> None:
    task = (await send(store)).task
    claimed = await step(store, await claim(store), says("", message_to("bob", "soon", delayMs=1_000)))
    await step(store, await run_send(store, claimed), said())
    (soon,) = await store.messages(Page(), state="delayed", agent="bob")
    assert (await task_of(store, task)).state == "working"

    moved = await store.reschedule(soon.id, timedelta(minutes=5), "user")
    assert (moved.task, moved.parent_task) == (soon.id, task)
    assert ((await task_of(store, task)).state, (await task_of(store, task)).messages) == ("done", 2)
    moved = await store.reschedule(soon.id, timedelta(seconds=1), "user")
    own = await task_of(store, soon.id)
    assert (own.state, own.parent, own.queued) == ("working", task, 1)
    await store.reschedule(soon.id, timedelta(minutes=5), "user")
    assert await store.tasks_by_id([soon.id]) == {}
    await clock.advance(minutes=6)
    await store.promote_due(10)
    assert (await task_of(store, soon.id)).parent == task


async def test_each_occurrence_of_a_recurring_message_is_a_task_of_its_own(store: Society, clock: FakeClock) -> None:
    task = (await send(store)).task
    claimed = await step(store, await claim(store), says("", message_to("bob", "again", every="1m")))
    await step(store, await run_send(store, claimed), said())
    assert (await task_of(store, task)).state == "done"
    found = []
    for _ in range(2):
        await clock.advance(minutes=1)
        await store.promote_due(10)
        occurrence = await newest(store, "bob")
        assert (occurrence.task, occurrence.parent_task) == (occurrence.id, task)
        found.append(occurrence.id)
        await step(store, await claim(store, "bob"), said())
        await step(store, await claim(store), said())
    assert len({*found}) == 2


async def test_a_dead_letter_belongs_to_its_task_and_starts_another_when_it_is_sent_again(
    engine: Engine, tmp_path: Path, clock: FakeClock
) -> None:
    store: Any = await engine.open(tmp_path / "data", clock, Limits(mailbox=1))
    await store.add_agents(PEOPLE)
    task = (await send(store, sender="bob")).task
    claimed = await claim(store)
    await send(store, "bob")  # its mailbox is full
    await step(store, claimed, said("to bob"))
    (letter,) = await store.messages(Page(), state="dead")
    assert (letter.task, letter.to) == (task, "bob")
    assert (await newest(store, "ada")).task == task  # the notice
    assert ((await task_of(store, task)).messages, (await task_of(store, task)).queued) == (3, 1)
    await step(store, await claim(store, "bob"), said())
    await step(store, await claim(store), said())
    again = await store.resend_dead_letter(letter.id)
    assert again.task == again.message_id
    assert (await task_of(store, again.task)).state == "working"
    assert [violation async for violation in store.violations()] == []
    await store.close()


async def test_a_turn_counts_for_the_newest_task_and_answers_each_asker_in_its_own(store: Society) -> None:
    first, second = (await send(store, sender="bob")).task, (await send(store, sender="cyd")).task
    claimed = await claim(store)
    for task in (first, second):
        assert ((await task_of(store, task)).active, (await task_of(store, task)).state) == (1, "working")
    assert ((await task_of(store, first)).turns, (await task_of(store, second)).turns) == (0, 1)
    await step(store, claimed, said("to both"))
    assert ((await newest(store, "bob")).task, (await newest(store, "cyd")).task) == (first, second)
    assert ((await task_of(store, first)).requests, (await task_of(store, second)).requests) == (0, 1)


async def test_a_turn_that_takes_mail_of_a_newer_task_counts_for_that_one(store: Society) -> None:
    first = (await send(store, sender="bob")).task
    claimed = await claim(store)
    second = (await send(store, sender="cyd")).task
    await step(store, claimed, says("", call("a")))  # withdrawn: the message is read first
    assert ((await task_of(store, first)).turns, (await task_of(store, second)).turns) == (0, 1)
    assert ((await task_of(store, first)).requests, (await task_of(store, second)).requests) == (1, 0)


# State


async def test_a_task_works_until_the_last_answer_and_is_done_then(store: Society) -> None:
    task = (await send(store)).task
    states = [(await task_of(store, task)).state]
    claimed = await step(store, await claim(store), says("", message_to("bob")))
    await step(store, await run_send(store, claimed), said("please wait"))
    states.append((await task_of(store, task)).state)  # the message to bob waits
    await step(store, await claim(store, "bob"), said())
    await step(store, await claim(store), said())
    states.append((await task_of(store, task)).state)
    assert states == ["working", "working", "done"]
    assert (await task_of(store, task)).active_agents == []


async def test_a_task_waits_for_an_approval_and_for_a_question(store: Society) -> None:
    task = (await send(store)).task
    await step(store, await claim(store), says("", call("pay", needs_approval=True)))
    assert ((await task_of(store, task)).state, (await task_of(store, task)).questions) == ("waiting", 1)
    (asked,) = await questions(store)
    await press(store, asked, 0)
    assert (await task_of(store, task)).state == "working"
    await step(store, await claim(store), done(), said())
    assert ((await task_of(store, task)).state, (await task_of(store, task)).questions) == ("done", 0)


async def test_a_turn_that_waits_for_a_retry_works(store: Society) -> None:
    task = (await send(store)).task
    failure = ModelFailed(message="busy", recovery="retry", delay=timedelta(seconds=5))
    await step(store, await claim(store), failure)
    assert ((await task_of(store, task)).state, (await task_of(store, task)).active) == ("working", 1)


@pytest.mark.parametrize("ends", [False, True])
async def test_a_turn_that_goes_on_for_another_task_is_in_the_trees_of_both(store: Society, ends: bool) -> None:
    first = (await send(store, sender="bob")).task
    claimed = await step(store, await claim(store), says("", call("a")))
    second = (await send(store, text="stop, do this", sender="cyd")).task
    claimed = await step(store, claimed, done(0))
    assert (claimed.action, claimed.task) == (AskModel(), second)
    if ends:
        await step(store, claimed, said("to both", tokens=7))
    used, calls = dict[str, int](), dict[str, list[str]]()
    for task in (first, second):
        tree = await store.task_tree(task)
        assert tree is not None
        (turn,) = [one for one in tree.nodes if isinstance(one, TurnNode)]
        used[task] = sum(request.input_tokens for request in turn.requests)
        calls[task] = [one.name for one in turn.calls]
        assert (used[task], len(turn.calls)) == (tree.task.input_tokens, tree.task.tool_calls)
        assert (turn.ended_at is not None) == ends
    assert used[second] == 7 * ends
    assert calls == {first: ["a"], second: []}


async def test_a_task_whose_message_was_not_delivered_has_failed_and_is_unread(store: Society) -> None:
    await store.pause("bob")
    lost = (await send(store, "bob", "read me")).task
    await store.terminate("bob")
    found = await task_of(store, lost)
    assert (found.state, found.unread) == ("failed", True)


async def test_two_messages_that_one_turn_read_are_not_unread(store: Society) -> None:
    await store.pause("ada")
    tasks = [(await send(store, text=text)).task for text in ("first", "second")]
    await store.resume("ada")
    await step(store, await claim(store), said("to both"))
    assert [((await task_of(store, task)).turns, (await task_of(store, task)).unread) for task in tasks] == [
        (0, False),
        (1, False),
    ]


async def test_a_task_whose_last_word_was_a_failure_has_failed_until_a_better_one(store: Society) -> None:
    task = (await send(store)).task
    await step(store, await claim(store), ModelFailed(message="no such model", recovery="give_up"))
    assert (await task_of(store, task)).state == "failed"
    assert [one.id for one in await store.tasks(Page(), state="failed")] == [task]

    asking = (await send(store)).task
    claimed = await step(store, await claim(store), says("", message_to("user", "Which?", quickReplies=["A"])))
    await step(store, await run_send(store, claimed), ModelFailed(message="broken", recovery="give_up"))
    assert (await task_of(store, asking)).state == "waiting"
    await press(store, (await questions(store))[0], 0)
    await step(store, await claim(store), said("now it works"))
    assert (await task_of(store, asking)).state == "done"


async def test_a_blocked_turn_is_a_failure_until_it_goes_on(store: Society) -> None:
    task = (await send(store)).task
    await step(store, await claim(store), ModelFailed(message="wrong key", recovery="block"))
    assert (await task_of(store, task)).active == 0
    await store.unblock(["ada"])
    await step(store, await claim(store), said())
    assert (await task_of(store, task)).state == "done"


async def test_only_an_answer_to_one_of_its_questions_reopens_a_task(store: Society) -> None:
    task = (await send(store)).task
    claimed = await step(store, await claim(store), said("done"))
    assert (await task_of(store, task)).state == "done"
    reply = await newest(store, "user")
    again = await send(store, text="and?", in_reply_to=reply.id)
    assert (again.task, (await task_of(store, task)).state) == (again.message_id, "done")
    assert claimed.task is None


async def test_a_withdrawn_message_and_a_withdrawn_question_leave_their_task(store: Society) -> None:
    task = (await send(store)).task
    await store.withdraw(task, "user")
    assert ((await task_of(store, task)).state, (await task_of(store, task)).queued) == ("done", 0)
    asked = await send(store, "user", "Well?", "ada", quick_replies=["Yes"])
    assert (await task_of(store, asked.task)).state == "waiting"
    await store.withdraw(asked.message_id, "ada")
    assert (await task_of(store, asked.task)).state == "done"


async def test_the_withdrawal_of_an_answer_reopens_the_question_of_its_task(store: Society) -> None:
    asked = await send(store, "user", "Well?", "ada", quick_replies=["Yes"])
    answer = await press(store, await message(store, asked.message_id), 0)
    assert (await task_of(store, asked.task)).state == "working"
    await store.withdraw(answer.message_id, "user")
    assert ((await task_of(store, asked.task)).state, (await task_of(store, asked.task)).questions) == ("waiting", 1)


async def test_an_agent_that_is_terminated_or_cleared_leaves_its_tasks(store: Society) -> None:
    first = (await send(store)).task
    await claim(store)
    waiting = (await send(store, sender="bob")).task
    await store.terminate("ada")
    assert (await task_of(store, first)).active == 0
    assert (await task_of(store, waiting)).queued == 1  # the notice to bob
    blocked = (await send(store, "cyd")).task
    claimed = (await claims(store))["cyd"]
    await step(store, claimed, ModelFailed(message="wrong key", recovery="block"))
    await store.clear_thread("cyd")
    assert (await task_of(store, blocked)).active == 0


# What is counted


async def test_everything_that_a_task_used_is_counted(store: Society, clock: FakeClock) -> None:
    task = (await send(store)).task
    usage = TokenUsage(input_tokens=100, output_tokens=7, cached_tokens=40, cost=900, model_ms=250)
    plan = says("", message_to("bob"), call("look"), call("look"))
    claimed = await step(store, await claim(store), plan.__class__(text="", calls=plan.calls, usage=usage))
    claimed = await run_send(store, claimed)
    claimed = await step(store, claimed, CallEnded(index=1, ok=False, result="no"), done(2))
    claimed = await store.summarise(claimed, 1, "in short", Completion(text="in short", service="main", usage=usage))
    await step(store, claimed, Stopped(partial_text="so", usage=TokenUsage(input_tokens=5)))
    await clock.advance(seconds=9)
    await step(store, await claim(store, "bob"), said("hi", tokens=1))
    found = await task_of(store, task)
    assert (found.turns, found.requests, found.tool_calls, found.messages) == (2, 4, 3, 4)
    assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (206, 15, 80)
    assert (found.cost, found.unpriced, found.model_ms, found.agents) == (1_800, 2, 500, 2)
    assert found.last_at - found.created_at == timedelta(seconds=9)


async def test_a_request_that_was_cut_off_or_refused_is_counted_too(store: Society) -> None:
    task = (await send(store)).task
    claimed = await claim(store)
    await send(store, text="wait")
    after = await step(store, claimed, Interrupted(partial_text="I sh", usage=TokenUsage(input_tokens=3)))
    stale = claimed
    await store.add_usage(stale, "main", TokenUsage(input_tokens=20))
    failed = ModelFailed(message="busy", recovery="give_up", usage=TokenUsage(input_tokens=4))
    await step(store, after, failed)
    found = await task_of(store, task)
    assert (found.requests, found.input_tokens, found.turns) == (3, 27, 1)


async def test_reserved_tokens_count_for_no_task_until_they_are_used(store: Society) -> None:
    task = (await send(store)).task
    claimed = await claim(store)
    assert await store.reserve_tokens(claimed, "main", 500, limit=1_000)
    assert ((await task_of(store, task)).requests, (await task_of(store, task)).input_tokens) == (0, 0)
    await step(store, claimed, said(tokens=12))
    assert ((await task_of(store, task)).requests, (await task_of(store, task)).input_tokens) == (1, 12)


async def test_cleared_messages_stay_counted(store: Society) -> None:
    task = (await send(store)).task
    await step(store, await claim(store), said())
    await store.clear_thread("ada")
    found = await task_of(store, task)
    assert (found.messages, found.turns, found.text, found.state) == (2, 1, "", "done")


# Reads


async def test_tasks_are_listed_newest_first_by_state_and_by_agent(store: Society) -> None:
    first = (await send(store)).task
    claimed = await step(store, await claim(store), says("", message_to("bob")))
    await step(store, await run_send(store, claimed), said("wait"))
    await step(store, await claim(store, "bob"), said())
    await step(store, await claim(store), said())
    second, third = (await send(store, "cyd")).task, (await send(store, "cyd")).task
    await claim(store, "cyd")
    listed = [one.id for one in await store.tasks(Page())]
    assert listed == [third, second, first]
    assert [one.id for one in await store.tasks(Page(limit=1))] == [third]
    assert [one.id for one in await store.tasks(Page(), agent="bob")] == [first]
    assert [one.id for one in await store.tasks(Page(), agent="cyd")] == [third, second]
    assert [one.id for one in await store.tasks(Page(), state="done")] == [first]
    open_tasks, count = await store.open_tasks(1)
    assert ([one.id for one in open_tasks], count) == ([third], 2)
    assert (await task_of(store, third)).active_agents == ["cyd"]
    assert (await store.snapshot()).task_count == 2


async def test_the_tree_of_a_task_has_all_messages_and_turns_in_order(store: Society, clock: FakeClock) -> None:
    task = (await send(store)).task
    await clock.advance(seconds=1)
    claimed = await step(store, await claim(store), says("", message_to("bob", "you?")))
    await step(store, await run_send(store, claimed), said("wait"))
    await clock.advance(seconds=1)
    await step(store, await claim(store, "bob"), said("me"))
    await clock.advance(seconds=1)
    await step(store, await claim(store), said("he did"))
    question = next(one for one in await store.messages(Page(), agent="bob") if one.to == "bob")
    tree = await store.task_tree(question.id)  # any message of it finds the task
    assert tree is not None and tree.task.id == task
    lines = [
        f"{one.sender} to {one.to}: {one.text}" if isinstance(one, MessageNode) else f"{one.agent_id} {one.turn_no}"
        for one in tree.nodes
    ]
    assert lines == [
        "user to ada: hello", "ada to bob: you?", "ada to user: wait", "ada 1", "bob to ada: me", "bob 1",
        "ada to user: he did", "ada 2",
    ]  # fmt: skip
    turns = [one for one in tree.nodes if isinstance(one, TurnNode)]
    assert [len(one.requests) for one in turns] == [2, 1, 1]
    assert [[called.name for called in one.calls] for one in turns] == [["send_message"], [], []]
    assert sum(request.input_tokens for one in turns for request in one.requests) == tree.task.input_tokens
    parents = {one.id: one.parent for one in tree.nodes if isinstance(one, MessageNode)}
    assert parents[task] is None and parents[question.id] == task
    assert await store.task_tree("unknown") is None
