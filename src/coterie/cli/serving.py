"""A society run as a process: announced, stopped by signals, given up when the disk fails."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import typer

from coterie import __version__
from coterie.admin.inspect import Inspection
from coterie.cli.front_door import FrontDoor
from coterie.cli.greeting import greet
from coterie.cli.output import counted, harmless, say
from coterie.clock import SystemClock
from coterie.config import SocietyFolder, read_config
from coterie.errors import StoreError, StoreUnusable
from coterie.society import Society
from coterie.stores.open import is_shared, require_society

log = logging.getLogger(__name__)

SECOND = timedelta(seconds=1)
SETTLE = 0.5
"""Seconds that a forced exit waits for what is being written: plenty for a disk that works."""
SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What was said on the command line."""

    folder: Path
    host: str | None = None
    port: int | None = None
    token: str | None = field(default=None, repr=False)


async def run(wanted: Wanted) -> int:
    """Until a signal asks to stop; the exit code."""
    wishes = Wishes()
    folder, is_new = wanted.folder, not SocietyFolder(wanted.folder).exists
    front = FrontDoor.bound(folder, host=wanted.host, port=wanted.port, token=wanted.token)
    try:
        society = await _started(folder, wishes)
    except BaseException:
        front.shut()
        raise
    try:
        await front.open(society)
    except BaseException:
        await society.abandon()
        raise
    try:
        if not wishes.stop.done():
            await greet(society)
            await _announce(society, folder, is_new, front)
            await _first_of(wishes.stop, society.broken, front.ended)
    except BaseException:  # such as a standard output that nobody reads: the society is stopped in order
        await _stop(society, front.close(society), folder, wishes)
        raise
    if society.broken.done():
        _give_up(society)
    return await _stop(society, front.close(society), folder, wishes)


async def work(folder: Path) -> int:
    """The same without a door: its agents work, and it is others that people talk to."""
    wishes = Wishes()
    config = read_config(require_society(folder).path)
    if not is_shared(config):
        raise StoreUnusable(
            "a worker shares its society with other processes, which needs a PostgreSQL: set store.url in coterie.toml,"
            " or run coterie serve"
        )
    society = await _started(folder, wishes)
    try:
        if not wishes.stop.done():
            info = society.store.info
            say(f"Coterie {__version__} works for the society in {folder}")
            say(f"  store    {info.engine} {info.version}")
            say(f"  models   {_models(society)}")
            say(f"Ready. Stop it with Ctrl-C or: kill {os.getpid()}")
            sys.stdout.flush()
            await _first_of(wishes.stop, society.broken)
    except BaseException:
        await _stop(society, society.stop(), folder, wishes)
        raise
    if society.broken.done():
        _give_up(society)
    return await _stop(society, society.stop(), folder, wishes)


async def _started(folder: Path, wishes: Wishes) -> Society:
    starting = asyncio.create_task(Society.start(folder))
    await _first_of(starting, wishes.at_once)
    if not starting.done():
        await _force(starting, folder)
    return starting.result()


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


class Wishes:
    """What signals ask for: the first to stop, the second to stop at once."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.stop: asyncio.Future[None] = loop.create_future()
        self.at_once: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._note)

    def _note(self) -> None:
        wish = self.at_once if self.stop.done() else self.stop
        if not wish.done():
            wish.set_result(None)


async def _announce(society: Society, folder: Path, is_new: bool, front: FrontDoor) -> None:
    info, delayed = society.store.info, await society.bus.delayed_count()
    agents = [agent.id for agent in society.agents.all_profiles()]
    more = f" and {len(agents) - SHOWN:,} more" if len(agents) > SHOWN else ""
    kept = society.config.shutdown.delayed == "keep"
    if is_new:
        say(f"Made {folder} with commented templates: coterie.toml, llmservices.json and tools.py.")
    lines = [
        f"Coterie {__version__} runs the society in {folder}",
        f"  store    {info.engine} {info.version}, durability {society.config.store.durability}",
        f"  agents   {', '.join(agents[:SHOWN])}{more}",
        f"  models   {_models(society)}",
        f"  delayed  {counted(delayed, 'message')} ({'kept' if kept else 'delivered early'} on a stop)",
        f"  listens  {front.where.url}",
        f"  open     {front.link()}  (good once, for ten minutes; coterie open makes another)",
        f"Ready. Stop it with Ctrl-C or: kill {os.getpid()}",
    ]
    typer.echo("\n".join(map(harmless, lines)))
    sys.stdout.flush()


def _models(society: Society) -> str:
    if all(entry.provider == "tour" for entry in society.services):
        return "none yet: a scripted tour answers; name yours in llmservices.json"
    return ", ".join(entry.id for entry in society.services)


async def _stop(society: Society, closing: Coroutine[Any, Any, int], folder: Path, wishes: Wishes) -> int:
    log.info("stopping; a second signal ends it at once")
    stopping = asyncio.create_task(closing)
    progress = asyncio.create_task(_tell_progress(society))
    await _first_of(stopping, wishes.at_once, society.broken)
    progress.cancel()
    if stopping.done():
        early = stopping.result()
        log.info("stopped%s", f"; {counted(early, 'delayed message')} delivered early" if early else "")
        return 0
    if society.broken.done():
        _give_up(society)
    return await _force(stopping, folder)


async def _force(busy: asyncio.Task[Any], folder: Path) -> NoReturn:
    busy.cancel()
    await asyncio.wait({busy}, timeout=SETTLE)
    left = await _delayed_left(folder)
    log.warning("forced exit: %s delayed messages were not delivered; they stay scheduled", left)
    _exit_now()


async def _tell_progress(society: Society) -> None:
    clock = SystemClock()
    with suppress(StoreError, RuntimeError):  # it is closed between two looks
        while True:
            await clock.sleep(SECOND)
            log.info("stopping: %d delayed messages left to deliver", await society.bus.delayed_count())


async def _delayed_left(folder: Path) -> str:
    """Read afresh: the society may be closed by now, or never get there."""
    with suppress(StoreError, TimeoutError):
        async with asyncio.timeout(SETTLE / 2), Inspection.open(folder) as society:
            return f"{await society.store.delayed_count()}"
    return "an unknown number of"


def _give_up(society: Society) -> NoReturn:
    log.critical("%s", society.broken.result())
    _exit_now()


def _exit_now() -> NoReturn:
    """Past everything that might still wait for a disk. What was acknowledged is on it."""
    logging.shutdown()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(1)
