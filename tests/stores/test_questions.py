"""Questions to the person: what answers them, and what reopens them."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.agents import Agent
from coterie.artifacts import Artifact
from coterie.errors import Refused
from coterie.ids import keyed_id
from coterie.messages import Envelope, QuestionAnswer, make_envelope
from coterie.store import Overview, Store
from coterie.stores.sqlite import SqliteStore
from coterie.testing import FakeClock

PEOPLE = [Agent(id="user", name="You", kind="person"), Agent(id="ada", name="Ada"), Agent(id="bob", name="Bob")]
OPTIONS = ("Yes", "No")


class Society(Store, Overview, Protocol):
    """A store with its overview."""


def question(sender: str = "ada", **more: Any) -> Envelope:
    return make_envelope(
        **{"sender": sender, "to": "user", "payload": {"text": "Well?"}, "quick_replies": OPTIONS} | more
    )


def press(asked: str, option: int = 0, to: str = "ada", **more: Any) -> Envelope:
    draft: dict[str, Any] = {
        "sender": "user",
        "to": to,
        "payload": {"text": OPTIONS[option % 2]},
        "in_reply_to": asked,
        "option": option,
    }
    return make_envelope(**draft | more)


def free_text(to: str = "ada", **more: Any) -> Envelope:
    return make_envelope(**{"sender": "user", "to": to, "payload": {"text": "Perhaps"}} | more)


async def ask(store: Society, sender: str = "ada", **more: Any) -> str:
    return (await store.send(question(sender, **more))).message_id


async def answer(store: Society, message_id: str) -> QuestionAnswer | None:
    message = await store.message(message_id)
    assert message is not None
    return message.answer


async def open_questions(store: Society, agent_id: str | None = None) -> list[str]:
    return [message.id for message in await store.open_questions(agent_id)]


async def refusal(call: Any) -> Refused:
    with pytest.raises(Refused) as refused:
        await call
    return refused.value


async def changed(store: Society, after: int) -> list[str]:
    return [event.subject for event in await store.events(after) if event.kind == "quick_replies.changed"]


async def test_a_button_answers_its_question_and_no_other(store: Society) -> None:
    first, second = await ask(store), await ask(store)
    start = await store.last_event()
    pressed = await store.send(press(first, 1))
    assert await answer(store, first) == QuestionAnswer(pressed.message_id, 1)
    assert await answer(store, second) is None
    assert await open_questions(store) == [second]
    assert await changed(store, start) == [first]


async def test_a_second_button_is_refused_with_the_first_answer(store: Society) -> None:
    asked = await ask(store)
    winner = await store.send(press(asked, 1))
    refused = await refusal(store.send(press(asked, 0)))
    assert (refused.code, refused.status) == ("already_answered", 409)
    assert refused.to_dict()["answer"] == {"messageId": winner.message_id, "option": 1}
    assert len(await store.waiting("ada")) == 1


async def test_of_two_buttons_pressed_at_once_one_wins_and_the_other_is_refused(store: Society) -> None:
    asked = await ask(store)
    outcomes = await asyncio.gather(
        store.send(press(asked, 0)), store.send(press(asked, 1)), return_exceptions=True
    )  # one batch
    assert isinstance(outcomes[1], Refused) and outcomes[1].code == "already_answered"
    assert len(await store.waiting("ada")) == 1


async def test_a_text_sent_together_with_a_button_leaves_the_answer_of_the_button(store: Society) -> None:
    asked = await ask(store)
    pressed, typed = await asyncio.gather(
        store.send(press(asked, 0)), store.send(make_envelope(sender="user", to="ada", payload={"text": "and more"}))
    )  # one batch
    assert await answer(store, asked) == QuestionAnswer(pressed.message_id, 0)
    assert [message.id for message in await store.waiting("ada")] == [pressed.message_id, typed.message_id]
    assert [violation async for violation in store.violations()] == []


async def test_the_same_button_under_the_same_name_is_one_message_and_one_answer(store: Society) -> None:
    asked = await ask(store)
    receipts = await asyncio.gather(*(store.send(press(asked, client_id="c")) for _ in range(5)))
    receipts += [await store.send(press(asked, client_id="c"))]
    assert len({receipt.message_id for receipt in receipts}) == 1
    assert await answer(store, asked) == QuestionAnswer(receipts[0].message_id, 0)


async def test_a_question_asked_and_answered_in_one_transaction_is_answered(store: Society) -> None:
    fresh, other = question(client_id="q"), question()
    asked = keyed_id(store.info.secret, fresh.id)
    sends = [fresh, other, press(asked), free_text(), press(asked, 1)]
    outcomes = await asyncio.gather(*(store.send(each) for each in sends), return_exceptions=True)
    assert isinstance(outcomes[-1], Refused) and outcomes[-1].code == "already_answered"
    assert await answer(store, asked) == QuestionAnswer(sends[2].id, 0)
    assert await answer(store, other.id) == QuestionAnswer(sends[3].id, None)


async def test_a_question_asked_after_an_answer_stays_open(store: Society) -> None:
    before, after = question(), question()
    await asyncio.gather(*(store.send(each) for each in (before, free_text(), after)))
    assert await open_questions(store) == [after.id]


async def test_of_many_messages_at_once_the_first_after_a_question_answers_it(store: Society) -> None:
    old = await ask(store)
    one, two, three, fresh = free_text(), free_text(), free_text(), question()
    await asyncio.gather(*(store.send(each) for each in (one, two, fresh, three)))
    assert await answer(store, old) == QuestionAnswer(one.id, None)
    assert await answer(store, fresh.id) == QuestionAnswer(three.id, None)


async def test_free_text_answers_every_open_question_of_that_agent_and_of_no_other(store: Society) -> None:
    first, second, bobs = await ask(store), await ask(store), await ask(store, "bob")
    start = await store.last_event()
    typed = await store.send(free_text())
    assert await answer(store, first) == await answer(store, second) == QuestionAnswer(typed.message_id, None)
    assert await open_questions(store) == [bobs]
    assert await changed(store, start) == [first, second]


async def test_free_text_in_reply_to_one_question_answers_only_that_one(store: Society) -> None:
    first, second = await ask(store), await ask(store)
    typed = await store.send(free_text(in_reply_to=first))
    assert await answer(store, first) == QuestionAnswer(typed.message_id, None)
    assert await open_questions(store) == [second]


async def test_free_text_in_reply_to_an_answered_question_is_an_ordinary_message(store: Society) -> None:
    first, second = await ask(store), await ask(store)
    pressed = await store.send(press(first))
    await store.send(free_text(in_reply_to=first))
    assert await answer(store, first) == QuestionAnswer(pressed.message_id, 0)
    assert await open_questions(store) == [second]


async def test_an_attachment_without_text_counts_as_free_text(store: Society, clock: FakeClock) -> None:
    asked = await ask(store)
    picture: dict[str, Any] = {
        "ref": "p",
        "filename": "a.png",
        "type": "image",
        "mime_type": "image/png",
        "size": 1,
        "sha256": "00",
    }
    await store.add_artifact(Artifact(**picture, created_at=clock.now()))
    await store.send(free_text(payload={"attachments": [{"artifactRef": "p"}]}))
    assert await open_questions(store) == []
    assert await answer(store, asked) is not None


async def test_a_refused_message_answers_nothing(store: Society) -> None:
    await ask(store)
    refused = await refusal(store.send(free_text(payload={"attachments": [{"artifactRef": "gone"}]})))
    assert refused.code == "attachment_unknown"
    assert len(await open_questions(store)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"option": 2, "payload": {"text": "Yes"}},
        {"option": 0, "payload": {"text": "yes"}},
        {"option": 0, "payload": {"attachments": []}},
        {"option": 0, "to": "bob"},
    ],
    ids=["no such option", "other words", "no words", "to another agent"],
)
async def test_a_button_that_was_not_offered_is_refused(store: Society, wrong: dict[str, Any]) -> None:
    asked = await ask(store)
    assert (await refusal(store.send(press(asked, **wrong)))).code == "option_invalid"
    assert await open_questions(store) == [asked]


async def test_only_the_person_answers_questions_to_the_person(store: Society) -> None:
    asked = await ask(store)
    await store.send(free_text(sender="bob", in_reply_to=asked))
    await store.send(free_text("bob", in_reply_to=asked))
    between = await store.send(question(to="bob"))
    await store.send(press(between.message_id))
    assert await open_questions(store) == [asked]


async def test_withdrawing_the_answer_opens_every_question_it_answered(store: Society) -> None:
    first, second = await ask(store), await ask(store)
    typed = await store.send(free_text())
    assert await open_questions(store) == []
    start = await store.last_event()
    for _ in range(2):
        await store.withdraw(typed.message_id, "user")
    assert await open_questions(store) == [second, first]
    assert await changed(store, start) == [first, second]
    await store.send(press(first))
    assert await open_questions(store) == [second]


async def test_a_delayed_text_answers_only_the_question_that_it_names(store: Society, clock: FakeClock) -> None:
    first, second = await ask(store), await ask(store)
    await store.send(free_text(delay_ms=1000))
    assert await open_questions(store) == [second, first]
    await clock.advance(seconds=1)
    await store.promote_due(10)
    assert await open_questions(store) == [second, first]
    await store.send(free_text(delay_ms=1000, in_reply_to=first))
    assert await open_questions(store) == [second]


async def test_a_delayed_question_is_neither_open_nor_answered_by_free_text(store: Society, clock: FakeClock) -> None:
    asked = await ask(store, delay_ms=1000)
    await store.send(free_text())
    assert await open_questions(store) == []
    await clock.advance(seconds=1)
    await store.promote_due(10)
    assert await open_questions(store) == [asked]


@pytest.mark.parametrize("delay_ms", [None, 3_600_000])
async def test_a_question_that_is_withdrawn_or_not_delivered_yet_has_no_answer(
    store: Any, clock: FakeClock, delay_ms: int | None
) -> None:
    asked = await ask(store, delay_ms=delay_ms)
    if delay_ms is None:
        await store.withdraw(asked, "ada")
    assert (await refusal(store.send(press(asked)))).code == "already_answered"
    await store.send(free_text(in_reply_to=asked))
    assert await answer(store, asked) is None
    await clock.advance(hours=1)
    await store.promote_due(10)
    assert await open_questions(store) == ([asked] if delay_ms else [])
    found = (await store.tasks_by_id([asked])).get(asked)
    assert found is None or found.questions == bool(delay_ms)


async def test_the_questions_of_a_terminated_agent_stay_as_they_are(store: Society) -> None:
    answered, left = await ask(store), await ask(store)
    pressed = await store.send(press(answered))
    await store.terminate("ada")
    assert await answer(store, answered) == QuestionAnswer(pressed.message_id, 0)
    assert await open_questions(store) == [left]
    assert (await refusal(store.send(press(left)))).code == "recipient_terminated"


async def test_open_questions_are_listed_newest_first_for_all_or_for_one(store: Society) -> None:
    first, bobs, last = await ask(store), await ask(store, "bob"), await ask(store)
    await store.send(make_envelope(sender="ada", to="user", payload={"text": "no question"}))
    assert await open_questions(store) == [last, bobs, first]
    assert await open_questions(store, "bob") == [bobs]
    assert [message.id for message in await store.open_questions(limit=1)] == [last]


# The rules once more, as a model that knows nothing of rows

Move = tuple[str, int, str]
moves = st.lists(
    st.tuples(
        st.sampled_from(["ask", "press", "reply", "type", "withdraw"]),
        st.integers(0, 5),
        st.sampled_from(["ada", "bob"]),
    ),
    max_size=12,
)


class Model:
    """Expected questions, with their askers and answers."""

    def __init__(self) -> None:
        self.asked: dict[str, str] = {}
        self.answers: dict[str, QuestionAnswer] = {}

    def expect(self, envelope: Envelope) -> str | None:
        """Return the code of the expected refusal, or None."""
        if envelope.is_question:
            self.asked[envelope.id] = envelope.sender
        elif envelope.in_reply_to is not None:
            if envelope.in_reply_to not in self.answers:
                self.answers[envelope.in_reply_to] = QuestionAnswer(envelope.id, envelope.option)
            elif envelope.option is not None:
                return "already_answered"
        else:
            for name, asker in self.asked.items():
                if asker == envelope.to:
                    self.answers.setdefault(name, QuestionAnswer(envelope.id, None))
        return None

    def withdraw(self, message_id: str) -> None:
        self.answers = {name: each for name, each in self.answers.items() if each.message_id != message_id}


class StoreAndModel:
    """The store and the model, which get the same messages."""

    def __init__(self, store: Society) -> None:
        self.store, self.model = store, Model()
        self.said: list[Envelope] = []
        self.batch: list[tuple[Envelope, str | None]] = []

    def draft(self, kind: str, pick: int, agent: str) -> Envelope:
        asked = [each for each in self.said if each.is_question]
        if kind == "ask":
            return question(agent)
        if kind == "type" or not asked:
            return free_text(agent)
        aim = asked[pick % len(asked)]
        return press(aim.id, pick % 2, aim.sender) if kind == "press" else free_text(aim.sender, in_reply_to=aim.id)

    def say(self, envelope: Envelope) -> None:
        code = self.model.expect(envelope)
        self.batch.append((envelope, code))
        if code is None:
            self.said.append(envelope)

    async def hand_in(self) -> None:
        sends = (self.store.send(envelope) for envelope, _ in self.batch)
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
        assert [getattr(outcome, "code", None) for outcome in outcomes] == [code for _, code in self.batch]
        self.batch.clear()

    async def withdraw(self, pick: int) -> None:
        await self.hand_in()
        if mine := [each for each in self.said if each.sender == "user"]:
            chosen = mine[pick % len(mine)]
            await self.store.withdraw(chosen.id, "user")
            self.model.withdraw(chosen.id)

    async def compare(self) -> None:
        await self.hand_in()
        assert {name: await answer(self.store, name) for name in self.model.asked} == {
            name: self.model.answers.get(name) for name in self.model.asked
        }
        left = [name for name in self.model.asked if name not in self.model.answers]
        assert await open_questions(self.store) == left[::-1]
        assert [each async for each in self.store.violations()] == []


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(plan=moves, together=st.integers(1, 4))
def test_random_questions_and_answers_follow_the_model(plan: list[Move], together: int) -> None:
    async def play(folder: str) -> None:
        store = await SqliteStore.open(Path(folder), FakeClock())
        await store.add_agents(PEOPLE)
        table = StoreAndModel(store)
        for kind, pick, agent in plan:
            if kind == "withdraw":
                await table.withdraw(pick)
            else:
                table.say(table.draft(kind, pick, agent))
            if len(table.batch) >= together:
                await table.hand_in()
        await table.compare()
        await store.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(folder))
