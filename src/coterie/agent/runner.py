"""LlmHandler drives a turn: it does what `turn.py` decided, and tells it what came of it.

The loop in `work` is all there is to it. What a message that arrives meanwhile changes is decided in `turn.reduce`,
inside the transaction that `advance` makes; nothing here looks at the mail.

What becomes of a turn whose model gave no answer.
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
from typing import Any, Protocol

import msgspec

from coterie.agent.builtins import SEND_MESSAGE, seal_call
from coterie.agent.compaction import counted, cut, digest, estimated, fits, joined, summary_request, weight
from coterie.agent.context import Prompts, build_request
from coterie.agent.history_cache import Memory
from coterie.agent.service import Directory
from coterie.agent.toolbox import Toolbox
from coterie.agent.tools import Tool, ToolContext, failed
from coterie.agents import Profile
from coterie.bus import MessageBus
from coterie.clock import Clock
from coterie.errors import CoterieError, Refused, StoreUnavailable
from coterie.failpoints import hit
from coterie.live import Live
from coterie.live import Outcome as Ending
from coterie.llm.gateway import Models
from coterie.llm.service import (
    Local,
    Malformed,
    ServiceError,
    SocietyPaused,
    Terminal,
    TooLong,
    Transient,
    UnknownService,
)
from coterie.llm.types import Answer, Call, Request, Usage
from coterie.messages import Envelope
from coterie.rate_limit import Rates
from coterie.stores.sql.replies import Keep, fit_answer
from coterie.telemetry import Tracing, turn_context
from coterie.turn import (
    UNKNOWN,
    Answered,
    ArgumentsFile,
    Ask,
    Deferred,
    Effect,
    Event,
    ModelFailed,
    PlannedCall,
    Ran,
    Rest,
    Rules,
    Run,
    Stopped,
    ToolChanged,
)
from coterie.turn_store import Claim, StaleOwner, TurnStore

log = logging.getLogger(__name__)

TRIES = 10
MALFORMED_TRIES = 2
FIRST_WAIT = timedelta(seconds=1)
LONGEST_WAIT = timedelta(seconds=60)


def told(error: ServiceError, retries: int, luck: float) -> ModelFailed:
    """`retries`: how often in a row it failed before; `luck`: 0 to 1, so that many agents do not come back together."""
    match error:
        case Transient() | Local() if retries < TRIES:
            wait = error.retry_after if error.retry_after is not None else _backoff(retries, luck)
            return ModelFailed(words=str(error), then="retry", after=wait, category=_category(error))
        case Malformed() if retries < MALFORMED_TRIES:
            return ModelFailed(words=str(error), then="retry", after=_backoff(retries, luck), category="server")
        case Terminal(category="content"):
            return ModelFailed(words=str(error), then="give_up")
        case TooLong():
            return ModelFailed(
                words=f"{error}. Clear the conversation, or use a model with a larger window.",
                then="block",
                category="context_length",
            )
    return ModelFailed(words=f"{error}. Mend it, then write to me again.", then="block", category=_category(error))


def _category(error: ServiceError) -> str:
    """The kind of trouble, in the words of the event stream."""
    match error:
        case Terminal(category="auth"):
            return "auth"
        case Terminal(category="quota") | Local():
            return "rate_limit"
        case Transient(retry_after=after, why="busy") if after is not None:
            return "rate_limit"
        case Transient():
            return "network"
    return "server"


def without_service(error: UnknownService, *, mended: bool) -> ModelFailed:
    """`mended`: the agent has a service by now, so it was only looking while the configuration changed."""
    if mended:
        return ModelFailed(words=str(error), then="retry", after=timedelta(0))
    return ModelFailed(words=f"{error}. Mend it, then write to me again.", then="block")


def _backoff(retries: int, luck: float) -> timedelta:
    """Full jitter: anywhere up to a limit that doubles with every failure, but never nothing at all."""
    limit = min(LONGEST_WAIT, FIRST_WAIT * (1 << retries))
    return max(timedelta(milliseconds=50), limit * luck)


PATIENCE = timedelta(seconds=1)
TO_ONE, TO_ONE_A_SECOND = 100, 1
"""Messages that an agent may send another at once, and from then on: nobody fills a mailbox that others need too."""
ContextMaker = Callable[[Profile, str, str | None], ToolContext]
"""What a tool is given: whose call it is, the key of that call, and the message it was made for."""


Recall = Callable[[], Awaitable[None]]


class Slot(Protocol):
    """The right of one turn to do something; see `agent/slots.py`."""

    async def acquire(self, *, person: bool) -> None: ...

    def release(self) -> None: ...


async def _nothing_new() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of an effect."""

    event: Event
    sends: Envelope | None = None
    """A message that the call wants to send: stored together with its result, or not at all."""


