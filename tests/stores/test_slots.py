"""Slots of a service: the limit holds for all processes together, and each process gets its share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from coterie.clock import SystemClock
from coterie.llm.concurrency import MAX_PERSON_REQUESTS_IN_A_ROW, ServiceQueue, ServiceQueues
from coterie.slot_sharing import OtherProcess, SlotGrant, divide_slots
from coterie.stores.postgres import PostgresStore
from coterie.testing import FakeClock
from tests.engines import Postgres

from .workers import TIMEOUT_SECONDS

LEASE = timedelta(seconds=2)
Opener = Callable[[], Awaitable[PostgresStore]]


@pytest.mark.parametrize(
    ("limit", "keeps", "waiting", "others", "granted"),
    [
        (3, 0, 5, [], 3),
        (3, 0, 5, [(1, 0)], 2),
        (3, 3, 2, [], 0),
        (4, 2, 5, [(0, 5)], 0),  # the two free slots are for the other process
        (4, 1, 5, [(1, 5)], 1),  # both have the same: the process that asks first
        (4, 1, 5, [(0, 1)], 2),  # one is for the other process, which wants no more
        (1, 0, 1, [(0, 1)], 1),
        (2, 0, 1, [(3, 0)], 0),  # the limit was lowered
    ],
)
def test_a_free_slot_is_for_the_process_with_the_fewest(
    limit: int, keeps: int, waiting: int, others: list[tuple[int, int]], granted: int
) -> None:
    assert divide_slots(limit, keeps, waiting, [OtherProcess(*one) for one in others]).granted == granted


@pytest.mark.parametrize(
    ("keeps", "urgent", "other", "granted"),
    [
        (0, 0, OtherProcess(3, 1, urgent=1), 0),  # the person's request goes first, though that process has more slots
        (0, 1, OtherProcess(3, 1, urgent=1), 1),  # both have one: the process with fewer slots
        (3, 1, OtherProcess(0, 5), 1),
        (0, 0, OtherProcess(3, 1), 1),
    ],
)
def test_a_free_slot_is_for_the_persons_request_first(
    keeps: int, urgent: int, other: OtherProcess, granted: int
) -> None:
    assert divide_slots(4, keeps, 1, [other], urgent=urgent).granted == granted


def test_a_process_that_gives_its_slot_back_does_not_take_it_again_while_another_waits() -> None:
    assert divide_slots(1, 0, 9, [OtherProcess(0, 1)], releases_slot=True) == SlotGrant(0, others_wait=True)
    assert divide_slots(1, 0, 9, [OtherProcess(0, 0)], releases_slot=True) == SlotGrant(1)


@pytest.fixture
async def process(shared: Postgres, tmp_path: Path) -> AsyncIterator[Opener]:
    """Opens stores on one database, each like a separate process."""
    opened: list[PostgresStore] = []

    async def another() -> PostgresStore:
        store = await PostgresStore.open(shared.url(tmp_path), SystemClock(), lease=LEASE)
        opened.append(store)
        await _until(lambda: _has_processes(store, len(opened)))
        return store

    yield another
    await asyncio.gather(*(store.close() for store in opened))


async def _has_processes(store: PostgresStore, count: int) -> bool:
    """True if `count` processes have sent a heartbeat."""
    return len(await store.workers()) == count


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not await holds():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def _slot(queue: ServiceQueue, *, person: bool = False) -> AsyncIterator[None]:
    await queue.acquire(for_person=person)
    try:
        yield
    finally:
        queue.release()


class Model:
    """A fake model that counts requests that run at the same time."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.served: Counter[int] = Counter()
        self.has_served = asyncio.Event()

    async def ask(self, queue: ServiceQueue, who: int) -> None:
        async with _slot(queue):
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.02)
            self.running -= 1
            self.served[who] += 1
            self.has_served.set()


async def test_three_processes_keep_to_one_limit_and_none_of_them_starves(process: Opener) -> None:
    queues = [ServiceQueues(SystemClock(), await process()) for _ in range(3)]
    model = Model()
    # The first process starts earlier and has four times as many requests.
    asking = [asyncio.ensure_future(model.ask(queues[0].queue_for("main", 3), 0)) for _ in range(40)]
    await model.has_served.wait()
    late = [
        asyncio.ensure_future(model.ask(each.queue_for("main", 3), who))
        for who in (1, 2)
        for each in [queues[who]] * 10
    ]
    await asyncio.gather(*late)
    served = model.served[0]
    await asyncio.gather(*asking)
    assert model.most == 3
    assert served < 40, "the others did not wait for the first to be done"
    assert model.served == {0: 40, 1: 10, 2: 10}
    await asyncio.gather(*(each.close() for each in queues))


