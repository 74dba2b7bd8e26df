"""Tasks from Python: the handle that `Society.send` returns, listing, tree, stop and continue."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coterie import NoAnswer, Receipt, Refused, Society
from coterie.errors import StoreUnavailable
from coterie.testing import Calls, FakeClock, Says
from coterie.testing.model_server import ReceivedRequest
from tests.agent.stage import Bell, each, stage


def asks(to: str, text: str = "you?", **more: object) -> Says:
    return Says(calls=(Calls("send_message", {"to": to, "payload": {"text": text}, **more}),))


async def test_wait_returns_the_task_when_everything_is_done(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.default = each(ada=[asks("bob"), "asked", *["so"] * 5], bob=["yes"] * 5)
        sent = await here.society.send(to="ada", text="what does bob think?")
        receipt: Receipt = sent
        assert receipt.to_dict()["task"] == sent.task == sent.message_id
        assert "asked" not in repr(sent) and sent.task in repr(sent)
        task = await sent.wait(timeout=180)
        assert (task.id, task.state, task.agents, task.queued) == (sent.task, "done", 2, 0)
        assert await sent.wait() == task
        assert (await here.society.task(sent.message_id)).task == task
        assert [one.id for one in await here.society.tasks(agent="bob")] == [sent.task]
        assert await here.society.tasks(state="working") == []


async def test_wait_says_that_the_store_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> int:
        raise StoreUnavailable("the database cannot be reached")

    async with stage(tmp_path) as here:
        await here.society.pause("ada")
        sent = await here.society.send(to="ada", text="hello")
        monkeypatch.setattr(here.society.store, "last_event", fail)
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await sent.wait(timeout=180)


async def test_wait_ends_when_the_task_waits_for_the_person(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(asks("user", "Tea?", quickReplies=["Yes", "No"]), "", "Here it is.")
        sent = await here.society.send(to="ada", text="hello")
        assert (await sent.wait(timeout=180)).state == "waiting"
        (question,) = await here.heard()
        answer = await here.society.send(to="ada", text="Yes", in_reply_to=question.id, option=0)
        assert answer.task == sent.task
        assert (await answer.wait(timeout=180)).state == "done"


async def test_stop_ends_the_turn_and_the_wait(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        Bell.may_end.clear()
        here.server.script(Says(calls=(Calls("ring", {"name": "x"}),)))
        sent = await here.society.send(to="ada", text="go")
        await Bell.rang.wait()
        waiting = asyncio.create_task(sent.wait(timeout=180))
        stopped = await sent.stop()
        assert (stopped.turns, stopped.messages, stopped.questions) == (1, 0, 0)
        assert (await waiting).state == "stopped"
        assert (await sent.stop()).turns == 0
        await here.state("ada", "idle")
        Bell.may_end.set()


async def test_a_wait_can_time_out_and_the_task_goes_on(society: Society, clock: FakeClock) -> None:
    sent = await society.send(to="ada", text="nobody works here")
    waiting = asyncio.create_task(sent.wait(timeout=5))
    await clock.advance(seconds=4)
    assert not waiting.done()
    await clock.advance(seconds=2)
    with pytest.raises(NoAnswer, match="has not ended within 5 s; it goes on"):
        await waiting
    assert (await society.task(sent.task)).task.state == "working"


async def test_a_wait_ends_when_the_society_stops(tmp_path: Path) -> None:
    async with Society.open(tmp_path / "home", work=False) as society:
        sent = await society.send(to="assistant", text="hello")
        waiting = asyncio.create_task(sent.wait())
        await asyncio.sleep(0)
    with pytest.raises(NoAnswer, match="the society stopped before the task ended"):
        await waiting


async def test_a_delayed_message_is_stopped_before_its_task_starts(society: Society, clock: FakeClock) -> None:
    sent = await society.send(to="ada", text="later", delay_ms=3_600_000)
    waiting = asyncio.create_task(sent.wait())
    assert (await sent.stop()).messages == 1
    assert (await sent.stop()).messages == 0
    with pytest.raises(NoAnswer, match="withdrawn or deleted before its task started"):
        await waiting
    await clock.jump(hours=2)
    assert await society.store.waiting("ada") == []
    other = await society.send(to="ada", text="later", delay_ms=3_600_000)
    await clock.jump(hours=2)
    assert (await other.stop()).messages == 1
    assert (await other.wait()).state == "stopped"


async def test_unknown_tasks_are_refused(society: Society) -> None:
    for call in (society.task("x"), society.stop_task("x"), society.continue_task("x")):
        with pytest.raises(Refused) as refusal:
            await call
        assert refusal.value.code == "unknown_task"


async def test_a_continued_task_works_again_with_one_more_budget(tmp_path: Path) -> None:
    def ping_pong(request: ReceivedRequest) -> Says:
        messages = request.body["messages"]
        if messages[-1]["role"] == "tool":
            return Says("")
        return asks("bob" if "(id: ada)" in str(messages[0]) else "ada")

    async with stage(tmp_path, agents="[limits.task]\nturns = 2\n[agents.ada]\n[agents.bob]\n") as here:
        here.server.default = ping_pong
        sent = await here.society.send(to="ada", text="go")
        first = await sent.wait(timeout=180)
        assert (first.state, first.budgets) == ("waiting", 1) and first.budget_question is not None
        assert (await here.society.continue_task(sent.task)).budgets == 2
        await here.heard(2)  # the next question
        second = await sent.wait(timeout=180)
        assert (second.state, second.turns) == ("waiting", first.turns + 2)
        await sent.stop()
        with pytest.raises(Refused) as refusal:
            await here.society.continue_task(sent.task)
        assert refusal.value.code == "task_stopped"


async def test_a_reminder_of_the_person_is_withdrawn_by_an_answer(society: Society, clock: FakeClock) -> None:
    asked = await society.send(to="ada", text="When?")
    reminder = await society.send(to="bob", text="Well?", delay_ms=3_600_000, unless_answered=asked.message_id)
    await society.bus.send(sender="ada", to="user", payload={"text": "Now"}, in_reply_to=asked.message_id)
    await clock.jump(hours=2)
    stored = await society.store.message(reminder.message_id)
    assert stored is not None and stored.state == "withdrawn"


async def test_an_agent_reminds_another_unless_it_is_answered(tmp_path: Path, clock: FakeClock) -> None:
    """Escalation: ask Bob; in an hour, unless he has answered, ask Cleo."""
    async with stage(tmp_path, agents="[agents.ada]\n[agents.bob]\n[agents.cleo]\n", clock=clock) as here:

        def answer(request: ReceivedRequest) -> Says:
            last = request.body["messages"][-1]
            if "(id: ada)" not in str(request.body["messages"][0]):
                return Says("yes")
            if "ask bob" in str(last["content"]):
                return asks("bob")
            if "messageId" in str(last["content"]) and "scheduled" not in str(last["content"]):
                asked = str(last["content"]).split('"messageId":"')[1].split('"')[0]
                return asks("cleo", delayMs=3_600_000, unlessAnswered=asked)
            return Says("fine")

        here.server.default = answer
        await here.society.pause("bob")
        sent = await here.society.send(to="ada", text="ask bob")
        await here.heard()
        (reminder,) = await here.society.store.delayed("cleo")
        assert reminder.unless_answered is not None
        await here.society.resume("bob")
        await sent.wait()
        stored = await here.society.store.message(reminder.id)
        assert stored is not None and stored.state == "withdrawn"
        await clock.jump(hours=2)
        assert not any("(id: cleo)" in str(request.body["messages"][0]) for request in here.server.requests)
