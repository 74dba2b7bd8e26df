"""A conversation with one agent over HTTP: send, follow what happens, wait for the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from coterie.cli.client import Client, ServerEvent, connect
from coterie.cli.output import format_progress, format_status
from coterie.clock import Clock, SystemClock
from coterie.errors import NoAnswer, Refused, ServerStopping, ServerUnusable
from coterie.messages import PERSON, SYSTEM, Receipt

RECONNECT_INTERVAL = timedelta(seconds=1)
RECONNECT_LIMIT = 5
REREAD_MESSAGES = 50
"""How many recent messages are read again when events were missed."""
STOP_NOTICE_SECONDS = 1.0
"""How long the last event of a server may take after its connections were closed."""
_LOST = {
    "withdrawn": "the message was withdrawn before {agent} read it: send it again",
    "dead": "{agent} can get no more mail, and the message is a dead letter: send it to another agent",
}
_RESTING = {
    "paused": "{agent} is paused and reads it later: let it go on with coterie resume {agent}, or with --all",
    "blocked": "{agent} is blocked and has not read it: see why with coterie agents, then coterie resume {agent}",
    "terminated": "{agent} was terminated: send it to another agent",
}
STALL_SECONDS = 1.0
"""If no agent works on the task for this time, the agents that its mail waits for are looked at; then again and again.

The events of the conversation do not report other agents, which may be paused at any time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """A stored message, as far as a terminal shows it."""

    id: str
    sender: str
    to: str
    text: str
    state: str
    quick_replies: tuple[str, ...] = ()
    filenames: tuple[str, ...] = ()
    in_reply_to: str | None = None
    is_answered: bool = False
    is_stopped: bool = False
    """The person stopped the reply."""
    cut_off: str | None = None
    """Why the model service ended the reply before it was complete."""
    json: Mapping[str, Any]
    """All fields, for --json."""

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> ChatMessage:
        payload = json["payload"]
        return cls(
            id=json["id"],
            sender=json["from"],
            to=json["to"],
            text=str(payload.get("text", "")),
            state=json["state"],
            quick_replies=tuple(map(str, payload.get("quickReplies") or ())),
            filenames=tuple(str(item.get("filename", "file")) for item in payload.get("attachments") or ()),
            in_reply_to=json.get("inReplyTo"),
            is_answered=bool(json.get("answer")),
            is_stopped=bool(json.get("stopped")),
            cut_off=json.get("cutOff"),
            json={key: value for key, value in json.items() if key != "rendered"},  # the text as a tree, for pages
        )

    def belongs_to(self, agent_id: str) -> bool:
        """True for messages between the person and that agent, and for system notices about the agent."""
        if self.sender == SYSTEM:
            problem = self.json["payload"].get("problem")
            return self.to == PERSON and isinstance(problem, dict) and problem.get("agent") == agent_id
        return {self.sender, self.to} == {PERSON, agent_id}

    @property
    def is_problem(self) -> bool:
        """True for a notice that the agent could not answer."""
        return self.sender == SYSTEM and "problem" in self.json["payload"]

    @property
    def is_damaged(self) -> bool:
        """True for the notice that the agent's stored turn is damaged. It belongs to no task."""
        return self.is_problem and self.json["payload"]["problem"].get("category") == "damaged"

    @property
    def is_delivered(self) -> bool:
        """True if it has reached the person."""
        return self.to == PERSON and self.state in ("pending", "taken")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMessage:
    text: str
    delay_ms: float | None = None
    every: str | None = None
    """Makes it recurring: `weekdays 08:00`."""
    time_zone: str | None = None
    unless_answered: str | None = None
    """A message of the person. An answer to it withdraws this delayed one."""
    quick_replies: Sequence[str] = ()
    attachments: Sequence[str] = ()
    """References of artifacts."""
    in_reply_to: str | None = None
    option: int | None = None
    """Index of the chosen quick reply, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    state: str
    """`idle`, `active`, `paused`, `blocked` or `terminated`."""
    phase: str | None = None
    tool: str | None = None
    reason: str | None = None
    """Why it is blocked, or asks its model again."""

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> AgentStatus:
        return cls(state=json["state"], phase=json.get("phase"), tool=json.get("tool"), reason=json.get("why"))

    def __str__(self) -> str:
        return format_status(self.state, self.phase, self.tool)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolProgress:
    """How far the agent's tool call is."""

    tool: str = ""
    text: str = ""
    """As in `40%, copying`. Empty: the call has ended."""

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> ToolProgress:
        text = format_progress(json["progress"], json.get("total"), json.get("message", ""))
        return cls(tool=json["name"], text=text)


@dataclass(frozen=True, slots=True)
class MessageArrived:
    message: ChatMessage


