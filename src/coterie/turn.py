"""A turn as a pure function: `reduce(turn, event) -> Step`. No clock, no disk, no chance.

Together with `llm_handler.py`, which does what the effects say, this is the only place where anything is decided about
interruptions. The store calls `reduce` inside the transaction that writes its outcome, with the mail that waits at that
very moment. So a message is either seen by this decision or by the next one, and never lost between two.

How an interruption is handled, in the words of the requirements:

* The mail is looked at before every tool call (`Answered` with calls, `Ran`) and when the model has finished
  (`Answered` without calls), nowhere else.
* Before the first call has run, the plan is withdrawn: the assistant's message was never appended, so there is nothing
  to delete. A record of it stays, outside the prompt.
* After k >= 1 calls have run, their results must stay. So the message stays whole, and the calls that did not run are
  closed with a result that says so. Every provider accepts that, and the model knows what happened and what did not.
* All waiting mail is taken at once, in order, and the model is asked again.
* Agents that talk without pause could keep another from ever acting. After `max_withdrawals` plans in a row withdrawn
  by agents' messages, the next plan runs, and their mail follows it. A person's message always withdraws the plan.
* A plan is not interrupted by its own echo: what the agent sent itself, or an answer to what this plan just sent, waits
  until the plan is done.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from msgspec import Struct, json
from msgspec.structs import replace

from coterie.llm.types import Call, Usage

Effect = Literal["pure", "idempotent", "unsafe"]
CallState = Literal["planned", "gated", "started", "done", "failed", "cancelled", "unknown"]
OVER: frozenset[CallState] = frozenset({"done", "failed", "cancelled", "unknown"})

NOT_EXECUTED = '{"status":"cancelled","executed":false,"reason":"interrupted_by_new_message"}'
STOPPED = '{"status":"cancelled","executed":false,"reason":"stopped"}'
DENIED = '{"status":"denied","executed":false,"reason":"the person did not approve this call"}'
UNKNOWN = (
    '{"status":"unknown","reason":"the runtime stopped while this call ran: it may or may not have happened,'
    ' verify before repeating it"}'
)
MAX_SHOWN = 256 << 10
"""Bytes of arguments, as JSON, that a question about a call carries itself; longer ones are attached as a file."""


# What is known when something happens. Structs and not dataclasses, because a dozen are made at every step.


class Letter(Struct, frozen=True):
    """A message that waits for the agent."""

    id: str
    in_seq: int
    from_person: bool = False
    echo: bool = False
    """The agent sent it to itself, or it answers something that the running plan has sent."""


class PlannedCall(Struct, frozen=True, kw_only=True):
    call: Call
    effect: Effect = "unsafe"
    gated: bool = False
    """The person must approve it before it runs. A call that is gated and started was approved."""
    state: CallState = "planned"
    result: str = ""

    @property
    def fits_question(self) -> bool:
        """True if the question about it can carry all of its arguments."""
        return len(json.encode(self.call.arguments)) <= MAX_SHOWN


class ArgumentsFile(Struct, frozen=True):
    """An artifact that holds the whole arguments of a call as JSON."""

    artifact_ref: str
    filename: str
    mime_type: str
    size: int
    sha256: str


class Plan(Struct, frozen=True, kw_only=True):
    """An assistant's message whose calls are being run; history gets it when they all have a result."""

    text: str
    calls: tuple[PlannedCall, ...]

    def having(self, index: int, state: CallState, result: str = "") -> Plan:
        changed = replace(self.calls[index], state=state, result=result or self.calls[index].result)
        return replace(self, calls=(*self.calls[:index], changed, *self.calls[index + 1 :]))

    def reclassified(self, index: int, effect: Effect, gated: bool) -> Plan:
        changed = replace(self.calls[index], effect=effect, gated=gated)
        return replace(self, calls=(*self.calls[:index], changed, *self.calls[index + 1 :]))

    def closed(self, result: str) -> Plan:
        """Calls that have not ended get `result`: they were not executed."""
        ended = [
            one if one.state in OVER else replace(one, state="cancelled" if one.state != "started" else "unknown",
                                                  result=result if one.state != "started" else UNKNOWN)
            for one in self.calls
        ]  # fmt: skip
        return replace(self, calls=tuple(ended))

    def next(self) -> int | None:
        return next((index for index, one in enumerate(self.calls) if one.state in ("planned", "gated")), None)

    def has_done(self, name: str) -> bool:
        return any(one.call.name == name and one.state == "done" for one in self.calls)

    def awaited(self) -> str:
        """The id of the call that waits for the person's word; empty if none does."""
        return next((one.call.id for one in self.calls if one.state == "gated"), "")

    def started(self) -> int | None:
        return next((index for index, one in enumerate(self.calls) if one.state == "started"), None)


