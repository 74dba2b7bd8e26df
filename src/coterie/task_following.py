"""What a program sees of a task: who works on it, what agents say, and how it ends.

`TaskFollower` reports progress and the outcome to a program that waits. `TaskStream` yields the text as it is written
and the messages to the person; it may begin before the message is sent, while the task works, or after it has ended,
and starts with everything that was said since the message. Both are woken by `TaskWatch`, the one watcher of the event
log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, Protocol, Self

from msgspec import Struct

from coterie.agents import Agent
from coterie.bus import MessageBus
from coterie.clock import Clock
from coterie.errors import Lagged, StoreError
from coterie.live import LiveReplies, LiveReply
from coterie.messages import PERSON, Message, Receipt
from coterie.store import Event, TaskStore
from coterie.supervision import supervise
from coterie.tasks import MessageNode, Task, TaskState, TaskTree
from coterie.text import one_line

EVENT_BATCH = 100
PROGRESS_INTERVAL = timedelta(milliseconds=250)
"""Progress within this time is reported once."""
STALL_TIME = timedelta(seconds=1)
"""If no agent works for this time without news, the agents that mail waits for are looked at."""
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


class Subscriber(Protocol):
    def on_event(self, event: Event) -> None:
        """Something happened to one of the subscribed ids."""
        ...

    def wake(self) -> None:
        """Anything may have changed: the whole society, or events were missed, or no more will come."""
        ...


class TaskWatch:
    """Wakes subscribers when their tasks change. All subscribers share one watcher of the event log."""

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


# Waiting for the outcome


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
    """Why it does not go on until a person or program acts; None: it goes on."""

    @property
    def answer(self) -> Message | None:
        return self.messages[-1] if self.messages else None

    @property
    def questions(self) -> Sequence[Message]:
        """Those of its questions that the person has not answered."""
        return [message for message in self.messages if is_open_question(message)]


def is_open_question(message: Message) -> bool:
    return bool(message.payload.get("quickReplies")) and message.answer is None and message.sender != PERSON


class FollowedStore(TaskStore, Protocol):
    """The reads that this module needs."""

    async def message(self, message_id: str) -> Message | None: ...
    async def messages_by_id(self, ids: Sequence[str]) -> Mapping[str, Message]: ...
    async def thread(self, agent_id: str, *, after: str | None = None, limit: int = 50) -> Sequence[Message]: ...
    async def agents_by_id(self, ids: Sequence[str]) -> Mapping[str, Agent]: ...
    async def is_paused(self) -> bool: ...


async def find_shared_answer(store: FollowedStore, message_id: str, task: Task) -> Message | None:
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


async def find_obstacle(store: FollowedStore, tree: TaskTree) -> str | None:
    """Say who has to act before the task goes on; None: it goes on by itself, or does not work."""
    if tree.task.state != "working" or tree.task.active:
        return None
    if await store.is_paused():
        return "the society is paused: its owner resumes it in the panel, or with coterie resume --all"
    readers = readers_of(tree)
    held = [agent for agent in (await store.agents_by_id(readers)).values() if agent.state in _HELD]
    if not held or len(held) < len(readers):
        return None
    return _HELD[held[0].state].format(agent=held[0].id, reason=held[0].state_reason or "no reason is known")


def readers_of(tree: TaskTree) -> Sequence[str]:
    """The agents that mail of the task waits for."""
    nodes = [node for node in tree.nodes if isinstance(node, MessageNode) and node.state in ("pending", "delayed")]
    return sorted({node.to for node in nodes if node.to != PERSON})


class TaskFollower:
    """Follows one message of the person. Nothing is kept: a new follower of the same message sees the same."""

    def __init__(self, following: TaskFollowing, message: Message) -> None:
        self._following, self._store, self._watch = following, following.store, following.watch
        self._live, self._clock, self._message = following.live, following.clock, message
        self._task_id = message.task or message.id
        self._news = asyncio.Event()
        self._draft = ""
        self._ids = set[str]()
        """Ids whose events concern it."""

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
            problem=await find_obstacle(self._store, tree),
        )

    async def follow(self, timeout: timedelta | None) -> AsyncGenerator[TaskProgress | TaskOutcome, None]:
        """Yield progress, and at last the outcome: the task does not work, cannot go on, or `timeout` is over."""
        until = None if timeout is None else self._clock.monotonic() + timeout.total_seconds()
        shown, next_progress = "", self._clock.monotonic()
        unsubscribe = self._live.subscribe(self._on_live)
        for reply in self._live.replies:  # it may have begun before
            self._on_live(reply)
        self._ids = {self._task_id, self._message.id, self._message.to}
        try:
            await self._watch.subscribe(self, self._ids)
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
                may_stall = not task.active and line == shown
                if not await self._wait(until, next_progress if line != shown else None, may_stall=may_stall):
                    yield await self.outcome()
                    return
        finally:
            self._watch.unsubscribe(self, self._ids)
            unsubscribe()

    async def _wait(self, until: float | None, next_progress: float | None, *, may_stall: bool) -> bool:
        """Wait for news, or until progress may be reported again. False: the time is over, or the task is held up.

        `may_stall`: no agent works.
        """
        now = self._clock.monotonic()
        if until is not None and until <= now:
            return False
        if may_stall and (until is None or until - now > STALL_TIME.total_seconds()):
            if await self._clock.wait(self._news, STALL_TIME):
                return True
            if await self._following.why_stalled(self._message.id, self, self._ids):
                return False
            now = self._clock.monotonic()
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
        """Return the task if it works."""
        try:
            task = (await self._store.tasks_by_id([self._task_id])).get(self._task_id)
        except StoreError:
            if self._watch.is_stopped:
                return None
            raise
        return task if task and task.state == "working" else None

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


def _progress_line(task: Task, recipient: str, draft: str) -> str:
    if draft:
        return f"{recipient}: {one_line(draft[-DRAFT_CHARACTERS:], DRAFT_CHARACTERS)}"
    names = ", ".join(sorted(task.active_agents)) or recipient
    doing = "at work" if task.active_agents else "has the message"
    return f"{names} {doing}: {task.messages} messages, {task.turns} turns, {task.tool_calls} tool calls"


# Streams


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


class TaskFollowing:
    """Makes followers and streams, which share what they need."""

    def __init__(self, store: FollowedStore, bus: MessageBus, live: LiveReplies, clock: Clock) -> None:
        self.store, self.watch, self.live, self.clock = store, TaskWatch(bus, clock), live, clock

    def follower(self, message: Message) -> TaskFollower:
        return TaskFollower(self, message)

    async def why_stalled(self, message_id: str, subscriber: Subscriber, ids: set[str]) -> str | None:
        """Say why the task of the message cannot go on by itself; None: it can.

        From now on the subscriber gets the events of all agents with its mail; their ids are added to `ids`.
        """
        try:
            if tree := await self.store.task_tree(message_id):
                ids.update(readers := readers_of(tree))
                await self.watch.subscribe(subscriber, readers)
                return await find_obstacle(self.store, tree)
        except StoreError:
            if not self.watch.is_stopped:  # a stop of the society wakes the subscriber, a failure of the store does not
                raise
        return None

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

    def __init__(self, following: TaskFollowing, agent_id: str, *, with_text: bool) -> None:
        self._following, self._agent_id, self._with_text = following, agent_id, with_text
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
            for reply in self._following.live.replies:
                self._on_live(reply)
            self._unsubscribe = self._following.live.subscribe(self._on_live)
        return self

    def __exit__(self, *_: object) -> None:
        self._following.watch.unsubscribe(self, self._ids)
        if self._with_text:
            self._unsubscribe()

    async def expect(self, message_id: str) -> None:
        """Subscribe before the message is sent, so that its events say that the agent works on it."""
        self._expected, self._is_changed = message_id, False
        await self._subscribe(message_id, self._agent_id)
        if self._following.watch.is_stopped:  # no event will come
            self.wake()

    async def _subscribe(self, *ids: str) -> None:
        self._ids.update(ids)
        await self._following.watch.subscribe(self, ids)

    def on_event(self, event: Event) -> None:
        if event.kind == "agent.state" and self._is_active:
            return  # the end of its turn changes the task, too
        if event.kind == "queue.changed" and self._is_only_stored and self._expected in (event.data or ""):
            # The agent took the message at once: the task works, and no agent has answered yet.
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
            draft = self._drafts[reply.id] = _Draft(self._following.clock.now())
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
            question = await self._following.store.message(sent.message_id)
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
                    task, messages = await self._following.store.task_with_messages(question.task, after=self._last_seq)
                except StoreError:
                    if not self._following.watch.is_stopped:
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
            ended = self._find_end(task, is_answered_for_another) if is_read else None
            if task and not ended and not task.active and not await self._wait(STALL_TIME):
                reason = await self._following.why_stalled(task.id, self, self._ids)
                ended = Ended(task, reason) if reason else None
            if ended:
                if ended.task and ended.task.state == "done" and not has_answer:
                    shared = await find_shared_answer(self._following.store, question.message_id, ended.task)
                    for piece in self._close_draft(shared, ()) if shared else ():
                        yield piece
                for piece in self._supersede():
                    yield piece
                yield ended
                return
            if not await self._wait(silence):
                yield Silence()

    async def _wait(self, silence: timedelta | None) -> bool:
        """Wait for news. False: there was none for the time `silence`."""
        if silence is None:
            await self._news.wait()
            return True
        return self._news.is_set() or await self._following.clock.wait(self._news, silence)

    def _find_end(self, task: Task | None, is_over: bool) -> Ended | None:
        if task and (is_over or task.state != "working"):
            return Ended(task)
        if self._following.watch.is_stopped:
            return Ended(None, "the society stops: send the same request again when it runs")
        if task is None:
            return Ended(None, "the message was withdrawn or deleted: send it again")
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
            now = await self._following.store.message(question.message_id)
            if now and now.taken_at and now.taken_at <= draft.began_at:
                task = (await self._following.store.tasks_by_id([question.task])).get(question.task)
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
