"""The writer thread with group commit, and the flushes of the write-ahead log.

SQLite itself never flushes a commit here (`synchronous=NORMAL`). If a person or another program depends on a commit,
`fdatasync` flushes the write-ahead log before the caller gets the result. The log is written in the order of commits,
so this flush makes every earlier commit durable too. Other commits are flushed with the next one that needs it, when a
reader of the event log asks for it, or after `FLUSH_DELAY_SECONDS`.

The thread runs all jobs queued during the last flush in one transaction, and flushes once. A small job that needs no
flush runs directly on the event loop while the thread has no job to run: a thread switch costs more than a small
transaction. Checkpoints always flush, so the thread runs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from coterie.errors import CoterieError, StoreBroken, StoreUnavailable
from coterie.failpoints import FailpointHit, hit
from coterie.stores.sql.claims import RetryTransaction
from coterie.stores.sql.jobs import (
    CLOSED,
    Job,
    JobQueue,
    Result,
    collect_batch,
    fail_batch,
    settle_batch,
    split_batch,
    start_claims,
)
from coterie.stores.sqlite import connection
from coterie.stores.sqlite.connection import Durability, LastCommitFile, OpenFiles, to_store_error

log = logging.getLogger(__name__)

BUSY_ATTEMPTS = 3
"""Busy timeouts that the thread waits for another program's lock."""
BUSY_PAUSE_SECONDS = 0.01
FLUSH_DELAY_SECONDS = 0.2
"""Longest time until a commit that needs no flush is flushed all the same, as PostgreSQL's WAL writer does."""
CHECKPOINT_ROWS: dict[Durability, int] = {"full": 2_000, "relaxed": 10_000}
"""Changed rows between two checkpoints: four or twenty MB of WAL. Writes wait during a checkpoint."""

fdatasync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class _Head(NamedTuple):
    """The newest commit."""

    commit: int
    """Counts the commits of this process."""
    event: int
    """The newest event of the log after it."""


