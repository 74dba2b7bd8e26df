"""LlmHandler runs turns: it executes the action of each step and reports the result as an event to the store.

The reducer in `turn.py` makes all decisions, inside the transaction of `TurnStore.advance`. Nothing here reads mail.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import msgspec

from coterie.agent.builtins import SEND_MESSAGE, build_envelope
from coterie.agent.compaction import (
    build_digest,
    estimate_tokens,
    estimate_usage,
    fill_usage,
    find_cut,
    fits_window,
    join_summaries,
    summary_request,
)
from coterie.agent.context import SystemPrompts, build_request
from coterie.agent.history_cache import HistoryCache
from coterie.agent.service import AgentDirectory
from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import Tool, ToolContext, error_result
from coterie.agents import Profile
from coterie.bus import MessageBus
from coterie.clock import Clock
from coterie.errors import CoterieError, Refused, StoreUnavailable
from coterie.failpoints import hit
from coterie.live import LiveReplies, ReplyOutcome
from coterie.llm.gateway import ModelGateway
from coterie.llm.service import (
    CircuitOpen,
    ContextTooLong,
    MalformedResponse,
    PermanentError,
    ServiceError,
    SocietyPaused,
    TransientError,
    UnknownService,
)
from coterie.llm.types import Completion, ModelRequest, TokenUsage, ToolCall
from coterie.messages import Envelope, SaveFile, fit_answer
from coterie.rate_limit import RateLimiter
from coterie.telemetry import Tracing, log_context
from coterie.turn import (
    UNKNOWN_RESULT,
    ArgumentsFile,
    AskModel,
    CallEnded,
    Deferred,
    Effect,
    Event,
    ModelAnswered,
    ModelFailed,
    PlannedCall,
    Rest,
    Rules,
    RunCall,
    Stopped,
    ToolRulesChanged,
)
from coterie.turn_store import Claim, StaleClaim, TurnStore

log = logging.getLogger(__name__)

MAX_RETRIES = 10
MAX_MALFORMED_RETRIES = 2
FIRST_RETRY_DELAY = timedelta(seconds=1)
MAX_RETRY_DELAY = timedelta(seconds=60)
STORE_RETRY_DELAY = timedelta(seconds=1)
PAIR_BURST, PAIR_MESSAGES_PER_SECOND = 100, 1
"""Rate limit per sender and recipient, so that no agent can fill another's mailbox."""
ToolContextFactory = Callable[[Profile, str, str | None], ToolContext]
"""`(caller, idempotency key, id of the causing message) -> ToolContext`."""
T = TypeVar("T")


class TurnSlot(Protocol):
    """The concurrency slot of one turn; `agent/scheduler.py` implements it."""

    async def acquire(self, *, for_person: bool) -> None: ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionResult:
    """The result of a model request or a tool call."""

    event: Event
    sends: Envelope | None = None
    """Message to store in the same transaction as the event."""


@dataclass(slots=True)
class RunningTurn:
    """State of a turn that runs in this process."""

    task: asyncio.Task[None] = field(init=False)
    is_cancellable: bool = False
    """An action is being executed and may be cancelled; a write to the store never is."""
    slot: TurnSlot | None = None
    streamed_text: list[str] = field(default_factory=list)
    """Pieces that the model has streamed so far."""
    pending_request: tuple[str, ModelRequest] | None = None
    """Service id and request that have no answer yet."""
    is_stopping: bool = False
    """A stop was requested."""
    is_queued: bool = False
    """The request waits in the queue of its service and was not sent."""
    is_deferring: bool = False
    """The society was paused while the request was queued."""
    prompt: str = ""
    """System prompt, rendered once per turn."""

    def was_stopped(self) -> bool:
        """True if only `stop_turn` cancelled the task; False if another caller cancelled it too."""
        return self.is_stopping and not self.task.uncancel()

    def was_deferred(self) -> bool:
        """True if only a pause of the society cancelled the task."""
        return self.is_deferring and not self.task.uncancel()


