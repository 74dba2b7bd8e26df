"""Recurring messages, on every storage engine."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from coterie.artifacts import Artifact
from coterie.errors import Refused
from coterie.messages import Envelope, Message, make_envelope
from coterie.store import Limits, Page, Store
from coterie.testing import FakeClock
from coterie.testing.clock import START
from tests.engines import Engine

from .steps import Society, advance, claim_agent, says

DAY = timedelta(days=1)


def recurring(every: str = "daily 08:00 UTC", text: str = "stand up", **changed: Any) -> Envelope:
    return make_envelope(**{"sender": "user", "to": "ada", "payload": {"text": text}, "every": every} | changed)


async def only(store: Store) -> Message:
    """The only delayed message."""
    (message,) = await store.delayed()
    return message


async def due(store: Store) -> datetime:
    message = await only(store)
    assert message.deliver_at is not None
    return message.deliver_at


async def refusal(call: Any) -> str:
    with pytest.raises(Refused) as refused:
        await call
    return refused.value.code


async def to_time(store: Store, clock: FakeClock, **after_start: float) -> None:
    """Set the clock and deliver what is due."""
    await clock.advance(seconds=(START + timedelta(**after_start) - clock.now()).total_seconds())
    while (await store.promote_due(100)).delivered:
        pass


async def take_all(store: Society) -> None:
    """Let ada take her mail and end her turn."""
    await advance(store, await claim_agent(store), says("noted"))


async def test_a_recurring_message_waits_as_one_delayed_message(store: Store) -> None:
    receipt = await store.send(recurring())
    message = await only(store)
    assert (receipt.state, receipt.scheduled_delivery_time) == ("delayed", START + timedelta(hours=8))
    assert (message.id, message.every, message.schedule_id) == (
        receipt.message_id,
        "daily 08:00 UTC",
        receipt.schedule_id,
    )
    (schedule,) = await store.schedules()
    assert (schedule.id, schedule.state, schedule.message_id) == (receipt.schedule_id, "active", receipt.message_id)
    assert (schedule.sender, schedule.to, schedule.payload) == ("user", "ada", {"text": "stand up"})
    assert await store.schedule_count() == 1


async def test_the_delivery_of_one_stores_the_next(store: Society, clock: FakeClock) -> None:
    first = await store.send(recurring())
    await to_time(store, clock, hours=8)
    (delivered,) = await store.waiting("ada")
    following = await only(store)
    assert (delivered.id, delivered.missed, delivered.hops) == (first.message_id, 0, 0)
    assert (following.deliver_at, following.schedule_id) == (START + DAY + timedelta(hours=8), first.schedule_id)
    assert following.id != first.message_id
    await take_all(store)
    await to_time(store, clock, days=1, hours=8)
    assert [message.id for message in await store.waiting("ada")] == [following.id]
    assert await due(store) == START + 2 * DAY + timedelta(hours=8)


async def test_a_repeated_send_makes_one_schedule(store: Store) -> None:
    first = await store.send(recurring(client_id="once"))
    assert await store.send(recurring(client_id="once")) == first
    assert len(await store.schedules()) == 1


async def test_due_times_that_nobody_kept_are_made_up_for_once_and_counted(
    engine: Engine, tmp_path: Path, clock: FakeClock
) -> None:
    from tests.conftest import PEOPLE

    store = await engine.open(tmp_path / "gone", clock, Limits())
    await store.add_agents(PEOPLE)
    await store.send(recurring("weekdays 08:00 UTC"))
    await store.close()
    await clock.advance(days=7)  # from Tuesday 1 January: five due times, 1 to 4 and 7 January
    store = await engine.open(tmp_path / "gone", clock, Limits())
    await store.promote_due(100)
    (message,) = await store.waiting("ada")
    assert (message.missed, message.early, message.deliver_at) == (5, False, START + timedelta(hours=8))
    assert message.to_dict()["missed"] == 5
    assert await due(store) == START + 7 * DAY + timedelta(hours=8)
    assert [violation async for violation in store.violations()] == []
    await store.close()


async def test_one_that_is_a_little_late_has_missed_nothing(store: Store, clock: FakeClock) -> None:
    await store.send(recurring())
    await to_time(store, clock, hours=8, seconds=59)
    assert [message.missed for message in await store.waiting("ada")] == [0]


async def test_one_that_is_an_hour_late_has_missed_its_time(store: Store, clock: FakeClock) -> None:
    await store.send(recurring())
    await to_time(store, clock, hours=9)
    assert [message.missed for message in await store.waiting("ada")] == [1]
    assert await due(store) == START + DAY + timedelta(hours=8)


async def test_an_agent_that_does_not_read_gets_no_second_one(store: Society, clock: FakeClock) -> None:
    await store.pause("ada")
    await store.send(recurring("10m"))
    for minutes in range(10, 60, 10):
        await to_time(store, clock, minutes=minutes)
    (waiting,) = await store.waiting("ada")
    assert (waiting.missed, waiting.deliver_at) == (0, START + timedelta(minutes=10))
    assert await due(store) == START + timedelta(minutes=60)
    await store.resume("ada")
    await take_all(store)
    await to_time(store, clock, minutes=60)
    assert [message.missed for message in await store.waiting("ada")] == [4]


async def test_the_person_gets_each_one_read_or_not(store: Store, clock: FakeClock) -> None:
    await store.send(recurring(sender="ada", to="user", quick_replies=["Done"]))
    for day in range(3):
        await to_time(store, clock, days=day, hours=8)
    assert len(await store.waiting("user")) == 3
    # each of them is a question of its own
    assert len(await store.open_questions()) == 3  # type: ignore[attr-defined]


async def test_a_graceful_stop_delivers_no_recurring_message_early(store: Store) -> None:
    await store.send(recurring())
    await store.send(make_envelope(sender="user", to="ada", payload={"text": "once"}, delay_ms=9_000))
    promotion = await store.promote_due(100, early=True)
    assert [delivery.recipient for delivery in promotion.delivered] == ["ada"]
    assert (await only(store)).every == "daily 08:00 UTC"
    assert not (await store.promote_due(100, early=True)).delivered


async def test_a_pause_withdraws_the_next_one_and_a_resume_makes_another(store: Store, clock: FakeClock) -> None:
    receipt = await store.send(recurring())
    assert receipt.schedule_id is not None
    for _ in range(2):
        paused = await store.change_schedule(receipt.schedule_id, "user", paused=True)
        assert (paused.state, await store.delayed(), await store.delayed_count()) == ("paused", [], 0)
    await to_time(store, clock, days=3)
    assert await store.waiting("ada") == []
    await store.change_schedule(receipt.schedule_id, "user", paused=False)
    resumed = await store.change_schedule(receipt.schedule_id, "user", paused=False)
    assert (resumed.state, resumed.due_at) == ("active", START + 3 * DAY + timedelta(hours=8))
    assert (await only(store)).id == resumed.message_id != receipt.message_id
    await to_time(store, clock, days=3, hours=8)
    assert [message.missed for message in await store.waiting("ada")] == [0]


async def test_a_new_recurrence_moves_the_next_one(store: Store, clock: FakeClock) -> None:
    receipt = await store.send(recurring())
    assert receipt.schedule_id is not None
    changed = await store.change_schedule(receipt.schedule_id, "user", every="daily 06:00 UTC")
    message = await only(store)
    assert (changed.every, message.every) == ("daily 06:00 UTC", "daily 06:00 UTC")
    assert (message.id, message.deliver_at) == (receipt.message_id, START + timedelta(hours=6))
    await to_time(store, clock, hours=6)
    assert await due(store) == START + DAY + timedelta(hours=6)


async def test_a_changed_schedule_starts_no_earlier_than_its_delay(store: Store, clock: FakeClock) -> None:
    receipt = await store.send(recurring())
    assert receipt.schedule_id is not None
    await store.change_schedule(receipt.schedule_id, "user", every="daily 06:00 UTC", delay=5 * DAY)
    assert await due(store) == START + 5 * DAY + timedelta(hours=6)
    # the present recurrence, from then on
    changed = await store.change_schedule(receipt.schedule_id, "user", delay=2 * DAY + timedelta(hours=7))
    assert (changed.every, changed.message_id) == ("daily 06:00 UTC", receipt.message_id)
    assert changed.due_at == await due(store) == START + 3 * DAY + timedelta(hours=6)
    # an interval counts from its start
    await store.change_schedule(receipt.schedule_id, "user", every="2 hours", delay=timedelta(minutes=10))
    assert await due(store) == START + timedelta(minutes=10)
    await to_time(store, clock, minutes=10)
    assert await due(store) == START + timedelta(hours=2, minutes=10)


async def test_a_paused_schedule_is_resumed_from_a_start(store: Store) -> None:
    receipt = await store.send(recurring())
    assert receipt.schedule_id is not None
    await store.change_schedule(receipt.schedule_id, "user", paused=True)
    await store.change_schedule(receipt.schedule_id, "user", every="daily 06:00 UTC", paused=False, delay=5 * DAY)
    assert await due(store) == START + 5 * DAY + timedelta(hours=6)
    assert await store.delayed_count() == 1


async def test_one_message_can_be_moved_without_its_schedule(store: Society, clock: FakeClock) -> None:
    receipt = await store.send(recurring())
    await store.reschedule(receipt.message_id, timedelta(hours=1), "user")
    await to_time(store, clock, hours=1)
    assert [message.missed for message in await store.waiting("ada")] == [0]
    # the due time that it was moved from does not come again
    assert await due(store) == START + DAY + timedelta(hours=8)
    await take_all(store)
    await store.reschedule((await only(store)).id, 3 * DAY, "user")
    await to_time(store, clock, days=3, hours=1)
    assert [message.missed for message in await store.waiting("ada")] == [0]
    assert await due(store) == START + 3 * DAY + timedelta(hours=8)


async def test_a_withdrawn_message_is_skipped_and_the_next_one_comes(store: Store) -> None:
    receipt = await store.send(recurring())
    await store.withdraw(receipt.message_id, "user")
    assert await due(store) == START + DAY + timedelta(hours=8)
    assert await store.delayed_count("ada") == 1


async def test_an_ended_schedule_sends_nothing_more(store: Store, clock: FakeClock) -> None:
    receipt = await store.send(recurring())
    assert receipt.schedule_id is not None
    for _ in range(2):
        assert (await store.end_schedule(receipt.schedule_id, "user")).state == "ended"
    await to_time(store, clock, days=2)
    assert (await store.waiting("ada"), await store.delayed(), await store.schedules()) == ([], [], [])
    assert await refusal(store.change_schedule(receipt.schedule_id, "user", paused=False)) == "already_ended"
    assert await refusal(store.end_schedule("nowhere", "user")) == "unknown_schedule"


async def test_only_the_person_and_the_sender_change_a_schedule(store: Store) -> None:
    receipt = await store.send(recurring(sender="ada", to="bob"))
    assert receipt.schedule_id is not None
    assert await refusal(store.end_schedule(receipt.schedule_id, "bob")) == "not_yours"
    assert await refusal(store.change_schedule(receipt.schedule_id, "bob", paused=True)) == "not_yours"
    await store.change_schedule(receipt.schedule_id, "ada", paused=True)
    await store.end_schedule(receipt.schedule_id, "user")


async def test_a_terminated_agent_sends_and_gets_no_more(store: Store, clock: FakeClock) -> None:
    await store.send(recurring(sender="ada", to="bob"))
    await store.send(recurring(sender="bob", to="ada"))
    await store.terminate("ada")
    assert [schedule.sender for schedule in await store.schedules()] == ["bob"]
    await to_time(store, clock, hours=8)
    assert (await store.schedules(), await store.delayed()) == ([], [])
    assert [message.sender for message in await store.messages(Page(), state="dead")] == ["bob"]
    assert [message.sender for message in await store.waiting("bob")] == ["system"]


async def test_a_refused_message_leaves_no_schedule(store: Store) -> None:
    assert await refusal(store.send(recurring(to="nobody"))) == "unknown_recipient"
    unknown = {"text": "x", "attachments": [{"artifactRef": "nothing"}]}
    assert await refusal(store.send(recurring(payload=unknown))) == "attachment_unknown"
    assert (await store.schedules(), await store.delayed()) == ([], [])


async def test_files_come_with_every_message(store: Store, clock: FakeClock) -> None:
    file = Artifact(
        ref="r", filename="a.txt", type="file", mime_type="text/plain", size=1, sha256="0" * 64, created_at=START
    )
    await store.add_artifact(file)
    receipt = await store.send(recurring(payload={"text": "x", "attachments": [{"artifactRef": "r"}]}))
    assert receipt.schedule_id is not None
    await to_time(store, clock, hours=8)
    await store.change_schedule(receipt.schedule_id, "user", paused=True)
    await clock.advance(days=40)
    assert (await store.unused_artifacts(timedelta(days=1))).refs == []
    await store.change_schedule(receipt.schedule_id, "user", paused=False)
    assert (await only(store)).payload["attachments"] == [{"artifactRef": "r"}]


async def test_a_recurring_message_of_the_person_answers_no_question(store: Store) -> None:
    question = await store.send(make_envelope(sender="ada", to="user", payload={"text": "?"}, quick_replies=["Yes"]))
    await store.send(recurring())
    stored = await store.message(question.message_id)
    assert stored is not None and stored.answer is None
    with pytest.raises(Refused, match="an answer cannot recur"):
        recurring(in_reply_to=question.message_id)


async def test_schedules_are_listed_by_recipient_and_in_pages(store: Store) -> None:
    for to in ("ada", "bob", "ada"):
        await store.send(recurring(to=to))
    assert [schedule.to for schedule in await store.schedules("bob")] == ["bob"]
    first = await store.schedules(limit=2)
    rest = await store.schedules(after=first[-1].id, limit=2)
    assert len({schedule.id for schedule in (*first, *rest)}) == 3