class Writer:
    def __init__(
        self,
        db: sqlite3.Connection,
        on_broken: Callable[[StoreBroken], None],
        on_rollback: Callable[[], None],
        write_events: Callable[[], int],
        *,
        path: Path,
        files: OpenFiles,
        last_commit: LastCommitFile,
        durability: Durability = "full",
    ) -> None:
        """`on_broken`: called on the event loop when writing cannot go on. `on_rollback`: drops cached rows and events
        that are not written. `write_events`: writes the events of the jobs; returns the number of the newest event.

        `path`: of the database, whose write-ahead log exists. `files`: checked before and after every commit; jobs fail
        if a file is gone. `last_commit`: updated after every commit. `durability`: relaxed never waits for a flush.
        """
        self._folder, self._files, self._last_commit = path.parent, files, last_commit
        self._db, self._on_broken, self._on_rollback, self._write_events = db, on_broken, on_rollback, write_events
        self._flushes, self._checkpoint_rows = durability == "full", CHECKPOINT_ROWS[durability]
        self._wal = os.open(path.with_name(f"{path.name}-wal"), os.O_RDWR | os.O_CLOEXEC)
        db.execute("PRAGMA synchronous = NORMAL")
        # A job on the event loop must not wait for another program's lock. The thread waits, in `_begin`.
        db.execute("PRAGMA busy_timeout = 0")
        self._enqueued = self._ran = 0
        """Jobs queued for the thread (changed by the event loop), and those that it has run (changed by the thread)."""
        self._lock = threading.Lock()
        """Guards `_head`, `_unflushed_since` and `_must_be_woken`, which the event loop and the thread change."""
        self._head = _Head(0, 0)
        self._visible = 0
        """The newest commit that a reader may have seen. It is set before the commit."""
        self._needs_flush = 0
        """The newest of them that must be flushed before it is shown."""
        self._flushed = 0
        """The newest commit that is durable."""
        self._unflushed_since: float | None = None
        self._must_be_woken = False
        """The thread waits without a timeout: it does not see a commit of the event loop."""
        self._checkpointed_rows = db.total_changes
        self._jobs: JobQueue = JobQueue()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._broken: StoreBroken | None = None
        self.is_healthy = True
        self.flushes = 0
        """Flushes of the write-ahead log since the start, without those of checkpoints."""
        self._thread = threading.Thread(target=self._run_thread, name="coterie-writer", daemon=True)
        self._thread.start()

    def write(
        self,
        run: Callable[[sqlite3.Connection], Result],
        on_settled: Callable[[Any], None] | None = None,
        *,
        small: bool = False,
        durable: bool = True,
        alone: bool = False,
    ) -> asyncio.Future[Any]:
        """Run `run` in a transaction; the future resolves after the commit. If `run` raises, its writes are undone.

        The commit is flushed first if the result of `run` says so. `small`: it may run at once on the event loop.
        `durable`: it is known that it needs a flush. `on_settled`, `alone`: see `Job`.
        """
        if self._broken:
            raise self._broken
        if self._closed:
            raise StoreUnavailable(CLOSED)
        job = Job(run, self._loop.create_future(), on_settled, alone=alone)
        may_run_inline = small and not (durable and self._flushes) and self._enqueued == self._ran
        if not (may_run_inline and self._run_inline(job)):
            self._enqueue(job)
        return job.future

    def flush(self, *, all_commits: bool) -> asyncio.Future[Any] | None:
        """Flush all commits, or those that a caller depends on. Return None if they are durable already."""
        upto = self._visible if all_commits else self._needs_flush
        if not self._flushes or upto <= self._flushed or self._closed or self._broken:
            return None
        job = Job(_noop, self._loop.create_future(), result=Result(None), commit=upto)
        self._jobs.put(job)
        return job.future

    def _run_inline(self, job: Job) -> bool:
        """False: another program has locked the database."""
        if not self._commit([job], inline=True):
            return False
        if job.commit:
            start_claims([job])
            self._jobs.put(job)  # the thread flushes it
        else:
            settle_batch([job])
        if self._is_checkpoint_due():
            self._enqueue(Job(_noop, self._loop.create_future()))
        return True

    def _enqueue(self, job: Job) -> None:
        self._enqueued += 1
        self._jobs.put(job)

    async def close(self) -> None:
        """Finish the queued jobs, flush, then end the thread."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        if self._wal >= 0:
            os.close(self._wal)
            self._wal = -1

    def _run_thread(self) -> None:
        is_last = is_idle = False
        while not is_last:
            try:
                job = self._jobs.get(timeout=self._wait_seconds(is_idle))
            except queue.Empty:
                is_idle = self._flush_delay() is None
                if self._flush_delay() == 0:
                    self._flush()
                continue
            if job is None:
                break
            is_idle = False
            batch, is_last = collect_batch(self._jobs, job)
            try:
                for part in split_batch(batch):
                    self._process(part)
            except RuntimeError:  # the loop is closed: no caller waits
                return
        if self._flush_delay() is not None:
            self._flush()

    def _wait_seconds(self, is_idle: bool) -> float | None:
        """How long the thread waits for a job. `is_idle`: in the last wait nothing was committed.

        While the event loop commits, a timeout finds what is to be flushed: to wake the thread after every flush would
        take longer than the commit.
        """
        with self._lock:
            self._must_be_woken = is_idle and (self._unflushed_since is None or self._broken is not None)
            if self._must_be_woken:
                return None
        delay = self._flush_delay()
        return FLUSH_DELAY_SECONDS if delay is None else delay

    def _flush_delay(self) -> float | None:
        """Seconds until commits that wait for no flush are flushed. None: all are durable."""
        with self._lock:
            since = self._unflushed_since
        return None if since is None or self._broken else max(0.0, since + FLUSH_DELAY_SECONDS - time.monotonic())

    def _process(self, batch: list[Job]) -> None:
        """Run the jobs that have not run yet, flush if one needs it, and resolve the futures."""
        if to_run := [job for job in batch if job.result is None]:
            self._commit(to_run)
            self._checkpointed_rows -= sum(job.result.moved_pages for job in to_run if job.result)
            if self._is_checkpoint_due():
                self._checkpoint()
            self._ran += len(to_run)
        # The others need not wait for the flush.
        if settled := [job for job in batch if not job.commit]:
            self._loop.call_soon_threadsafe(settle_batch, settled)
        if waiting := [job for job in batch if job.commit]:
            # Turns begin during the flush. What they let the world see is flushed after it.
            if claiming := [job for job in waiting if job.result and job.result.claims]:
                self._loop.call_soon_threadsafe(start_claims, claiming)
            if max(job.commit for job in waiting) > self._flushed and (broken := self._flush()):
                fail_batch(waiting, broken)
            self._loop.call_soon_threadsafe(settle_batch, waiting)
        if self._flush_delay() == 0:
            self._flush()

    def _flush(self) -> StoreBroken | None:
        """Make all commits durable. Called by the thread only."""
        with self._lock:
            head, self._unflushed_since = self._head, None
        try:
            fdatasync(self._wal)
        except OSError as error:
            # After a failed flush a later success proves nothing about the lost pages, so writing must stop.
            return self._break(
                StoreBroken(f"the database could not be flushed to disk ({error}): check the disk, then start again")
            )
        self.flushes += 1
        self._flushed = head.commit
        self._last_commit.record(head.event, is_durable=True)
        return None

    def _break(self, error: StoreBroken) -> StoreBroken:
        """Refuse all writes from now on."""
        self._broken, self.is_healthy = error, False
        log.error("the store could not commit: %s", error)
        self._loop.call_soon_threadsafe(self._on_broken, error)
        return error

    def _is_checkpoint_due(self) -> bool:
        return self._db.total_changes - self._checkpointed_rows >= self._checkpoint_rows

    def _checkpoint(self) -> None:
        self._checkpointed_rows = self._db.total_changes
        with contextlib.suppress(sqlite3.OperationalError):  # blocked by a reader; the next checkpoint retries
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _commit(self, batch: list[Job], *, inline: bool = False) -> bool:
        """Run the jobs and commit. `inline`: on the event loop. False: another program has locked the database."""
        if self._broken:  # the jobs were queued before the failure
            fail_batch(batch, self._broken)
            return True
        if self._fail_if_files_gone(batch):
            return True
        if batch[0].run is rewrite_file:
            self._rewrite_file(batch)
            return True
        try:
            if not self._begin(wait=not inline):
                return False
            rows = self._db.total_changes
            self._run_batch(batch)
            last_event = self._write_events()
            hit("commit.before")
            # A commit that wrote nothing gets no number, but its jobs may have seen one that is not durable yet.
            head = _Head(self._head.commit + (self._db.total_changes != rows), last_event)
            self._visible = head.commit
            to_flush = [job for job in batch if job.result and job.result.needs_flush] if self._flushes else []
            if to_flush:
                self._needs_flush = head.commit
            self._db.execute("COMMIT")
            hit("commit.after")
            self._record_commit(head, to_flush, inline=inline)
            self._fail_if_files_gone(batch)
        except (sqlite3.Error, FailpointHit) as error:
            self._roll_back_batch(batch, error)
        except Exception as error:  # keep the thread alive: later writes would wait forever
            log.exception("the writer thread failed")
            self._roll_back_batch(
                batch, StoreBroken(f"the store failed to write ({type(error).__name__}): start again")
            )
        return True

    def _record_commit(self, head: _Head, to_flush: list[Job], *, inline: bool) -> None:
        self.is_healthy = True
        with self._lock:
            is_first = self._flushes and head.commit > self._head.commit and self._unflushed_since is None
            if is_first:
                self._unflushed_since = time.monotonic()
            must_wake = is_first and self._must_be_woken
            self._head = head
        for job in to_flush:
            job.commit = head.commit
        if to_flush:
            return
        self._last_commit.record(head.event)
        if must_wake and inline:
            self._jobs.put(Job(_noop, self._loop.create_future(), result=Result(None)))

    def _rewrite_file(self, batch: list[Job]) -> None:
        """Run the job `rewrite_file`: VACUUM refuses to run in a transaction."""
        try:
            batch[0].result = rewrite_file(self._db)
        except sqlite3.Error as error:
            fail_batch(batch, to_store_error(error, self._folder))

    def _fail_if_files_gone(self, batch: list[Job]) -> bool:
        """Fail the batch if a database file was removed or replaced: its writes would go to a deleted file."""
        if not (problem := self._files.problem()):
            return False
        fail_batch(batch, StoreUnavailable(problem))
        self.is_healthy = False
        return True

    def _begin(self, *, wait: bool) -> bool:
        """Begin a transaction. False: another program has locked the database, and `wait` is false."""
        waited = 0.0
        while True:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                return True
            except sqlite3.OperationalError as error:
                is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not is_busy or waited >= BUSY_ATTEMPTS * connection.BUSY_TIMEOUT_SECONDS:
                    raise
            if not wait:
                return False
            if waited >= connection.BUSY_TIMEOUT_SECONDS:
                self.is_healthy = False
            time.sleep(BUSY_PAUSE_SECONDS)
            waited += BUSY_PAUSE_SECONDS

    def _run_batch(self, batch: list[Job]) -> None:
        """Run the jobs. If one of several fails, all are undone and run again, each in its own savepoint.

        Failures are rare, and in a savepoint SQLite copies every page that is changed.
        """
        if len(batch) == 1:
            self._run(batch[0], is_only_job=True)
            return
        try:
            for job in batch:
                job.reset()
                job.result = job.run(self._db)
        except Exception as error:
            if _is_database_error(error):
                raise
            self._on_rollback()
            self._db.execute("ROLLBACK")
            self._begin(wait=True)
            for job in batch:
                self._run(job, is_only_job=False)

    def _run(self, job: Job, *, is_only_job: bool) -> None:
        """Run one job, in its own savepoint unless it is the only one of the batch."""
        job.reset()
        if not is_only_job:
            self._db.execute("SAVEPOINT job")
        try:
            job.result = self._run_with_retry(job, is_only_job=is_only_job)
        except Exception as error:
            if _is_database_error(error):
                raise
            job.error = error
            if not isinstance(error, CoterieError):
                log.exception("a transaction failed and was rolled back")
            self._roll_back_job(is_only_job=is_only_job)
        if not is_only_job:
            self._write_events()  # those of a later job may be undone
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
        if isinstance(store_error, StoreBroken):
            self._break(store_error)
        else:
            self.is_healthy = False
            log.error("the store could not commit: %s", store_error)


def _is_database_error(error: Exception) -> bool:
    """True if the whole batch must be rolled back."""
    return isinstance(error, sqlite3.Error | FailpointHit) and not isinstance(error, sqlite3.IntegrityError)


def rewrite_file(db: sqlite3.Connection) -> Result:
    """VACUUM the file and enable incremental vacuum. This job runs outside a transaction."""
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("VACUUM")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return Result(None)


def _noop(db: sqlite3.Connection) -> Result:
    """Empty job that wakes the writer thread."""
    return Result(None, needs_flush=False)
