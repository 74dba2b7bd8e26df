"""Jobs for the writer thread: how they are batched, and how their callers get results. Reads in the reader threads."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

import msgspec

from coterie.errors import StoreUnavailable

log = logging.getLogger(__name__)

CLOSED = "the society is stopping: try again after its next start"
T = TypeVar("T")

MAX_BATCH_JOBS = 256
"""Jobs per commit. This limit bounds how long the first job waits for the last."""


class Result(msgspec.Struct, frozen=True):
    """What one run of a job returned.

    A run may be rolled back and repeated, so it must keep its results nowhere else. Only the committed run counts.
    """

    value: Any
    """Result for the caller."""
    claims: Any = None
    """Argument of `Job.on_settled`."""
    needs_flush: bool = True
    """A person or another program depends on the commit: it is flushed to disk before the caller gets the result."""
    moved_pages: int = 0
    """Pages of the SQLite file that it wrote without changing rows."""


class Job(msgspec.Struct, eq=False):
    run: Callable[..., Result]
    future: asyncio.Future[Any]
    on_settled: Callable[[Any], None] | None = None
    """Called once, on the event loop, with `claims` of the committed run, or with None if nothing was written.

    It is called even if the caller was cancelled. The commit need not be flushed yet.
    """
    touches: Sequence[str] = ()
    """Ids of agents whose rows the job changes, to be locked first."""
    message_count: int = 0
    """Messages that it sends to these agents."""
    alone: bool = False
    """It has a transaction of its own, after those of the jobs that were queued with it."""
    result: Result | None = None
    error: BaseException | None = None
    commit: int = 0
    """SQLite: number of the commit that must be flushed before the future is resolved. 0: none."""

    def reset(self) -> None:
        """Forget the result of an earlier run."""
        self.result = self.error = None


async def run_read(readers: Executor, read: Callable[[], T]) -> T:
    """Run `read` in a reader thread. `StoreUnavailable`: the store is closed."""
    try:
        reading = asyncio.get_running_loop().run_in_executor(readers, read)
    except RuntimeError as error:  # the readers were shut down
        raise StoreUnavailable(CLOSED) from error
    return await reading


JobQueue = queue.SimpleQueue[Job | None]
"""None: no more jobs follow."""


def collect_batch(jobs: JobQueue, first: Job) -> tuple[list[Job], bool]:
    """Return `first` with the jobs that are queued already, and True if no more jobs follow."""
    batch = [first]
    while len(batch) < MAX_BATCH_JOBS:
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            break
        if job is None:
            return batch, True
        batch.append(job)
    return batch, False


def split_batch(batch: list[Job]) -> list[list[Job]]:
    """Return the jobs of each transaction, in order."""
    shared = [job for job in batch if not job.alone]
    return ([shared] if shared else []) + [[job] for job in batch if job.alone]


def fail_batch(batch: list[Job], error: BaseException) -> None:
    for job in batch:
        job.error = error


def start_claims(batch: list[Job]) -> None:
    """Call `on_settled` of each job that was not called before. Call it on the event loop.

    The worker gets the claims of committed jobs. For a failed job it gets None, and releases the reserved slots.
    """
    for job in batch:
        if (on_settled := job.on_settled) is None:
            continue
        job.on_settled = None
        written = job.result if job.error is None else None
        try:
            on_settled(written and written.claims)
        except Exception:  # the other callers of this batch must still get their results
            log.exception("the callback of a committed transaction failed")


def settle_batch(batch: list[Job]) -> None:
    """Call `start_claims`, and resolve the futures of the batch. Call it on the event loop."""
    start_claims(batch)
    for job in batch:
        written = job.result if job.error is None else None
        if job.future.done():  # its caller was cancelled
            continue
        if written is None:
            job.future.set_exception(job.error or AssertionError("a job has neither a result nor an error"))
        else:
            job.future.set_result(written.value)
