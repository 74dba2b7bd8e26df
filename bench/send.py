"""Durable sends: each message is on disk when `send` returns."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench import rows
from bench.report import Report, best
from coterie.agents import Agent
from coterie.bus import MessageBus
from coterie.clock import Clock, SystemClock
from coterie.messages import PERSON
from coterie.store import Limits
from coterie.stores.sqlite import SqliteStore

AGENTS = 8
ALONE, TOGETHER = 1_000, 20_000
UNLIMITED = Limits(mailbox=10**9, mailbox_bytes=10**12)


def run() -> None:
    report = Report("send")
    rates = best(
        {
            "1 caller": lambda: _ours(1, ALONE),
            "one commit each": lambda: _plain(1, ALONE, rows.row_by_row),
            "64 callers": lambda: _ours(64, TOGETHER),
            "batches of 64": lambda: _plain(64, TOGETHER, rows.row_by_row),
            "batches of 64, one statement each": lambda: _plain(64, TOGETHER, rows.many_rows_a_statement),
            "batches of 1000": lambda: _plain(1000, TOGETHER, rows.row_by_row),
        },
        rounds=5,
    )
    for name, rate in rates.items():
        report.line(name if "caller" in name else f"limit: {name}", rate, "messages/s")
    report.ratio("1 caller to one commit each", rates["1 caller"], rates["one commit each"], at_least=0.7)
    report.ratio("64 callers to batches of 64", rates["64 callers"], rates["batches of 64"], at_least=0.65)
    report.ratio("64 callers to batches of 1000", rates["64 callers"], rates["batches of 1000"])
    report.ratio("64 callers to one commit each", rates["64 callers"], rates["one commit each"], at_least=4)


def _ours(callers: int, count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_send_all(Path(folder), callers, count))


async def _send_all(folder: Path, callers: int, count: int) -> float:
    async with open_bus(folder, AGENTS) as (_, bus):
        start = time.perf_counter()
        await send_from(bus, callers, count, AGENTS)
        return count / (time.perf_counter() - start)


def _plain(batch: int, count: int, insert_many: rows.InsertMany) -> float:
    with tempfile.TemporaryDirectory() as folder:
        db = rows.open_plain(Path(folder) / "coterie.db", AGENTS)
        ready = rows.message_rows(count, rows.agent_names(AGENTS))
        try:
            return rows.write(db, ready, batch, insert_many)
        finally:
            db.close()


@asynccontextmanager
async def open_bus(
    folder: Path, agents: int, *, clock: Clock | None = None, store_type: type[SqliteStore] = SqliteStore
) -> AsyncIterator[tuple[SqliteStore, MessageBus]]:
    """A store with agents, and a bus that is not started."""
    clock = clock or SystemClock()
    store = await store_type.open(folder, clock, limits=UNLIMITED)
    names = rows.agent_names(agents)
    await store.add_agents(
        [Agent(id=PERSON, name="You", kind="person"), *(Agent(id=name, name=name) for name in names)]
    )
    try:
        yield store, MessageBus(store, clock)
    finally:
        await store.close()


async def send_from(bus: MessageBus, callers: int, count: int, agents: int, *, delay_ms: float | None = None) -> None:
    """Send `count` messages from concurrent callers; each waits for its send before the next."""
    numbers, names = iter(range(count)), rows.agent_names(agents)

    async def call() -> None:
        for number in numbers:
            await bus.send(sender=PERSON, to=names[number % agents], payload=rows.PAYLOAD, delay_ms=delay_ms)

    await asyncio.gather(*(call() for _ in range(callers)))
