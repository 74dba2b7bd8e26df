"""The turn as a pure state machine: `reduce(turn, event) -> Step`. It reads no clock, disk or random numbers.

All decisions about interruptions are made here; `agent/runner.py` executes them. The store calls `reduce` inside the
transaction that writes the step, with the mail that waits at that moment. So no message is lost between two decisions.
`is_echo` decides which message can interrupt, `is_interrupted` whether it does, `wakes` which agents it makes runnable,
and `count_fitting` how much mail one request takes. The store only looks up the facts for them.

How an interruption is handled:

* Waiting mail is checked before every tool call and when the model has answered, nowhere else. With the setting
  `interrupt = "stream"`, a person's message also cuts the answer that the model is writing (`may_cut`, `Interrupted`).
* No call has run yet: the plan is withdrawn. It was never in the history; a record is kept outside the prompt.
* Some calls have run: the whole group is appended. Calls that did not run get a result that says so.
* A cut answer is withdrawn like a plan without calls.
* All waiting mail is then taken in order, and the model is asked again. A burst that is too long for one request is
  taken in parts, at least one message each. The rest stays waiting and is mail like any other: it interrupts the next
  plan, so each part costs at most one request, and no plan runs before all messages of the person are read.
* A person's message always interrupts. Agents' messages withdraw at most `max_withdrawals` plans in a row.
* No echo interrupts: a message from the agent to itself, an answer to one that this plan sent, or a person's question
  about a call that waits for approval. The model answers that one, and the plan stays open (`asks_back`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from coterie.agents import InterruptMode
from coterie.llm.service import TokenUsage
from coterie.messages import PERSON, CutOff
from coterie.plan import (
    DENIED_RESULT,
    INTERRUPTED_RESULT,
    SEND_MESSAGE_TOOL,
    STOPPED_RESULT,
    UNKNOWN_RESULT,
    ArgumentsFile,
    CallState,
    Effect,
    Plan,
    PlannedCall,
)
from coterie.tasks import Budget

# State. Structs, because they are faster to create than dataclasses and every step creates a dozen.


class WaitingMessage(Struct, frozen=True, gc=False):
    """A message in the agent's mailbox."""

    id: str
    position: int
    is_from_person: bool = False
    is_echo: bool = False
    """The agent sent it to itself, or it answers a message that the open plan sent."""
    asks_back: bool = False
    """The person asks about a call of the open plan that needs approval, and does not decide. It is an echo."""


class Rules(Struct, frozen=True, kw_only=True, gc=False):
    max_withdrawals: int = 3
    """Plans in a row that agents' messages may withdraw; 0: no limit."""
    max_rounds: int = 50
    """Model answers per turn."""
    interrupt: InterruptMode = "step"
    """For agents without a setting of their own."""
    max_cuts: int = 3
    """Answers per turn that a person's messages may cut."""
    mail_budget: Callable[[str], int] | None = None
    """Bytes of waiting mail that one request of an agent takes, by agent id; None: no limit. Called from any thread."""
    budget: Budget = Budget()
    """What a task may use before the person is asked."""


class Turn(Struct, frozen=True, kw_only=True, gc=False):
    mail: tuple[WaitingMessage, ...] = ()
    """Waiting messages that decide about an interruption: not all of them."""
    mail_waits: bool = False
    """Messages wait, perhaps none of those in `mail`."""
    plan: Plan | None = None
    withdrawals: int = 0
    """Plans in a row that agents' messages have withdrawn."""
    rounds: int = 0
    """Model answers in this turn so far."""
    rules: Rules = Rules()
    hold: bool = False
    """Pause the agent after this turn, even if mail waits."""
    society_paused: bool = False
    """Start no model call and no tool."""
    answers_back: bool = False
    """The model is asked what the person wants to know before deciding about a call. The plan stays open."""

    @property
    def has_mail(self) -> bool:
        return bool(self.mail) or self.mail_waits


# Events: inputs of `reduce`


class ModelAnswered(Struct, frozen=True, kw_only=True, gc=False):
    """The model answered."""

    text: str
    calls: tuple[PlannedCall, ...] = ()
    usage: TokenUsage = TokenUsage()
    service: str = ""
    attachments: tuple[dict[str, Any], ...] = ()
    """Files sent with the reply."""
    cut_off: CutOff | None = None


