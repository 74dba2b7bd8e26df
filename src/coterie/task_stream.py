"""Streams what one message sets off: the text as it is written, the messages to the person, and the end of its task.

A `TaskStream` may begin before the message is sent, while the task works, or after it has ended: it starts with
everything that was said since the message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol, Self

from coterie.agents import Agent
from coterie.clock import Clock
from coterie.errors import StoreError
from coterie.live import LiveReplies, LiveReply
from coterie.messages import PERSON, Message, Receipt
from coterie.store import Event, TaskStore
from coterie.task_follower import find_shared_answer
from coterie.task_watch import TaskWatch
from coterie.tasks import Task

_RESTING = ("paused", "blocked", "terminated")


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of text that the model of the asked agent has just written."""

    draft_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Superseded:
    """The text of a draft does not count: a tool call, an interruption or a failure followed."""

    draft_id: str


@dataclass(frozen=True, slots=True)
class Said:
    """A message to the person."""

    message: Message
    draft_id: str | None
    """The draft that it was written as, if its pieces were streamed."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Other agents work on the task than before."""

    task: Task


@dataclass(frozen=True, slots=True)
class Silence:
    """Nothing happened for the time that `follow` was given."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The task does not work any more, or cannot go on before the owner acts."""

    task: Task | None
    """None: it is not known, because the society stops or the message was deleted."""
    reason: str = ""
    """Why it cannot go on."""


Piece = Delta | Superseded | Said | Progress | Silence | Ended


class StreamStore(TaskStore, Protocol):
    """The reads that this module needs."""

    async def message(self, message_id: str) -> Message | None: ...
    async def agent(self, agent_id: str) -> Agent | None: ...
    async def is_paused(self) -> bool: ...
    async def thread(self, agent_id: str, *, after: str | None = None, limit: int = 50) -> Sequence[Message]: ...


class TaskStreams:
    """Makes streams, which share what they need."""

    def __init__(self, store: StreamStore, watch: TaskWatch, live: LiveReplies, clock: Clock) -> None:
        self.store, self.watch, self.live, self.clock = store, watch, live, clock

    def stream(self, agent_id: str, *, with_text: bool = True) -> TaskStream:
        """The stream of one message to the agent, to be entered. `with_text`: also the text as it is written."""
        return TaskStream(self, agent_id, with_text=with_text)


class _Draft:
    """What is known of a reply that the asked agent's model writes."""

    def __init__(self, began_at: datetime) -> None:
        self.began_at = began_at
        self.length = 0
        """Characters received from the model."""
        self.text = ""
        """Text that was passed on."""
        self.is_own: bool | None = None
        """Whether it belongs to the task; None: not known yet."""
        self.is_closed = False


