"""Tasks for callers: reading, stopping and continuing one, and waiting until it no longer works."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Protocol

from coterie.bus import MessageBus
from coterie.clock import Clock
from coterie.errors import Lagged, NoAnswer, Refused, StoreError
from coterie.messages import Message, Receipt
from coterie.store import Event, TaskStore
from coterie.tasks import StoppedTask, Task, TaskTree
from coterie.text import one_line

EVENT_BATCH = 100


class TaskReads(TaskStore, Protocol):
    async def message(self, message_id: str) -> Message | None: ...


class TaskService:
    def __init__(self, store: TaskReads, bus: MessageBus, clock: Clock) -> None:
        self._store, self._bus, self._clock = store, bus, clock

    async def tree(self, message_id: str) -> TaskTree:
        """The task of this message. `Refused("unknown_task")` if there is none."""
        tree = await self._store.task_tree(message_id)
        if tree is None:
            raise _unknown(message_id)
        return tree

    async def stop(self, task_id: str) -> StoppedTask:
        stopped = await self._store.stop_task(task_id)
        self._bus.notify()
        return stopped

    async def grant_budget(self, task_id: str) -> Task:
        await self._store.continue_task(task_id)
        self._bus.notify()
        found = await self._store.tasks_by_id([task_id])
        if task_id not in found:  # pruned since then
            raise _unknown(task_id)
        return found[task_id]

    async def stop_sent(self, sent: Receipt) -> StoppedTask:
        """Stop the task of a message. If it starts only when the message is due, withdraw the message."""
        try:
            return await self.stop(sent.task)
        except Refused as refusal:
            if refusal.code != "unknown_task" or sent.task != sent.message_id:
                raise
        message = await self._store.message(sent.message_id)
        if message is None or message.state == "withdrawn":
            return StoppedTask()
        try:
            await self._bus.withdraw(sent.message_id, by=message.sender)
        except Refused:  # it is due since the first attempt
            return await self.stop(sent.task)
        return StoppedTask(messages=1)

    async def wait(self, sent: Receipt, timeout: timedelta | None) -> Task:
        """Return the task of a message once it does not work: done, failed, stopped or waiting for the person.

        `NoAnswer`: it has not ended within `timeout`, its message was withdrawn, or the society stopped.
        """
        until = None if timeout is None else self._clock.monotonic() + timeout.total_seconds()
        news, stopped = asyncio.Event(), asyncio.Event()
        watching = asyncio.create_task(self._watch(sent, news, stopped), name=f"coterie-task-{sent.task}")
        try:
            while True:
                await self._wait_for_news(news, until, timeout)
                news.clear()
                try:
                    task = await self._ended(sent)
                except StoreError:
                    if not stopped.is_set():
                        raise
                    task = None
                if task:
                    return task
                if stopped.is_set():
                    await watching  # raises why it ended, if the society has not stopped
                    raise NoAnswer("the society stopped before the task ended: start it again")
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, sent: Receipt, news: asyncio.Event, stopped: asyncio.Event) -> None:
        try:
            while True:
                async with self._bus.watch() as watcher:
                    news.set()  # events before this watcher may have been missed
                    try:
                        while True:
                            if any(_concerns(sent, event) for event in await watcher.batch(EVENT_BATCH)):
                                news.set()
                    except Lagged:
                        continue
                    except StopAsyncIteration:
                        return
        finally:
            stopped.set()
            news.set()

    async def _wait_for_news(self, news: asyncio.Event, until: float | None, timeout: timedelta | None) -> None:
        if until is None or timeout is None:
            await news.wait()
            return
        left = timedelta(seconds=until - self._clock.monotonic())
        if not news.is_set() and (left <= timedelta(0) or not await self._clock.wait(news, left)):
            raise NoAnswer(f"the task has not ended within {timeout.total_seconds():g} s; it goes on")

    async def _ended(self, sent: Receipt) -> Task | None:
        """Return the task if it does not work. None: it works, or has not started."""
        task = (await self._store.tasks_by_id([sent.task])).get(sent.task)
        if task is not None:
            return None if task.state == "working" else task
        message = await self._store.message(sent.message_id)
        if message is None or message.state not in ("delayed", "pending"):
            raise NoAnswer("the message was withdrawn or deleted before its task started: send it again")
        return None


def _concerns(sent: Receipt, event: Event) -> bool:
    return event.subject in (sent.task, sent.message_id)


def _unknown(task_id: str) -> Refused:
    return Refused("unknown_task", f'there is no task "{one_line(task_id)}": GET /api/v1/tasks lists them')


class SentMessage(Receipt, frozen=True, kw_only=True, eq=False):
    """The receipt of a message, and a handle on its task."""

    tasks: TaskService

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Receipt) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self.message_id)

    def __repr__(self) -> str:
        return f"SentMessage(message_id={self.message_id!r}, state={self.state!r}, task={self.task!r})"

    async def wait(self, timeout: float | None = None) -> Task:
        """Wait until the task no longer works: it is done, failed, stopped, or waits for the person.

        `timeout`: seconds. `NoAnswer`: it has not ended in time and goes on, or the society stopped.
        """
        return await self.tasks.wait(self, None if timeout is None else timedelta(seconds=timeout))

    async def stop(self) -> StoppedTask:
        """Stop everything that the message set off. What tools have done stays done. Idempotent."""
        return await self.tasks.stop_sent(self)
