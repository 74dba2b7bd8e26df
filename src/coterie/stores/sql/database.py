"""What an engine gives to the shared half of the store: transactions that write, and readers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from coterie.clock import Clock
from coterie.errors import StoreBroken
from coterie.llm.places import Share, fair
from coterie.store import Limits, StoreInfo
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.post import Post
from coterie.turns import Taker
from coterie.workers import Tally

T = TypeVar("T")


class SqlDatabase(ABC):
    info: StoreInfo
    limits: Limits
    broken: asyncio.Future[StoreBroken]
    """Set when writing can no longer be trusted and the process must stop."""
    news: Callable[[], None] = staticmethod(lambda: None)
    """Called on the event loop when somebody else has written something; set by whoever wants to know."""
    heard: Callable[[str], None] = staticmethod(lambda word: None)
    """Called on the event loop with what somebody whispered, we ourselves included."""
    room: Callable[[], None] = staticmethod(lambda: None)
    """Called on the event loop when somebody wants a place at a model service, or has given one back."""
    seen_paused: bool = False
    """Whether the society was paused when this process last looked. A hint for what was decided before: a decision
    itself asks the database, in its own transaction."""
    tally: Tally
    _clock: Clock
    _taker: Taker | None = None

    def __init__(self) -> None:
        self.tally = Tally()

    @property
    @abstractmethod
    def healthy(self) -> bool: ...

    @property
    def trouble(self) -> str | None:
        """Why writes do not get through, in one sentence, as far as it is known without trying."""
        return None

    async def is_last(self) -> bool:
        """Whether no other process runs this society."""
        return True

    async def whisper(self, words: Sequence[str]) -> None:  # noqa: B027 - where nobody else is, nobody hears
        """Told to every process that runs this society just now, if all goes well; nothing of it is stored.

        A word is not empty, and has fewer than 8,000 bytes.
        """

    async def share(self, service: str, limit: int, keeps: int, waiting: int, urgent: int = 0) -> Share:
        """Where nobody else is, nobody else wants a place."""
        return fair(limit, keeps, waiting, (), urgent=urgent)

    def attend(self, taker: Taker) -> None:
        self._taker = taker

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def _post(
        self,
        run: Callable[[Connection, Post], T],
        *,
        touches: Sequence[str] = (),
        messages: int = 0,
        small: bool = False,
    ) -> asyncio.Future[T]:
        """One transition, with a post office of its own; whoever it gives something to do is claimed with it.

        `touches`: agents whose rows it is known to change, so that an engine with locks takes them in order.
        `messages`: as many are sent to these. `small`: it is soon done.
        """
        ...

    @abstractmethod
    async def _read(self, run: Callable[[Connection], T], *, one_moment: bool = False) -> T:
        """`one_moment`: all statements see the same state."""
        ...

    @abstractmethod
    async def _now(self) -> int:
        """What due times are measured against."""
        ...

    async def _query(self, sql: str, *parameters: Any) -> list[Any]:
        return await self._read(lambda db: db.execute(sql, parameters).fetchall())