@dataclass(frozen=True, slots=True)
class MessagesRead:
    """The agent has read these messages of the person."""

    ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class DraftText:
    """Text of a reply that the model is writing; `start` is its offset in the reply."""

    draft_id: str
    start: int
    text: str


@dataclass(frozen=True, slots=True)
class DraftEnded:
    draft_id: str
    outcome: str


@dataclass(frozen=True, slots=True)
class TaskChanged:
    """The summary of a task, as JSON."""

    task: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RetryPlanned:
    """The model gave no answer and is asked again. The status that says so may be over when it is read."""

    reason: str


@dataclass(frozen=True, slots=True)
class SocietyStopped:
    """The last event: the society stops."""


ChatEvent = (
    MessageArrived
    | MessagesRead
    | DraftText
    | DraftEnded
    | AgentStatus
    | RetryPlanned
    | TaskChanged
    | ToolProgress
    | SocietyStopped
)


class UnreadMessages:
    """Messages that were sent here and that the agent has not read yet."""

    def __init__(self, get_message: Callable[[str], Awaitable[ChatMessage]]) -> None:
        self._get_message = get_message
        self._ids: set[str] = set()

    def add(self, message_id: str) -> None:
        self._ids.add(message_id)

    async def take_read(self) -> frozenset[str]:
        """Remove and return those that were read by now."""
        # More may be sent while these are looked up.
        states = {message_id: await self._state(message_id) for message_id in tuple(self._ids)}
        self._ids -= {message_id for message_id, state in states.items() if state not in ("pending", "delayed")}
        return frozenset(message_id for message_id, state in states.items() if state == "taken")

    async def _state(self, message_id: str) -> str | None:
        try:
            return (await self._get_message(message_id)).state
        except Refused:
            return None  # the conversation was cleared


class Conversation:
    def __init__(self, client: Client, agent_id: str, clock: Clock | None = None) -> None:
        self.agent_id = agent_id
        self._client, self._clock = client, clock or SystemClock()
        self._events: asyncio.Queue[ChatEvent | Exception] = asyncio.Queue()
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listener: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._unread = UnreadMessages(self.message)
        self._path = f"/agents/{quote(agent_id)}"

    @classmethod
    @asynccontextmanager
    async def open(cls, client: Client, agent_id: str) -> AsyncIterator[Self]:
        """Follow everything that happens from now on. `ServerUnusable` if the event stream cannot be opened."""
        conversation = cls(client, agent_id)
        listener = conversation._listener = asyncio.create_task(conversation._listen(), name="coterie-listener")
        try:
            await conversation._connected
            yield conversation
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def recent(self, limit: int) -> Sequence[ChatMessage]:
        """The last messages, oldest first."""
        page = await self._client.get(f"/threads/{quote(self.agent_id)}/messages", limit=limit)
        return [ChatMessage.from_json(item) for item in page["items"]]

    async def message(self, message_id: str) -> ChatMessage:
        return ChatMessage.from_json(await self._client.get(f"/messages/{quote(message_id)}"))

    async def task(self, task_id: str) -> Mapping[str, Any] | None:
        """The summary of a task; None if it starts when its delayed message is due."""
        try:
            task: Mapping[str, Any] = await self._client.get(f"/tasks/{quote(task_id)}")
        except Refused:
            return None
        return task

    async def status(self, agent_id: str | None = None) -> AgentStatus:
        """What the agent does; without an id the one of this conversation."""
        path = self._path if agent_id is None else f"/agents/{quote(agent_id)}"
        return AgentStatus.from_json(await self._client.get(path))

    async def upload(self, file: Path) -> str:
        return await self._client.upload(file)

    async def send(self, message: OutgoingMessage) -> Receipt:
        receipt = await send_message(self._client, self.agent_id, message)
        self._unread.add(receipt.message_id)
        return receipt

    async def withdraw(self, message_id: str) -> None:
        """`Refused("already_taken")` if the agent has read it."""
        await self._client.delete(f"/messages/{quote(message_id)}")

    async def stop_turn(self) -> None:
        await self._client.post(f"{self._path}/stop")

    async def mark_read(self, message: ChatMessage) -> None:
        """Record that the person has read the conversation up to that message."""
        await self._client.post("/read", {"thread": self.agent_id, "upto": message.id})

    async def next_event(self) -> ChatEvent:
        """Wait for the next event. Raises what ended the event stream."""
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def queued_events(self) -> Iterator[ChatEvent]:
        """The events that have arrived and were not read. The last ones say what happened before an answer."""
        while not self._events.empty():
            event = self._events.get_nowait()
            if isinstance(event, Exception):
                return
            yield event

    async def is_stopped(self) -> bool:
        """True if the server announced its stop. Call it after a failed request: the announcement may arrive later."""
        if self._listener:
            await asyncio.wait({self._listener}, timeout=STOP_NOTICE_SECONDS)
        return self._is_stopped

    async def _listen(self) -> None:
        try:
            await self._follow()
        except Exception as error:
            if not self._connected.done():
                self._connected.set_exception(error)
            self._events.put_nowait(SocietyStopped() if isinstance(error, ServerStopping) else error)

    async def _follow(self) -> None:
        """Read the event stream; reconnect where it broke off."""
        last_id: str | None = None
        failures, failure = 0, ServerUnusable("the server ended the conversation: see whether it still runs")
        while failures < RECONNECT_LIMIT:
            try:
                async with aclosing(self._client.events(last_id)) as events:
                    async for event in events:
                        failures = 0
                        last_id = event.id or last_id
                        await self._handle(event)
                        if event.kind == "shutdown":
                            self._is_stopped = True
                            return
            except ServerStopping:
                raise
            except ServerUnusable as error:
                failure = error
            failures += 1
            if not self._connected.done():
                break
            await self._clock.sleep(RECONNECT_INTERVAL)
        raise failure

    async def _handle(self, event: ServerEvent) -> None:
        if event.kind == "hello":
            if not self._connected.done():
                self._connected.set_result(None)
        elif event.kind == "reset":  # events were missed
            for message in await self.recent(REREAD_MESSAGES):
                self._events.put_nowait(MessageArrived(message))
            self._events.put_nowait(await self.status())
        elif event.kind == "queue.changed" and event.data["agent"] == self.agent_id:
            self._events.put_nowait(MessagesRead(await self._unread.take_read()))
        elif (parsed := _parse_event(event, self.agent_id)) is not None:
            self._events.put_nowait(parsed)


