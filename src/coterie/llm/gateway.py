"""The door to models: whoever asks one comes through here.

It fits the request to the service, keeps to the service's limits, and asks another where the first cannot answer.
Waiting and asking again after a passing failure is the caller's part, who may have better things to do meanwhile.

A circuit breaker: after some failures in a row nobody asks for a while, then one request tries.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from msgspec.structs import replace

from coterie.clock import Clock
from coterie.llm.concurrency import Queue, ServiceQueues
from coterie.llm.config import ServiceEntry, Services
from coterie.llm.learned_limits import Refusals
from coterie.llm.routing import CapabilityRouter, uses
from coterie.llm.service import (
    LLMService,
    Local,
    Malformed,
    Passing,
    ServiceError,
    Terminal,
    TooLong,
    Transient,
    Unsupported,
)
from coterie.llm.types import Answer, Delta, Request

FAILURES = 5
REST = 15.0
LONGEST_REST = 120.0
WHILE_TRYING = 1.0


class Breaker:
    """Closed; after failures open for a rest; then half open: one probe at a time. Times are monotonic seconds."""

    def __init__(self, failures: int = FAILURES, rest: float = REST, longest: float = LONGEST_REST) -> None:
        self._allowed, self._first_rest, self._longest = failures, rest, longest
        self._failures = 0
        self._rest = rest
        self._probe_at: float | None = None
        """When the next probe may go. None: closed."""
        self._probing = False

    def wait(self, now: float) -> float:
        """How long until a request may go; 0 when it may go now."""
        if self._probe_at is None:
            return 0.0
        if now < self._probe_at:
            return self._probe_at - now
        return WHILE_TRYING if self._probing else 0.0

    def enter(self) -> bool:
        """A request goes, after `wait` said it may. True: it is the probe, and its end must be told."""
        self._probing = self._probe_at is not None
        return self._probing

    def succeeded(self) -> None:
        self._failures, self._rest = 0, self._first_rest
        self._probe_at, self._probing = None, False

    def failed(self, now: float, *, probe: bool) -> None:
        # Requests that went before it opened fail afterwards, all of one cause: they do not count again.
        if self._probe_at is not None and not probe:
            return
        self._failures += 1
        if probe or self._failures >= self._allowed:
            self._probe_at, self._probing = now + self._rest, False
            self._rest = min(self._longest, self._rest * 2)

    def trip(self, now: float, *, at_least: float = 0.0) -> None:
        """Open now, without waiting for more failures: another service answers meanwhile.

        `at_least`: the service asked for so many seconds.
        """
        if self._probe_at is None:
            self._probe_at = now + self._rest
            self._rest = min(self._longest, self._rest * 2)
        if not self._probing:
            self._probe_at = max(self._probe_at, now + at_least)

    def left(self, *, probe: bool) -> None:
        """The request ended without saying anything about the service: its caller went away."""
        if probe:
            self._probing = False


Stream = AsyncGenerator[Delta | Answer, None]
MakeService = Callable[[ServiceEntry], LLMService]
OnRoom = Callable[[str, bool], None]
"""Told the service, and whether its requests are for the person."""

WAITING = 32
"""Requests that may wait for one service in this process before further agents are left unclaimed."""
REPLACE_WITHIN = timedelta(seconds=6)
"""A service that fails is replaced by its fallback within this, the quick retry included. A silent one is replaced when
its own limit for the first byte is over."""
QUICK_PAUSE = timedelta(milliseconds=500)
"""Before the one retry of a service that has a fallback."""


class Models:
    def __init__(
        self,
        services: Services,
        router: CapabilityRouter,
        refusals: Refusals,
        make: MakeService,
        clock: Clock,
        queues: ServiceQueues | None = None,
        *,
        replace_within: timedelta = REPLACE_WITHIN,
    ) -> None:
        """`queues`: those that other processes share. `replace_within`: see `REPLACE_WITHIN`."""
        self._services, self._router, self._refusals = services, router, refusals
        self._make, self._clock, self._queues = make, clock, queues or ServiceQueues(clock)
        self._replace_within = replace_within.total_seconds()
        self._lines: dict[ServiceEntry, _Line] = {}
        self._waiting: Counter[tuple[str, bool]] = Counter()
        """Requests that wait for a slot, by the service that was asked first, and whether they are for the person."""
        self._on_room: list[OnRoom] = []
        self._edition = services.edition
        """The one whose changes are dealt with."""

    async def ask(
        self,
        service_id: str,
        request: Request,
        *,
        reader: str,
        person: bool = False,
        begins: Callable[[], None] | None = None,
    ) -> Stream:
        """Text as it comes, then one `Answer`; or the `ServiceError` that the caller is to act on.

        A service that cannot answer is replaced by its `fallback`s in their order: one that cannot be reached, fails,
        sends nothing usable, asks for a long pause, or refuses the key, the model or the request. None is replaced
        after its first piece of text: half an answer of one model is never followed by the answer of another. Then the
        error asks for another try at once, which goes to the next service. When all of them fail, the error names them.

        `person`: the request is for a message of the person, and goes before those of agents. `begins` is called right
        before a service is really asked, behind its queue; what it raises prevents that.
        """
        first = self._services.entry(service_id)
        entries = [first, *map(self._services.entry, first.fallback)]
        failures: list[ServiceError] = []
        for number, entry in enumerate(entries, 1):
            spoken = False
            asking = _Asking(request, reader, (service_id, person), has_spare=number < len(entries), begins=begins)
            try:
                async with aclosing(self._speak(entry, asking)) as pieces:
                    async for piece in pieces:
                        spoken = True
                        yield piece
                return
            except ServiceError as error:
                if spoken or len(entries) == 1 or not _another_may_help(error):
                    raise
                failures.append(error)
        raise _all_failed(failures)

    def subscribe(self, on_room: OnRoom) -> None:
        """Call `on_room` on the event loop when few requests are left that wait for a service."""
        self._on_room.append(on_room)

    def waiting(self, service_id: str, *, person: bool) -> int:
        """Requests that wait for a slot and asked this service first. Called from any thread."""
        return self._waiting[service_id, person]

    def queue(self, service_id: str) -> Queue:
        return self._line(self._services.entry(service_id)).queue

    def has_room(self, service_id: str, person: bool) -> bool:
        """Whether one more request may wait for this service. Called from any thread."""
        return self._waiting[service_id, person] < self._most_waiting(service_id)

    def is_any_full(self) -> bool:
        return any(not self.has_room(*key) for key in [*self._waiting])

    def _most_waiting(self, service_id: str) -> int:
        limit = self._services.entry(service_id).max_concurrent_requests if service_id in self._services else 0
        return max(WAITING, limit)

    def _can_do_without(self, error: Unsupported, entry: ServiceEntry, sent: Request, refused: set[str]) -> bool:
        """Refusing what was not sent, or is sent no more, is no reason to ask the same thing again."""
        if error.what in refused or error.what not in uses(sent):
            return False
        refused.add(error.what)
        self._refusals.note(entry, error.what, str(error))
        return True

    async def close(self) -> None:
        while self._lines:
            _, line = self._lines.popitem()
            await line.service.close()
        await self._queues.close()

    async def _speak(self, entry: ServiceEntry, asking: _Asking) -> Stream:
        if entry.missing_key:
            raise Terminal(_no_key(entry), category="auth")
        line = self._line(entry)
        line.users += 1
        try:
            self._check(entry, line.breaker)
            async with self._slot(line.queue, asking.key):
                refused, began, limit = set[str](), self._clock.monotonic(), None
                while True:
                    self._check(entry, line.breaker)  # it may have opened while we stood in the queue
                    # Fitted only now: attachments are not held in memory while a request waits in the queue.
                    fitted = await self._router.fit(asking.request, entry, reader=asking.reader)
                    if asking.begins:
                        asking.begins()
                    probe, pieces, spoken = line.breaker.enter(), line.service.generate(fitted), False
                    try:
                        piece = await _first(pieces, limit)
                        while piece is not None:
                            if isinstance(piece, Answer):
                                line.breaker.succeeded()
                                yield replace(piece, service=entry.id)
                                return
                            spoken = True
                            yield piece
                            piece = await anext(pieces, None)
                        raise Malformed(f'service "{entry.id}" ended its stream without an answer')
                    except ServiceError as error:
                        self._judge(line.breaker, error, probe)
                        if not spoken and isinstance(error, Unsupported):
                            if not self._can_do_without(error, entry, fitted, refused):
                                raise
                            continue  # asked again, with less
                        if not asking.has_spare or not isinstance(error, Transient | Malformed):
                            raise
                        pause = self._pause(error, line.breaker, began)
                        if spoken or limit is not None or pause is None:
                            raise self._replaced(error, line.breaker, spoken) from error
                    except BaseException as error:
                        self._judge(line.breaker, error, probe)
                        raise
                    finally:
                        if isinstance(pieces, AsyncGenerator):
                            await pieces.aclose()
                    await self._clock.sleep(pause)
                    limit = began + self._replace_within - self._clock.monotonic()
        finally:
            line.users -= 1
            if self._edition != self._services.edition:
                await self._close_unused()

    @asynccontextmanager
    async def _slot(self, queue: Queue, key: tuple[str, bool]) -> AsyncIterator[None]:
        self._waiting[key] += 1
        entered = False
        try:
            async with queue.slot(person=key[1]):
                self._no_longer_waits(key)
                entered = True
                yield
        finally:
            if not entered:
                self._no_longer_waits(key)

    def _no_longer_waits(self, key: tuple[str, bool]) -> None:
        self._waiting[key] -= 1
        if self._waiting[key] <= self._most_waiting(key[0]) // 2:
            for tell in self._on_room:
                tell(*key)

    def _pause(self, error: Transient | Malformed, breaker: Breaker, began: float) -> timedelta | None:
        """How long to wait before the one quick retry. None: the next service is asked at once."""
        if isinstance(error, Transient) and error.why == "late":
            return None
        now = self._clock.monotonic()
        wait = max(QUICK_PAUSE, (isinstance(error, Transient) and error.retry_after) or QUICK_PAUSE)
        # Half of the time is left for the retry itself.
        too_late = now - began + wait.total_seconds() > self._replace_within / 2
        return None if too_late or breaker.wait(now) else wait

    def _replaced(self, error: Transient | Malformed, breaker: Breaker, spoken: bool) -> ServiceError:
        """The service is left alone for a while; the next requests go to its fallback at once."""
        asked_for = (isinstance(error, Transient) and error.retry_after) or timedelta(0)
        breaker.trip(self._clock.monotonic(), at_least=asked_for.total_seconds())
        return Transient(str(error), retry_after=timedelta(0), why="cut") if spoken else error

    def _judge(self, breaker: Breaker, error: BaseException, probe: bool) -> None:
        """How a request ended tells something of the service, or nothing when its caller went away."""
        match error:
            case Transient() | Malformed():
                breaker.failed(self._clock.monotonic(), probe=probe)
            case ServiceError():
                breaker.succeeded()  # it is there, and says no
            case _:
                breaker.left(probe=probe)

    def _check(self, entry: ServiceEntry, breaker: Breaker) -> None:
        wait = breaker.wait(self._clock.monotonic())
        if wait > 0:
            message = f'service "{entry.id}" keeps failing; it is tried again in {math.ceil(wait)} s'
            raise Local(message, retry_after=timedelta(seconds=wait))

    def _line(self, entry: ServiceEntry) -> _Line:
        line = self._lines.get(entry)
        if line is None:
            queue = self._queues.at(entry.id, entry.max_concurrent_requests)
            line = self._lines[entry] = _Line(self._make(entry), queue)
        return line

    async def _close_unused(self) -> None:
        """Services whose entry was changed or removed are closed when their last request has ended."""
        old = {entry: line for entry, line in self._lines.items() if not self._services.has(entry)}
        if not any(line.users for line in old.values()):
            self._edition = self._services.edition
        for entry, line in old.items():
            if not line.users:
                del self._lines[entry]
                await line.service.close()


@dataclass(slots=True)
class _Line:
    """One entry's service, with its queue and its breaker. A changed entry gets a new one."""

    service: LLMService
    queue: Queue
    breaker: Breaker = field(default_factory=Breaker)
    users: int = 0


