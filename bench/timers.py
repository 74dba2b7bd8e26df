"""Lateness of 10,000 durable timers: from the due time until the delivery is on disk."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from bench import rows
from bench.report import Report, percentile, settle
from bench.send import open_bus
from coterie.bus import MessageBus
from coterie.clock import SystemClock, to_ms
from coterie.messages import PERSON
from coterie.store import Promotion
from coterie.stores.sqlite import SqliteStore

TIMERS, AGENTS, ROUNDS = 10_000, 100, 3
SCHEDULING = 3.0
"""Seconds for the sends before the first timer is due."""
_ELAPSED = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

Lateness = list[float]


def run() -> None:
    report = Report("timers")
    ours: list[Lateness] = []
    limit: list[Lateness] = []
    for _ in range(ROUNDS):
        settle()
        ours.append(_ours())
        settle()
        limit.append(asyncio.run(_plain()))
    durable, plain = _best(ours), _best(limit)
    report.line("timers measured", len(durable), "timers")
    for share, name in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
        report.line(f"lateness {name}", percentile(durable, share), "ms", at_most=5 if name == "p99" else None)
        report.line(f"limit: lateness {name} of asyncio timers that keep nothing", percentile(plain, share), "ms")
    report.line("earliest", min(durable), "ms", at_least=0)
    report.ratio("lateness p99 to asyncio timers", percentile(durable, 0.99), percentile(plain, 0.99), at_most=2)


def _best(rounds: list[Lateness]) -> Lateness:
    return min(rounds, key=lambda late: percentile(late, 0.99))


def _delays() -> list[float]:
    chance = random.Random(7)
    return [chance.uniform(0.1, 5.0) for _ in range(TIMERS)]


def _ours() -> Lateness:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_durable(Path(folder)))


async def _durable(folder: Path) -> Lateness:
    clock = SystemClock()
    async with open_bus(folder, AGENTS, clock=clock, store_type=TimedStore) as (store, bus):
        assert isinstance(store, TimedStore)
        bus.start()
        delayed = await _schedule(bus)
        while len(store.seen) < delayed:
            await asyncio.sleep(0.1)
        await bus.stop(deliver_delayed=False)
    offset = _offset(clock)
    return [(known + offset) / 1e6 - to_ms(due) for due, known in store.seen]


class TimedStore(SqliteStore):
    """Records when the event loop learns that a delivery is durable, with a finer clock than the store's."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.seen: list[tuple[datetime, int]] = []

    async def promote_due(self, limit: int, *, early: bool = False) -> Promotion:
        promotion = await super().promote_due(limit, early=early)
        known = time.clock_gettime_ns(_ELAPSED)
        self.seen += ((delivery.deliver_at, known) for delivery in promotion.delivered)
        return promotion


async def _schedule(bus: MessageBus) -> int:
    """Send all messages before the first is due; return how many are delayed (fewer on a busy machine).

    All delays are relative to the same moment.
    """
    names, base = rows.agent_names(AGENTS), time.monotonic() + SCHEDULING
    timers = enumerate(_delays())

    async def call() -> int:
        delayed = 0
        for number, delay in timers:
            delay_ms = (base + delay - time.monotonic()) * 1000
            to = names[number % AGENTS]
            receipt = await bus.send(sender=PERSON, to=to, payload=rows.PAYLOAD, delay_ms=delay_ms)
            delayed += receipt.state == "delayed"
        return delayed

    return sum(await asyncio.gather(*(call() for _ in range(64))))


def _offset(clock: SystemClock) -> int:
    """Nanoseconds from the elapsed-time clock to `clock`, whose milliseconds are whole.

    Read when the millisecond changes. An interrupted reading is smaller, so the largest is the best.
    """
    return max(_offset_at_next_tick(clock) for _ in range(50))


def _offset_at_next_tick(clock: SystemClock) -> int:
    before = clock.now()
    while (now := clock.now()) == before:
        pass
    return to_ms(now) * 1_000_000 - time.clock_gettime_ns(_ELAPSED)


async def _plain() -> Lateness:
    loop, late, done = asyncio.get_running_loop(), Lateness(), asyncio.Event()

    def ring(due: float) -> None:
        late.append((loop.time() - due) * 1000)
        if len(late) == TIMERS:
            done.set()

    base = loop.time() + SCHEDULING
    for delay in _delays():
        loop.call_at(base + delay, ring, base + delay)
    await done.wait()
    return late