class CallEnded(Struct, frozen=True, kw_only=True, gc=False):
    """A tool call ended."""

    index: int
    ok: bool
    result: str
    is_outcome_unknown: bool = False
    """The call started, but it may or may not have taken effect."""
    attachments: tuple[dict[str, Any], ...] = ()
    """Files of the result for the model to see, as in a message."""


class ToolRulesChanged(Struct, frozen=True, kw_only=True, gc=False):
    """A call did not run, because its tool has stricter rules now than when the call was planned."""

    index: int
    effect: Effect
    needs_approval: bool
    is_retry: bool = False
    """An earlier worker started the call; it may have run then."""
    file: ArgumentsFile | None = None
    """The arguments, if they are too long for the approval question."""


class Resumed(Struct, frozen=True, gc=False):
    """The turn continues after a wait, or after its worker was lost."""


class ApprovalDecided(Struct, frozen=True, gc=False):
    """A person approved or denied the waiting call."""

    approved: bool


class Stopped(Struct, frozen=True, gc=False):
    """A person or the parent agent ended the turn."""

    partial_text: str = ""
    usage: TokenUsage = TokenUsage()
    """Estimated cost of the cancelled request."""
    service: str = ""
    attachments: tuple[dict[str, Any], ...] = ()


class Interrupted(Struct, frozen=True, kw_only=True, gc=False):
    """A person's message cut the answer that the model was writing, or came before the request was sent."""

    partial_text: str = ""
    usage: TokenUsage = TokenUsage()
    """Estimated cost of the cut request."""
    service: str = ""
    """Empty: the request was not sent."""


class ModelFailed(Struct, frozen=True, kw_only=True, gc=False):
    """The model gave no answer.

    `recovery`: retry after `delay`, block the agent until its configuration is fixed, or end the turn.
    """

    message: str
    recovery: Literal["retry", "block", "give_up"]
    delay: timedelta = timedelta(0)
    category: str = "server"
    """Kind of the failure. Clients translate it into their own language."""
    facts: dict[str, Any] = {}
    """What belongs to the category, such as `service` and `status`."""
    usage: TokenUsage = TokenUsage()
    """Estimated cost of the failed request; zero if it was rejected or never sent."""
    service: str = ""


class Poisoned(Struct, frozen=True, gc=False):
    """This turn has crashed the runtime repeatedly."""

    message: str


class Terminated(Struct, frozen=True, gc=False):
    """The agent was terminated during this turn."""


class TaskDropped(Struct, frozen=True, gc=False):
    """The task of the turn was stopped, and the turn goes on for the other tasks whose messages it took.

    If the agent is paused, it goes on when the agent is resumed.
    """


class Deferred(Struct, frozen=True, gc=False):
    """The society was paused before the model was asked."""


Event = (
    ModelAnswered | CallEnded | ToolRulesChanged | Resumed | ApprovalDecided | Stopped | Interrupted | ModelFailed
    | Poisoned | Terminated | TaskDropped | Deferred
)  # fmt: skip


# Writes: what the store stores in this step


class BeginNextTurn(Struct, frozen=True, gc=False):
    """Start a new turn, with its counters at 0."""


class TakeMail(Struct, frozen=True, gc=False):
    """Append the waiting mail to the history, in order: all of it, or the first part if `count_fitting` says so."""


class AppendText(Struct, frozen=True, gc=False):
    """Append the assistant's text to the history."""

    text: str


class AppendCallGroup(Struct, frozen=True, gc=False):
    """Append the assistant's message, its calls and all their results to the history; close the plan."""

    plan: Plan
    interrupted_by: str | None = None
    """Id of the message that interrupted the plan."""


class OpenPlan(Struct, frozen=True, gc=False):
    plan: Plan


class SetCallState(Struct, frozen=True, gc=False):
    """Set the state and result of a call in the open plan."""

    index: int
    state: CallState
    result: str = ""
    attachments: tuple[dict[str, Any], ...] = ()


class SetCallRules(Struct, frozen=True, gc=False):
    """Give a call in the open plan the current rules of its tool."""

    index: int
    effect: Effect
    needs_approval: bool