@dataclass(frozen=True, slots=True)
class _Asking:
    """What one caller wants of a service."""

    request: Request
    reader: str
    key: tuple[str, bool]
    """The service that was asked first, and whether the request is for the person."""
    has_spare: bool
    begins: Callable[[], None] | None = None
    """Another service can be asked after this one."""


async def _first(pieces: AsyncIterator[Delta | Answer], limit: float | None) -> Delta | Answer | None:
    """The first piece, within `limit` seconds of the event loop's time: the other end of a wire lives in real time."""
    try:
        async with asyncio.timeout(limit):
            return await anext(pieces, None)
    except TimeoutError:
        raise Transient(f"the second try brought nothing within {limit:.1f} s", why="late") from None


def _another_may_help(error: ServiceError) -> bool:
    match error:
        case Terminal(category="content"):
            return False  # what was said was refused, not who was asked
        case TooLong():
            return False  # the caller can shorten the conversation
    return True


def _all_failed(failures: Sequence[ServiceError]) -> ServiceError:
    """One error that names every service that was tried. While one of them may recover, it is tried again."""
    if len(failures) == 1:
        return failures[0]
    words = "; ".join(str(failure).rstrip(".") for failure in failures)
    passing = [failure for failure in failures if isinstance(failure, Transient | Local)]
    if passing:
        waits = [failure.retry_after for failure in passing if failure.retry_after is not None]
        why: Passing = next((failure.why for failure in passing if isinstance(failure, Transient)), "busy")
        return Transient(words, retry_after=min(waits) if len(waits) == len(passing) else None, why=why)
    match next((failure for failure in failures if isinstance(failure, Malformed)), failures[0]):
        case Terminal(category=category):
            return Terminal(words, category=category)
        case Unsupported(what=what):
            return Unsupported(words, what=what)
    return Malformed(words)


def _no_key(entry: ServiceEntry) -> str:
    return (
        f'service "{entry.id}" has no key: set {entry.missing_key} in the environment, '
        "or enter it on the setup page, then reload"
    )
