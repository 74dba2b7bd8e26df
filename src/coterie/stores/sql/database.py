"""What an SQL engine provides: write transactions, reads, and what it knows of other processes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from coterie.clock import Clock
from coterie.errors import StoreBroken
from coterie.slot_sharing import SlotGrant, divide_slots
from coterie.store import Limits, StoreInfo, WorkerCounters
from coterie.stores.sql.rows import Connection
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn_store import TurnWorker

T = TypeVar("T")

MAX_CLAIMS_PER_ROUND = 128
"""A round reserves as many slots, which running turns cannot use meanwhile."""


class SqlDatabase(ABC):
    info: StoreInfo
    limits: Limits
    broken: asyncio.Future[StoreBroken]
    """Set when writes can no longer be trusted: the process must stop."""
    seen_paused: bool = False
    """Whether the society was paused when this process last read it. A hint: decisions read it in their transaction."""
    seen_configuration: int = 0
    """Version of the stored configuration when the last transaction of this process began. Only with PostgreSQL."""
    counters: WorkerCounters
    _clock: Clock
    _worker: TurnWorker | None = None

    def __init__(self) -> None:
        self.counters = WorkerCounters()
        self._on_slots_changed: list[Callable[[], None]] = []
        self._on_change: list[Callable[[bool], None]] = []
        self._on_broadcast: list[Callable[[str], None]] = []
        self._write_count = 0

    @property
    @abstractmethod
    def is_healthy(self) -> bool: ...

    @property
    def write_error(self) -> str | None:
        """Why writes fail, in one sentence, as far as known without trying. None: no reason is known."""
        return None

    async def is_only_process(self) -> bool:
        """True if no other process runs this society."""
        return True

    async def claim_prune(self, process: str, *, takes_over: bool = False) -> bool:
        """Claim a run of the deletion of old data, or renew the claim. True, where there is no other process."""
        return True

    @property
    def write_count(self) -> int:
        return self._write_count

    def set_limits(self, limits: Limits) -> None:
        """Change the limits for transactions that start from now on."""
        self.limits = limits

    def subscribe_changes(self, callback: Callable[[bool], None]) -> None:
        """Call `callback` on the event loop when another process has written something.

        The argument is True if the write may have one of `SOCIETY_EVENTS`.
        """
        self._on_change.append(callback)

    def subscribe_broadcasts(self, callback: Callable[[str], None]) -> None:
        """Call `callback` on the event loop with each text that a process broadcasts, this one included."""
        self._on_broadcast.append(callback)

    async def broadcast(self, texts: Sequence[str]) -> None:  # noqa: B027 - one process has no other to notify
        """Send texts to every process that runs this society. Best effort; nothing is stored.

        A text must not be empty and must have fewer than 8,000 bytes.
        """

    def subscribe_slots(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the event loop when another process wants or releases a slot of a model service."""
        self._on_slots_changed.append(callback)

    async def request_slots(self, service: str, limit: int, held: int, waiting: int, urgent: int = 0) -> SlotGrant:
        """Divide the slots of a model service. This implementation knows no other process."""
        return divide_slots(limit, held, waiting, (), urgent=urgent)

    def register_worker(self, worker: TurnWorker) -> None:
        self._worker = worker

    @property
    def claims_per_round(self) -> int:
        """Agents that one call of `claim_ready` should claim at most."""
        return MAX_CLAIMS_PER_ROUND

    def _claim_delay_ms(self) -> int:
        """How long ready agents are left to other processes before this one claims them."""
        return 0

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def _transact(
        self,
        run: Callable[[Connection, UnitOfWork], T],
        *,
        touches: Sequence[str] = (),
        messages: int = 0,
        small: bool = False,
        durable: bool = True,
        alone: bool = False,
    ) -> asyncio.Future[T]:
        """Run `run` in a write transaction; the future is done when it is committed. Agents that it wakes are claimed.

        `touches`: agents whose rows it changes, which are locked first and in order. `messages`: number of messages
        that it sends to them. `small`: it is short enough to run on the event loop. `durable`: the commit is flushed
        to disk first. If false, it is flushed only if a person or another program depends on it
        (`UnitOfWork.needs_flush`). `alone`: no other change is in its transaction.
        """
        ...

    @abstractmethod
    async def _read(self, run: Callable[[Connection], T], *, in_snapshot: bool = False) -> T:
        """Run `run` on a reader. `in_snapshot`: all its statements see the same state."""
        ...

    async def _event_horizon(self) -> int | None:
        """Number up to which no further event can become visible. None: events become visible in order."""
        return None

    @abstractmethod
    async def _flush_commits(self) -> None:
        """Make everything durable that a read before may have seen."""
        ...

    @abstractmethod
    async def _now_ms(self) -> int:
        """Time that due times are compared with."""
        ...

    async def _query(self, sql: str, **parameters: Any) -> list[Any]:
        return await self._read(lambda db: db.execute(sql, parameters).fetchall())
