"""As many requests run at a model service as it allows, in all processes together, and each process gets its share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import pytest

from coterie.clock import SystemClock
from coterie.llm.places import Queue, Share, SharedPlaces, fair
from coterie.stores.postgres import PostgresStore
from tests.engines import Postgres

LEASE = timedelta(seconds=2)
Opener = Callable[[], Awaitable[PostgresStore]]


@pytest.mark.parametrize(
    ("limit", "keeps", "waiting", "others", "granted"),
    [
        (3, 0, 5, [], 3),
        (3, 0, 5, [(1, 0)], 2),
        (3, 3, 2, [], 0),
        (4, 2, 5, [(0, 5)], 0),  # the two that are left are the other's
        (4, 1, 5, [(1, 5)], 1),  # both have the same: whoever asks first
        (4, 1, 5, [(0, 1)], 2),  # one is the other's, who wants no more
        (1, 0, 1, [(0, 1)], 1),
        (2, 0, 1, [(3, 0)], 0),  # the limit was lowered
    ],
)
def test_a_free_place_is_for_whoever_has_the_fewest(
    limit: int, keeps: int, waiting: int, others: list[tuple[int, int]], granted: int
) -> None:
    assert fair(limit, keeps, waiting, others).granted == granted


@pytest.fixture
async def process(shared: Postgres, tmp_path: Path) -> AsyncIterator[Opener]:
    """One more store on the same database, as another process has it."""
    opened: list[PostgresStore] = []

    async def another() -> PostgresStore:
        store = await PostgresStore.open(shared.url(tmp_path), SystemClock(), lease=LEASE)
        opened.append(store)
        await _until(lambda: _known(store, len(opened)))
        return store

    yield another
    await asyncio.gather(*(store.close() for store in opened))


async def _known(store: PostgresStore, count: int) -> bool:
    """Whoever has given no sign of life yet is nobody."""
    return len(await store.workers()) == count


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await holds():
            await asyncio.sleep(0.01)


class Model:
    """Counts who is asking it."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.served: Counter[int] = Counter()
        self.has_served = asyncio.Event()

    async def ask(self, queue: Queue, who: int) -> None:
        async with queue:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.02)
            self.running -= 1
            self.served[who] += 1
            self.has_served.set()


async def test_three_processes_keep_to_one_limit_and_none_of_them_starves(process: Opener) -> None:
    places = [SharedPlaces(await process(), SystemClock()) for _ in range(3)]
    model = Model()
    # The first is there before the others, and has four times as much to ask.
    asking = [asyncio.ensure_future(model.ask(places[0].at("main", 3), 0)) for _ in range(40)]
    await model.has_served.wait()
    late = [asyncio.ensure_future(model.ask(each.at("main", 3), who)) for who in (1, 2) for each in [places[who]] * 10]
    await asyncio.gather(*late)
    served = model.served[0]
    await asyncio.gather(*asking)
    assert model.most == 3
    assert served < 40, "the others did not wait for the first to be done"
    assert model.served == {0: 40, 1: 10, 2: 10}
    await asyncio.gather(*(each.close() for each in places))


async def test_one_place_goes_round(process: Opener) -> None:
    places = [SharedPlaces(await process(), SystemClock()) for _ in range(2)]
    model = Model()
    await asyncio.gather(*(model.ask(each.at("main", 1), who) for who, each in enumerate(places) for _ in range(5)))
    assert (model.most, model.served) == (1, {0: 5, 1: 5})
    await asyncio.gather(*(each.close() for each in places))


async def test_places_of_one_service_are_not_those_of_another(process: Opener) -> None:
    one, other = await process(), await process()
    assert await one.share("main", 1, 0, 1) == Share(1)
    assert await other.share("spare", 1, 0, 1) == Share(1)
    assert await other.share("main", 1, 0, 1) == Share(0)
    assert await one.share("main", 1, 1, 0) == Share(0, wanted=True)


async def test_the_places_of_a_process_that_died_are_free_after_its_lease(process: Opener) -> None:
    dead, heir = await process(), await process()
    assert await dead.share("main", 2, 0, 2) == Share(2)
    assert await heir.share("main", 2, 0, 2) == Share(0)
    assert dead._leases
    dead._leases._ending.set()  # no more signs of life, and no farewell
    dead._leases._leave = dead._leases._hang_up  # type: ignore[method-assign]
    dead._leases._due.set()
    began = asyncio.get_running_loop().time()
    await _until(lambda: _granted(heir))
    assert asyncio.get_running_loop().time() - began < LEASE.total_seconds() + 2


async def _granted(heir: PostgresStore) -> bool:
    return (await heir.share("main", 2, 0, 2)).granted == 2


async def test_who_leaves_in_order_gives_its_places_back_at_once(
    process: Opener, shared: Postgres, tmp_path: Path
) -> None:
    heir = await process()
    leaving = await PostgresStore.open(shared.url(tmp_path), SystemClock(), lease=LEASE)
    await _until(lambda: _known(heir, 2))
    assert await leaving.share("main", 2, 0, 2) == Share(2)
    await leaving.close()
    assert await heir.share("main", 2, 0, 2) == Share(2)


async def test_a_caller_who_goes_away_leaves_no_place_taken_and_waits_for_none(process: Opener) -> None:
    places, other = SharedPlaces(await process(), SystemClock()), await process()
    queue, inside, leave = places.at("main", 1), asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with queue:
            inside.set()
            await leave.wait()

    holding = asyncio.create_task(hold())
    await inside.wait()
    waiting = asyncio.create_task(hold())
    await _until(lambda: _is_wanted(other))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await _until(lambda: _is_wanted(other, False))
    leave.set()
    await holding
    async with asyncio.timeout(5), queue:
        assert queue._running == 1
    await places.close()


async def _is_wanted(other: PostgresStore, wanted: bool = True) -> bool:
    """Whether somebody waits, as another process sees it, which has no place and wants none."""
    return (await other.share("main", 1, 0, 0)).wanted is wanted
