"""Waits for the answer to one message of the person, and streams its text meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from coterie.agents import Agent
from coterie.bus import MessageBus
from coterie.clock import Clock
from coterie.errors import Lagged, NoAnswer, StoreError
from coterie.live import LiveReplies, LiveReply
from coterie.messages import PERSON, SYSTEM, Message, Receipt
from coterie.store import Event, Store

PAGE_MESSAGES = 200
EVENT_BATCH = 100
_LOST = {
    "withdrawn": "the message was withdrawn before {agent} read it: send it again",
    "dead": "{agent} can get no more mail, and the message is a dead letter: send it to another agent",
}
_RESTING = {
    "paused": "{agent} is paused: resume it with society.resume({agent!r})",
    "blocked": "{agent} is blocked ({reason}): remove the cause, then society.resume({agent!r})",
    "terminated": "{agent} is terminated: send it to another agent",
}

_ENDED = ("idle", "paused", "wait_approval")
"""States in which the last message counts as the answer: the turn has ended, or asks the person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of an agent to one message of the person."""

    message: Message
    """The answer itself. For an agent that waits for an approval: its question."""
    messages: tuple[Message, ...]
    """Everything that the agent has sent the person since the question, in order, with the answer."""

    @property
    def text(self) -> str:
        return str(self.message.payload.get("text", ""))

    @property
    def attachments(self) -> tuple[dict[str, Any], ...]:
        """The files of the answer: `artifactRef`, `filename`, `mimeType`, `type`, `size`."""
        return tuple(self.message.payload.get("attachments") or ())

    @property
    def quick_replies(self) -> tuple[str, ...]:
        """The options that it offers. Choose one with `in_reply_to=answer.message.id, option=0`."""
        return tuple(self.message.payload.get("quickReplies") or ())


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A piece of text that the model has just written. It may still be withdrawn; the `Answer` counts."""

    text: str
    draft_id: str
    """The draft that it belongs to. Another id: the model writes a new text, for example after a tool call."""


class AnswerStore(Protocol):
    """The reads that this module needs."""

    async def message(self, message_id: str) -> Message | None: ...
    async def agent(self, agent_id: str) -> Agent | None: ...
    async def is_paused(self) -> bool: ...
    async def thread(self, agent_id: str, *, after: str | None = None, limit: int = 50) -> Sequence[Message]: ...


