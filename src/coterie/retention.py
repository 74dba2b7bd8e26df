"""Deletes what is too old while the society runs, in short transactions with pauses between them.

A run takes at most a quarter of the writer's time, and a fiftieth while callers write. `keep_days` and `keep_gb` in
coterie.toml say what is too old; without them messages stay, and only old events, dead letters and unused files are
deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta

from coterie.artifact_service import ArtifactService
from coterie.clock import Clock
from coterie.config import StoreSettings
from coterie.errors import CoterieError, Refused
from coterie.ids import new_id
from coterie.retention_store import Pruned, Retention, RetentionStore, StorageFigures
from coterie.supervision import SHORTEST_STEP_PAUSE, Pace, supervise

log = logging.getLogger(__name__)

RUN_INTERVAL = timedelta(hours=1)
OTHER_TRANSACTIONS = timedelta(seconds=15)
"""Longer than a transaction of another process takes, with its retries."""
CLAIM_RENEWAL = timedelta(minutes=1)
SHORTEST_KEPT = timedelta(days=1)
"""Never deleted to save space: the token limit counts the requests of a day."""
GIGABYTE = 1_000_000_000


NOTHING = Pruned()


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneRun:
    """What a run has deleted so far, or a dry run would."""

    dry_run: bool
    deleted: Pruned = NOTHING
    kept: timedelta | None = None
    """Age up to which messages stay. None: all stay."""
    is_running: bool = True
    error: str | None = None


class RetentionService:
    def __init__(
        self,
        store: RetentionStore,
        artifacts: ArtifactService,
        clock: Clock,
        settings: Callable[[], StoreSettings],
        *,
        is_shared: bool,
    ) -> None:
        """`settings`: returns the current ones. `is_shared`: other processes may write to the store."""
        self._store, self._artifacts, self._clock, self._settings = store, artifacts, clock, settings
        self._is_shared, self._lock = is_shared, asyncio.Lock()
        self._stopping = asyncio.Event()
        self._process, self._claimed_at = new_id(), 0.0
        """Names this process in its claims, and when the last one was made, by the monotonic clock."""
        self._loop: asyncio.Task[None] | None = None
        self._manual: asyncio.Task[None] | None = None
        self.run: PruneRun | None = None
        """The last run that `start_run` started in this process."""

    @property
    def settings(self) -> StoreSettings:
        return self._settings()

    async def figures(self) -> StorageFigures:
        return await self._store.storage()

    def start(self) -> None:
        """Run once an hour, until `stop`."""
        self._loop = asyncio.create_task(self._run_regularly(), name="coterie-prune")

    async def stop(self) -> None:
        """End after the current step."""
        self._stopping.set()
        for task in (self._loop, self._manual):
            if task:
                await task

    def start_run(self, *, dry_run: bool = False, rewrite: bool = False) -> PruneRun:
        """Start a run in the background; `run` shows its progress. `rewrite`: VACUUM the database file after it.

        `Refused("prune_running")` if one that was started here has not ended.
        """
        if self.run and self.run.is_running:
            raise Refused("prune_running", "old data is being deleted already: wait until that run has ended")
        self.run = PruneRun(dry_run=dry_run)
        self._manual = asyncio.create_task(self._run_on_request(dry_run, rewrite), name="coterie-prune-request")
        return self.run

    async def _run_on_request(self, dry_run: bool, rewrite: bool) -> None:
        assert self.run is not None  # noqa: S101
        try:
            await self.prune(dry_run=dry_run, on_progress=self._show_progress)
            if rewrite and not dry_run:
                await self._store.rewrite()
            self.run = replace(self.run, is_running=False)
        except CoterieError as error:
            self.run = replace(self.run, is_running=False, error=str(error))
        except Exception as error:
            log.exception("deleting old data failed")
            self.run = replace(
                self.run, is_running=False, error=f"unexpected error ({type(error).__name__}): see the log"
            )

    def _show_progress(self, deleted: Pruned, kept: timedelta | None) -> None:
        if self.run:
            self.run = replace(self.run, deleted=deleted, kept=kept)

    async def _run_regularly(self) -> None:
        while not await self._clock.wait(self._stopping, RUN_INTERVAL):
            await supervise("removing old messages and files", self._run_if_due, self._clock, stopping=self._stopping)

    async def _run_if_due(self) -> None:
        """Run unless another process has run within the hour."""
        last = (await self._store.storage()).last_prune if self._is_shared else None
        if last is None or last.age >= RUN_INTERVAL * 0.9:
            await self.prune(full=False)

    async def prune(
        self,
        *,
        dry_run: bool = False,
        full: bool = True,
        on_progress: Callable[[Pruned, timedelta | None], None] = lambda *_: None,
    ) -> Pruned:
        """Delete all that is too old, and return the numbers of rows. A stop of the society ends it earlier.

        `full`: look at all old rows, not only at those that became old since the last run. That is a run on request:
        one of another process ends then. Without `full` it goes on, and nothing is deleted here.
        """
        async with self._lock:
            if not dry_run and not await self._claim(takes_over=full):
                return NOTHING
            retention = await self._read_retention()
            total = NOTHING
            on_progress(total, retention.messages)
            pace = Pace(self._clock, self._stopping, lambda: self._store.write_count)
            async for deleted in self._store.prune(retention, dry_run=dry_run, full=full):
                total += deleted or NOTHING
                on_progress(total, retention.messages)
                grace = OTHER_TRANSACTIONS if deleted is None and self._is_shared else SHORTEST_STEP_PAUSE
                if await self._pause(pace, grace, only_read=dry_run or deleted == NOTHING, dry_run=dry_run):
                    return total
            async for count in self._artifacts.delete_unused(retention.unused_artifacts, dry_run=dry_run):
                total += Pruned(artifacts=count)
                on_progress(total, retention.messages)
                if await self._pause(pace, SHORTEST_STEP_PAUSE, only_read=dry_run or not count, dry_run=dry_run):
                    return total
            if dry_run:
                return total
            async for _ in self._artifacts.delete_unnamed_bytes(full=full):
                if await self._pause(pace, SHORTEST_STEP_PAUSE):
                    return total
            while await self._store.release_space():
                if await self._pause(pace, SHORTEST_STEP_PAUSE):
                    return total
            await self._store.record_prune(total)
            if any(getattr(total, one.name) for one in fields(total)):
                log.info("deleted %d old messages, %d rows of histories and %d events", total.messages, total.history,
                         total.events)  # fmt: skip
            return total

    async def _pause(self, pace: Pace, least: timedelta, *, only_read: bool = False, dry_run: bool = False) -> bool:
        """End a step. True: the society stops, or another process took the run over.

        Pauses, so that callers can write, unless the step has `only_read`: no caller waits for that.
        """
        if self._stopping.is_set() or (not only_read and await pace.pause(least)):
            return True
        is_old = self._clock.monotonic() - self._claimed_at >= CLAIM_RENEWAL.total_seconds()
        return is_old and not dry_run and not await self._claim()

    async def _claim(self, *, takes_over: bool = False) -> bool:
        """Claim the run, or renew the claim. False: another process has it."""
        self._claimed_at = self._clock.monotonic()
        return await self._store.claim_prune(self._process, takes_over=takes_over)

    async def _read_retention(self) -> Retention:
        """What the settings say now. With `keep_gb` the age depends on how much is stored."""
        settings, kept = self._settings(), list[timedelta]()
        if settings.keep_days:
            kept.append(timedelta(days=settings.keep_days))
        if settings.keep_gb:
            figures = await self._store.storage()
            size, limit = figures.used_bytes + figures.artifact_bytes, settings.keep_gb * GIGABYTE
            if size > limit:
                # Messages are taken to be of equal size over time. The next run corrects what this one misses.
                age = await self._store.age_beyond(1 - limit / size)
                kept.append(max(SHORTEST_KEPT, age or SHORTEST_KEPT))
        if not kept:
            return Retention()
        messages = min(kept)
        standard = Retention()
        return Retention(
            messages=messages,
            dead_letters=min(messages, standard.dead_letters),
            events=min(messages, standard.events),
        )
