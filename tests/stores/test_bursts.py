"""Contract of every storage engine: a burst of mail that is too long for one request is taken in parts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from coterie.messages import make_envelope
from coterie.store import Limits
from coterie.stores.sql.inbox import MESSAGE_COST
from coterie.stores.sql.store import SqlStore
from coterie.testing import FakeClock
from coterie.turn import AskModel, Event, Rest, Rules, RunCall
from coterie.turn_store import Claim
from tests.conftest import PEOPLE
from tests.engines import Engine

from .steps import RULES, ask, call, done, history_lines, received, says, state
from .workers import ManualWorker

TEXT = "x" * 2_400
COST = MESSAGE_COST + 2_500
"""More than one such message costs, with its number and the JSON around it."""


def three_each(_: str) -> int:
    return 3 * COST


PARTS = replace(RULES, mail_budget=three_each)


@pytest.fixture
async def store(engine: Engine, tmp_path: Path, clock: FakeClock) -> AsyncIterator[SqlStore]:
    """As the store of other contracts, with a mailbox for long bursts."""
    opened = await engine.open(tmp_path / "data", clock, Limits(mailbox=300, mailbox_bytes=10_000_000))
    await opened.add_agents(PEOPLE)
    yield opened
    assert [violation async for violation in opened.violations()] == []
    await opened.close()


async def send_burst(store: SqlStore, count: int, *, start: int = 0, sender: str = "user", text: str = TEXT) -> None:
    for number in range(start, start + count):
        await ask(store, text=f"{number} {text}", sender=sender)


async def numbers(store: SqlStore) -> list[int]:
    """Numbers of the messages in Ada's history."""
    return [int(line.split()[1]) for line in await history_lines(store) if line.startswith("user: ")]


async def claim(store: SqlStore, rules: Rules = PARTS) -> Claim:
    (claimed,) = await store.claim_ready("w", rules, 1)
    return claimed


async def advance(store: SqlStore, claimed: Claim, event: Event) -> Claim:
    return await store.advance(claimed, event, PARTS)


async def test_a_new_turn_takes_what_fits_and_its_answer_takes_the_next_part(store: SqlStore) -> None:
    await send_burst(store, 7)
    claimed = await claim(store)
    assert await numbers(store) == [0, 1, 2]
    assert len(await store.waiting("ada")) == 4 and claimed.for_person

    claimed = await advance(store, claimed, says("first part"))
    assert (claimed.action, await numbers(store)) == (AskModel(), [0, 1, 2, 3, 4, 5])
    claimed = await advance(store, claimed, says("second part"))
    assert (claimed.action, await numbers(store)) == (AskModel(), [0, 1, 2, 3, 4, 5, 6])
    claimed = await advance(store, claimed, says("last part"))
    assert (claimed.action, await state(store)) == (Rest(), "idle")
    assert [text for _, text, _ in await received(store, "user")] == ["first part", "second part", "last part"]


async def test_messages_of_normal_size_are_taken_all_at_once(store: SqlStore) -> None:
    await send_burst(store, 30, text="")
    await claim(store)
    assert (await numbers(store), await store.waiting("ada")) == ([*range(30)], [])


async def test_a_message_larger_than_the_budget_is_taken_alone(store: SqlStore) -> None:
    await send_burst(store, 2, text="x" * 50_000)
    claimed = await claim(store)
    assert await numbers(store) == [0]
    await advance(store, claimed, says("one"))
    assert await numbers(store) == [0, 1]


async def test_the_rest_of_a_burst_interrupts_a_plan_made_without_it(store: SqlStore) -> None:
    await send_burst(store, 4)
    claimed = await advance(store, await claim(store), says("", call()))
    assert (claimed.action, await numbers(store)) == (AskModel(), [0, 1, 2, 3])
    assert (await advance(store, claimed, says("", call()))).action == RunCall(0)


@pytest.mark.parametrize("sender", ["user", "bob"])
async def test_a_burst_of_200_ends_in_a_bounded_number_of_requests(store: SqlStore, sender: str) -> None:
    """The model plans a call whenever it can, so that every part could withdraw a plan."""
    await send_burst(store, 200, sender=sender)
    claimed, requests, calls = await claim(store), 1, 0
    while await store.waiting("ada"):
        assert requests < 200
        claimed = await advance(store, claimed, says("", call()))
        if isinstance(claimed.action, RunCall):
            calls += 1
            claimed = await advance(store, claimed, done())
        requests += claimed.action == AskModel()
    assert await numbers(store) == [*range(200)]
    assert requests <= 67 + calls
    claimed = await advance(store, claimed, says("", call()))
    assert claimed.action == RunCall(0), "the plan that knows everything runs"
    assert (await advance(store, await advance(store, claimed, done()), says("done"))).action == Rest()
    assert await state(store) == "idle"


async def test_a_burst_in_one_transaction_is_taken_in_parts_by_the_worker_that_it_wakes(
    engine: Engine, store: SqlStore
) -> None:
    worker = ManualWorker("w")
    worker.rules = PARTS
    store.register_worker(worker)
    envelopes = [make_envelope(sender="user", to="ada", payload={"text": f"{n} {TEXT}"}) for n in range(8)]
    await store._transact(lambda _, uow: uow.accept_all(envelopes), touches=["ada"], messages=8)
    claimed = await worker.next()
    assert await numbers(store) == [0, 1, 2]
    assert [message.payload["text"].split()[0] for message in await store.waiting("ada")] == ["3", "4", "5", "6", "7"]
    for expected in (6, 8):
        claimed = await advance(store, claimed, says(f"up to {expected}"))
        assert await numbers(store) == [*range(expected)]


async def test_a_person_who_speaks_during_a_long_burst_of_an_agent_keeps_the_place_in_the_queue(
    store: SqlStore,
) -> None:
    await send_burst(store, 5, sender="bob")
    await send_burst(store, 1, start=5)
    claimed = await claim(store)
    assert claimed.for_person, "a person waits behind the first part"
    claimed = await advance(store, claimed, says("", call()))
    assert (claimed.action, await numbers(store)) == (AskModel(), [*range(6)])


async def test_a_withdrawn_message_of_the_rest_is_never_taken(store: SqlStore) -> None:
    await send_burst(store, 7)
    claimed = await claim(store)
    fourth, *_, last = await store.waiting("ada")
    for message in (fourth, last):
        await store.withdraw(message.id, "user")
    claimed = await advance(store, claimed, says("go on"))
    assert await numbers(store) == [0, 1, 2, 4, 5]
    assert (await advance(store, claimed, says("done"))).action == Rest()
    assert await state(store) == "idle"


async def test_a_crash_between_two_parts_loses_and_repeats_nothing(
    engine: Engine, tmp_path: Path, clock: FakeClock
) -> None:
    store = await engine.open(tmp_path / "other", clock, Limits(mailbox=300))
    await store.add_agents(PEOPLE)
    await send_burst(store, 5)
    await claim(store)
    await store.close()
    store = await engine.open(tmp_path / "other", clock, Limits(mailbox=300))
    claimed = await claim(store)  # the turn continues, and mail joins it
    assert (claimed.action, await numbers(store)) == (AskModel(), [*range(5)])
    await store.close()


async def test_chinese_text_counts_with_its_bytes(store: SqlStore) -> None:
    await send_burst(store, 4, text="字" * 2_400)
    await claim(store)
    assert await numbers(store) == [0]