class WithdrawPlan(Struct, frozen=True, gc=False):
    """Keep a plan of which no call ran as a record outside the prompt. A cut answer is a plan without calls."""

    plan: Plan
    interrupted_by: str | None = None
    """Id of the message that interrupted the plan."""


class SendReply(Struct, frozen=True, gc=False):
    """Send the text to the senders of this turn's messages."""

    text: str
    is_partial: bool = False
    is_error: bool = False
    """The text reports a failure; the runtime is its author."""
    problem: dict[str, Any] = {}
    """Of an error: its category and facts."""
    attachments: tuple[dict[str, Any], ...] = ()
    cut_off: CutOff | None = None
    asks_back: bool = False
    """It goes to the person only, as the answer to the newest message with `asks_back`."""


class RequestApproval(Struct, frozen=True, gc=False):
    """Ask a person whether the call may run. Idempotent."""

    index: int
    file: ArgumentsFile | None = None


class Quarantine(Struct, frozen=True, gc=False):
    """Hide this turn's messages from the model. People still see them."""


class SetState(Struct, frozen=True, kw_only=True, gc=False):
    state: Literal["idle", "paused", "llm", "tools", "wait_approval", "wait_retry", "blocked", "terminated"]
    delay: timedelta | None = None
    reason: str = ""
    category: str = ""
    facts: dict[str, Any] = {}
    is_suspended: bool = False
    """The turn was released in order, by a pause or a stop: the next claim is no recovery and no retry."""


class SetCounters(Struct, frozen=True, kw_only=True, gc=False):
    withdrawals: int
    rounds: int


Write = (
    BeginNextTurn | TakeMail | AppendText | AppendCallGroup | OpenPlan | SetCallState | SetCallRules | WithdrawPlan
    | SendReply | RequestApproval | Quarantine | SetState | SetCounters
)  # fmt: skip


# Actions: what the worker does after the step is stored


class AskModel(Struct, frozen=True, gc=False):
    """Send a request to the model."""


class RunCall(Struct, frozen=True, gc=False):
    """Run a call of the open plan."""

    index: int
    is_retry: bool = False
    """An earlier worker started it."""


class Rest(Struct, frozen=True, gc=False):
    """Release the claim; nothing is left to do now."""


Action = AskModel | RunCall | Rest


class Step(Struct, frozen=True, gc=False):
    writes: tuple[Write, ...]
    action: Action


def reduce(turn: Turn, event: Event) -> Step:
    """Decide what is stored and done after `event`."""
    step = _decide(turn, event)
    return _suspend(step) if turn.society_paused and not isinstance(step.action, Rest) else step


def _suspend(step: Step) -> Step:
    """Return the step without its action: the writes stay, a call that was to start stays planned."""
    writes = [
        write for write in step.writes
        if not isinstance(write, SetState) and not (isinstance(write, SetCallState) and write.state == "started")
    ]  # fmt: skip
    is_call = isinstance(step.action, RunCall)
    state = SetState(state="tools" if is_call else "llm", delay=timedelta(0), is_suspended=True)
    return Step((*writes, state), Rest())


def _decide(turn: Turn, event: Event) -> Step:
    match event:
        case ModelAnswered() | ModelFailed() if turn.answers_back:
            return _answer_back(turn, event)
        case ModelAnswered(text=text, calls=()):
            reply = SendReply(text, attachments=event.attachments, cut_off=event.cut_off)
            return _finish(turn, AppendText(text), reply)
        case ModelAnswered():
            return _begin_plan(turn, Plan(text=event.text, calls=event.calls))
        case CallEnded(index=index):
            state: CallState = "unknown" if event.is_outcome_unknown else "done" if event.ok else "failed"
            return _continue_plan(turn, SetCallState(index, state, event.result, event.attachments))
        case ToolRulesChanged():
            return _apply_changed_rules(turn, event)
        case ApprovalDecided(approved=approved):
            return _apply_approval(turn, approved)
        case Resumed():
            return _resume(turn)
        case Deferred():
            return Step((SetState(state="llm"),), AskModel())
        case Stopped():
            return _stop(turn, event)
        case Interrupted():
            return _cut(turn, event)
        case Poisoned(message=message):
            return _abort(turn, message)
        case ModelFailed():
            return _fail(turn, event)
        case Terminated():
            return _terminate(turn)
        case TaskDropped():
            return _drop_task(turn)


