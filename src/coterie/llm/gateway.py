"""Gateway to model services: every request of an agent goes through `ModelGateway.generate`.

It adapts the request to the service, applies the concurrency limit and the circuit breaker, and tries fallback
services. The caller retries after a transient error.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256

from msgspec import Struct
from msgspec.structs import replace

from coterie.clock import Clock
from coterie.llm.call_metrics import ModelCallMetrics
from coterie.llm.concurrency import ServiceQueue, ServiceQueues
from coterie.llm.config import ServiceEntry, ServiceRegistry
from coterie.llm.learned_limits import LearnedLimits, content_limit, type_limit
from coterie.llm.routing import CapabilityRouter, inline_files, newest_files, required_capabilities
from coterie.llm.service import (
    CircuitOpen,
    Completion,
    ContextTooLong,
    InlineFile,
    LLMService,
    MalformedResponse,
    ModelRequest,
    PermanentError,
    ServiceError,
    TextDelta,
    TransientError,
    TransientReason,
    UnsupportedCapability,
)

log = logging.getLogger(__name__)

MAX_FAILURES = 5
FIRST_OPEN_SECONDS = 15.0
MAX_OPEN_SECONDS = 120.0
PROBE_RECHECK_SECONDS = 1.0
"""Wait that is reported while a probe is running."""


class CircuitBreaker:
    """Opens after consecutive failures, then lets one probe at a time through. Times are monotonic seconds."""

    def __init__(
        self,
        max_failures: int = MAX_FAILURES,
        first_open_seconds: float = FIRST_OPEN_SECONDS,
        max_open_seconds: float = MAX_OPEN_SECONDS,
    ) -> None:
        self._max_failures, self._first_open, self._max_open = max_failures, first_open_seconds, max_open_seconds
        self._failures = 0
        self._open_seconds = first_open_seconds
        """How long the breaker opens next time; doubles each time."""
        self._probe_at: float | None = None
        """Time of the next probe; None: closed."""
        self._no_probe = asyncio.Event()
        """Set while no probe is running."""
        self._no_probe.set()

    @property
    def is_probing(self) -> bool:
        return not self._no_probe.is_set()

    async def wait_for_probe(self) -> None:
        """Wait until no probe is running."""
        await self._no_probe.wait()

    def seconds_until_allowed(self, now: float) -> float:
        """Return 0 if a request may start now."""
        if self._probe_at is None:
            return 0.0
        if now < self._probe_at:
            return self._probe_at - now
        return PROBE_RECHECK_SECONDS if self.is_probing else 0.0

    def start_request(self) -> bool:
        """Register a request after `seconds_until_allowed` returned 0. True: it is a probe, so record its end."""
        if self._probe_at is None:
            return False
        self._no_probe.clear()
        return True

    def record_success(self) -> None:
        self._failures, self._open_seconds = 0, self._first_open
        self._probe_at = None
        self._no_probe.set()

    def end_probe(self) -> None:
        """The probe has begun to answer: let others through. The next failure without a success opens again."""
        self._failures, self._probe_at = self._max_failures - 1, None
        self._no_probe.set()

    def record_failure(self, now: float, *, probe: bool) -> None:
        # Requests that started before the breaker opened fail for the same cause; do not count them again.
        if self._probe_at is not None and not probe:
            return
        self._failures += 1
        if probe or self._failures >= self._max_failures:
            self._probe_at = now + self._open_seconds
            self._open_seconds = min(self._max_open, self._open_seconds * 2)
            self._no_probe.set()

    def trip(self, now: float, *, at_least: float = 0.0) -> None:
        """Open at once, because a fallback can answer. `at_least`: seconds the service asked us to wait."""
        if self._probe_at is None:
            self._probe_at = now + self._open_seconds
            self._open_seconds = min(self._max_open, self._open_seconds * 2)
        if not self.is_probing:
            self._probe_at = max(self._probe_at, now + at_least)

    def record_abandoned(self, *, probe: bool) -> None:
        """Record that the caller cancelled the request. This is neither a success nor a failure of the service."""
        if probe:
            self._no_probe.set()


Stream = AsyncGenerator[TextDelta | Completion, None]
MakeService = Callable[[ServiceEntry], LLMService]
OnCapacity = Callable[[str, bool], None]
"""Called with a service id and whether the capacity is for requests of the person."""

MAX_WAITING_REQUESTS = 32
"""Requests per service that may wait in this process. Above this, no further turn is claimed for the service."""
FALLBACK_WITHIN = timedelta(seconds=6)
"""Time until a failing service is replaced by its fallback, including one retry. A service that sends nothing is
replaced when its first-byte deadline ends."""
RETRY_PAUSE = timedelta(milliseconds=500)
"""Pause before the single retry of a service that has a fallback."""


class ModelGateway:
    def __init__(
        self,
        services: ServiceRegistry,
        router: CapabilityRouter,
        learned_limits: LearnedLimits,
        make_service: MakeService,
        clock: Clock,
        queues: ServiceQueues | None = None,
        *,
        fallback_within: timedelta = FALLBACK_WITHIN,
        metrics: ModelCallMetrics | None = None,
    ) -> None:
        """`queues`: given if other processes share the services' limits. `metrics`: measures every request."""
        self._metrics = metrics or ModelCallMetrics()
        self._services, self._router, self._learned_limits = services, router, learned_limits
        self._make_service, self._clock, self._queues = make_service, clock, queues or ServiceQueues(clock)
        self._fallback_within = fallback_within.total_seconds()
        self._active: dict[ServiceEntry, _ActiveService] = {}
        self._waiting: Counter[tuple[str, bool]] = Counter()
        """Requests that wait for a slot, by requested service id and `for_person`."""
        self._on_capacity: list[OnCapacity] = []
        self._applied_version = services.version
        """Registry version whose outdated services are closed."""

    async def generate(
        self,
        service_id: str,
        request: ModelRequest,
        *,
        agent_id: str,
        for_person: bool = False,
        on_start: Callable[[ServiceEntry], None] | None = None,
    ) -> Stream:
        """Yield text deltas, then one `Completion`; or raise `ServiceError`.

        If a service fails before its first delta, its `fallback` services are tried in order. After the first delta no
        other service continues the answer: the error then has `retry_after` 0, and the retry goes to the fallback. If
        all services fail, the error names them all. If the service is changed while the request waits for a slot, the
        request goes to the changed one.

        `for_person`: the request answers a message of the person and precedes requests of agents. `on_start` is called
        with the service that is asked, after the queue, right before each sending; if it raises, nothing is sent.
        """
        entries, failures = self.entries_of(service_id), list[ServiceError]()
        while entries:
            entry, has_output = entries.pop(0), False
            attempt = _Attempt(
                request, agent_id, (service_id, for_person), has_fallback=bool(entries), on_start=on_start
            )
            try:
                async with aclosing(self._try_service(entry, attempt)) as pieces:
                    async for piece in pieces:
                        has_output = True
                        yield piece
                return
            except _EntryChanged:
                entries, failures = self.entries_of(service_id), []
            except ServiceError as error:
                error.service = entry.id
                if has_output or not _fallback_may_help(error):
                    raise
                failures.append(error)
        raise _combine(failures)

    def subscribe(self, on_capacity: OnCapacity) -> None:
        """Call `on_capacity` on the event loop when a service can take more waiting requests."""
        self._on_capacity.append(on_capacity)

    def count_waiting(self, service_id: str, *, for_person: bool) -> int:
        """Return the number of requests for this service that wait for a slot. Thread-safe."""
        return self._waiting[service_id, for_person]

    def entries_of(self, service_id: str) -> list[ServiceEntry]:
        """Return the entries of the service and its fallbacks, in order. `UnknownService`: there is no such service."""
        first = self._services.get(service_id)
        return [first, *map(self._services.get, first.fallback)]

    def entry(self, service_id: str) -> ServiceEntry:
        """Return the service's entry. `UnknownService`: there is none."""
        return self._services.get(service_id)

    def queue(self, service_id: str) -> ServiceQueue:
        return self._activate(self._services.get(service_id)).queue

    def has_capacity(self, service_id: str, for_person: bool) -> bool:
        """True if one more request may wait for this service. Thread-safe."""
        return self._waiting[service_id, for_person] < self._max_waiting(service_id)

    def is_any_full(self) -> bool:
        return any(not self.has_capacity(*key) for key in [*self._waiting])

    async def close(self) -> None:
        while self._active:
            _, active = self._active.popitem()
            await active.service.close()
        await self._queues.close()

    async def _try_service(self, entry: ServiceEntry, attempt: _Attempt) -> Stream:
        """Ask one service; retry once if it has a fallback, and again without each capability it refuses."""
        self._check_unchanged(entry)  # a fallback may have changed; activating the old entry would set the old limit
        if entry.missing_key:
            raise PermanentError(_missing_key_message(entry), category="auth")
        active = self._activate(entry)
        breaker = active.breaker
        active.users += 1
        try:
            await self._acquire_slot(entry, active, attempt)
            try:
                self._check_unchanged(entry)
                refused, left_out, started, limit = set[str](), set[str](), self._clock.monotonic(), None
                while True:
                    # Adapted after the queue, so that waiting requests hold no attachments in memory.
                    adapted = await self._router.fit(
                        attempt.request, entry, agent_id=attempt.agent_id, left_out=left_out
                    )
                    # The breaker may have opened, or a probe begun, while the request waited or its files were read.
                    await self._wait_until_allowed(entry, breaker, attempt)
                    if attempt.on_start:
                        attempt.on_start(entry)
                    has_output = False
                    try:
                        async with aclosing(self._send_once(entry, active, adapted, limit)) as pieces:
                            async for piece in pieces:
                                has_output = True
                                yield piece
                        return
                    except ServiceError as error:
                        if not has_output and isinstance(error, UnsupportedCapability):
                            if not self._learn_limit(error, entry, adapted, refused, left_out):
                                raise
                            continue
                        if not attempt.has_fallback or not isinstance(error, TransientError | MalformedResponse):
                            raise
                        pause = self._retry_pause(error, breaker, started)
                        if has_output or limit is not None or pause is None:
                            raise self._trip(error, breaker, has_output) from error
                    await self._clock.sleep(pause)
                    limit = started + self._fallback_within - self._clock.monotonic()
            finally:
                active.queue.release()
        finally:
            active.users -= 1
            if self._applied_version != self._services.version:
                await self._close_outdated()

    async def _send_once(
        self, entry: ServiceEntry, active: _ActiveService, request: ModelRequest, limit: float | None
    ) -> Stream:
        """Send one request; record how it ended in the measurements and the breaker. `limit`: see `_first`."""
        breaker, pieces = active.breaker, active.service.generate(request)
        probe, measurement = breaker.start_request(), self._metrics.start(entry.id)
        try:
            piece = await _first(pieces, limit)
            if piece is not None:
                measurement.observe_first_piece()
                if probe:  # an answer may take minutes
                    breaker.end_probe()
                    probe = False
            while piece is not None:
                if isinstance(piece, Completion):
                    breaker.record_success()
                    measurement.end(piece)
                    yield replace(piece, service=entry.id)
                    return
                yield piece
                piece = await anext(pieces, None)
            raise MalformedResponse(f'service "{entry.id}" ended its stream without an answer')
        except BaseException as error:
            measurement.end(error)
            self._record_end(breaker, error, probe)
            raise
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()

    async def _acquire_slot(self, entry: ServiceEntry, active: _ActiveService, attempt: _Attempt) -> None:
        """Wait for a slot; the caller releases it."""
        breaker, key = active.breaker, attempt.key
        self._waiting[key] += 1
        try:
            while True:
                await self._wait_until_allowed(entry, breaker, attempt)
                await active.queue.acquire(for_person=key[1])
                if attempt.has_fallback or not breaker.is_probing:
                    return
                active.queue.release()
        finally:
            self._stop_waiting(key)

    async def _wait_until_allowed(self, entry: ServiceEntry, breaker: CircuitBreaker, attempt: _Attempt) -> None:
        """Wait for the end of a probe. `CircuitOpen`, `_EntryChanged`: the request must not be sent.

        A probe may take minutes. A request without a fallback waits for its end, because an error would count as a
        failed try of its agent, and a few tries block the agent.
        """
        # An abandoned probe wakes all waiting requests, and the first of them is the next probe.
        while breaker.is_probing and not attempt.has_fallback:
            await breaker.wait_for_probe()
        self._check_unchanged(entry)  # first: the breaker of a changed entry says nothing about the new one
        self._check_breaker(entry, breaker)

    def _stop_waiting(self, key: tuple[str, bool]) -> None:
        self._waiting[key] -= 1
        if self._waiting[key] <= self._max_waiting(key[0]) // 2:
            for callback in self._on_capacity:
                callback(*key)

    def _max_waiting(self, service_id: str) -> int:
        limit = self._services.get(service_id).max_concurrent_requests if service_id in self._services else 0
        return max(MAX_WAITING_REQUESTS, limit)

    def _learn_limit(
        self,
        error: UnsupportedCapability,
        entry: ServiceEntry,
        sent: ModelRequest,
        refused: set[str],
        left_out: set[str],
    ) -> bool:
        """Record what was refused. False if the request did not use it, so a retry would be the same.

        If the files are too large together, only add the older half of them to `left_out`.
        """
        if error.is_size and len(files := inline_files(sent)) > 1:
            return _leave_out_older(files, left_out)
        limits = {type_limit(error.capability, one) for one in error.types} or {error.capability}
        if error.is_content or error.is_size:
            files = newest_files(sent, error.capability)
            limits = {content_limit(error.capability, sha256(file.data).hexdigest()) for file in files}
        if limits <= refused or error.capability not in required_capabilities(sent):
            return False
        refused |= limits
        left_out.clear()  # the others may fit without the one that is too large alone
        for limit in sorted(limits):
            self._learned_limits.record(entry, limit, str(error))
        return True

    def _retry_pause(
        self, error: TransientError | MalformedResponse, breaker: CircuitBreaker, started: float
    ) -> timedelta | None:
        """Return the pause before the single retry. None: go to the fallback now."""
        if isinstance(error, TransientError) and error.reason == "timeout":
            return None
        now = self._clock.monotonic()
        pause = max(RETRY_PAUSE, (isinstance(error, TransientError) and error.retry_after) or RETRY_PAUSE)
        # Half of the time is reserved for the retry itself.
        too_late = now - started + pause.total_seconds() > self._fallback_within / 2
        return None if too_late or breaker.seconds_until_allowed(now) else pause

    def _trip(
        self, error: TransientError | MalformedResponse, breaker: CircuitBreaker, has_output: bool
    ) -> ServiceError:
        """Open the breaker, so that the next requests go to the fallback. Return the error to raise."""
        retry_after = (isinstance(error, TransientError) and error.retry_after) or timedelta(0)
        breaker.trip(self._clock.monotonic(), at_least=retry_after.total_seconds())
        return TransientError(str(error), retry_after=timedelta(0), reason="truncated") if has_output else error

    def _record_end(self, breaker: CircuitBreaker, error: BaseException, probe: bool) -> None:
        match error:
            case TransientError() | MalformedResponse():
                breaker.record_failure(self._clock.monotonic(), probe=probe)
            case ServiceError():
                breaker.record_success()  # the service works and refused this request
            case _:
                breaker.record_abandoned(probe=probe)

    def _check_breaker(self, entry: ServiceEntry, breaker: CircuitBreaker) -> None:
        wait = breaker.seconds_until_allowed(self._clock.monotonic())
        if wait > 0:
            message = f'service "{entry.id}" keeps failing; it is tried again in {math.ceil(wait)} s'
            raise CircuitOpen(message, retry_after=timedelta(seconds=wait))

    def _check_unchanged(self, entry: ServiceEntry) -> None:
        if not self._services.has_unchanged(entry):
            raise _EntryChanged

    def _activate(self, entry: ServiceEntry) -> _ActiveService:
        active = self._active.get(entry)
        if active is None:
            queue = self._queues.queue_for(entry.id, entry.max_concurrent_requests)
            active = self._active[entry] = _ActiveService(self._make_service(entry), queue)
        return active

    async def _close_outdated(self) -> None:
        """Close services whose entry was changed or removed and that have no running request."""
        outdated = {entry: active for entry, active in self._active.items() if not self._services.has_unchanged(entry)}
        if not any(active.users for active in outdated.values()):
            self._applied_version = self._services.version
        # Removed before the first await: another request may end meanwhile.
        for idle in [self._active.pop(entry) for entry, active in outdated.items() if not active.users]:
            try:
                await idle.service.close()
            except Exception as error:  # the request that has just ended must not fail
                log.warning("the connections of service %s cannot be closed: %s", idle.service.id, error)


