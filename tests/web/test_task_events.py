"""Events `task.changed`: at most four a second for each task, and the last state always arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coterie.clock import SystemClock
from coterie.society import Society
from coterie.testing import FakeClock, Says
from coterie.testing.clock import START
from coterie.web.sse import Hub
from tests.agent.stage import stage
from tests.faults.harness import scaled_timeout

from .test_stream import StreamReader, listening


@pytest.fixture
async def hub(society: Society, clock: FakeClock) -> AsyncIterator[Hub]:
    hub = Hub(society, society.live, clock)
    yield hub
    await hub.shut_down(0)


async def add_message(society: Society, task: str) -> None:
    """Change a task that has been taken up: an agent sends a message for it."""
    await society.bus.send(sender="ada", to="bob", payload={"text": "more"}, cause=task)


async def summaries(reader: StreamReader, clock: FakeClock, **by: float) -> list[dict[str, Any]]:
    """Let the time pass; return the summaries that arrived meanwhile."""
    await clock.advance(**by)
    found = []
    while not reader.events.empty():
        event = reader.events.get_nowait()
        if event.kind == "task.changed":
            assert event.id is None
            found.append(event.data)
    return found


async def next_summary(reader: StreamReader, clock: FakeClock) -> dict[str, Any]:
    """Let the time pass until a summary arrives."""
    async with asyncio.timeout(scaled_timeout(10)):
        while not (found := await summaries(reader, clock, milliseconds=50)):
            await asyncio.sleep(0)  # the hub reads the log in a task that the clock does not know
    (one,) = found
    return one


async def test_a_task_that_starts_and_each_later_state_are_sent(hub: Hub, society: Society, clock: FakeClock) -> None:
    async with listening(hub) as reader:
        sent = await society.send(to="ada", text="go")
        started = await next_summary(reader, clock)
        assert (started["id"], started["state"], started["messages"]) == (sent.task, "working", 1)
        assert started["budget"]["turns"] == 100 and "prev" not in started
        await society.stop_task(sent.task)
        stopped = await next_summary(reader, clock)
        assert (stopped["id"], stopped["state"]) == (sent.task, "stopped")


async def test_a_busy_task_is_sent_at_most_four_times_a_second_with_its_last_state(
    hub: Hub, society: Society, clock: FakeClock
) -> None:
    async with listening(hub) as reader:
        sent = await society.send(to="ada", text="go", delay_ms=1)
        other = await society.send(to="bob", text="go")
        received, start = list[dict[str, Any]](), clock.now()
        for _ in range(100):
            await add_message(society, sent.task)
            received += await summaries(reader, clock, milliseconds=20)
        async with asyncio.timeout(scaled_timeout(10)):
            while not received or received[-1]["messages"] != 101:
                received += await summaries(reader, clock, milliseconds=20)
                await asyncio.sleep(0)
        counts = [one["messages"] for one in received if one["id"] == sent.task]
        assert 2 <= len(counts) <= (clock.now() - start).total_seconds() * 4 + 1 and counts == sorted(counts)
        assert [one["id"] for one in received].count(other.task) == 1


async def test_a_task_whose_first_message_is_withdrawn_or_taken_later_is_sent_again(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        hub = Hub(here.society, here.society.live, SystemClock())
        await here.society.pause_all()
        reader = StreamReader()
        async with listening(hub, reader=reader):
            kept, withdrawn = await here.say("one", to="ada"), await here.say("two", to="bob")
            found: dict[str, list[tuple[str, int]]] = {kept: [], withdrawn: []}
            while not all(found.values()):
                data = (await reader.next("task.changed")).data
                found[data["id"]].append((data["state"], data["active"]))
            assert found == {kept: [("working", 0)], withdrawn: [("working", 0)]}
            await here.society.bus.withdraw(withdrawn)
            data = (await reader.next("task.changed")).data
            assert (data["id"], data["state"]) == (withdrawn, "done")
            held = asyncio.Event()
            here.server.script(Says("ok", gate=held))
            await here.society.resume_all()
            data = (await reader.next("task.changed")).data
            assert (data["id"], data["state"], data["activeAgents"]) == (kept, "working", ["ada"])
            held.set()
            while data["state"] != "done":
                data = (await reader.next("task.changed")).data
        await hub.shut_down(0)


@pytest.mark.slow
async def test_a_task_of_a_delayed_message_is_sent_when_it_starts(hub: Hub, society: Society, clock: FakeClock) -> None:
    async with listening(hub) as reader:
        sent = await society.send(to="ada", text="later", delay_ms=3_600_000)
        assert await summaries(reader, clock, minutes=59) == []
        await clock.advance(minutes=1)
        started = await next_summary(reader, clock)
        assert clock.now() >= START + timedelta(hours=1)
        assert (started["id"], started["state"]) == (sent.task, "working")


async def test_a_client_that_comes_back_gets_the_state_of_each_task_that_changed(
    hub: Hub, society: Society, clock: FakeClock
) -> None:
    first, second = await society.send(to="ada", text="one", delay_ms=1), await society.send(to="ada", text="two")
    unchanged = await society.send(to="bob", text="three")
    await clock.advance(seconds=5)
    await society.send(to="bob", text="four")
    await clock.advance(seconds=5)
    position = f"{hub.epoch}.{await society.store.last_event()}"
    await clock.advance(seconds=5)
    await add_message(society, first.task)
    await society.stop_task(second.task)
    reader = StreamReader()
    async with listening(hub, position, reader):
        states = {one["id"]: one["state"] for one in await summaries(reader, clock, milliseconds=0)}
    assert states[first.task] == "working" and states[second.task] == "stopped" and unchanged.task not in states


async def test_a_client_that_was_cut_off_before_the_last_state_gets_it_when_it_comes_back(
    hub: Hub, society: Society, clock: FakeClock
) -> None:
    async with listening(hub) as reader:
        sent = await society.send(to="ada", text="go")
        await next_summary(reader, clock)
        await society.stop_task(sent.task)
        await society.send(to="bob", text="afterwards")
        last = await reader.next("message.created")  # the summary of the stop is not sent yet
    assert last.data["message"]["to"] == "bob"
    again = StreamReader()
    async with listening(hub, last.id, again):
        states = {one["id"]: one["state"] for one in await summaries(again, clock, milliseconds=0)}
    assert states[sent.task] == "stopped"


async def test_changes_of_tasks_leave_no_gap_between_events(hub: Hub, society: Society) -> None:
    async with listening(hub) as reader:
        sent = await society.send(to="ada", text="go")
        created = await reader.next("message.created")
        await add_message(society, sent.task)
        await society.stop_task(sent.task)
        seen = int((created.id or "").rpartition(".")[2])
        for _ in range(2):
            event = await reader.next()
            while event.id is None:
                event = await reader.next()
            assert event.data["prev"] <= seen
            seen = int(event.id.rpartition(".")[2])
