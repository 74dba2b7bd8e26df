"""The event stream: what a client is told, where it goes on, and what becomes of one that does not listen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from coterie.messages import PERSON
from coterie.society import Society
from coterie.store import Retention
from coterie.testing import FakeClock
from coterie.web import sse
from coterie.web.sse import Hub
from tests.faults.harness import patience


class ReceivedEvent(NamedTuple):
    kind: str
    data: Any
    id: str | None


class StreamReader:
    """One client, without a network in between."""

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
        """The next event, of one of these kinds."""
        async with asyncio.timeout(patience(10)):
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
    """A client that has caught up."""
    reader = reader or StreamReader()
    task = asyncio.create_task(hub.serve(reader.write, last))
    if reader.stuck is None:
        await reader.next("hello")
        while not any(client.is_live for client in hub.clients if client._task is task):
            await asyncio.sleep(0)
    try:
        yield reader
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def say(society: Society, text: str) -> str:
    return (await society.send(to="ada", text=text)).message_id


async def test_a_client_is_told_what_happens_with_its_place_in_the_log(hub: Hub, society: Society) -> None:
    start = await society.store.last_event()
    async with listening(hub) as reader:
        sent = await say(society, "hello")
        told = await reader.next("message.created")

    assert told.data["message"]["id"] == sent and told.data["message"]["rendered"]
    assert told.id == f"{hub.epoch}.{start + 1}" and told.data["prev"] == start


async def test_hello_comes_first_and_says_where_the_stream_begins(hub: Hub, society: Society) -> None:
    reader = StreamReader()
    task = asyncio.create_task(hub.serve(reader.write, None))
    hello = await reader.next()
    task.cancel()
    seq = await society.store.last_event()
    assert hello.kind == "hello" and hello.id == f"{hub.epoch}.{seq}"
    assert hello.data == {
        "epoch": hub.epoch, "seq": seq, "serverTime": "2030-01-01T00:00:00.000Z", "pingMs": 15000,
    }  # fmt: skip


async def test_who_comes_back_gets_what_was_missed_in_order_and_nothing_twice(hub: Hub, society: Society) -> None:
    place = f"{hub.epoch}.{await society.store.last_event()}"
    missed = [await say(society, f"m{n}") for n in range(150)]
    reader = StreamReader()
    async with listening(hub, place, reader):
        later = await say(society, "later")
        told = [await reader.next("message.created") for _ in range(151)]

    assert [one.data["message"]["id"] for one in told] == [*missed, later]
    seqs = [int((one.id or "").rpartition(".")[2]) for one in told]
    assert [one.data["prev"] for one in told] == [int(place.rpartition(".")[2]), *seqs[:-1]]


async def test_nothing_is_lost_between_snapshot_and_stream(hub: Hub, society: Society) -> None:
    seen = await society.store.snapshot()
    between = await say(society, "between")
    async with listening(hub, f"{hub.epoch}.{seen.seq}") as reader:
        assert (await reader.next("message.created")).data["message"]["id"] == between


@pytest.mark.parametrize(
    ("last", "reason"),
    [("another.3", "unknown_epoch"), ("{epoch}.x", "unknown_epoch"), ("{epoch}.999999", "ahead_of_log")],
)
async def test_a_place_nobody_knows_is_a_reset_and_then_life_goes_on(
    hub: Hub, society: Society, last: str, reason: str
) -> None:
    async with listening(hub, last.format(epoch=hub.epoch)) as reader:
        assert (await reader.next()).data == {"reason": reason}
        sent = await say(society, "on")
        assert (await reader.next("message.created")).data["message"]["id"] == sent


async def test_a_place_older_than_the_log_is_a_reset(hub: Hub, society: Society, clock: FakeClock) -> None:
    place = f"{hub.epoch}.1"
    await say(society, "old")
    await clock.jump(days=8)
    await say(society, "new")
    await society.store.prune(Retention())
    async with listening(hub, place) as reader:
        told = await reader.next()
        assert (told.kind, told.data) == ("reset", {"reason": "too_old"})


async def test_pieces_of_a_reply_are_gathered_and_carry_no_id(hub: Hub, society: Society, clock: FakeClock) -> None:
    live = society.live
    async with listening(hub) as reader, listening(hub) as other:
        for piece in ("One ", "two ", "three"):
            live.append("ada", "d1", piece)
        await clock.advance(milliseconds=45)
        live.append("ada", "d1", " four")
        live.finish("d1", "stored", ["m1"])

        told = [await reader.next() for _ in range(4)]
        assert told == [await other.next() for _ in range(4)]

    about = {"draftId": "d1", "agent": "ada"}
    assert told == [
        ReceivedEvent("draft.started", about, None),
        ReceivedEvent("draft.delta", about | {"from": 0, "delta": "One two three"}, None),
        ReceivedEvent("draft.delta", about | {"from": 13, "delta": " four"}, None),
        ReceivedEvent("draft.ended", about | {"outcome": "stored", "messages": ["m1"]}, None),
    ]


async def test_who_comes_in_the_middle_of_a_reply_gets_it_so_far_and_then_the_rest(
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


async def test_a_message_names_the_draft_it_replaces(hub: Hub, society: Society) -> None:
    async with listening(hub) as reader:
        society.live.append("ada", "d1", "Hi")
        receipt = await society.bus.send(sender="ada", to=PERSON, payload={"text": "Hi"}, client_id="x")
        society.live.finish("d1", "stored", [receipt.message_id])
        again = await reader.next("draft.ended")
        told = await reader.next("message.created")
    assert again.data["messages"] == [told.data["message"]["id"]] and told.data["draftId"] == "d1"


async def test_a_silent_stream_is_pinged_every_fifteen_seconds(hub: Hub, clock: FakeClock) -> None:
    async with listening(hub) as reader:
        for pings in (1, 2, 3):
            await clock.advance(seconds=15)
            await until(lambda pings=pings: reader.comments == pings)  # type: ignore[misc]
        await clock.advance(seconds=14)
        assert reader.comments == 3


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(patience(10)):
        while not happened():
            await asyncio.sleep(0)


async def test_one_that_takes_nothing_is_let_go_and_holds_nobody_up(
    hub: Hub, society: Society, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "MAX_BUFFERED_EVENTS", 5)
    stalled = StreamReader()
    async with listening(hub) as reader, listening(hub, None, stalled):
        stalled.stuck = asyncio.Event()
        for n in range(20):  # one by one: who listens is never five behind
            sent = await say(society, f"m{n}")
            assert (await reader.next("message.created")).data["message"]["id"] == sent
        await until(lambda: len(hub) == 1)


async def test_a_big_message_does_not_let_go_of_who_reads(
    hub: Hub, society: Society, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "MAX_BUFFERED_BYTES", 1000)
    async with listening(hub) as reader:
        sent = await say(society, "x" * 5000)
        assert (await reader.next("message.created")).data["message"]["id"] == sent


async def test_a_dead_socket_ends_by_itself_though_nothing_happens(
    hub: Hub, society: Society, clock: FakeClock
) -> None:
    dead = StreamReader()
    dead.stuck = asyncio.Event()
    async with listening(hub, None, dead):
        await until(lambda: len(hub) == 1)
        async with listening(hub) as reader:
            await clock.advance(seconds=30)
            await until(lambda: len(hub) == 1)
            sent = await say(society, "are you there?")
            assert (await reader.next("message.created")).data["message"]["id"] == sent


async def test_a_stop_is_told_to_everybody_and_ends_their_streams(hub: Hub) -> None:
    reader = StreamReader()
    task = asyncio.create_task(hub.serve(reader.write, None))
    await reader.next("hello")
    await hub.shut_down(2)
    await task
    assert (await reader.next("shutdown")).data == {"graceful": True, "delayedFlushed": 2}


async def test_what_is_no_longer_there_is_said_to_be_gone(hub: Hub, society: Society) -> None:
    place = f"{hub.epoch}.{await society.store.last_event()}"
    letter = (await society.send(to="bob", text="x")).message_id
    await society.store.terminate("bob")
    await society.store.delete_dead_letter(letter)
    async with listening(hub, place, reader := StreamReader()):
        told = await reader.next("message.created")
    assert told.data["id"] == letter and told.data["gone"]


async def test_states_queues_questions_marks_and_delays_are_told(hub: Hub, society: Society) -> None:
    async with listening(hub) as reader:
        await society.pause("ada")
        told = await reader.next("agent.state")
        assert (told.data["id"], told.data["state"]) == ("ada", "paused")
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


async def test_a_delayed_message_is_told_with_who_to_whom_and_when_and_how_it_came_out(
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
