"""The live event stream: one hub that reads the log once for all clients, and keeps a bounded buffer for each.

A client is told hello, then what it missed, then every reply that is just being said, then whatever comes. Events of
the log carry an id, `<epoch>.<seq>`; what is being said carries none, because nothing of it is stored.

One client of the event stream: a bounded buffer, and the task that empties it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from coterie.clock import Clock, to_rfc3339
from coterie.errors import Lagged
from coterie.live import LiveReplies, LiveReply
from coterie.society import Society
from coterie.supervision import supervise
from coterie.web.event_payloads import Teller, frame

Write = Callable[[bytes], Awaitable[None]]

EVENTS = 256
BYTES = 1 << 20
"""What waits for one client at most. Who needs more is let go, and goes on from the log."""
PIECE = 64 << 10
"""Bytes handed over at once."""


class Listener:
    def __init__(self, write: Write) -> None:
        """Made by the task that serves it, which ends when it is dropped."""
        self._write, self._task = write, asyncio.current_task()
        self._frames: deque[bytes] = deque()
        self._size = 0
        self._news = asyncio.Event()
        self._ended = self._pinged = False
        self.dropped = False
        self.live = False
        """It has caught up, and gets what comes."""
        self.seen = 0
        """The event of the log up to which it was told everything."""

    def put(self, frame: bytes) -> None:
        if self._frames and (len(self._frames) >= EVENTS or self._size + len(frame) > BYTES):
            self.drop()
            return
        self._frames.append(frame)
        self._size += len(frame)
        self._news.set()

    def put_new(self, frames: Iterable[tuple[int, bytes]]) -> None:
        """Those behind what it has seen."""
        for seq, each in frames:
            if seq > self.seen:
                self.seen = seq
                self.put(each)

    def ping(self, frame: bytes) -> None:
        """One that has taken nothing since the last ping is dead, though its socket may not know yet."""
        if self._pinged:
            self.drop()
            return
        self._pinged = True
        if self.live:
            self.put(frame)

    def end(self) -> None:
        """After what it has in its buffer."""
        self._ended = True
        self._news.set()

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
            await self._news.wait()
            self._news.clear()
            while self._frames:
                await self.write(self._take())
            if self._ended:
                return

    def _take(self) -> bytes:
        taken: list[bytes] = []
        size = 0
        while self._frames and (not taken or size + len(self._frames[0]) <= PIECE):
            taken.append(self._frames.popleft())
            size += len(taken[-1])
        self._size -= size
        return b"".join(taken)


PING = timedelta(seconds=15)
GATHER = timedelta(milliseconds=45)
"""How long pieces of a reply are gathered before they go out as one."""
GOODBYE = timedelta(seconds=2)
"""How long a stop waits for clients to take their last words."""
IDLE = timedelta(hours=1)
RETRY = timedelta(seconds=1)
BATCH = 64
QUEUE = 1024
ROUND = 256 << 10
"""Bytes put into buffers before their tasks get a turn: whoever reads at all never overflows."""
REMEMBERED = 1000
"""Messages whose streamed reply is remembered."""


def epoch_of(log_id: str) -> str:
    """Names the event log in ids and snapshots."""
    return hashlib.sha256(log_id.encode()).hexdigest()[:12]


class Hub:
    """It works while somebody listens, and costs nothing otherwise."""

    def __init__(self, society: Society, live: LiveReplies, clock: Clock) -> None:
        self._society, self._live, self._clock = society, live, clock
        self.epoch = epoch_of(society.store.info.log_id)
        self._draft_of: dict[str, str] = {}
        self._teller = Teller(society, self.epoch, self._draft_of)
        self._guests: set[Listener] = set()
        self._seen = 0
        """The event up to which every live client was told everything."""
        self._beginning = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._said = asyncio.Event()
        self._never = asyncio.Event()
        self._empty = asyncio.Event()
        self._told: dict[str, int] = {}
        """How much of each reply the clients have."""
        self._growing: dict[str, LiveReply] = {}
        self._last_words: bytes | None = None
        live.subscribe(self._hear)

    def __len__(self) -> int:
        """How many clients there are."""
        return len(self._guests)

    async def serve(self, write: Write, last_event_id: str | None) -> None:
        """Tell one client everything behind `last_event_id`, until it is dropped or the society stops."""
        guest = Listener(write)
        self._guests.add(guest)
        self._empty.clear()
        try:
            await guest.write(f"retry: {RETRY // timedelta(milliseconds=1)}\n\n".encode())
            await self._catch_up(guest, last_event_id)
            await guest.run()
        finally:
            self._guests.discard(guest)
            if not self._guests:
                self._empty.set()

    async def shut(self, delayed_flushed: int, *, graceful: bool = True) -> None:
        """Everybody is told that the society stops, and let go."""
        self._last_words = frame("shutdown", {"graceful": graceful, "delayedFlushed": delayed_flushed})
        self._flush()
        for guest in self._guests:
            guest.put(self._last_words)
            guest.end()
        if self._guests:
            await self._clock.wait(self._empty, GOODBYE)
        for guest in tuple(self._guests):
            guest.drop()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # A client comes in

    async def _catch_up(self, guest: Listener, last_event_id: str | None) -> None:
        if self._last_words is None:
            await self._follow()
        seen, reset = await self._place(last_event_id)
        await guest.write(self._hello(seen, reset))
        while seen < self._seen:
            events = await self._society.store.events(seen, BATCH)
            if not events:
                break
            frames = await self._teller.tell(events, seen)
            seen = events[-1].seq
            await guest.write(b"".join(told for _, told in frames))
        # From here on without a pause: whatever the hub tells next reaches this client too.
        self._flush()
        guest.seen, guest.live = seen, True
        for draft in self._live.replies:
            self._told[draft.id] = draft.length
            guest.put(frame("draft.snapshot", {"draftId": draft.id, "agent": draft.agent_id, "text": draft.text}))
        if self._last_words is not None:
            guest.put(self._last_words)
            guest.end()

    async def _follow(self) -> None:
        """Somebody reads the log from here on, and the clock ticks."""
        async with self._beginning:
            if not self._runs("log"):
                self._seen = await self._society.store.last_event()
                self._run("log", self._read_log)
            if not self._runs("ping"):
                self._run("ping", self._ping)
            if not self._runs("drafts"):
                self._run("drafts", self._tell_drafts)

    async def _place(self, last_event_id: str | None) -> tuple[int, str | None]:
        """From where the client goes on; and when that is not where it was, why."""
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

    def _hello(self, seen: int, reset: str | None) -> bytes:
        # The id makes a browser that loses the stream before the first event come back to this very place.
        place = f"{self.epoch}.{seen}"
        about = {
            "epoch": self.epoch,
            "seq": seen,
            "serverTime": to_rfc3339(self._clock.now()),
            "pingMs": PING // timedelta(milliseconds=1),
        }
        hello = frame("hello", about, place)
        return hello if reset is None else hello + frame("reset", {"reason": reset})

    # The log

    async def _read_log(self) -> None:
        while self._guests:
            try:
                async with self._society.bus.watch(after=self._seen, queue=QUEUE) as watcher:
                    while self._guests:
                        await self._pass_on(await watcher.batch(BATCH))
            except Lagged:
                continue  # the log has it all
            except StopAsyncIteration:
                return

    async def _pass_on(self, events: Sequence[Any]) -> None:
        if not any(guest.live for guest in self._guests):
            self._seen = events[-1].seq
            return
        for frames in _rounds(await self._teller.tell(events, self._seen)):
            for guest in self._listening():
                guest.put_new(frames)
            self._seen = frames[-1][0]
            await asyncio.sleep(0)

    # What is being said

    def _hear(self, draft: LiveReply) -> None:
        self._growing[draft.id] = draft
        if draft.outcome is None:
            self._said.set()
            return
        for message_id in draft.message_ids:
            self._draft_of[message_id] = draft.id
        while len(self._draft_of) > REMEMBERED:
            del self._draft_of[next(iter(self._draft_of))]
        # At once, so that a reply is over before its message is told.
        self._flush()

    async def _tell_drafts(self) -> None:
        while self._guests:
            await self._clock.wait(self._said, IDLE)
            self._said.clear()
            await self._clock.wait(self._never, GATHER)
            self._flush()

    def _flush(self) -> None:
        growing, self._growing = self._growing, {}
        for draft in growing.values():
            data = b"".join(self._news_of(draft)) if any(guest.live for guest in self._guests) else b""
            self._told[draft.id] = draft.length
            if draft.outcome is not None:
                del self._told[draft.id]
            if data:
                for guest in self._listening():
                    guest.put(data)

    def _news_of(self, draft: LiveReply) -> Iterator[bytes]:
        about = {"draftId": draft.id, "agent": draft.agent_id}
        told = self._told.get(draft.id)
        if told is None:
            yield frame("draft.started", about)
        if draft.length > (told or 0):
            yield frame("draft.delta", about | {"from": told or 0, "delta": draft.text[told or 0 :]})
        if draft.outcome is not None:
            yield frame("draft.ended", about | {"outcome": draft.outcome, "messages": list(draft.message_ids)})

    # Signs of life

    async def _ping(self) -> None:
        while self._guests:
            await self._clock.wait(self._never, PING)
            for guest in tuple(self._guests):
                guest.ping(b": ping\n\n")

    def _listening(self) -> list[Listener]:
        return [guest for guest in self._guests if guest.live]

    def _runs(self, name: str) -> bool:
        return name in self._tasks and not self._tasks[name].done()

    def _run(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        supervised = supervise(f"the event stream ({name})", work, self._clock, first_pause=RETRY)
        self._tasks[name] = asyncio.create_task(supervised, name=f"coterie-stream-{name}")


def _rounds(frames: Sequence[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    """In parts that fit a buffer."""
    part: list[tuple[int, bytes]] = []
    size = 0
    for seq, data in frames:
        if part and size + len(data) > ROUND:
            yield part
            part, size = [], 0
        part.append((seq, data))
        size += len(data)
    if part:
        yield part