class Rules(Struct, frozen=True, kw_only=True):
    max_withdrawals: int = 3
    """0: no limit."""
    max_rounds: int = 50


class Turn(Struct, frozen=True, kw_only=True):
    mail: tuple[Letter, ...] = ()
    plan: Plan | None = None
    withdrawals: int = 0
    """Plans in a row that agents' messages withdrew."""
    rounds: int = 0
    """Answers of the model in this turn."""
    rules: Rules = Rules()
    hold: bool = False
    """The person wants the agent to rest when this turn is over, whatever waits."""
    society_paused: bool = False
    """The person has paused the whole society: no model call and no tool begins, not even in this turn."""


# What can happen


class Answered(Struct, frozen=True, kw_only=True):
    """The model spoke."""

    text: str
    calls: tuple[PlannedCall, ...] = ()
    usage: Usage = Usage()
    service: str = ""
    attachments: tuple[dict[str, Any], ...] = ()
    """Files that go with the text to whoever asked."""


class Ran(Struct, frozen=True, kw_only=True):
    """A call has ended."""

    index: int
    ok: bool
    result: str
    unknown: bool = False
    """It began, and its outcome was not learned: it may or may not have happened."""


class ToolChanged(Struct, frozen=True, kw_only=True):
    """A call was about to run and its tool has stricter rules now than when the call was planned. It did not run."""

    index: int
    effect: Effect
    gated: bool
    again: bool = False
    """An earlier owner of the turn had started the call: it may have run then."""
    file: ArgumentsFile | None = None
    """All of the arguments, when they are too long for the question itself."""


class Resumed(Struct, frozen=True):
    """Somebody else worked on this turn and is gone, or a wait is over."""


class Judged(Struct, frozen=True):
    """The person decided on the gated call."""

    approved: bool


class Stopped(Struct, frozen=True):
    """A person, or a parent, wants the turn to end now."""

    said_so_far: str = ""
    usage: Usage = Usage()
    """What the request that was cut off may have cost."""
    service: str = ""
    attachments: tuple[dict[str, Any], ...] = ()


class ModelFailed(Struct, frozen=True, kw_only=True):
    """No answer: to be tried again after a while, to wait for somebody who mends it, or not to be had at all."""

    words: str
    then: Literal["retry", "block", "give_up"]
    after: timedelta = timedelta(0)
    category: str = "server"
    """What kind of trouble it is, for programs."""
    usage: Usage = Usage()
    """What the request may have cost though no answer came of it; nothing if it was refused or never sent."""
    service: str = ""


class Poisoned(Struct, frozen=True):
    """Working on this turn has killed the runtime again and again."""

    words: str


class Dismissed(Struct, frozen=True):
    """The agent is terminated in the middle of this turn."""


class Deferred(Struct, frozen=True):
    """The model was not asked, because the society was paused first."""


Event = Answered | Ran | ToolChanged | Resumed | Judged | Stopped | ModelFailed | Poisoned | Dismissed | Deferred


# What follows


