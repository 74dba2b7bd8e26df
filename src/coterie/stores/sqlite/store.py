"""The store port on SQLite."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from coterie.messages import Message
from coterie.store import Page
from coterie.stores.sql.store import SqlStore
from coterie.stores.sqlite.connections import copy
from coterie.stores.sqlite.database import Database
from coterie.stores.sqlite.search import search
from coterie.turns import Taker
from coterie.workers import Worker, name_of

_CLAIMS = "SELECT count(*) FROM agents WHERE worker = ? AND state IN ('llm', 'tools')"


class SqliteStore(Database, SqlStore):
    def attend(self, taker: Taker) -> None:
        super().attend(taker)
        self._attending_since = self._clock.now()

    async def search(self, words: str, page: Page, agent_id: str | None = None) -> Sequence[Message]:
        return await self._read(lambda db: search(db, words, page, agent_id))

    async def workers(self) -> Sequence[Worker]:
        """Ourselves, if our agents work."""
        if self._taker is None:
            return []
        ((claims,),) = await self._query(_CLAIMS, self._taker.worker)
        return [
            Worker(
                id=self._taker.worker,
                name=name_of(),
                since=self._attending_since,
                seen_at=self._clock.now(),
                claims=claims,
                heartbeats=0,
                fenced=self.tally.fenced,
                takeovers=self.tally.takeovers,
            )
        ]

    async def backup(self, target: Path) -> None:
        await asyncio.to_thread(copy, self._path, target)
