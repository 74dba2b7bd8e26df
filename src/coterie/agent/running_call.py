"""What a tool call can do while it runs: report its progress to the person, and ask the agent's model.

Progress is shown, not stored. A request to the model is no part of the conversation: an MCP server makes it, if the
owner allows that. Its tokens are the agent's and count towards the daily limit.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from datetime import timedelta

import msgspec

from coterie.agent.context_window import estimate_usage, fill_usage
from coterie.agent.failures import may_have_cost
from coterie.agent.service import AgentDirectory
from coterie.agent.tools import Tool, ToolContext
from coterie.clock import Clock
from coterie.errors import StoreUnavailable
from coterie.live import CallProgress, LiveReplies
from coterie.llm.call_metrics import ModelCallMetrics, SentRequest
from coterie.llm.config import ServiceEntry
from coterie.llm.gateway import ModelGateway
from coterie.llm.service import (
    Completion,
    ModelRequest,
    PermanentError,
    ServiceError,
    SocietyPaused,
    TokenUsage,
    ToolCall,
)
from coterie.plan import ArgumentsFile, Effect, PlannedCall
from coterie.text import one_line
from coterie.turn_store import Claim, TurnStore

log = logging.getLogger(__name__)

MAX_MESSAGE = 200
"""Characters of a progress message that are shown."""
STORE_RETRY_DELAY = timedelta(seconds=1)


class RunningCalls:
    def __init__(
        self,
        *,
        store: TurnStore,
        models: ModelGateway,
        directory: AgentDirectory,
        live: LiveReplies,
        clock: Clock,
        is_paused: Callable[[], bool],
        redact: Callable[[str], str],
        metrics: ModelCallMetrics,
    ) -> None:
        """`redact`: removes keys from the text of a tool."""
        self._redact, self._metrics = redact, metrics
        self._store, self._models, self._directory = store, models, directory
        self._live, self._clock, self._is_paused = live, clock, is_paused
        self._recording: set[asyncio.Task[None]] = set()

    @contextmanager
    def bind(
        self, context: ToolContext, claim: Claim, call: ToolCall, *, tokens_per_day: int = 0
    ) -> Iterator[ToolContext]:
        """Yield the context of this call, whose progress is shown until the end of the block.

        `tokens_per_day`: limit of all requests of a day; 0 is none.
        """
        is_running = True

        async def report_progress(progress: float, total: float | None = None, message: str | None = None) -> None:
            context.timer.restart()
            if not is_running or not math.isfinite(progress):
                return
            self._live.report_progress(
                CallProgress(
                    agent_id=claim.agent_id,
                    call_id=call.id,
                    tool=call.name,
                    progress=progress,
                    total=total if total and math.isfinite(total) else None,
                    message=one_line(self._redact(message or ""), MAX_MESSAGE),
                )
            )

        async def sample(request: ModelRequest) -> Completion:
            with context.timer.paused():
                return await self._sample(claim, request, tokens_per_day)

        try:
            yield replace(context, report_progress=report_progress, sample=sample)
        finally:
            is_running = False
            self._live.end_progress(claim.agent_id)

    async def _sample(self, claim: Claim, request: ModelRequest, tokens_per_day: int) -> Completion:
        """Ask the agent's model. Raises `ServiceError`, `UnknownService` or `SocietyPaused`."""
        profile, service = self._directory.profile(claim.agent_id), self._directory.service_of(claim.agent_id)
        request = ModelRequest(messages=request.messages, sampling=profile.sampling.override_with(request.sampling))
        if tokens_per_day and await self._store.tokens_used_today() >= tokens_per_day:
            limit = f"{tokens_per_day:,} tokens"
            raise PermanentError(f"today's limit of {limit} is spent (limits.tokens_per_day)", category="quota")
        received = list[str]()
        answer: Completion | None = None
        sent: SentRequest | None = None

        def on_start(entry: ServiceEntry) -> None:
            nonlocal sent
            if self._is_paused():
                raise SocietyPaused("the society is paused")
            sent = SentRequest(entry, request, self._clock.monotonic())

        asking = self._models.generate(
            service.id, request, agent_id=claim.agent_id, for_person=claim.for_person, on_start=on_start
        )
        try:
            async with aclosing(asking) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Completion):
                        answer = piece
                    else:
                        received.append(piece.text)
        except (ServiceError, asyncio.CancelledError) as error:
            if sent and may_have_cost(error if isinstance(error, ServiceError) else None, has_text=bool(received)):
                await self._record(claim, sent, estimate_usage(request, "".join(received)))
            raise
        assert answer is not None and sent is not None  # noqa: S101 - the gateway ends with an answer or an error
        answer = fill_usage(request, answer)
        await self._record(claim, sent, answer.usage)
        return answer

    async def _record(self, claim: Claim, sent: SentRequest, usage: TokenUsage) -> None:
        """Store the tokens, even if the call is cancelled meanwhile."""
        usage = sent.complete_usage(usage, self._clock.monotonic())
        self._metrics.count_usage(sent.entry, usage)
        adding = self._add_usage(claim, sent.entry.id, usage)
        task = asyncio.create_task(adding, name=f"coterie-usage-{claim.agent_id}")
        self._recording.add(task)
        task.add_done_callback(self._recording.discard)
        await asyncio.shield(task)

    async def _add_usage(self, claim: Claim, service: str, usage: TokenUsage) -> None:
        while True:
            try:
                await self._store.add_usage(claim, service, usage)
                return
            except StoreUnavailable as error:
                log.warning("%s waits for the store: %s", claim.agent_id, error)
                await self._clock.sleep(STORE_RETRY_DELAY)


STRICTNESS: tuple[Effect, ...] = ("pure", "idempotent", "unsafe")


def is_as_strict(planned: PlannedCall, tool: Tool) -> bool:
    """True if the call was planned under rules at least as strict as the tool's current rules."""
    is_approved = planned.needs_approval or not tool.approval
    return is_approved and STRICTNESS.index(planned.effect) >= STRICTNESS.index(tool.effect)


async def store_arguments(call: ToolCall, context: ToolContext) -> ArgumentsFile:
    data = msgspec.json.encode(call.arguments)
    key = f"{context.idempotency_key}/arguments"
    kept = await context.artifacts.put(data, f"{call.name}-arguments.json", key=key)
    return ArgumentsFile(kept.ref, kept.filename, kept.mime_type, kept.size, kept.sha256)
