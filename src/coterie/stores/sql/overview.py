"""The overview port, in queries that both engines share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime

from coterie.artifacts import Artifact
from coterie.clock import to_ms
from coterie.messages import PERSON, Message
from coterie.overview import SHOWN, PlanRecord, Snapshot, Usage
from coterie.store import Page
from coterie.stores.sql import records, snapshot, threads, transitions
from coterie.stores.sql.database import SqlDatabase


class SqlOverview(SqlDatabase):
    @abstractmethod
    async def search(self, words: str, page: Page, agent_id: str | None = None) -> Sequence[Message]: ...

    async def snapshot(self) -> Snapshot:
        return await self._read(snapshot.snapshot, one_moment=True)

    async def thread(
        self,
        agent_id: str,
        *,
        before: str | None = None,
        after: str | None = None,
        around: str | None = None,
        limit: int = 50,
    ) -> Sequence[Message]:
        return await self._read(lambda db: threads.part(db, agent_id, before, after, around, limit))

    async def clear_thread(self, agent_id: str) -> int:
        return await self._post(
            lambda db, post: transitions.clear_thread(db, post, agent_id), touches=[agent_id, PERSON]
        )

    async def unread(self, agent_ids: Sequence[str]) -> Mapping[str, int]:
        return await self._read(lambda db: {one: threads.unread(db, one) for one in agent_ids})

    async def open_questions(self, agent_id: str | None = None, limit: int = SHOWN) -> Sequence[Message]:
        return await self._read(lambda db: threads.open_questions(db, agent_id, limit))

    async def runs(self, page: Page, agent_id: str | None = None) -> Sequence[PlanRecord]:
        return await self._read(lambda db: records.runs(db, page, agent_id))

    async def usage(self, since: datetime) -> Sequence[Usage]:
        return await self._read(lambda db: records.usage(db, to_ms(since)))

    async def artifacts_before(self, ref: str | None, limit: int) -> Sequence[Artifact]:
        return await self._read(lambda db: records.artifacts_before(db, ref, limit))
