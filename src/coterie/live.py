"""Replies that models are writing now, and the progress of running tool calls. Neither is stored.

A finished reply is stored as messages. `LiveReplies` holds the replies and calls of this process. `LiveRelay` exchanges
them with the other processes of the society: it broadcasts chunks, and a process that missed one asks for the whole
text again. Of the progress of a call only the newest report counts, so a lost one is not repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, Protocol

import msgspec

from coterie.clock import Clock
from coterie.errors import StoreError
from coterie.ids import new_id
from coterie.supervision import supervise
from coterie.text import to_storable

log = logging.getLogger(__name__)

ReplyOutcome = Literal["stored", "withdrawn", "stopped", "failed"]

BATCH_INTERVAL = timedelta(milliseconds=100)
"""Time in which chunks are collected before they are broadcast together."""
PROGRESS_INTERVAL = timedelta(milliseconds=250)
"""Reports of tool calls within this time are sent as one."""
HEARTBEAT_INTERVAL = timedelta(seconds=5)
REMOTE_TIMEOUT = timedelta(seconds=16)
"""A remote reply without news for this long has failed: its process is gone."""
CHUNK_CHARACTERS = 1_000
"""At most six bytes each; PostgreSQL limits a notification to 8,000 bytes."""
MAX_BATCH = 32
"""Chunks per broadcast. The rest waits for the next one, which bounds the load on the database."""
MAX_MESSAGE_IDS = 50
"""Ids of stored messages that the end of a reply lists."""


@dataclass(slots=True, kw_only=True)
class LiveReply:
    """A reply that a model is writing."""

    id: str
    agent_id: str
    chunks: list[str] = field(default_factory=list)
    length: int = 0
    """Characters so far."""
    outcome: ReplyOutcome | None = None
    """None: still streaming."""
    message_ids: Sequence[str] = ()
    """The messages it was stored as."""

    @property
    def text(self) -> str:
        if len(self.chunks) > 1:
            self.chunks = ["".join(self.chunks)]
        return self.chunks[0] if self.chunks else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallProgress:
    """How far a running tool call is, as its tool reports."""

    agent_id: str
    call_id: str
    tool: str
    progress: float
    total: float | None = None
    message: str = ""
    is_remote: bool = False
    """The call runs in another process."""


LiveListener = Callable[[LiveReply], None]
"""Called when a reply starts, grows or ends. Must not block."""
ProgressListener = Callable[[str, CallProgress | None], None]
"""Called with an agent's id when its tool call reports progress, and with None when the call ends. Must not block."""


class LiveReplies:
    def __init__(self) -> None:
        self._replies: dict[str, LiveReply] = {}
        self._listeners: list[LiveListener] = []
        self._progress: dict[str, CallProgress] = {}
        self._progress_listeners: list[ProgressListener] = []

    def subscribe(self, listener: LiveListener) -> Callable[[], None]:
        """Call `listener` on every change. Returns a function that ends the subscription."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    @property
    def replies(self) -> Sequence[LiveReply]:
        return tuple(self._replies.values())

    def append(self, agent_id: str, reply_id: str, text: str) -> None:
        """Add a chunk; the first chunk starts the reply."""
        reply = self._replies.get(reply_id)
        if reply is None:
            reply = self._replies[reply_id] = LiveReply(id=reply_id, agent_id=agent_id)
        reply.chunks.append(text)
        reply.length += len(text)
        self._notify(reply)

    def finish(self, reply_id: str, outcome: ReplyOutcome, message_ids: Sequence[str] = ()) -> None:
        """End a reply. Does nothing if the reply never started."""
        reply = self._replies.pop(reply_id, None)
        if reply is None:
            return
        reply.outcome, reply.message_ids = outcome, tuple(message_ids)
        self._notify(reply)

    def _notify(self, reply: LiveReply) -> None:
        for listener in tuple(self._listeners):
            listener(reply)

    # The progress of tool calls. An agent runs one call at a time.

    def subscribe_progress(self, listener: ProgressListener) -> None:
        self._progress_listeners.append(listener)

    @property
    def progress(self) -> Sequence[CallProgress]:
        """The newest report of each call that runs in this process."""
        return tuple(self._progress.values())

    def report_progress(self, progress: CallProgress) -> None:
        if not progress.is_remote:
            self._progress[progress.agent_id] = progress
        self._notify_progress(progress.agent_id, progress)

    def end_progress(self, agent_id: str) -> None:
        """Forget the progress of the agent's call. Does nothing if it reported none."""
        if self._progress.pop(agent_id, None):
            self._notify_progress(agent_id, None)

    def _notify_progress(self, agent_id: str, progress: CallProgress | None) -> None:
        for listener in tuple(self._progress_listeners):
            listener(agent_id, progress)