# Interruptions


def is_echo(
    sender: str, agent_id: str, *, answers_approval: Callable[[], bool], is_caused_by_plan: Callable[[], bool]
) -> bool:
    """True for a message to `agent_id` that waits until the open plan has ended, instead of interrupting it.

    `answers_approval`: it is a button pressed on an approval question of the plan, or it asks back about that call.
    `is_caused_by_plan`: a message that the plan sent has caused it. Both are asked only if they matter.
    """
    if sender == PERSON:
        return answers_approval()
    return sender == agent_id or is_caused_by_plan()


def wakes(state: str, *, unblocks: bool) -> bool:
    """True if a message makes an agent in this state runnable. In other states the current step finds the message.

    `unblocks`: the person sent it, or the budget of a task blocks the agent. In the second case the agent takes the
    message and its budget is checked again: the message may belong to a task with budget left, and a message that is
    never taken would keep its task in the state `working`.
    """
    return state in ("idle", "wait_approval") or (state == "blocked" and unblocks)


def count_fitting(costs: Iterable[int], budget: int | None) -> int:
    """Return how many waiting messages, in order, one request takes: those that fit, and always the first."""
    count = total = 0
    for cost in costs:
        total += cost
        if count and budget is not None and total > budget:
            break
        count += 1
    return count


def is_interrupted(turn: Turn) -> bool:
    """True if the waiting mail interrupts the plan."""
    messages, limit = [message for message in turn.mail if not message.is_echo], turn.rules.max_withdrawals
    if any(message.is_from_person for message in messages):
        return True
    # The next plan of an agent that others keep writing to runs, so that they cannot block it for ever.
    return bool(messages) and not (limit and turn.withdrawals >= limit)


def may_cut(rules: Rules, mode: InterruptMode | None, cuts: int) -> bool:
    """True if a person's message may cut the answer that the model is writing.

    `mode`: setting of the agent; None: that of the society. `cuts`: answers of this turn that were cut. The limit
    guarantees progress: a person who keeps typing gets an answer all the same.
    """
    return (mode or rules.interrupt) == "stream" and cuts < rules.max_cuts


def _cut(turn: Turn, event: Interrupted) -> Step:
    """Withdraw the unfinished answer, take the mail and ask again. The cutting message may be withdrawn by now."""
    cut = (WithdrawPlan(Plan(text=event.partial_text, calls=()), _interrupting_id(turn)),) if event.service else ()
    if turn.plan is None or not turn.has_mail:
        return Step((*cut, *_take_mail(turn)), AskModel())
    if not is_interrupted(turn):  # the next claim finds the decision, or the next question
        return Step((*cut, _await_approval(turn)), Rest())
    return _interrupt(turn, turn.plan, *cut)


def _begin_plan(turn: Turn, plan: Plan) -> Step:
    """Check the mail before the first call."""
    if is_interrupted(turn):
        withdrawals = _count_withdrawals(turn)
        # A person's message is new work: a long burst, taken in parts, must not use up the rounds of the turn.
        counters = SetCounters(withdrawals=withdrawals, rounds=turn.rounds + (withdrawals > 0))
        return Step((WithdrawPlan(plan, _interrupting_id(turn)), TakeMail(), counters), AskModel())
    if turn.rounds + 1 >= turn.rules.max_rounds:
        text = f"I stopped after {turn.rules.max_rounds} rounds without coming to an end. Shall I go on?"
        return _finish(turn, WithdrawPlan(plan), AppendText(text), SendReply(text))
    return _start_next(plan, OpenPlan(plan), SetCounters(withdrawals=turn.withdrawals, rounds=turn.rounds + 1))


def _interrupting_id(turn: Turn) -> str | None:
    """Id of the first message from a person, else of the first message."""
    messages = [message for message in turn.mail if not message.is_echo]
    return min(messages, key=lambda message: not message.is_from_person).id if messages else None


def _count_withdrawals(turn: Turn) -> int:
    """Plans in a row withdrawn by agents' messages, including the current one."""
    return 0 if any(message.is_from_person for message in turn.mail) else turn.withdrawals + 1


