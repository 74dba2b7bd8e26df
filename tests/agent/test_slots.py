"""Slots of turns: limits, order of waiting turns, and release on cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from coterie.agent.scheduler import Slots, TurnSlot


async def start(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task and let it run to its first wait."""
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0)
    return task


def test_some_slots_are_reserved_for_the_person() -> None:
    slots = Slots(2, extra_for_person=1)
    assert slots.try_acquire(9, for_person=False) == 2
    assert slots.try_acquire(9, for_person=True) == 1
    assert slots.try_acquire(9, for_person=True) == 0
    slots.release(1)
    assert slots.try_acquire(9, for_person=False) == 0, "two of three slots are in use"
    assert slots.try_acquire(9, for_person=True) == 1


def test_a_closed_limiter_gives_no_slot_to_new_turns() -> None:
    slots = Slots(1, extra_for_person=0)
    slots.close()
    assert slots.try_acquire(1, for_person=True) == 0


async def test_a_running_turn_gets_a_slot_before_a_new_turn() -> None:
    slots = Slots(1, extra_for_person=0)
    slots.try_acquire(1, for_person=False)
    waiting = await start(slots.acquire(for_person=False))
    slots.release(1)
    assert slots.try_acquire(1, for_person=False) == 0
    await waiting
    slots.close()
    late = await start(slots.acquire(for_person=False))
    await asyncio.to_thread(slots.release, 1)
    await late


async def test_turns_for_the_person_get_slots_first() -> None:
    slots, order = Slots(1, extra_for_person=0), list[str]()
    slots.try_acquire(1, for_person=False)

    async def work(name: str, person: bool) -> None:
        await slots.acquire(for_person=person)
        order.append(name)
        slots.release(1)

    tasks = [await start(work(name, name == "person")) for name in ("a", "b", "person")]
    slots.release(1)
    await asyncio.gather(*tasks)
    assert order == ["person", "a", "b"]


@pytest.mark.parametrize("granted", [False, True])
async def test_a_turn_cancelled_while_it_waits_holds_no_slot(granted: bool) -> None:
    slots = Slots(1, extra_for_person=0)
    slots.try_acquire(1, for_person=False)
    slot = TurnSlot(slots, lambda: None)
    slot.release()
    slots.try_acquire(1, for_person=False)
    waiting = await start(slot.acquire(for_person=False))
    if granted:
        slots.release(1)
        await asyncio.sleep(0)  # a callback of the loop grants it
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    slot.release()
    if not granted:
        slots.release(1)
    assert slots.available(for_person=False) == 1


async def test_a_slot_is_released_once() -> None:
    slots, releases = Slots(1, extra_for_person=0), list[int]()
    slots.try_acquire(1, for_person=False)
    slot = TurnSlot(slots, lambda: releases.append(1))
    slot.release()
    slot.release()
    assert (slots.available(for_person=False), releases) == (1, [1])
