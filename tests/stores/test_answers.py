"""Contract of every storage engine: who gets the answer of a turn."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from coterie.agents import Agent
from coterie.artifacts import Artifact
from coterie.messages import CutOff, make_envelope
from coterie.store import Page
from coterie.testing import FakeClock
from coterie.turn import ModelAnswered
from tests.pruning import pruned

from .steps import (
    RULES,
    Society,
    advance,
    ask,
    claim_agent,
    history_lines,
    message_to,
    received,
    run_send,
    says,
    state,
)


async def test_an_answer_to_an_answer_goes_to_the_original_asker(store: Society) -> None:
    asked = await ask(store, text="ask bob")
    claim = await run_send(store, await advance(store, await claim_agent(store), says("", message_to("bob", "q?"))))
    await advance(store, claim, says(""))
    await advance(store, await claim_agent(store), says("bob's answer"))
    await advance(store, await claim_agent(store), says("bob says so"))
    assert await received(store, "user") == [("ada", "bob says so", asked)]
    assert await store.waiting("bob") == []  # an answer is not answered
    assert [await state(store, name) for name in ("ada", "bob")] == ["idle", "idle"]


async def test_every_asker_gets_the_answer_once_as_the_reply_to_their_newest_message(store: Society) -> None:
    await ask(store, text="one")
    newest = await ask(store, text="two")
    bobs = await ask(store, text="me too", sender="bob")
    await advance(store, await claim_agent(store), says("for all of you"))
    assert await received(store, "user") == [("ada", "for all of you", newest)]
    assert await received(store, "bob") == [("ada", "for all of you", bobs)]


async def test_a_text_that_the_turn_has_already_sent_is_not_sent_again(store: Society) -> None:
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", message_to("user", "the same words")))
    await advance(store, await run_send(store, claim), says("the same words"))
    assert [text for _, text, _ in await received(store, "user")] == ["the same words"]


async def test_the_same_text_of_an_earlier_turn_is_sent_again(store: Society) -> None:
    for _ in range(2):
        await ask(store)
        await advance(store, await claim_agent(store), says("yes"))
    assert [text for _, text, _ in await received(store, "user")] == ["yes", "yes"]


async def test_an_agent_does_not_answer_itself_or_the_runtime(store: Society) -> None:
    await ask(store, sender="ada")
    await ask(store, sender="system")
    await advance(store, await claim_agent(store), says("who asked?"))
    assert await store.waiting("ada") == []
    assert await state(store) == "idle"


async def test_an_answer_beyond_the_hop_limit_is_a_dead_letter_and_its_sender_is_notified(store: Society) -> None:
    cause = None
    for hop in range(4):
        cause = await ask(store, "ada", f"hop {hop}", sender="bob", cause=cause)
    await advance(store, await claim_agent(store), says("too far"))
    (dead,) = await store.messages(Page(), state="dead")
    assert (dead.sender, dead.to, dead.reason, dead.in_reply_to) == ("ada", "bob", "hop_limit", cause)
    (notice,) = await store.waiting("ada")
    assert notice.sender == "system" and notice.payload["notice"]["messageIds"] == [dead.id]
    assert await state(store) == "ready"
    # The notice does not make a new beginning for the chain.
    claim = await run_send(store, await advance(store, await claim_agent(store), says("", message_to("bob", "again"))))
    assert "hop_limit" in (await history_lines(store))[-1]
    await advance(store, claim, says("so be it"))
    assert await state(store) == "idle"


async def test_an_answer_to_a_terminated_agent_is_a_dead_letter(store: Society) -> None:
    await ask(store, sender="bob")
    claim = await claim_agent(store)
    await store.terminate("bob")
    await advance(store, claim, says("too late"))
    (dead,) = await store.messages(Page(), state="dead")
    assert (dead.payload["text"], dead.reason) == ("too late", "recipient_terminated")


async def test_a_text_too_large_for_a_message_ends_its_turn(store: Society) -> None:
    asked = await ask(store)
    await advance(store, await claim_agent(store), says("字" * 1_000_000))
    ((_, text, in_reply_to),) = await received(store, "user")
    assert in_reply_to == asked and text.startswith("字字字") and "1,000,000" in text
    assert await state(store) == "idle"


async def test_a_dead_letter_keeps_the_files_that_it_carries(store: Society, clock: FakeClock) -> None:
    kept = await store.add_artifact(
        Artifact(
            ref="r",
            filename="answer.md",
            type="file",
            mime_type="text/markdown",
            size=1,
            sha256="0" * 64,
            created_at=clock.now(),
        )
    )
    await ask(store, sender="bob")
    claim = await claim_agent(store)
    await store.terminate("bob")
    await advance(store, claim, ModelAnswered(text="too late", attachments=(kept.to_dict(),)))
    await clock.advance(days=3)
    assert (await store.unused_artifacts(timedelta(days=1))).refs == []
    await pruned(store)
    (dead,) = await store.messages(Page(), state="dead")
    assert dead.payload["attachments"][0]["artifactRef"] == kept.ref
    assert kept.ref in await store.artifacts([kept.ref])


# Which message an answer is the reply to: each asker's newest one that this agent has not answered yet


@pytest.fixture
async def crowd(store: Society) -> Society:
    await store.add_agents([Agent(id="cyd", name="Cyd")])
    return store


async def asks_bob(store: Society, text: str = "", *, question: str = "q?") -> None:
    """Ada's turn: it asks bob and ends with `text`. Bob's answer comes later."""
    claim = await run_send(store, await advance(store, await claim_agent(store), says("", message_to("bob", question))))
    await advance(store, claim, says(text))


async def replies(store: Society, recipient: str) -> list[tuple[str, str | None]]:
    return [(text, in_reply_to) for sender, text, in_reply_to in await received(store, recipient) if sender == "ada"]


@pytest.mark.parametrize("interim", ["", "I have asked bob."])
@pytest.mark.parametrize("late_answer_first", [True, False])
async def test_a_new_question_beside_a_late_answer_is_the_one_replied_to(
    store: Society, interim: str, late_answer_first: bool
) -> None:
    first = await ask(store, text="ask bob")
    await asks_bob(store, interim)
    bob = await claim_agent(store)
    if late_answer_first:
        await advance(store, bob, says("bob's answer"))
    second = await ask(store, text="what else?")
    if not late_answer_first:
        await advance(store, bob, says("bob's answer"))
    await advance(store, await claim_agent(store), says("for the new question"))
    before = [(interim, first)] if interim else []
    assert await replies(store, "user") == [*before, ("for the new question", second)]


async def test_a_late_answer_alone_goes_to_the_original_asker_after_an_interim_answer(store: Society) -> None:
    first = await ask(store, text="ask bob")
    await asks_bob(store, "I have asked bob.")
    await advance(store, await claim_agent(store), says("bob's answer"))
    await advance(store, await claim_agent(store), says("bob says so"))
    assert await replies(store, "user") == [("I have asked bob.", first), ("bob says so", first)]


async def test_a_late_answer_that_interrupts_does_not_change_the_reply_target(crowd: Society) -> None:
    first = await ask(crowd, text="ask bob")
    await asks_bob(crowd, "I have asked bob.")
    bob = await claim_agent(crowd)
    second = await ask(crowd, text="look")
    claim = await advance(crowd, await claim_agent(crowd, "w2"), says("", message_to("cyd", "look")))
    await advance(crowd, bob, says("bob's answer"))
    claim = await run_send(crowd, claim)
    assert [row.role for row in claim.added_rows or ()] == ["assistant", "tool", "user"]
    await advance(crowd, claim, says("both"))
    assert await replies(crowd, "user") == [("I have asked bob.", first), ("both", second)]


async def test_two_askers_each_get_it_for_their_own_newest_question(crowd: Society) -> None:
    await ask(crowd, text="ask bob", sender="cyd")
    await asks_bob(crowd, "I have asked bob.")
    at_work = {claim.agent_id: claim for claim in await crowd.claim_ready("w", RULES, 9)}
    assert {*at_work} == {"bob", "cyd"}
    persons = await ask(crowd, text="and me?")
    cyds = await ask(crowd, text="and?", sender="cyd")
    await advance(crowd, at_work["bob"], says("bob's answer"))
    await advance(crowd, await claim_agent(crowd), says("for both"))
    assert await replies(crowd, "user") == [("for both", persons)]
    assert await replies(crowd, "cyd") == [("for both", cyds)]


async def test_an_older_unanswered_question_goes_before_a_newer_answered_one(crowd: Society) -> None:
    first = await ask(crowd, text="ask bob")
    await asks_bob(crowd, "")
    bob = await claim_agent(crowd, "w2")
    second = await ask(crowd, text="ask cyd")
    claim = await advance(crowd, await claim_agent(crowd), says("", message_to("cyd", "q?")))
    await advance(crowd, await run_send(crowd, claim), says("I have asked cyd."))
    cyd = await claim_agent(crowd, "w3")
    # Nobody takes ada up before both late answers are there, so one turn has them both.
    await advance(crowd, bob, says("bob's answer"))
    await advance(crowd, cyd, says("cyd's answer"))
    await advance(crowd, await claim_agent(crowd), says("both answered"))
    assert await replies(crowd, "user") == [("I have asked cyd.", second), ("both answered", first)]


async def test_chained_requests_unwind_to_the_newest_question_of_each_asker(crowd: Society) -> None:
    """The person asks ada, ada asks bob, bob asks cyd; the person asks ada again before all of that comes back."""
    await ask(crowd, text="ask bob")
    await asks_bob(crowd, "I have asked bob.")
    claim = await advance(crowd, await claim_agent(crowd), says("", message_to("cyd", "q?")))
    await advance(crowd, await run_send(crowd, claim), says(""))
    await advance(crowd, await claim_agent(crowd), says("cyd's answer"))
    bob = await claim_agent(crowd)
    second = await ask(crowd, text="well?")
    await advance(crowd, bob, says("bob's answer"))
    await advance(crowd, await claim_agent(crowd), says("at last"))
    assert (await replies(crowd, "user"))[-1] == ("at last", second)


@pytest.mark.parametrize("pressed", [True, False])
async def test_an_answer_to_quick_replies_counts_as_the_newest_question(store: Society, pressed: bool) -> None:
    await ask(store, text="ask bob")
    await asks_bob(store, "I have asked bob.")
    bob = await claim_agent(store)
    await store.send(make_envelope(sender="ada", to="user", payload={"text": "Tea?"}, quick_replies=["Yes", "No"]))
    question = (await store.waiting("user"))[-1]
    chosen: dict[str, Any] = {"option": 0} if pressed else {}
    answered = await ask(store, text="Yes" if pressed else "Perhaps", in_reply_to=question.id, **chosen)
    await advance(store, bob, says("bob's answer"))
    await advance(store, await claim_agent(store), says("tea it is"))
    assert (await replies(store, "user"))[-1] == ("tea it is", answered)


@pytest.mark.parametrize("reason", ["length", "content_filter", None])
async def test_an_answer_that_the_service_cut_off_is_marked(store: Society, reason: CutOff | None) -> None:
    await ask(store)
    await advance(store, await claim_agent(store), ModelAnswered(text="Once upon a", cut_off=reason))
    (answer,) = await store.waiting("user")
    assert (answer.cut_off, answer.stopped) == (reason, False)
    assert answer.to_dict().get("cutOff") == reason
