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


@dataclass(slots=True)
class Job:
    run: Callable[..., Any]
    answer: asyncio.Future[Any]
    settled: Callable[[bool], None] | None = None
    """Told on the event loop whether it was written, even when nobody waits for the answer any more."""
    touches: Sequence[str] = ()
    """Agents whose rows it is known to change."""
    messages: int = 0
    """So many it sends to these."""
    outcome: Any = None
    failed: BaseException | None = None


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
        if job.settled:
            try:
                job.settled(job.failed is None)
            except Exception:  # the other callers of this batch still get their answers
                log.exception("the outcome of a transaction could not be passed on")
        if job.answer.done():  # its caller was cancelled
            continue
        if job.failed is not None:
            job.answer.set_exception(job.failed)
        else:
            job.answer.set_result(job.outcome)
