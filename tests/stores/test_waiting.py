"""What every storage engine promises about turns that wait, are stopped or paused, and agents that go."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest

from coterie.clock import to_ms
from coterie.errors import Refused
from coterie.llm.types import Answer, Usage
from coterie.store import Limits
from coterie.testing import FakeClock
from coterie.turn import STOPPED, UNKNOWN, Answered, Ask, Event, ModelFailed, Rest, Stopped
from coterie.turn_store import StaleOwner
from tests.conftest import PEOPLE
from tests.engines import Engine

from .steps import (
    RULES,
    Society,
    answer,
    ask,
    asked_for_approval,
    call,
    done,
    go_on,
    got,
    says,
    state,
    stored,
    take,
    told,
)

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
    with pytest.raises(Refused) as late:
        await answer(store, question, 0)
    assert late.value.code == "already_answered"
    await ask(store, text="go on")
    claim = await take(store)
    assert (claim.effect, claim.plan) == (Ask(), None)
    with pytest.raises(Refused) as refused:
        await store.stop("user")
    assert refused.value.code == "unknown_agent"


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


async def test_a_wait_is_never_longer_than_it_was_meant_to_be_whatever_the_clock_does(
    engine: Engine, tmp_path: Path, clock: FakeClock
) -> None:
    """Ada waits 30 s for her next try, Bob has mail; then the clock of the society's times is set back a day."""
    store = await engine.open(tmp_path / "data", clock, Limits())
    await store.add_agents(PEOPLE)
    await ask(store)
    failure = ModelFailed(words="busy", then="retry", after=timedelta(seconds=30))
    await go_on(store, await take(store), failure)
    await ask(store, "bob")
    await store.close()

    earlier = FakeClock(clock.now() - timedelta(days=1))
    store = await engine.open(tmp_path / "data", earlier, Limits())
    try:
        claims = [*await store.claim("w", RULES, 10), *await store.claim("w", RULES, 10)]  # the first may only find out
        assert [claim.agent_id for claim in claims] == ["bob"]
        await earlier.advance(seconds=29)
        assert list(await store.claim("w", RULES, 10)) == []
        await earlier.advance(seconds=1)
        assert "ada" in [claim.agent_id for claim in await store.claim("w", RULES, 10)]
        assert [violation async for violation in store.violations()] == []
    finally:
        await store.close()


async def test_the_claim_of_a_worker_that_is_gone_ends_though_the_clock_was_set_back(
    engine: Engine, tmp_path: Path, clock: FakeClock
) -> None:
    store = await engine.open(tmp_path / "data", clock, Limits())
    await store.add_agents(PEOPLE)
    await ask(store)
    await take(store)
    with engine.behind(tmp_path / "data") as db:  # a lease that ends tomorrow, by the clock of today
        db.execute("UPDATE agents SET runnable_at = ? WHERE id = 'ada'", (to_ms(clock.now()) + 86_400_000,))
    try:
        assert list(await store.claim("w2", RULES, 10)) == []
        await clock.advance(hours=1)
        assert [claim.agent_id for claim in await store.claim("w2", RULES, 10)] == ["ada"]
    finally:
        await store.close()
