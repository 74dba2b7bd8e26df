"""The turn as a pure function: every rule about interruptions, approvals, failures and recovery."""

from __future__ import annotations

import ast
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coterie import turn as turn_module
from coterie.llm.types import ToolCall
from coterie.turn import (
    DENIED_RESULT,
    ENDED_STATES,
    INTERRUPTED_RESULT,
    MAX_QUESTION_ARGUMENT_BYTES,
    STOPPED_RESULT,
    UNKNOWN_RESULT,
    AppendCallGroup,
    AppendText,
    ApprovalDecided,
    ArgumentsFile,
    AskModel,
    BeginNextTurn,
    CallEnded,
    Effect,
    Event,
    ModelAnswered,
    ModelFailed,
    OpenPlan,
    Plan,
    PlannedCall,
    Poisoned,
    Quarantine,
    RequestApproval,
    Rest,
    Resumed,
    Rules,
    RunCall,
    SendReply,
    SetCallRules,
    SetCallState,
    SetCounters,
    SetState,
    Step,
    Stopped,
    TakeMail,
    Terminated,
    ToolRulesChanged,
    Turn,
    WaitingMessage,
    WithdrawPlan,
    Write,
    reduce,
)

W = TypeVar("W", bound=Write)

FROM_AGENT = WaitingMessage(id="a", position=1)
FROM_PERSON = WaitingMessage(id="p", position=2, is_from_person=True)
ECHO = WaitingMessage(id="e", position=3, is_echo=True)


def call(name: str = "look", **changed: Any) -> PlannedCall:
    return PlannedCall(**{"call": ToolCall(id=f"id-{name}", name=name, arguments={})} | changed)


def plan(*calls: PlannedCall) -> Plan:
    return Plan(text="let me see", calls=calls)


def answered(*calls: PlannedCall) -> ModelAnswered:
    return ModelAnswered(text="let me see", calls=calls)


def only(step: Step, kind: type[W]) -> W:
    (found,) = [write for write in step.writes if isinstance(write, kind)]
    return found


def has(step: Step, kind: type[Write]) -> bool:
    return any(isinstance(write, kind) for write in step.writes)


def results(closed: Plan) -> list[tuple[str, str]]:
    return [(one.state, one.result) for one in closed.calls]


DONE = call("first", state="done", result="one")
RUNNING = call("second", state="started")
PLANNED = call("third")


# The model has spoken


def test_a_text_with_nobody_waiting_is_said_and_sent_and_ends_the_turn() -> None:
    step = reduce(Turn(), ModelAnswered(text="42"))
    assert step == Step((AppendText("42"), SendReply("42"), SetState(state="idle")), Rest())


def test_a_text_goes_to_its_askers_before_the_mail_that_came_meanwhile_begins_the_next_turn() -> None:
    step = reduce(Turn(mail=(FROM_AGENT, FROM_PERSON)), ModelAnswered(text="42"))
    assert step == Step(
        (AppendText("42"), SendReply("42"), BeginNextTurn(), TakeMail(), SetState(state="llm")), AskModel()
    )


def test_even_an_echo_is_read_before_the_agent_rests() -> None:
    assert reduce(Turn(mail=(ECHO,)), ModelAnswered(text="42")).action == AskModel()


def test_a_plan_nobody_objects_to_begins_with_its_first_call() -> None:
    step = reduce(Turn(rounds=2), answered(call("a"), call("b")))
    assert step.action == RunCall(0)
    assert only(step, OpenPlan).plan == plan(call("a"), call("b"))
    assert only(step, SetCallState) == SetCallState(0, "started")
    assert only(step, SetCounters) == SetCounters(withdrawals=0, rounds=3)
    assert only(step, SetState).state == "tools"


def test_before_the_first_call_a_message_withdraws_the_whole_plan_and_the_model_is_asked_again() -> None:
    step = reduce(Turn(mail=(FROM_AGENT,)), answered(call()))
    assert step == Step(
        (WithdrawPlan(plan(call()), interrupted_by=FROM_AGENT.id), TakeMail(), SetCounters(withdrawals=1, rounds=1)),
        AskModel(),
    )


