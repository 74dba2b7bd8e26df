"""Server-sent events: one hub reads the event log once for all clients, with a bounded buffer for each client.

A client gets `hello`, then the events it missed, then a snapshot of every reply in progress, then live events. Events
of the log have the id `<epoch>.<seq>`. Events about replies and tool calls in progress (`draft.*`, `tool.progress`)
have no id, because they are not stored; nor has `task.changed`.
`EventStream` is the HTTP response of one client.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Annotated, Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie.clock import Clock, to_rfc3339
from coterie.errors import Lagged
from coterie.live import PROGRESS_INTERVAL, CallProgress, LiveReplies, LiveReply
from coterie.running_configuration import ConfigurationHealth
from coterie.society import Society
from coterie.supervision import supervise
from coterie.web.connections import HANG_UP, wait_for_disconnect
from coterie.web.event_payloads import (
    TASK_CHUNK,
    TASK_GATHER_TIME,
    ChangedTasks,
    EventSerializer,
    changed_tasks,
    frame,
    has_frame,
    recently_changed,
    task_frames,
)
from coterie.web.openapi import COMMON_PROBLEMS
from coterie.web.routing import API, Header, Id, Query, Router
from coterie.web.schemas import ConfigurationState

Write = Callable[[bytes], Awaitable[None]]

MAX_BUFFERED_EVENTS = 256
MAX_BUFFERED_BYTES = 1 << 20
"""A client that needs more is disconnected; it reconnects and continues from the log."""
MAX_WRITE_BYTES = 64 << 10
PING_INTERVAL = timedelta(seconds=15)
DRAFT_INTERVAL = timedelta(milliseconds=45)
"""Pieces of a reply within this time are sent as one event."""
SHUTDOWN_TIMEOUT = timedelta(seconds=2)
"""Time for clients to read the shutdown event."""
IDLE_WAIT = timedelta(hours=1)
RETRY_INTERVAL = timedelta(seconds=1)
BATCH_EVENTS = 64
WATCHER_QUEUE = 1024
BURST_BYTES = 256 << 10
"""Bytes put into the buffers before their tasks run, so that a client that reads never overflows."""
MAX_DRAFT_IDS = 1000
"""Messages whose draft id is remembered."""


class StreamClient:
    """One client: a bounded buffer, and the task that writes it out."""

    def __init__(
        self, write: Write, *, max_events: int = MAX_BUFFERED_EVENTS, max_bytes: int = MAX_BUFFERED_BYTES
    ) -> None:
        """Must be called by the task that serves the client; `drop` cancels that task."""
        self._write, self._task = write, asyncio.current_task()
        self._max_events, self._max_bytes = max_events, max_bytes
        self._frames: deque[bytes] = deque()
        self._size = 0
        self._wake = asyncio.Event()
        self._closing = self._pinged = False
        self.dropped = False
        self.is_live = False
        """The client has all events of the past, and gets new ones."""
        self.seen = 0
        """Position of the last event that was put into the buffer."""

    def put(self, frame: bytes) -> None:
        if self._frames and (len(self._frames) >= self._max_events or self._size + len(frame) > self._max_bytes):
            self.drop()
            return
        self._frames.append(frame)
        self._size += len(frame)
        self._wake.set()

    def put_new(self, frames: Iterable[tuple[int, bytes]]) -> None:
        """Put the frames after `seen`."""
        for seq, data in frames:
            if seq > self.seen:
                self.seen = seq
                self.put(data)

    def ping(self, frame: bytes) -> None:
        """Drop the client if it has read nothing since the last ping."""
        if self._pinged:
            self.drop()
            return
        self._pinged = True
        if self.is_live:
            self.put(frame)

    def close(self) -> None:
        """End the stream after the buffer is written."""
        self._closing = True
        self._wake.set()

    def drop(self) -> None:
        if not self.dropped and self._task:
            self.dropped = True
            self._frames.clear()
            self._task.cancel()

    async def write(self, data: bytes) -> None:
        await self._write(data)
        self._pinged = False

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._frames:
                await self.write(self._next_write())
            if self._closing:
                return

    def _next_write(self) -> bytes:
        frames: list[bytes] = []
        size = 0
        while self._frames and (not frames or size + len(self._frames[0]) <= MAX_WRITE_BYTES):
            frames.append(self._frames.popleft())
            size += len(frames[-1])
        self._size -= size
        return b"".join(frames)


def epoch_of(log_id: str) -> str:
    """The event log's name in event ids and snapshots."""
    return hashlib.sha256(log_id.encode()).hexdigest()[:12]