class NextTurn(Struct, frozen=True):
    """What follows belongs to other askers: rounds and withdrawals begin at nought."""


class TakeMail(Struct, frozen=True):
    """All waiting mail becomes part of the history, in order."""


class Say(Struct, frozen=True):
    """The assistant's text becomes part of the history."""

    text: str


class CloseGroup(Struct, frozen=True):
    """The assistant's message with its calls and all their results becomes part of the history, as one piece."""

    plan: Plan
    by: str | None = None
    """The message that cut it short."""


class OpenPlan(Struct, frozen=True):
    plan: Plan


class Change(Struct, frozen=True):
    """A call of the open plan."""

    index: int
    state: CallState
    result: str = ""


class Reclassify(Struct, frozen=True):
    """A call of the open plan gets the rules that its tool has now."""

    index: int
    effect: Effect
    gated: bool


class DropPlan(Struct, frozen=True):
    """A plan that never began is kept as a record, outside the prompt."""

    plan: Plan
    by: str | None = None
    """The message that withdrew it."""


class Reply(Struct, frozen=True):
    """The text goes to whoever asked."""

    text: str
    stopped: bool = False
    trouble: bool = False
    """It tells of a failure, and comes from the runtime."""
    attachments: tuple[dict[str, Any], ...] = ()


class AskApproval(Struct, frozen=True):
    """The person is asked whether this call may run. Asking twice is asking once."""

    index: int
    file: ArgumentsFile | None = None


class Quarantine(Struct, frozen=True):
    """What was said in this turn is shown to people, but no more to the model."""


class Become(Struct, frozen=True, kw_only=True):
    state: Literal["idle", "paused", "llm", "tools", "wait_approval", "wait_retry", "blocked", "terminated"]
    after: timedelta | None = None
    why: str = ""
    category: str = ""
    suspended: bool = False
    """Nobody works on the turn until the society is resumed; then it goes on with its next step."""


class Count(Struct, frozen=True, kw_only=True):
    withdrawals: int
    rounds: int


Write = (
    NextTurn
    | TakeMail
    | Say
    | CloseGroup
    | OpenPlan
    | Change
    | Reclassify
    | DropPlan
    | Reply
    | AskApproval
    | Quarantine
    | Become
    | Count
)


class Ask(Struct, frozen=True):
    """Ask the model."""


class Run(Struct, frozen=True):
    """Run this call of the plan."""

    index: int
    again: bool = False
    """An earlier owner of the turn had started it."""


class Rest(Struct, frozen=True):
    """Nothing more to do for now."""


class Step(Struct, frozen=True):
    writes: tuple[Write, ...]
    effect: Ask | Run | Rest


def reduce(turn: Turn, event: Event) -> Step:
    step = _decide(turn, event)
    if turn.society_paused and not isinstance(step.effect, Rest):
        return _suspend(step)
    return step


def _suspend(step: Step) -> Step:
    """The same decision without its effect: what is written stays, and the call that was to start stays planned."""
    state: Literal["tools", "llm"] = "tools" if isinstance(step.effect, Run) else "llm"
    kept = [
        write for write in step.writes
        if not isinstance(write, Become) and not (isinstance(write, Change) and write.state == "started")
    ]  # fmt: skip
    return Step((*kept, Become(state=state, after=timedelta(0), suspended=True)), Rest())


def _decide(turn: Turn, event: Event) -> Step:
    match event:
        case Answered(calls=()):
            return _finish(turn, Say(event.text), Reply(event.text, attachments=event.attachments))
        case Answered():
            return _begin_plan(turn, Plan(text=event.text, calls=event.calls))
        case Ran(index=index):
            return _go_on(turn, Change(index, _ended(event), event.result))
        case ToolChanged():
            return _changed(turn, event)
        case Judged(approved=approved):
            return _judged(turn, approved)
        case Resumed():
            return _resume(turn)
        case Deferred():
            return Step((Become(state="llm"),), Ask())
        case Stopped():
            return _stop(turn, event)
        case Poisoned(words=words):
            return _abort(turn, words)
        case ModelFailed():
            return _failed(turn, event)
        case Dismissed():
            return _dismiss(turn)