def test_a_withdrawn_plan_is_a_record_and_never_said() -> None:
    step = reduce(Turn(mail=(FROM_PERSON,)), answered(call()))
    assert has(step, WithdrawPlan)
    assert not has(step, AppendText) and not has(step, AppendCallGroup) and not has(step, OpenPlan)


def test_several_messages_are_taken_at_once() -> None:
    step = reduce(Turn(mail=(FROM_AGENT, FROM_PERSON, ECHO)), answered(call()))
    assert [write for write in step.writes if isinstance(write, TakeMail)] == [TakeMail()]


# A call has run


def test_after_a_call_the_next_begins() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED)), CallEnded(index=1, ok=True, result="two"))
    assert step == Step(
        (SetCallState(1, "done", "two"), SetCallState(2, "started"), SetState(state="tools")), RunCall(2)
    )


def test_after_the_last_call_the_group_is_closed_whole_and_the_model_is_asked() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING)), CallEnded(index=1, ok=False, result="broken"))
    assert results(only(step, AppendCallGroup).plan) == [("done", "one"), ("failed", "broken")]
    assert (step.action, only(step, SetState).state, has(step, TakeMail)) == (AskModel(), "llm", False)


def test_after_a_call_has_run_a_message_closes_the_others_as_not_executed_and_keeps_the_result() -> None:
    step = reduce(
        Turn(plan=plan(RUNNING, PLANNED, PLANNED), mail=(FROM_PERSON,)), CallEnded(index=0, ok=True, result="one")
    )
    assert results(only(step, AppendCallGroup).plan) == [
        ("done", "one"),
        ("cancelled", INTERRUPTED_RESULT),
        ("cancelled", INTERRUPTED_RESULT),
    ]
    kinds = [type(write) for write in step.writes]
    assert kinds.index(AppendCallGroup) < kinds.index(TakeMail)
    assert step.action == AskModel() and not has(step, WithdrawPlan)


def test_mail_that_came_during_the_last_call_stands_behind_its_group() -> None:
    step = reduce(Turn(plan=plan(RUNNING), mail=(FROM_AGENT,)), CallEnded(index=0, ok=True, result="one"))
    kinds = [type(write) for write in step.writes]
    assert kinds.index(AppendCallGroup) < kinds.index(TakeMail)
    assert results(only(step, AppendCallGroup).plan) == [("done", "one")]


# Who interrupts


def test_a_plan_is_not_interrupted_by_its_own_echo() -> None:
    assert reduce(Turn(mail=(ECHO,)), answered(call())).action == RunCall(0)
    step = reduce(Turn(plan=plan(RUNNING, PLANNED), mail=(ECHO,)), CallEnded(index=0, ok=True, result="one"))
    assert step.action == RunCall(1) and not has(step, TakeMail)


def test_an_echo_is_taken_with_whatever_does_interrupt() -> None:
    step = reduce(Turn(mail=(ECHO, FROM_AGENT)), answered(call()))
    assert has(step, WithdrawPlan) and has(step, TakeMail)


def test_after_so_many_withdrawn_plans_the_next_runs_whatever_agents_say() -> None:
    rules = Rules(max_withdrawals=3)
    assert has(reduce(Turn(mail=(FROM_AGENT,), withdrawals=2, rules=rules), answered(call())), WithdrawPlan)
    patient = Turn(mail=(FROM_AGENT,), withdrawals=3, rules=rules)
    step = reduce(patient, answered(call(), call()))
    assert step.action == RunCall(0) and not has(step, TakeMail)
    assert only(step, SetCounters).withdrawals == 3  # so that the plan's later calls run as well
    going_on = replace(patient, plan=plan(RUNNING, PLANNED))
    assert reduce(going_on, CallEnded(index=0, ok=True, result="")).action == RunCall(1)