class LlmHandler:
    def __init__(
        self,
        store: TurnStore,
        bus: MessageBus,
        models: ModelGateway,
        directory: AgentDirectory,
        toolbox: Toolbox,
        context: ToolContextFactory,
        clock: Clock,
        rules: Rules,
        live: LiveReplies | None = None,
        tokens_per_day: int = 0,
        tracing: Tracing | None = None,
        refresh_agents: Callable[[], Awaitable[None]] | None = None,
        artifact_writer: Callable[[str], SaveFile] | None = None,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """`live`: publishes streamed text. `tokens_per_day`: 0 is no limit.

        `refresh_agents`: updates the directory from the store. `artifact_writer`: per agent id, stores answers that
        are too long for a message. `is_paused`: True if the society is paused, as far as this process knows.
        """
        self._artifact_writer, self._is_paused, self._refresh_agents = artifact_writer, is_paused, refresh_agents
        self._store, self._bus, self._models, self._directory = store, bus, models, directory
        self._toolbox, self._context, self._clock, self._rules = toolbox, context, clock, rules
        self._live, self._tokens_per_day, self._tracing = live or LiveReplies(), tokens_per_day, tracing or Tracing()
        self._history_cache, self._prompts = HistoryCache(), SystemPrompts(directory)
        self._pair_rates = RateLimiter(clock, burst=PAIR_BURST, per_second=PAIR_MESSAGES_PER_SECOND)
        self._turns: dict[str, RunningTurn] = {}

    def update_limits(self, rules: Rules, tokens_per_day: int) -> None:
        """Use these limits from the next step on."""
        self._rules, self._tokens_per_day = rules, tokens_per_day

    def start_turn(self, claim: Claim, slot: TurnSlot | None = None) -> asyncio.Task[None]:
        """Start a task that runs the agent's turns until no action is left or another worker has claimed the agent.

        `stop_turn` finds the turn from this moment on. `slot`: released while the turn asks its model, and acquired
        again before it runs a tool.
        """
        turn = self._turns[claim.agent_id] = RunningTurn(slot=slot)
        turn.task = asyncio.create_task(self._run_turn(claim, turn), name=f"coterie-turn-{claim.agent_id}")
        turn.task.add_done_callback(lambda _: self._forget_turn(claim.agent_id, turn))
        return turn.task

    async def _run_turn(self, claim: Claim, turn: RunningTurn) -> None:
        self._history_cache.apply_claim(claim)
        self._bus.notify()  # watchers see the claim
        span = self._tracing.turn(claim.agent_id, self._directory.name_of(claim.agent_id))
        try:
            while not isinstance(claim.action, Rest):
                with log_context(agent=claim.agent_id, message=claim.cause, turn=claim.turn_no):
                    await span.set_cause(claim.cause)
                    ended = claim.turn_no
                    claim = await self._advance(claim, await self._perform(claim, turn))
                    if claim.turn_no != ended:
                        turn.is_stopping = False  # the stop was for the turn that has ended
        except StaleClaim as stale:
            with log_context(agent=claim.agent_id, message=claim.cause, turn=claim.turn_no):
                log.warning("%s; the last step of this worker is discarded", stale)
            self._history_cache.invalidate(claim.agent_id)
        finally:
            span.end()
            self._live.finish(_stream_id(claim), "failed")
            self._forget_turn(claim.agent_id, turn)

    def _forget_turn(self, agent_id: str, turn: RunningTurn) -> None:
        if self._turns.get(agent_id) is turn:  # the agent's next turn may have begun
            del self._turns[agent_id]

    async def _advance(self, claim: Claim, result: ActionResult) -> Claim:
        """Write the step and return the next claim."""
        event, sends = result.event, result.sends
        after = await self._retry_store(claim, lambda: self._store.advance(claim, event, self._rules, sends=sends))
        self._bus.notify(sends)
        self._history_cache.apply_claim(after)
        self._live.finish(_stream_id(claim), _stream_outcome(event, after), after.reply_ids)
        return after

    async def _retry_store(self, claim: Claim, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat `attempt` for as long as the store is unavailable: no result of an action may be lost."""
        while True:
            try:
                return await attempt()
            except StoreUnavailable as error:
                log.warning("%s waits for the store: %s", claim.agent_id, error)
                await self._clock.sleep(STORE_RETRY_DELAY)

    def stop_turn(self, agent_id: str) -> bool:
        """Cancel the agent's model request or tool call. False: no turn of the agent runs here."""
        if (turn := self._turns.get(agent_id)) is None:
            return False
        if turn.is_cancellable and not turn.is_stopping:
            turn.task.cancel()
        turn.is_stopping = True
        return True

    def defer_queued(self) -> None:
        """After a pause of the society: cancel requests that wait in the queue of their service."""
        for turn in self._turns.values():
            if turn.is_queued and turn.is_cancellable and not turn.is_stopping and not turn.is_deferring:
                turn.is_deferring = True
                turn.task.cancel()

    async def _perform(self, claim: Claim, turn: RunningTurn) -> ActionResult:
        """Execute the action of the claim. A stop cancels it."""
        turn.streamed_text, turn.pending_request = [], None
        if not turn.is_stopping:
            turn.is_cancellable = True
            try:
                return await self._execute(claim, turn)
            except asyncio.CancelledError:
                if turn.was_deferred():
                    return ActionResult(event=Deferred())
                if not turn.was_stopped():
                    raise
            finally:
                turn.is_cancellable = turn.is_queued = turn.is_deferring = False
        turn.is_stopping = False
        service, usage = _estimate_unanswered(turn)
        said, attachments = await self._fit_text(claim, "".join(turn.streamed_text))
        return ActionResult(event=Stopped(said, usage=usage, service=service, attachments=attachments))

    async def _execute(self, claim: Claim, turn: RunningTurn) -> ActionResult:
        try:
            profile = await self._profile(claim.agent_id)
        except Refused:
            message = "I am no longer described in coterie.toml: put me back there, then resume me"
            return ActionResult(event=ModelFailed(message=message, recovery="block"))
        if turn.slot:
            if isinstance(claim.action, AskModel):
                turn.slot.release()
            else:
                await turn.slot.acquire(for_person=claim.for_person)
        if isinstance(claim.action, AskModel):
            hit("turn.asking")
            event = await self._ask(claim, profile, turn)
            hit("turn.answered")
            return ActionResult(event=event)
        assert isinstance(claim.action, RunCall) and claim.call is not None  # noqa: S101
        hit("turn.calling")
        running = self._run_call(claim, claim.action, claim.call, profile)
        outcome = await self._tracing.tool(claim.call.call.name, claim.call.call.id, running, _is_ok)
        hit("turn.ran")
        return outcome

    async def _profile(self, agent_id: str) -> Profile:
        try:
            return self._directory.profile(agent_id)
        except Refused:
            if self._refresh_agents:  # another process may have created the agent
                await self._refresh_agents()
            return self._directory.profile(agent_id)

    # The model

    async def _ask(self, claim: Claim, profile: Profile, turn: RunningTurn) -> Event:
        try:
            answer = await self._retry_store(claim, lambda: self._answer(claim, profile, turn))
        except StaleClaim:
            raise
        except SocietyPaused:
            return Deferred()
        except ServiceError as error:
            log.warning("%s got no answer: %s", claim.agent_id, error)
            failed = classify_failure(error, claim.model_failures, random.random())
            service, usage = _estimate_unanswered(turn, error)
            return msgspec.structs.replace(failed, usage=usage, service=service)
        except UnknownService as error:
            return missing_service_failure(error, is_fixed=claim.agent_id in self._directory)
        except Exception:
            # An unexpected error must end the turn, or the agent would stay busy for ever.
            log.exception("%s cannot ask its model", claim.agent_id)
            service, usage = _estimate_unanswered(turn)
            message = "something went wrong inside the runtime; the log has the details"
            return ModelFailed(message=message, recovery="give_up", usage=usage, service=service)
        # Text beside calls is not sent, so it need not fit a message.
        text, attachments = (answer.text, ()) if answer.calls else await self._fit_text(claim, answer.text)
        return ModelAnswered(
            text=text,
            calls=tuple(self._plan_call(call, profile) for call in answer.calls),
            usage=answer.usage,
            service=answer.service,
            attachments=attachments,
        )

    async def _fit_text(self, claim: Claim, text: str) -> tuple[str, tuple[dict[str, Any], ...]]:
        """Return text that fits a message, and the whole text as an attachment if it was too long."""
        writer = self._artifact_writer and self._artifact_writer(claim.agent_id)
        return await self._retry_store(claim, lambda: fit_answer(text, writer))

    async def _answer(self, claim: Claim, profile: Profile, turn: RunningTurn) -> Completion:
        """Ask the model. A history that exceeds the context window is summarised once."""
        service = self._directory.service_of(claim.agent_id)
        request = await self._request(claim, profile, turn)
        await self._reserve_tokens(claim, service.id, request)
        if not fits_window(request, service.context_tokens) and (
            compacted := await self._compact(claim, service.id, turn)
        ):
            claim = compacted
            request = await self._request(claim, profile, turn)
        try:
            return await self._ask_model(service.id, request, claim, turn)
        except ContextTooLong:
            turn.pending_request = None  # the service rejected it, so it cost nothing
            if not (compacted := await self._compact(claim, service.id, turn)):
                raise
            claim = compacted
        return await self._ask_model(service.id, await self._request(claim, profile, turn), claim, turn)

    async def _ask_model(
        self, service: str, request: ModelRequest, claim: Claim, turn: RunningTurn, *, publish: bool = True
    ) -> Completion:
        """Send the request to the service. `publish`: stream the text to watchers."""
        answer: Completion | None = None

        def on_start() -> None:
            if self._is_paused():
                raise SocietyPaused("the society is paused")
            turn.is_queued, turn.pending_request = False, (service, request)

        turn.is_queued = True
        asking = self._models.generate(
            service, request, agent_id=claim.agent_id, for_person=claim.for_person, on_start=on_start
        )
        async with aclosing(asking) as pieces:
            async for piece in pieces:
                if isinstance(piece, Completion):
                    answer = piece  # the last piece; no break, because ending the generator normally is cheaper
                elif publish:
                    turn.streamed_text.append(piece.text)
                    self._live.append(claim.agent_id, _stream_id(claim), piece.text)
        assert answer is not None  # noqa: S101 - the gateway ends with an answer or an error
        turn.pending_request = None
        return fill_usage(request, answer)

    async def _request(self, claim: Claim, profile: Profile, turn: RunningTurn) -> ModelRequest:
        """Build the request from the history version of `claim`. `StaleClaim`: the claim is no longer valid."""
        conversation = self._history_cache.get(claim.agent_id, claim.history_version)
        if conversation is None:
            view = await self._store.history_view(claim.agent_id, claim)
            conversation = self._history_cache.put(claim.agent_id, view)
        turn.prompt = turn.prompt or self._prompts.render(profile)
        specs = self._toolbox.model_specs(self._directory.tools_of(profile.id))
        return build_request(turn.prompt, conversation.summary, conversation.items, specs)

    async def _compact(self, claim: Claim, service: str, turn: RunningTurn) -> Claim | None:
        """Summarise the older half of the history. Returns the updated claim; None: there is nothing to summarise."""
        view = await self._store.history_view(claim.agent_id, claim)
        if (upto := find_cut(view.rows)) is None:
            return None
        older, answer = [row for row in view.rows if row.seq <= upto], None
        try:
            answer = await self._ask_model(service, summary_request(older), claim, turn, publish=False)
            text = answer.text.strip() or build_digest(older)
        except ServiceError as error:
            log.warning("%s gets a digest instead of a summary: %s", claim.agent_id, error)
            text = build_digest(older)
            asked, usage = _estimate_unanswered(turn, error)
            answer = Completion(text="", usage=usage, service=asked) if usage.input_tokens else None
        compacted = await self._store.summarise(claim, upto, join_summaries(view.summary, text), answer)
        log.info("%s: the model now sees a summary of the history up to row %d", claim.agent_id, upto)
        return compacted

    async def _reserve_tokens(self, claim: Claim, service: str, request: ModelRequest) -> None:
        """Count the estimated tokens before the request, so that a crash cannot lose them."""
        if not self._tokens_per_day:
            return
        today = self._clock.now().replace(hour=0, minute=0, second=0, microsecond=0)
        if not await self._store.reserve_tokens(
            claim, service, estimate_tokens(request), since=today, limit=self._tokens_per_day
        ):
            limit = f"{self._tokens_per_day:,} tokens"
            raise PermanentError(f"today's limit of {limit} is spent (limits.tokens_per_day)", category="quota")

    # The tools

    def _plan_call(self, call: ToolCall, profile: Profile) -> PlannedCall:
        tool = self._toolbox.find(call.name, self._directory.tools_of(profile.id))
        if tool is None:  # send_message, or an unknown tool, which has no effect
            return PlannedCall(call=call, effect="idempotent" if call.name == SEND_MESSAGE.name else "pure")
        return PlannedCall(call=call, effect=tool.effect, needs_approval=tool.approval)

    async def _run_call(self, claim: Claim, run: RunCall, planned: PlannedCall, profile: Profile) -> ActionResult:
        index, call, key = run.index, planned.call, claim.call_key(run.index)
        if call.invalid_arguments is not None:
            message = "the arguments are no JSON object; send the call again with valid arguments"
            return ActionResult(event=CallEnded(index=index, ok=False, result=message))
        if call.name == SEND_MESSAGE.name:
            return await self._send(claim, index, call, key)
        context = self._context(profile, key, claim.cause)
        # The tool's rules may have changed since the call was planned. Nothing may be awaited between this check and
        # the start of the tool.
        allowed = self._directory.tools_of(profile.id)
        tool = self._toolbox.find(call.name, allowed)
        if tool is None and run.is_retry and planned.effect != "pure":
            return ActionResult(event=CallEnded(index=index, ok=False, result=UNKNOWN_RESULT, is_outcome_unknown=True))
        if tool is not None and not _is_as_strict(planned, tool):
            return ActionResult(event=await self._rules_changed(run, planned, tool, context))
        result = await self._toolbox.call(call.name, call.arguments, context, patterns=allowed)
        return ActionResult(
            event=CallEnded(index=index, ok=result.ok, result=result.text, is_outcome_unknown=result.is_outcome_unknown)
        )

    async def _rules_changed(self, run: RunCall, planned: PlannedCall, tool: Tool, context: ToolContext) -> Event:
        """Return the event for a call that did not run, because its tool has stricter rules than the plan."""
        call, file = planned.call, None
        if tool.approval and not planned.needs_approval and not run.is_retry and not planned.fits_question:
            try:
                file = await _store_arguments(call, context)
            except (CoterieError, OSError) as error:
                message = f"{call.name} was not run: its arguments are too long for the approval question"
                result = error_result("approval_impossible", f"{message}, and could not be stored as a file: {error}")
                return CallEnded(index=run.index, ok=False, result=result.text)
        return ToolRulesChanged(
            index=run.index,
            effect=max(planned.effect, tool.effect, key=_STRICTNESS.index),
            needs_approval=planned.needs_approval or tool.approval,
            is_retry=run.is_retry,
            file=file,
        )

    async def _send(self, claim: Claim, index: int, call: ToolCall, key: str) -> ActionResult:
        try:
            envelope = await self._bus.describe_attachments(
                build_envelope(claim.agent_id, call.arguments, key=key, cause=claim.cause)
            )
            self._check_pair_rate(envelope)
        except Refused as refusal:
            return ActionResult(event=CallEnded(index=index, ok=False, result=refusal.to_json()))
        return ActionResult(event=CallEnded(index=index, ok=True, result=""), sends=envelope)

    def _check_pair_rate(self, envelope: Envelope) -> None:
        wait = self._pair_rates.try_acquire(f"{envelope.sender} {envelope.to}")
        if wait:
            message = f"you send {envelope.to!r} too many messages: wait {math.ceil(wait)} s, or say more in one"
            raise Refused("too_many_messages", message)


def _estimate_unanswered(turn: RunningTurn, error: ServiceError | None = None) -> tuple[str, TokenUsage]:
    """Return the service and the estimated cost of a request without an answer. `error` None: it was stopped."""
    asking, turn.pending_request = turn.pending_request, None
    match error:
        case None | MalformedResponse() | TransientError(reason="timeout" | "truncated"):
            sent = True
        case _:
            sent = bool(turn.streamed_text)  # no text: it was rejected, or never reached the service
    if asking is None or not sent:
        return "", TokenUsage()
    service, request = asking
    return service, estimate_usage(request, "".join(turn.streamed_text))


_STRICTNESS: tuple[Effect, ...] = ("pure", "idempotent", "unsafe")


def _is_as_strict(planned: PlannedCall, tool: Tool) -> bool:
    """True if the call was planned under rules at least as strict as the tool's current rules."""
    is_approved = planned.needs_approval or not tool.approval
    return is_approved and _STRICTNESS.index(planned.effect) >= _STRICTNESS.index(tool.effect)


async def _store_arguments(call: ToolCall, context: ToolContext) -> ArgumentsFile:
    data = msgspec.json.encode(call.arguments)
    key = f"{context.idempotency_key}/arguments"
    kept = await context.artifacts.put(data, f"{call.name}-arguments.json", key=key)
    return ArgumentsFile(kept.ref, kept.filename, kept.mime_type, kept.size, kept.sha256)


def _stream_id(claim: Claim) -> str:
    """Return the id of the text that this step streams."""
    return f"{claim.agent_id}/{claim.turn_no}/{claim.step_no}"


def _stream_outcome(event: Event, after: Claim) -> ReplyOutcome:
    """Return what happened to the streamed text."""
    match event:
        case Stopped():
            return "stopped"
        case ModelAnswered(calls=()):
            return "stored"
        case ModelAnswered():
            return "withdrawn" if after.withdrawn_calls else "stored"
    return "failed"


def _is_ok(result: ActionResult) -> bool:
    return isinstance(result.event, CallEnded) and result.event.ok


def classify_failure(error: ServiceError, retries: int, jitter: float) -> ModelFailed:
    """Decide whether to retry, block or give up. `retries`: failures in a row before; `jitter`: random, 0 to 1."""
    match error:
        case TransientError() | CircuitOpen() if retries < MAX_RETRIES:
            wait = error.retry_after if error.retry_after is not None else _backoff(retries, jitter)
            return ModelFailed(message=str(error), recovery="retry", delay=wait, category=_category(error))
        case MalformedResponse() if retries < MAX_MALFORMED_RETRIES:
            return ModelFailed(message=str(error), recovery="retry", delay=_backoff(retries, jitter), category="server")
        case PermanentError(category="content"):
            return ModelFailed(message=str(error), recovery="give_up")
        case ContextTooLong():
            return ModelFailed(
                message=f"{error}. Clear the conversation, or use a model with a larger window.",
                recovery="block",
                category="context_length",
            )
    return ModelFailed(message=f"{error}. Fix it, then write to me again.", recovery="block", category=_category(error))


def _category(error: ServiceError) -> str:
    """Return the error category of the event stream."""
    match error:
        case PermanentError(category="auth"):
            return "auth"
        case PermanentError(category="quota") | CircuitOpen():
            return "rate_limit"
        case TransientError(retry_after=after, reason="busy") if after is not None:
            return "rate_limit"
        case TransientError():
            return "network"
    return "server"


def missing_service_failure(error: UnknownService, *, is_fixed: bool) -> ModelFailed:
    """`is_fixed`: the agent has a service now; the configuration changed during the request."""
    if is_fixed:
        return ModelFailed(message=str(error), recovery="retry", delay=timedelta(0))
    return ModelFailed(message=f"{error}. Fix it, then write to me again.", recovery="block")


def _backoff(retries: int, jitter: float) -> timedelta:
    """Full jitter below a limit that doubles with every failure; at least 50 ms."""
    limit = min(MAX_RETRY_DELAY, FIRST_RETRY_DELAY * (1 << retries))
    return max(timedelta(milliseconds=50), limit * jitter)
