"""What every storage engine promises about turns: claims, steps, interruptions, answers, recovery."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from coterie.agent.send_message import seal_call
from coterie.agent.turn import (
    NOT_EXECUTED,
    STOPPED,
    UNKNOWN,
    Answered,
    Ask,
    Effect,
    Event,
    ModelFailed,
    PlannedCall,
    Ran,
    Rest,
    Rules,
    Run,
    Stopped,
)
from coterie.agents import Agent
from coterie.drafts import seal
from coterie.errors import Refused
from coterie.llm.chat import Answer, Call, Usage
from coterie.messages import Message
from coterie.store import Limits, Page, Store
from coterie.stores.sql.store import SqlStore
from coterie.testing import FakeClock
from coterie.turns import Claim, StaleOwner, TurnStore
from tests.engines import Engine

RULES = Rules(max_withdrawals=2, max_rounds=5)


class Society(Store, TurnStore, Protocol):
    """A store with everything in it."""


def call(name: str = "look", effect: Effect = "unsafe", **changed: Any) -> PlannedCall:
    arguments = changed.pop("arguments", {})
    return PlannedCall(call=Call(id="c", name=name, arguments=arguments), effect=effect, **changed)


def message_to(to: str, text: str = "hello", **more: Any) -> PlannedCall:
    arguments = {"to": to, "payload": {"text": text}} | more
    return call("send_message", "idempotent", arguments=arguments)


def says(text: str, *calls: PlannedCall) -> Answered:
    return Answered(text=text, calls=calls)


def done(index: int = 0, result: str = "ok") -> Ran:
    return Ran(index=index, ok=True, result=result)


async def ask(store: Society, to: str = "ada", text: str = "hello", sender: str = "user", **more: Any) -> str:
    receipt = await store.send(seal(sender=sender, to=to, payload={"text": text}, **more))
    return receipt.message_id


async def take(store: Society, worker: str = "w") -> Claim:
    (claim,) = await store.claim(worker, RULES, 1)
    return claim


async def go_on(store: Society, claim: Claim, *events: Event) -> Claim:
    for event in events:
        claim = await store.advance(claim, event, RULES)
    return claim


async def run_send(store: Society, claim: Claim) -> Claim:
    """The call that the claim says is to run, as the handler does it."""
    assert isinstance(claim.effect, Run) and claim.call is not None
    key = claim.key(claim.effect.index)
    envelope = seal_call(claim.agent_id, claim.call.call.arguments, key=key, cause=claim.cause)
    return await store.advance(claim, done(claim.effect.index, ""), RULES, sends=envelope)


async def told(store: Society, agent_id: str = "ada") -> list[str]:
    """The history, in short."""
    rows = await store.history(agent_id)
    return [f"{row.role}: {row.message.payload['text'] if row.message else row.text}" for row in rows]


async def got(store: Society, recipient: str) -> list[tuple[str, str, str | None]]:
    return [(m.sender, m.payload["text"], m.in_reply_to) for m in await store.waiting(recipient)]


async def state(store: Society, agent_id: str = "ada") -> str:
    agent = await store.agent(agent_id)
    assert agent is not None
    return agent.state


async def stored(store: Society, message_id: str) -> Message:
    message = await store.message(message_id)
    assert message is not None
    return message


# Claiming


async def test_a_claimed_agent_is_at_work_and_all_its_mail_is_in_its_history(store: Society) -> None:
    for text in ("one", "two", "three"):
        await ask(store, text=text)
    assert await state(store) == "ready"
    claim = await take(store)
    assert (claim.agent_id, claim.effect, await state(store)) == ("ada", Ask(), "llm")
    assert await told(store) == ["user: one", "user: two", "user: three"]
    assert await store.waiting("ada") == []


async def test_an_agent_at_work_is_not_claimed_again(store: Society) -> None:
    await ask(store)
    await take(store)
    assert await store.claim("other", RULES, 10) == []
    await ask(store, text="more")
    assert await store.claim("other", RULES, 10) == []


async def test_nobody_without_mail_is_claimed(store: Society) -> None:
    assert await store.claim("w", RULES, 10) == []


async def test_several_agents_are_claimed_at_once_but_no_more_than_wanted(store: Society) -> None:
    await ask(store, "ada")
    await ask(store, "bob")
    assert len(await store.claim("w", RULES, 1)) == 1
    assert len(await store.claim("w", RULES, 5)) == 1


async def test_the_agents_at_work_are_those_whose_state_says_so(store: Society) -> None:
    async def at_work() -> list[str]:
        return [agent.id for agent in await store.agents() if agent.state in ("llm", "tools")]

    assert await at_work() == []
    await ask(store)
    claim = await take(store)
    assert await at_work() == ["ada"]
    claim = await go_on(store, claim, says("", call()))
    assert await at_work() == ["ada"]
    await go_on(store, claim, done(), says("that is all"))
    assert await at_work() == []


# The fence


async def test_a_claim_is_good_for_one_step(store: Society) -> None:
    await ask(store)
    claim = await take(store)
    await go_on(store, claim, says("", call()))
    with pytest.raises(StaleOwner):
        await go_on(store, claim, says("", call()))


async def test_an_owner_that_was_taken_over_writes_nothing(engine: Engine, tmp_path: Path, clock: FakeClock) -> None:
    path = tmp_path / "shared"
    first = await engine.open(path, clock)
    await first.add_agents([Agent(id="user", name="You", kind="person"), Agent(id="ada", name="Ada")])
    await ask(first)
    stale = await take(first)
    await first.close()
    second = await engine.open(path, clock)
    claim = await take(second)
    assert claim.epoch > stale.epoch and claim.effect == Ask()
    before = await told(second)
    sends = seal(sender="ada", to="user", payload={"text": "from the grave"})
    with pytest.raises(StaleOwner):
        await second.advance(stale, says("late"), RULES, sends=sends)
    assert await told(second) == before
    assert await second.waiting("user") == []
    await go_on(second, claim, says("in time"))
    assert await got(second, "user") == [("ada", "in time", (await second.history("ada"))[0].message.id)]  # type: ignore[union-attr]
    await second.close()


async def test_a_step_that_fails_leaves_no_trace(store: Society) -> None:
    await ask(store)
    claim = await go_on(store, await take(store), says("", call()))
    before = await told(store)
    with pytest.raises(Exception):  # noqa: B017 - whatever it is
        await store.advance(claim, Ran(index=7, ok=True, result=""), RULES)
    assert (await told(store), await state(store)) == (before, "tools")
    await go_on(store, claim, done(), says("fine"))


# A turn without interruptions


async def test_a_text_ends_the_turn_and_answers_whoever_asked(store: Society) -> None:
    asked = await ask(store)
    claim = await go_on(store, await take(store), says("42"))
    assert (claim.effect, await state(store)) == (Rest(), "idle")
    assert await told(store) == ["user: hello", "assistant: 42"]
    assert await got(store, "user") == [("ada", "42", asked)]


async def test_calls_and_results_enter_the_history_together_when_all_have_ended(store: Society) -> None:
    await ask(store)
    claim = await go_on(store, await take(store), says("wait", call("a"), call("b")), done(0, "one"))
    assert await told(store) == ["user: hello"]
    claim = await go_on(store, claim, done(1, "two"))
    assert await told(store) == ["user: hello", "assistant: wait", "tool: one", "tool: two"]
    rows = await store.history("ada")
    assert [one.id for one in rows[1].calls] == [rows[2].call_id, rows[3].call_id]
    assert (claim.effect, await state(store)) == (Ask(), "llm")


async def test_call_ids_are_unique_for_the_agent_whatever_the_service_calls_them(store: Society) -> None:
    await ask(store)
    claim = await go_on(store, await take(store), says("", call(), call()), done(0), done(1), says("", call()), done())
    ids = [row.call_id for row in await store.history("ada") if row.call_id]
    assert len(set(ids)) == len(ids) == 3
    await go_on(store, claim, says("end"))


async def test_an_empty_text_is_neither_said_nor_sent(store: Society) -> None:
    await ask(store)
    await go_on(store, await take(store), says("  \n"))
    assert await told(store) == ["user: hello"]
    assert (await got(store, "user"), await state(store)) == ([], "idle")


# Interruptions


async def test_a_message_to_an_agent_at_work_waits_as_an_interjection(store: Society) -> None:
    await ask(store)
    await take(store)
    receipt = await store.send(seal(sender="user", to="ada", payload={"text": "wait"}))
    assert receipt.state == "queued"
    assert [m.payload["text"] for m in await store.waiting("ada")] == ["wait"]


async def test_before_the_first_call_interjections_withdraw_the_plan_and_all_are_read_in_order(store: Society) -> None:
    await ask(store)
    claim = await take(store)
    for text in ("no", "wait", "stop"):
        await ask(store, text=text)
    claim = await go_on(store, claim, says("I shall", call(), call()))
    assert (claim.effect, await state(store)) == (Ask(), "llm")
    assert await told(store) == ["user: hello", "user: no", "user: wait", "user: stop"]
    assert await store.waiting("ada") == []


async def test_two_messages_during_one_model_call_cost_exactly_one_more(store: Society) -> None:
    await ask(store)
    claim = await take(store)
    await ask(store, text="a")
    await ask(store, text="b")
    asks = 1
    for event in (says("", call()), says("done")):
        claim = await go_on(store, claim, event)
        asks += claim.effect == Ask()
    assert (asks, claim.effect) == (2, Rest())


async def test_after_a_call_has_run_an_interjection_closes_the_rest_and_keeps_what_happened(store: Society) -> None:
    await ask(store)
    claim = await go_on(store, await take(store), says("", call("a"), call("b"), call("c")))
    await ask(store, text="stop")
    claim = await go_on(store, claim, done(0, "happened"))
    assert await told(store) == [
        "user: hello",
        "assistant: ",
        "tool: happened",
        f"tool: {NOT_EXECUTED}",
        f"tool: {NOT_EXECUTED}",
        "user: stop",
    ]
    assert claim.effect == Ask()


async def test_a_withdrawn_plan_leaves_everything_before_it_as_it_was(store: Society) -> None:
    await ask(store)
    claim = await go_on(store, await take(store), says("first", call("a")), done(0, "one"))
    before = await store.history("ada")
    await ask(store, text="wait")
    await go_on(store, claim, says("second", call("b")))
    after = await store.history("ada")
    assert after[: len(before)] == before
    assert [row.role for row in after[len(before) :]] == ["user"]


async def test_mail_waiting_at_the_end_of_an_answer_begins_the_next_turn_with_its_own_askers(store: Society) -> None:
    first = await ask(store)
    claim = await take(store)
    second = await ask(store, text="and you?", sender="bob")
    claim = await go_on(store, claim, says("to the person"))
    assert (claim.effect, await state(store)) == (Ask(), "llm")
    assert await told(store) == ["user: hello", "assistant: to the person", "user: and you?"]
    await go_on(store, claim, says("to bob"))
    assert await got(store, "user") == [("ada", "to the person", first)]
    assert await got(store, "bob") == [("ada", "to bob", second)]


async def test_a_delayed_message_that_falls_due_interrupts_like_any_other(store: Society, clock: FakeClock) -> None:
    await ask(store, text="later", delay_ms=1_000)
    await ask(store)
    claim = await go_on(store, await take(store), says("", call("a"), call("b")))
    await clock.advance(seconds=1)
    await store.promote(10)
    await go_on(store, claim, done())
    assert (await told(store))[-1] == "user: later"


async def test_agents_that_talk_without_pause_cannot_keep_another_from_acting_but_a_person_can(store: Society) -> None:
    await ask(store)
    claim = await take(store)
    for _ in range(RULES.max_withdrawals):
        await ask(store, text="psst", sender="bob")
        claim = await go_on(store, claim, says("", call("a"), call("b")))
        assert claim.effect == Ask()
    await ask(store, text="psst again", sender="bob")
    claim = await go_on(store, claim, says("", call("a"), call("b"), call("c")), done(0))
    assert claim.effect == Run(1)
    await ask(store, text="stop")
    claim = await go_on(store, claim, done(1))
    assert claim.effect == Ask()
    assert (await told(store))[-3:] == [f"tool: {NOT_EXECUTED}", "user: psst again", "user: stop"]


async def test_the_answer_to_what_a_plan_just_sent_does_not_interrupt_that_plan(store: Society) -> None:
    await ask(store)
    claim = await go_on(store, await take(store), says("", message_to("bob", "?"), call("b"), message_to("ada", "me")))
    claim = await run_send(store, claim)
    bob = await take(store)
    await go_on(store, bob, says("!"))
    assert [m.payload["text"] for m in await store.waiting("ada")] == ["!"]
    claim = await go_on(store, claim, done(1))
    assert claim.effect == Run(2)
    claim = await run_send(store, claim)
    assert claim.effect == Ask()
    # What came before the last call ended is read with it; what the last call itself sent comes next.
    assert (await told(store))[-1] == "user: !"
    await go_on(store, claim, says("so"))
    assert (await told(store))[-2:] == ["assistant: so", "user: me"]


async def test_withdrawn_mail_does_not_interrupt_and_is_never_read(store: Society) -> None:
    await ask(store)
    claim = await take(store)
    await store.withdraw(await ask(store, text="never mind"), "user")
    claim = await go_on(store, claim, says("", call()), done(), says("end"))
    assert (claim.effect, await state(store)) == (Rest(), "idle")
    assert "user: never mind" not in await told(store)
    await ask(store, text="again")
    assert (await take(store)).effect == Ask()
    assert (await told(store))[-1] == "user: again"


async def test_every_agent_has_a_queue_of_its_own(store: Society) -> None:
    await ask(store, "ada")
    await ask(store, "bob")
    ada, bob = await store.claim("w", RULES, 2)
    await ask(store, "ada", "for ada")
    bob = await go_on(store, bob, says("", call()))
    assert bob.effect == Run(0)
    assert (await go_on(store, ada, says("", call()))).effect == Ask()


async def test_a_full_burst_is_taken_in_one_sequence(store: Society) -> None:
    await ask(store)
    claim = await take(store)
    for n in range(5):
        await ask(store, text=str(n))
    with pytest.raises(Refused):
        await ask(store, text="too many")
    await go_on(store, claim, says("", call()))
    assert (await told(store))[1:] == [f"user: {n}" for n in range(5)]
    await ask(store, text="there is room again")


# Sending with a call's result


async def test_a_message_a_call_sends_exists_exactly_when_its_result_does(store: Society) -> None:
    await ask(store)
    claim = await go_on(store, await take(store), says("", message_to("bob")))
    after = await run_send(store, claim)
    with pytest.raises(StaleOwner):
        await run_send(store, claim)
    assert len(await store.waiting("bob")) == 1
    (sent,) = await store.waiting("bob")
    assert sent.cause == claim.cause and sent.hops == 1
    assert sent.id in (await told(store))[-1]
    await go_on(store, after, says("asked bob"))


async def test_a_message_that_is_refused_is_an_error_the_model_reads(store: Society) -> None:
    await ask(store)
    claim = await run_send(store, await go_on(store, await take(store), says("", message_to("nobody"))))
    assert "unknown_recipient" in (await told(store))[-1]
    await go_on(store, claim, says("nobody there"))


# Answers


async def test_an_answer_to_an_answer_unwinds_to_whoever_made_the_agent_ask(store: Society) -> None:
    asked = await ask(store, text="ask bob")
    claim = await run_send(store, await go_on(store, await take(store), says("", message_to("bob", "q?"))))
    await go_on(store, claim, says(""))
    await go_on(store, await take(store), says("bob's answer"))
    await go_on(store, await take(store), says("bob says so"))
    assert await got(store, "user") == [("ada", "bob says so", asked)]
    assert await store.waiting("bob") == []  # an answer is not answered
    assert [await state(store, name) for name in ("ada", "bob")] == ["idle", "idle"]


async def test_every_asker_gets_the_answer_once_as_the_reply_to_their_newest_message(store: Society) -> None:
    await ask(store, text="one")
    newest = await ask(store, text="two")
    bobs = await ask(store, text="me too", sender="bob")
    await go_on(store, await take(store), says("for all of you"))
    assert await got(store, "user") == [("ada", "for all of you", newest)]
    assert await got(store, "bob") == [("ada", "for all of you", bobs)]


async def test_what_the_turn_has_already_sent_word_for_word_is_not_sent_again(store: Society) -> None:
    await ask(store)
    claim = await go_on(store, await take(store), says("", message_to("user", "the same words")))
    await go_on(store, await run_send(store, claim), says("the same words"))
    assert [text for _, text, _ in await got(store, "user")] == ["the same words"]


async def test_the_same_words_of_an_earlier_turn_are_sent_again(store: Society) -> None:
    for _ in range(2):
        await ask(store)
        await go_on(store, await take(store), says("yes"))
    assert [text for _, text, _ in await got(store, "user")] == ["yes", "yes"]


async def test_an_agent_does_not_answer_itself_or_the_runtime(store: Society) -> None:
    await ask(store, sender="ada")
    await ask(store, sender="system")
    await go_on(store, await take(store), says("who asked?"))
    assert await store.waiting("ada") == []
    assert await state(store) == "idle"


async def test_an_answer_beyond_the_hop_limit_is_a_dead_letter_and_its_sender_is_told(store: Society) -> None:
    cause = None
    for hop in range(4):
        cause = await ask(store, "ada", f"hop {hop}", sender="bob", cause=cause)
    await go_on(store, await take(store), says("too far"))
    (dead,) = await store.messages(Page(), state="dead")
    assert (dead.sender, dead.to, dead.reason, dead.in_reply_to) == ("ada", "bob", "hop_limit", cause)
    (notice,) = await store.waiting("ada")
    assert notice.sender == "system" and notice.payload["notice"]["messageIds"] == [dead.id]
    assert await state(store) == "ready"
    # The notice does not make a new beginning for the chain.
    claim = await run_send(store, await go_on(store, await take(store), says("", message_to("bob", "again"))))
    assert "hop_limit" in (await told(store))[-1]
    await go_on(store, claim, says("so be it"))
    assert await state(store) == "idle"


async def test_an_answer_to_somebody_terminated_is_a_dead_letter(store: Society) -> None:
    await ask(store, sender="bob")
    claim = await take(store)
    await store.terminate("bob")
    await go_on(store, claim, says("too late"))
    (dead,) = await store.messages(Page(), state="dead")
    assert (dead.payload["text"], dead.reason) == ("too late", "recipient_terminated")


# Waiting


async def test_a_retry_waits_for_its_time_and_mail_joins_it(store: Society, clock: FakeClock) -> None:
    await ask(store)
    failure = ModelFailed(words="busy", then="retry", after=timedelta(seconds=5))
    claim = await go_on(store, await take(store), failure)
    assert (claim.effect, await state(store)) == (Rest(), "wait_retry")
    await ask(store, text="still there?")
    assert await store.claim("w", RULES, 1) == []
    await clock.advance(seconds=4.999)
    assert await store.claim("w", RULES, 1) == []
    await clock.advance(milliseconds=1)
    claim = await take(store)
    assert (claim.effect, claim.retries) == (Ask(), 1)
    assert await told(store) == ["user: hello", "user: still there?"]


async def test_failures_are_counted_in_a_row_and_an_answer_ends_the_row(store: Society, clock: FakeClock) -> None:
    await ask(store)
    claim = await take(store)
    for retries in range(3):
        assert claim.retries == retries
        await go_on(store, claim, ModelFailed(words="busy", then="retry"))
        claim = await take(store)
    assert (await go_on(store, claim, says("", call()), done())).retries == 0


async def test_a_blocked_agent_tells_its_askers_and_gets_one_try_with_a_persons_next_message(store: Society) -> None:
    asked = await ask(store)
    claim = await go_on(store, await take(store), ModelFailed(words="no key", then="block"))
    assert (claim.effect, await state(store)) == (Rest(), "blocked")
    assert await got(store, "user") == [("system", "no key", asked)]
    await ask(store, text="hello?", sender="bob")
    assert await store.claim("w", RULES, 1) == []
    await ask(store, text="mended")
    claim = await take(store)
    assert claim.effect == Ask()
    assert (await told(store))[-2:] == ["user: hello?", "user: mended"]
    await go_on(store, claim, ModelFailed(words="still no key", then="block"))
    assert await state(store) == "blocked"
    assert [other.agent_id for other in await store.claim("w", RULES, 5)] == ["bob"]  # who is told of it


async def test_unblocking_frees_the_blocked_but_nobody_who_is_paused_or_was_not_blocked(store: Society) -> None:
    await ask(store)
    await go_on(store, await take(store), ModelFailed(words="no key", then="block"))
    await store.pause("ada")
    assert await store.unblock(["ada", "bob"]) == [] and await state(store) == "blocked"
    await store.resume("ada")
    await go_on(store, await take(store), ModelFailed(words="no key", then="block"))
    assert await store.unblock(["ada", "bob"]) == ["ada"]
    assert "ada" in [claim.agent_id for claim in await store.claim("w", RULES, 5)]


async def test_a_person_can_unblock_an_agent_whose_mailbox_is_full(store: Society) -> None:
    await ask(store)
    await go_on(store, await take(store), ModelFailed(words="no key", then="block"))
    for number in range(5):  # as many as the mailbox holds
        await ask(store, text=str(number), sender="bob")
    for refused in ({"sender": "bob"}, {"delay_ms": 9}):
        with pytest.raises(Refused) as refusal:
            await ask(store, text="one more", **refused)
        assert refusal.value.code == "mailbox_full"
    await ask(store, text="mended")
    with pytest.raises(Refused) as refusal:  # one is enough
        await ask(store, text="hello?")
    assert refusal.value.code == "mailbox_full"
    await go_on(store, await take(store), says("I am back"))
    assert (await told(store))[-2:] == ["user: mended", "assistant: I am back"]


async def test_summaries_cost_what_their_models_used_however_many_a_step_needs(
    store: Society, clock: FakeClock
) -> None:
    start = clock.now()
    for text in ("one", "two", "three"):
        await ask(store, text=text)
        claim = await take(store)
        await go_on(store, claim, says(f"re: {text}"))
    await ask(store, text="four")
    claim = await take(store)
    dear = Answer(text="", usage=Usage(input_tokens=100, output_tokens=10), service="main")
    await store.summarise(claim, 2, "one was said", dear)
    await store.summarise(claim, 4, "one and two were said", dear)
    await store.summarise(claim, 6, "a digest, made without a model")
    await go_on(store, claim, Answered(text="so", usage=Usage(input_tokens=5, output_tokens=1), service="main"))
    assert await store.tokens_since(start) == 226
    assert (await store.view("ada")).summary == "a digest, made without a model"


async def test_a_summary_of_an_owner_that_was_taken_over_counts_for_nothing(store: Society, clock: FakeClock) -> None:
    start = clock.now()
    await ask(store)
    stale = await take(store)
    await go_on(store, stale, says("", call()))
    with pytest.raises(StaleOwner):
        await store.summarise(stale, 1, "x", Answer(text="x", usage=Usage(input_tokens=7)))
    assert ((await store.view("ada")).summary, await store.tokens_since(start)) == ("", 0)


async def test_rounds_without_an_end_are_ended_with_a_word_to_whoever_asked(store: Society) -> None:
    await ask(store)
    claim = await take(store)
    for _ in range(RULES.max_rounds - 1):
        claim = await go_on(store, claim, says("", call()), done())
    claim = await go_on(store, claim, says("", call()))
    assert (claim.effect, await state(store)) == (Rest(), "idle")
    ((_, text, _),) = await got(store, "user")
    assert "5 rounds" in text


# Approval


async def asked_for_approval(store: Society, *calls: PlannedCall) -> Message:
    await ask(store)
    claim = await go_on(store, await take(store), says("", *calls))
    assert (claim.effect, await state(store)) == (Rest(), "wait_approval")
    (question,) = await store.waiting("user")
    return question


async def answer(store: Society, question: Message, option: int) -> str:
    text = question.payload["quickReplies"][option]
    return await ask(store, text=text, in_reply_to=question.id, option=option)


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


# Stop


async def test_a_stopped_turn_keeps_what_was_said_and_marks_it(store: Society) -> None:
    await ask(store)
    await go_on(store, await take(store), Stopped("The answer is"))
    assert await told(store) == ["user: hello", "assistant: The answer is"]
    (partial,) = await store.waiting("user")
    assert partial.stopped and await state(store) == "idle"


async def test_stopped_during_a_call_its_outcome_is_unknown_and_the_rest_did_not_run(store: Society) -> None:
    await ask(store)
    claim = await go_on(store, await take(store), says("", call("a"), call("b")), Stopped())
    assert claim.effect == Rest()
    assert (await told(store))[2:] == [f"tool: {UNKNOWN}", f"tool: {STOPPED}"]


async def test_mail_that_waits_begins_the_next_turn_at_once_after_a_stop(store: Society) -> None:
    await ask(store)
    claim = await go_on(store, await take(store), says("", call()))
    await ask(store, text="next")
    claim = await go_on(store, claim, Stopped())
    assert claim.effect == Ask()
    assert (await told(store))[-1] == "user: next"


# Rest


async def test_a_paused_agent_ends_its_turn_and_its_mail_waits_until_it_is_resumed(store: Society) -> None:
    await ask(store)
    claim = await take(store)
    await store.pause("ada")
    await ask(store, text="later")
    claim = await go_on(store, claim, says("done"))
    assert (claim.effect, await state(store)) == (Rest(), "paused")
    assert await store.claim("w", RULES, 1) == []
    await store.resume("ada")
    assert (await take(store)).effect == Ask()
    assert (await told(store))[-1] == "user: later"


@pytest.mark.parametrize("then", ["retry", "block"])
async def test_who_waits_between_two_steps_is_not_claimed_while_it_is_paused(
    store: Society, clock: FakeClock, then: Literal["retry", "block"]
) -> None:
    await ask(store)
    await go_on(store, await take(store), ModelFailed(words="no", then=then, after=timedelta(seconds=1)))
    await store.pause("ada")
    await ask(store, text="are you there?")
    await clock.advance(minutes=10)

    assert await store.claim("w", RULES, 1) == []
    await store.resume("ada")
    assert (await take(store)).effect == Ask()


async def test_what_is_set_aside_counts_until_the_answer_says_what_it_cost_and_a_failure_gives_it_back(
    store: Society, clock: FakeClock
) -> None:
    start = clock.now()
    await ask(store)
    claim = await take(store)
    assert await store.set_aside(claim, "main", 100, since=start, limit=50)
    assert await store.set_aside(claim, "main", 100, since=start, limit=50)  # once more for the same is the same
    assert await store.tokens_since(start) == 100

    await go_on(store, claim, ModelFailed(words="no", then="retry", after=timedelta(0)))
    assert await store.tokens_since(start) == 0

    claim = await take(store)
    assert await store.set_aside(claim, "main", 100, since=start, limit=50)
    await go_on(store, claim, Answered(text="done", usage=Usage(input_tokens=40, output_tokens=20), service="main"))
    assert await store.tokens_since(start) == 60

    await ask(store, text="more")
    claim = await take(store)
    assert not await store.set_aside(claim, "main", 1, since=start, limit=60)
    assert await store.tokens_since(start) == 60


async def test_what_a_worker_let_go_in_order_is_taken_up_at_once_and_is_no_crash(store: Society) -> None:
    await ask(store)
    for worker in ("a", "b", "c", "d", "e"):
        assert (await take(store, worker)).effect == Ask()
        await store.release(worker, failed=False)


async def test_what_a_worker_failed_at_again_and_again_is_set_aside(store: Society) -> None:
    await ask(store)
    effects = []
    for worker in ("a", "b", "c", "d"):
        effects.append((await take(store, worker)).effect)
        await store.release(worker, failed=True)
    assert effects == [Ask(), Ask(), Ask(), Rest()]


async def test_a_worker_that_lets_go_keeps_what_it_still_works_on(store: Society) -> None:
    await ask(store, "ada")
    await ask(store, "bob")
    await store.claim("w", RULES, 2)
    await store.release("w", busy=["ada"], failed=False)
    assert [claim.agent_id for claim in await store.claim("w", RULES, 2)] == ["bob"]


# Termination


async def test_terminated_at_work_an_agent_leaves_a_closed_history_and_its_owner_is_turned_away(store: Society) -> None:
    asked = await ask(store)
    claim = await go_on(store, await take(store), says("", call("a"), call("b")))
    waiting = await ask(store, text="and?", sender="bob")
    await store.terminate("ada")
    with pytest.raises(StaleOwner):
        await go_on(store, claim, done())
    assert await state(store) == "terminated"
    assert await told(store) == ["user: hello", "assistant: ", f"tool: {UNKNOWN}", f"tool: {STOPPED}"]
    assert (await stored(store, waiting)).state == "dead"
    ((sender, text, reply),) = await got(store, "user")
    assert (sender, reply) == ("system", asked) and "terminated" in text
    assert await store.claim("w", RULES, 10) != []  # bob, who is told that his message died


@pytest.mark.parametrize(
    "event",
    [
        says("", call(gated=True)),
        ModelFailed(words="busy", then="retry"),
        ModelFailed(words="no key", then="block"),
    ],
    ids=["wait_approval", "wait_retry", "blocked"],
)
async def test_terminated_while_it_waits_an_agent_is_never_claimed_again(
    store: Society, clock: FakeClock, event: Event
) -> None:
    await ask(store)
    await go_on(store, await take(store), event)
    await store.terminate("ada")
    await clock.advance(hours=1)
    assert await store.claim("w", RULES, 10) == []
    assert await state(store) == "terminated"


async def test_terminated_before_it_was_claimed_nobody_hears_more_than_that_the_mail_died(store: Society) -> None:
    await ask(store)
    await store.terminate("ada")
    ((sender, text, _),) = await got(store, "user")
    assert sender == "system" and "Not delivered" in text


# Recovery


class Restarted:
    """A society whose owner is killed again and again."""

    def __init__(self, engine: Engine, path: Path, clock: FakeClock) -> None:
        self._engine, self._path, self._clock = engine, path, clock
        self.store: SqlStore

    async def __aenter__(self) -> Restarted:
        await self.again()
        await self.store.add_agents([Agent(id="user", name="You", kind="person"), Agent(id="ada", name="Ada")])
        await self.store.add_agents([Agent(id="bob", name="Bob")])
        return self

    async def again(self) -> None:
        if hasattr(self, "store"):
            assert [violation async for violation in self.store.violations()] == []
            await self.store.close()
        self.store = await self._engine.open(self._path, self._clock, Limits(max_hops=3))

    async def __aexit__(self, *_: object) -> None:
        assert [violation async for violation in self.store.violations()] == []
        await self.store.close()


@pytest.fixture
def restarted(engine: Engine, tmp_path: Path, clock: FakeClock) -> Restarted:
    return Restarted(engine, tmp_path / "restarted", clock)


async def test_a_turn_cut_off_in_the_model_call_asks_again(restarted: Restarted) -> None:
    async with restarted as it:
        await ask(it.store)
        await take(it.store)
        await it.again()
        assert (await take(it.store)).effect == Ask()
        assert await told(it.store) == ["user: hello"]


@pytest.mark.parametrize("effect", ["pure", "idempotent"])
async def test_a_call_cut_off_is_run_again_under_the_same_key_when_it_may(restarted: Restarted, effect: Effect) -> None:
    async with restarted as it:
        await ask(it.store)
        before = await go_on(it.store, await take(it.store), says("", call(effect=effect), call()))
        await it.again()
        after = await take(it.store)
        assert (after.effect, after.plan_key) == (Run(0), before.plan_key)


async def test_an_unsafe_call_cut_off_is_unknown_and_never_run_again(restarted: Restarted) -> None:
    async with restarted as it:
        await ask(it.store)
        await go_on(it.store, await take(it.store), says("", call("fire")))
        await it.again()
        assert (await take(it.store)).effect == Ask()
        assert (await told(it.store))[-1] == f"tool: {UNKNOWN}"


async def test_results_known_before_the_crash_stay(restarted: Restarted) -> None:
    async with restarted as it:
        await ask(it.store)
        await go_on(it.store, await take(it.store), says("", call("a"), call("b", "pure")), done(0, "known"))
        await it.again()
        claim = await take(it.store)
        assert claim.effect == Run(1)
        await go_on(it.store, claim, done(1, "new"))
        assert (await told(it.store))[2:] == ["tool: known", "tool: new"]


async def test_what_waits_for_a_person_or_a_time_waits_on_after_a_restart(
    restarted: Restarted, clock: FakeClock
) -> None:
    async with restarted as it:
        question = await asked_for_approval(it.store, call("pay", gated=True))
        await ask(it.store, "bob")
        await go_on(it.store, await take(it.store), ModelFailed(words="", then="retry", after=timedelta(seconds=9)))
        await it.again()
        assert await it.store.claim("w", RULES, 5) == []
        await answer(it.store, question, 0)
        assert (await take(it.store)).agent_id == "ada"
        await clock.advance(seconds=9)
        assert (await take(it.store)).agent_id == "bob"


async def test_a_turn_that_brings_the_runtime_down_again_and_again_is_set_aside(restarted: Restarted) -> None:
    async with restarted as it:
        await ask(it.store, text="poison")
        await take(it.store)
        for _ in range(2):
            await it.again()
            assert (await take(it.store)).effect == Ask()
        await it.again()
        assert (await take(it.store)).effect == Rest()
        rows = await it.store.history("ada")
        assert rows[0].hidden and rows[1].text.startswith("[turn aborted")
        ((sender, _, _),) = await got(it.store, "user")
        assert (sender, await state(it.store)) == ("system", "idle")
        await ask(it.store, text="and now?")
        await go_on(it.store, await take(it.store), says("fine again"))


async def test_progress_between_crashes_is_no_poison(restarted: Restarted) -> None:
    async with restarted as it:
        await ask(it.store)
        claim = await take(it.store)
        for _ in range(4):
            await go_on(it.store, claim, says("", call()), done())
            await it.again()
            claim = await take(it.store)
            assert claim.effect == Ask()


async def test_an_agent_that_is_told_of_anothers_poison_hears_of_it_whatever_it_is_doing(restarted: Restarted) -> None:
    async with restarted as it:
        await ask(it.store, "ada", "from bob", sender="bob")
        await ask(it.store, "bob", "from the person")
        for _ in range(8):
            await it.store.claim("w", RULES, 2)
            await it.again()
        # Both were set aside; bob was told of ada's failure, perhaps in the transaction that ended his own turn.
        while claims := await it.store.claim("w", RULES, 2):
            for claim in claims:
                await go_on(it.store, claim, says(""))
        assert any("brought the runtime down" in row for row in await told(it.store, "bob") if row.startswith("user"))
        assert [await state(it.store, name) for name in ("ada", "bob")] == ["idle", "idle"]


async def test_a_claim_carries_what_the_work_needs(store: Society) -> None:
    await ask(store)
    newest = await ask(store, text="newest")
    claim = await take(store)
    assert (claim.cause, claim.call) == (newest, None)
    claim = await go_on(store, claim, says("", call("look", arguments={"at": 1})))
    assert claim.call is not None
    assert (claim.call.call.name, claim.call.call.arguments, claim.plan_key != (0, 0)) == ("look", {"at": 1}, True)


async def test_a_stop_ends_a_turn_that_waits_for_its_next_try_and_no_other(store: Society) -> None:
    await ask(store)
    claim = await take(store)
    assert await store.stop("ada") is False  # somebody works on it
    await go_on(store, claim, ModelFailed(words="busy", then="retry", after=timedelta(hours=1)))
    assert await state(store) == "wait_retry"

    assert await store.stop("ada") is True
    assert await store.stop("ada") is False
    assert await state(store) == "idle"


async def test_a_stop_of_a_turn_that_waits_leaves_the_mail_to_the_next(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", gated=True))
    assert await store.stop("ada") is True
    assert (await told(store))[-1].startswith("tool: ") and await state(store) == "idle"
    await answer(store, question, 0)  # too late: it is a message like any other
    claim = await take(store)
    assert (claim.effect, claim.plan) == (Ask(), None)
    with pytest.raises(Refused) as refused:
        await store.stop("user")
    assert refused.value.code == "unknown_agent"