def test_when_the_plan_that_had_to_run_is_done_the_mail_follows_and_counting_begins_anew() -> None:
    step = reduce(Turn(mail=(FROM_AGENT,), withdrawals=3, plan=plan(RUNNING)), CallEnded(index=0, ok=True, result=""))
    assert has(step, TakeMail)
    assert only(step, SetCounters).withdrawals == 0


def test_without_a_limit_agents_can_interrupt_for_ever() -> None:
    turn = Turn(mail=(FROM_AGENT,), withdrawals=99, rules=Rules(max_withdrawals=0))
    assert has(reduce(turn, answered(call())), WithdrawPlan)


def test_a_person_always_withdraws_the_plan_and_is_not_counted() -> None:
    step = reduce(Turn(mail=(FROM_AGENT, FROM_PERSON), withdrawals=3), answered(call()))
    assert has(step, WithdrawPlan)
    assert only(step, SetCounters).withdrawals == 0


def test_rounds_without_an_end_are_ended_with_a_question_to_whoever_asked() -> None:
    step = reduce(Turn(rounds=4, rules=Rules(max_rounds=5)), answered(call()))
    assert has(step, WithdrawPlan) and not has(step, OpenPlan)
    assert "5 rounds" in only(step, SendReply).text and only(step, AppendText).text == only(step, SendReply).text
    assert only(step, SetState).state == "idle"
    assert reduce(Turn(rounds=3, rules=Rules(max_rounds=5)), answered(call())).action == RunCall(0)


# Approval


GATED = call("pay", needs_approval=True, state="gated")


def test_a_gated_call_waits_for_the_person_and_nobody_works_meanwhile() -> None:
    step = reduce(Turn(), answered(call("pay", needs_approval=True)))
    assert [write for write in step.writes if isinstance(write, SetCallState)] == [SetCallState(0, "gated")]
    assert only(step, RequestApproval) == RequestApproval(0)
    assert (only(step, SetState).state, step.action) == ("wait_approval", Rest())


def test_an_approved_call_runs() -> None:
    step = reduce(Turn(plan=plan(DONE, GATED)), ApprovalDecided(True))
    assert step == Step((SetCallState(1, "started"), SetState(state="tools")), RunCall(1))


def test_a_denied_call_does_not_run_and_the_plan_goes_on() -> None:
    step = reduce(Turn(plan=plan(GATED, PLANNED)), ApprovalDecided(False))
    assert step.writes[0] == SetCallState(0, "cancelled", DENIED_RESULT)
    assert step.action == RunCall(1)
    last = reduce(Turn(plan=plan(DONE, GATED)), ApprovalDecided(False))
    assert results(only(last, AppendCallGroup).plan) == [("done", "one"), ("cancelled", DENIED_RESULT)]


@pytest.mark.parametrize("event", [Resumed(), ApprovalDecided(True), ApprovalDecided(False)])
def test_another_message_makes_the_question_void(event: Event) -> None:
    step = reduce(Turn(plan=plan(DONE, GATED, PLANNED), mail=(FROM_PERSON,)), event)
    assert results(only(step, AppendCallGroup).plan)[1:] == [("cancelled", INTERRUPTED_RESULT)] * 2
    assert step.action == AskModel() and has(step, TakeMail)


def test_the_word_itself_is_no_interruption() -> None:
    verdict = replace(FROM_PERSON, is_echo=True)
    assert reduce(Turn(plan=plan(GATED), mail=(verdict,)), ApprovalDecided(True)).action == RunCall(0)


def test_a_stream_of_agent_messages_cannot_prevent_an_approval() -> None:
    step = reduce(Turn(plan=plan(GATED), mail=(FROM_AGENT,), withdrawals=1), Resumed())
    assert only(step, SetCounters).withdrawals == 2
    patient = reduce(Turn(plan=plan(GATED), mail=(FROM_AGENT,), withdrawals=3), Resumed())
    assert (only(patient, SetState).state, patient.action) == ("wait_approval", Rest())


