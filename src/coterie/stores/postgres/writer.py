"""The one thread of this process that writes, and its group commit.

A batch that meets another process, or loses the database, is undone and tried again; a commit whose answer was lost is
looked up. So whoever waits hears what is, or that nothing was written.
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
from coterie.stores.postgres.connection import PgConnection, connect
from coterie.stores.postgres.errors import UNDONE, Contended, Doubtful, error_code, is_own, meaning, passes
from coterie.stores.postgres.session import BatchLedger, JobMark, Written
from coterie.stores.sql.claims import RunAgain
from coterie.stores.sql.jobs import Job, Jobs, Result, fail, gather, settle

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds for which a batch is tried again before those who wait are told."""
LONGEST_PAUSE = 1.0
Ledgers = Callable[[PgConnection, set[str], int], BatchLedger]
"""Begins a transaction that touches these agents, and sends them so many messages at most."""


class LostAnswer(Exception):
    """The commit may have happened, or not."""

    def __init__(self, written: Written) -> None:
        super().__init__(written.batch)
        self.written = written


class Writer:
    def __init__(self, url: str, ledgers: Ledgers) -> None:
        self._url, self._ledgers = url, ledgers
        self._db: PgConnection | None = None
        self._jobs: Jobs = Jobs()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.healthy = True
        self._thread = threading.Thread(target=self._work, name="coterie-writer", daemon=True)
        self._thread.start()

    def write(
        self,
        run: Callable[[PgConnection, BatchLedger], Result],
        settled: Callable[[Any], None] | None,
        touches: tuple[str, ...],
        messages: int = 0,
    ) -> asyncio.Future[Any]:
        """Run `run` in a transaction; done when that is durable. If `run` raises, nothing it did stays."""
        if self._closed:
            raise StoreUnavailable("the society is stopping: try again after its next start")
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put(Job(run, answer, settled, touches, messages))
        return answer

    async def close(self) -> None:
        """After everything handed in so far."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        self._hang_up()

    def _work(self) -> None:
        last = False
        while not last and (job := self._jobs.get()):
            batch, last = gather(self._jobs, job)
            self._commit(batch)
            try:
                self._loop.call_soon_threadsafe(settle, batch)
            except RuntimeError:  # the loop is gone, and with it everyone who waited
                return

    def _commit(self, batch: list[Job]) -> None:
        """Until it is written, or its time is over."""
        touches = {name for job in batch for name in job.touches}
        until, pause, gathers, first = time.monotonic() + PATIENCE, 0.01, True, True
        while True:
            for job in batch:
                job.begin()
            try:
                self._try(batch, touches, gathers)
                self.healthy = True
                return
            except Contended as contended:
                touches.add(contended.agent_id)
                self._undo()
                continue
            except Doubtful:
                gathers = False
                self._undo()
                continue
            except LostAnswer as lost:
                if self._was_committed(lost.written):
                    self.healthy = True
                    return
            except (psycopg.Error, FailpointHit) as error:
                self._undo()
                # The database undid it for the sake of another transaction: once more, however long this one waited.
                once_more = first and error_code(error) in UNDONE
                first = False
                if not passes(error) or (time.monotonic() >= until and not once_more):
                    self._give_up(batch, error)
                    return
                self.healthy = self.healthy and not _is_lost(self._db)
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(LONGEST_PAUSE, pause * 2)

    def _try(self, batch: list[Job], touches: set[str], gathers: bool) -> None:
        """`gathers`: statements wait for one that is looked at. Else an error is the fault of the job that meets it."""
        db = self._connected()
        db.gathers = gathers
        ledger = self._ledgers(db, touches, sum(job.messages for job in batch))
        for place, job in enumerate(batch):
            if place:
                db.begin_job()
            self._run(db, ledger, job)
        if all(job.failed for job in batch):
            db.say("ROLLBACK")
            return
        written = ledger.close()
        hit("commit.before")
        try:
            done = db.say("COMMIT")
        except psycopg.OperationalError as error:
            if written and _is_lost(db):
                raise LostAnswer(written) from error
            raise
        if done.statusmessage != "COMMIT":
            raise psycopg.OperationalError("the transaction was rolled back")
        hit("commit.after")

    def _run(self, db: PgConnection, ledger: BatchLedger, job: Job) -> None:
        mark = ledger.next_job()
        try:
            job.result = self._run_twice(db, ledger, job, mark)
        except Exception as error:
            if isinstance(error, FailpointHit) or (isinstance(error, psycopg.Error) and not is_own(error)):
                raise  # the engine's trouble, not this job's: the whole batch is undone
            job.failed = meaning(error) if isinstance(error, psycopg.Error) else error
            if not isinstance(error, CoterieError):
                log.exception("a transition failed; it was undone")
            _roll_back(db, ledger, mark)
        if not job.touches:
            ledger.read_anew()

    def _run_twice(self, db: PgConnection, ledger: BatchLedger, job: Job, mark: JobMark) -> Result:
        try:
            result = job.run(db, ledger)
        except RunAgain:
            _roll_back(db, ledger, mark)
            result = job.run(db, ledger)
        if not db.gathers:
            db.flush()  # what is wrong with it is this job's fault, and not the next one's
        return result

    def _give_up(self, batch: list[Job], error: Exception) -> None:
        told = meaning(error) if isinstance(error, psycopg.Error) else error
        fail(batch, told)
        self.healthy = False
        log.error("the store could not commit: %s", told)

    def _was_committed(self, written: Written) -> bool:
        """No outcome is ever guessed: this takes as long as it takes."""
        self._hang_up()
        self.healthy = False
        log.warning("the answer to a commit was lost; asking what became of transaction %s", written.transaction)
        while True:
            with contextlib.suppress(psycopg.Error):
                db = self._connected()
                db.gathers = False
                if not written.is_under_way(db):
                    return written.is_committed(db)
            time.sleep(0.1 * random.uniform(0.5, 1))

    def _connected(self) -> PgConnection:
        if self._db is None or self._db.closed:
            self._db = PgConnection(connect(self._url))
        return self._db

    def _undo(self) -> None:
        """Whatever was begun is not; a connection that cannot say so is given up."""
        try:
            if self._db and not self._db.closed:
                self._db.forget()
                self._db.raw.execute("ROLLBACK")
        except psycopg.Error:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._db:
            with contextlib.suppress(psycopg.Error):
                self._db.close()
            self._db = None


def _roll_back(db: PgConnection, ledger: BatchLedger, mark: JobMark) -> None:
    db.forget_job()
    db.say("ROLLBACK TO SAVEPOINT job")
    ledger.forget(mark)


def _is_lost(db: PgConnection | None) -> bool:
    return db is None or db.closed or db.raw.broken