def _continue_plan(turn: Turn, change: SetCallState) -> Step:
    """A call has ended: close the plan, or check the mail before the next call."""
    assert turn.plan is not None  # noqa: S101 - a call ended, so there is a plan
    plan = turn.plan.with_state(change.index, change.state, change.result, change.attachments)
    if plan.next_index() is None:
        return _close(turn, plan, change)
    return _interrupt(turn, plan, change) if is_interrupted(turn) else _start_next(plan, change)


def _apply_changed_rules(turn: Turn, event: ToolRulesChanged) -> Step:
    """Check the started call again, under the current rules of its tool."""
    assert turn.plan is not None  # noqa: S101 - a call was to run, so there is a plan
    index = event.index
    if event.is_retry:
        # It may have run under the old rules. Neither running nor denying it now can undo that.
        return _continue_plan(turn, SetCallState(index, "unknown", UNKNOWN_RESULT))
    if is_interrupted(turn):
        return _interrupt(turn, turn.plan.with_state(index, "planned"))
    rules = SetCallRules(index, event.effect, event.needs_approval)
    if event.needs_approval and not turn.plan.calls[index].needs_approval:
        return _request_approval(index, rules, file=event.file)
    return Step((rules, SetState(state="tools")), RunCall(index))


def _request_approval(index: int, *before: Write, file: ArgumentsFile | None = None) -> Step:
    writes = SetCallState(index, "gated"), RequestApproval(index, file), SetState(state="wait_approval")
    return Step((*before, *writes), Rest())


def _start_next(plan: Plan, *before: Write) -> Step:
    index = plan.next_index()
    assert index is not None  # noqa: S101
    call = plan.calls[index]
    if call.needs_approval and call.fits_question:
        return _request_approval(index, *before)
    if call.state == "gated":  # the question was sent, with a file, when this state was set
        return Step((*before, SetState(state="wait_approval")), Rest())
    if call.needs_approval:
        # Only the runner can write the arguments to a file. It does that when it is to run the call, and then reports
        # `ToolRulesChanged`.
        before = (*before, SetCallRules(index, call.effect, needs_approval=False))
    return Step((*before, SetCallState(index, "started"), SetState(state="tools")), RunCall(index))


def _close(turn: Turn, plan: Plan, *before: Write, withdrawals: int = 0, interrupted_by: str | None = None) -> Step:
    """Append the whole group to the history, then the waiting mail, and ask the model."""
    counters = SetCounters(withdrawals=withdrawals, rounds=turn.rounds)
    group = AppendCallGroup(plan, interrupted_by)
    return Step((*before, group, *_take_mail(turn), counters, SetState(state="llm")), AskModel())


def _take_mail(turn: Turn) -> tuple[TakeMail, ...]:
    return (TakeMail(),) if turn.has_mail else ()


def _apply_approval(turn: Turn, approved: bool) -> Step:
    assert turn.plan is not None  # noqa: S101
    index = turn.plan.next_index()
    assert index is not None  # noqa: S101
    if is_interrupted(turn):
        return _interrupt(turn, turn.plan)
    if approved:
        return Step((SetCallState(index, "started"), SetState(state="tools")), RunCall(index))
    return _continue_plan(turn, SetCallState(index, "cancelled", DENIED_RESULT))


def _answer_back(turn: Turn, event: ModelAnswered | ModelFailed) -> Step:
    """Send the answer about a call, or the reason why there is none, and wait for the decision again. No call runs."""
    if isinstance(event, ModelFailed):
        text, reply = f"[no answer: {event.message}]", _error_reply(event.message, event.category, event.facts)
    else:
        text = event.text if event.text.strip() else "I have no answer to that. The call still waits for your decision."
        reply = SendReply(text, attachments=event.attachments, cut_off=event.cut_off)
    return Step((AppendText(text), replace(reply, asks_back=True), _await_approval(turn)), Rest())


def _await_approval(turn: Turn) -> SetState:
    """Wait for a decision. Mail that waits already is looked at by the next claim, at once."""
    return SetState(state="wait_approval", delay=timedelta(0) if turn.has_mail else None)


