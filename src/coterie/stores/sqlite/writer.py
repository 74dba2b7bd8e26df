"""The one thread that writes, and its group commit.

Durable commits cost a disk flush each. So the writer takes everything that has been handed in while it flushed, runs
it in one transaction, flushes once, and only then answers all of it.

Where commits do not flush (durability "relaxed"), handing a small transaction to another thread costs more than the
transaction. So while the thread has nothing to do, small ones are done at once by whoever hands them in; what flushes
even then, moving the log into the database, stays with the thread.
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
from coterie.stores.sql.claims import RunAgain
from coterie.stores.sql.jobs import Job, Jobs, Result, fail, gather, settle
from coterie.stores.sqlite.connection import LAST_EVENT, CommitFile, OpenFiles, translate

log = logging.getLogger(__name__)

BUSY_TRIES = 3
CHECKPOINT_EVERY = 1_024
"""Transactions between two checkpoints where commits do not flush: a log of some twenty megabytes. Whoever comes
meanwhile waits."""


class Writer:
    def __init__(
        self,
        db: sqlite3.Connection,
        on_broken: Callable[[StoreBroken], None],
        on_undone: Callable[[], None],
        *,
        folder: Path | None = None,
        files: OpenFiles | None = None,
        commits: CommitFile | None = None,
        flushes: bool = True,
    ) -> None:
        """`on_undone`: what was written is not so any more. `flushes`: whether a commit waits for the disk.

        `folder`: of the database, to tell a full disk from a broken one. `files`: looked at around every commit, which
        is refused when one is gone. `commits`: told of every commit.
        """
        self._folder, self._files, self._committed = folder, files, commits
        self._db, self._on_broken, self._on_undone, self._flushes = db, on_broken, on_undone, flushes
        self._handed_over = 0
        """Jobs that the thread has and that are not settled yet."""
        self._commits = 0
        """Since the last checkpoint."""
        self._jobs: Jobs = Jobs()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._broken: StoreBroken | None = None
        self.healthy = True
        self._thread = threading.Thread(target=self._work, name="coterie-writer", daemon=True)
        self._thread.start()

    def write(
        self,
        run: Callable[[sqlite3.Connection], Result],
        settled: Callable[[Any], None] | None = None,
        *,
        small: bool = False,
    ) -> asyncio.Future[Any]:
        """Run `run` in a transaction; done when that is durable. If `run` raises, nothing it did stays."""
        if self._broken:
            raise self._broken
        if self._closed:
            raise StoreUnavailable("the society is stopping: try again after its next start")
        answer: asyncio.Future[Any] = self._loop.create_future()
        job = Job(run, answer, settled)
        if small and not self._flushes and not self._handed_over:
            self._do_at_once(job)
        else:
            self._hand_over(job)
        return answer

    def _do_at_once(self, job: Job) -> None:
        self._commit([job])
        settle([job])
        if self._commits >= CHECKPOINT_EVERY:
            self._hand_over(Job(_nothing, self._loop.create_future()))

    def _hand_over(self, job: Job) -> None:
        self._handed_over += 1
        self._jobs.put(job)

    async def close(self) -> None:
        """After everything handed in so far."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        while job := self._jobs.get():
            batch, last = gather(self._jobs, job)
            self._commit(batch)
            if not self._flushes and self._commits >= CHECKPOINT_EVERY:
                self._checkpoint()
            try:
                self._loop.call_soon_threadsafe(self._settle, batch)
            except RuntimeError:  # the loop is gone, and with it everyone who waited
                return
            if last:
                return

    def _settle(self, batch: list[Job]) -> None:
        self._handed_over -= len(batch)
        settle(batch)

    def _checkpoint(self) -> None:
        self._commits = 0
        with contextlib.suppress(sqlite3.OperationalError):  # a reader is in the way: next time, then
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _commit(self, batch: list[Job]) -> None:
        if self._broken:  # these were handed in before anyone knew
            fail(batch, self._broken)
            return
        if self._refuse(batch):
            return
        try:
            self._begin()
            for job in batch:
                self._run(job, alone=len(batch) == 1)
            last = self._db.execute(LAST_EVENT).fetchone()[0] if self._committed else None
            hit("commit.before")
            self._db.execute("COMMIT")
            hit("commit.after")
            self._commits += 1
            self.healthy = True
            if self._committed and last:
                self._committed.note(last)
            self._refuse(batch)
        except (sqlite3.Error, FailpointHit) as error:
            self._roll_back(batch, error)
        except Exception as error:  # without this thread every later write would wait for ever
            log.exception("the store's writer failed")
            self._roll_back(batch, StoreBroken(f"the store's writer failed ({type(error).__name__}): start again"))

    def _refuse(self, batch: list[Job]) -> bool:
        """Fail all of it if the database is no longer in its place: what is written then is in a deleted file."""
        if not (self._files and (problem := self._files.problem())):
            return False
        fail(batch, StoreUnavailable(problem))
        self.healthy = False
        return True

    def _begin(self) -> None:
        for left in reversed(range(BUSY_TRIES)):
            try:
                self._db.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or not left:
                    raise
                self.healthy = False

    def _run(self, job: Job, *, alone: bool) -> None:
        """One job of a batch, in a savepoint of its own when there are others."""
        job.begin()
        if not alone:
            self._db.execute("SAVEPOINT job")
        try:
            job.result = self._run_twice(job, alone=alone)
        except Exception as error:
            if isinstance(error, sqlite3.Error | FailpointHit) and not isinstance(error, sqlite3.IntegrityError):
                raise  # the engine's trouble, not this job's: the whole batch is undone
            job.failed = error
            if not isinstance(error, CoterieError):
                log.exception("a transition failed; it was undone")
            self._undo(alone=alone)
        if not alone:
            self._db.execute("RELEASE job")

    def _run_twice(self, job: Job, *, alone: bool) -> Result:
        try:
            return job.run(self._db)
        except RunAgain:
            self._undo(alone=alone)
            return job.run(self._db)

    def _undo(self, *, alone: bool) -> None:
        self._on_undone()
        self._db.execute("ROLLBACK" if alone else "ROLLBACK TO job")
        if alone:
            self._db.execute("BEGIN")

    def _roll_back(self, batch: list[Job], error: Exception) -> None:
        meaning = translate(error, self._folder) if isinstance(error, sqlite3.Error) else error
        self._on_undone()
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except sqlite3.Error as worse:
            meaning = StoreBroken(f"what could not be written could not be undone either ({worse}): start again")
        fail(batch, meaning)
        self.healthy = False
        log.error("the store could not commit: %s", meaning)
        if isinstance(meaning, StoreBroken):
            # A later flush that succeeds proves nothing about this one, so there is no going on.
            self._broken = meaning
            self._loop.call_soon_threadsafe(self._on_broken, meaning)


def _nothing(db: sqlite3.Connection) -> Result:
    """A job that does nothing but wake the writer thread."""
    return Result(None)