class TaskStream:
    """Follows one message to an agent. It subscribes to events while it is entered."""

    def __init__(self, streams: TaskStreams, agent_id: str, *, with_text: bool) -> None:
        self._streams, self._agent_id, self._with_text = streams, agent_id, with_text
        self._ids = set[str]()
        """Ids whose events concern it."""
        self._expected = ""
        """The message that is sent while the follower is subscribed already."""
        self._news = asyncio.Event()
        self._is_changed = True
        """The task may have changed since it was read."""
        self._is_only_stored = False
        """All that is new is that the expected message is stored."""
        self._pieces: deque[tuple[str, str]] = deque()
        self._drafts: dict[str, _Draft] = {}
        self._failed: list[str] = []
        """Drafts that ended without a message."""
        self._last_seq = 0
        self._is_active = False
        """An agent worked on the task when it was last read."""

    def __enter__(self) -> Self:
        if self._with_text:
            for reply in self._streams.live.replies:
                self._on_live(reply)
            self._unsubscribe = self._streams.live.subscribe(self._on_live)
        return self

    def __exit__(self, *_: object) -> None:
        self._streams.watch.unsubscribe(self, self._ids)
        if self._with_text:
            self._unsubscribe()

    async def expect(self, message_id: str) -> None:
        """Subscribe before the message is sent, so that its events say that the agent works on it."""
        self._expected, self._is_changed = message_id, False
        await self._subscribe(message_id, self._agent_id)
        if self._streams.watch.is_stopped:  # no event will come
            self.wake()

    async def _subscribe(self, *ids: str) -> None:
        self._ids.update(ids)
        await self._streams.watch.subscribe(self, ids)

    def on_event(self, event: Event) -> None:
        if event.kind == "agent.state" and self._is_active:
            return  # the end of its turn changes the task, too
        if event.kind == "queue.changed" and self._is_only_stored and self._expected in (event.data or ""):
            # The agent took the message at once: the task works, and nobody has said anything.
            self._is_changed, self._is_only_stored, self._is_active = False, False, True
            return
        self.wake()
        self._is_only_stored = event.kind == "message.created" and event.subject == self._expected

    def wake(self) -> None:
        """The task may have changed."""
        self._is_changed, self._is_only_stored = True, False
        self._news.set()

    def _on_live(self, reply: LiveReply) -> None:
        if reply.agent_id != self._agent_id:
            return
        draft = self._drafts.get(reply.id)
        if draft is None:
            draft = self._drafts[reply.id] = _Draft(self._streams.clock.now())
        if size := reply.length - draft.length:
            last = reply.chunks[-1]
            # Joining all chunks for each one would take quadratic time.
            self._pieces.append((reply.id, last[-size:] if len(last) >= size else reply.text[draft.length :]))
            draft.length = reply.length
            self._news.set()
        if reply.outcome and reply.outcome != "stored":
            self._failed.append(reply.id)
            self._news.set()

    async def follow(
        self, sent: Receipt, silence: timedelta | None = None, *, is_new: bool = False
    ) -> AsyncGenerator[Piece, None]:
        """Yield what happens, until the task does not work. `silence`: yield `Silence` after each such time.

        `is_new`: the message was sent after `expect`. Then nothing is read before an event says that it is needed.
        """
        if not (is_new and sent.message_id == sent.task == self._expected):
            self._is_changed = True
            await self._subscribe(sent.task, sent.message_id, self._agent_id)
            question = await self._streams.store.message(sent.message_id)
            if question is None:
                yield Ended(None, "the message was deleted: send it again")
                return
            self._last_seq = question.seq
        async for piece in self._follow(sent, silence):
            yield piece

    async def _follow(self, question: Receipt, silence: timedelta | None) -> AsyncGenerator[Piece, None]:
        active: Sequence[str] = ()
        has_answer = False
        while True:
            self._news.clear()
            # Messages that were stored before a draft began come before its text. So what was written is taken first,
            # then messages are read, then both are passed on: messages first.
            pieces, self._pieces = self._pieces, deque()
            failed, self._failed = self._failed, []
            task: Task | None = None
            messages: Sequence[Message] = ()
            is_read = self._is_changed or any(self._drafts[id_].is_own is None for id_, _ in pieces)
            if is_read:
                self._is_changed = self._is_only_stored = False
                try:
                    task, messages = await self._streams.store.task_with_messages(question.task, after=self._last_seq)
                except StoreError:
                    if not self._streams.watch.is_stopped:
                        raise
            is_answered_for_another = False
            for message in messages:
                if message.sender == PERSON:
                    # What follows answers this newer message, unless nothing was said yet.
                    is_answered_for_another = is_answered_for_another or has_answer
                elif not is_answered_for_another:
                    has_answer = True
                    for piece in self._close_draft(message, pieces):
                        yield piece
                self._last_seq = message.seq
            for piece in await self._pass_on(pieces, failed, question):
                yield piece
            if task:
                self._is_active = task.active > 0
                if task.active_agents != active:
                    active = task.active_agents
                    yield Progress(task)
            ended = await self._find_end(task, is_answered_for_another) if is_read else None
            if ended:
                if ended.task and ended.task.state == "done" and not has_answer:
                    shared = await find_shared_answer(self._streams.store, question.message_id, ended.task)
                    for piece in self._close_draft(shared, ()) if shared else ():
                        yield piece
                for draft_id, draft in self._drafts.items():
                    if draft.text and not draft.is_closed:
                        yield Superseded(draft_id)
                yield ended
                return
            if not await self._wait(silence):
                yield Silence()

    async def _wait(self, silence: timedelta | None) -> bool:
        """Wait for news. False: there was none for the time `silence`."""
        if silence is None:
            await self._news.wait()
            return True
        return self._news.is_set() or await self._streams.clock.wait(self._news, silence)

    async def _find_end(self, task: Task | None, is_over: bool) -> Ended | None:
        if task and (is_over or task.state != "working"):
            return Ended(task)
        if self._streams.watch.is_stopped:
            return Ended(None, "the society stops: send the same request again when it runs")
        if task is None:
            return Ended(None, "the message was withdrawn or deleted: send it again")
        if task.active:
            return None
        agent = await self._streams.store.agent(self._agent_id)
        if agent and agent.state in _RESTING and task.queued:
            reason = f" ({agent.state_reason})" if agent.state_reason else ""
            return Ended(task, f"{self._agent_id} is {agent.state}{reason}: the owner must resume it")
        if await self._streams.store.is_paused():
            return Ended(task, "the society is paused: the owner must resume it")
        return None

    # Drafts

    async def _pass_on(
        self, pieces: Iterable[tuple[str, str]], failed: Iterable[str], question: Receipt
    ) -> list[Piece]:
        """The new text of drafts that belong to the task and are no messages yet."""
        passed: list[Piece] = []
        for draft_id, text in pieces:
            draft = self._drafts[draft_id]
            if draft.is_own is None and not draft.is_closed:
                draft.is_own = await self._is_own(draft, question)
                if draft.is_own:
                    passed += self._supersede()
            if draft.is_own and not draft.is_closed:
                draft.text += text
                passed.append(Delta(draft_id, text))
        for draft_id in failed:
            draft = self._drafts[draft_id]
            if not draft.is_closed:
                draft.is_closed = True
                passed += [Superseded(draft_id)] if draft.text else []
        return passed

    async def _is_own(self, draft: _Draft, question: Receipt) -> bool:
        """Whether the agent writes it for the task. It must have read the question before, and work on the task now."""
        with suppress(StoreError):
            now = await self._streams.store.message(question.message_id)
            if now and now.taken_at and now.taken_at <= draft.began_at:
                task = (await self._streams.store.tasks_by_id([question.task])).get(question.task)
                return task is not None and self._agent_id in task.active_agents
        return False

    def _supersede(self) -> list[Piece]:
        """The agent goes on with another text. What it wrote before and did not send does not count."""
        found: list[Piece] = []
        for draft_id, draft in self._drafts.items():
            if draft.text and not draft.is_closed:
                draft.is_closed = True
                found.append(Superseded(draft_id))
        return found

    def _close_draft(self, message: Message, pieces: Iterable[tuple[str, str]]) -> list[Piece]:
        """The message, with the draft that it was written as. `pieces`: text that was not passed on yet."""
        if message.sender != self._agent_id:
            return [Said(message, None)]
        text, found = str(message.payload.get("text", "")), None
        for draft_id, draft in self._drafts.items():
            if draft.is_closed:
                continue
            written = draft.text + "".join(piece for id_, piece in pieces if id_ == draft_id)
            if written and found is None and text.startswith(written.rstrip()):
                draft.is_closed = True
                found = Said(message, draft_id if draft.text else None)
            elif not draft.text and draft.began_at <= message.created_at:
                draft.is_closed = True  # it was superseded before any of it was passed on
        return [*self._supersede(), found or Said(message, None)]