def interrupts(turn: Turn) -> bool:
    """Whether the waiting mail withdraws the plan."""
    speech = [letter for letter in turn.mail if not letter.echo]
    if any(letter.from_person for letter in speech):
        return True
    patience = turn.rules.max_withdrawals
    return bool(speech) and not (patience and turn.withdrawals >= patience)


def _begin_plan(turn: Turn, plan: Plan) -> Step:
    """T3 with calls: the check before the first of them."""
    if interrupts(turn):
        count = Count(withdrawals=_withdrawals(turn), rounds=turn.rounds + 1)
        return Step((DropPlan(plan, _speaker(turn)), TakeMail(), count), Ask())
    if turn.rounds + 1 >= turn.rules.max_rounds:
        words = f"I stopped after {turn.rules.max_rounds} rounds without coming to an end. Shall I go on?"
        return _finish(turn, DropPlan(plan), Say(words), Reply(words))
    return _start_next(plan, OpenPlan(plan), Count(withdrawals=turn.withdrawals, rounds=turn.rounds + 1))


def _speaker(turn: Turn) -> str | None:
    """The message that interrupts: a person's, if there is one."""
    speech = [letter for letter in turn.mail if not letter.echo]
    return next((letter.id for letter in speech if letter.from_person), speech[0].id if speech else None)


def _withdrawals(turn: Turn) -> int:
    """How many plans in a row agents' messages have withdrawn, with the one that is withdrawn now."""
    return 0 if any(letter.from_person for letter in turn.mail) else turn.withdrawals + 1


def _go_on(turn: Turn, change: Change) -> Step:
    """T5, and with more calls to come T4: the check before the next of them."""
    assert turn.plan is not None  # noqa: S101 - a call ran, so there is a plan
    plan = turn.plan.having(change.index, change.state, change.result)
    if plan.next() is None:
        return _close(turn, plan, change)
    if interrupts(turn):
        return _close(turn, plan.closed(NOT_EXECUTED), change, by=_speaker(turn))
    return _start_next(plan, change)


def _ended(ran: Ran) -> CallState:
    if ran.unknown:
        return "unknown"
    return "done" if ran.ok else "failed"


def _changed(turn: Turn, event: ToolChanged) -> Step:
    """T4 once more: the call was marked as started under rules that do not hold any more."""
    assert turn.plan is not None  # noqa: S101 - a call was to run, so there is a plan
    index = event.index
    if event.again:
        # It may have run under the old rules. Running or denying it now could not undo that, so the model is told.
        return _go_on(turn, Change(index, "unknown", UNKNOWN))
    if interrupts(turn):
        return _void(turn, turn.plan.having(index, "planned"))
    rules = Reclassify(index, event.effect, event.gated)
    if event.gated and not turn.plan.calls[index].gated:
        return _ask(index, rules, file=event.file)
    return Step((rules, Become(state="tools")), Run(index))


def _ask(index: int, *before: Write, file: ArgumentsFile | None = None) -> Step:
    return Step((*before, Change(index, "gated"), AskApproval(index, file), Become(state="wait_approval")), Rest())


def _start_next(plan: Plan, *before: Write) -> Step:
    index = plan.next()
    assert index is not None  # noqa: S101
    call = plan.calls[index]
    if call.gated and call.fits_question:
        return _ask(index, *before)
    if call.state == "gated":  # the question was sent, with a file, when the call got this state
        return Step((*before, Become(state="wait_approval")), Rest())
    if call.gated:
        # Only the handler can put the arguments into a file. It does so when it is to run the call, and reports
        # `ToolChanged`.
        before = (*before, Reclassify(index, call.effect, gated=False))
    return Step((*before, Change(index, "started"), Become(state="tools")), Run(index))