def _parse_event(event: ServerEvent, agent_id: str) -> ChatEvent | None:
    data = event.data
    match event.kind:
        case _ if data.get("gone"):
            return None  # deleted since the event was written
        case "message.created" | "delayed.delivered":
            message = ChatMessage.from_json(data["message"])
            return MessageArrived(message) if message.belongs_to(agent_id) else None
        case "draft.delta" | "draft.snapshot" if data["agent"] == agent_id:
            return DraftText(data["draftId"], data.get("from", 0), data.get("delta", data.get("text", "")))
        case "draft.ended" if data["agent"] == agent_id:
            return DraftEnded(data["draftId"], data["outcome"])
        case "agent.state" if data["id"] == agent_id:
            return AgentStatus.from_json(data)
        case "problem" if data["agent"] == agent_id and data.get("retryable"):
            return RetryPlanned(data["message"])
        case "task.changed":
            return TaskChanged(data)
        case "tool.progress" if data["agent"] == agent_id:
            return ToolProgress.from_json(data)
        case "tool.ended" if data["agent"] == agent_id:
            return ToolProgress()
        case "shutdown":
            return SocietyStopped()
    return None


@asynccontextmanager
async def open_conversation(folder: Path, agent_id: str, token: str | None = None) -> AsyncIterator[Conversation]:
    """Talk to an agent of the society in `folder`, which runs in this process if no other runs it."""
    async with connect(folder, token, private="work") as client:
        await client.agent(agent_id)
        async with Conversation.open(client, agent_id) as conversation:
            yield conversation


async def send_message(client: Client, to: str, message: OutgoingMessage) -> Receipt:
    """Send a message of the person. It is stored durably when this returns."""
    payload: dict[str, Any] = {"text": message.text}
    if message.attachments:
        payload["attachments"] = [{"artifactRef": ref} for ref in message.attachments]
    optional = {
        "delayMs": message.delay_ms,
        "every": message.every,
        "timeZone": message.time_zone,
        "unlessAnswered": message.unless_answered,
        "quickReplies": list(message.quick_replies) or None,
        "inReplyTo": message.in_reply_to,
        "option": message.option,
    }
    body = {"to": to, "payload": payload} | {key: value for key, value in optional.items() if value is not None}
    receipt = await client.post("/messages", body)
    due = receipt.get("scheduledDeliveryTime")
    return Receipt(
        message_id=receipt["messageId"],
        state=receipt["state"],
        task=receipt["task"],
        scheduled_delivery_time=datetime.fromisoformat(due) if due else None,
        schedule_id=receipt.get("scheduleId"),
    )