def test_a_question_made_void_after_a_call_has_run_is_progress() -> None:
    step = reduce(Turn(plan=plan(DONE, GATED), mail=(FROM_AGENT,), withdrawals=2), Resumed())
    assert only(step, SetCounters).withdrawals == 0


def test_woken_for_nothing_it_asks_the_same_question_and_goes_on_waiting() -> None:
    step = reduce(Turn(plan=plan(GATED)), Resumed())
    assert only(step, RequestApproval) == RequestApproval(0)
    assert (only(step, SetState).state, step.action) == ("wait_approval", Rest())


# Stop


def test_stopped_in_the_middle_of_a_plan_the_rest_does_not_run_and_what_ran_is_unknown() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED)), Stopped())
    assert results(only(step, AppendCallGroup).plan) == [
        ("done", "one"),
        ("unknown", UNKNOWN_RESULT),
        ("cancelled", STOPPED_RESULT),
    ]
    assert (only(step, SetState).state, step.action) == ("idle", Rest())


def test_stopped_while_the_model_speaks_what_it_said_is_kept_and_marked() -> None:
    step = reduce(Turn(), Stopped("The answer is"))
    assert step == Step(
        (AppendText("The answer is"), SendReply("The answer is", is_partial=True), SetState(state="idle")), Rest()
    )


def test_stopped_before_the_model_said_anything_the_turn_just_ends() -> None:
    assert reduce(Turn(), Stopped()) == Step((SetState(state="idle"),), Rest())


def test_mail_that_waits_begins_the_next_turn_at_once_after_a_stop() -> None:
    for turn in (Turn(mail=(FROM_AGENT,)), Turn(mail=(FROM_AGENT,), plan=plan(RUNNING))):
        step = reduce(turn, Stopped())
        assert has(step, BeginNextTurn) and has(step, TakeMail) and step.action == AskModel()


# The model fails


def test_a_failure_that_may_pass_is_waited_out_with_the_mail_left_where_it_is() -> None:
    step = reduce(Turn(mail=(FROM_PERSON,)), ModelFailed(message="busy", recovery="retry", delay=timedelta(seconds=3)))
    assert step == Step(
        (SetState(state="wait_retry", delay=timedelta(seconds=3), reason="busy", category="server"),), Rest()
    )


def test_a_failure_that_somebody_must_mend_blocks_the_agent_and_is_told_to_whoever_asked() -> None:
    step = reduce(Turn(), ModelFailed(message="no key", recovery="block"))
    assert step == Step(
        (SendReply("no key", is_error=True), SetState(state="blocked", reason="no key", category="server")), Rest()
    )


def test_an_answer_that_is_not_to_be_had_ends_the_turn_in_words() -> None:
    step = reduce(Turn(mail=(FROM_AGENT,)), ModelFailed(message="refused", recovery="give_up"))
    assert only(step, SendReply) == SendReply("refused", is_error=True)
    assert "refused" in only(step, AppendText).text
    assert has(step, BeginNextTurn) and step.action == AskModel()


# Recovery


def test_a_turn_found_without_a_plan_takes_its_mail_and_asks_the_model() -> None:
    assert reduce(Turn(), Resumed()) == Step((SetState(state="llm"),), AskModel())
    assert reduce(Turn(mail=(FROM_AGENT,)), Resumed()) == Step((TakeMail(), SetState(state="llm")), AskModel())


@pytest.mark.parametrize("effect", ["pure", "idempotent"])
def test_a_call_that_may_run_twice_is_run_again(effect: Effect) -> None:
    found = Turn(plan=plan(DONE, replace(RUNNING, effect=effect), PLANNED))
    assert reduce(found, Resumed()) == Step((SetState(state="tools"),), RunCall(1, is_retry=True))


