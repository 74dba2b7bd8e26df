"""The storage port for retention: what is deleted when it is old, and how much is stored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long finished things are kept."""

    messages: timedelta | None = None
    """None: forever."""
    dead_letters: timedelta = timedelta(days=30)
    events: timedelta = timedelta(days=7)
    unused_artifacts: timedelta = timedelta(hours=24)
    """Artifacts that no message refers to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """Numbers of deleted rows."""

    messages: int = 0
    history: int = 0
    plans: int = 0
    calls: int = 0
    model_calls: int = 0
    tasks: int = 0
    turns: int = 0
    schedules: int = 0
    events: int = 0
    artifacts: int = 0

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(Pruned)})


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedArtifacts:
    """Artifacts that nothing refers to, from one part of all artifacts."""

    refs: Sequence[str]
    bytes: int
    next: tuple[int, str] | None
    """Where the next part begins. None: this is the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastPrune:
    """The last run that deleted what was too old."""

    at: datetime
    age: timedelta
    """By the clock that all processes share."""
    deleted: Pruned


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFigures:
    """How much is stored. PostgreSQL estimates all of it but `file_bytes` and `oldest`."""

    file_bytes: int
    """Size of the database."""
    used_bytes: int
    """The part of it that holds rows and indexes."""
    artifact_bytes: int
    rows: Mapping[str, int]
    """By table."""
    oldest: datetime | None
    """Time of the oldest message."""
    last_prune: LastPrune | None
    can_shrink: bool
    """False: the file keeps its size until it is rewritten."""


class RetentionStore(Protocol):
    @property
    def write_count(self) -> int:
        """How many transactions of this process callers have waited for. Background work is not counted."""
        ...

    def prune(self, retention: Retention, *, dry_run: bool = False, full: bool = True) -> AsyncIterator[Pruned | None]:
        """Delete what is older than `retention` allows and no longer needed, oldest first.

        Each item is one transaction of a few milliseconds, or a read of a bounded number of rows, which deletes
        nothing; the caller decides when the next one follows. None: wait until all transactions of other processes
        that run now have ended. `dry_run`: only count. `full`: look at all old rows again, not only at those that
        became old since the last run.
        """
        ...

    async def unused_artifacts(self, age: timedelta, after: tuple[int, str] = (0, "")) -> UnusedArtifacts:
        """Artifacts older than `age` that no message, history or open plan refers to, from the next 500."""
        ...

    async def delete_artifacts(self, refs: Sequence[str], age: timedelta) -> tuple[int, Sequence[str]]:
        """Delete those that are still unused; return their number and the hashes of bytes that are not needed now."""
        ...

    async def named_blobs(self, hashes: Sequence[str]) -> Set[str]:
        """Those of the hashes whose bytes belong to an artifact."""
        ...

    async def storage(self) -> StorageFigures: ...

    async def age_beyond(self, fraction: float) -> timedelta | None:
        """The age of the messages that follow the oldest `fraction` of all. None: there is no message."""
        ...

    async def claim_prune(self, process: str, *, takes_over: bool = False) -> bool:
        """Claim a run for `process`, or renew its claim. False: another process has one that is not five minutes old.

        `takes_over`: replace the claim of another process, whose next renewal fails then.
        """
        ...

    async def record_prune(self, deleted: Pruned) -> None:
        """Store what a run has deleted, as `StorageFigures.last_prune`, and end its claim."""
        ...

    async def release_space(self) -> bool:
        """Give a few free pages back to the operating system. False: there are no more."""
        ...

    async def rewrite(self) -> None:
        """VACUUM the database file and enable incremental vacuum. Writers wait until it is done."""
        ...
