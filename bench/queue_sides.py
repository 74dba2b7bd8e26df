"""One side of a queue in its own process: `python -m bench.queue_sides WHO producer|consumer URL COUNT`.

It prints "ready", starts when it reads a line, and prints the time when it is done. It imports only what its side
needs, because the peers have separate environments.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

TEXT = "x" * 440
AGENTS, BATCH = 8, 100
CALLERS = BATCH
"""Concurrent sends on our side; batch size of the plain side."""
Begin = Callable[[], None]


def message(number: int) -> str:
    """About 500 bytes."""
    return json.dumps({"id": number, "text": TEXT, "kind": "note", "topic": "benchmark"})


class Seen:
    """Counts the messages that arrived."""

    def __init__(self, count: int) -> None:
        self._count, self._ids = count, set[int]()

    def take(self, text: str) -> bool:
        self._ids.add(json.loads(text)["id"])
        return len(self._ids) >= self._count


# Upper limit: one table, rows inserted and deleted in batches

_TAKE = "DELETE FROM q WHERE id IN (SELECT id FROM q ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED) RETURNING body::text"


def prepare_raw(url: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        db.execute("DROP TABLE IF EXISTS q")
        db.execute("CREATE TABLE q (id bigserial PRIMARY KEY, body jsonb NOT NULL)")


def raw_producer(url: str, count: int, begin: Begin) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        begin()
        for start in range(0, count, BATCH):
            bodies = [message(number) for number in range(start, start + BATCH)]
            db.execute("INSERT INTO q (body) SELECT unnest(%s::text[])::jsonb", (bodies,))


def raw_consumer(url: str, count: int, begin: Begin) -> None:
    import psycopg

    seen, over = Seen(count), False
    with psycopg.connect(url, autocommit=True) as db:
        begin()
        while not over:
            rows = db.execute(_TAKE, (BATCH,)).fetchall()
            for (body,) in rows:
                over = seen.take(body)
            if not rows:
                time.sleep(0.001)


# Coterie: sent by agents, taken into the histories of other agents


def coterie_producer(url: str, count: int, begin: Begin) -> None:
    asyncio.run(_send_all(url, count, begin))


def coterie_consumer(url: str, count: int, begin: Begin) -> None:
    asyncio.run(_take_all(url, count, begin))


async def open_store(url: str) -> Any:
    from coterie.agents import Agent
    from coterie.clock import SystemClock
    from coterie.store import Limits
    from coterie.stores.postgres import PostgresStore

    limits = Limits(mailbox=10**9, mailbox_bytes=10**12)
    store = await PostgresStore.open(url, SystemClock(), limits=limits)
    await store.add_agents([Agent(id="sender", name="sender")])
    await store.add_agents([Agent(id=f"agent-{n}", name=f"agent-{n}") for n in range(AGENTS)])
    return store


async def _send_all(url: str, count: int, begin: Begin) -> None:
    from coterie.messages import make_envelope

    store = await open_store(url)
    begin()
    numbers = iter(range(count))

    async def call() -> None:
        for number in numbers:
            payload = {"id": number, "text": TEXT, "kind": "note", "topic": "benchmark"}
            await store.send(make_envelope(sender="sender", to=f"agent-{number % AGENTS}", payload=payload))

    await asyncio.gather(*(call() for _ in range(CALLERS)))
    await store.close()


async def _take_all(url: str, count: int, begin: Begin) -> None:
    """Each claim takes all waiting mail; each turn ends without text and takes the mail that arrived meanwhile."""
    from coterie.llm.service import TokenUsage
    from coterie.turn import ModelAnswered, Rest, Rules

    store, rules, taken = await open_store(url), Rules(), 0
    news = asyncio.Event()
    store.subscribe_changes(lambda _: news.set())
    begin()

    async def turn(claim: Any) -> int:
        read: int = sum(row.role == "user" for row in claim.added_rows)
        while not isinstance(claim.action, Rest):
            claim = await store.advance(
                claim, ModelAnswered(text="", calls=(), usage=TokenUsage(), service="none"), rules
            )
            read += sum(row.role == "user" for row in claim.added_rows)
        return read

    while taken < count:
        claims = await store.claim_ready("bench", rules, AGENTS)
        taken += sum(await asyncio.gather(*map(turn, claims)))
        if not claims:
            news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), 0.05)
    await store.close()


# The peers


def prepare_dbos(url: str) -> None:
    _launch_dbos(url)


def _launch_dbos(url: str) -> None:
    DBOS = import_module("dbos").DBOS  # noqa: N806
    quiet = {"console_log_level": "CRITICAL", "log_level": "CRITICAL"}
    DBOS(config={"name": "bench", "system_database_url": url, "application_version": "1", **quiet})
    DBOS.launch()
    DBOS.register_queue("q", polling_interval_sec=0.01)


def dbos_producer(url: str, count: int, begin: Begin) -> None:
    client = import_module("dbos").DBOSClient(system_database_url=url)
    begin()
    for number in range(count):
        client.enqueue({"queue_name": "q", "workflow_name": "handle", "app_version": "1"}, message(number))


def dbos_consumer(url: str, count: int, begin: Begin) -> None:
    seen, over = Seen(count), threading.Event()

    @import_module("dbos").DBOS.workflow(name="handle")  # type: ignore[untyped-decorator]
    def handle(text: str) -> None:
        if seen.take(text):
            over.set()

    _launch_dbos(url)
    begin()
    over.wait()


def _procrastinate(url: str, take: Callable[[str], None]) -> Any:
    procrastinate = import_module("procrastinate")
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))

    @app.task(name="handle", queue="q")  # type: ignore[untyped-decorator]
    async def handle(text: str) -> None:
        take(text)

    return app, handle


def prepare_procrastinate(url: str) -> None:
    async def make() -> None:
        app, _ = _procrastinate(url, lambda _: None)
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    asyncio.run(make())


def procrastinate_producer(url: str, count: int, begin: Begin) -> None:
    async def produce() -> None:
        app, handle = _procrastinate(url, lambda _: None)
        async with app.open_async():
            begin()
            for number in range(count):
                await handle.defer_async(text=message(number))

    asyncio.run(produce())


def procrastinate_consumer(url: str, count: int, begin: Begin) -> None:
    async def consume() -> None:
        seen, over = Seen(count), asyncio.Event()
        app, _ = _procrastinate(url, lambda text: over.set() if seen.take(text) else None)
        async with app.open_async():
            begin()
            options = {"concurrency": 10, "fetch_job_polling_interval": 0.1, "delete_jobs": "always"}
            work = app.run_worker_async(queues=["q"], install_signal_handlers=False, **options)
            working = asyncio.create_task(work)
            await over.wait()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    asyncio.run(consume())


def begin() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def main(who: str, side: str, url: str, count: str) -> None:
    logging.disable(logging.CRITICAL)
    if side == "prepare":
        globals()[f"prepare_{who}"](url)
        return
    globals()[f"{who}_{side}"](url, int(count), begin)
    print(time.perf_counter(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # some libraries leave threads running