def _close(turn: Turn, plan: Plan, *before: Write, withdrawals: int = 0, by: str | None = None) -> Step:
    """The group goes into the history whole; mail that came meanwhile stands right behind it."""
    mail = (TakeMail(),) if turn.mail else ()
    count = Count(withdrawals=withdrawals, rounds=turn.rounds)
    return Step((*before, CloseGroup(plan, by), *mail, count, Become(state="llm")), Ask())


def _judged(turn: Turn, approved: bool) -> Step:
    assert turn.plan is not None  # noqa: S101
    index = turn.plan.next()
    assert index is not None  # noqa: S101
    if interrupts(turn):
        return _void(turn, turn.plan)
    if approved:
        return Step((Change(index, "started"), Become(state="tools")), Run(index))
    return _go_on(turn, Change(index, "cancelled", DENIED))


def _void(turn: Turn, plan: Plan) -> Step:
    """Somebody spoke while a call waited for the person's word: what has not run does not run any more."""
    closed = plan.closed(NOT_EXECUTED)
    acted = any(one.state != "cancelled" for one in closed.calls)
    return _close(turn, closed, withdrawals=0 if acted else _withdrawals(turn), by=_speaker(turn))


def _finish(turn: Turn, *last: Write) -> Step:
    """The turn is over. Whoever asked has the answer before the mail that came meanwhile begins the next."""
    if turn.mail and not turn.hold and not turn.society_paused:
        return Step((*last, NextTurn(), TakeMail(), Become(state="llm")), Ask())
    return Step((*last, Become(state="paused" if turn.hold else "idle")), Rest())


def _resume(turn: Turn) -> Step:
    if turn.plan is None:
        mail = (TakeMail(),) if turn.mail else ()
        return Step((*mail, Become(state="llm")), Ask())
    index = turn.plan.started()
    if index is None:
        # It waits for the person's word on a call; anything else that is said meanwhile withdraws what is left.
        return _void(turn, turn.plan) if interrupts(turn) else _start_next(turn.plan)
    if turn.plan.calls[index].effect == "unsafe":
        # It may have happened. Running it again could make it happen twice, so the model is told, and decides.
        return _go_on(turn, Change(index, "unknown", UNKNOWN))
    return Step((Become(state="tools"),), Run(index, again=True))


def _stop(turn: Turn, stopped: Stopped) -> Step:
    if turn.plan is not None:
        return _finish(turn, CloseGroup(turn.plan.closed(STOPPED)))
    if text := stopped.said_so_far:
        return _finish(turn, Say(text), Reply(text, stopped=True, attachments=stopped.attachments))
    return _finish(turn)


def _abort(turn: Turn, words: str) -> Step:
    group = (CloseGroup(turn.plan.closed(NOT_EXECUTED)),) if turn.plan else ()
    return _finish(turn, *group, Say(f"[turn aborted: {words}]"), Quarantine(), Reply(words, trouble=True))


def _dismiss(turn: Turn) -> Step:
    """Nobody will go on here: what is open is closed, and whoever asked is told. Mail that waits is not taken."""
    group = (CloseGroup(turn.plan.closed(STOPPED)),) if turn.plan else ()
    told = Reply("It was terminated before it could answer.", trouble=True)
    return Step((*group, told, Become(state="terminated")), Rest())


def _failed(turn: Turn, failure: ModelFailed) -> Step:
    words, kind = failure.words, failure.category
    match failure.then:
        case "retry":
            return Step((Become(state="wait_retry", after=failure.after, why=words, category=kind),), Rest())
        case "block":
            told = Reply(words, trouble=True)
            return Step((told, Become(state="blocked", why=words, category=kind)), Rest())
        case "give_up":
            return _finish(turn, Say(f"[no answer: {words}]"), Reply(words, trouble=True))
