"""The event stream: events, positions to resume from, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from coterie.live import CallProgress
from coterie.messages import PERSON
from coterie.society import Society
from coterie.testing import FakeClock
from coterie.web.sse import Hub
from tests.faults.harness import scaled_timeout
from tests.pruning import pruned


class ReceivedEvent(NamedTuple):
    kind: str
    data: Any
    id: str | None


class StreamReader:
    """A client of the hub without a network."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[ReceivedEvent] = asyncio.Queue()
        self.comments = 0
        self.stuck: asyncio.Event | None = None
        self._rest = b""

    async def write(self, data: bytes) -> None:
        if self.stuck is not None:
            await self.stuck.wait()
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        for block in blocks:
            fields = dict(line.split(": ", 1) for line in block.decode().split("\n"))
            self.comments += "" in fields
            if "event" in fields:
                self.events.put_nowait(ReceivedEvent(fields["event"], json.loads(fields["data"]), fields.get("id")))

    async def next(self, *kinds: str) -> ReceivedEvent:
        """Return the next event, or the next of one of `kinds`."""
        async with asyncio.timeout(scaled_timeout(10)):
            while True:
                event = await self.events.get()
                if not kinds or event.kind in kinds:
                    return event


@pytest.fixture
async def hub(society: Society, clock: FakeClock) -> AsyncIterator[Hub]:
    hub = Hub(society, society.live, clock)
    yield hub
    await hub.shut_down(0)


@asynccontextmanager
async def listening(
    hub: Hub, last: str | None = None, reader: StreamReader | None = None
) -> AsyncIterator[StreamReader]:
    """A client that has received the backlog."""
    reader = reader or StreamReader()
    earlier = set(hub.clients)
    task = asyncio.create_task(hub.serve(reader.write, last))
    if reader.stuck is None:
        await reader.next("hello")
        while not any(client.is_live for client in hub.clients - earlier):
            await asyncio.sleep(0)
    try:
        yield reader
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def send(society: Society, text: str) -> str:
    return (await society.send(to="ada", text=text)).message_id


async def test_an_event_has_its_position_in_the_log_as_id(hub: Hub, society: Society) -> None:
    start = await society.store.last_event()
    async with listening(hub) as reader:
        sent = await send(society, "hello")
        received = await reader.next("message.created")

    assert received.data["message"]["id"] == sent and received.data["message"]["rendered"]
    assert received.id == f"{hub.epoch}.{start + 1}" and received.data["prev"] == start


async def test_the_first_event_is_hello_with_the_position_of_the_stream(hub: Hub, society: Society) -> None:
    reader = StreamReader()
    task = asyncio.create_task(hub.serve(reader.write, None))
    hello = await reader.next()
    task.cancel()
    seq = await society.store.last_event()
    assert hello.kind == "hello" and hello.id == f"{hub.epoch}.{seq}"
    assert hello.data == {
        "epoch": hub.epoch, "seq": seq, "serverTime": "2030-01-01T00:00:00.000Z", "pingMs": 15000,
        "configuration": {"applied": True, "problems": []},
    }  # fmt: skip


async def test_a_reconnecting_client_gets_missed_events_once_and_in_order(hub: Hub, society: Society) -> None:
    position = f"{hub.epoch}.{await society.store.last_event()}"
    missed = [await send(society, f"m{n}") for n in range(150)]
    reader = StreamReader()
    async with listening(hub, position, reader):
        later = await send(society, "later")
        received = [await reader.next("message.created") for _ in range(151)]

    assert [event.data["message"]["id"] for event in received] == [*missed, later]
    seqs = [int((event.id or "").rpartition(".")[2]) for event in received]
    assert [event.data["prev"] for event in received] == [int(position.rpartition(".")[2]), *seqs[:-1]]


async def test_nothing_is_lost_between_snapshot_and_stream(hub: Hub, society: Society) -> None:
    seen = await society.store.snapshot()
    between = await send(society, "between")
    async with listening(hub, f"{hub.epoch}.{seen.seq}") as reader:
        assert (await reader.next("message.created")).data["message"]["id"] == between


@pytest.mark.parametrize(
    ("last", "reason"),
    [("another.3", "unknown_epoch"), ("{epoch}.x", "unknown_epoch"), ("{epoch}.999999", "ahead_of_log")],
)
async def test_an_unknown_position_gives_a_reset_and_then_new_events(
    hub: Hub, society: Society, last: str, reason: str
) -> None:
    async with listening(hub, last.format(epoch=hub.epoch)) as reader:
        assert (await reader.next()).data == {"reason": reason}
        sent = await send(society, "on")
        assert (await reader.next("message.created")).data["message"]["id"] == sent


