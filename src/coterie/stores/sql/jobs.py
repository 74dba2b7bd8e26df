"""What is handed to the thread that writes, and how it is answered."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

BATCH = 256
"""Jobs in one commit at most: bounds how long the first of them waits for the last."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one run of a job's body returned. A body may be undone and run again, so it keeps its results nowhere else:
    only the result of the run that was committed is ever used."""

    answer: Any
    """For the caller."""
    attended: Any = None
    """For `Job.settled`."""


@dataclass(slots=True)
class Job:
    run: Callable[..., Result]
    answer: asyncio.Future[Any]
    settled: Callable[[Any], None] | None = None
    """Called on the event loop with `attended` of the committed run, or with None when nothing was written; also when
    nobody waits for the answer any more."""
    touches: Sequence[str] = ()
    """Agents whose rows it is known to change."""
    messages: int = 0
    """So many it sends to these."""
    result: Result | None = None
    failed: BaseException | None = None

    def begin(self) -> None:
        """It is about to be run, perhaps again: nothing of an earlier run counts."""
        self.result = self.failed = None


Jobs = queue.SimpleQueue[Job | None]
"""None: there will be no more."""


def gather(jobs: Jobs, first: Job) -> tuple[list[Job], bool]:
    """`first` and whatever else is there already; whether that was the last."""
    batch = [first]
    while len(batch) < BATCH:
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            break
        if job is None:
            return batch, True
        batch.append(job)
    return batch, False


def fail(batch: list[Job], error: BaseException) -> None:
    for job in batch:
        job.failed = error


def settle(batch: list[Job]) -> None:
    """On the event loop."""
    for job in batch:
        written = job.result if job.failed is None else None
        if job.settled:
            try:
                job.settled(written and written.attended)
            except Exception:  # the other callers of this batch still get their answers
                log.exception("the outcome of a transaction could not be passed on")
        if job.answer.done():  # its caller was cancelled
            continue
        if written is None:
            job.answer.set_exception(job.failed or AssertionError("a job was neither run nor refused"))
        else:
            job.answer.set_result(written.answer)
