"""A conversation held through the running server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from coterie.cli.client import Client, ServerEvent
from coterie.cli.conversation import Arrived, DraftOver, Line, News, Over, Piece, Speech, Stands, Taken, Unread
from coterie.clock import Clock, SystemClock
from coterie.errors import ServerStopping, ServerUnusable
from coterie.messages import Receipt

RETRY = timedelta(seconds=1)
TRIES = 5
MISSED = 50
"""Messages that are looked at again when the stream had to begin anew."""


class HttpConversation:
    def __init__(self, client: Client, agent_id: str, clock: Clock | None = None) -> None:
        self._client, self._agent, self._clock = client, agent_id, clock or SystemClock()
        self._news: asyncio.Queue[News | Exception] = asyncio.Queue()
        self._listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unread = Unread(self.line)

    @classmethod
    @asynccontextmanager
    async def open(cls, client: Client, agent_id: str) -> AsyncIterator[Self]:
        """Whatever happens from here on is heard. `ServerUnusable` when nothing can be."""
        conversation = cls(client, agent_id)
        listener = asyncio.create_task(conversation._listen(), name="coterie-listener")
        try:
            await conversation._listening
            yield conversation
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    @property
    def agent_id(self) -> str:
        return self._agent

    async def recent(self, limit: int) -> Sequence[Line]:
        page = await self._client.get(f"/threads/{quote(self._agent)}/messages", limit=limit)
        return [Line.of(item) for item in page["items"]]

    async def line(self, message_id: str) -> Line:
        return Line.of(await self._client.get(f"/messages/{quote(message_id)}"))

    async def stands(self) -> Stands:
        return Stands.of(await self._client.get(f"/agents/{quote(self._agent)}"))

    async def attach(self, file: Path) -> str:
        return await self._client.upload(file)

    async def say(self, speech: Speech) -> Receipt:
        receipt = await say(self._client, self._agent, speech)
        self._unread.add(receipt.message_id)
        return receipt

    async def withdraw(self, message_id: str) -> None:
        await self._client.delete(f"/messages/{quote(message_id)}")

    async def stop_turn(self) -> None:
        await self._client.post(f"/agents/{quote(self._agent)}/stop")

    async def read(self, line: Line) -> None:
        await self._client.post("/read", {"thread": self._agent, "upto": line.id})

    async def news(self) -> News:
        item = await self._news.get()
        if isinstance(item, Exception):
            raise item
        return item

    # The stream

    async def _listen(self) -> None:
        try:
            await self._follow()
        except Exception as error:  # whoever waits for news must not wait for ever
            if not self._listening.done():
                self._listening.set_exception(error)
            self._news.put_nowait(Over() if isinstance(error, ServerStopping) else error)

    async def _follow(self) -> None:
        """For as long as the conversation lasts; a connection that breaks is made again where it was."""
        seen: str | None = None
        failures, trouble = 0, ServerUnusable("the server ended the conversation: see whether it still runs")
        while failures < TRIES:
            try:
                async with aclosing(self._client.events(seen)) as events:
                    async for event in events:
                        failures = 0
                        seen = event.id or seen
                        await self._take(event)
                        if event.kind == "shutdown":
                            return
            except ServerStopping:
                raise
            except ServerUnusable as error:
                trouble = error
            failures += 1
            if not self._listening.done():
                break
            await self._clock.sleep(RETRY)
        raise trouble

    async def _take(self, event: ServerEvent) -> None:
        if event.kind == "hello":
            if not self._listening.done():
                self._listening.set_result(None)
        elif event.kind == "reset":
            for line in await self.recent(MISSED):
                self._news.put_nowait(Arrived(line))
            self._news.put_nowait(await self.stands())
        elif event.kind == "queue.changed" and event.data["agent"] == self._agent:
            self._news.put_nowait(Taken(await self._unread.read_by_now()))
        elif (news := _news(event, self._agent)) is not None:
            self._news.put_nowait(news)


async def say(client: Client, to: str, speech: Speech) -> Receipt:
    payload: dict[str, Any] = {"text": speech.text}
    if speech.attachments:
        payload["attachments"] = [{"artifactRef": ref} for ref in speech.attachments]
    optional = {
        "delayMs": speech.delay_ms,
        "quickReplies": list(speech.quick_replies) or None,
        "inReplyTo": speech.answers,
        "option": speech.option,
    }
    body = {"to": to, "payload": payload} | {key: value for key, value in optional.items() if value is not None}
    answer = await client.post("/messages", body)
    due = answer.get("scheduledDeliveryTime")
    return Receipt(
        message_id=answer["messageId"],
        state=answer["state"],
        scheduled_delivery_time=datetime.fromisoformat(due) if due else None,
    )


def _news(event: ServerEvent, agent_id: str) -> News | None:
    data = event.data
    match event.kind:
        case _ if data.get("gone"):
            return None  # it was there when the event was written
        case "message.created" | "delayed.delivered":
            line = Line.of(data["message"])
            return Arrived(line, data.get("draftId")) if line.is_between(agent_id) else None
        case "draft.delta" | "draft.snapshot" if data["agent"] == agent_id:
            return Piece(data["draftId"], data.get("from", 0), data.get("delta", data.get("text", "")))
        case "draft.ended" if data["agent"] == agent_id:
            return DraftOver(data["draftId"], data["outcome"])
        case "agent.state" if data["id"] == agent_id:
            return Stands.of(data)
        case "shutdown":
            return Over()
    return None
