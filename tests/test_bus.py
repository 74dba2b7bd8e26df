"""The bus delivers each message once, when it is due."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta

import pytest

from coterie.bus import MessageBus, Watcher
from coterie.errors import Lagged, Refused
from coterie.messages import Message, Receipt
from coterie.society import Society
from coterie.store import Event, Store
from coterie.testing import FakeClock

HOUR = 3_600_000


def texts(messages: Sequence[Message]) -> list[str]:
    return [message.payload["text"] for message in messages]


async def send(bus: MessageBus, text: str = "hello", to: str = "ada", delay_ms: object = None) -> Receipt:
    return await bus.send(sender="user", to=to, payload={"text": text}, delay_ms=delay_ms)


# Delayed messages (requirements 002)


async def test_a_delayed_message_is_stored_as_delayed_and_not_delivered_before_it_is_due(
    society: Society, clock: FakeClock
) -> None:
    await society.send(to="ada", text="hello", delay_ms=HOUR)

    await clock.advance(minutes=59, seconds=59.999)
    assert await society.waiting("ada") == []

    await clock.advance(milliseconds=1)
    assert texts(await society.waiting("ada")) == ["hello"]


@pytest.mark.parametrize("delay", [None, 0, -1, -0.5])
async def test_without_a_delay_or_with_a_zero_delay_a_message_arrives_immediately(
    store: Store, bus: MessageBus, delay: object
) -> None:
    receipt = await send(bus, delay_ms=delay)
    assert receipt.state == "pending" and receipt.scheduled_delivery_time is None
    assert len(await store.waiting("ada")) == 1


async def test_messages_due_at_the_same_moment_arrive_in_the_order_they_were_sent(
    store: Store, bus: MessageBus, clock: FakeClock
) -> None:
    for n in range(20):
        await send(bus, str(n), delay_ms=1000)
    await clock.advance(seconds=1)
    assert texts(await store.waiting("ada")) == [str(n) for n in range(20)]


async def test_a_message_due_sooner_than_the_one_the_timer_waits_for_is_not_late(
    store: Store, bus: MessageBus, clock: FakeClock
) -> None:
    await send(bus, "second", delay_ms=900)
    await send(bus, "first", delay_ms=100)
    await clock.advance(milliseconds=100)
    assert texts(await store.waiting("ada")) == ["first"]
    assert (await store.waiting("ada"))[0].delivered_at == clock.now()


async def test_the_sweep_delivers_within_a_second_messages_without_a_timer(
    store: Store, bus: MessageBus, clock: FakeClock
) -> None:
    from coterie.messages import make_envelope

    await clock.advance(milliseconds=1)
    await store.send(make_envelope(sender="user", to="ada", payload={"text": "unannounced"}, delay_ms=10))
    await clock.advance(seconds=1)
    assert texts(await store.waiting("ada")) == ["unannounced"]


async def test_a_delivery_is_logged_with_the_time_it_was_sent_and_the_time_it_arrived(
    bus: MessageBus, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    receipt = await send(bus, delay_ms=90_000)
    await clock.advance(minutes=2)
    (line,) = [record.getMessage() for record in caplog.records if receipt.message_id in record.getMessage()]
    assert "sent 2030-01-01T00:00:00.000Z" in line
    assert "delivered 2030-01-01T00:01:30.000Z" in line


async def test_the_receipt_of_a_delayed_message_has_its_delivery_time(bus: MessageBus, clock: FakeClock) -> None:
    receipt = await send(bus, delay_ms=1500)
    assert receipt.to_dict() == {
        "messageId": receipt.message_id,
        "state": "delayed",
        "task": receipt.message_id,
        "scheduledDeliveryTime": "2030-01-01T00:00:01.500Z",
    }


async def test_delayed_messages_are_counted_by_recipient(bus: MessageBus, clock: FakeClock) -> None:
    for delay in (1000, 2000, 3000):
        await send(bus, delay_ms=delay)
    await send(bus, to="bob", delay_ms=1000)
    assert await bus.delayed_count("ada") == 3
    await clock.advance(seconds=1)
    assert await bus.delayed_count("ada") == 2
    assert await bus.delayed_count("nobody") == 0


async def test_a_graceful_stop_delivers_everything_delayed_at_once_marked_early_and_logs_how_many(
    store: Store, bus: MessageBus, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for n in range(3):
        await send(bus, str(n), delay_ms=(3 - n) * HOUR)
    assert await bus.stop(deliver_delayed=True) == 3
    waiting = await store.waiting("ada")
    assert texts(waiting) == ["2", "1", "0"]
    assert all(message.early and message.deliver_at and message.deliver_at > clock.now() for message in waiting)
    assert "delivering 3 delayed messages early" in caplog.text


async def test_a_graceful_stop_that_keeps_the_schedule_logs_how_many_stay(
    store: Store, bus: MessageBus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await send(bus, delay_ms=HOUR)
    assert await bus.stop(deliver_delayed=False) == 0
    assert await store.delayed_count() == 1
    assert "1 delayed messages stay scheduled" in caplog.text


async def test_a_forced_exit_warns_about_undelivered_messages_and_loses_none(
    store: Store, bus: MessageBus, caplog: pytest.LogCaptureFixture
) -> None:
    await send(bus, delay_ms=HOUR)
    await bus.abandon()
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "1 delayed messages were not delivered" in warning.getMessage()
    assert await store.delayed_count() == 1


# Rescheduling and withdrawing


async def test_a_message_rescheduled_to_an_earlier_time_is_delivered_then(
    store: Store, bus: MessageBus, clock: FakeClock
) -> None:
    receipt = await send(bus, delay_ms=HOUR)
    await bus.reschedule(receipt.message_id, 300)
    await clock.advance(milliseconds=300)
    assert len(await store.waiting("ada")) == 1


async def test_a_withdrawn_message_never_arrives(store: Store, bus: MessageBus, clock: FakeClock) -> None:
    receipt = await send(bus, delay_ms=1000)
    await bus.withdraw(receipt.message_id)
    await clock.advance(seconds=5)
    assert await store.waiting("ada") == []


async def test_an_invalid_delay_reschedules_nothing(store: Store, bus: MessageBus) -> None:
    receipt = await send(bus, delay_ms=HOUR)
    with pytest.raises(Refused):
        await bus.reschedule(receipt.message_id, "soon")
    message = await store.message(receipt.message_id)
    assert message is not None and message.deliver_at == receipt.scheduled_delivery_time


# Watching


async def next_events(watcher: Watcher, count: int) -> list[Event]:
    return [await anext(watcher) for _ in range(count)]


async def test_a_watcher_sees_every_event_once_and_in_order(bus: MessageBus, clock: FakeClock) -> None:
    async with bus.watch() as watcher:
        sent = [await send(bus, str(n), delay_ms=100 * n) for n in range(5)]
        created = await next_events(watcher, 5)
        assert [event.subject for event in created] == [receipt.message_id for receipt in sent]
        await clock.advance(seconds=1)
        delivered = await next_events(watcher, 4)
    assert {event.kind for event in delivered} == {"delayed.delivered"}
    sequence = [event.seq for event in created + delivered]
    assert sequence == sorted(set(sequence))


async def test_a_watcher_can_continue_where_another_stopped(bus: MessageBus) -> None:
    async with bus.watch() as watcher:
        await send(bus, "a")
        (first,) = await next_events(watcher, 1)
    missed = await send(bus, "b")
    async with bus.watch(after=first.seq) as again:
        (event,) = await next_events(again, 1)
    assert event.subject == missed.message_id


async def test_a_watcher_that_does_not_read_gets_lagged_and_delays_no_other(bus: MessageBus, clock: FakeClock) -> None:
    async with bus.watch(queue=4) as slow, bus.watch(queue=100) as quick:
        for recipient in ("ada", "bob") * 4:
            await send(bus, to=recipient)
        assert len(await next_events(quick, 8)) == 8
        # The bus serves its watchers in rounds, in any order. After two more rounds the slow watcher was served too.
        for recipient in ("ada", "bob"):
            await send(bus, to=recipient)
            assert len(await next_events(quick, 1)) == 1
        seen = await next_events(slow, 4)
        with pytest.raises(Lagged) as lagged:
            await anext(slow)
    assert lagged.value.seq == seen[-1].seq


async def test_the_log_is_read_once_for_watchers_at_the_same_position(
    store: Store, bus: MessageBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions, read = list[int](), store.events

    async def events(after: int, limit: int = 500, *, about_society: bool = False) -> Sequence[Event]:
        found = await read(after, limit, about_society=about_society)
        positions.extend([after] if found else [])
        return found

    monkeypatch.setattr(store, "events", events)
    async with bus.watch() as one, bus.watch(queue=100) as other:
        for number in range(3):
            await send(bus, str(number))
            assert await next_events(one, 1) == await next_events(other, 1)
    assert len(positions) == len(set(positions)) >= 3


async def test_watchers_end_when_the_bus_stops(store: Store, clock: FakeClock) -> None:
    bus = MessageBus(store, clock)
    bus.start()
    async with bus.watch() as watcher:
        reading = asyncio.create_task(anext(watcher, None))
        await bus.stop(deliver_delayed=False)
        assert await reading is None


# Clocks


async def test_a_step_of_the_wall_clock_is_logged_and_moves_nothing(
    store: Store, bus: MessageBus, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    await send(bus, delay_ms=5000)
    clock.step(hours=1)
    await clock.advance(seconds=4.999)
    assert await store.waiting("ada") == []
    assert "the wall clock was set by +3600.0 s" in caplog.text
    await clock.advance(milliseconds=1)
    assert len(await store.waiting("ada")) == 1


async def test_attachments_are_described_by_their_bytes_not_by_the_sender(society: Society) -> None:
    artifact = await society.artifacts.put(b"\x89PNG\r\n\x1a\n rest", "notes.txt")
    claim = {"artifactRef": artifact.ref, "type": "audio", "mimeType": "text/html", "size": 1, "filename": "mine.png"}
    receipt = await society.send(to="ada", payload={"attachments": [claim, {"artifactRef": artifact.ref}]})
    message = await society.store.message(receipt.message_id)
    assert message is not None
    described = {"artifactRef": artifact.ref, "type": "image", "mimeType": "image/png", "size": 13}
    assert message.payload["attachments"] == [
        described | {"filename": "mine.png"},
        described | {"filename": "notes.txt"},
    ]


async def test_an_unknown_attachment_is_refused_before_anything_is_stored(society: Society) -> None:
    with pytest.raises(Refused, match="there is no artifact") as refusal:
        await society.send(to="ada", attachments=["nothing"])
    assert refusal.value.code == "attachment_unknown"
    assert await society.waiting("ada") == []


async def test_the_timer_survives_store_errors(
    store: Store, bus: MessageBus, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.errors import StoreUnavailable

    await send(bus, delay_ms=500)

    async def fail(*_: object, **__: object) -> None:
        raise StoreUnavailable("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "promote_due", fail)
        await clock.advance(seconds=2)
    assert await store.waiting("ada") == []
    await clock.advance(seconds=1)
    assert len(await store.waiting("ada")) == 1
    assert timedelta(0) < clock.now() - (await store.waiting("ada"))[0].created_at


# Recurring messages


async def test_a_stop_leaves_recurring_messages_scheduled_and_delivers_the_others(
    store: Store, bus: MessageBus, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await bus.send(sender="user", to="ada", payload={"text": "daily"}, every="daily 08:00", time_zone="UTC")
    await send(bus, "once", delay_ms=HOUR)
    assert await bus.stop(deliver_delayed=True) == 1
    assert "delivering 1 delayed messages early" in caplog.text
    assert texts(await store.waiting("ada")) == ["once"]
    assert texts(await store.delayed()) == ["daily"]


async def test_a_recurring_message_arrives_when_it_is_due_without_a_sweep(
    store: Store, bus: MessageBus, clock: FakeClock
) -> None:
    await clock.advance(milliseconds=1)
    receipt = await bus.send(sender="ada", to="user", payload={"text": "tick"}, every="1m")
    assert receipt.schedule_id is not None
    await clock.advance(minutes=3)
    arrived = [message.delivered_at for message in await store.waiting("user")]
    assert [time and time - clock.now() for time in arrived] == [timedelta(minutes=-n) for n in (2, 1, 0)]
    await bus.change_schedule(receipt.schedule_id, every="2m")
    await clock.advance(minutes=2)
    assert len(await store.waiting("user")) == 4
    await bus.end_schedule(receipt.schedule_id)
    await clock.advance(minutes=5)
    assert len(await store.waiting("user")) == 4
