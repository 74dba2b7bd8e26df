"""The door to models: whoever asks one comes through here.

It fits the request to the service, keeps to the service's limits, and asks another where the first cannot answer.
Waiting and asking again after a passing failure is the caller's part, who may have better things to do meanwhile.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from datetime import timedelta

from msgspec.structs import replace

from coterie.clock import Clock
from coterie.llm.breaker import Breaker
from coterie.llm.chat import Answer, Delta, Request
from coterie.llm.places import SharedPlaces
from coterie.llm.refusals import Refusals
from coterie.llm.registry import Services
from coterie.llm.router import CapabilityRouter, uses
from coterie.llm.service import LLMService, Local, Malformed, ServiceError, Terminal, Transient, Unsupported
from coterie.llm.service_entry import ServiceEntry

Stream = AsyncGenerator[Delta | Answer, None]
MakeService = Callable[[ServiceEntry], LLMService]


class Models:
    def __init__(
        self,
        services: Services,
        router: CapabilityRouter,
        refusals: Refusals,
        make: MakeService,
        clock: Clock,
        places: SharedPlaces | None = None,
    ) -> None:
        """`places`: where other processes ask the same services."""
        self._services, self._router, self._refusals = services, router, refusals
        self._make, self._clock, self._places = make, clock, places
        self._lines: dict[ServiceEntry, _Line] = {}
        self._edition = services.edition
        """The one whose changes are dealt with."""

    async def ask(
        self, service_id: str, request: Request, *, reader: str, begins: Callable[[], None] | None = None
    ) -> Stream:
        """Text as it comes, then one `Answer`; or the `ServiceError` that the caller is to act on.

        A service that cannot answer (wrong key, model or quota, a refused request, an open circuit) is replaced by its
        `fallback`s in their order. Nobody is replaced after the first piece of text: half an answer of one model is
        never followed by the answer of another. When all of them fail, the error is that of the first.
        `begins` is called right before a service is really asked, behind its queue; what it raises prevents that.
        """
        first = self._services.entry(service_id)
        failure: ServiceError | None = None
        for entry in (first, *map(self._services.entry, first.fallback)):
            refused: set[str] = set()
            fitted: Request | None = None
            while fitted is None:
                fitted = await self._router.fit(request, entry, reader=reader)
                spoken = False
                try:
                    async with aclosing(self._speak(entry, fitted, begins)) as pieces:
                        async for piece in pieces:
                            spoken = True
                            yield piece
                    return
                except ServiceError as error:
                    if spoken:
                        raise
                    if isinstance(error, Unsupported) and self._can_do_without(error, entry, fitted, refused):
                        fitted = None  # and so it is asked again, with less
                    elif _another_may_help(error):
                        failure = failure or error
                    else:
                        raise
        if failure:
            raise failure

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
        if self._places:
            await self._places.close()

    async def _speak(self, entry: ServiceEntry, request: Request, begins: Callable[[], None] | None) -> Stream:
        if entry.missing_key:
            raise Terminal(_no_key(entry), category="auth")
        line = self._line(entry)
        line.users += 1
        try:
            self._check(entry, line.breaker)
            async with line.slots:
                self._check(entry, line.breaker)  # it may have opened while we stood in the queue
                if begins:
                    begins()
                probe, pieces = line.breaker.enter(), line.service.generate(request)
                try:
                    async for piece in pieces:
                        if isinstance(piece, Answer):
                            line.breaker.succeeded()
                            yield replace(piece, service=entry.id)
                            return
                        yield piece
                    raise Malformed(f'service "{entry.id}" ended its stream without an answer')
                except BaseException as error:
                    self._judge(line.breaker, error, probe)
                    raise
                finally:
                    if isinstance(pieces, AsyncGenerator):
                        await pieces.aclose()
        finally:
            line.users -= 1
            if self._edition != self._services.edition:
                await self._close_unused()

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
            line = self._lines[entry] = _Line(self._make(entry), self._queue(entry.id, entry.max_concurrent_requests))
        return line

    def _queue(self, service: str, limit: int) -> AbstractAsyncContextManager[None]:
        return self._places.at(service, limit) if self._places else asyncio.Semaphore(limit)

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
    slots: AbstractAsyncContextManager[None]
    breaker: Breaker = field(default_factory=Breaker)
    users: int = 0


def _another_may_help(error: ServiceError) -> bool:
    match error:
        case Terminal(category="content"):
            return False  # what was said was refused, not who was asked
        case Terminal() | Unsupported() | Local():
            return True
    return False


def _no_key(entry: ServiceEntry) -> str:
    return (
        f'service "{entry.id}" has no key: set {entry.missing_key} in the environment, '
        "or enter it on the setup page, then reload"
    )