async def test_a_position_older_than_the_log_gives_a_reset(hub: Hub, society: Society, clock: FakeClock) -> None:
    position = f"{hub.epoch}.1"
    await send(society, "old")
    await clock.jump(days=8)
    await send(society, "new")
    await pruned(society.store)
    async with listening(hub, position) as reader:
        received = await reader.next()
        assert (received.kind, received.data) == ("reset", {"reason": "too_old"})


async def test_draft_deltas_are_batched_and_have_no_id(hub: Hub, society: Society, clock: FakeClock) -> None:
    live = society.live
    async with listening(hub) as reader, listening(hub) as other:
        for piece in ("One ", "two ", "three"):
            live.append("ada", "d1", piece)
        await clock.advance(milliseconds=45)
        live.append("ada", "d1", " four")
        live.finish("d1", "stored", ["m1"])

        received = [await reader.next() for _ in range(4)]
        assert received == [await other.next() for _ in range(4)]

    about = {"draftId": "d1", "agent": "ada"}
    assert received == [
        ReceivedEvent("draft.started", about, None),
        ReceivedEvent("draft.delta", about | {"from": 0, "delta": "One two three"}, None),
        ReceivedEvent("draft.delta", about | {"from": 13, "delta": " four"}, None),
        ReceivedEvent("draft.ended", about | {"outcome": "stored", "messages": ["m1"]}, None),
    ]


async def test_a_client_that_connects_during_a_draft_gets_its_text_so_far(
    hub: Hub, society: Society, clock: FakeClock
) -> None:
    live = society.live
    async with listening(hub) as first:
        live.append("ada", "d1", "Once")
        await clock.advance(milliseconds=45)
        live.append("ada", "d1", " upon")
        async with listening(hub) as late:
            live.append("ada", "d1", " a time")
            await clock.advance(milliseconds=45)
            snapshot, delta = await late.next(), await late.next()
        whole = "".join([(await first.next("draft.delta")).data["delta"] for _ in range(3)])

    assert (snapshot.kind, snapshot.data["text"], snapshot.id) == ("draft.snapshot", "Once upon", None)
    assert (delta.data["from"], delta.data["delta"]) == (9, " a time")
    assert whole == "Once upon a time"


async def test_a_client_that_continues_is_told_which_replies_still_run(hub: Hub, society: Society) -> None:
    for reply in ("d1", "d2"):
        society.live.append("ada", reply, "Once")
    society.live.finish("d1", "failed")
    async with listening(hub, f"{hub.epoch}.{await society.store.last_event()}") as reader:
        running, snapshot = await reader.next("draft.list"), await reader.next()

    assert (running.data, running.id) == ({"draftIds": ["d2"]}, None)
    assert (snapshot.kind, snapshot.data["draftId"]) == ("draft.snapshot", "d2")


def progress(value: float, message: str = "", agent: str = "ada", call: str = "c1") -> CallProgress:
    return CallProgress(agent_id=agent, call_id=call, tool="copy", progress=value, total=9, message=message)


async def test_the_progress_of_a_tool_call_is_sent_a_few_times_a_second_without_an_id(
    hub: Hub, society: Society, clock: FakeClock
) -> None:
    live = society.live
    about = {"agent": "ada", "callId": "c1", "name": "copy", "total": 9.0}
    async with listening(hub) as reader:
        for value in range(1, 4):
            live.report_progress(progress(value))
        assert await reader.next() == ReceivedEvent("tool.progress", about | {"progress": 3.0}, None)
        for value in range(4, 7):
            live.report_progress(progress(value, "copying"))
        await clock.advance(milliseconds=249)
        assert reader.events.empty()
        await clock.advance(milliseconds=1)
        assert (await reader.next()).data == about | {"progress": 6.0, "message": "copying"}
        async with listening(hub) as late:
            assert (await late.next()).data == about | {"progress": 6.0, "message": "copying"}

        live.report_progress(progress(7))
        live.end_progress("ada")  # nothing is told about a call that has ended
        live.report_progress(progress(1, agent="bob", call="c2"))
        await clock.advance(milliseconds=250)
        assert (await reader.next()).data["agent"] == "bob"
        live.end_progress("bob")
        assert live.progress == ()


async def test_a_message_names_the_draft_it_replaces(hub: Hub, society: Society) -> None:
    async with listening(hub) as reader:
        society.live.append("ada", "d1", "Hi")
        receipt = await society.bus.send(sender="ada", to=PERSON, payload={"text": "Hi"}, client_id="x")
        society.live.finish("d1", "stored", [receipt.message_id])
        again = await reader.next("draft.ended")
        received = await reader.next("message.created")
    assert again.data["messages"] == [received.data["message"]["id"]] and received.data["draftId"] == "d1"


