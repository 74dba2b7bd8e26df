"""A year of a society that keeps 30 days: the size of its file, and how much the deletion delays sends.

The messages of each day are written in bulk, and the clock of the store jumps from day to day. Then a backlog of half a
month is deleted while one caller sends, from the first deleted message on: the steps before it are shorter. Sends alone
and beside the deletion alternate. `YEAR_MESSAGES=200000 python -m bench year` simulates fewer messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from bench.report import Report, percentile
from coterie.clock import to_ms
from coterie.messages import PERSON
from coterie.retention_store import Pruned, Retention
from coterie.society import Society
from coterie.stores.sql import retention, text_index
from coterie.stores.sqlite import SqliteStore, engine, search
from coterie.stores.sqlite.connection import open_writer
from coterie.stores.sqlite.engine import DATABASE
from coterie.testing import FakeClock

MESSAGES = int(os.environ.get("YEAR_MESSAGES", 2_000_000))
DAYS, KEPT_DAYS, BACKLOG_DAYS, AGENTS = 365, 30, 15, 100
PER_DAY = MESSAGES // DAYS // (2 * AGENTS) * (2 * AGENTS)
ROUNDS, SENDS = 8, 300

_AGENT = "printf('a%06d', n / 2 % :agents)"
_TURN = "(n / 2 / :agents + 1)"
_AT = "(:at + (n - :first) / 2 * 2 * 86400000 / (:end - :first))"
_NUMBERS = "WITH RECURSIVE number (n) AS (SELECT :first UNION ALL SELECT n + 1 FROM number WHERE n + 1 < :end) "
# Even numbers: questions of the person. Odd ones: the answers. Each pair is a task with one turn.
DAY = (
    f"""
    INSERT INTO messages (id, sender, recipient, state, in_seq, created_at, delivered_at, taken_at, payload, thread,
                          automatic, in_reply_to, task)
    {_NUMBERS}
    SELECT printf('m%012d', n), CASE WHEN n % 2 = 0 THEN 'user' ELSE {_AGENT} END,
           CASE WHEN n % 2 = 0 THEN {_AGENT} ELSE 'user' END, 'taken',
           CASE WHEN n % 2 = 0 THEN {_TURN} ELSE n / 2 + 1 END, {_AT}, {_AT}, {_AT},
           json_object('text', 'Message ' || n || ' about the harvest of field ' || abs(random() % 100000)), {_AGENT},
           n % 2, CASE WHEN n % 2 = 1 THEN printf('m%012d', n - 1) END,
           CASE WHEN n % 2 = 1 THEN printf('m%012d', n - 1) END
      FROM number
    """,
    f"""
    INSERT INTO tasks (id, sender, agent, state, created_at, last_at, messages, turns, requests, input_tokens,
                       output_tokens, unpriced)
    {_NUMBERS} SELECT printf('m%012d', n), 'user', {_AGENT}, 'done', {_AT}, {_AT}, 2, 1, 1, 100, 10, 1
      FROM number WHERE n % 2 = 0
    """,
    f"""
    INSERT INTO turns (agent_id, turn_no, task, started_at, ended_at, outcome)
    {_NUMBERS} SELECT {_AGENT}, {_TURN}, printf('m%012d', n), {_AT}, {_AT}, 'done' FROM number WHERE n % 2 = 0
    """,
    f"""
    INSERT INTO llm_calls (agent_id, turn_no, step_no, service, input_tokens, output_tokens, outcome, at, task)
    {_NUMBERS} SELECT {_AGENT}, {_TURN}, 1, 'main', 100, 10, 'used', {_AT}, printf('m%012d', n) FROM number
     WHERE n % 2 = 0
    """,
    f"""
    INSERT INTO history (agent_id, seq, turn_no, role, message_id, content)
    {_NUMBERS}
    SELECT {_AGENT}, 2 * {_TURN} - 1 + n % 2, {_TURN}, CASE WHEN n % 2 = 0 THEN 'user' ELSE 'assistant' END,
           CASE WHEN n % 2 = 0 THEN printf('m%012d', n) END, CASE WHEN n % 2 = 1 THEN 'Yes' END
      FROM number
    """,
    "INSERT INTO summaries (agent_id, upto, text, at) SELECT id, next_hist_seq - 1, 'what was said', :at FROM agents"
    " WHERE kind = 'agent' AND next_hist_seq > 1",
    """
    UPDATE agents SET turn_no = :end / 2 / :agents, next_hist_seq = :end / :agents + 1,
           next_in_seq = CASE WHEN id = 'user' THEN :end / 2 ELSE :end / 2 / :agents END + 1,
           taken_seq = CASE WHEN id = 'user' THEN :end / 2 ELSE :end / 2 / :agents END
    """,
    f"INSERT INTO events (at, kind, subject) {_NUMBERS} SELECT {_AT}, 'message.created',"
    " printf('m%012d', n) FROM number",
)


def run() -> None:
    report = Report("year")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "society"
        began = time.perf_counter()
        with _large_steps():
            month, largest = asyncio.run(_live(place / "data"))
        report.line(f"simulate {DAYS} days of {PER_DAY:,} messages", time.perf_counter() - began, "s")
        report.line("file after a month", month / 1e6, "MB")
        report.ratio("largest file of the year to that of a month", largest, month, at_most=1.5)
        (place / "coterie.toml").write_text(f"[store]\nkeep_days = {KEPT_DAYS}\n")
        alone, pruning, deleted = asyncio.run(_send(place))
        report.line("messages deleted while sending", deleted, "messages", at_least=1)
        report.line("send p99 alone", alone, "ms")
        report.line("send p99 while old data is deleted", pruning, "ms")
        report.ratio("send p99 while old data is deleted to alone", pruning, alone, at_most=1.5)


@contextlib.contextmanager
def _large_steps() -> Iterator[None]:
    """Delete and index many rows at a time: nobody waits while the year is simulated."""
    rows: dict[str, Any] = {"DELETED_ROWS": 1_000, "FEWEST_ROWS": 1_000, "DELETED_EVENTS": 10_000, "STEP_SECONDS": 1.0}
    grams: dict[str, Any] = {
        "BATCH_MESSAGES": 2_000,
        "BATCH_GRAMS": 200_000,
        "MERGED_PAGES": 1_000,
        "REMOVED_ENTRIES": 1_000,
    }
    with (
        mock.patch.multiple(retention, **rows),
        mock.patch.multiple(text_index, **grams),
        mock.patch.multiple(search, MERGED_PAGES=1_000),
        mock.patch.multiple(engine, RELEASED_PAGES=4_096),
    ):
        yield


async def _live(data: Path) -> tuple[int, int]:
    """Return the size of the file after a month, and the largest one after it."""
    data.mkdir(parents=True)
    start = datetime.now(UTC) - timedelta(days=DAYS + BACKLOG_DAYS)
    clock, sizes = FakeClock(start), list[int]()
    store = await SqliteStore.open(data, clock, durability="relaxed")
    db = open_writer(data / DATABASE, "relaxed")
    for day in range(DAYS):
        _write_day(db, day, to_ms(clock.now()))
        await clock.advance(days=1)
        async for _ in store.prune(Retention(messages=timedelta(days=KEPT_DAYS)), full=False):
            pass
        while await store.index_messages():
            pass
        while await store.release_space():
            pass
        sizes.append((await store.storage()).file_bytes)
    db.close()
    await store.close()
    return sizes[KEPT_DAYS], max(sizes[KEPT_DAYS:])


def _write_day(db: sqlite3.Connection, day: int, at: int) -> None:
    db.execute("BEGIN IMMEDIATE")
    if day == 0:
        db.execute("INSERT INTO agents (id, kind, name, created_at) VALUES ('user', 'person', 'You', 0)")
        for number in range(AGENTS):
            db.execute(
                "INSERT INTO agents (id, kind, name, created_at) VALUES (printf('a%06d', ?), 'agent', 'Agent', 0)",
                (number,),
            )
    for sql in DAY:
        db.execute(sql, {"first": day * PER_DAY, "end": (day + 1) * PER_DAY, "agents": AGENTS, "at": at})
    db.execute("COMMIT")


async def _send(place: Path) -> tuple[float, float, int]:
    """Return the p99 of sends alone and beside a deletion, in ms, and how many messages were deleted meanwhile."""
    alone, beside, messages = list[float](), list[float](), 0
    async with Society.open(place, work=False) as society:
        await _time_sends(society)  # the first ones are slower
        for _ in range(ROUNDS):
            alone += await _time_sends(society)
            deleted, has_begun = 0, asyncio.Event()

            def show(total: Pruned, _: object) -> None:
                nonlocal deleted
                deleted = total.messages
                if deleted:
                    has_begun.set()  # noqa: B023 - it is called in this round only

            deletion = asyncio.create_task(society.retention.prune(full=False, on_progress=show))
            waiting = asyncio.create_task(has_begun.wait())
            await asyncio.wait((deletion, waiting), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            before = deleted
            beside += await _time_sends(society, while_running=deletion)
            messages += deleted - before
            deletion.cancel()
            await asyncio.gather(deletion, return_exceptions=True)
    return percentile(alone, 0.99), percentile(beside, 0.99), messages


async def _time_sends(society: Society, while_running: asyncio.Task[object] | None = None) -> list[float]:
    took: list[float] = []
    while len(took) < SENDS and not (while_running and while_running.done()):
        began = time.perf_counter()
        await society.bus.send(sender="a000000", to=PERSON, payload={"text": f"Message {len(took)}"})
        took.append((time.perf_counter() - began) * 1000)
    return took
