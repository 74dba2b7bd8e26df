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


class SqliteStore(Database, SqlStore):
    async def search(self, words: str, page: Page, agent_id: str | None = None) -> Sequence[Message]:
        return await self._read(lambda db: search(db, words, page, agent_id))

    async def backup(self, target: Path) -> None:
        await asyncio.to_thread(copy, self._path, target)