class Hub:
    """Sends events to all clients. Its tasks run only while there are clients."""

    def __init__(
        self,
        society: Society,
        live: LiveReplies,
        clock: Clock,
        *,
        max_buffered_events: int = MAX_BUFFERED_EVENTS,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        """A client whose buffer exceeds one of the limits is dropped."""
        self._society, self._live, self._clock = society, live, clock
        self._max_events, self._max_bytes = max_buffered_events, max_buffered_bytes
        self.epoch = epoch_of(society.store.info.log_id)
        self.clients: set[StreamClient] = set()
        self._draft_ids: dict[str, str] = {}
        self._serializer = EventSerializer(society, self.epoch, self._draft_ids)
        self._seen = 0
        """Position of the last event that every live client got."""
        self._prev = 0
        """Position of the last one of them that has a frame."""
        self._changed_tasks = ChangedTasks(clock)
        self._has_tasks = asyncio.Event()
        self._starting = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._has_drafts = asyncio.Event()
        self._never = asyncio.Event()
        self._no_clients = asyncio.Event()
        self._sent_lengths: dict[str, int] = {}
        """Characters of each draft that clients got."""
        self._changed_drafts: dict[str, LiveReply] = {}
        self._shutdown_frame: bytes | None = None
        self._changed_progress: dict[str, CallProgress] = {}
        self._has_progress = asyncio.Event()
        live.subscribe(self._on_draft)
        live.subscribe_progress(self._on_progress)
        society.configuration.subscribe_health(self._on_health)

    def __len__(self) -> int:
        return len(self.clients)

    async def serve(self, write: Write, last_event_id: str | None) -> None:
        """Send one client all events after `last_event_id`, until it is dropped or the society stops."""
        client = StreamClient(write, max_events=self._max_events, max_bytes=self._max_bytes)
        self.clients.add(client)
        self._no_clients.clear()
        try:
            await client.write(f"retry: {RETRY_INTERVAL // timedelta(milliseconds=1)}\n\n".encode())
            await self._catch_up(client, last_event_id)
            await client.run()
        finally:
            self.clients.discard(client)
            if not self.clients:
                self._no_clients.set()

    async def shut_down(self, delayed_flushed: int, *, graceful: bool = True) -> None:
        """Send all clients the shutdown event and disconnect them."""
        self._shutdown_frame = frame("shutdown", {"graceful": graceful, "delayedFlushed": delayed_flushed})
        self._flush_drafts()
        for client in self.clients:
            client.put(self._shutdown_frame)
            client.close()
        if self.clients:
            await self._clock.wait(self._no_clients, SHUTDOWN_TIMEOUT)
        for client in tuple(self.clients):
            client.drop()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # A new client

    async def _catch_up(self, client: StreamClient, last_event_id: str | None) -> None:
        if self._shutdown_frame is None:
            await self._start_tasks()
        seen, reset_reason = await self._resume_position(last_event_id)
        health = self._society.configuration.health
        await client.write(self._hello(seen, reset_reason))
        prev, tasks = seen, dict.fromkeys(await recently_changed(self._society, seen) if last_event_id else ())
        while True:
            if events := await self._society.store.events(seen, BATCH_EVENTS) if seen < self._seen else ():
                frames = await self._serializer.frames(events, prev)
                tasks |= dict.fromkeys(changed_tasks(events))
                seen, prev = events[-1].seq, frames[-1][0] if frames else prev
                await client.write(b"".join(data for _, data in frames))
            elif tasks:
                await self._write_tasks(client, list(tasks))
                tasks.clear()
            else:
                break
        # No await from here to the end: the next event of the hub must reach this client too.
        self._flush_drafts()
        client.seen, client.is_live = seen, True
        if last_event_id:
            # The ends of replies are not in the log: a client that missed one needs to know which ones still run.
            client.put(frame("draft.list", {"draftIds": [draft.id for draft in self._live.replies]}))
        for draft in self._live.replies:
            self._sent_lengths[draft.id] = draft.length
            client.put(frame("draft.snapshot", {"draftId": draft.id, "agent": draft.agent_id, "text": draft.text}))
        for progress in self._live.progress:
            client.put(_progress_frame(progress))
        if self._society.configuration.health != health:  # it changed after `hello`
            client.put(self._health_frame())
        if self._shutdown_frame is not None:
            client.put(self._shutdown_frame)
            client.close()

    async def _start_tasks(self) -> None:
        async with self._starting:
            if not self._is_running("log"):
                self._seen = await self._society.store.last_event()
                self._prev = await self._last_frame_before(self._seen)
                self._start("log", self._read_log)
            if not self._is_running("tasks"):
                self._start("tasks", self._send_tasks)
            if not self._is_running("ping"):
                self._start("ping", self._send_pings)
            if not self._is_running("drafts"):
                self._start("drafts", self._send_drafts)
            if not self._is_running("progress"):
                self._start("progress", self._send_progress)

    async def _last_frame_before(self, position: int) -> int:
        """Position of the last event with a frame, up to `position`. If it is far away, a position before it."""
        start = max(0, position - BATCH_EVENTS)
        events = await self._society.store.events(start, BATCH_EVENTS)
        return max((event.seq for event in events if event.seq <= position and has_frame(event)), default=start)

    async def _resume_position(self, last_event_id: str | None) -> tuple[int, str | None]:
        """The position after which the client continues; and why, if it is not the one asked for."""
        if last_event_id is None:
            return self._seen, None
        epoch, _, seq = last_event_id.rpartition(".")
        if epoch != self.epoch or not (seq.isascii() and seq.isdecimal()) or len(seq) > 18:
            return self._seen, "unknown_epoch"
        store = self._society.store
        oldest = await store.events(0, 1)
        if oldest and int(seq) < oldest[0].seq - 1:
            return self._seen, "too_old"
        if int(seq) > await store.last_event():
            return self._seen, "ahead_of_log"
        return int(seq), None

    def _hello(self, seen: int, reset_reason: str | None) -> bytes:
        # With an id, a browser that reconnects before the first event continues from here.
        data = {
            "epoch": self.epoch,
            "seq": seen,
            "serverTime": to_rfc3339(self._clock.now()),
            "pingMs": PING_INTERVAL // timedelta(milliseconds=1),
            "configuration": ConfigurationState.of(self._society.configuration.health),
        }
        hello = frame("hello", data, f"{self.epoch}.{seen}")
        return hello if reset_reason is None else hello + frame("reset", {"reason": reset_reason})

    # Events of the log

    async def _read_log(self) -> None:
        while self.clients:
            try:
                async with self._society.bus.watch(after=self._seen, queue=WATCHER_QUEUE) as watcher:
                    while self.clients:
                        await self._send_events(await watcher.batch(BATCH_EVENTS))
            except Lagged:
                continue  # the next watcher reads on from the log
            except StopAsyncIteration:
                return

    async def _send_events(self, events: Sequence[Any]) -> None:
        if self._live_clients():
            for frames in _bursts(await self._serializer.frames(events, self._prev)):
                for client in self._live_clients():
                    client.put_new(frames)
                self._seen = self._prev = frames[-1][0]
                await asyncio.sleep(0)
            if self._changed_tasks.add(changed_tasks(events)):
                self._has_tasks.set()
        self._seen = events[-1].seq
        self._prev = next((event.seq for event in reversed(events) if has_frame(event)), self._prev)

    # Tasks

    async def _send_tasks(self) -> None:
        while self.clients:
            wait = self._changed_tasks.until_due()
            await self._clock.wait(self._has_tasks, IDLE_WAIT if wait is None else wait)
            self._has_tasks.clear()
            if self._changed_tasks.until_due() == timedelta(0):
                await self._clock.wait(self._never, TASK_GATHER_TIME)
            due = self._changed_tasks.take_due()
            for start in range(0, len(due), TASK_CHUNK):
                frames = await task_frames(self._society, due[start : start + TASK_CHUNK])
                for client in self._live_clients():
                    for data in frames:
                        client.put(data)
                await asyncio.sleep(0)  # the clients write

    async def _write_tasks(self, client: StreamClient, task_ids: Sequence[str]) -> None:
        for start in range(0, len(task_ids), TASK_CHUNK):
            await client.write(b"".join(await task_frames(self._society, task_ids[start : start + TASK_CHUNK])))

    # Replies in progress

    def _on_draft(self, draft: LiveReply) -> None:
        self._changed_drafts[draft.id] = draft
        if draft.outcome is None:
            self._has_drafts.set()
            return
        for message_id in draft.message_ids:
            self._draft_ids[message_id] = draft.id
        while len(self._draft_ids) > MAX_DRAFT_IDS:
            del self._draft_ids[next(iter(self._draft_ids))]
        # At once: `draft.ended` must come before `message.created`.
        self._flush_drafts()

    async def _send_drafts(self) -> None:
        while self.clients:
            await self._clock.wait(self._has_drafts, IDLE_WAIT)
            self._has_drafts.clear()
            await self._clock.wait(self._never, DRAFT_INTERVAL)
            self._flush_drafts()

    def _flush_drafts(self) -> None:
        changed, self._changed_drafts = self._changed_drafts, {}
        clients = self._live_clients()
        for draft in changed.values():
            data = b"".join(self._draft_frames(draft)) if clients else b""
            self._sent_lengths[draft.id] = draft.length
            if draft.outcome is not None:
                del self._sent_lengths[draft.id]
            if data:
                for client in clients:
                    client.put(data)

    def _draft_frames(self, draft: LiveReply) -> Iterator[bytes]:
        data = {"draftId": draft.id, "agent": draft.agent_id}
        sent = self._sent_lengths.get(draft.id)
        if sent is None:
            yield frame("draft.started", data)
        if draft.length > (sent or 0):
            yield frame("draft.delta", data | {"from": sent or 0, "delta": draft.text[sent or 0 :]})
        if draft.outcome is not None:
            yield frame("draft.ended", data | {"outcome": draft.outcome, "messages": list(draft.message_ids)})

    # Tool calls in progress

    def _on_progress(self, agent_id: str, progress: CallProgress | None) -> None:
        if progress is None:
            self._changed_progress.pop(agent_id, None)  # the call has ended, as an event of the log says
        elif self.clients:
            self._changed_progress[agent_id] = progress
            self._has_progress.set()

    async def _send_progress(self) -> None:
        while self.clients:
            await self._clock.wait(self._has_progress, IDLE_WAIT)
            self._has_progress.clear()
            changed, self._changed_progress = self._changed_progress, {}
            for progress in changed.values():
                data = _progress_frame(progress)
                for client in self._live_clients():
                    client.put(data)
            await self._clock.wait(self._never, PROGRESS_INTERVAL)

    def _on_health(self, health: ConfigurationHealth) -> None:
        for client in self._live_clients():
            client.put(self._health_frame())

    def _health_frame(self) -> bytes:
        return frame("configuration.state", ConfigurationState.of(self._society.configuration.health).to_dict())

    async def _send_pings(self) -> None:
        while self.clients:
            await self._clock.wait(self._never, PING_INTERVAL)
            for client in tuple(self.clients):
                client.ping(b": ping\n\n")

    def _live_clients(self) -> list[StreamClient]:
        return [client for client in self.clients if client.is_live]

    def _is_running(self, name: str) -> bool:
        return name in self._tasks and not self._tasks[name].done()

    def _start(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        supervised = supervise(f"the event stream ({name})", run, self._clock, first_pause=RETRY_INTERVAL)
        self._tasks[name] = asyncio.create_task(supervised, name=f"coterie-stream-{name}")


def _progress_frame(progress: CallProgress) -> bytes:
    data: dict[str, Any] = {"agent": progress.agent_id, "callId": progress.call_id, "name": progress.tool}
    data |= {"progress": progress.progress}
    if progress.total is not None:
        data["total"] = progress.total
    if progress.message:
        data["message"] = progress.message
    return frame("tool.progress", data)


def _bursts(frames: Sequence[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    """The frames in parts of at most `BURST_BYTES`."""
    burst: list[tuple[int, bytes]] = []
    size = 0
    for seq, data in frames:
        if burst and size + len(data) > BURST_BYTES:
            yield burst
            burst, size = [], 0
        burst.append((seq, data))
        size += len(data)
    if burst:
        yield burst


# The endpoint

router = Router(prefix=API, tags=["events"], responses=COMMON_PROBLEMS)

HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, hub: Hub, last_event_id: str | None) -> None:
        self._hub, self._last_event_id = hub, last_event_id
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        serving = asyncio.create_task(self._hub.serve(write, self._last_event_id), name="coterie-stream-client")
        disconnected = asyncio.create_task(wait_for_disconnect(receive), name="coterie-stream-disconnect")
        try:
            await asyncio.wait({serving, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
            disconnected.cancel()
            result, _ = await asyncio.gather(serving, disconnected, return_exceptions=True)
        if result is None:
            await send({"type": "http.response.body", "body": b""})
        elif not isinstance(result, asyncio.CancelledError):
            raise result
        elif hang_up := scope.get("extensions", {}).get(HANG_UP):
            # The client reads nothing any more, so it would not read a proper end either.
            hang_up["now"]()
            await wait_for_disconnect(receive)


@router.get(
    "/events",
    summary="Stream events as they happen",
    responses={
        200: {"description": "Server-sent events", "content": {"text/event-stream": {"schema": {"type": "string"}}}}
    },
)
async def stream_events(
    request: Request,
    last_event_id: Annotated[Id | None, Header()] = None,
    last: Annotated[Id | None, Query("lastEventId")] = None,
) -> Response:
    """Continues after `Last-Event-ID`, or after `lastEventId` for pages that cannot set headers."""
    return EventStream(cast(Hub, request.app.state.hub), last_event_id or last)
