"""The message bus: takes messages in, delivers delayed ones when they are due, tells watchers.

Everything it promises is in the store before it says so; the bus itself can be thrown away at any moment.

One reader of the event log, with a bounded queue: it may be slow, but it makes nobody wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from coterie.artifacts import Artifact
from coterie.clock import Clock, to_wire
from coterie.errors import Lagged, Refused, StoreError
from coterie.events import Event
from coterie.messages import PERSON, Envelope, Message, Receipt, check_delay, encode_payload, seal
from coterie.store import Promotion, Store
from coterie.supervision import supervise

log = logging.getLogger(__name__)


class Watcher:
    def __init__(self, store: Store, seen: int, size: int) -> None:
        self._store, self._seen, self._size = store, seen, size
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._lagged = False

    async def catch_up(self) -> None:
        """Queue what is new. A full queue is marked and left alone: the log keeps what does not fit."""
        while not self._lagged:
            events = await self._store.events(self._seen, self._size)
            for event in events:
                if self._queue.qsize() >= self._size:
                    self._lagged = True
                    self._queue.put_nowait(None)
                    return
                self._queue.put_nowait(event)
                self._seen = event.seq
            if len(events) < self._size:
                return

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def batch(self, limit: int) -> Sequence[Event]:
        """What is new, at least one and at most `limit`; ends and lags as the iteration does."""
        events = [await anext(self)]
        while len(events) < limit and not self._queue.empty():
            event = self._queue.get_nowait()
            if event is None:
                self._queue.put_nowait(None)  # the end is for the next call
                break
            events.append(event)
        return events

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        event = await self._queue.get()
        if event is not None:
            return event
        if self._lagged:
            raise Lagged(self._seen)
        raise StopAsyncIteration


SWEEP = timedelta(seconds=1)
"""However a wake-up may get lost, nothing is later than this (002 R2.3)."""
PROMOTE_BATCH = 1_000
"""Deliveries in one transaction: what else is written waits no longer than this takes."""
WATCHER_QUEUE = 256


class MessageBus:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._rearm = asyncio.Event()
        self._wakes_at: float | None = None
        self._ending = False
        self._timer: asyncio.Task[None] | None = None
        self._watchers: set[Watcher] = set()
        self._news = asyncio.Event()
        self._tail: asyncio.Task[None] | None = None

    # Sending

    async def send(
        self,
        *,
        sender: str,
        to: object,
        payload: object,
        delay_ms: object = None,
        quick_replies: object = None,
        client_id: str | None = None,
        in_reply_to: object = None,
        option: object = None,
        cause: str | None = None,
    ) -> Receipt:
        """Durable when it returns. `Refused` says what is wrong with it, and then nothing was sent."""
        envelope = seal(
            sender=sender,
            to=to,
            payload=payload,
            delay_ms=delay_ms,
            quick_replies=quick_replies,
            client_id=client_id,
            in_reply_to=in_reply_to,
            option=option,
            cause=cause,
        )
        return await self.post(envelope)

    async def post(self, envelope: Envelope) -> Receipt:
        """Send what is sealed already."""
        envelope = await self.described(envelope)
        receipt = await self._store.send(envelope)
        self.stored(envelope)
        return receipt

    async def described(self, envelope: Envelope) -> Envelope:
        """Type, MIME type and size of an attachment are what the stored bytes say, whatever the sender wrote."""
        if not envelope.attachments:
            return envelope
        known = await self._store.artifacts(envelope.attachments)
        payload = msgspec.json.decode(envelope.payload_json)
        payload["attachments"] = [_described(item, known) for item in payload["attachments"]]
        return msgspec.structs.replace(envelope, payload_json=encode_payload(payload))

    def stored(self, envelope: Envelope | None) -> None:
        """Something was written, perhaps this message: whoever waits for news or for a due time shall look."""
        if envelope and envelope.delay:
            self._arm(envelope.delay)
        self._news.set()

    # Delayed messages

    async def delayed_count(self, recipient: str | None = None) -> int:
        return await self._store.delayed_count(recipient)

    async def delayed(self, recipient: str | None = None, limit: int = 50) -> Sequence[Message]:
        """By due time, then send order."""
        return await self._store.delayed(recipient, limit=limit)

    async def withdraw(self, message_id: str, by: str = PERSON) -> Message:
        """Until it is taken. Withdrawing twice is the same as once."""
        message = await self._store.withdraw(message_id, by)
        self._news.set()
        return message

    async def move(self, message_id: str, delay_ms: object, by: str = PERSON) -> Message:
        """A delayed message becomes due `delay_ms` from now."""
        if delay_ms is None:
            raise Refused("delayMs_invalid", "delayMs must be a number of milliseconds, got nothing")
        delay = check_delay(delay_ms)
        message = await self._store.move(message_id, delay, by)
        self._arm(delay)
        self._news.set()
        return message

    # Watching

    @contextlib.asynccontextmanager
    async def watch(self, after: int | None = None, queue: int = WATCHER_QUEUE) -> AsyncIterator[Watcher]:
        """Events from now on, or from behind event `after`. Who falls behind gets `Lagged`; nobody waits for it."""
        seen = await self._store.last_event() if after is None else after
        watcher = Watcher(self._store, seen, queue)
        self._watchers.add(watcher)
        if self._tail is None:
            following = supervise("reading the event log", self._follow_log, self._clock)
            self._tail = asyncio.create_task(following, name="coterie-bus-log")
        self._news.set()
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    # Life

    def start(self) -> None:
        """Deliver what is due, from now on; what fell due while nobody ran goes out first."""
        self._timer = asyncio.create_task(self._keep_time(), name="coterie-bus-timer")

    async def stop(self, *, deliver_delayed: bool) -> int:
        """End the deliveries. `deliver_delayed`: what is still delayed goes out now, marked early. How many did."""
        await self._end_tasks()
        count = await self._store.delayed_count()
        if not count:
            return 0
        if not deliver_delayed:
            log.info("stopping: %d delayed messages stay scheduled", count)
            return 0
        log.info("stopping: delivering %d delayed messages early", count)
        delivered = 0
        while (round_ := await self._promote(early=True)).delivered or round_.dead:
            delivered += len(round_.delivered)
        return delivered

    async def abandon(self) -> None:
        """A forced exit: say what stays undelivered, and leave it in the store."""
        await self._end_tasks()
        if count := await self._store.delayed_count():
            log.warning("forced exit: %d delayed messages were not delivered; they stay scheduled", count)

    async def _end_tasks(self) -> None:
        self._ending = True
        self._rearm.set()
        if self._tail:
            self._tail.cancel()
        try:
            if self._timer:
                await self._timer  # a delivery under way is finished and logged
            if self._tail:
                await asyncio.wait({self._tail})
        finally:
            self._timer = self._tail = None
            for watcher in self._watchers:
                watcher.end()

    # The timer: armed for the next due message, and looking every second whatever happens

    async def _keep_time(self) -> None:
        wait, complaint = timedelta(0), None
        while not self._ending:
            await self._clock.wait(self._rearm, wait)
            self._rearm.clear()
            try:
                wait, complaint = await self._deliver_due(), None
            except StoreError as error:
                if complaint != str(error):  # once, and not every second
                    log.error("cannot deliver delayed messages for now: %s", error)
                wait, complaint = SWEEP, str(error)
            except Exception:  # whatever it is, the next round may pass; without rounds nothing is ever delivered
                log.exception("delivering delayed messages failed; trying again")
                wait = SWEEP
            if step := self._clock.stepped():
                log.warning("the wall clock was set by %+.1f s; due times do not move", step.total_seconds())

    async def _deliver_due(self) -> timedelta:
        """Everything that is due now; how long to wait for the next."""
        self._wakes_at = None
        asked = self._clock.monotonic()
        next_due = await self._store.until_next_due()
        while next_due is not None and next_due <= timedelta(0) and not self._ending:
            asked = self._clock.monotonic()
            next_due = (await self._promote()).next_due
        wait = SWEEP if next_due is None else min(SWEEP, next_due)
        # Counted from the question: the answer came with a commit, and the next message does not wait for that.
        self._wakes_at = asked + wait.total_seconds()
        return max(timedelta(0), timedelta(seconds=self._wakes_at - self._clock.monotonic()))

    async def _promote(self, *, early: bool = False) -> Promotion:
        promotion = await self._store.promote(PROMOTE_BATCH, early=early)
        for delivery in promotion.delivered:
            log.info(
                "delivered delayed message %s to %s: sent %s, due %s, delivered %s",
                delivery.message_id,
                delivery.recipient,
                to_wire(delivery.created_at),
                to_wire(delivery.deliver_at),
                to_wire(delivery.delivered_at),
            )
        if promotion.dead:
            log.warning("%d delayed messages are dead: their recipients were terminated", promotion.dead)
        self._news.set()
        return promotion

    def _arm(self, delay: timedelta) -> None:
        if self._wakes_at is None or self._clock.monotonic() + delay.total_seconds() < self._wakes_at:
            self._rearm.set()

    # The log: one reader for all watchers

    async def _follow_log(self) -> None:
        while True:
            await self._clock.wait(self._news, SWEEP)
            self._news.clear()
            failure: Exception | None = None
            for watcher in tuple(self._watchers):
                try:
                    await watcher.catch_up()
                except StoreError:
                    continue  # the next round reads it
                except Exception as error:
                    failure = error  # the other watchers are told all the same
            if failure:
                raise failure


def _described(item: dict[str, Any], known: Mapping[str, Artifact]) -> dict[str, Any]:
    artifact = known.get(item["artifactRef"])
    if artifact is None:
        raise Refused("attachment_unknown", f"there is no artifact {item['artifactRef']!r}: upload the file first")
    return item | artifact.to_wire() | {"filename": item.get("filename") or artifact.filename}
