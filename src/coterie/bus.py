"""The message bus: sends messages, delivers delayed ones when due, and streams events to watchers.

All state is in the store; the bus can be lost at any moment without losing a message.
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
from coterie.clock import Clock, to_rfc3339
from coterie.errors import Lagged, Refused, StoreError
from coterie.messages import PERSON, Envelope, Message, Receipt, Schedule, encode_payload, make_envelope, validate_delay
from coterie.recurrence import parse_recurrence
from coterie.store import Event, Promotion, Store
from coterie.supervision import supervise

log = logging.getLogger(__name__)

SWEEP_INTERVAL = timedelta(seconds=1)
"""The timer and the log reader check at least this often, even if a wake-up was lost."""
PROMOTE_BATCH = 1_000
"""Deliveries per transaction; bounds how long other writes wait."""
PROMOTED_ELSEWHERE_INTERVAL = timedelta(milliseconds=50)
"""How long to wait for another process that is delivering or changing a due message."""
WATCHER_QUEUE_SIZE = 256
LOG_PAGE = 256
"""Events that are read from the log at once."""
LogPages = dict[tuple[int, bool], Sequence[Event]]
"""Pages of the log, by the number of the event before the page and whether it has only `SOCIETY_EVENTS`."""


class Watcher:
    """One reader of the event log, with a bounded queue. When the queue is full, the reader gets `Lagged`."""

    def __init__(self, store: Store, seen: int, size: int, *, about_society: bool = False) -> None:
        """`seen`: seq of the last event that the reader has seen. `about_society`: see `MessageBus.watch`."""
        self._store, self._seen, self._size, self.about_society = store, seen, size, about_society
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()
        """None ends the iteration."""
        self._lagged = False

    async def catch_up(self, pages: LogPages) -> None:
        """Queue the new events. If the queue is full, mark the watcher as lagged and stop.

        `pages`: what other watchers have just read. Most are at the same position, so the log is read once for all.
        """
        while not self._lagged:
            position = self._seen, self.about_society
            if position not in pages:
                pages[position] = await self._store.events(self._seen, LOG_PAGE, about_society=self.about_society)
            events = pages[position]
            for event in events:
                if self._queue.qsize() >= self._size:
                    self._lagged = True
                    self._queue.put_nowait(None)
                    return
                self._queue.put_nowait(event)
                self._seen = event.seq
            if len(events) < LOG_PAGE:
                return

    def close(self) -> None:
        self._queue.put_nowait(None)

    async def batch(self, limit: int) -> Sequence[Event]:
        """Wait for the next event; return it and the queued ones after it, at most `limit`."""
        events = [await anext(self)]
        while len(events) < limit and not self._queue.empty():
            event = self._queue.get_nowait()
            if event is None:
                self._queue.put_nowait(None)  # for the next call
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


class MessageBus:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._rearm = asyncio.Event()
        self._wakes_at: float | None = None
        self._stopping = False
        self._kept = 0
        """Delayed messages that stay scheduled after the stop, as last logged."""
        self._timer: asyncio.Task[None] | None = None
        self._waits_for_message = False
        """True: a message is due when the timer wakes. False: the timer wakes to look for due messages."""
        self._watchers: set[Watcher] = set()
        self._has_news = asyncio.Event()
        self._has_society_news = False
        self._log_reader: asyncio.Task[None] | None = None

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
        every: object = None,
        time_zone: object = None,
        unless_answered: object = None,
        via: str | None = None,
        asks_back: object = None,
    ) -> Receipt:
        """Validate a message and store it durably. `Refused`: it is invalid and was not sent.

        `via`: name of the key of the program that sends it for the person.
        """
        envelope = make_envelope(
            sender=sender,
            to=to,
            payload=payload,
            delay_ms=delay_ms,
            quick_replies=quick_replies,
            client_id=client_id,
            in_reply_to=in_reply_to,
            option=option,
            cause=cause,
            every=every,
            time_zone=time_zone,
            unless_answered=unless_answered,
            via=via,
            asks_back=asks_back,
        )
        return await self.send_envelope(envelope)

    async def send_envelope(self, envelope: Envelope) -> Receipt:
        """Send a validated message."""
        if envelope.attachments:
            envelope = await self.describe_attachments(envelope)
        receipt = await self._store.send(envelope)
        self.notify(envelope)
        return receipt

    async def describe_attachments(self, envelope: Envelope) -> Envelope:
        """The envelope with type, MIME type and size of each attachment as stored, not as sent."""
        if not envelope.attachments:
            return envelope
        artifacts = await self._store.artifacts(envelope.attachments)
        payload = msgspec.json.decode(envelope.payload_json)
        payload["attachments"] = [_describe_attachment(item, artifacts) for item in payload["attachments"]]
        return msgspec.structs.replace(envelope, payload_json=encode_payload(payload))

    def notify(self, envelope: Envelope | None = None) -> None:
        """Wake the log reader after a write; if `envelope` was stored with a delay, arm the timer for it."""
        if envelope and envelope.every:
            self._rearm.set()  # the store knows when it is due
        elif envelope and envelope.delay:
            self._arm(envelope.delay)
        if any(not watcher.about_society for watcher in self._watchers):
            self._has_news.set()

    def notify_others(self, about_society: bool) -> None:
        """Wake the log reader after a write of another process.

        `about_society`: the write may have one of `SOCIETY_EVENTS`.
        """
        if about_society:
            self._has_society_news = True
            self._has_news.set()
        else:
            self.notify()

    # Delayed messages

    async def delayed_count(self, recipient: str | None = None) -> int:
        return await self._store.delayed_count(recipient)

    async def delayed(self, recipient: str | None = None, limit: int = 50) -> Sequence[Message]:
        """Ordered by due time, then send order."""
        return await self._store.delayed(recipient, limit=limit)

    async def withdraw(self, message_id: str, by: str = PERSON) -> Message:
        """Withdraw a message that is not taken yet. Idempotent."""
        message = await self._store.withdraw(message_id, by)
        self.notify()
        return message

    async def reschedule(self, message_id: str, delay_ms: object, by: str = PERSON) -> Message:
        """Make a delayed message due `delay_ms` from now."""
        if delay_ms is None:
            raise Refused("delayMs_invalid", "delayMs must be a number of milliseconds, got nothing")
        delay = validate_delay(delay_ms)
        message = await self._store.reschedule(message_id, delay, by)
        self._arm(delay)
        self.notify()
        return message

    # Recurring messages

    async def change_schedule(
        self,
        schedule_id: str,
        *,
        every: object = None,
        time_zone: object = None,
        paused: bool | None = None,
        delay_ms: object = None,
        by: str = PERSON,
    ) -> Schedule:
        """Change when a recurring message is due, pause it or resume it. What is None stays as it is.

        `delay_ms`: the next one is due no earlier than so many milliseconds from now.
        """
        if every is None and time_zone is not None:
            raise Refused("every_invalid", "timeZone needs every: give both")
        text = None if every is None else parse_recurrence(every, time_zone).text
        delay = None if delay_ms is None else validate_delay(delay_ms)
        schedule = await self._store.change_schedule(schedule_id, by, every=text, paused=paused, delay=delay)
        self._rearm.set()
        self.notify()
        return schedule

    async def end_schedule(self, schedule_id: str, by: str = PERSON) -> Schedule:
        """End a recurring message and withdraw its next occurrence. Idempotent."""
        schedule = await self._store.end_schedule(schedule_id, by)
        self.notify()
        return schedule

    # Watching

    @contextlib.asynccontextmanager
    async def watch(
        self, after: int | None = None, queue: int = WATCHER_QUEUE_SIZE, *, about_society: bool = False
    ) -> AsyncIterator[Watcher]:
        """Watch events from now on, or those after event `after`. `queue`: events that may wait for the watcher.

        `about_society`: only those of `SOCIETY_EVENTS`. They are rare: if no watcher wants others, the log is read
        when another process announces one, and once per second.
        """
        seen = await self._store.last_event() if after is None else after
        watcher = Watcher(self._store, seen, queue, about_society=about_society)
        self._watchers.add(watcher)
        if self._stopping:
            watcher.close()  # a stop closed the others while this one was opened
        elif self._log_reader is None:
            reading = supervise("reading the event log", self._read_log, self._clock)
            self._log_reader = asyncio.create_task(reading, name="coterie-bus-log")
        self.notify()
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    # Starting and stopping

    def start(self) -> None:
        """Start the delivery of delayed messages, overdue ones first."""
        self._timer = asyncio.create_task(self._run_timer(), name="coterie-bus-timer")

    async def stop(self, *, deliver_delayed: bool) -> int:
        """Stop deliveries. `deliver_delayed`: deliver all delayed messages now, marked early; return their number.

        Recurring messages stay scheduled: the next start delivers what was missed.
        """
        await self._stop_tasks()
        return await self.settle_delayed(deliver_delayed=deliver_delayed)

    async def settle_delayed(self, *, deliver_delayed: bool) -> int:
        """Deliver all delayed messages now, or log how many stay scheduled. Call it after `stop` once more when the
        last turns have ended: they may have sent delayed messages.
        """
        count, known = await self._store.delayed_count() - await self._store.schedule_count(), self._kept
        self._kept = 0 if deliver_delayed else count
        if not count:
            return 0
        if not deliver_delayed:
            if count != known:
                log.info("stopping: %d delayed messages stay scheduled", count)
            return 0
        log.info("stopping: delivering %d delayed messages early", count)
        delivered = 0
        while (promotion := await self._promote(early=True)).delivered or promotion.dead or promotion.is_elsewhere:
            delivered += len(promotion.delivered)
            if promotion.is_elsewhere:
                await self._clock.sleep(PROMOTED_ELSEWHERE_INTERVAL)
        return delivered

    async def abandon(self) -> None:
        """Stop for a forced exit; delayed messages stay scheduled."""
        await self._stop_tasks()
        if count := await self._store.delayed_count():
            log.warning("forced exit: %d delayed messages were not delivered; they stay scheduled", count)

    async def _stop_tasks(self) -> None:
        self._stopping = True
        self._rearm.set()
        if self._log_reader:
            self._log_reader.cancel()
        try:
            if self._timer:
                await self._timer  # finishes and logs the delivery in progress
            if self._log_reader:
                await asyncio.wait({self._log_reader})
        finally:
            self._timer = self._log_reader = None
            for watcher in self._watchers:
                watcher.close()

    # The timer

    async def _run_timer(self) -> None:
        wait, logged_error = timedelta(0), None
        while not self._stopping:
            is_rearmed = await self._clock.wait(self._rearm, wait)
            self._rearm.clear()
            try:
                wait, logged_error = await self._deliver_due(is_due=self._waits_for_message and not is_rearmed), None
            except StoreError as error:
                if logged_error != str(error):  # log each error once, not every second
                    log.error("cannot deliver delayed messages; retrying: %s", error)
                wait, logged_error = SWEEP_INTERVAL, str(error)
            except Exception:  # the timer must survive: without it nothing is delivered
                log.exception("delivering delayed messages failed; retrying")
                wait = SWEEP_INTERVAL
            if step := self._clock.wall_clock_step():
                log.warning("the wall clock was set by %+.1f s; due times do not move", step.total_seconds())

    async def _deliver_due(self, *, is_due: bool) -> timedelta:
        """Deliver all due messages; return the time until the next check. `is_due`: one is due, so do not ask first."""
        self._wakes_at, self._waits_for_message = None, False
        asked = self._clock.monotonic()
        next_due = timedelta(0) if is_due else await self._store.until_next_due()
        while next_due is not None and next_due <= timedelta(0) and not self._stopping:
            asked = self._clock.monotonic()
            promotion = await self._promote()
            next_due = promotion.next_due
            if promotion.is_elsewhere:
                next_due = PROMOTED_ELSEWHERE_INTERVAL
        wait = SWEEP_INTERVAL if next_due is None else min(SWEEP_INTERVAL, next_due)
        self._waits_for_message = next_due is not None and next_due <= SWEEP_INTERVAL
        # Measured from before the query: its commit takes time, which must not delay the next message.
        self._wakes_at = asked + wait.total_seconds()
        return max(timedelta(0), timedelta(seconds=self._wakes_at - self._clock.monotonic()))

    async def _promote(self, *, early: bool = False) -> Promotion:
        promotion = await self._store.promote_due(PROMOTE_BATCH, early=early)
        for delivery in promotion.delivered:
            log.info(
                "delivered delayed message %s to %s: sent %s, due %s, delivered %s",
                delivery.message_id,
                delivery.recipient,
                to_rfc3339(delivery.created_at),
                to_rfc3339(delivery.deliver_at),
                to_rfc3339(delivery.delivered_at),
            )
        if promotion.dead:
            log.warning("%d delayed messages are dead: their recipients were terminated", promotion.dead)
        self.notify()
        return promotion

    def _arm(self, delay: timedelta) -> None:
        if self._wakes_at is None or self._clock.monotonic() + delay.total_seconds() < self._wakes_at:
            self._rearm.set()

    # The event log: one reader task for all watchers

    async def _read_log(self) -> None:
        swept_at = self._clock.monotonic()
        while True:
            await self._clock.wait(self._has_news, SWEEP_INTERVAL)
            is_sweep = self._clock.monotonic() - swept_at >= SWEEP_INTERVAL.total_seconds()
            serves_all, self._has_society_news = is_sweep or self._has_society_news, False
            swept_at = self._clock.monotonic() if serves_all else swept_at
            self._has_news.clear()
            failure: Exception | None = None
            pages: LogPages = {}
            for watcher in tuple(self._watchers):
                if watcher.about_society and not serves_all:
                    continue
                try:
                    await watcher.catch_up(pages)
                except StoreError:
                    continue  # the next round retries
                except Exception as error:
                    failure = error  # serve the other watchers first
            if failure:
                raise failure


def _describe_attachment(item: dict[str, Any], artifacts: Mapping[str, Artifact]) -> dict[str, Any]:
    artifact = artifacts.get(item["artifactRef"])
    if artifact is None:
        raise Refused("attachment_unknown", f"there is no artifact {item['artifactRef']!r}: upload the file first")
    return item | artifact.to_dict() | {"filename": item.get("filename") or artifact.filename}
