"""Wakes subscribers when their tasks change. All subscribers share one watcher of the event log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from coterie.bus import MessageBus
from coterie.clock import Clock
from coterie.errors import Lagged
from coterie.store import Event
from coterie.supervision import supervise

EVENT_BATCH = 100


class Subscriber(Protocol):
    def on_event(self, event: Event) -> None:
        """Something happened to one of the subscribed ids."""
        ...

    def wake(self) -> None:
        """Anything may have changed: the whole society, or events were missed, or no more will come."""
        ...


class TaskWatch:
    def __init__(self, bus: MessageBus, clock: Clock) -> None:
        self._bus, self._clock = bus, clock
        self._subscribers: dict[str, set[Subscriber]] = {}
        """By each id whose events concern them."""
        self._watching: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self.is_stopped = False
        """No more events will come."""

    async def subscribe(self, subscriber: Subscriber, ids: Iterable[str]) -> None:
        """Pass on the events about these messages, tasks or agents, from now on."""
        for id_ in ids:
            self._subscribers.setdefault(id_, set()).add(subscriber)
        if self._watching is None and not self.is_stopped:
            watching = supervise("following tasks", self._watch, self._clock)
            self._watching = asyncio.create_task(watching, name="coterie-task-watch")
        await self._ready.wait()

    def unsubscribe(self, subscriber: Subscriber, ids: Iterable[str]) -> None:
        for id_ in ids:
            subscribers = self._subscribers.get(id_, set())
            subscribers.discard(subscriber)
            if not subscribers:
                self._subscribers.pop(id_, None)

    async def shut_down(self, _: int = 0) -> None:
        """Wake all subscribers for the last time."""
        self._stop()
        if self._watching:
            self._watching.cancel()
            await asyncio.wait({self._watching})

    async def _watch(self) -> None:
        while not self.is_stopped:
            async with self._bus.watch() as watcher:
                self._ready.set()
                self._wake_all()  # events before this watcher may have been missed
                try:
                    while True:
                        self._pass_on(await watcher.batch(EVENT_BATCH))
                except Lagged:
                    continue
                except StopAsyncIteration:
                    self._stop()

    def _pass_on(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.kind == "society.state":
                self._wake_all()
                continue
            for subscriber in self._subscribers.get(event.subject, ()):
                subscriber.on_event(event)

    def _wake_all(self) -> None:
        for subscribers in self._subscribers.values():
            for subscriber in subscribers:
                subscriber.wake()

    def _stop(self) -> None:
        self.is_stopped = True
        self._ready.set()
        self._wake_all()
