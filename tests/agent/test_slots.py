"""Slots of turns: counted across threads, taken in order, given back whatever happens to who waits for one."""

from __future__ import annotations

import asyncio

import pytest

from coterie.agent.scheduler import Slots, TurnSlot


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_agents_leave_some_slots_to_the_person() -> None:
    slots = Slots(2, extra_for_person=1)
    assert slots.try_acquire(9, for_person=False) == 2
    assert slots.try_acquire(9, for_person=True) == 1
    assert slots.try_acquire(9, for_person=True) == 0
    slots.release(1)
    assert slots.try_acquire(9, for_person=False) == 0, "two of three are still in use"
    assert slots.try_acquire(9, for_person=True) == 1


def test_no_turn_begins_after_closing_but_slots_can_be_given_back() -> None:
    slots = Slots(1, extra_for_person=0)
    slots.close()
    assert slots.try_acquire(1, for_person=True) == 0


async def test_a_turn_under_way_gets_a_slot_before_one_that_has_yet_to_begin() -> None:
    slots = Slots(1, extra_for_person=0)
    slots.try_acquire(1, for_person=False)
    waiting = asyncio.create_task(slots.acquire(for_person=False))
    await settle()
    slots.release(1)
    assert slots.try_acquire(1, for_person=False) == 0
    await waiting
    slots.close()
    late = asyncio.create_task(slots.acquire(for_person=False))
    await settle()
    await asyncio.to_thread(slots.release, 1)
    await late


async def test_the_persons_turn_goes_before_those_of_agents() -> None:
    slots, order = Slots(1, extra_for_person=0), list[str]()
    slots.try_acquire(1, for_person=False)

    async def work(name: str, person: bool) -> None:
        await slots.acquire(for_person=person)
        order.append(name)
        slots.release(1)

    tasks = [asyncio.create_task(work(name, name == "person")) for name in ("a", "b", "person")]
    await settle()
    slots.release(1)
    await asyncio.gather(*tasks)
    assert order == ["person", "a", "b"]


@pytest.mark.parametrize("granted", [False, True])
async def test_a_turn_that_is_cancelled_while_it_waits_holds_nothing(granted: bool) -> None:
    slots = Slots(1, extra_for_person=0)
    slots.try_acquire(1, for_person=False)
    slot = TurnSlot(slots, lambda: None)
    slot.release()
    slots.try_acquire(1, for_person=False)
    waiting = asyncio.create_task(slot.acquire(for_person=False))
    await asyncio.sleep(0)
    if granted:
        slots.release(1)
        await asyncio.sleep(0)  # it is granted by a callback of the loop
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    slot.release()
    if not granted:
        slots.release(1)
    assert slots.available(for_person=False) == 1


async def test_a_slot_is_given_back_once() -> None:
    slots, told = Slots(1, extra_for_person=0), list[int]()
    slots.try_acquire(1, for_person=False)
    slot = TurnSlot(slots, lambda: told.append(1))
    slot.release()
    slot.release()
    assert (slots.available(for_person=False), told) == (1, [1])