class AnswerFollower:
    """Follows one question until it is answered. Made before the question is sent, so that nothing is missed."""

    def __init__(self, agent_id: str, *, store: AnswerStore, bus: MessageBus, live: LiveReplies, clock: Clock) -> None:
        self._agent_id, self._store, self._bus, self._live, self._clock = agent_id, store, bus, live, clock
        self._news = asyncio.Event()
        self._is_changed, self._is_stopped = True, False
        self._pieces: deque[AnswerDelta] = deque()
        self._started: dict[str, datetime] = {}
        """When each draft of the agent began."""
        self._lengths: dict[str, int] = {}
        self._own: set[str] = set()
        """Drafts that began after the agent had read the question."""
        self._ignored = {reply.id for reply in live.replies if reply.agent_id == agent_id}
        """Drafts that answer something else."""
        self._question: str | None = None

    async def follow(
        self, send: Callable[[], Awaitable[Receipt]], timeout: timedelta | None
    ) -> AsyncGenerator[AnswerDelta | Answer, None]:
        """Send the question; yield the text as it is written, then the answer. `NoAnswer`: there will be none."""
        until = None if timeout is None else self._clock.monotonic() + timeout.total_seconds()
        unsubscribe = self._live.subscribe(self._on_live)
        try:
            async with self._watching():
                self._question = (await send()).message_id
                while True:
                    self._news.clear()
                    answer = await self._look(self._question)
                    for piece in await self._take_pieces():
                        yield piece
                    if answer:
                        yield answer
                        return
                    if self._is_stopped:
                        raise NoAnswer(f"the society stopped before {self._agent_id} answered: start it again")
                    await self._wait(until, timeout)
        finally:
            unsubscribe()

    # News

    @asynccontextmanager
    async def _watching(self) -> AsyncGenerator[None, None]:
        ready = asyncio.Event()
        task = asyncio.create_task(self._watch(ready), name=f"coterie-answer-{self._agent_id}")
        try:
            await ready.wait()
            if task.done():
                await task  # raises why the answer cannot be followed
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self, ready: asyncio.Event) -> None:
        try:
            while not self._is_stopped:
                async with self._bus.watch() as watcher:
                    ready.set()
                    self._notify()  # events before this watcher may have been missed
                    try:
                        while True:
                            if any(map(self._concerns, await watcher.batch(EVENT_BATCH))):
                                self._notify()
                    except Lagged:
                        continue
                    except StopAsyncIteration:
                        self._is_stopped = True
        finally:
            self._is_stopped = True
            ready.set()
            self._notify()

    def _concerns(self, event: Event) -> bool:
        if event.kind.startswith("agent."):
            return event.subject == self._agent_id
        return event.kind in ("message.created", "message.updated", "delayed.delivered", "queue.changed", "problem")

    def _notify(self) -> None:
        self._is_changed = True
        self._news.set()

    def _on_live(self, reply: LiveReply) -> None:
        if reply.agent_id != self._agent_id or reply.id in self._ignored:
            return
        self._started.setdefault(reply.id, self._clock.now())
        seen = self._lengths.get(reply.id, 0)
        if size := reply.length - seen:
            self._lengths[reply.id] = reply.length
            last = reply.chunks[-1]
            # Joining all chunks for each one would take quadratic time.
            text = last[-size:] if len(last) >= size else reply.text[seen:]
            self._pieces.append(AnswerDelta(text, reply.id))
            self._news.set()

    async def _take_pieces(self) -> list[AnswerDelta]:
        """The new pieces of drafts that began after the agent had read the question."""
        pieces, self._pieces = self._pieces, deque()
        for draft_id in {piece.draft_id for piece in pieces} - self._own - self._ignored:
            question = None if self._is_stopped else await self._store.message(self._question or "")
            is_own = question and question.taken_at and question.taken_at <= self._started[draft_id]
            (self._own if is_own else self._ignored).add(draft_id)
        return [piece for piece in pieces if piece.draft_id in self._own]

    async def _wait(self, until: float | None, timeout: timedelta | None) -> None:
        if until is None or timeout is None:
            await self._news.wait()
            return
        left = timedelta(seconds=until - self._clock.monotonic())
        if left <= timedelta(0) or not await self._clock.wait(self._news, left):
            raise NoAnswer(
                f"{self._agent_id} has not answered within {timeout.total_seconds():g} s; its answer comes later,"
                " into society.inbox()"
            )

    # The answer

    async def _look(self, question_id: str) -> Answer | None:
        """Look for the answer if something has changed. A store that is closed meanwhile has none."""
        is_changed, self._is_changed = self._is_changed, False
        try:
            return await self._find_answer(question_id) if is_changed else None
        except StoreError:
            if self._is_stopped:
                return None
            raise

    async def _find_answer(self, question_id: str) -> Answer | None:
        """Return the answer if it is there, None if it may still come. `NoAnswer`: it will not."""
        # In this order: a turn that ended before the agent was read has all its messages in the thread.
        question = await self._store.message(question_id)
        agent = await self._store.agent(self._agent_id)
        if question is None or agent is None:
            raise NoAnswer(f"the conversation with {self._agent_id} was cleared: send the message again")
        if question.state in _LOST:
            raise NoAnswer(_LOST[question.state].format(agent=self._agent_id))
        later = await self._read_later(question_id)
        received = [message for message in later if message.to == PERSON and message.state in ("pending", "taken")]
        answer = _find_reply(question, later, received)
        if answer is None and question.state == "taken" and received and agent.state in _ENDED:
            answer = received[-1]
        if answer is None:
            await self._require_progress(question, agent)
            return None
        if answer.sender == SYSTEM and "problem" in answer.payload:
            raise NoAnswer(f"{self._agent_id} could not answer: {answer.payload.get('text', '')}")
        if answer.stopped and not answer.payload.get("text"):
            raise NoAnswer(f"{self._agent_id} was stopped before it answered: send the message again")
        return Answer(message=answer, messages=tuple(received[: received.index(answer) + 1]))

    async def _require_progress(self, question: Message, agent: Agent) -> None:
        """Raise `NoAnswer` if the agent cannot answer before the owner acts: it rests, said nothing, or is paused."""
        if agent.state in _RESTING:
            reason = agent.state_reason or "no reason is known"
            raise NoAnswer(_RESTING[agent.state].format(agent=self._agent_id, reason=reason))
        if question.state == "taken" and agent.state == "idle":
            raise NoAnswer(f"{self._agent_id} has read it and said nothing: see its history")
        if await self._store.is_paused():
            raise NoAnswer("the society is paused: resume it with society.resume_all()")

    async def _read_later(self, question_id: str) -> list[Message]:
        messages: list[Message] = []
        after = question_id
        while page := await self._store.thread(self._agent_id, after=after, limit=PAGE_MESSAGES):
            messages += page
            after = page[-1].id
            if len(page) < PAGE_MESSAGES:
                break
        return messages


def _find_reply(question: Message, later: Sequence[Message], received: Sequence[Message]) -> Message | None:
    """The reply to the question; or, if one turn read several messages of the person, the reply to a newer one."""
    own = next((message for message in received if message.in_reply_to == question.id), None)
    if own or question.state != "taken":
        return own
    newer = {message.id for message in later if message.sender == PERSON}
    return next((message for message in received if message.in_reply_to in newer), None)


async def wait_for_answer(pieces: AsyncGenerator[AnswerDelta | Answer, None]) -> Answer:
    """The last thing that `AnswerFollower.follow` yields."""
    async with aclosing(pieces):
        async for piece in pieces:
            if isinstance(piece, Answer):
                return piece
    raise NoAnswer("the society stopped before the agent answered: start it again")


async def follow_inbox(
    store: Store, bus: MessageBus, recipient: str, after_each: Callable[[Message], Awaitable[None]] | None
) -> AsyncGenerator[Message, None]:
    """Yield the unread messages of `recipient`, then each new one, without end. `after_each`: called between them."""
    seen, limit, lagged = 0, PAGE_MESSAGES, True
    while lagged:
        lagged = False
        async with bus.watch() as watcher:
            try:
                while True:
                    page = await store.waiting(recipient, limit)
                    for message in page:
                        if (message.mailbox_position or 0) > seen:
                            seen = message.mailbox_position or 0
                            yield message
                            if after_each:
                                await after_each(message)
                    if len(page) == limit:  # more may follow; those that stay unread are read again
                        limit *= 2
                    else:
                        await anext(watcher)
            except Lagged:
                lagged = True  # read the mailbox again
            except StopAsyncIteration:
                return
