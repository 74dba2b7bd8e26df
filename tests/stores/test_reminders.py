"""Contract of every storage engine: delayed messages that an answer withdraws (`unlessAnswered`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from coterie.agents import Agent
from coterie.errors import Refused
from coterie.messages import make_envelope
from coterie.store import Limits, Page
from coterie.stores.sql import reminders
from coterie.testing import FakeClock
from coterie.turn import ModelFailed
from tests.conftest import PEOPLE
from tests.engines import Engine

from .processes import Opener, envelope
from .steps import call, message_to, says
from .task_steps import Society, claim, claims, message, press, questions, run_send, said, send, step, task_of

HOUR = 3_600_000


@pytest.fixture
async def store(engine: Engine, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Any]:
    opened = await engine.open(tmp_path / "data", clock)
    await opened.add_agents([*PEOPLE, Agent(id="cyd", name="Cyd")])
    yield opened
    assert [violation async for violation in opened.violations()] == []
    await opened.close()


async def remind(store: Society, question: str, sender: str = "ada", to: str = "cyd", **more: Any) -> Any:
    return await send(store, to, "nobody answers", sender, unless_answered=question, **{"delay_ms": HOUR} | more)


async def delayed(store: Society) -> list[str]:
    return [one.id for one in await store.messages(Page(), state="delayed")]


async def fires(store: Society, clock: FakeClock) -> list[str]:
    await clock.advance(hours=1)
    return [one.message_id for one in (await store.promote_due(10)).delivered]


async def test_without_an_answer_the_message_is_delivered(store: Society, clock: FakeClock) -> None:
    asked = await send(store, "bob", "well?", "ada")
    reminder = await remind(store, asked.message_id)
    assert reminder.state == "delayed"
    assert (await message(store, reminder.message_id)).unless_answered == asked.message_id
    assert await fires(store, clock) == [reminder.message_id]
    assert (await claims(store))["cyd"].task == reminder.message_id


async def test_the_answer_of_the_one_who_was_asked_withdraws_it(store: Society, clock: FakeClock) -> None:
    asked = await send(store, "bob", "well?", "ada")
    first, second = [await remind(store, asked.message_id, delay_ms=delay) for delay in (5_000, HOUR)]
    other = await remind(store, (await send(store, "cyd", "and you?", "ada")).message_id, to="user")
    assert (await task_of(store, first.task)).state == "working"
    await step(store, await claim(store, "bob"), said("yes"))
    assert await delayed(store) == [other.message_id]
    assert [(await message(store, one.message_id)).state for one in (first, second)] == ["withdrawn", "withdrawn"]
    assert (await task_of(store, first.task)).state == "done"
    assert await fires(store, clock) == [other.message_id]


async def test_a_reply_with_a_tool_counts_as_an_answer(store: Society) -> None:
    asked = await send(store, "bob", "well?", "ada")
    await remind(store, asked.message_id)
    await send(store, "ada", "by the way", "bob")
    await send(store, "ada", "I am not asked", "cyd", in_reply_to=asked.message_id)
    assert len(await delayed(store)) == 1
    await send(store, "ada", "yes", "bob", in_reply_to=asked.message_id)
    assert await delayed(store) == []


async def test_one_answer_to_two_questions_withdraws_the_reminders_of_both(store: Society) -> None:
    for text in ("well?", "and?"):
        await remind(store, (await send(store, "bob", text, "ada")).message_id)
    other = await remind(store, (await send(store, "bob", "me too", "cyd")).message_id, sender="cyd", to="user")
    assert len(await delayed(store)) == 3
    await step(store, await claim(store, "bob"), said("yes"))
    assert await delayed(store) == []
    assert (await message(store, other.message_id)).state == "withdrawn"
    answer = next(one for one in await store.waiting("ada") if one.sender == "bob")
    await store.withdraw(answer.id, "bob")
    assert len(await delayed(store)) == 2


async def test_a_reminder_about_a_question_that_was_answered_with_another_is_withdrawn(store: Society) -> None:
    first, _ = [await send(store, "bob", text, "ada") for text in ("well?", "and?")]
    await step(store, await claim(store, "bob"), said("yes, to both"))
    assert (await remind(store, first.message_id)).state == "withdrawn"
    later = await send(store, "bob", "one more", "ada")
    assert (await remind(store, later.message_id)).state == "delayed"


async def test_a_text_that_was_sent_with_a_tool_before_is_the_answer(store: Society) -> None:
    asked = await send(store, "bob", "well?", "ada")
    await remind(store, asked.message_id)
    claimed = await step(store, await claim(store, "bob"), says("", message_to("ada", "yes")))
    await step(store, await run_send(store, claimed), said("yes"))
    assert [one.payload["text"] for one in await store.waiting("ada")] == ["yes"]
    assert await delayed(store) == []


async def test_a_withdrawn_answer_restores_nothing_while_another_answer_stands(store: Society) -> None:
    asked = await send(store, "bob", "well?", "ada")
    reminder = await remind(store, asked.message_id)
    answers = [await send(store, "ada", text, "bob", in_reply_to=asked.message_id) for text in ("yes", "no")]
    await store.withdraw(answers[0].message_id, "bob")
    assert await delayed(store) == []
    await store.withdraw(answers[1].message_id, "bob")
    assert await delayed(store) == [reminder.message_id]


@pytest.mark.parametrize("how", ["button", "text"])
async def test_the_persons_answer_withdraws_it(store: Society, how: str) -> None:
    asked = await send(store, "user", "well?", "ada", quick_replies=["Yes"])
    await remind(store, asked.message_id)
    if how == "button":
        await press(store, await message(store, asked.message_id), 0)
    else:
        await send(store, text="yes")
    assert await delayed(store) == []


async def test_a_question_and_its_reminder_in_one_transaction(store: Society) -> None:
    asked = make_envelope(sender="ada", to="bob", payload={"text": "well?"})
    later = make_envelope(sender="ada", to="cyd", payload={"text": "no"}, delay_ms=HOUR, unless_answered=asked.id)
    answer = make_envelope(sender="bob", to="ada", payload={"text": "yes"}, in_reply_to=asked.id)
    receipts = await asyncio.gather(*(store.send(one) for one in (asked, later, answer)))
    assert [one.state for one in receipts] == ["pending", "delayed", "pending"]
    assert (await message(store, later.id)).state == "withdrawn"


async def test_a_message_whose_question_is_answered_gives_a_withdrawn_receipt(store: Society, clock: FakeClock) -> None:
    asked = await send(store, "bob", "well?", "ada")
    await step(store, await claim(store, "bob"), said("yes"))
    receipt, again = [await remind(store, asked.message_id, client_id="once") for _ in range(2)]
    assert (receipt.state, again) == ("withdrawn", receipt)
    assert (await message(store, receipt.message_id)).state == "withdrawn"
    assert await fires(store, clock) == []
    question = await send(store, "user", "well?", "ada", quick_replies=["Yes"])
    await send(store, text="a free text")
    assert (await remind(store, question.message_id)).state == "withdrawn"


async def test_a_question_that_a_stop_has_closed_has_no_answer(store: Society, clock: FakeClock) -> None:
    task = (await send(store)).task
    await claim(store)
    asked = await send(store, "user", "well?", "ada", quick_replies=["Yes"], cause=task)
    reminder = await remind(store, asked.message_id)
    await store.stop_task(task)
    assert await fires(store, clock) == [reminder.message_id]


async def test_a_reminder_about_a_question_that_a_stop_has_closed_is_delivered(
    store: Society, clock: FakeClock
) -> None:
    task = (await send(store)).task
    await claim(store)
    asked = await send(store, "user", "well?", "ada", quick_replies=["Yes"], cause=task)
    await store.stop_task(task)
    reminder = await remind(store, asked.message_id)
    assert reminder.state == "delayed"
    assert await fires(store, clock) == [reminder.message_id]


async def test_a_reply_that_cannot_be_delivered_is_no_answer(engine: Engine, tmp_path: Path, clock: FakeClock) -> None:
    store = await engine.open(tmp_path / "small", clock, Limits(mailbox=1))
    await store.add_agents([*PEOPLE, Agent(id="cyd", name="Cyd")])
    asked = await send(store, "bob", "well?", "ada")
    reminder = await remind(store, asked.message_id)
    await store.pause("ada")
    await send(store, "ada", "fills the mailbox", "cyd")
    await step(store, await claim(store, "bob"), said("yes"))
    assert [one.sender for one in await store.messages(Page(), state="dead")] == ["bob"]
    assert await fires(store, clock) == [reminder.message_id]
    await store.close()


@pytest.mark.parametrize("what", ["unknown", "of another", "no question to the person", "withdrawn"])
async def test_what_is_no_question_of_the_sender_is_refused(store: Society, what: str) -> None:
    asked = await send(store, "cyd", "well?", "bob" if what == "of another" else "ada")
    match what:
        case "no question to the person":
            asked = await send(store, "user", "by the way", "ada")
        case "withdrawn":
            await store.withdraw(asked.message_id, "ada")
    with pytest.raises(Refused) as refused:
        await remind(store, "nothing" if what == "unknown" else asked.message_id)
    assert (refused.value.code, refused.value.status) == ("unlessAnswered_unknown", 422)
    assert await delayed(store) == []


@pytest.mark.parametrize("wrong", [{"delay_ms": None}, {"delay_ms": None, "every": "1h"}])
async def test_it_needs_a_delay_and_does_not_recur(store: Society, wrong: dict[str, Any]) -> None:
    asked = await send(store, "bob", "well?", "ada")
    with pytest.raises(Refused) as refused:
        await remind(store, asked.message_id, **wrong)
    assert refused.value.code == "unlessAnswered_invalid"


async def test_it_fires_again_after_the_answer_is_withdrawn(store: Society, clock: FakeClock) -> None:
    asked = await send(store, "user", "well?", "ada", quick_replies=["Yes"])
    soon, late = [await remind(store, asked.message_id, delay_ms=delay) for delay in (30_000, HOUR)]
    answer = await press(store, await message(store, asked.message_id), 0)
    assert await delayed(store) == []
    await store.withdraw(answer.message_id, "user")
    assert {*await delayed(store)} == {soon.message_id, late.message_id}
    assert (await task_of(store, soon.task)).state == "working"
    assert await fires(store, clock) == [soon.message_id, late.message_id]


async def test_it_stays_withdrawn_if_it_was_withdrawn_too(store: Society, clock: FakeClock) -> None:
    asked = await send(store, "user", "well?", "ada", quick_replies=["Yes"])
    reminder = await remind(store, asked.message_id)
    answer = await press(store, await message(store, asked.message_id), 0)
    await store.withdraw(reminder.message_id, "user")
    await store.withdraw(answer.message_id, "user")
    assert await fires(store, clock) == []


async def test_it_stays_withdrawn_if_its_own_task_was_stopped_meanwhile(store: Society) -> None:
    task = (await send(store, "ada", "go")).task
    await claim(store)
    asked = await send(store, "user", "well?", "ada", quick_replies=["Yes"])
    reminder = await remind(store, asked.message_id, cause=task)
    answer = await send(store, "ada", "Yes", in_reply_to=asked.message_id, option=0)
    assert (await message(store, reminder.message_id)).state == "withdrawn"
    await store.stop_task(task)
    await store.withdraw(answer.message_id, "user")
    assert await delayed(store) == []


async def test_the_systems_report_of_a_failure_is_no_answer(store: Society, clock: FakeClock) -> None:
    asked = await send(store, "bob", "well?", "ada")
    reminder = await remind(store, asked.message_id)
    await step(store, await claim(store, "bob"), ModelFailed(message="no such model", recovery="give_up"))
    report = (await store.waiting("ada"))[-1]
    assert (report.sender, report.in_reply_to) == ("system", asked.message_id)
    assert await fires(store, clock) == [reminder.message_id]


async def test_a_moved_or_withdrawn_reminder_is_counted_once(store: Society) -> None:
    asked = await send(store, "bob", "well?", "ada")
    first, second = await remind(store, asked.message_id), await remind(store, asked.message_id)
    await store.withdraw(first.message_id, "ada")
    await step(store, await claim(store, "bob"), said("yes"))
    assert (await message(store, second.message_id)).state == "withdrawn"


async def test_an_answer_and_a_reminder_at_the_same_time_never_miss_each_other(process: Opener) -> None:
    asking, answering = await process(), await process()
    for number in range(10):
        asked = (await asking.send(envelope("ada", "bob", str(number)))).message_id
        later = envelope("ada", "cyd", "no", delay_ms=HOUR, unless_answered=asked)
        answer = envelope("bob", "ada", "yes", in_reply_to=asked)
        await asyncio.gather(asking.send(later), answering.send(answer))
        assert await delayed(asking) == []


async def test_an_answer_that_comes_while_the_reminder_is_stored_withdraws_it(
    process: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reminder's transaction has found no answer and is not committed yet: the answer waits for it."""
    asking, answering = await process(), await process()
    asked = (await asking.send(envelope("ada", "bob", "well?"))).message_id
    loop = asyncio.get_running_loop()
    is_answered = reminders.is_answered
    answers: list[Future[Any]] = []

    def look_and_hold(*where: Any) -> bool:
        found = is_answered(*where)
        answer = answering.send(envelope("bob", "ada", "yes", in_reply_to=asked))
        answers.append(asyncio.run_coroutine_threadsafe(answer, loop))
        with suppress(TimeoutError):
            answers[0].result(1)
        return found

    monkeypatch.setattr(reminders, "is_answered", look_and_hold)
    await asking.send(envelope("ada", "cyd", "no", delay_ms=HOUR, unless_answered=asked))
    await asyncio.wrap_future(answers[0])
    assert await delayed(asking) == []


async def test_asking_about_a_call_is_no_answer_to_its_question(store: Society) -> None:
    await send(store, "ada", "please pay")
    await step(store, await claim(store), says("", call("pay", needs_approval=True)))
    (question,) = await questions(store)
    before = await remind(store, question.id)
    await send(store, "ada", "why?", in_reply_to=question.id, asks_back=True)
    after = await remind(store, question.id)
    assert (after.state, sorted(await delayed(store))) == ("delayed", sorted([before.message_id, after.message_id]))
    await press(store, question, 0)
    assert await delayed(store) == []