class _EntryChanged(Exception):
    """The service was changed or removed while the request waited. Nothing was answered."""


@dataclass(slots=True)
class _ActiveService:
    """The service of one entry with its queue and breaker. A changed entry gets a new one."""

    service: LLMService
    queue: ServiceQueue
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    users: int = 0


class _Attempt(Struct, frozen=True):
    """One request to one service."""

    request: ModelRequest
    agent_id: str
    key: tuple[str, bool]
    """Requested service id and `for_person`."""
    has_fallback: bool
    on_start: Callable[[ServiceEntry], None] | None = None


async def _first(pieces: AsyncIterator[TextDelta | Completion], limit: float | None) -> TextDelta | Completion | None:
    """Return the first piece. `limit` is in seconds of real time, not of the `Clock`. None: no limit."""
    if limit is None:
        return await anext(pieces, None)
    try:
        async with asyncio.timeout(limit):
            return await anext(pieces, None)
    except TimeoutError:
        raise TransientError(f"the retry gave no answer within {limit:.1f} s", reason="timeout") from None


def _leave_out_older(files: Sequence[InlineFile], left_out: set[str]) -> bool:
    """Add the older half of the files, rounded up, to `left_out`. False if they had been left out before."""
    # A file that was sent several times counts as its newest copy.
    newest_first = dict.fromkeys(sha256(file.data).hexdigest() for file in reversed(files))
    older = [*newest_first][len(newest_first) // 2 :]
    is_new = not left_out.issuperset(older)
    left_out.update(older)
    return is_new


def _fallback_may_help(error: ServiceError) -> bool:
    match error:
        case PermanentError(category="content"):
            return False  # the content was refused
        case ContextTooLong():
            return False  # the caller can shorten the conversation
    return True


def _combine(failures: Sequence[ServiceError]) -> ServiceError:
    """Return one error that names all services. It is transient if any of them may recover."""
    if len(failures) == 1:
        return failures[0]
    combined = _joined(failures)
    combined.service = ", ".join(failure.service for failure in failures)
    statuses = {failure.status for failure in failures}
    combined.status = statuses.pop() if len(statuses) == 1 else None
    return combined


def _joined(failures: Sequence[ServiceError]) -> ServiceError:
    message = "; ".join(str(failure).rstrip(".") for failure in failures)
    recoverable = [failure for failure in failures if isinstance(failure, TransientError | CircuitOpen)]
    if recoverable:
        waits = [failure.retry_after for failure in recoverable if failure.retry_after is not None]
        reasons: list[TransientReason] = [one.reason for one in recoverable if isinstance(one, TransientError)]
        retry_after = min(waits) if len(waits) == len(recoverable) else None
        return TransientError(message, retry_after=retry_after, reason=reasons[0] if reasons else "busy")
    match next((failure for failure in failures if isinstance(failure, MalformedResponse)), failures[0]):
        case PermanentError(category=category):
            return PermanentError(message, category=category)
        case UnsupportedCapability(capability=capability):
            return UnsupportedCapability(message, capability=capability)
    return MalformedResponse(message)


def _missing_key_message(entry: ServiceEntry) -> str:
    return (
        f'service "{entry.id}" has no key: set {entry.missing_key} in the environment, '
        "or enter it on the setup page, then reload"
    )