async def test_the_only_slot_alternates_between_processes(process: Opener) -> None:
    queues = [ServiceQueues(SystemClock(), await process()) for _ in range(2)]
    model = Model()
    await asyncio.gather(
        *(model.ask(each.queue_for("main", 1), who) for who, each in enumerate(queues) for _ in range(5))
    )
    assert (model.most, model.served) == (1, {0: 5, 1: 5})
    await asyncio.gather(*(each.close() for each in queues))


async def test_each_service_has_its_own_slots(process: Opener) -> None:
    one, other = await process(), await process()
    assert await one.request_slots("main", 1, 0, 1) == SlotGrant(1)
    assert await other.request_slots("spare", 1, 0, 1) == SlotGrant(1)
    assert await other.request_slots("main", 1, 0, 1) == SlotGrant(0)
    assert await one.request_slots("main", 1, 1, 0) == SlotGrant(0, others_wait=True)


async def test_the_slots_of_a_dead_process_are_free_after_its_lease(process: Opener) -> None:
    dead, survivor = await process(), await process()
    assert await dead.request_slots("main", 2, 0, 2) == SlotGrant(2)
    assert await survivor.request_slots("main", 2, 0, 2) == SlotGrant(0)
    assert dead._heartbeat
    dead._heartbeat._closing.set()  # as after a kill: no more heartbeats, no deregistration
    dead._heartbeat._deregister = dead._heartbeat._disconnect  # type: ignore[method-assign]
    dead._heartbeat._due.set()
    began = asyncio.get_running_loop().time()
    await _until(lambda: _granted(survivor))
    assert asyncio.get_running_loop().time() - began < LEASE.total_seconds() + 2


async def _granted(survivor: PostgresStore) -> bool:
    return (await survivor.request_slots("main", 2, 0, 2)).granted == 2


