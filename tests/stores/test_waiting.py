"""Contract of every storage engine: turns that wait, stop or pause, and terminated agents."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest

from coterie.clock import to_ms, to_rfc3339
from coterie.errors import Refused
from coterie.llm.service import Completion, TokenUsage
from coterie.plan import STOPPED_RESULT, UNKNOWN_RESULT
from coterie.store import Limits
from coterie.testing import FakeClock
from coterie.turn import AskModel, Event, ModelAnswered, ModelFailed, Rest, Stopped
from coterie.turn_store import StaleClaim
from tests.conftest import PEOPLE
from tests.engines import Engine

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

# Waiting


async def test_a_retry_waits_for_its_time_and_mail_joins_it(store: Society, clock: FakeClock) -> None:
    await ask(store)
    failure = ModelFailed(message="busy", recovery="retry", delay=timedelta(seconds=5))
    claim = await advance(store, await claim_agent(store), failure)
    assert (claim.action, await state(store)) == (Rest(), "wait_retry")
    await ask(store, text="still there?")
    assert await store.claim_ready("w", RULES, 1) == []
    await clock.advance(seconds=4.999)
    assert await store.claim_ready("w", RULES, 1) == []
    await clock.advance(milliseconds=1)
    claim = await claim_agent(store)
    assert (claim.action, claim.model_failures) == (AskModel(), 1)
    assert await history_lines(store) == ["user: hello", "user: still there?"]


async def test_failures_are_counted_in_a_row_and_an_answer_ends_the_row(store: Society, clock: FakeClock) -> None:
    await ask(store)
    claim = await claim_agent(store)
    for retries in range(3):
        assert claim.model_failures == retries
        await advance(store, claim, ModelFailed(message="busy", recovery="retry"))
        claim = await claim_agent(store)
    assert (await advance(store, claim, says("", call()), done())).model_failures == 0


async def test_a_blocked_agent_notifies_its_askers_and_retries_once_with_the_persons_next_message(
    store: Society,
) -> None:
    asked = await ask(store)
    claim = await advance(store, await claim_agent(store), ModelFailed(message="no key", recovery="block"))
    assert (claim.action, await state(store)) == (Rest(), "blocked")
    assert await received(store, "user") == [("system", "no key", asked)]
    await ask(store, text="hello?", sender="bob")
    assert await store.claim_ready("w", RULES, 1) == []
    await ask(store, text="mended")
    claim = await claim_agent(store)
    assert claim.action == AskModel()
    assert (await history_lines(store))[-2:] == ["user: hello?", "user: mended"]
    await advance(store, claim, ModelFailed(message="still no key", recovery="block"))
    assert await state(store) == "blocked"
    assert [other.agent_id for other in await store.claim_ready("w", RULES, 5)] == ["bob"]  # bob gets the notice


async def test_a_problem_is_stored_with_its_category_and_facts_until_the_agent_goes_on(store: Society) -> None:
    await ask(store)
    facts = {"service": "main", "status": 401}
    failure = ModelFailed(message="no key", recovery="block", category="auth", facts=facts)
    await advance(store, await claim_agent(store), failure)
    ada = await store.agent("ada")
    assert ada is not None
    assert json.loads(ada.problem) == {"category": "auth", **facts}
    [notice] = await store.waiting("user")
    assert notice.payload["problem"] == {"agent": "ada", "category": "auth", **facts}
    await ask(store, text="mended")
    await advance(store, await claim_agent(store), says("I am back"))
    ada = await store.agent("ada")
    assert ada is not None
    assert ada.problem == ""


async def test_a_stop_before_the_first_word_is_told_to_the_person_and_to_no_agent(store: Society) -> None:
    asked = await ask(store)
    await ask(store, text="you there?", sender="bob")
    await advance(store, await claim_agent(store), Stopped())
    [mark] = await store.waiting("user")
    assert (mark.payload, mark.stopped, mark.in_reply_to) == ({"text": ""}, True, asked)
    assert await store.waiting("bob") == []


async def test_the_event_of_a_taken_message_tells_when_it_was_taken(store: Society, clock: FakeClock) -> None:
    asked = await ask(store)
    await clock.advance(seconds=2)
    await claim_agent(store)
    taken = await store.message(asked)
    events = [
        json.loads(event.data) for event in await store.events(0, 100) if event.kind == "queue.changed" and event.data
    ]
    assert taken is not None
    assert [(event["taken"], event["takenAt"]) for event in events] == [([asked], to_rfc3339(taken.taken_at))]


async def test_unblocking_affects_only_blocked_agents_that_are_not_paused(store: Society) -> None:
    await ask(store)
    await advance(store, await claim_agent(store), ModelFailed(message="no key", recovery="block"))
    await store.pause("ada")
    assert await store.unblock(["ada", "bob"]) == [] and await state(store) == "blocked"
    await store.resume("ada")
    await advance(store, await claim_agent(store), ModelFailed(message="no key", recovery="block"))
    assert await store.unblock(["ada", "bob"]) == ["ada"]
    assert "ada" in [claim.agent_id for claim in await store.claim_ready("w", RULES, 5)]


async def test_a_person_can_unblock_an_agent_whose_mailbox_is_full(store: Society) -> None:
    await ask(store)
    await advance(store, await claim_agent(store), ModelFailed(message="no key", recovery="block"))
    for number in range(5):  # as many as the mailbox holds
        await ask(store, text=str(number), sender="bob")
    for refused in ({"sender": "bob"}, {"delay_ms": 9}):
        with pytest.raises(Refused) as refusal:
            await ask(store, text="one more", **refused)
        assert refusal.value.code == "mailbox_full"
    await ask(store, text="mended")
    with pytest.raises(Refused) as refusal:  # one message can be sent to a full mailbox
        await ask(store, text="hello?")
    assert refusal.value.code == "mailbox_full"
    await advance(store, await claim_agent(store), says("I am back"))
    assert (await history_lines(store))[-2:] == ["user: mended", "assistant: I am back"]


async def test_the_usage_of_every_summary_of_a_step_counts(store: Society) -> None:
    for text in ("one", "two", "three"):
        await ask(store, text=text)
        claim = await claim_agent(store)
        await advance(store, claim, says(f"re: {text}"))
    await ask(store, text="four")
    claim = await claim_agent(store)
    dear = Completion(text="", usage=TokenUsage(input_tokens=100, output_tokens=10), service="main")
    await store.summarise(claim, 2, "one was said", dear)
    await store.summarise(claim, 4, "one and two were said", dear)
    await store.summarise(claim, 6, "a digest, made without a model")
    await advance(
        store, claim, ModelAnswered(text="so", usage=TokenUsage(input_tokens=5, output_tokens=1), service="main")
    )
    assert await store.tokens_used_today() == 226
    assert (await store.history_view("ada")).summary == "a digest, made without a model"


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)  # PostgreSQL has a clock of its own
async def test_the_tokens_of_yesterday_do_not_count_today(store: Society, clock: FakeClock) -> None:
    await ask(store)
    claim = await claim_agent(store)
    assert await store.reserve_tokens(claim, "main", 100, limit=50)
    assert await store.tokens_used_today() == 100
    await clock.advance(hours=24)
    assert await store.tokens_used_today() == 0
    assert await store.reserve_tokens(claim, "main", 100, limit=50)
    assert await store.tokens_used_today() == 100


async def test_the_usage_of_requests_during_a_tool_call_counts(store: Society) -> None:
    await ask(store)
    stale = await claim_agent(store)
    claim = await advance(store, stale, says("", call()))
    for tokens in (100, 10):
        await store.add_usage(claim, "other", TokenUsage(input_tokens=tokens, output_tokens=1))
    await store.add_usage(stale, "other", TokenUsage(input_tokens=1000))  # it was made, so it is paid for
    assert await store.tokens_used_today() == 1112


async def test_a_summary_with_a_stale_claim_is_rejected(store: Society) -> None:
    await ask(store)
    stale = await claim_agent(store)
    await advance(store, stale, says("", call()))
    with pytest.raises(StaleClaim):
        await store.summarise(stale, 1, "x", Completion(text="x", usage=TokenUsage(input_tokens=7)))
    assert ((await store.history_view("ada")).summary, await store.tokens_used_today()) == ("", 0)


async def test_a_turn_at_the_round_limit_ends_with_a_message_to_the_asker(store: Society) -> None:
    await ask(store)
    claim = await claim_agent(store)
    for _ in range(RULES.max_rounds - 1):
        claim = await advance(store, claim, says("", call()), done())
    claim = await advance(store, claim, says("", call()))
    assert (claim.action, await state(store)) == (Rest(), "idle")
    ((_, text, _),) = await received(store, "user")
    assert "5 rounds" in text


# Stop


async def test_a_stopped_turn_keeps_the_partial_text_and_marks_it(store: Society) -> None:
    await ask(store)
    await advance(store, await claim_agent(store), Stopped("The answer is"))
    assert await history_lines(store) == ["user: hello", "assistant: The answer is"]
    (partial,) = await store.waiting("user")
    assert partial.stopped and await state(store) == "idle"


async def test_a_stop_during_a_call_gives_an_unknown_outcome_and_cancels_the_rest(store: Society) -> None:
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", call("a"), call("b")), Stopped())
    assert claim.action == Rest()
    assert (await history_lines(store))[2:] == [f"tool: {UNKNOWN_RESULT}", f"tool: {STOPPED_RESULT}"]


async def test_mail_that_waits_begins_the_next_turn_at_once_after_a_stop(store: Society) -> None:
    await ask(store)
    claim = await advance(store, await claim_agent(store), says("", call()))
    await ask(store, text="next")
    claim = await advance(store, claim, Stopped())
    assert claim.action == AskModel()
    assert (await history_lines(store))[-1] == "user: next"


async def test_a_stop_ends_a_turn_that_waits_for_its_next_try_and_no_other(store: Society) -> None:
    await ask(store)
    claim = await claim_agent(store)
    assert await store.stop_waiting_turn("ada") is False  # a worker has claimed it
    await advance(store, claim, ModelFailed(message="busy", recovery="retry", delay=timedelta(hours=1)))
    assert await state(store) == "wait_retry"

    assert await store.stop_waiting_turn("ada") is True
    assert await store.stop_waiting_turn("ada") is False
    assert await state(store) == "idle"


async def test_an_agent_whose_turn_is_stopped_is_never_idle_with_mail(store: Society) -> None:
    """004-4.5: the message came while the turn waited for its next try."""
    await ask(store)
    await advance(
        store, await claim_agent(store), ModelFailed(message="busy", recovery="retry", delay=timedelta(hours=1))
    )
    await ask(store, text="two")
    assert await store.stop_waiting_turn("ada") is True
    assert (await state(store), await store.wake_forgotten()) == ("ready", [])
    await advance(store, await claim_agent(store), says("done"))
    assert (await state(store), await store.waiting("ada")) == ("idle", [])


async def test_a_stop_of_a_turn_that_waits_leaves_the_mail_to_the_next(store: Society) -> None:
    question = await asked_for_approval(store, call("pay", needs_approval=True))
    assert await store.stop_waiting_turn("ada") is True
    assert (await history_lines(store))[-1].startswith("tool: ") and await state(store) == "idle"
    with pytest.raises(Refused) as late:
        await answer(store, question, 0)
    assert late.value.code == "already_answered"
    await ask(store, text="go on")
    claim = await claim_agent(store)
    assert (claim.action, claim.plan) == (AskModel(), None)
    with pytest.raises(Refused) as refused:
        await store.stop_waiting_turn("user")
    assert refused.value.code == "unknown_agent"


# Rest


async def test_a_paused_agent_ends_its_turn_and_its_mail_waits_until_it_is_resumed(store: Society) -> None:
    await ask(store)
    claim = await claim_agent(store)
    await store.pause("ada")
    await ask(store, text="later")
    claim = await advance(store, claim, says("done"))
    assert (claim.action, await state(store)) == (Rest(), "paused")
    assert await store.claim_ready("w", RULES, 1) == []
    await store.resume("ada")
    assert (await claim_agent(store)).action == AskModel()
    assert (await history_lines(store))[-1] == "user: later"


@pytest.mark.parametrize("then", ["retry", "block"])
async def test_a_paused_agent_is_not_claimed_between_two_steps(
    store: Society, clock: FakeClock, then: Literal["retry", "block"]
) -> None:
    await ask(store)
    await advance(store, await claim_agent(store), ModelFailed(message="no", recovery=then, delay=timedelta(seconds=1)))
    await store.pause("ada")
    await ask(store, text="are you there?")
    await clock.advance(minutes=10)

    assert await store.claim_ready("w", RULES, 1) == []
    await store.resume("ada")
    assert (await claim_agent(store)).action == AskModel()


async def test_reserved_tokens_count_until_an_answer_replaces_them_or_a_failure_releases_them(
    store: Society, clock: FakeClock
) -> None:
    await ask(store)
    claim = await claim_agent(store)
    assert await store.reserve_tokens(claim, "main", 100, limit=50)
    assert await store.reserve_tokens(claim, "main", 100, limit=50)  # a repeated reservation counts once
    assert await store.tokens_used_today() == 100

    await advance(store, claim, ModelFailed(message="no", recovery="retry", delay=timedelta(0)))
    assert await store.tokens_used_today() == 0

    claim = await claim_agent(store)
    assert await store.reserve_tokens(claim, "main", 100, limit=50)
    await advance(
        store, claim, ModelAnswered(text="done", usage=TokenUsage(input_tokens=40, output_tokens=20), service="main")
    )
    assert await store.tokens_used_today() == 60

    await ask(store, text="more")
    claim = await claim_agent(store)
    assert not await store.reserve_tokens(claim, "main", 1, limit=60)
    assert await store.tokens_used_today() == 60


async def test_a_released_turn_is_claimable_at_once_and_is_no_crash(store: Society) -> None:
    await ask(store)
    for worker in ("a", "b", "c", "d", "e"):
        assert (await claim_agent(store, worker)).action == AskModel()
        await store.release_claims(worker, failed=False)


async def test_a_turn_that_fails_repeatedly_is_quarantined(store: Society) -> None:
    await ask(store)
    effects = []
    for worker in ("a", "b", "c", "d"):
        effects.append((await claim_agent(store, worker)).action)
        await store.release_claims(worker, failed=True)
    assert effects == [AskModel(), AskModel(), AskModel(), Rest()]


async def test_claims_are_listed_by_worker_and_released_one_by_one(store: Society) -> None:
    await ask(store, "ada")
    await ask(store, "bob")
    await store.claim_ready("w", RULES, 2)
    assert await store.claims_of("w") == [("ada", 1), ("bob", 1)]
    assert await store.claims_of("another") == []
    await store.release_claims("w", only=[("bob", 1)], failed=False)
    assert await store.claims_of("w") == [("ada", 1)]
    assert [claim.agent_id for claim in await store.claim_ready("w", RULES, 2)] == ["bob"]


async def test_a_release_tells_two_claims_of_one_agent_apart(store: Society) -> None:
    await ask(store)
    ended = await claim_agent(store)
    await advance(store, ended, says("done"))
    await ask(store)
    claim = await claim_agent(store)
    earlier, later = ("ada", ended.epoch), ("ada", claim.epoch)

    await store.release_claims("w", only=[earlier], failed=False)
    assert not await store.claim_ready("w", RULES, 2)
    await store.release_claims("w", only=[later], failed=True)
    (again,) = await store.claim_ready("w", RULES, 2)
    await store.release_claims("w", failed=True)
    assert [one.epoch for one in await store.claim_ready("w", RULES, 2)] == [again.epoch + 1]


# Termination


async def test_an_agent_terminated_at_work_has_a_closed_history_and_its_claim_is_stale(store: Society) -> None:
    asked = await ask(store)
    claim = await advance(store, await claim_agent(store), says("", call("a"), call("b")))
    waiting = await ask(store, text="and?", sender="bob")
    await store.terminate("ada")
    with pytest.raises(StaleClaim):
        await advance(store, claim, done())
    assert await state(store) == "terminated"
    assert await history_lines(store) == [
        "user: hello",
        "assistant: ",
        f"tool: {UNKNOWN_RESULT}",
        f"tool: {STOPPED_RESULT}",
    ]
    assert (await stored(store, waiting)).state == "dead"
    ((sender, text, reply),) = await received(store, "user")
    assert (sender, reply) == ("system", asked) and "terminated" in text
    assert await store.claim_ready("w", RULES, 10) != []  # bob gets a notice about his dead letter


@pytest.mark.parametrize(
    "event",
    [
        says("", call(needs_approval=True)),
        ModelFailed(message="busy", recovery="retry"),
        ModelFailed(message="no key", recovery="block"),
    ],
    ids=["wait_approval", "wait_retry", "blocked"],
)
async def test_an_agent_terminated_while_it_waits_is_never_claimed_again(
    store: Society, clock: FakeClock, event: Event
) -> None:
    await ask(store)
    await advance(store, await claim_agent(store), event)
    await store.terminate("ada")
    await clock.advance(hours=1)
    assert await store.claim_ready("w", RULES, 10) == []
    assert await state(store) == "terminated"


async def test_terminating_a_ready_agent_only_notifies_the_senders_of_dead_letters(store: Society) -> None:
    await ask(store)
    await store.terminate("ada")
    ((sender, text, _),) = await received(store, "user")
    assert sender == "system" and "Not delivered" in text


async def test_a_clock_set_back_does_not_prolong_a_retry(engine: Engine, tmp_path: Path, clock: FakeClock) -> None:
    """Ada waits 30 s for a retry and bob has mail; then the clock is set back by a day."""
    store = await engine.open(tmp_path / "data", clock, Limits())
    await store.add_agents(PEOPLE)
    await ask(store)
    failure = ModelFailed(message="busy", recovery="retry", delay=timedelta(seconds=30))
    await advance(store, await claim_agent(store), failure)
    await ask(store, "bob")
    await store.close()

    earlier = FakeClock(clock.now() - timedelta(days=1))
    store = await engine.open(tmp_path / "data", earlier, Limits())
    try:
        claims = [
            *await store.claim_ready("w", RULES, 10),
            *await store.claim_ready("w", RULES, 10),
        ]  # the first claim may only detect the clock change
        assert [claim.agent_id for claim in claims] == ["bob"]
        await earlier.advance(seconds=29)
        assert list(await store.claim_ready("w", RULES, 10)) == []
        await earlier.advance(seconds=1)
        assert "ada" in [claim.agent_id for claim in await store.claim_ready("w", RULES, 10)]
        assert [violation async for violation in store.violations()] == []
    finally:
        await store.close()


async def test_the_lease_of_a_dead_worker_ends_although_the_clock_was_set_back(
    engine: Engine, tmp_path: Path, clock: FakeClock
) -> None:
    store = await engine.open(tmp_path / "data", clock, Limits())
    await store.add_agents(PEOPLE)
    await ask(store)
    await claim_agent(store)
    with engine.behind(tmp_path / "data") as db:  # a lease that ends tomorrow
        db.execute("UPDATE agents SET runnable_at = ? WHERE id = 'ada'", (to_ms(clock.now()) + 86_400_000,))
    try:
        assert list(await store.claim_ready("w2", RULES, 10)) == []
        await clock.advance(hours=1)
        assert [claim.agent_id for claim in await store.claim_ready("w2", RULES, 10)] == ["ada"]
    finally:
        await store.close()