@dataclass(slots=True)
class Work:
    """A turn under way, and how to stop it."""

    task: asyncio.Task[None] = field(init=False)
    performing: bool = False
    """It is in the middle of an effect, which a stop may cut off; what it writes down is never cut off."""
    slot: Slot | None = None
    said: list[str] = field(default_factory=list)
    """What the model has said so far."""
    asking: tuple[str, Request] | None = None
    """The service and the request that no answer has come to yet."""
    stopping: bool = False
    queued: bool = False
    """It waits until its model service has room; the request has not begun."""
    deferring: bool = False
    """The society was paused while it was queued."""
    prompt: str = ""
    """Made once a turn."""

    def was_stopped(self) -> bool:
        """True if the task was cancelled by `stop` alone; False if another caller cancelled it too."""
        return self.stopping and not self.task.uncancel()

    def was_deferred(self) -> bool:
        """True if the task was cancelled by a pause of the society alone."""
        return self.deferring and not self.task.uncancel()


class LlmHandler:
    def __init__(
        self,
        store: TurnStore,
        bus: MessageBus,
        models: Models,
        directory: Directory,
        toolbox: Toolbox,
        context: ContextMaker,
        clock: Clock,
        rules: Rules,
        live: Live | None = None,
        tokens_per_day: int = 0,
        tracing: Tracing | None = None,
        recall: Recall | None = None,
        keep: Callable[[str], Keep] | None = None,
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """`live`: publishes the text of models while it streams. `tokens_per_day`: 0 is no limit.

        `recall`: brings the directory up to date with the store. `keep`: stores answers of an agent that are too
        long for a message.
        `paused`: whether the society is, as far as this process knows.
        """
        self._keep, self._paused = keep, paused
        self._recall = recall or _nothing_new
        self._store, self._bus, self._models, self._directory = store, bus, models, directory
        self._toolbox, self._context, self._clock, self._rules = toolbox, context, clock, rules
        self._live, self._tokens_per_day, self._tracing = live or Live(), tokens_per_day, tracing or Tracing()
        self._memory, self._prompts = Memory(), Prompts(directory)
        self._pairs = Rates(clock, burst=TO_ONE, per_second=TO_ONE_A_SECOND)
        self._work: dict[str, Work] = {}

    def adopt(self, rules: Rules, tokens_per_day: int) -> None:
        """Limits that count from the next step on."""
        self._rules, self._tokens_per_day = rules, tokens_per_day

    def begin(self, claim: Claim, slot: Slot | None = None) -> asyncio.Task[None]:
        """Start a task that runs the agent's turn until the agent rests or another worker has claimed it.

        A stop finds the turn from this moment on, though the task has yet to take its first step. `slot`: is given back
        while the turn asks its model, and taken again before it runs a tool.
        """
        work = self._work[claim.agent_id] = Work(slot=slot)
        work.task = asyncio.create_task(self._go_on(claim, work), name=f"coterie-turn-{claim.agent_id}")
        work.task.add_done_callback(lambda _: self._leave(claim.agent_id, work))
        return work.task

    async def _go_on(self, claim: Claim, work: Work) -> None:
        self._memory.add(claim)
        self._bus.stored(None)  # the claim itself is news
        turn = self._tracing.turn(claim.agent_id, self._directory.name_of(claim.agent_id))
        try:
            while not isinstance(claim.effect, Rest):
                with turn_context(agent=claim.agent_id, message=claim.cause, turn=claim.turn_no):
                    await turn.follows(claim.cause)
                    ended = claim.turn_no
                    claim = await self._advance(claim, await self._perform(claim, work))
                    if claim.turn_no != ended:
                        work.stopping = False  # a stop that came too late for that turn is not meant for this one
        except StaleOwner as stale:
            with turn_context(agent=claim.agent_id, message=claim.cause, turn=claim.turn_no):
                log.warning("%s; its last step here counts for nothing", stale)
            self._memory.forget(claim.agent_id)
        finally:
            turn.end()
            self._live.end(_draft(claim), "failed")
            self._leave(claim.agent_id, work)

    def _leave(self, agent_id: str, work: Work) -> None:
        if self._work.get(agent_id) is work:  # the agent's next turn may have begun
            del self._work[agent_id]

    async def _advance(self, claim: Claim, outcome: Outcome) -> Claim:
        """Written down, however long the store takes to come back: what was done must not be forgotten."""
        while True:
            try:
                after = await self._store.advance(claim, outcome.event, self._rules, sends=outcome.sends)
            except StoreUnavailable as error:
                log.warning("%s waits for the store: %s", claim.agent_id, error)
                await self._clock.sleep(PATIENCE)
                continue
            self._bus.stored(outcome.sends)
            self._memory.add(after)
            self._live.end(_draft(claim), _ending(outcome.event, after), after.replies)
            return after

    def stop(self, agent_id: str) -> bool:
        """End the agent's turn now: the model call or tool is cancelled. False when it has none here."""
        if (work := self._work.get(agent_id)) is None:
            return False
        if work.performing and not work.stopping:
            work.task.cancel()
        work.stopping = True
        return True

    def defer_queued(self) -> None:
        """After a pause of the society: cancel turns that wait for a model service and have sent nothing."""
        for work in self._work.values():
            if work.queued and work.performing and not work.stopping and not work.deferring:
                work.deferring = True
                work.task.cancel()

    async def _perform(self, claim: Claim, work: Work) -> Outcome:
        """The effect, which a stop can end, and nothing else."""
        work.said, work.asking = [], None
        if not work.stopping:
            work.performing = True
            try:
                return await self._do(claim, work)
            except asyncio.CancelledError:
                if work.was_deferred():
                    return Outcome(event=Deferred())
                if not work.was_stopped():
                    raise
            finally:
                work.performing = work.queued = work.deferring = False
        work.stopping = False
        service, usage = _unreported(work)
        said, attachments = await self._fitted(claim, "".join(work.said))
        return Outcome(event=Stopped(said, usage=usage, service=service, attachments=attachments))

    async def _do(self, claim: Claim, work: Work) -> Outcome:
        try:
            profile = await self._profile(claim.agent_id)
        except Refused:
            words = "I am no longer described in coterie.toml: put me back there, then resume me"
            return Outcome(event=ModelFailed(words=words, then="block"))
        if work.slot:
            if isinstance(claim.effect, Ask):
                work.slot.release()
            else:
                await work.slot.acquire(person=claim.person)
        if isinstance(claim.effect, Ask):
            hit("turn.asking")
            event = await self._ask(claim, profile, work)
            hit("turn.answered")
            return Outcome(event=event)
        assert isinstance(claim.effect, Run) and claim.call is not None  # noqa: S101
        hit("turn.calling")
        running = self._run(claim, claim.effect, claim.call, profile)
        outcome = await self._tracing.tool(claim.call.call.name, claim.call.call.id, running, _went_well)
        hit("turn.ran")
        return outcome

    async def _profile(self, agent_id: str) -> Profile:
        try:
            return self._directory.profile(agent_id)
        except Refused:
            await self._recall()  # another process may have made it
            return self._directory.profile(agent_id)

    # The model

    async def _ask(self, claim: Claim, profile: Profile, work: Work) -> Event:
        try:
            answer = await self._answer_once_stored(claim, profile, work)
        except StaleOwner:
            raise  # somebody else asks now
        except SocietyPaused:
            return Deferred()
        except ServiceError as error:
            log.warning("%s got no answer: %s", claim.agent_id, error)
            failed = told(error, claim.retries, random.random())
            service, usage = _unreported(work, error)
            return msgspec.structs.replace(failed, usage=usage, service=service)
        except UnknownService as error:
            return without_service(error, mended=claim.agent_id in self._directory)
        except Exception:
            # Whatever it is, it must not leave the agent at work for ever.
            log.exception("%s cannot ask its model", claim.agent_id)
            service, usage = _unreported(work)
            words = "something went wrong inside the runtime; the log has the details"
            return ModelFailed(words=words, then="give_up", usage=usage, service=service)
        # Text beside calls goes to nobody, so it need not fit a message.
        text, attachments = (answer.text, ()) if answer.calls else await self._fitted(claim, answer.text)
        return Answered(
            text=text,
            calls=tuple(self._planned(call, profile) for call in answer.calls),
            usage=answer.usage,
            service=answer.service,
            attachments=attachments,
        )

    async def _fitted(self, claim: Claim, text: str) -> tuple[str, tuple[dict[str, Any], ...]]:
        """The text as a message can carry it, with the whole attached where that is too long."""
        while True:
            try:
                return await fit_answer(text, self._keep and self._keep(claim.agent_id))
            except StoreUnavailable as error:
                log.warning("%s waits for the store: %s", claim.agent_id, error)
                await self._clock.sleep(PATIENCE)

    async def _answer_once_stored(self, claim: Claim, profile: Profile, work: Work) -> Answer:
        """A store that cannot be reached for the moment is no reason to give up: it is waited for."""
        while True:
            try:
                return await self._answer(claim, profile, work)
            except StoreUnavailable as error:
                log.warning("%s waits for the store: %s", claim.agent_id, error)
                await self._clock.sleep(PATIENCE)

    async def _answer(self, claim: Claim, profile: Profile, work: Work) -> Answer:
        """The model's answer. A history that has outgrown its window is summarised, once, and shown again."""
        service = self._directory.service_of(claim.agent_id)
        request = await self._request(claim, profile, work)
        await self._set_aside(claim, service.id, request)
        if not fits(request, service.context_tokens) and (compacted := await self._compact(claim, service.id, work)):
            claim = compacted
            request = await self._request(claim, profile, work)
        try:
            return await self._ask_model(service.id, request, claim, work)
        except TooLong:
            work.asking = None  # it was refused, so it cost nothing
            if not (compacted := await self._compact(claim, service.id, work)):
                raise
            claim = compacted
        return await self._ask_model(service.id, await self._request(claim, profile, work), claim, work)

    async def _ask_model(
        self, service: str, request: Request, claim: Claim, work: Work, *, aloud: bool = True
    ) -> Answer:
        """Ask the service and return its answer. `aloud`: publish the text while it streams."""
        answer: Answer | None = None

        def begins() -> None:
            if self._paused():
                raise SocietyPaused("the society is paused")
            work.queued, work.asking = False, (service, request)

        work.queued = True
        asking = self._models.ask(service, request, reader=claim.agent_id, person=claim.person, begins=begins)
        async with aclosing(asking) as pieces:
            async for piece in pieces:
                if isinstance(piece, Answer):
                    answer = piece  # there is none behind it, and to let them end is cheaper than to cut them off
                elif aloud:
                    work.said.append(piece.text)
                    self._live.say(claim.agent_id, _draft(claim), piece.text)
        assert answer is not None  # noqa: S101 - the door to models ends with an answer or an error
        work.asking = None
        return counted(request, answer)

    async def _request(self, claim: Claim, profile: Profile, work: Work) -> Request:
        """Built from the history version of `claim`; `StaleOwner` when the claim no longer holds."""
        shown = self._memory.recall(claim.agent_id, claim.history_version)
        if shown is None:
            shown = self._memory.keep(claim.agent_id, await self._store.view(claim.agent_id, claim))
        work.prompt = work.prompt or self._prompts.of(profile)
        return build_request(work.prompt, shown.summary, shown.said, self._toolbox.offered(self._tools(profile)))

    async def _compact(self, claim: Claim, service: str, work: Work) -> Claim | None:
        """The claim with the new history version; None when there is nothing to leave out."""
        view = await self._store.view(claim.agent_id, claim)
        if (upto := cut(view.rows)) is None:
            return None
        older, answer = [row for row in view.rows if row.seq <= upto], None
        try:
            answer = await self._ask_model(service, summary_request(older), claim, work, aloud=False)
            text = answer.text.strip() or digest(older)
        except ServiceError as error:
            log.warning("%s gets a digest instead of a summary: %s", claim.agent_id, error)
            text = digest(older)
            asked, usage = _unreported(work, error)
            answer = Answer(text="", usage=usage, service=asked) if usage.input_tokens else None
        compacted = await self._store.summarise(claim, upto, joined(view.summary, text), answer)
        log.info("%s: the history up to row %d is shown as a summary from now on", claim.agent_id, upto)
        return compacted

    async def _set_aside(self, claim: Claim, service: str, request: Request) -> None:
        """What is asked counts before it is: a crash that swallows the answer does not give the tokens back."""
        if not self._tokens_per_day:
            return
        today = self._clock.now().replace(hour=0, minute=0, second=0, microsecond=0)
        if not await self._store.set_aside(claim, service, weight(request), since=today, limit=self._tokens_per_day):
            limit = f"{self._tokens_per_day:,} tokens"
            raise Terminal(f"today's limit of {limit} is spent (limits.tokens_per_day)", category="quota")

    # The tools

    def _tools(self, profile: Profile) -> tuple[tuple[str, ...], ...]:
        """What it may use at this moment: rights can change between the offer of a tool and its call."""
        return self._directory.tools_of(profile.id)

    def _planned(self, call: Call, profile: Profile) -> PlannedCall:
        tool = self._toolbox.find(call.name, self._tools(profile))
        if tool is None:  # send_message, or a name that means nothing, which has no effect at all
            return PlannedCall(call=call, effect="idempotent" if call.name == SEND_MESSAGE.name else "pure")
        return PlannedCall(call=call, effect=tool.effect, gated=tool.approval)

    async def _run(self, claim: Claim, run: Run, planned: PlannedCall, profile: Profile) -> Outcome:
        index, call, key = run.index, planned.call, claim.key(run.index)
        if call.raw is not None:
            words = "the arguments are no JSON object; send the call again with valid arguments"
            return Outcome(event=Ran(index=index, ok=False, result=words))
        if call.name == SEND_MESSAGE.name:
            return await self._send(claim, index, call, key)
        context = self._context(profile, key, claim.cause)
        # The rules that count are those of this moment: the owner may have changed them since the call was planned.
        # Nothing is awaited between this look and the start of the tool.
        allowed = self._tools(profile)
        tool = self._toolbox.find(call.name, allowed)
        if tool is None and run.again and planned.effect != "pure":
            return Outcome(event=Ran(index=index, ok=False, result=UNKNOWN, unknown=True))
        if tool is not None and not _holds(planned, tool):
            return Outcome(event=await self._changed(run, planned, tool, context))
        result = await self._toolbox.call(call.name, call.arguments, context, patterns=allowed)
        return Outcome(event=Ran(index=index, ok=result.ok, result=result.text, unknown=result.unknown))

    async def _changed(self, run: Run, planned: PlannedCall, tool: Tool, context: ToolContext) -> Event:
        """The event for a call that did not run because its tool has stricter rules now than in the plan."""
        call, file = planned.call, None
        if tool.approval and not planned.gated and not run.again and not planned.fits_question:
            try:
                file = await _keep_arguments(call, context)
            except (CoterieError, OSError) as error:
                words = f"{call.name} was not run: its arguments are too long for the question whether it may run"
                result = failed("approval_impossible", f"{words}, and could not be kept as a file: {error}")
                return Ran(index=run.index, ok=False, result=result.text)
        return ToolChanged(
            index=run.index,
            effect=max(planned.effect, tool.effect, key=_STRICTNESS.index),
            gated=planned.gated or tool.approval,
            again=run.again,
            file=file,
        )

    async def _send(self, claim: Claim, index: int, call: Call, key: str) -> Outcome:
        try:
            envelope = await self._bus.described(seal_call(claim.agent_id, call.arguments, key=key, cause=claim.cause))
            self._check_pair(envelope)
        except Refused as refusal:
            return Outcome(event=Ran(index=index, ok=False, result=refusal.to_json()))
        return Outcome(event=Ran(index=index, ok=True, result=""), sends=envelope)

    def _check_pair(self, envelope: Envelope) -> None:
        wait = self._pairs.take(f"{envelope.sender} {envelope.to}")
        if wait:
            words = f"you send {envelope.to!r} too many messages: wait {math.ceil(wait)} s, or say more in one"
            raise Refused("too_many_messages", words)


def _unreported(work: Work, error: ServiceError | None = None) -> tuple[str, Usage]:
    """The service and the estimated cost of a request that ended without an answer; `error`: how. None: by a stop."""
    asking, work.asking = work.asking, None
    match error:
        case None | Malformed() | Transient(why="late" | "cut"):
            sent = True
        case _:
            sent = bool(work.said)  # else it was refused, or never reached the service
    if asking is None or not sent:
        return "", Usage()
    service, request = asking
    return service, estimated(request, "".join(work.said))


_STRICTNESS: tuple[Effect, ...] = ("pure", "idempotent", "unsafe")


def _holds(planned: PlannedCall, tool: Tool) -> bool:
    """True if the call was planned under rules that are at least as strict as those of the tool now."""
    asked = planned.gated or not tool.approval
    return asked and _STRICTNESS.index(planned.effect) >= _STRICTNESS.index(tool.effect)


async def _keep_arguments(call: Call, context: ToolContext) -> ArgumentsFile:
    data = msgspec.json.encode(call.arguments)
    key = f"{context.idempotency_key}/arguments"
    kept = await context.artifacts.put(data, f"{call.name}-arguments.json", key=key)
    return ArgumentsFile(kept.ref, kept.filename, kept.mime_type, kept.size, kept.sha256)


def _draft(claim: Claim) -> str:
    """Names what the model says at this step, while it says it."""
    return f"{claim.agent_id}/{claim.turn_no}/{claim.step_no}"


def _ending(event: Event, after: Claim) -> Ending:
    """What became of the words that were streamed."""
    match event:
        case Stopped():
            return "stopped"
        case Answered(calls=()):
            return "stored"
        case Answered():
            return "withdrawn" if after.withdrawn else "stored"
    return "failed"


def _went_well(outcome: Outcome) -> bool:
    return isinstance(outcome.event, Ran) and outcome.event.ok