async def test_a_process_that_stops_cleanly_gives_its_slots_back_at_once(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    survivor = await process()
    leaving = await PostgresStore.open(shared.url(tmp_path), SystemClock(), lease=LEASE)
    await _until(lambda: _has_processes(survivor, 2))
    assert await leaving.request_slots("main", 2, 0, 2) == SlotGrant(2)
    await leaving.close()
    assert await survivor.request_slots("main", 2, 0, 2) == SlotGrant(2)


async def test_a_cancelled_caller_neither_holds_nor_waits_for_a_slot(process: Opener) -> None:
    queues, other = ServiceQueues(SystemClock(), await process()), await process()
    queue, inside, leave = queues.queue_for("main", 1), asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with _slot(queue):
            inside.set()
            await leave.wait()

    holding = asyncio.create_task(hold())
    await inside.wait()
    waiting = asyncio.create_task(hold())
    await _until(lambda: _sees_waiting(other))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await _until(lambda: _sees_waiting(other, False))
    leave.set()
    await holding
    async with asyncio.timeout(TIMEOUT_SECONDS), _slot(queue):
        assert queue.running == 1
    await queues.close()


# One queue, without a database


class Recorder:
    """A slot store that grants what the test sets and records the requests."""

    def __init__(self) -> None:
        self.grants = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.requests: list[tuple[int, int, int]] = []
        """Slots held, requests waiting, and how many of these are for the person."""

    def subscribe_slots(self, callback: Callable[[], None]) -> None:
        """No other process exists."""

    async def request_slots(self, service: str, limit: int, held: int, waiting: int, urgent: int = 0) -> SlotGrant:
        self.requests.append((held, waiting, urgent))
        await self.answers.wait()
        granted, self.grants = min(self.grants, waiting), 0
        return SlotGrant(granted, others_wait=True)


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_cancelled_caller_is_reported_to_other_processes_at_once() -> None:
    slots = Recorder()
    queues = ServiceQueues(FakeClock(), slots)
    queue = queues.queue_for("main", 1)
    waiting = [asyncio.create_task(_hold(queue, asyncio.Event(), person=person)) for person in (False, True)]
    await _settle()
    assert slots.requests[-1] == (0, 2, 1)

    for count, one in zip((1, 0), reversed(waiting), strict=True):
        one.cancel()
        await _settle()
        assert slots.requests[-1] == (0, count, 0)
        assert queue.waiting == count
    await queues.close()


async def test_a_slot_granted_to_a_caller_cancelled_at_that_moment_is_not_lost() -> None:
    slots = Recorder()
    queues = ServiceQueues(FakeClock(), slots)
    queue, leave = queues.queue_for("main", 1), asyncio.Event()
    gone = asyncio.create_task(_hold(queue, leave))
    await _settle()
    slots.grants = 1
    queue.wake()
    while queue.running == 0:
        await asyncio.sleep(0)
    gone.cancel()  # the slot is granted, but the caller has not run since
    await _settle()
    assert (gone.cancelled(), queue.running, slots.requests[-1]) == (True, 0, (0, 0, 0))
    await queues.close()


async def test_a_slot_released_during_a_database_request_goes_back_if_another_process_waits() -> None:
    slots = Recorder()
    queues = ServiceQueues(FakeClock(), slots)
    queue, leave = queues.queue_for("main", 1), asyncio.Event()
    slots.grants = 1
    requests = [asyncio.create_task(_hold(queue, leave)) for _ in range(2)]
    await _settle()
    assert (queue.running, slots.requests[-1]) == (1, (0, 2, 0))

    slots.answers.clear()
    queue.wake()
    await _settle()
    leave.set()  # the slot is released before the database answers
    await _settle()
    slots.answers.set()
    await _settle()
    assert (queue.running, slots.requests[-2:]) == (0, [(1, 1, 0), (0, 1, 0)])
    for one in requests:
        one.cancel()
    await queues.close()


async def _hold(queue: ServiceQueue, leave: asyncio.Event, *, person: bool = False) -> None:
    async with _slot(queue, person=person):
        await leave.wait()


async def _served(order: list[str], queue: ServiceQueue, name: str, *, person: bool = False) -> None:
    async with _slot(queue, person=person):
        order.append(name)
        await asyncio.sleep(0)


async def test_the_persons_requests_go_first_and_agents_get_every_fifth_slot() -> None:
    queue, order, leave = ServiceQueues(FakeClock()).queue_for("main", 1), list[str](), asyncio.Event()
    holding = asyncio.create_task(_hold(queue, leave))
    await _settle()
    agents = [asyncio.create_task(_served(order, queue, f"agent {n}")) for n in range(3)]
    await _settle()
    persons = [asyncio.create_task(_served(order, queue, f"person {n}", person=True)) for n in range(9)]
    await _settle()
    leave.set()
    await asyncio.gather(holding, *agents, *persons)

    assert MAX_PERSON_REQUESTS_IN_A_ROW == 4
    first, second, last = order[:5], order[5:10], order[10:]
    assert first == ["person 0", "person 1", "person 2", "person 3", "agent 0"]
    assert second == ["person 4", "person 5", "person 6", "person 7", "agent 1"]
    assert last == ["person 8", "agent 2"]


async def test_a_raised_limit_admits_waiting_callers() -> None:
    queues, leave = ServiceQueues(FakeClock()), asyncio.Event()
    queue = queues.queue_for("main", 1)
    holding = [asyncio.create_task(_hold(queue, leave)) for _ in range(3)]
    await _settle()
    assert (queue.running, queue.waiting) == (1, 2)
    queues.queue_for("main", 2)
    await _settle()
    assert (queue.running, queue.waiting) == (2, 1)
    leave.set()
    await asyncio.gather(*holding)


async def test_cancelled_callers_release_exactly_the_slots_they_held() -> None:
    queue, leave = ServiceQueues(FakeClock()).queue_for("main", 2), asyncio.Event()
    tasks = [asyncio.create_task(_hold(queue, leave, person=n % 2 == 0)) for n in range(9)]
    await _settle()
    for one in tasks[:7]:  # two hold a slot, five wait
        one.cancel()
    await _settle()
    assert (queue.running, queue.waiting) == (2, 0)
    leave.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (queue.running, queue.waiting) == (0, 0)


async def _sees_waiting(other: PostgresStore, expected: bool = True) -> bool:
    """True if `other`, which has and requests no slots, sees that another process waits."""
    return (await other.request_slots("main", 1, 0, 0)).others_wait is expected