# Messages between processes. Their JSON names are fixed: processes of different versions may run together.


class ReplyChunk(msgspec.Struct, frozen=True, tag="said", omit_defaults=True):
    by: str
    """Id of the sending process."""
    draft: str
    """Id of the reply."""
    agent: str
    start: int
    """Position of `text` in the reply."""
    text: str = ""
    outcome: ReplyOutcome | None = None
    messages: tuple[str, ...] = ()


class ResendRequest(msgspec.Struct, frozen=True, tag="asked"):
    """Asks all processes to send their live replies again from the start."""

    by: str


class StopRequest(msgspec.Struct, frozen=True, tag="stop"):
    """Asks the process that works on this agent's turn to stop it."""

    by: str
    agent: str


class ProgressReport(msgspec.Struct, frozen=True, tag="progress", omit_defaults=True):
    """The newest progress of the tool call that the agent runs."""

    by: str
    agent: str
    call: str
    tool: str
    progress: float
    total: float | None = None
    message: str = ""


RelayMessage = ReplyChunk | ResendRequest | StopRequest | ProgressReport
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(RelayMessage).decode


class BroadcastChannel(Protocol):
    """Sends texts to all processes of the society, this one included."""

    def subscribe_broadcasts(self, callback: Callable[[str], None]) -> None: ...

    async def broadcast(self, texts: Sequence[str]) -> None: ...


@dataclass(slots=True)
class _RemoteReply:
    """A reply that another process is writing."""

    process: str
    agent_id: str
    length: int
    heard_at: float