def _interrupt(turn: Turn, plan: Plan, *before: Write) -> Step:
    """Cancel all calls that have not run, because mail came."""
    closed = plan.close_remaining(INTERRUPTED_RESULT)
    has_run = any(call.state != "cancelled" for call in closed.calls)
    withdrawals = 0 if has_run else _count_withdrawals(turn)
    return _close(turn, closed, *before, withdrawals=withdrawals, interrupted_by=_interrupting_id(turn))


def _finish(turn: Turn, *last: Write) -> Step:
    """End the turn. The reply is written before waiting mail starts the next turn."""
    if turn.has_mail and not turn.hold and not turn.society_paused:
        return Step((*last, BeginNextTurn(), TakeMail(), SetState(state="llm")), AskModel())
    return Step((*last, SetState(state="paused" if turn.hold else "idle")), Rest())


def _resume(turn: Turn) -> Step:
    ask = Step((*_take_mail(turn), SetState(state="llm")), AskModel())
    if turn.plan is None:
        return ask
    index = turn.plan.started_index()
    if index is None:
        if is_interrupted(turn):
            return _interrupt(turn, turn.plan)
        if turn.answers_back or (turn.plan.awaiting_approval() and any(message.asks_back for message in turn.mail)):
            return ask
        return _start_next(turn.plan)
    started, has_interruption = turn.plan.calls[index], is_interrupted(turn)
    if has_interruption and started.call.name == SEND_MESSAGE_TOOL:
        # Its message is stored together with its result, so it was not sent.
        return _interrupt(turn, turn.plan.with_state(index, "planned"))
    if has_interruption or started.effect == "unsafe":
        # It may have happened. Running it again would be wrong: it is unsafe, or a message came meanwhile.
        return _continue_plan(turn, SetCallState(index, "unknown", UNKNOWN_RESULT))
    return Step((SetState(state="tools"),), RunCall(index, is_retry=True))


def _stop(turn: Turn, stopped: Stopped) -> Step:
    text = stopped.partial_text
    reply = SendReply(text, is_partial=True, attachments=stopped.attachments, asks_back=turn.answers_back)
    writes = (AppendText(text), reply) if text else ()
    # Without text and plan, an empty reply marks the stop for the person.
    return _finish(turn, *((*writes, *_close_plan(turn, STOPPED_RESULT)) or (reply,)))


def _close_plan(turn: Turn, result: str) -> tuple[AppendCallGroup, ...]:
    """Append the open plan, if there is one. Calls that did not run get `result`."""
    return (AppendCallGroup(turn.plan.close_remaining(result)),) if turn.plan else ()


def _drop_task(turn: Turn) -> Step:
    """Close the plan; the next worker asks the model again, without the messages of the stopped task.

    A paused agent does so when it is resumed: no step of it runs any more, and only the state `llm` would be claimed.
    """
    state = SetState(state="wait_retry" if turn.hold else "llm", delay=timedelta(0), is_suspended=True)
    return Step((*_close_plan(turn, STOPPED_RESULT), state), Rest())


def _abort(turn: Turn, reason: str) -> Step:
    closed, text = _close_plan(turn, INTERRUPTED_RESULT), AppendText(f"[turn aborted: {reason}]")
    return _finish(turn, *closed, text, Quarantine(), _error_reply(reason, "crash"))


def _terminate(turn: Turn) -> Step:
    """Close the open plan and send an error reply. Waiting mail is not taken."""
    reply = _error_reply("It was terminated before it could answer.", "terminated")
    return Step((*_close_plan(turn, STOPPED_RESULT), reply, SetState(state="terminated")), Rest())


def _fail(turn: Turn, failure: ModelFailed) -> Step:
    message, category, facts = failure.message, failure.category, failure.facts
    match failure.recovery:
        case "retry":
            wait = SetState(state="wait_retry", delay=failure.delay, reason=message, category=category, facts=facts)
            return Step((wait,), Rest())
        case "block":
            state = SetState(state="blocked", reason=message, category=category, facts=facts)
            return Step((_error_reply(message, category, facts), state), Rest())
        case "give_up":
            return _finish(turn, AppendText(f"[no answer: {message}]"), _error_reply(message, category, facts))


def _error_reply(message: str, category: str, facts: dict[str, Any] | None = None) -> SendReply:
    return SendReply(message, is_error=True, problem={"category": category, **(facts or {})})
