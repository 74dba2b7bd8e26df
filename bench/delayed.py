"""100,000 delayed messages: time to schedule them durably and to deliver them when due."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

from bench import rows
from bench.report import Report, best
from bench.send import open_bus, send_from
from coterie.clock import SystemClock

COUNT, CALLERS, AGENTS = 100_000, 256, 100
DELAY = timedelta(hours=1)


def run() -> None:
    report = Report("delayed")
    delivering: list[float] = []
    seconds = best(
        {
            "schedule 100,000": lambda: _schedule(COUNT, delivering),
            "schedule 200,000": lambda: _schedule(2 * COUNT),
            "limit: the rows of 100,000 in batches of 256": lambda: _plain(COUNT),
        },
        pick=min,
    )
    one, two, plain = seconds.values()
    report.line("schedule 100,000", one, "s", at_most=10)
    report.line("schedule 200,000", two, "s")
    report.line("limit: the rows of 100,000 in batches of 256", plain, "s")
    report.ratio("200,000 to 100,000", two, one, at_most=2.3)
    report.ratio("100,000 to their rows in batches of 256", one, plain)
    report.line("deliver 100,000 that are due, each of them logged", min(delivering), "s", at_most=10)


def _schedule(count: int, delivering: list[float] | None = None) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scheduling = asyncio.run(_send_delayed(folder, count))
        if delivering is not None:
            with _logging_to(folder / "log"):
                delivering.append(asyncio.run(_deliver(folder)))
            assert (folder / "log").read_text().count("delivered delayed message") == count
        return scheduling


async def _send_delayed(folder: Path, count: int) -> float:
    async with open_bus(folder, AGENTS) as (_, bus):
        start = time.perf_counter()
        await send_from(bus, CALLERS, count, AGENTS, delay_ms=DELAY.total_seconds() * 1000)
        return time.perf_counter() - start


class LaterClock(SystemClock):
    """A clock after the last due time, as if the society had been stopped until now."""

    def now(self) -> datetime:
        return super().now() + 2 * DELAY


async def _deliver(folder: Path) -> float:
    async with open_bus(folder, AGENTS, clock=LaterClock()) as (_, bus):
        start = time.perf_counter()
        bus.start()
        while await bus.delayed_count():
            await asyncio.sleep(0.01)
        seconds = time.perf_counter() - start
        await bus.stop(deliver_delayed=False)
        return seconds


@contextmanager
def _logging_to(file: Path) -> Iterator[None]:
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()


def _plain(count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        db = rows.open_plain(Path(folder) / "coterie.db", AGENTS)
        ready = rows.message_rows(count, rows.agent_names(AGENTS), delay_ms=DELAY // timedelta(milliseconds=1))
        try:
            return count / rows.write(db, ready, CALLERS, rows.row_by_row)
        finally:
            db.close()