def test_an_unsafe_call_found_running_is_never_run_again_and_the_model_is_told() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED)), Resumed())
    assert step.writes[0] == SetCallState(1, "unknown", UNKNOWN_RESULT)
    assert step.action == RunCall(2)
    last = reduce(Turn(plan=plan(DONE, RUNNING)), Resumed())
    assert results(only(last, AppendCallGroup).plan) == [("done", "one"), ("unknown", UNKNOWN_RESULT)]


def test_a_message_found_on_recovery_stops_what_has_not_run() -> None:
    step = reduce(Turn(plan=plan(RUNNING, PLANNED), mail=(FROM_PERSON,)), Resumed())
    assert results(only(step, AppendCallGroup).plan) == [("unknown", UNKNOWN_RESULT), ("cancelled", INTERRUPTED_RESULT)]


def test_a_turn_that_kills_the_runtime_is_set_aside_and_whoever_asked_is_told() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED)), Poisoned("three crashes"))
    assert [state for state, _ in results(only(step, AppendCallGroup).plan)] == ["done", "unknown", "cancelled"]
    assert only(step, AppendText).text == "[turn aborted: three crashes]"
    assert has(step, Quarantine)
    assert only(step, SendReply) == SendReply("three crashes", is_error=True)
    assert (only(step, SetState).state, step.action) == ("idle", Rest())


def test_a_terminated_agent_leaves_no_open_group_takes_no_mail_and_its_askers_are_told() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED), mail=(FROM_PERSON,)), Terminated())
    assert [state for state, _ in results(only(step, AppendCallGroup).plan)] == ["done", "unknown", "cancelled"]
    assert only(step, SendReply).is_error and not has(step, TakeMail)
    assert (only(step, SetState).state, step.action) == ("terminated", Rest())


# The tool's rules changed before the call ran

LONG = ToolCall(id="id-long", name="long", arguments={"text": "x" * MAX_QUESTION_ARGUMENT_BYTES})
FILE = ArgumentsFile("ref", "long-arguments.json", "text/plain", MAX_QUESTION_ARGUMENT_BYTES, "00")


def changed(**rules: Any) -> ToolRulesChanged:
    known: dict[str, Any] = {"index": 1, "effect": "unsafe", "needs_approval": False}
    return ToolRulesChanged(**known | rules)


def test_a_call_whose_tool_came_under_approval_waits_for_the_person() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED)), changed(needs_approval=True))
    assert only(step, SetCallRules) == SetCallRules(1, "unsafe", needs_approval=True)
    assert (only(step, SetCallState), only(step, RequestApproval)) == (SetCallState(1, "gated"), RequestApproval(1))
    assert (only(step, SetState).state, step.action) == ("wait_approval", Rest())


def test_a_call_that_the_person_approved_is_not_asked_about_again_when_its_effect_changes() -> None:
    approved = call("second", state="started", needs_approval=True, effect="pure")
    step = reduce(Turn(plan=plan(DONE, approved)), changed(needs_approval=True))
    assert step == Step((SetCallRules(1, "unsafe", needs_approval=True), SetState(state="tools")), RunCall(1))


def test_a_call_that_may_have_run_under_the_old_rules_is_unknown_and_not_run_or_asked_about() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING)), changed(needs_approval=True, is_retry=True))
    assert results(only(step, AppendCallGroup).plan)[1] == ("unknown", UNKNOWN_RESULT)
    assert step.action == AskModel()


def test_a_message_that_came_meanwhile_cancels_the_call_that_did_not_run() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED), mail=(FROM_PERSON,)), changed(needs_approval=True))
    assert results(only(step, AppendCallGroup).plan)[1:] == [("cancelled", INTERRUPTED_RESULT)] * 2
    assert has(step, TakeMail) and step.action == AskModel()