async def wait_for_answers(
    conversation: Conversation, message_id: str, on_event: Callable[[ChatEvent], None] = lambda _: None
) -> Sequence[ChatMessage]:
    """Return what the agent sent to the person until it answered that message or ended its turn.

    `NoAnswer` if it sent nothing, or cannot. `on_event` gets every event meanwhile.
    """
    agent = conversation.agent_id
    stopped = NoAnswer(f"the society stopped before {agent} answered: start it again")
    answers: dict[str, ChatMessage] = {}
    try:
        is_done = await _is_done(conversation, message_id)
        while not is_done:
            event = await conversation.next_event()
            on_event(event)
            match event:
                case MessageArrived(message) if message.is_delivered:
                    answers[message.id] = message
                    is_done = message.in_reply_to == message_id
                case AgentStatus() | MessagesRead():
                    is_done = await _is_done(conversation, message_id)
                case SocietyStopped():
                    raise stopped
        if not any(answer.in_reply_to == message_id for answer in answers.values()):
            answers |= {message.id: message for message in await _messages_after(conversation, message_id)}
    except ServerUnusable as error:
        if isinstance(error, ServerStopping) or await conversation.is_stopped():
            raise stopped from None
        raise
    if not answers:
        raise NoAnswer(f"{agent} has read it and said nothing: see what it did with coterie history {agent}")
    return list(answers.values())


async def wait_for_task(
    conversation: Conversation, receipt: Receipt, on_event: Callable[[ChatEvent], None] = lambda _: None
) -> Sequence[ChatMessage]:
    """Return what the agent sent to the person until the task of the message did not work any more.

    `NoAnswer` if it sent nothing, or cannot. `on_event` gets every event meanwhile.
    """
    agent, message_id = conversation.agent_id, receipt.message_id
    stopped = NoAnswer(f"the society stopped before {agent} answered: start it again")
    answers: dict[str, ChatMessage] = {}
    try:
        task = await _look(conversation, receipt)
        now = asyncio.get_running_loop().time
        check_at = now() + STALL_SECONDS
        while task is None or task["state"] == "working":
            is_stalled = task is not None and not task["active"]
            if is_stalled and now() >= check_at:  # also while other events come faster than they are handled
                await _check_readers(conversation, receipt)
                check_at = now() + STALL_SECONDS
            try:
                async with asyncio.timeout_at(check_at if is_stalled else None):
                    event = await conversation.next_event()
            except TimeoutError:
                continue
            on_event(event)
            match event:
                case MessageArrived(message) if message.is_delivered:
                    answers[message.id] = message
                case TaskChanged(changed) if changed["id"] == receipt.task:
                    task, is_stalled = changed, False
                case AgentStatus() | MessagesRead():
                    task = await _look(conversation, receipt)
                case SocietyStopped():
                    raise stopped
            if not is_stalled:  # before this event, or this event is about the task
                check_at = now() + STALL_SECONDS
        for event in conversation.queued_events():
            on_event(event)
        # Events of its last messages may still be on their way.
        answers |= {message.id: message for message in await _messages_after(conversation, message_id)}
    except ServerUnusable as error:
        if isinstance(error, ServerStopping) or await conversation.is_stopped():
            raise stopped from None
        raise
    found = [answer for answer in answers.values() if answer.is_damaged or answer.json["task"] == receipt.task]
    if not found and task["state"] == "stopped":
        raise NoAnswer(f"the task was stopped before {agent} answered")
    if not found:
        raise NoAnswer(f"{agent} has read it and said nothing: see what it did with coterie history {agent}")
    return found


async def _look(conversation: Conversation, receipt: Receipt) -> Mapping[str, Any] | None:
    """The task of the message. `NoAnswer` if the agent will not read the message."""
    await _is_done(conversation, receipt.message_id)
    return await conversation.task(receipt.task)


async def _check_readers(conversation: Conversation, receipt: Receipt) -> None:
    """`NoAnswer` if all mail of the task waits for other agents that are paused or blocked."""
    task = await conversation.task(receipt.task)
    nodes = [node for node in (task or {}).get("nodes", ()) if node["kind"] == "message"]
    waiting = {node["to"] for node in nodes if node["state"] in ("pending", "delayed")} - {PERSON}
    states = {agent: (await conversation.status(agent)).state for agent in sorted(waiting)}
    if states and all(state in _RESTING for state in states.values()):
        agent, state = next(iter(states.items()))
        raise NoAnswer(f"the task waits for another agent: {_RESTING[state].format(agent=agent)}")


async def _is_done(conversation: Conversation, message_id: str) -> bool:
    """True if the agent has read the message and no longer works, or waits for the person's approval."""
    message, status = await conversation.message(message_id), await conversation.status()
    if message.state in _LOST:
        raise NoAnswer(_LOST[message.state].format(agent=conversation.agent_id))
    if message.state == "pending" and status.state in _RESTING:
        raise NoAnswer(_RESTING[status.state].format(agent=conversation.agent_id))
    return message.state == "taken" and (status.state != "active" or status.phase == "approval")


async def _messages_after(conversation: Conversation, message_id: str) -> list[ChatMessage]:
    messages = list(await conversation.recent(REREAD_MESSAGES))
    ids = [message.id for message in messages]
    later = messages[ids.index(message_id) + 1 :] if message_id in ids else messages
    return [message for message in later if message.is_delivered]