async def test_an_idle_stream_is_pinged_every_fifteen_seconds(hub: Hub, clock: FakeClock) -> None:
    async with listening(hub) as reader:
        for pings in (1, 2, 3):
            await clock.advance(seconds=15)
            await until(lambda pings=pings: reader.comments == pings)  # type: ignore[misc]
        await clock.advance(seconds=14)
        assert reader.comments == 3


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(scaled_timeout(10)):
        while not happened():
            await asyncio.sleep(0)


async def test_a_client_that_does_not_read_is_dropped_and_delays_no_other(society: Society, clock: FakeClock) -> None:
    hub, stalled = Hub(society, society.live, clock, max_buffered_events=5), StreamReader()
    async with listening(hub) as reader, listening(hub, None, stalled):
        stalled.stuck = asyncio.Event()
        for n in range(20):  # one by one: a client that reads is never five events behind
            sent = await send(society, f"m{n}")
            assert (await reader.next("message.created")).data["message"]["id"] == sent
        await until(lambda: len(hub) == 1)
    await hub.shut_down(0)


async def test_a_client_that_reads_is_not_dropped_for_one_large_message(society: Society, clock: FakeClock) -> None:
    hub = Hub(society, society.live, clock, max_buffered_bytes=1000)
    async with listening(hub) as reader:
        sent = await send(society, "x" * 5000)
        assert (await reader.next("message.created")).data["message"]["id"] == sent
    await hub.shut_down(0)


async def test_a_client_that_cannot_be_written_to_is_dropped_without_new_events(
    hub: Hub, society: Society, clock: FakeClock
) -> None:
    dead = StreamReader()
    dead.stuck = asyncio.Event()
    async with listening(hub, None, dead):
        await until(lambda: len(hub) == 1)
        async with listening(hub) as reader:
            await clock.advance(seconds=30)
            await until(lambda: len(hub) == 1)
            sent = await send(society, "are you there?")
            assert (await reader.next("message.created")).data["message"]["id"] == sent


async def test_a_stop_sends_shutdown_to_every_client_and_ends_the_streams(hub: Hub) -> None:
    reader = StreamReader()
    task = asyncio.create_task(hub.serve(reader.write, None))
    await reader.next("hello")
    await hub.shut_down(2)
    await task
    assert (await reader.next("shutdown")).data == {"graceful": True, "delayedFlushed": 2}


async def test_an_event_about_a_deleted_message_is_marked_as_gone(hub: Hub, society: Society) -> None:
    position = f"{hub.epoch}.{await society.store.last_event()}"
    deleted = (await society.send(to="bob", text="x")).message_id
    await society.store.terminate("bob")
    await society.store.delete_dead_letter(deleted)
    async with listening(hub, position, reader := StreamReader()):
        received = await reader.next("message.created")
    assert received.data["id"] == deleted and received.data["gone"]


async def test_changes_of_states_queues_questions_and_delays_have_events(hub: Hub, society: Society) -> None:
    async with listening(hub) as reader:
        await society.pause("ada")
        received = await reader.next("agent.state")
        assert (received.data["id"], received.data["state"]) == ("ada", "paused")
        later = await society.send(to="ada", text="a long story", delay_ms=5000)
        assert (await reader.next("delayed.scheduled")).data["preview"] == "a long story"
        await society.bus.withdraw(later.message_id)
        assert (await reader.next("delayed.withdrawn")).data["message"]["state"] == "withdrawn"
        asked = await society.bus.send(sender="ada", to=PERSON, payload={"text": "?"}, quick_replies=["A", "B"])
        await society.send(to="ada", text="B", in_reply_to=asked.message_id, option=1)
        changed = await reader.next("quick_replies.changed")
        assert (changed.data["messageId"], changed.data["answer"]["option"]) == (asked.message_id, 1)
        await society.store.mark_read("ada", asked.message_id)
        society.bus.notify()
        assert (await reader.next("read")).data["thread"] == "ada"
        (waiting,) = await society.waiting("ada")
        await society.bus.withdraw(waiting.id)
        queue = await reader.next("queue.changed")
        assert (queue.data["agent"], queue.data["items"]) == ("ada", [])


async def test_events_of_a_delayed_message_have_sender_recipient_due_time_and_outcome(
    hub: Hub, society: Society, clock: FakeClock
) -> None:
    async with listening(hub) as reader:
        await society.bus.send(sender="ada", to="user", payload={"text": "tea"}, delay_ms=60_000)
        scheduled = (await reader.next("delayed.scheduled")).data
        await clock.advance(minutes=1)
        delivered = (await reader.next("delayed.delivered")).data

    about = {"from": "ada", "to": "user", "deliverAt": "2030-01-01T00:01:00.000Z", "preview": "tea", "early": False}
    assert scheduled.items() >= (about | {"deliveredAt": None}).items()
    assert delivered.items() >= (about | {"deliveredAt": "2030-01-01T00:01:00.000Z"}).items()
