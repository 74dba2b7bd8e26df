"""The writer thread of this process, with group commit and retries.

A batch that conflicts with another process or loses the connection is rolled back and retried. If the response to a
COMMIT is lost, the thread asks the database for the outcome. So a caller always learns whether its job was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg

from coterie.errors import CoterieError, StoreUnavailable
from coterie.failpoints import FailpointHit, hit
from coterie.stores.postgres.connection import (
    CONFLICT_CODES,
    PgConnection,
    PipelineFailed,
    RestartBatch,
    RowsLocked,
    error_code,
    is_job_error,
    is_transient,
    to_store_error,
)
from coterie.stores.postgres.session import BatchCheckpoint, BatchCommit, PostgresSession
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
)

log = logging.getLogger(__name__)

RETRY_BUDGET_SECONDS = 5.0
"""How long a batch is retried before its jobs fail."""
MAX_RETRY_DELAY_SECONDS = 1.0
# No person or program depends on this commit yet. The next flushed commit makes it durable too.
_COMMIT_WITHOUT_FLUSH = "SET LOCAL synchronous_commit = off; COMMIT"
BeginSession = Callable[[PgConnection, set[str], int, set[str]], PostgresSession]
"""Begins a transaction. Arguments: connection, agents to lock, number of messages to them, tasks to lock."""


class CommitUncertain(Exception):
    """The connection was lost during COMMIT, so its outcome is unknown."""

    def __init__(self, commit: BatchCommit) -> None:
        super().__init__(commit.batch)
        self.commit = commit


class Writer:
    def __init__(self, url: str, begin_session: BeginSession) -> None:
        self._url, self._begin_session = url, begin_session
        self._db: PgConnection | None = None
        self._jobs: JobQueue = JobQueue()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.is_healthy = True
        self._thread = threading.Thread(target=self._run_thread, name="coterie-writer", daemon=True)
        self._thread.start()

    def write(
        self,
        run: Callable[[PgConnection, PostgresSession], Result],
        on_settled: Callable[[Any], None] | None,
        touches: tuple[str, ...],
        messages: int = 0,
        alone: bool = False,
    ) -> asyncio.Future[Any]:
        """Run `run` in a transaction; the future resolves after the commit. If `run` raises, its writes are undone.

        `touches`: ids of agents to lock first. `messages`: how many messages it sends to them. `alone`: see `Job`.
        """
        if self._closed:
            raise StoreUnavailable(CLOSED)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put(Job(run, future, on_settled, touches, messages, alone))
        return future

    async def close(self) -> None:
        """Finish the queued jobs, then end the thread."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        self._disconnect()

    def _run_thread(self) -> None:
        is_last = False
        while not is_last and (job := self._jobs.get()):
            batch, is_last = collect_batch(self._jobs, job)
            for part in split_batch(batch):
                self._commit(part)
                try:
                    self._loop.call_soon_threadsafe(settle_batch, part)
                except RuntimeError:  # the loop is closed: no caller waits
                    return

    def _commit(self, batch: list[Job]) -> None:
        """Retry the batch until it is written or the retry budget is spent."""
        touches, tasks = {agent_id for job in batch for agent_id in job.touches}, set[str]()
        deadline, delay, pipelining, is_first_error = time.monotonic() + RETRY_BUDGET_SECONDS, 0.01, True, True
        while True:
            for job in batch:
                job.reset()
            try:
                self._try(batch, touches, tasks, pipelining)
                self.is_healthy = True
                return
            except RowsLocked as locked:
                touches.update(locked.agents)
                tasks.update(locked.tasks)
                self._roll_back_batch()
                continue
            except RestartBatch:
                self._roll_back_batch()
                continue
            except PipelineFailed:
                pipelining = False
                self._roll_back_batch()
                continue
            except CommitUncertain as uncertain:
                if self._was_committed(uncertain.commit):
                    self.is_healthy = True
                    return
            except (psycopg.Error, FailpointHit) as error:
                self._roll_back_batch()
                # The first conflict is always retried, even if the batch has already waited for the whole budget.
                is_first_conflict = is_first_error and error_code(error) in CONFLICT_CODES
                is_first_error = False
                if not is_transient(error) or (time.monotonic() >= deadline and not is_first_conflict):
                    self._give_up(batch, error)
                    return
                self.is_healthy = self.is_healthy and not _is_lost(self._db)
            time.sleep(delay * random.uniform(0.5, 1))
            delay = min(MAX_RETRY_DELAY_SECONDS, delay * 2)

    def _try(self, batch: list[Job], touches: set[str], tasks: set[str], pipelining: bool) -> None:
        """Run and commit the batch once. Without pipelining, each error can be attributed to its job."""
        db = self._connection()
        db.pipelining = pipelining
        session = self._begin_session(db, touches, sum(job.message_count for job in batch), tasks)
        # The only job of a batch needs no savepoint: if it fails, the whole transaction is rolled back.
        has_savepoints = len(batch) > 1
        if has_savepoints:
            db.begin_savepoints()
        for index, job in enumerate(batch):
            if index:
                db.next_savepoint()
            self._run(db, session, job, has_savepoints)
        if all(job.error for job in batch):
            db.execute_now("ROLLBACK")
            return
        commit = session.close()
        hit("commit.before")
        try:
            cursor = db.execute_now("COMMIT" if _needs_flush(batch) else _COMMIT_WITHOUT_FLUSH)
        except psycopg.OperationalError as error:
            if commit and _is_lost(db):
                raise CommitUncertain(commit) from error
            raise
        if cursor.statusmessage != "COMMIT":
            raise psycopg.OperationalError("the transaction was rolled back")
        hit("commit.after")

    def _run(self, db: PgConnection, session: PostgresSession, job: Job, has_savepoint: bool) -> None:
        checkpoint = session.begin_job()
        try:
            job.result = self._run_with_retry(db, session, job, checkpoint if has_savepoint else None)
        except Exception as error:
            if isinstance(error, FailpointHit) or (isinstance(error, psycopg.Error) and not is_job_error(error)):
                raise  # a database error: the whole batch is rolled back
            job.error = to_store_error(error) if isinstance(error, psycopg.Error) else error
            if not isinstance(error, CoterieError):
                log.exception("a transaction failed and was rolled back")
            if has_savepoint:
                _roll_back_job(db, session, checkpoint)
            else:
                db.discard_queued()
        if not job.touches:  # it may have changed any row
            session.invalidate()

    def _run_with_retry(
        self, db: PgConnection, session: PostgresSession, job: Job, checkpoint: BatchCheckpoint | None
    ) -> Result:
        """`checkpoint`: None if the job is the only one of its batch."""
        try:
            result = job.run(db, session)
        except RetryTransaction:
            if checkpoint is None:
                raise RestartBatch from None
            _roll_back_job(db, session, checkpoint)
            result = job.run(db, session)
        if not db.pipelining:
            db.flush()  # raise this job's errors now, not in the next job
        return result

    def _give_up(self, batch: list[Job], error: Exception) -> None:
        store_error = to_store_error(error) if isinstance(error, psycopg.Error) else error
        fail_batch(batch, store_error)
        self.is_healthy = False
        log.error("the store could not commit: %s", store_error)

    def _was_committed(self, commit: BatchCommit) -> bool:
        """Ask the database for the outcome, without time limit: it is never guessed."""
        self._disconnect()
        self.is_healthy = False
        log.warning("the response to a commit was lost; asking for the outcome of transaction %s", commit.transaction)
        while True:
            with contextlib.suppress(psycopg.Error):
                db = self._connection()
                db.pipelining = False
                if not commit.is_in_progress(db):
                    return commit.is_committed(db)
            time.sleep(0.1 * random.uniform(0.5, 1))

    def _connection(self) -> PgConnection:
        if self._db is None or self._db.closed:
            self._db = PgConnection.for_writes(self._url)
        return self._db

    def _roll_back_batch(self) -> None:
        """Roll back; close the connection if that fails."""
        try:
            if self._db and not self._db.closed:
                self._db.discard_queued()
                self._db.raw.execute("ROLLBACK")
        except psycopg.Error:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._db:
            with contextlib.suppress(psycopg.Error):
                self._db.close()
            self._db = None


def _roll_back_job(db: PgConnection, session: PostgresSession, checkpoint: BatchCheckpoint) -> None:
    db.discard_job()
    db.execute_now("ROLLBACK TO SAVEPOINT job")
    session.roll_back_to(checkpoint)


def _needs_flush(batch: list[Job]) -> bool:
    return any(job.result is not None and job.result.needs_flush for job in batch)


def _is_lost(db: PgConnection | None) -> bool:
    return db is None or db.closed or db.raw.broken