def test_arguments_too_long_for_a_question_go_to_the_handler_first_and_come_back_as_a_file() -> None:
    long = PlannedCall(call=LONG, needs_approval=True)
    step = reduce(Turn(), answered(long))
    assert only(step, SetCallRules) == SetCallRules(0, "unsafe", needs_approval=False)
    assert step.action == RunCall(0) and not has(step, RequestApproval)
    started = replace(long, needs_approval=False, state="started")
    asked = reduce(Turn(plan=plan(started)), changed(index=0, needs_approval=True, file=FILE))
    assert only(asked, RequestApproval) == RequestApproval(0, FILE)
    woken = reduce(Turn(plan=plan(replace(long, state="gated"))), Resumed())
    assert woken == Step((SetState(state="wait_approval"),), Rest())


def test_a_call_whose_outcome_was_not_learned_is_unknown() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING)), CallEnded(index=1, ok=False, result="late", is_outcome_unknown=True))
    assert results(only(step, AppendCallGroup).plan)[1] == ("unknown", "late")


# Where it is decided


def test_only_the_reducer_decides_on_interruptions_and_it_says_how() -> None:
    deciding = {"is_interrupted", "WithdrawPlan", "AppendCallGroup", "TakeMail", "OpenPlan"}
    package = Path(turn_module.__file__).parent
    deciders = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in deciding
    }
    assert deciders == {"turn.py"}
    explained = turn_module.__doc__ or ""
    assert all(word in explained for word in ("interruption", "withdrawn", "in order", "echo", "person", "tool call"))


# Whatever happens, in any order


calls = st.builds(
    call,
    st.sampled_from(["look", "fire", "pay"]),
    effect=st.sampled_from(get_args(Effect)),
    needs_approval=st.booleans(),
)
letters = st.lists(
    st.builds(
        WaitingMessage, id=st.just("m"), position=st.just(1), is_from_person=st.booleans(), is_echo=st.booleans()
    ),
    max_size=3,
).map(tuple)

recoveries: st.SearchStrategy[Event] = st.sampled_from((Resumed(), Resumed(), Poisoned("crashes")))
endings: st.SearchStrategy[Event] = st.sampled_from((Stopped(), Poisoned("crashes"), Terminated()))


