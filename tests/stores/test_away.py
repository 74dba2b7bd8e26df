"""What happened since a moment, on both engines."""

from __future__ import annotations

from typing import cast

from coterie.bus import MessageBus
from coterie.store import Store, TaskStore
from coterie.testing import FakeClock


async def test_away_has_tasks_by_state_and_unread_messages_since_then(
    store: Store, bus: MessageBus, clock: FakeClock
) -> None:
    tasks = cast(TaskStore, store)

    async def withdrawn(text: str) -> str:
        sent = await bus.send(sender="user", to="ada", payload={"text": text})
        await bus.withdraw(sent.message_id)
        return sent.message_id

    await withdrawn("before")
    await bus.send(sender="ada", to="user", payload={"text": "before"})
    await clock.advance(hours=1)
    done = [await withdrawn(f"done {n}") for n in range(3)]
    question = await bus.send(sender="bob", to="user", payload={"text": "Tea?"}, quick_replies=["Yes"])
    first, asked = await store.message(done[0]), await store.message(question.message_id)
    assert first is not None and asked is not None

    away = await tasks.away(first.created_at, 2)
    assert [task.id for task in away.finished] == [done[2], done[1]]
    assert [task.id for task in away.waiting] == [question.message_id] and away.failed == []
    assert away.counts["done"] >= 3 and away.counts["waiting"] == 1 and away.unread["bob"] == 1
    later = await tasks.away(asked.created_at.replace(year=asked.created_at.year + 1), 2)
    assert (later.finished, later.waiting, later.counts, later.unread) == ([], [], {}, {})
