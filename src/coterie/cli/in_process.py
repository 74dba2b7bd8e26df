"""A conversation with a society that nobody runs: it runs in this process, for as long as the conversation lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from coterie.cli.conversation import Arrived, DraftOver, Line, News, Over, Piece, Speech, Stands, Taken, Unread
from coterie.cli.files import pieces
from coterie.cli.saying import say
from coterie.errors import Lagged, Refused
from coterie.events import Event
from coterie.live import Draft
from coterie.messages import Receipt
from coterie.society import Society
from coterie.web.schemas import AgentStatus


class OwnConversation:
    def __init__(self, society: Society, agent_id: str) -> None:
        self._society, self._agent = society, agent_id
        self._news: asyncio.Queue[News | Exception] = asyncio.Queue()
        self._listening = asyncio.Event()
        self._unread = Unread(self.line)
        self._told: dict[str, int] = {}
        """How much of each reply under way was told."""

    @classmethod
    @asynccontextmanager
    async def open(cls, society: Society, agent_id: str) -> AsyncIterator[Self]:
        """Whatever happens from here on is heard."""
        conversation = cls(society, agent_id)
        listener = asyncio.create_task(conversation._listen(), name="coterie-listener")
        be_deaf = society.live.listen(conversation._hear)
        try:
            await conversation._listening.wait()
            yield conversation
        finally:
            be_deaf()
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    @property
    def agent_id(self) -> str:
        return self._agent

    async def recent(self, limit: int) -> Sequence[Line]:
        return [Line.of(message.to_wire()) for message in await self._society.store.thread(self._agent, limit=limit)]

    async def line(self, message_id: str) -> Line:
        message = await self._society.store.message(message_id)
        if message is None:
            raise Refused("unknown_message", f"there is no message {message_id!r}")
        return Line.of(message.to_wire())

    async def stands(self) -> Stands:
        agent = await self._society.store.agent(self._agent)
        return Stands.of(AgentStatus.of(agent).to_dict()) if agent else Stands(state="terminated")

    async def attach(self, file: Path) -> str:
        return (await self._society.artifacts.put(pieces(file), file.name)).ref

    async def say(self, speech: Speech) -> Receipt:
        receipt = await say(self._society, self._agent, speech)
        self._unread.add(receipt.message_id)
        return receipt

    async def withdraw(self, message_id: str) -> None:
        await self._society.bus.withdraw(message_id)

    async def stop_turn(self) -> None:
        if not self._society.stop_turn(self._agent):
            await self._society.stop_waiting(self._agent)

    async def read(self, line: Line) -> None:
        await self._society.store.read(self._agent, line.id)

    async def news(self) -> News:
        item = await self._news.get()
        if isinstance(item, Exception):
            raise item
        return item

    # The log

    async def _listen(self) -> None:
        try:
            await self._follow()
        except Exception as error:  # whoever waits for news must not wait for ever
            self._news.put_nowait(error)
            self._listening.set()

    async def _follow(self) -> None:
        after: int | None = None
        while True:
            try:
                async with self._society.bus.watch(after) as watcher:
                    self._listening.set()
                    async for event in watcher:
                        await self._take(event)
                self._news.put_nowait(Over())
                return
            except Lagged as lagged:
                after = lagged.seq

    async def _take(self, event: Event) -> None:
        match event.kind:
            case "message.created" | "delayed.delivered":
                await self._take_message(event.subject)
            case "queue.changed" if event.subject == self._agent:
                self._news.put_nowait(Taken(await self._unread.read_by_now()))
            case "agent.state" if event.subject == self._agent:
                self._news.put_nowait(await self.stands())
            case _:
                pass

    async def _take_message(self, message_id: str) -> None:
        message = await self._society.store.message(message_id)
        if message and (line := Line.of(message.to_wire())).is_between(self._agent):
            self._news.put_nowait(Arrived(line))

    def _hear(self, draft: Draft) -> None:
        if draft.agent_id != self._agent:
            return
        told = self._told.get(draft.id, 0)
        if draft.length > told:
            self._told[draft.id] = draft.length
            self._news.put_nowait(Piece(draft.id, told, draft.text[told:]))
        if draft.outcome is not None:
            self._told.pop(draft.id, None)
            self._news.put_nowait(DraftOver(draft.id, draft.outcome))
