"""Follows the task of one message for a program that waits: who works on it, what agents say, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import timedelta
from typing import Literal, Protocol

from msgspec import Struct

from coterie.agents import Agent
from coterie.clock import Clock
from coterie.errors import StoreError
from coterie.live import LiveReplies, LiveReply
from coterie.messages import PERSON, Message
from coterie.store import Event
from coterie.task_watch import TaskWatch
from coterie.tasks import MessageNode, Task, TaskState, TaskTree
from coterie.text import one_line

PROGRESS_INTERVAL = timedelta(milliseconds=250)
"""Progress within this time is reported once."""
LATER_MESSAGES = 50
"""Messages of the thread after the question among which an answer to a newer message is looked for."""
DRAFT_CHARACTERS = 160
"""The end of the text that is being written, as progress shows it."""

_HELD = {
    "paused": "{agent} is paused: its owner resumes it in the panel, or with coterie resume {agent}",
    "blocked": "{agent} is blocked ({reason}): its owner removes the cause and resumes it",
    "terminated": "{agent} is terminated: send to another agent",
}
_LOST = {
    "withdrawn": "the message was withdrawn before {agent} read it",
    "dead": "{agent} can get no more mail: send to another agent",
}


class TaskProgress(Struct, frozen=True):
    """The task works. One line for people: who is at work, what the newest text is."""

    text: str
    task: Task
    draft: str = ""
    """What the recipient of the message is writing; may still be withdrawn."""


class TaskOutcome(Struct, frozen=True, kw_only=True):
    """The task as it is now."""

    state: TaskState | Literal["delayed", "lost"]
    """`delayed`: its message is not due yet. `lost`: its message will not be read; `problem` says why."""
    task: Task | None = None
    messages: Sequence[Message] = ()
    """What was sent to the person for the task after the followed message, in order."""
    problem: str | None = None
    """Why it does not go on, if somebody has to act first."""

    @property
    def answer(self) -> Message | None:
        return self.messages[-1] if self.messages else None

    @property
    def questions(self) -> Sequence[Message]:
        """Those of its questions that the person has not answered."""
        return [message for message in self.messages if is_open_question(message)]


def is_open_question(message: Message) -> bool:
    return bool(message.payload.get("quickReplies")) and message.answer is None and message.sender != PERSON


class ThreadStore(Protocol):
    async def message(self, message_id: str) -> Message | None: ...
    async def thread(self, agent_id: str, *, after: str | None = None, limit: int = 50) -> Sequence[Message]: ...


class FollowedStore(ThreadStore, Protocol):
    """The reads that this module needs."""

    async def messages_by_id(self, ids: Sequence[str]) -> Mapping[str, Message]: ...
    async def agent(self, agent_id: str) -> Agent | None: ...
    async def is_paused(self) -> bool: ...
    async def tasks_by_id(self, ids: Sequence[str]) -> Mapping[str, Task]: ...
    async def task_tree(self, message_id: str) -> TaskTree | None: ...


async def find_shared_answer(store: ThreadStore, message_id: str, task: Task) -> Message | None:
    """The answer to a newer message of the same sender, which a turn read together with this one.

    A turn answers the newest message of each sender. If both messages start a task, that of the older one ends with
    the turn and has no answer.
    """
    asked = await store.message(message_id)
    if asked is None or asked.state != "taken":
        return None
    later = await store.thread(asked.to, after=asked.id, limit=LATER_MESSAGES)
    newer = {one.id for one in later if one.sender == PERSON and one.via == asked.via}
    answers = (one for one in later if one.in_reply_to in newer and one.to == PERSON)
    return next((one for one in answers if one.created_at <= task.last_at), None)


class TaskFollower:
    """Follows one message of the person. Nothing is kept: a new follower of the same message sees the same."""

    def __init__(self, message: Message, *, store: FollowedStore, watch: TaskWatch, live: LiveReplies, clock: Clock):
        self._message, self._store, self._watch, self._live, self._clock = message, store, watch, live, clock
        self._task_id = message.task or message.id
        self._news = asyncio.Event()
        self._draft = ""

    async def outcome(self) -> TaskOutcome:
        """Read the task with everything that was sent to the person."""
        tree = await self._store.task_tree(self._message.id)
        if tree is None:
            return await self._not_started()
        messages = await self._messages(tree)
        if tree.task.state == "done" and not messages:
            shared = await find_shared_answer(self._store, self._message.id, tree.task)
            messages = [shared] if shared else []
        return TaskOutcome(
            state=tree.task.state,
            task=tree.task,
            messages=messages,
            problem=await self._obstacle(tree.task) if tree.task.state == "working" else None,
        )

    async def follow(self, timeout: timedelta | None) -> AsyncGenerator[TaskProgress | TaskOutcome, None]:
        """Yield progress, and at last the outcome: the task does not work, cannot go on, or `timeout` is over."""
        until = None if timeout is None else self._clock.monotonic() + timeout.total_seconds()
        shown, next_progress = "", self._clock.monotonic()
        unsubscribe = self._live.subscribe(self._on_live)
        for reply in self._live.replies:  # it may have begun before
            self._on_live(reply)
        ids = {self._task_id, self._message.id, self._message.to}
        try:
            await self._watch.subscribe(self, ids)
            while True:
                self._news.clear()
                task = await self._working_task()
                if task is None or self._watch.is_stopped:
                    yield await self.outcome()
                    return
                line, now = _progress_line(task, self._message.to, self._draft), self._clock.monotonic()
                if line != shown and now >= next_progress:
                    shown, next_progress = line, now + PROGRESS_INTERVAL.total_seconds()
                    yield TaskProgress(line, task, self._draft)
                if not await self._wait(until, next_progress if line != shown else None):
                    yield await self.outcome()
                    return
        finally:
            self._watch.unsubscribe(self, ids)
            unsubscribe()

    async def _wait(self, until: float | None, next_progress: float | None) -> bool:
        """Wait for news, or until progress may be reported again. False: the time is over."""
        now = self._clock.monotonic()
        if until is not None and until <= now:
            return False
        ends = [end for end in (until, next_progress) if end is not None]
        if not ends:
            await self._news.wait()
        else:
            await self._clock.wait(self._news, timedelta(seconds=max(0.0, min(ends) - now)))
        return True

    # News

    def on_event(self, event: Event) -> None:
        if event.subject != self._message.to or event.kind.startswith("agent."):
            self.wake()

    def wake(self) -> None:
        self._news.set()

    def _on_live(self, reply: LiveReply) -> None:
        if reply.agent_id == self._message.to:
            self._draft = "" if reply.outcome else reply.text
            self._news.set()

    # Reads

    async def _working_task(self) -> Task | None:
        """Return the task if it works and nothing holds it up."""
        try:
            task = (await self._store.tasks_by_id([self._task_id])).get(self._task_id)
            if task is None or task.state != "working" or await self._obstacle(task):
                return None
        except StoreError:
            if self._watch.is_stopped:
                return None
            raise
        return task

    async def _not_started(self) -> TaskOutcome:
        message = await self._store.message(self._message.id)
        if message is None:
            return TaskOutcome(state="lost", problem="the message was deleted")
        if lost := _LOST.get(message.state):
            return TaskOutcome(state="lost", problem=lost.format(agent=message.to))
        return TaskOutcome(state="delayed")

    async def _messages(self, tree: TaskTree) -> Sequence[Message]:
        ids = [node.id for node in tree.nodes if isinstance(node, MessageNode) and node.to == PERSON]
        found = await self._store.messages_by_id(ids)
        later = [found[one] for one in ids if one in found and found[one].seq > self._message.seq]
        return sorted((one for one in later if one.state in ("pending", "taken")), key=lambda one: one.seq)

    async def _obstacle(self, task: Task) -> str | None:
        """Say who has to act before the task goes on; None: it goes on by itself."""
        if task.active_agents:
            return None
        if await self._store.is_paused():
            return "the society is paused: its owner resumes it in the panel, or with coterie resume"
        agent = await self._store.agent(self._message.to)
        if agent is None or agent.state not in _HELD:
            return None
        return _HELD[agent.state].format(agent=agent.id, reason=agent.state_reason or "no reason is known")


def _progress_line(task: Task, recipient: str, draft: str) -> str:
    if draft:
        return f"{recipient}: {one_line(draft[-DRAFT_CHARACTERS:], DRAFT_CHARACTERS)}"
    names = ", ".join(sorted(task.active_agents)) or recipient
    doing = "at work" if task.active_agents else "has the message"
    return f"{names} {doing}: {task.messages} messages, {task.turns} turns, {task.tool_calls} tool calls"