class Driven:
    """What a store would hold, kept by the simplest means: it writes what the reducer says and nothing else."""

    def __init__(self) -> None:
        self.turn = Turn(rules=Rules(max_withdrawals=2, max_rounds=6))
        self.state = "llm"
        self.effect: AskModel | RunCall | Rest = AskModel()
        self.said: list[str] = []
        self.dropped: list[Plan] = []
        self.runs: list[tuple[int, int]] = []
        self.needs_approval: set[tuple[int, int]] = set()
        """Calls whose tools came under approval when they were about to run."""
        self.approved: set[tuple[int, int]] = set()
        self.not_run: int | None = None
        """The call that was marked as started and did not run, while the event that says so is handled."""
        self.plans = 0

    def possible(self) -> list[str]:
        always = ["crash", "stop"]
        match self.effect:
            case AskModel():
                return ["answer", "fail", *always]
            case RunCall():
                return ["ran", "tool changed", *always]
        return ["wake", "judge"] if self.state == "wait_approval" else ["wake"]

    def happens(self, event: Event, mail: tuple[WaitingMessage, ...]) -> None:
        self.turn = replace(self.turn, mail=mail)
        self.not_run = None
        if isinstance(event, ToolRulesChanged) and not event.is_retry:
            self.not_run = event.index
            self.runs.remove((self.plans, event.index))
            if event.needs_approval:
                self.needs_approval.add((self.plans, event.index))
        step = reduce(self.turn, event)
        for write in step.writes:
            self.write(write)
        self.effect = step.action
        if isinstance(step.action, RunCall):
            assert self.turn.plan is not None
            one = self.turn.plan.calls[step.action.index]
            assert one.state == "started"
            this = (self.plans, step.action.index)
            if isinstance(event, ApprovalDecided):
                self.approved.add(this)
            assert this not in self.needs_approval or this in self.approved, "a call was run without approval"
            if one.effect == "unsafe":
                assert (self.plans, step.action.index) not in self.runs, "an unsafe call was run twice"
            self.runs.append((self.plans, step.action.index))
        self.holds()

    def write(self, write: Write) -> None:
        match write:
            case OpenPlan(plan=opened):
                assert self.turn.plan is None
                self.turn = replace(self.turn, plan=opened)
                self.plans += 1
            case SetCallState(index=index, state=state, result=result):
                assert self.turn.plan is not None
                assert self.turn.plan.calls[index].state not in ENDED_STATES, "a call that was over changed"
                self.turn = replace(self.turn, plan=self.turn.plan.with_state(index, state, result))
            case SetCallRules(index=index, effect=effect, needs_approval=gated):
                assert self.turn.plan is not None
                self.turn = replace(self.turn, plan=self.turn.plan.with_rules(index, effect, gated))
            case AppendCallGroup(plan=closed):
                assert self.turn.plan is not None
                assert all(one.state in ENDED_STATES and one.result for one in closed.calls)
                for index, (before, after) in enumerate(zip(self.turn.plan.calls, closed.calls, strict=True)):
                    assert before.state not in ENDED_STATES or before == after, "a real result was replaced"
                    ran = before.state == "started" and index != self.not_run
                    assert after.state != "cancelled" or not ran, "it ran, and is said not to have"
                self.turn = replace(self.turn, plan=None)
                self.said.append("group")
            case WithdrawPlan(plan=dropped):
                assert self.turn.plan is None and all(one.state == "planned" for one in dropped.calls)
                self.dropped.append(dropped)
            case TakeMail():
                self.turn = replace(self.turn, mail=())
                self.said.append("user")
            case AppendText(text=text):
                self.said.append(text)
            case SetCounters(withdrawals=withdrawals, rounds=rounds):
                self.turn = replace(self.turn, withdrawals=withdrawals, rounds=rounds)
            case BeginNextTurn():
                self.turn = replace(self.turn, withdrawals=0, rounds=0)
            case SetState(state=state):
                self.state = state

    def holds(self) -> None:
        assert (self.turn.plan is not None) == (self.state in ("tools", "wait_approval"))
        assert isinstance(self.effect, Rest) == (self.state not in ("llm", "tools"))
        assert not (self.state == "idle" and self.turn.mail), "it rests while somebody waits"
        assert self.turn.withdrawals <= self.turn.rules.max_withdrawals
        assert all(one.text not in self.said for one in self.dropped), "a withdrawn plan was said"


@given(st.data())
def test_whatever_happens_in_any_order_every_group_is_closed_and_nothing_unsafe_runs_twice(data: st.DataObject) -> None:
    driven = Driven()
    for number in range(data.draw(st.integers(1, 25))):
        mail = data.draw(letters)
        event: Event
        match data.draw(st.sampled_from(driven.possible())):
            case "answer":
                planned = tuple(data.draw(st.lists(calls, max_size=4)))
                event = ModelAnswered(text=f"said {number}", calls=planned)
            case "fail":
                event = ModelFailed(message="busy", recovery=data.draw(st.sampled_from(["retry", "block", "give_up"])))
            case "ran":
                assert isinstance(driven.effect, RunCall)
                event = CallEnded(index=driven.effect.index, ok=data.draw(st.booleans()), result=f"result {number}")
            case "tool changed":
                assert isinstance(driven.effect, RunCall) and driven.turn.plan is not None
                run = driven.effect
                # A tool that was put under approval stays so for this run of the test, and so does its effect.
                gated = driven.turn.plan.calls[run.index].needs_approval or data.draw(st.booleans())
                event = ToolRulesChanged(index=run.index, effect="unsafe", needs_approval=gated, is_retry=run.is_retry)
            case "judge":
                event = ApprovalDecided(data.draw(st.booleans()))
            case "stop":
                event = Stopped(data.draw(st.sampled_from(["", "partly"])))
            case _:
                event = data.draw(recoveries)
        driven.happens(event, mail)
    if driven.state not in ("idle", "wait_retry", "blocked"):
        driven.happens(data.draw(endings), ())
        assert driven.turn.plan is None and driven.state in ("idle", "terminated")
