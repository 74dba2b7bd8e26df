"""LlmHandler runs turns: it executes the action of each step and reports the result as an event to the store.

The reducer in `turn.py` makes all decisions, inside the transaction of `TurnStore.advance`. Nothing here reads mail.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import msgspec

from coterie.agent.builtins import SEND_MESSAGE, build_envelope
from coterie.agent.compaction import accept_summary, build_digest, find_cut, summary_request
from coterie.agent.context import HistoryCache, RequestBuilder
from coterie.agent.context_window import ContextWindows, estimate_tokens, estimate_usage, fill_usage, summary_limit
from coterie.agent.failures import SILENT, classify_failure, may_have_cost, missing_service_failure
from coterie.agent.running_call import STORE_RETRY_DELAY, STRICTNESS, RunningCalls, is_as_strict, store_arguments
from coterie.agent.running_turn import RunningTurn, TurnSlot
from coterie.agent.service import AgentDirectory
from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import Tool, ToolContext, error_result
from coterie.agents import Profile
from coterie.answer_schema import WrongAnswer, check_answer
from coterie.bus import MessageBus
from coterie.clock import Clock
from coterie.errors import CoterieError, Refused, StoreUnavailable
from coterie.failpoints import hit
from coterie.live import LiveReplies, ReplyOutcome
from coterie.llm.call_metrics import ModelCallMetrics, SentRequest
from coterie.llm.config import ServiceEntry
from coterie.llm.gateway import ModelGateway
from coterie.llm.service import (
    Completion,
    ContextTooLong,
    InlineFile,
    MalformedResponse,
    ModelRequest,
    PermanentError,
    ServiceError,
    SocietyPaused,
    TokenUsage,
    ToolCall,
    UnknownService,
)
from coterie.messages import CutOff, Envelope, SaveFile, fit_answer, is_too_long
from coterie.plan import UNKNOWN_RESULT, PlannedCall
from coterie.rate_limit import RateLimiter
from coterie.telemetry import Tracing, log_context
from coterie.text import one_line, to_storable
from coterie.turn import (
    AskModel,
    CallEnded,
    Deferred,
    Event,
    Interrupted,
    ModelAnswered,
    ModelFailed,
    Rest,
    Rules,
    RunCall,
    Stopped,
    ToolRulesChanged,
    may_cut,
)
from coterie.turn_store import Claim, StaleClaim, TurnStore

log = logging.getLogger(__name__)

_CUT_OFF: dict[str, CutOff] = {"length": "length", "content_filter": "content_filter"}
"""By finish reason."""
MAX_TOO_LONG_ERRORS = 12
"""Requests of one step that a service may reject as too long. Each has at most 9/10 of the one before."""
MAX_MODEL_SUMMARIES = 2
"""Summaries of one step that the model is asked for. Further ones are made without it."""
MAX_FILE_NOTES = 3
"""Files of one answer that its text names as not kept. The text must still fit a message."""
PAIR_BURST, PAIR_MESSAGES_PER_SECOND = 100, 1
"""Rate limit per sender and recipient, so that no agent can fill another's mailbox."""
ToolContextFactory = Callable[[Profile, str, str | None], ToolContext]
"""`(caller, idempotency key, id of the causing message) -> ToolContext`."""
T = TypeVar("T")


class ActionResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The result of a model request or a tool call."""

    event: Event
    sends: Envelope | None = None
    """Message to store in the same transaction as the event."""


class CutByMail(Exception):
    """A person's message arrived before the request was queued."""


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
        refresh_agents: Callable[[list[str]], Awaitable[None]] | None = None,
        follow_configuration: Callable[[], Awaitable[None]] | None = None,
        artifact_writer: Callable[[str], SaveFile] | None = None,
        is_paused: Callable[[], bool] = lambda: False,
        model_metrics: ModelCallMetrics | None = None,
    ) -> None:
        """`live`: publishes streamed text. `tokens_per_day`: 0 is no limit.

        `refresh_agents`: reads agents into the directory. `follow_configuration`: applies the configuration that
        the claim's transaction saw. `artifact_writer`: per agent id, stores answers that
        are too long for a message. `is_paused`: True if the society is paused, as far as this process knows.
        """
        self._artifact_writer, self._is_paused, self._refresh_agents = artifact_writer, is_paused, refresh_agents
        self._follow_configuration = follow_configuration
        self._model_metrics = model_metrics or ModelCallMetrics()
        self._store, self._bus, self._models, self._directory = store, bus, models, directory
        self._toolbox, self._context, self._clock, self._rules = toolbox, context, clock, rules
        self._live, self._tokens_per_day, self._tracing = live or LiveReplies(), tokens_per_day, tracing or Tracing()
        self._history_cache, self._windows = HistoryCache(), ContextWindows()
        self._requests = RequestBuilder(store, directory, toolbox, self._history_cache)
        self._running_calls = RunningCalls(
            store=store,
            models=models,
            directory=directory,
            live=self._live,
            clock=clock,
            is_paused=is_paused,
            redact=toolbox.redact_text,
            metrics=self._model_metrics,
        )
        self._pair_rates = RateLimiter(clock, burst=PAIR_BURST, per_second=PAIR_MESSAGES_PER_SECOND)
        self._turns: dict[str, RunningTurn] = {}

    def update_limits(self, rules: Rules, tokens_per_day: int) -> None:
        """Use these limits from the next step on."""
        self._rules, self._tokens_per_day = rules, tokens_per_day

    def system_prompt(self, profile: Profile) -> str:
        """Return the system prompt that the agent's next request has."""
        return self._requests.system_prompt(profile)

    def start_turn(self, claim: Claim, slot: TurnSlot | None = None) -> asyncio.Task[bool]:
        """Start a task that runs the agent's turns until no action is left or another worker has claimed the agent.

        Its result is False if the claim was stale and this process does not know why.

        `stop_turn` finds the turn from this moment on. `slot`: released while the turn asks its model, and acquired
        again before it runs a tool.
        """
        turn = self._turns[claim.agent_id] = RunningTurn(slot=slot, epoch=claim.epoch)
        turn.task = asyncio.create_task(self._run_turn(claim, turn), name=f"coterie-turn-{claim.agent_id}")
        turn.task.add_done_callback(lambda _: self._forget_turn(claim.agent_id, turn))
        return turn.task

    async def _run_turn(self, claim: Claim, turn: RunningTurn) -> bool:
        self._history_cache.apply_claim(claim)
        self._bus.notify()  # watchers see the claim
        span = self._tracing.turn(claim.agent_id, self._directory.name_of(claim.agent_id))
        result: ActionResult | None = None
        is_at_rest = False
        try:
            while not isinstance(claim.action, Rest):
                with log_context(agent=claim.agent_id, message=claim.cause, turn=claim.turn_no):
                    await span.set_cause(claim.cause)
                    ended = claim.turn_no
                    result = await self._perform(claim, turn)
                    claim = await self._advance(claim, result)
                    result = None  # stored, and counted with it
                    if claim.turn_no != ended:
                        turn.is_stopping = False  # the stop was for the turn that has ended
            is_at_rest = True
        except StaleClaim as stale:
            with log_context(agent=claim.agent_id, message=claim.cause, turn=claim.turn_no):
                if turn.is_ended:
                    log.info("%s: the turn was ended with its task or its agent", claim.agent_id)
                else:
                    log.warning("%s; the last step of this worker is discarded", stale)
            await self._count_refused(claim, result)
        finally:
            if not is_at_rest:
                # A crash of the database may take back steps that it had not flushed. The end of a turn is flushed.
                self._history_cache.invalidate(claim.agent_id)
            span.end()
            self._live.finish(_stream_id(claim), "failed")
            self._forget_turn(claim.agent_id, turn)
        return is_at_rest or turn.is_ended

    async def _count_refused(self, claim: Claim, result: ActionResult | None) -> None:
        """Count the tokens of a request whose step the store refused: they are paid for all the same.

        `result` None: no request had ended; if one was sent, its reserved tokens stay.
        """
        if result is None or not isinstance(claim.action, AskModel):
            return
        service, usage = "", TokenUsage()
        if isinstance(result.event, ModelAnswered | ModelFailed | Stopped | Interrupted):
            service, usage = result.event.service, result.event.usage
        if usage.input_tokens or self._tokens_per_day:
            await self._retry_store(claim, lambda: self._store.add_refused_usage(claim, service, usage))

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
        turn.is_stopping = True
        turn.cancel()
        return True

    def drop_turn(self, agent_id: str, epoch: int) -> None:
        """Cancel the action of a turn that was ended in the store, with its task or agent.

        `epoch`: claims before it are stale.
        """
        turn = self._turns.get(agent_id)
        if turn is not None and turn.epoch < epoch:
            turn.is_ended = turn.is_stopping = True
            turn.cancel()

    def interrupt_turn(self, agent_id: str, position: int) -> None:
        """A person's message arrived at `position`. Cut the answer that the agent's model is writing, if it may.

        Otherwise the message waits for the end of the step. While the society is paused, a new request could not start.
        """
        if (turn := self._turns.get(agent_id)) is None:
            return
        turn.newest_position = max(turn.newest_position, position)
        if turn.is_cut and not self._is_paused():
            turn.cancel()

    def defer_queued(self) -> None:
        """After a pause of the society: cancel requests that wait in the queue of their service."""
        for turn in self._turns.values():
            if turn.is_queued and turn.is_cancellable and not turn.is_stopping:
                turn.is_deferring = True
                turn.cancel()

    async def _perform(self, claim: Claim, turn: RunningTurn) -> ActionResult:
        """Execute the action of the claim. A stop cancels it; a person's message may cancel a request to the model."""
        turn.streamed_text, turn.pending_request, turn.summaries = [], None, 0
        if not turn.is_stopping:
            turn.is_cancellable = True
            try:
                return await self._execute(claim, turn)
            except asyncio.CancelledError:
                if not turn.was_cancelled():
                    raise
                if not turn.is_stopping:
                    return ActionResult(event=Deferred() if turn.is_deferring else self._interrupted(claim, turn))
            finally:
                turn.end_action()
        turn.is_stopping = False
        service, usage = self._estimate_unanswered(turn)
        text, attachments = await self._fit_text(claim, "".join(turn.streamed_text))
        return ActionResult(event=Stopped(text, usage=usage, service=service, attachments=attachments))

    def _interrupted(self, claim: Claim, turn: RunningTurn) -> Interrupted:
        service, usage = self._estimate_unanswered(turn)
        text = to_storable("".join(turn.streamed_text))
        if service:
            log.info("%s: a message of the person cut the answer after %d characters", claim.agent_id, len(text))
        return Interrupted(partial_text=text, usage=usage, service=service)

    async def _execute(self, claim: Claim, turn: RunningTurn) -> ActionResult:
        if self._follow_configuration:
            await self._retry_store(claim, self._follow_configuration)
        try:
            profile = await self._retry_store(claim, partial(self._profile, claim.agent_id))
        except Refused:
            message = "I am no longer described in coterie.toml: put me back there, then resume me"
            return ActionResult(event=ModelFailed(message=message, recovery="block", category="no_agent"))
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
                await self._refresh_agents([agent_id])
            return self._directory.profile(agent_id)

    # The model

    async def _ask(self, claim: Claim, profile: Profile, turn: RunningTurn) -> Event:
        asked = self._services_of(claim.agent_id)
        try:
            answer = await self._answer(claim, profile, turn)
        except StaleClaim:
            raise
        except SocietyPaused:
            return Deferred()
        except CutByMail:
            return self._interrupted(claim, turn)
        except ServiceError as error:
            log.warning("%s got no answer: %s", claim.agent_id, error)
            failed = classify_failure(error, claim.model_failures, random.random())
            if failed.recovery == "block" and self._services_of(claim.agent_id) != asked:
                # The cause may be gone, and nothing would unblock the agent: the change was applied before it blocks.
                failed = msgspec.structs.replace(failed, recovery="retry", delay=timedelta(0))
            if failed.recovery == "retry":
                with contextlib.suppress(Refused):  # a reload may have removed its service
                    self._model_metrics.count_retry(self._directory.service_of(claim.agent_id).id, error)
            service, usage = self._estimate_unanswered(turn, error)
            return msgspec.structs.replace(failed, usage=usage, service=service)
        except UnknownService as error:
            return missing_service_failure(error, is_fixed=claim.agent_id in self._directory)
        except Exception:
            # An unexpected error must end the turn. Otherwise the agent would stay busy for ever.
            log.exception("%s cannot ask its model", claim.agent_id)
            service, usage = self._estimate_unanswered(turn)
            message = "something went wrong inside the runtime; the log has the details"
            return ModelFailed(message=message, recovery="give_up", category="runtime", usage=usage, service=service)
        if answer.finish_reason == "length" and not answer.text.strip() and not answer.calls:
            # A turn that is asked something must not end in silence.
            return msgspec.structs.replace(SILENT, usage=answer.usage, service=answer.service)
        if profile.answer_schema and not answer.calls and claim.plan is None:
            try:
                answer = msgspec.structs.replace(answer, text=check_answer(answer.text, profile.answer_schema))
            except WrongAnswer as error:
                problem = MalformedResponse(f"the answer of the model does not follow answer_schema: {error}")
                failed = classify_failure(problem, claim.model_failures, random.random())
                return msgspec.structs.replace(failed, usage=answer.usage, service=answer.service)
        # Text beside calls is not sent, so it need not fit a message.
        is_unsent = answer.calls and claim.plan is None
        text, attachments = (answer.text, ()) if is_unsent else await self._fit_text(claim, answer.text, answer.files)
        return ModelAnswered(
            text=text,
            calls=tuple(self._plan_call(call, profile) for call in answer.calls),
            usage=answer.usage,
            service=answer.service,
            attachments=attachments,
            cut_off=_CUT_OFF.get(answer.finish_reason),
        )

    def _services_of(self, agent_id: str) -> Sequence[ServiceEntry]:
        """Return the service of the agent and its fallbacks; nothing if it has no service."""
        try:
            return self._models.entries_of(self._directory.service_of(agent_id).id)
        except Refused:
            return ()

    async def _fit_text(
        self, claim: Claim, text: str, files: tuple[InlineFile, ...] = ()
    ) -> tuple[str, tuple[dict[str, Any], ...]]:
        """Return text that fits a message, and its attachments: the whole text if it was too long, and `files`.

        The text says which files could not be stored.
        """
        if not (files or is_too_long(text)):
            return text, ()
        writer = self._artifact_writer and self._artifact_writer(claim.agent_id)
        fitted, attachments = await self._retry_store(claim, lambda: fit_answer(text, writer))
        if writer is None:
            return fitted, attachments
        notes = list[str]()
        for file in files:
            try:
                stored = await self._retry_store(claim, partial(writer, file.data, file.filename))
            except (CoterieError, OSError) as error:
                name = one_line(file.filename)
                log.warning("%s: the file %s of the answer cannot be stored: %s", claim.agent_id, name, error)
                notes.append(f"[The file {name} was not kept: {one_line(str(error), 200)}.]")
            else:
                attachments = (*attachments, stored.to_dict())
        if (more := len(notes) - MAX_FILE_NOTES) > 0:
            notes[MAX_FILE_NOTES:] = [f"[{more} more files were not kept either.]"]
        return "\n\n".join(filter(None, [fitted, *notes])), attachments

    async def _answer(self, claim: Claim, profile: Profile, turn: RunningTurn) -> Completion:
        """Ask the model. A request that exceeds the context window is shortened until the service accepts it.

        Each access to the store is retried by itself: after a summary, only the updated claim has the right version of
        the history.
        """
        service = self._directory.service_of(claim.agent_id)
        if service.is_remote_agent:  # it acts, so what it is asked must not be lost
            await self._retry_store(claim, self._store.flush)
        request = await self._retry_store(claim, partial(self._requests.build, claim, profile, turn.prompt))
        size, limit = estimate_tokens(request), math.inf
        too_long: list[ContextTooLong] = []
        if self._tokens_per_day:
            await self._retry_store(claim, partial(self._reserve_tokens, claim, service.id, size))
        while len(too_long) <= MAX_TOO_LONG_ERRORS:
            budget = min(limit, self._windows.budget(service) or math.inf)
            if size > budget:
                try:
                    claim = await self._compact(claim, profile, service, turn, int(budget))
                    build = partial(self._requests.build_short, claim, profile, turn.prompt, int(budget))
                    request = await self._retry_store(claim, build)
                except PermanentError as error:
                    self._windows.forget(service)  # its window may have been changed
                    raise too_long[-1] if too_long else error from None
                size = estimate_tokens(request)
            try:
                answer = await self._retry_store(claim, partial(self._ask_model, service.id, request, claim, turn))
            except ContextTooLong as error:
                turn.pending_request = None  # the service rejected it, so it cost nothing
                limit = self._learn_window(error, service, size)
                too_long.append(error)
                continue
            if answer.service == service.id:
                self._windows.record_answer(service, request, size, answer.usage)
            return answer
        self._windows.forget(service)
        raise too_long[-1]

    def _learn_window(self, error: ContextTooLong, service: ServiceEntry, size: int) -> int:
        """Return the largest estimate that the next request may have. `size`: estimate of the rejected one."""
        rejecting = self._models.entry(error.service) if error.service else service
        limit = self._windows.record_too_long(rejecting, size, error)
        log.info("service %s rejected a request as too long; the next one has at most %d tokens", rejecting.id, limit)
        return limit

    async def _ask_model(
        self, service: str, request: ModelRequest, claim: Claim, turn: RunningTurn, *, publish: bool = True
    ) -> Completion:
        """Send the request to the service. `publish`: stream the text to watchers."""
        answer: Completion | None = None

        def on_start(entry: ServiceEntry) -> None:
            if self._is_paused():
                raise SocietyPaused("the society is paused")
            turn.is_queued, turn.pending_request = False, SentRequest(entry, request, self._clock.monotonic())

        # Summaries (`publish` false) are not cut: the next request needs them.
        turn.cut_after = claim.newest_position if publish and self._may_cut(claim) else None
        if turn.is_cut and not self._is_paused():
            raise CutByMail
        turn.is_queued = True
        asking = self._models.generate(
            service, request, agent_id=claim.agent_id, for_person=claim.for_person, on_start=on_start
        )
        async with aclosing(asking) as pieces:
            async for piece in pieces:
                if isinstance(piece, Completion):
                    answer = piece  # the last piece; no break, because ending the generator normally is cheaper
                    turn.cut_after = None  # a complete answer is never cut
                elif publish:
                    turn.streamed_text.append(piece.text)
                    self._live.append(claim.agent_id, _stream_id(claim), piece.text)
        sent, turn.pending_request = turn.pending_request, None
        assert answer is not None and sent is not None  # noqa: S101 - the gateway ends with an answer or an error
        if not sent.entry.is_remote_agent:
            answer = fill_usage(request, answer)
        return msgspec.structs.replace(answer, usage=self._count_usage(sent, answer.usage))

    def _count_usage(self, sent: SentRequest, usage: TokenUsage) -> TokenUsage:
        """Return the usage with its cost and duration."""
        usage = sent.complete_usage(usage, self._clock.monotonic())
        self._model_metrics.count_usage(sent.entry, usage)
        return usage

    def _estimate_unanswered(self, turn: RunningTurn, error: ServiceError | None = None) -> tuple[str, TokenUsage]:
        """Return the service and the estimated usage of a request without an answer. `error` None: it was stopped."""
        sent, turn.pending_request = turn.pending_request, None
        if sent is None or sent.entry.is_remote_agent or not may_have_cost(error, has_text=bool(turn.streamed_text)):
            return "", TokenUsage()
        return sent.entry.id, self._count_usage(sent, estimate_usage(sent.request, "".join(turn.streamed_text)))

    def _may_cut(self, claim: Claim) -> bool:
        return may_cut(self._rules, self._directory.profile(claim.agent_id).interrupt, claim.cuts)

    async def _compact(
        self, claim: Claim, profile: Profile, service: ServiceEntry, turn: RunningTurn, budget: int
    ) -> Claim:
        """Replace the older part of the history, and its summary, by a new summary. Returns the updated claim.

        `budget`: tokens that a request may have.
        """
        limit = summary_limit(budget)
        space = budget - limit - estimate_tokens(self._requests.fixed_part(profile, turn.prompt))
        view = await self._retry_store(claim, partial(self._store.history_view, claim.agent_id, claim))
        if space <= 0 or (upto := find_cut(view.rows, space // 2)) is None:
            return claim
        older, answer = [row for row in view.rows if row.seq <= upto], None
        text = ""
        if turn.summaries < MAX_MODEL_SUMMARIES:
            turn.summaries += 1
            request = summary_request(view.summary, older, budget)
            try:
                ask = partial(self._ask_model, service.id, request, claim, turn, publish=False)
                answer = await self._retry_store(claim, ask)
                text = accept_summary(answer, view.summary, older, limit)
            except ServiceError as error:
                log.warning("%s gets a digest instead of a summary: %s", claim.agent_id, error)
                if isinstance(error, ContextTooLong):
                    self._learn_window(error, service, estimate_tokens(request))
                asked, usage = self._estimate_unanswered(turn, error)
                answer = Completion(text="", usage=usage, service=asked) if usage.input_tokens else None
        text = text or build_digest(view.summary, older, limit)
        compacted = await self._retry_store(claim, partial(self._store.summarise, claim, upto, text, answer))
        log.info("%s: the model now sees a summary of the history up to row %d", claim.agent_id, upto)
        return compacted

    async def _reserve_tokens(self, claim: Claim, service: str, tokens: int) -> None:
        """Count the estimated tokens before the request, so that a crash cannot lose them."""
        limit = self._tokens_per_day  # it may have been switched off while the store was unavailable
        if not limit or self._models.entry(service).is_remote_agent:
            return
        if not await self._store.reserve_tokens(claim, service, tokens, limit=limit):
            problem = f"today's limit of {limit:,} tokens is spent (limits.tokens_per_day)"
            raise PermanentError(problem, category="daily_limit")

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
        if call.name == SEND_MESSAGE.name and self._toolbox.may_send(self._directory.tools_of(profile.id)):
            return await self._send(claim, index, call, key)
        context = self._context(profile, key, claim.cause)
        # The tool's rules may have changed since the call was planned. Nothing may be awaited between this check and
        # the start of the tool.
        allowed = self._directory.tools_of(profile.id)
        tool = self._toolbox.find(call.name, allowed)
        if tool is None and run.is_retry and planned.effect != "pure":
            return ActionResult(event=CallEnded(index=index, ok=False, result=UNKNOWN_RESULT, is_outcome_unknown=True))
        if tool is not None and not is_as_strict(planned, tool):
            return ActionResult(event=await self._rules_changed(run, planned, tool, context))
        with self._running_calls.bind(context, claim, call, tokens_per_day=self._tokens_per_day) as running:
            result = await self._toolbox.call(call.name, call.arguments, running, patterns=allowed)
        return ActionResult(
            event=CallEnded(
                index=index,
                ok=result.ok,
                result=result.text,
                is_outcome_unknown=result.is_outcome_unknown,
                attachments=tuple(artifact.to_dict() for artifact in result.attachments),
            )
        )

    async def _rules_changed(self, run: RunCall, planned: PlannedCall, tool: Tool, context: ToolContext) -> Event:
        """Return the event for a call that did not run, because its tool has stricter rules than the plan."""
        call, file = planned.call, None
        if tool.approval and not planned.needs_approval and not run.is_retry and not planned.fits_question:
            try:
                file = await store_arguments(call, context)
            except (CoterieError, OSError) as error:
                message = f"{call.name} was not run: its arguments are too long for the approval question"
                result = error_result("approval_impossible", f"{message}, and could not be stored as a file: {error}")
                return CallEnded(index=run.index, ok=False, result=result.text)
        return ToolRulesChanged(
            index=run.index,
            effect=max(planned.effect, tool.effect, key=STRICTNESS.index),
            needs_approval=planned.needs_approval or tool.approval,
            is_retry=run.is_retry,
            file=file,
        )

    async def _send(self, claim: Claim, index: int, call: ToolCall, key: str) -> ActionResult:
        try:
            built = build_envelope(claim.agent_id, call.arguments, key=key, cause=claim.cause)
            envelope = await self._retry_store(claim, lambda: self._bus.describe_attachments(built))
            self._check_pair_rate(envelope)
        except Refused as refusal:
            return ActionResult(event=CallEnded(index=index, ok=False, result=refusal.to_json()))
        return ActionResult(event=CallEnded(index=index, ok=True, result=""), sends=envelope)

    def _check_pair_rate(self, envelope: Envelope) -> None:
        wait = self._pair_rates.try_acquire(f"{envelope.sender} {envelope.to}")
        if wait:
            message = f"you send {envelope.to!r} too many messages: wait {math.ceil(wait)} s, or say more in one"
            raise Refused("too_many_messages", message)


def _stream_id(claim: Claim) -> str:
    """Return the id of the text that this step streams."""
    return f"{claim.agent_id}/{claim.turn_no}/{claim.step_no}"


def _stream_outcome(event: Event, after: Claim) -> ReplyOutcome:
    """Return what happened to the streamed text."""
    match event:
        case Stopped():
            return "stopped"
        case Interrupted():
            return "withdrawn"
        case ModelAnswered(calls=()):
            return "stored"
        case ModelAnswered():
            return "withdrawn" if after.withdrawn_calls else "stored"
    return "failed"


def _is_ok(result: ActionResult) -> bool:
    return isinstance(result.event, CallEnded) and result.event.ok
