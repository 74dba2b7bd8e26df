"""The writer thread with group commit.

A durable commit costs one fsync. The thread runs all jobs queued during the last fsync in one transaction and
commits once; then it resolves their futures.

With relaxed durability commits do not fsync, and a thread switch costs more than a small transaction. So a small
job runs directly on the event loop while the thread is idle. Checkpoints always fsync, so the thread runs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, StoreBroken, StoreUnavailable
from coterie.failpoints import FailpointHit, hit
from coterie.stores.sql.claims import RetryTransaction
from coterie.stores.sql.jobs import Job, JobQueue, Result, collect_batch, fail_batch, settle_batch
from coterie.stores.sqlite.connection import LAST_EVENT_SQL, LastCommitFile, OpenFiles, to_store_error

log = logging.getLogger(__name__)

BUSY_ATTEMPTS = 3
CHECKPOINT_COMMITS = 1_024
"""Commits between two checkpoints with relaxed durability: about 20 MB of WAL. Writes wait during a checkpoint."""


class Writer:
    def __init__(
        self,
        db: sqlite3.Connection,
        on_broken: Callable[[StoreBroken], None],
        on_rollback: Callable[[], None],
        *,
        folder: Path | None = None,
        files: OpenFiles | None = None,
        last_commit: LastCommitFile | None = None,
        fsyncs: bool = True,
    ) -> None:
        """`on_broken`: called on the event loop when writing cannot go on. `on_rollback`: drops cached rows.

        `folder`: of the database, to tell a full disk from a broken one. `files`: checked before and after every
        commit; jobs fail if a file is gone. `last_commit`: updated after every commit. `fsyncs`: commits are durable.
        """
        self._folder, self._files, self._last_commit = folder, files, last_commit
        self._db, self._on_broken, self._on_rollback, self._fsyncs = db, on_broken, on_rollback, fsyncs
        self._queued_jobs = 0
        """Jobs queued for the thread and not yet settled."""
        self._commits = 0
        """Commits since the last checkpoint."""
        self._jobs: JobQueue = JobQueue()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._broken: StoreBroken | None = None
        self.is_healthy = True
        self._thread = threading.Thread(target=self._run_thread, name="coterie-writer", daemon=True)
        self._thread.start()

    def write(
        self,
        run: Callable[[sqlite3.Connection], Result],
        on_settled: Callable[[Any], None] | None = None,
        *,
        small: bool = False,
    ) -> asyncio.Future[Any]:
        """Run `run` in a transaction; the future resolves after the commit. If `run` raises, its writes are undone.

        `small`: it may run at once on the event loop. `on_settled`: see `Job.on_settled`.
        """
        if self._broken:
            raise self._broken
        if self._closed:
            raise StoreUnavailable("the society is stopping: try again after its next start")
        future: asyncio.Future[Any] = self._loop.create_future()
        job = Job(run, future, on_settled)
        if small and not self._fsyncs and not self._queued_jobs:
            self._run_inline(job)
        else:
            self._enqueue(job)
        return future

    def _run_inline(self, job: Job) -> None:
        self._commit([job])
        settle_batch([job])
        if self._commits >= CHECKPOINT_COMMITS:
            self._enqueue(Job(_noop, self._loop.create_future()))

    def _enqueue(self, job: Job) -> None:
        self._queued_jobs += 1
        self._jobs.put(job)

    async def close(self) -> None:
        """Finish the queued jobs, then end the thread."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run_thread(self) -> None:
        while job := self._jobs.get():
            batch, is_last = collect_batch(self._jobs, job)
            self._commit(batch)
            if not self._fsyncs and self._commits >= CHECKPOINT_COMMITS:
                self._checkpoint()
            try:
                self._loop.call_soon_threadsafe(self._settle, batch)
            except RuntimeError:  # the loop is closed: nobody waits
                return
            if is_last:
                return

    def _settle(self, batch: list[Job]) -> None:
        self._queued_jobs -= len(batch)
        settle_batch(batch)

    def _checkpoint(self) -> None:
        self._commits = 0
        with contextlib.suppress(sqlite3.OperationalError):  # blocked by a reader; the next checkpoint retries
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _commit(self, batch: list[Job]) -> None:
        if self._broken:  # the jobs were queued before the failure
            fail_batch(batch, self._broken)
            return
        if self._fail_if_files_gone(batch):
            return
        try:
            self._begin()
            for job in batch:
                self._run(job, is_only_job=len(batch) == 1)
            last_event = self._db.execute(LAST_EVENT_SQL).fetchone()[0] if self._last_commit else None
            hit("commit.before")
            self._db.execute("COMMIT")
            hit("commit.after")
            self._commits += 1
            self.is_healthy = True
            if self._last_commit and last_event:
                self._last_commit.record(last_event)
            self._fail_if_files_gone(batch)
        except (sqlite3.Error, FailpointHit) as error:
            self._roll_back_batch(batch, error)
        except Exception as error:  # keep the thread alive: later writes would wait forever
            log.exception("the writer thread failed")
            self._roll_back_batch(
                batch, StoreBroken(f"the store failed to write ({type(error).__name__}): start again")
            )

    def _fail_if_files_gone(self, batch: list[Job]) -> bool:
        """Fail the batch if a database file was removed or replaced: its writes would go to a deleted file."""
        if not (self._files and (problem := self._files.problem())):
            return False
        fail_batch(batch, StoreUnavailable(problem))
        self.is_healthy = False
        return True

    def _begin(self) -> None:
        for attempts_left in reversed(range(BUSY_ATTEMPTS)):
            try:
                self._db.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or not attempts_left:
                    raise
                self.is_healthy = False

    def _run(self, job: Job, *, is_only_job: bool) -> None:
        """Run one job, in its own savepoint unless it is the only one of the batch."""
        job.reset()
        if not is_only_job:
            self._db.execute("SAVEPOINT job")
        try:
            job.result = self._run_with_retry(job, is_only_job=is_only_job)
        except Exception as error:
            if isinstance(error, sqlite3.Error | FailpointHit) and not isinstance(error, sqlite3.IntegrityError):
                raise  # a database error: the whole batch is rolled back
            job.error = error
            if not isinstance(error, CoterieError):
                log.exception("a transaction failed and was rolled back")
            self._roll_back_job(is_only_job=is_only_job)
        if not is_only_job:
            self._db.execute("RELEASE job")

    def _run_with_retry(self, job: Job, *, is_only_job: bool) -> Result:
        try:
            return job.run(self._db)
        except RetryTransaction:
            self._roll_back_job(is_only_job=is_only_job)
            return job.run(self._db)

    def _roll_back_job(self, *, is_only_job: bool) -> None:
        self._on_rollback()
        self._db.execute("ROLLBACK" if is_only_job else "ROLLBACK TO job")
        if is_only_job:
            self._db.execute("BEGIN")

    def _roll_back_batch(self, batch: list[Job], error: Exception) -> None:
        store_error = to_store_error(error, self._folder) if isinstance(error, sqlite3.Error) else error
        self._on_rollback()
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except sqlite3.Error as rollback_error:
            store_error = StoreBroken(f"a failed write could not be rolled back ({rollback_error}): start again")
        fail_batch(batch, store_error)
        self.is_healthy = False
        log.error("the store could not commit: %s", store_error)
        if isinstance(store_error, StoreBroken):
            # After a failed fsync a later success proves nothing about the lost pages, so writing must stop.
            self._broken = store_error
            self._loop.call_soon_threadsafe(self._on_broken, store_error)


def _noop(db: sqlite3.Connection) -> Result:
    """Empty job that wakes the writer thread for a checkpoint."""
    return Result(None)
