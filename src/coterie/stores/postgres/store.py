"""The store port on PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from coterie.messages import Message
from coterie.store import Page
from coterie.stores.postgres.backup import copy
from coterie.stores.postgres.bytes import DatabaseBytes
from coterie.stores.postgres.database import Database
from coterie.stores.postgres.search import search
from coterie.stores.postgres.staff import workers
from coterie.stores.sql.store import SqlStore
from coterie.workers import Worker


class PostgresStore(Database, SqlStore):
    def kept(self) -> DatabaseBytes:
        """The bytes of artifacts, beside everything else."""
        return DatabaseBytes(self._read)

    async def search(self, words: str, page: Page, agent_id: str | None = None) -> Sequence[Message]:
        return await self._read(lambda db: search(db, words, page, agent_id))

    async def workers(self) -> Sequence[Worker]:
        return await self._read(lambda db: workers(db, self._lease))

    async def backup(self, target: Path) -> None:
        await asyncio.to_thread(copy, self._url, target)