class LiveRelay:
    def __init__(
        self, live: LiveReplies, channel: BroadcastChannel, clock: Clock, stop_turn: Callable[[str], object]
    ) -> None:
        """`stop_turn`: stops an agent's turn if this process works on it."""
        self._live, self._channel, self._clock, self._stop_turn = live, channel, clock, stop_turn
        self._process = new_id()
        self._has_news, self._never = asyncio.Event(), asyncio.Event()
        self._changed: dict[str, LiveReply] = {}
        self._sent: dict[str, int] = {}
        """Characters sent, by id of a local reply."""
        self._remote: dict[str, _RemoteReply] = {}
        self._requests: list[RelayMessage] = [ResendRequest(self._process)]
        self._progress: dict[str, CallProgress] = {}
        """Progress that was not sent yet, by agent."""
        self._progress_sent_at = -math.inf
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._channel.subscribe_broadcasts(self._on_broadcast)
        self._live.subscribe(self._on_change)
        self._live.subscribe_progress(self._on_progress)
        self._has_news.set()
        sending = supervise("sending live replies to other processes", self._send_changes, self._clock)
        self._task = asyncio.create_task(sending, name="coterie-relay")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task})
            with contextlib.suppress(StoreError):
                await self._send_batch()  # the ends of the last replies

    def request_stop(self, agent_id: str) -> None:
        """Ask the other processes to stop the agent's turn."""
        self._request(StopRequest(self._process, agent_id))

    # Sending

    def _on_change(self, reply: LiveReply) -> None:
        if reply.id in self._remote:
            return
        if reply.id not in self._sent:
            self._fail_replies_of(reply.agent_id, except_process=self._process)
            self._sent[reply.id] = 0
        self._changed[reply.id] = reply
        self._has_news.set()

    def _on_progress(self, agent_id: str, progress: CallProgress | None) -> None:
        if progress is None:
            self._progress.pop(agent_id, None)
        elif not progress.is_remote:
            self._progress[agent_id] = progress
            self._has_news.set()

    def _request(self, message: RelayMessage) -> None:
        if message not in self._requests:
            self._requests.append(message)
        self._has_news.set()

    async def _send_changes(self) -> None:
        while True:
            if await self._clock.wait(self._has_news, HEARTBEAT_INTERVAL):
                await self._clock.wait(self._never, BATCH_INTERVAL)
            else:
                self._changed |= {reply.id: reply for reply in self._live.replies if reply.id in self._sent}
                self._fail_silent_replies()
            self._has_news.clear()
            try:
                await self._send_batch()
            except StoreError as error:
                # The batch is lost. A process that gets a later chunk notices the gap and asks again.
                log.info("other processes do not get live replies for now: %s", error)

    async def _send_batch(self) -> None:
        requests, self._requests = self._requests, []
        messages = [*requests, *self._next_chunks(), *self._next_progress()]
        if messages:
            await self._channel.broadcast([_encode(message).decode() for message in messages])

    def _next_chunks(self) -> Iterator[ReplyChunk]:
        changed, self._changed = self._changed, {}
        capacity = MAX_BATCH
        for reply in changed.values():
            chunks = self._unsent_chunks(reply)
            for chunk in chunks[:capacity]:
                self._sent[reply.id] = chunk.start + len(chunk.text)
                yield chunk
            if len(chunks) > capacity:
                self._changed.setdefault(reply.id, reply)
                self._has_news.set()
            elif reply.outcome is not None:
                del self._sent[reply.id]
            capacity = max(0, capacity - len(chunks))

    def _next_progress(self) -> Iterator[ProgressReport]:
        now = self._clock.monotonic()
        if not self._progress or now - self._progress_sent_at < PROGRESS_INTERVAL.total_seconds():
            if self._progress:
                self._has_news.set()  # the next batch looks again
            return
        self._progress_sent_at = now
        progress, self._progress = self._progress, {}
        for one in progress.values():
            text = to_storable(one.message)
            yield ProgressReport(self._process, one.agent_id, one.call_id, one.tool, one.progress, one.total, text)

    def _unsent_chunks(self, reply: LiveReply) -> list[ReplyChunk]:
        """The text not sent yet; an empty chunk as heartbeat if there is none; the end if the reply has ended."""
        sent, text = self._sent[reply.id], to_storable(reply.text)
        starts = range(sent, len(text), CHUNK_CHARACTERS) or ((sent,) if reply.outcome is None else ())
        chunks = [
            ReplyChunk(self._process, reply.id, reply.agent_id, start, text[start : start + CHUNK_CHARACTERS])
            for start in starts
        ]
        if reply.outcome is None:
            return chunks
        message_ids = tuple(reply.message_ids[:MAX_MESSAGE_IDS])
        end = ReplyChunk(self._process, reply.id, reply.agent_id, len(text), "", reply.outcome, message_ids)
        return [*chunks, end]

    # Receiving

    def _on_broadcast(self, text: str) -> None:
        try:
            message = _decode(text)
        except msgspec.DecodeError:  # of another version
            return
        if message.by == self._process:
            return
        match message:
            case ResendRequest():
                self._resend_all()
            case StopRequest():
                self._stop_turn(message.agent)
            case ProgressReport():
                self._live.report_progress(
                    CallProgress(
                        agent_id=message.agent,
                        call_id=message.call,
                        tool=message.tool,
                        progress=message.progress,
                        total=message.total,
                        message=message.message,
                        is_remote=True,
                    )
                )
            case ReplyChunk():
                self._receive(message)

    def _resend_all(self) -> None:
        for reply in self._live.replies:
            if reply.id in self._sent:
                self._sent[reply.id] = 0
                self._changed[reply.id] = reply
        self._has_news.set()

    def _receive(self, chunk: ReplyChunk) -> None:
        # A process that takes over a turn writes the same reply again, with the same id.
        reply_id = f"{chunk.draft}@{chunk.by}"
        reply = self._remote.get(reply_id)
        if reply is None:
            if chunk.start or chunk.outcome:
                if not chunk.outcome:
                    self._request(ResendRequest(self._process))
                return
            self._fail_replies_of(chunk.agent, except_process=chunk.by)
            reply = self._remote[reply_id] = _RemoteReply(chunk.by, chunk.agent, 0, 0)
        reply.heard_at = self._clock.monotonic()
        if chunk.start > reply.length and not chunk.outcome:
            self._request(ResendRequest(self._process))
            return
        new_text = chunk.text[reply.length - chunk.start :] if chunk.start <= reply.length else ""
        reply.length += len(new_text)
        if new_text or not chunk.outcome:
            self._live.append(chunk.agent, reply_id, new_text)
        if chunk.outcome:
            self._finish(reply_id, chunk.outcome, chunk.messages)

    def _fail_replies_of(self, agent_id: str, *, except_process: str) -> None:
        """End the agent's remote replies of other processes: `except_process` works on its turn now."""
        for reply_id, reply in [*self._remote.items()]:
            if reply.agent_id == agent_id and reply.process != except_process:
                self._finish(reply_id, "failed")

    def _fail_silent_replies(self) -> None:
        oldest = self._clock.monotonic() - REMOTE_TIMEOUT.total_seconds()
        for reply_id, reply in [*self._remote.items()]:
            if reply.heard_at < oldest:
                self._finish(reply_id, "failed")

    def _finish(self, reply_id: str, outcome: ReplyOutcome, message_ids: Sequence[str] = ()) -> None:
        self._live.finish(reply_id, outcome, message_ids)
        del self._remote[reply_id]
