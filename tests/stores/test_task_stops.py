"""Contract of every storage engine: a stop ends all of a task that runs or would run, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coterie.agents import Agent
from coterie.errors import Refused
from coterie.llm.service import TokenUsage, ToolSpec
from coterie.messages import QuestionAnswer
from coterie.store import Page
from coterie.stores.postgres import PostgresStore
from coterie.stores.sql.task_changes import TaskChange, merge_changes
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.tasks import StoppedTask
from coterie.testing import FakeClock
from coterie.turn import AskModel, CallEnded, ModelFailed, Rest, Stopped
from coterie.turn_store import Interruption, StaleClaim
from tests.conftest import PEOPLE
from tests.engines import Engine
from tests.sim.oracle import first_error

from .processes import Opener, envelope
from .steps import call, done, history_lines, message_to, says, state
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
    with_budget,
)
from .workers import ManualWorker

TOOLS = tuple(
    ToolSpec(name=name, description=name, parameters={"type": "object"}) for name in ("a", "b", "pay", "send_message")
)


@pytest.fixture
async def store(engine: Engine, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Any]:
    opened = await engine.open(tmp_path / "data", clock)
    await opened.add_agents([*PEOPLE, Agent(id="cyd", name="Cyd")])
    yield opened
    assert [violation async for violation in opened.violations()] == []
    for agent_id in ("ada", "bob", "cyd"):
        view = await opened.history_view(agent_id)
        assert first_error(view.rows, TOOLS) is None
    await opened.close()


async def nothing_is_left(store: Society, clock: FakeClock, task: str) -> None:
    """Nothing of the task runs, now or later."""
    found = await task_of(store, task)
    assert (found.state, found.active, found.queued, found.questions) == ("stopped", 0, 0, 0)
    assert found.stopped_at is not None
    await clock.advance(hours=48)
    assert (await store.promote_due(100)).delivered == []
    assert await claims(store) == {}


def test_a_stop_and_what_it_withdraws_can_be_one_update() -> None:
    scheduled, stopped = TaskChange(adds_later=1), TaskChange(stops=1)
    ((sql, _),) = merge_changes([("t", scheduled, 1), ("t", stopped, 2)])
    assert "THEN NULL" not in sql
    ((sql, _),) = merge_changes([("t", stopped, 1), ("t", scheduled, 2)])
    assert "THEN NULL" in sql  # scheduled after the stop: refused


@pytest.mark.parametrize("at", ["llm", "tools", "wait_retry", "wait_approval", "blocked", "ready", "paused"])
async def test_a_stop_ends_a_turn_in_every_state(store: Society, clock: FakeClock, at: str) -> None:
    task = (await send(store)).task
    events: dict[str, Any] = {
        "tools": says("", call("a"), call("b")),
        "wait_retry": ModelFailed(message="busy", recovery="retry", delay=timedelta(seconds=5)),
        "wait_approval": says("", call("pay", needs_approval=True)),
        "blocked": ModelFailed(message="wrong key", recovery="block"),
    }
    if at == "paused":
        await store.pause("ada")
    claimed = await claim(store) if at not in ("ready", "paused") else None
    if claimed and at in events:
        await step(store, claimed, events[at])
    assert await state(store) == at
    stopped = await store.stop_task(task)
    assert (stopped.turns, stopped.messages) == ((1, 0) if claimed else (0, 1))
    assert stopped.questions == (at == "wait_approval")
    assert await state(store) == ("paused" if at == "paused" else "idle")
    await nothing_is_left(store, clock, task)
    if claimed:
        with pytest.raises(StaleClaim):
            await step(store, claimed, said("too late"))
        assert await store.waiting("user") == [] or at in ("wait_approval", "blocked")


async def test_a_stop_withdraws_all_that_waits_is_delayed_or_recurs(store: Society, clock: FakeClock) -> None:
    task = (await send(store)).task
    plan = (
        message_to("bob", "now"),
        message_to("cyd", "soon", delayMs=5_000),
        message_to("cyd", "later", delayMs=3_600_000),
        message_to("cyd", "daily", every="daily 08:00 UTC"),
    )
    claimed = await step(store, await claim(store), says("", *plan))
    for _ in plan:
        claimed = await run_send(store, claimed)
    other = await send(store, "cyd", "another", delay_ms=7_200_000)
    assert await store.stop_task(task) == StoppedTask(turns=1, messages=4, questions=0, agent_ids=["ada"])
    assert [one.id for one in await store.messages(Page(), state="delayed")] == [other.message_id]
    assert [one.state for one in await store.schedules()] in ([], ["ended"])
    assert (await task_of(store, task)).state == "stopped"
    await clock.advance(hours=48)
    assert [one.message_id for one in (await store.promote_due(100)).delivered] == [other.message_id]


async def test_a_stop_closes_the_questions_of_the_task_as_stopped(store: Society) -> None:
    task = (await send(store)).task
    claimed = await step(store, await claim(store), says("", message_to("user", "Which?", quickReplies=["A"])))
    await step(store, await run_send(store, claimed), said("I asked"))
    (asked,) = await questions(store)
    assert (await store.stop_task(task)).questions == 1
    closed = (await message(store, asked.id)).answer
    assert closed == QuestionAnswer(asked.id, None, is_stopped=True)
    assert closed.to_dict()["closed"] == "stopped"
    with pytest.raises(Refused, match="stopped") as refused:
        await press(store, asked, 0)
    assert refused.value.code == "already_answered"
    written = await send(store, text="A", in_reply_to=asked.id)  # free text starts anew
    assert written.task == written.message_id


async def test_a_stop_is_idempotent_and_stops_what_is_done(store: Society) -> None:
    task = (await send(store)).task
    await step(store, await claim(store), said())
    first = await store.stop_task(task)
    assert (first.turns, first.messages, first.questions) == (0, 0, 0)
    found = await task_of(store, task)
    assert found.state == "stopped"
    assert await store.stop_task(task) == StoppedTask()
    assert (await task_of(store, task)).stopped_at == found.stopped_at
    with pytest.raises(Refused) as refused:
        await store.stop_task("nothing")
    assert refused.value.code == "unknown_task"


async def test_other_tasks_go_on_and_what_tools_have_done_stays_done(store: Society, clock: FakeClock) -> None:
    mine = (await send(store)).task
    claimed = await step(store, await claim(store), says("", call("a"), call("b")))
    claimed = await step(store, claimed, done(0, "happened"))
    others = (await send(store, "bob")).task
    waiting = (await send(store, sender="cyd")).task
    await store.stop_task(mine)
    assert (await history_lines(store))[:3] == ["user: hello", "assistant: ", "tool: happened"]
    assert ((await task_of(store, others)).state, (await task_of(store, waiting)).state) == ("working", "working")
    found = await claims(store)
    assert {name: one.task for name, one in found.items()} == {"ada": waiting, "bob": others}
    await step(store, found["ada"], said("to cyd"))
    assert (await newest(store, "cyd")).task == waiting


@pytest.mark.parametrize("delay", [None, 5_000, 3_600_000])
async def test_a_late_message_of_a_stopped_task_is_refused(store: Society, delay: int | None) -> None:
    task = (await send(store)).task
    await claim(store)
    await store.stop_task(task)
    with pytest.raises(Refused) as refused:
        await send(store, "bob", sender="ada", cause=task, delay_ms=delay)
    assert (refused.value.code, refused.value.status) == ("task_stopped", 409)
    with pytest.raises(Refused):
        await send(store, "bob", sender="ada", cause=task, every="1h")
    assert await store.waiting("bob") == []


async def test_the_tokens_of_a_request_that_the_stop_made_vain_are_counted(store: Society) -> None:
    task = (await send(store)).task
    claimed = await claim(store)
    await store.stop_task(task)
    await store.add_refused_usage(claimed, "main", TokenUsage(input_tokens=50))
    found = await task_of(store, task)
    assert (found.state, found.requests, found.input_tokens) == ("stopped", 1, 50)


@pytest.mark.parametrize("used", [0, 40])
@pytest.mark.parametrize("by", ["its worker", "stop", "stop of one of its tasks", "termination"])
async def test_the_tokens_reserved_for_an_ended_turn_are_replaced_by_those_it_used(
    store: Society, clock: FakeClock, by: str, used: int
) -> None:
    if by == "stop of one of its tasks":
        await send(store, sender="bob")
    task = (await send(store, sender="cyd")).task
    claimed, usage = await claim(store), TokenUsage(input_tokens=used)
    assert await store.reserve_tokens(claimed, "main", 100, limit=1_000)
    if by == "its worker":
        await step(store, claimed, Stopped(usage=usage, service="main"))
    else:
        await (store.terminate("ada") if by == "termination" else store.stop_task(task))
        assert await store.tokens_used_today() == 100  # the request may be paid for: the worker knows
        with pytest.raises(StaleClaim):
            await step(store, claimed, Stopped(usage=usage, service="main"))
        await store.add_refused_usage(claimed, "main", usage)
    assert await store.tokens_used_today() == used
    assert (await task_of(store, task)).requests == bool(used)


@pytest.mark.parametrize("stopped", ["newest", "other"])
async def test_a_turn_with_messages_of_two_tasks_goes_on_without_the_stopped_one(store: Society, stopped: str) -> None:
    first, second = (await send(store, sender="bob")).task, (await send(store, text="and I", sender="cyd")).task
    claimed = await step(store, await claim(store), says("", call("a"), call("b")))
    claimed = await step(store, claimed, done(0, "happened"))
    ended, kept = (second, first) if stopped == "newest" else (first, second)
    asker = "bob" if stopped == "newest" else "cyd"
    result = await store.stop_task(ended)
    if stopped == "newest":
        assert result.turns == 1
        with pytest.raises(StaleClaim):
            await step(store, claimed, done(1))
        claimed = await claim(store)
        assert (claimed.action, claimed.task) == (AskModel(), kept)
        rows = [row for row in (await store.history_view("ada")).rows if row.message]
        assert [row.hidden for row in rows] == [False, True]  # the model sees no message of the stopped task
    else:
        assert result.turns == 0
        claimed = await step(store, claimed, done(1))
    await step(store, claimed, said("to the one who is left"))
    assert [one.task for one in await store.waiting(asker)] == [kept]
    assert await store.waiting("cyd" if asker == "bob" else "bob") == []
    assert (await task_of(store, ended)).state == "stopped"
    assert (await task_of(store, kept)).turns == 1


async def test_a_shared_turn_goes_on_to_send_for_the_task_that_is_left(store: Society) -> None:
    first, second = (await send(store, sender="bob")).task, (await send(store, text="and I", sender="cyd")).task
    await step(store, await claim(store), says("", call("a")))
    await store.stop_task(second)
    claimed = await step(store, await claim(store), says("", message_to("bob", "help me")))
    await run_send(store, claimed)
    assert (await newest(store, "bob")).task == first


@pytest.mark.parametrize("at", ["llm", "wait_retry", "wait_approval", "blocked"])
async def test_a_paused_agent_goes_on_without_the_stopped_task_when_it_is_resumed(
    store: Society, clock: FakeClock, at: str
) -> None:
    kept, ended = (await send(store, sender="bob")).task, (await send(store, sender="cyd")).task
    events: dict[str, Any] = {
        "wait_retry": ModelFailed(message="busy", recovery="retry", delay=timedelta(seconds=5)),
        "wait_approval": says("", call("pay", needs_approval=True)),
        "blocked": ModelFailed(message="wrong key", recovery="block"),
    }
    claimed = await claim(store)
    if at in events:
        await step(store, claimed, events[at])
    assert await state(store) == at
    await store.pause("ada")
    await store.stop_task(ended)
    await clock.advance(minutes=10)
    assert "ada" not in await claims(store)
    assert (await task_of(store, kept)).state == "working"

    await store.resume("ada")
    claimed = await claim(store)
    assert (claimed.action, claimed.task) == (AskModel(), kept)
    assert claimed.model_failures == (at == "wait_retry")
    await step(store, claimed, said())
    assert [one.task for one in await store.waiting("bob") if one.sender == "ada"][-1] == kept


async def test_a_shared_turn_keeps_to_the_budget_of_the_task_it_goes_on_for(store: Society) -> None:
    rules = with_budget(turns=1)
    first = (await send(store, "bob")).task
    claimed = await step(store, await claim(store, "bob", rules=rules), says("", message_to("ada")), rules=rules)
    await step(store, await run_send(store, claimed, rules), said("wait"), rules=rules)
    second = (await send(store, sender="cyd")).task
    claimed = await claim(store, rules=rules)
    assert (claimed.action, claimed.task) == (AskModel(), second)
    await store.stop_task(second)
    assert (await claim(store, rules=rules)).action == Rest()
    (asked,) = await questions(store)
    assert asked.payload["budget"]["task"] == first


async def test_a_stop_that_withdraws_an_answer_reopens_the_questions_of_other_tasks(store: Society) -> None:
    old, new = [await send(store, "user", f"{n}?", "ada", quick_replies=["Yes"]) for n in range(2)]
    await store.pause("ada")
    await send(store, text="yes to both")
    assert await questions(store) == []
    await store.stop_task(new.task)
    assert [one.id for one in await questions(store)] == [old.message_id]
    assert (await task_of(store, old.task)).state == "waiting"


async def test_workers_are_told_at_once_that_their_turns_have_ended(store: Any) -> None:
    told: list[Interruption] = []

    class Told(ManualWorker):
        def interrupt(self, interruption: Interruption) -> None:
            told.append(interruption)

    worker = Told("w")
    store.register_worker(worker)
    task = (await store.send(envelope("user", "ada"))).task
    claimed = await worker.next()
    await store.stop_task(task)
    async with asyncio.timeout(180):
        while not told:
            await asyncio.sleep(0.01)
    assert told[0].agent_id == "ada"
    assert told[0].ended_epoch is not None and told[0].ended_epoch > claimed.epoch


# Races of several processes


@pytest.mark.parametrize("delay", [None, 5_000, 3_600_000])
async def test_a_message_that_is_sent_during_the_stop_is_withdrawn_or_refused(
    process: Opener, delay: int | None
) -> None:
    stopping, sending = await process(), await process()
    for number in range(10):
        task = (await stopping.send(envelope("user", "ada", str(number)))).task
        await claim(stopping)
        late = [envelope("ada", "bob", f"{number}/{n}", cause=task, delay_ms=delay) for n in range(4)]
        sends = asyncio.gather(*(sending.send(one) for one in late), return_exceptions=True)
        stopped, results = await asyncio.gather(stopping.stop_task(task), sends)
        assert all(not isinstance(one, BaseException) or getattr(one, "code", "") == "task_stopped" for one in results)
        accepted = sum(not isinstance(one, BaseException) for one in results)
        assert accepted == stopped.messages
        assert await stopping.waiting("bob") == []
        assert await stopping.messages(Page(), state="delayed") == []


@pytest.mark.parametrize("delay", [None, 3_600_000])
async def test_a_sender_that_looked_before_the_stop_and_commits_after_it_is_refused(
    process: Opener, monkeypatch: pytest.MonkeyPatch, delay: int | None
) -> None:
    """The sender's transaction is open, has found the task at work, and waits until the stop is committed."""
    stopping, sending = await process(), await process()
    task = (await stopping.send(envelope("user", "ada"))).task
    await claim(stopping)
    loop = asyncio.get_running_loop()
    flush = UnitOfWork.flush
    held = 0

    def hold(uow: UnitOfWork) -> None:
        nonlocal held
        if any(row.cause == task for row in uow._new_rows) and not held:
            held = 1
            asyncio.run_coroutine_threadsafe(_stop(stopping, task), loop).result(30)
        flush(uow)

    monkeypatch.setattr(UnitOfWork, "flush", hold)
    with pytest.raises(Refused) as refused:
        await sending.send(envelope("ada", "cyd", "late", cause=task, delay_ms=delay))
    assert (refused.value.code, held) == ("task_stopped", 1)
    assert await stopping.messages(Page(), state="delayed") == []
    assert await stopping.waiting("cyd") == []


async def _stop(store: PostgresStore, task: str) -> None:
    await store.stop_task(task)


async def test_turns_of_other_processes_end_with_their_task(process: Opener) -> None:
    stopping, working = await process(), await process()
    task = (await stopping.send(envelope("user", "ada"))).task
    claimed = await step(working, await claim(working), says("", call("a"), call("b")))
    outcome = CallEnded(index=0, ok=True, result="happened")
    results = await asyncio.gather(stopping.stop_task(task), step(working, claimed, outcome), return_exceptions=True)
    assert isinstance(results[0], StoppedTask) and results[0].turns == 1
    assert (await task_of(stopping, task)).state == "stopped"
    with pytest.raises(StaleClaim):
        await step(working, results[1] if not isinstance(results[1], BaseException) else claimed, done(1))
