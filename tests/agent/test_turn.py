"""The reducer of a turn: interruptions, approvals, failures and recovery."""

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
from coterie.agents import AgentState
from coterie.llm.service import ToolCall
from coterie.plan import (
    DENIED_RESULT,
    ENDED_STATES,
    INTERRUPTED_RESULT,
    MAX_QUESTION_ARGUMENT_BYTES,
    SEND_MESSAGE_TOOL,
    STOPPED_RESULT,
    UNKNOWN_RESULT,
    ArgumentsFile,
    Effect,
    Plan,
    PlannedCall,
)
from coterie.turn import (
    AppendCallGroup,
    AppendText,
    ApprovalDecided,
    AskModel,
    BeginNextTurn,
    CallEnded,
    Event,
    Interrupted,
    ModelAnswered,
    ModelFailed,
    OpenPlan,
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
    TaskDropped,
    Terminated,
    ToolRulesChanged,
    Turn,
    WaitingMessage,
    WithdrawPlan,
    Write,
    count_fitting,
    is_echo,
    may_cut,
    reduce,
    wakes,
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


# Answers of the model


def test_a_text_without_waiting_mail_is_appended_and_sent_and_ends_the_turn() -> None:
    step = reduce(Turn(), ModelAnswered(text="42"))
    assert step == Step((AppendText("42"), SendReply("42"), SetState(state="idle")), Rest())


def test_a_text_is_sent_before_waiting_mail_begins_the_next_turn() -> None:
    step = reduce(Turn(mail=(FROM_AGENT, FROM_PERSON)), ModelAnswered(text="42"))
    assert step == Step(
        (AppendText("42"), SendReply("42"), BeginNextTurn(), TakeMail(), SetState(state="llm")), AskModel()
    )


def test_an_echo_is_read_before_the_agent_becomes_idle() -> None:
    assert reduce(Turn(mail=(ECHO,)), ModelAnswered(text="42")).action == AskModel()


def test_a_plan_without_waiting_mail_starts_its_first_call() -> None:
    step = reduce(Turn(rounds=2), answered(call("a"), call("b")))
    assert step.action == RunCall(0)
    assert only(step, OpenPlan).plan == plan(call("a"), call("b"))
    assert only(step, SetCallState) == SetCallState(0, "started")
    assert only(step, SetCounters) == SetCounters(withdrawals=0, rounds=3)
    assert only(step, SetState).state == "tools"


def test_a_message_before_the_first_call_withdraws_the_plan() -> None:
    step = reduce(Turn(mail=(FROM_AGENT,)), answered(call()))
    assert step == Step(
        (WithdrawPlan(plan(call()), interrupted_by=FROM_AGENT.id), TakeMail(), SetCounters(withdrawals=1, rounds=1)),
        AskModel(),
    )


def test_a_withdrawn_plan_is_not_in_the_history() -> None:
    step = reduce(Turn(mail=(FROM_PERSON,)), answered(call()))
    assert has(step, WithdrawPlan)
    assert not has(step, AppendText) and not has(step, AppendCallGroup) and not has(step, OpenPlan)


def test_all_waiting_messages_are_taken_at_once() -> None:
    step = reduce(Turn(mail=(FROM_AGENT, FROM_PERSON, ECHO)), answered(call()))
    assert [write for write in step.writes if isinstance(write, TakeMail)] == [TakeMail()]


# Ends of calls


def test_after_a_call_the_next_call_starts() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED)), CallEnded(index=1, ok=True, result="two"))
    assert step == Step(
        (SetCallState(1, "done", "two"), SetCallState(2, "started"), SetState(state="tools")), RunCall(2)
    )


def test_after_the_last_call_the_group_is_appended_and_the_model_is_asked() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING)), CallEnded(index=1, ok=False, result="broken"))
    assert results(only(step, AppendCallGroup).plan) == [("done", "one"), ("failed", "broken")]
    assert (step.action, only(step, SetState).state, has(step, TakeMail)) == (AskModel(), "llm", False)


def test_a_message_after_a_call_cancels_the_remaining_calls_and_keeps_the_result() -> None:
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


def test_mail_during_the_last_call_follows_its_group() -> None:
    step = reduce(Turn(plan=plan(RUNNING), mail=(FROM_AGENT,)), CallEnded(index=0, ok=True, result="one"))
    kinds = [type(write) for write in step.writes]
    assert kinds.index(AppendCallGroup) < kinds.index(TakeMail)
    assert results(only(step, AppendCallGroup).plan) == [("done", "one")]


# Interruptions


def test_an_echo_does_not_interrupt_its_plan() -> None:
    assert reduce(Turn(mail=(ECHO,)), answered(call())).action == RunCall(0)
    step = reduce(Turn(plan=plan(RUNNING, PLANNED), mail=(ECHO,)), CallEnded(index=0, ok=True, result="one"))
    assert step.action == RunCall(1) and not has(step, TakeMail)


def test_an_echo_is_taken_with_an_interrupting_message() -> None:
    step = reduce(Turn(mail=(ECHO, FROM_AGENT)), answered(call()))
    assert has(step, WithdrawPlan) and has(step, TakeMail)


def test_at_the_withdrawal_limit_agents_do_not_interrupt_the_plan() -> None:
    rules = Rules(max_withdrawals=3)
    assert has(reduce(Turn(mail=(FROM_AGENT,), withdrawals=2, rules=rules), answered(call())), WithdrawPlan)
    at_limit = Turn(mail=(FROM_AGENT,), withdrawals=3, rules=rules)
    step = reduce(at_limit, answered(call(), call()))
    assert step.action == RunCall(0) and not has(step, TakeMail)
    assert only(step, SetCounters).withdrawals == 3  # so that the later calls of the plan run too
    running = replace(at_limit, plan=plan(RUNNING, PLANNED))
    assert reduce(running, CallEnded(index=0, ok=True, result="")).action == RunCall(1)


def test_after_a_plan_at_the_withdrawal_limit_the_mail_is_taken_and_the_counter_is_reset() -> None:
    step = reduce(Turn(mail=(FROM_AGENT,), withdrawals=3, plan=plan(RUNNING)), CallEnded(index=0, ok=True, result=""))
    assert has(step, TakeMail)
    assert only(step, SetCounters).withdrawals == 0


def test_without_a_withdrawal_limit_agents_always_interrupt() -> None:
    turn = Turn(mail=(FROM_AGENT,), withdrawals=99, rules=Rules(max_withdrawals=0))
    assert has(reduce(turn, answered(call())), WithdrawPlan)


def test_the_person_always_interrupts_and_does_not_count_as_a_withdrawal() -> None:
    step = reduce(Turn(mail=(FROM_AGENT, FROM_PERSON), withdrawals=3), answered(call()))
    assert has(step, WithdrawPlan)
    assert only(step, SetCounters).withdrawals == 0


def test_the_round_limit_ends_the_turn_with_a_message_to_the_asker() -> None:
    step = reduce(Turn(rounds=4, rules=Rules(max_rounds=5)), answered(call()))
    assert has(step, WithdrawPlan) and not has(step, OpenPlan)
    assert "5 rounds" in only(step, SendReply).text and only(step, AppendText).text == only(step, SendReply).text
    assert only(step, SetState).state == "idle"
    assert reduce(Turn(rounds=3, rules=Rules(max_rounds=5)), answered(call())).action == RunCall(0)


# Approval


GATED = call("pay", needs_approval=True, state="gated")


def test_a_gated_call_waits_for_approval() -> None:
    step = reduce(Turn(), answered(call("pay", needs_approval=True)))
    assert [write for write in step.writes if isinstance(write, SetCallState)] == [SetCallState(0, "gated")]
    assert only(step, RequestApproval) == RequestApproval(0)
    assert (only(step, SetState).state, step.action) == ("wait_approval", Rest())


def test_an_approved_call_runs() -> None:
    step = reduce(Turn(plan=plan(DONE, GATED)), ApprovalDecided(True))
    assert step == Step((SetCallState(1, "started"), SetState(state="tools")), RunCall(1))


def test_a_denied_call_does_not_run_and_the_plan_continues() -> None:
    step = reduce(Turn(plan=plan(GATED, PLANNED)), ApprovalDecided(False))
    assert step.writes[0] == SetCallState(0, "cancelled", DENIED_RESULT)
    assert step.action == RunCall(1)
    last = reduce(Turn(plan=plan(DONE, GATED)), ApprovalDecided(False))
    assert results(only(last, AppendCallGroup).plan) == [("done", "one"), ("cancelled", DENIED_RESULT)]


@pytest.mark.parametrize("event", [Resumed(), ApprovalDecided(True), ApprovalDecided(False)])
def test_another_message_cancels_the_gated_call(event: Event) -> None:
    step = reduce(Turn(plan=plan(DONE, GATED, PLANNED), mail=(FROM_PERSON,)), event)
    assert results(only(step, AppendCallGroup).plan)[1:] == [("cancelled", INTERRUPTED_RESULT)] * 2
    assert step.action == AskModel() and has(step, TakeMail)


def test_the_approval_message_does_not_interrupt_the_plan() -> None:
    verdict = replace(FROM_PERSON, is_echo=True)
    assert reduce(Turn(plan=plan(GATED), mail=(verdict,)), ApprovalDecided(True)).action == RunCall(0)


def test_a_stream_of_agent_messages_cannot_prevent_an_approval() -> None:
    step = reduce(Turn(plan=plan(GATED), mail=(FROM_AGENT,), withdrawals=1), Resumed())
    assert only(step, SetCounters).withdrawals == 2
    at_limit = reduce(Turn(plan=plan(GATED), mail=(FROM_AGENT,), withdrawals=3), Resumed())
    assert (only(at_limit, SetState).state, at_limit.action) == ("wait_approval", Rest())


def test_cancelling_a_gated_call_after_another_call_ran_resets_the_withdrawals() -> None:
    step = reduce(Turn(plan=plan(DONE, GATED), mail=(FROM_AGENT,), withdrawals=2), Resumed())
    assert only(step, SetCounters).withdrawals == 0


def test_a_resumed_gated_call_asks_the_same_question_and_waits() -> None:
    step = reduce(Turn(plan=plan(GATED)), Resumed())
    assert only(step, RequestApproval) == RequestApproval(0)
    assert (only(step, SetState).state, step.action) == ("wait_approval", Rest())


# Stop


def test_a_stop_during_a_plan_makes_the_running_call_unknown_and_cancels_the_rest() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED)), Stopped())
    assert results(only(step, AppendCallGroup).plan) == [
        ("done", "one"),
        ("unknown", UNKNOWN_RESULT),
        ("cancelled", STOPPED_RESULT),
    ]
    assert (only(step, SetState).state, step.action) == ("idle", Rest())


def test_a_stop_during_an_answer_keeps_the_partial_text() -> None:
    step = reduce(Turn(), Stopped("The answer is"))
    assert step == Step(
        (AppendText("The answer is"), SendReply("The answer is", is_partial=True), SetState(state="idle")), Rest()
    )


def test_a_stop_before_any_text_ends_the_turn_with_a_mark() -> None:
    assert reduce(Turn(), Stopped()) == Step((SendReply("", is_partial=True), SetState(state="idle")), Rest())


def test_mail_that_waits_begins_the_next_turn_at_once_after_a_stop() -> None:
    for turn in (Turn(mail=(FROM_AGENT,)), Turn(mail=(FROM_AGENT,), plan=plan(RUNNING))):
        step = reduce(turn, Stopped())
        assert has(step, BeginNextTurn) and has(step, TakeMail) and step.action == AskModel()


# Model failures


def error(text: str, category: str) -> SendReply:
    return SendReply(text, is_error=True, problem={"category": category})


def test_a_transient_failure_waits_for_a_retry_and_leaves_the_mail() -> None:
    step = reduce(Turn(mail=(FROM_PERSON,)), ModelFailed(message="busy", recovery="retry", delay=timedelta(seconds=3)))
    assert step == Step(
        (SetState(state="wait_retry", delay=timedelta(seconds=3), reason="busy", category="server"),), Rest()
    )


def test_a_permanent_failure_blocks_the_agent_and_notifies_the_asker() -> None:
    step = reduce(Turn(), ModelFailed(message="no key", recovery="block"))
    assert step == Step(
        (error("no key", "server"), SetState(state="blocked", reason="no key", category="server")), Rest()
    )


def test_a_failure_without_retry_ends_the_turn_with_an_error_reply() -> None:
    step = reduce(Turn(mail=(FROM_AGENT,)), ModelFailed(message="refused", recovery="give_up"))
    assert only(step, SendReply) == error("refused", "server")
    assert "refused" in only(step, AppendText).text
    assert has(step, BeginNextTurn) and step.action == AskModel()


# Recovery


def test_a_resumed_turn_without_a_plan_takes_its_mail_and_asks_the_model() -> None:
    assert reduce(Turn(), Resumed()) == Step((SetState(state="llm"),), AskModel())
    assert reduce(Turn(mail=(FROM_AGENT,)), Resumed()) == Step((TakeMail(), SetState(state="llm")), AskModel())


@pytest.mark.parametrize("effect", ["pure", "idempotent"])
def test_a_resumed_pure_or_idempotent_call_runs_again(effect: Effect) -> None:
    found = Turn(plan=plan(DONE, replace(RUNNING, effect=effect), PLANNED))
    assert reduce(found, Resumed()) == Step((SetState(state="tools"),), RunCall(1, is_retry=True))


def test_a_resumed_unsafe_call_is_unknown_and_does_not_run_again() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED)), Resumed())
    assert step.writes[0] == SetCallState(1, "unknown", UNKNOWN_RESULT)
    assert step.action == RunCall(2)
    last = reduce(Turn(plan=plan(DONE, RUNNING)), Resumed())
    assert results(only(last, AppendCallGroup).plan) == [("done", "one"), ("unknown", UNKNOWN_RESULT)]


def test_a_waiting_message_cancels_the_remaining_calls_of_a_resumed_plan() -> None:
    step = reduce(Turn(plan=plan(RUNNING, PLANNED), mail=(FROM_PERSON,)), Resumed())
    assert results(only(step, AppendCallGroup).plan) == [("unknown", UNKNOWN_RESULT), ("cancelled", INTERRUPTED_RESULT)]


@pytest.mark.parametrize("effect", ["pure", "idempotent"])
def test_a_resumed_call_does_not_run_again_if_somebody_has_spoken(effect: Effect) -> None:
    started = replace(RUNNING, effect=effect)
    assert reduce(Turn(plan=plan(started, PLANNED)), Resumed()).action == RunCall(0, is_retry=True)
    step = reduce(Turn(plan=plan(started, PLANNED), mail=(FROM_PERSON,)), Resumed())
    assert step.action == AskModel() and has(step, TakeMail)
    assert results(only(step, AppendCallGroup).plan) == [("unknown", UNKNOWN_RESULT), ("cancelled", INTERRUPTED_RESULT)]
    echo = reduce(Turn(plan=plan(started, PLANNED), mail=(ECHO,)), Resumed())
    assert echo.action == RunCall(0, is_retry=True)


def test_a_message_that_was_not_sent_before_a_crash_is_cancelled_if_somebody_has_spoken() -> None:
    """It is stored together with its result, so without a result it was not sent."""
    sending = replace(RUNNING, effect="idempotent", call=replace(RUNNING.call, name=SEND_MESSAGE_TOOL))
    step = reduce(Turn(plan=plan(sending), mail=(FROM_PERSON,)), Resumed())
    assert results(only(step, AppendCallGroup).plan) == [("cancelled", INTERRUPTED_RESULT)]
    assert step.action == AskModel()


def test_a_person_who_interrupts_uses_up_no_round_and_an_agent_does() -> None:
    by_person = reduce(Turn(mail=(FROM_PERSON,), rounds=7), answered(call()))
    by_agent = reduce(Turn(mail=(FROM_AGENT,), rounds=7), answered(call()))
    assert [only(step, SetCounters).rounds for step in (by_person, by_agent)] == [7, 8]


def test_mail_that_cannot_interrupt_is_taken_when_the_plan_has_ended() -> None:
    turn = Turn(plan=plan(RUNNING), mail_waits=True)
    assert has(reduce(turn, CallEnded(index=0, ok=True, result="one")), TakeMail)
    assert reduce(Turn(mail_waits=True), ModelAnswered(text="42")).action == AskModel()


@pytest.mark.parametrize(
    ("costs", "budget", "fitting"),
    [([], 10, 0), ([99], 10, 1), ([4, 4, 4], 10, 2), ([5, 5], 10, 2), ([4, 4, 4], None, 3), ([99, 1], 10, 1)],
)
def test_mail_is_taken_in_order_as_far_as_it_fits_and_at_least_one_message(
    costs: list[int], budget: int | None, fitting: int
) -> None:
    assert count_fitting(costs, budget) == fitting


def test_an_echo_comes_from_the_agent_itself_from_its_plan_or_from_a_button_of_its_question() -> None:
    def echo(sender: str, *, answers: bool = False, caused: bool = False) -> bool:
        return is_echo(sender, "ada", answers_approval=lambda: answers, is_caused_by_plan=lambda: caused)

    assert echo("ada") and echo("bob", caused=True) and echo("user", answers=True)
    assert not echo("bob") and not echo("user", caused=True) and not echo("system")


def test_a_message_wakes_agents_that_wait_for_one() -> None:
    woken = {state for state in get_args(AgentState) if wakes(state, unblocks=False)}
    assert woken == {"idle", "wait_approval"}
    assert wakes("blocked", unblocks=True) and not wakes("wait_retry", unblocks=True)


def test_a_poisoned_turn_is_quarantined_and_the_asker_is_notified() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED)), Poisoned("three crashes"))
    assert [state for state, _ in results(only(step, AppendCallGroup).plan)] == ["done", "unknown", "cancelled"]
    assert only(step, AppendText).text == "[turn aborted: three crashes]"
    assert has(step, Quarantine)
    assert only(step, SendReply) == error("three crashes", "crash")
    assert (only(step, SetState).state, step.action) == ("idle", Rest())


def test_termination_closes_the_group_takes_no_mail_and_notifies_the_askers() -> None:
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


def test_a_call_whose_tool_now_needs_approval_waits_for_the_person() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED)), changed(needs_approval=True))
    assert only(step, SetCallRules) == SetCallRules(1, "unsafe", needs_approval=True)
    assert (only(step, SetCallState), only(step, RequestApproval)) == (SetCallState(1, "gated"), RequestApproval(1))
    assert (only(step, SetState).state, step.action) == ("wait_approval", Rest())


def test_an_approved_call_needs_no_second_approval_when_its_effect_changes() -> None:
    approved = call("second", state="started", needs_approval=True, effect="pure")
    step = reduce(Turn(plan=plan(DONE, approved)), changed(needs_approval=True))
    assert step == Step((SetCallRules(1, "unsafe", needs_approval=True), SetState(state="tools")), RunCall(1))


def test_a_repeated_call_with_stricter_rules_is_unknown_and_does_not_run() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING)), changed(needs_approval=True, is_retry=True))
    assert results(only(step, AppendCallGroup).plan)[1] == ("unknown", UNKNOWN_RESULT)
    assert step.action == AskModel()


def test_a_message_cancels_a_call_whose_rules_changed_before_it_ran() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED), mail=(FROM_PERSON,)), changed(needs_approval=True))
    assert results(only(step, AppendCallGroup).plan)[1:] == [("cancelled", INTERRUPTED_RESULT)] * 2
    assert has(step, TakeMail) and step.action == AskModel()


def test_arguments_too_long_for_a_question_are_stored_as_a_file_first() -> None:
    long = PlannedCall(call=LONG, needs_approval=True)
    step = reduce(Turn(), answered(long))
    assert only(step, SetCallRules) == SetCallRules(0, "unsafe", needs_approval=False)
    assert step.action == RunCall(0) and not has(step, RequestApproval)
    started = replace(long, needs_approval=False, state="started")
    asked = reduce(Turn(plan=plan(started)), changed(index=0, needs_approval=True, file=FILE))
    assert only(asked, RequestApproval) == RequestApproval(0, FILE)
    woken = reduce(Turn(plan=plan(replace(long, state="gated"))), Resumed())
    assert woken == Step((SetState(state="wait_approval"),), Rest())


def test_a_call_with_an_unknown_outcome_has_the_state_unknown() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING)), CallEnded(index=1, ok=False, result="late", is_outcome_unknown=True))
    assert results(only(step, AppendCallGroup).plan)[1] == ("unknown", "late")


# One module decides


def test_only_the_reducer_decides_on_interruptions() -> None:
    deciding = {"is_interrupted", "WithdrawPlan", "AppendCallGroup", "TakeMail", "OpenPlan"}
    package = Path(turn_module.__file__).parent
    sources = {
        path: text for path in package.rglob("*.py") if any(name in (text := path.read_text()) for name in deciding)
    }
    deciders = {
        path.relative_to(package).as_posix()
        for path, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in deciding
    }
    assert deciders == {"turn.py"}
    rules = {"is_interrupted", "is_echo", "wakes", "count_fitting"}
    defined = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.lstrip("_") in rules
    }
    assert defined == {"turn.py"}


# Answers that a person's message cuts

CUT = Interrupted(partial_text="The answer be", service="main")


def test_a_cut_answer_is_withdrawn_and_the_model_is_asked_again_with_all_mail() -> None:
    step = reduce(Turn(mail=(FROM_AGENT, FROM_PERSON), withdrawals=1, rounds=2), CUT)
    withdrawn = WithdrawPlan(Plan(text="The answer be", calls=()), interrupted_by=FROM_PERSON.id)
    assert step == Step((withdrawn, TakeMail()), AskModel())


def test_a_request_that_was_not_sent_leaves_no_record_when_mail_joins_it() -> None:
    assert reduce(Turn(mail=(FROM_PERSON,)), Interrupted()) == Step((TakeMail(),), AskModel())


def test_a_cut_answer_stays_withdrawn_if_its_message_was_withdrawn_meanwhile() -> None:
    step = reduce(Turn(), CUT)
    assert step == Step((WithdrawPlan(Plan(text="The answer be", calls=())),), AskModel())


def test_a_cut_in_a_paused_society_takes_the_mail_and_asks_after_the_pause() -> None:
    step = reduce(Turn(mail=(FROM_PERSON,), society_paused=True), CUT)
    assert has(step, WithdrawPlan) and has(step, TakeMail)
    assert (step.action, only(step, SetState).is_suspended) == (Rest(), True)


@pytest.mark.parametrize(("hold", "state"), [(False, "llm"), (True, "wait_retry")])
def test_a_turn_without_its_stopped_task_asks_again_unless_its_agent_is_paused(hold: bool, state: str) -> None:
    step = reduce(Turn(plan=plan(DONE, PLANNED), hold=hold), TaskDropped())
    assert results(only(step, AppendCallGroup).plan) == [("done", "one"), ("cancelled", STOPPED_RESULT)]
    assert step.action == Rest() and only(step, SetState).is_suspended
    assert (only(step, SetState).state, only(step, SetState).delay) == (state, timedelta(0))


def test_only_the_mode_stream_cuts_answers_and_only_up_to_the_limit_of_the_turn() -> None:
    stream, step = Rules(interrupt="stream", max_cuts=2), Rules(interrupt="step", max_cuts=2)
    assert may_cut(stream, None, 0) and may_cut(stream, None, 1) and not may_cut(stream, None, 2)
    assert not may_cut(step, None, 0)
    assert may_cut(step, "stream", 0) and not may_cut(stream, "step", 0)
    assert not may_cut(Rules(), None, 0)


# Random events


calls = st.builds(
    call,
    st.sampled_from(["look", "fire", "pay"]),
    effect=st.sampled_from(get_args(Effect)),
    needs_approval=st.booleans(),
)
mails = st.lists(
    st.builds(
        WaitingMessage, id=st.just("m"), position=st.just(1), is_from_person=st.booleans(), is_echo=st.booleans()
    ),
    max_size=3,
).map(tuple)

recoveries: st.SearchStrategy[Event] = st.sampled_from((Resumed(), Resumed(), Poisoned("crashes")))
endings: st.SearchStrategy[Event] = st.sampled_from((Stopped(), Poisoned("crashes"), Terminated()))


class Driven:
    """A minimal store: applies the writes of the reducer and checks invariants."""

    def __init__(self) -> None:
        self.turn = Turn(rules=Rules(max_withdrawals=2, max_rounds=6))
        self.state = "llm"
        self.effect: AskModel | RunCall | Rest = AskModel()
        self.said: list[str] = []
        self.dropped: list[Plan] = []
        self.runs: list[tuple[int, int]] = []
        self.needs_approval: set[tuple[int, int]] = set()
        """Calls whose tools required approval just before they ran."""
        self.approved: set[tuple[int, int]] = set()
        self.not_run: int | None = None
        """The started call that did not run, while its event is handled."""
        self.plans = 0

    def possible(self) -> list[str]:
        always = ["crash", "stop"]
        match self.effect:
            case AskModel():
                return ["answer", "fail", "cut", *always]
            case RunCall():
                return ["call ended", "tool changed", *always]
        return ["wake", "decide"] if self.state == "wait_approval" else ["wake"]

    def apply(self, event: Event, mail: tuple[WaitingMessage, ...]) -> None:
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
        self.check()

    def write(self, write: Write) -> None:
        match write:
            case OpenPlan(plan=opened):
                assert self.turn.plan is None
                self.turn = replace(self.turn, plan=opened)
                self.plans += 1
            case SetCallState(index=index, state=state, result=result):
                assert self.turn.plan is not None
                assert self.turn.plan.calls[index].state not in ENDED_STATES, "an ended call changed"
                self.turn = replace(self.turn, plan=self.turn.plan.with_state(index, state, result))
            case SetCallRules(index=index, effect=effect, needs_approval=gated):
                assert self.turn.plan is not None
                self.turn = replace(self.turn, plan=self.turn.plan.with_rules(index, effect, gated))
            case AppendCallGroup(plan=closed):
                assert self.turn.plan is not None
                assert all(one.state in ENDED_STATES and one.result for one in closed.calls)
                for index, (before, after) in enumerate(zip(self.turn.plan.calls, closed.calls, strict=True)):
                    assert before.state not in ENDED_STATES or before == after, "a result was replaced"
                    ran = before.state == "started" and index != self.not_run
                    assert after.state != "cancelled" or not ran, "a call that ran is cancelled"
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

    def check(self) -> None:
        assert (self.turn.plan is not None) == (self.state in ("tools", "wait_approval"))
        assert isinstance(self.effect, Rest) == (self.state not in ("llm", "tools"))
        assert not (self.state == "idle" and self.turn.mail), "idle with waiting mail"
        assert self.turn.withdrawals <= self.turn.rules.max_withdrawals
        assert all(one.text not in self.said for one in self.dropped), "a withdrawn plan is in the history"


@given(st.data())
def test_random_events_leave_no_open_group_and_run_no_unsafe_call_twice(data: st.DataObject) -> None:
    driven = Driven()
    for number in range(data.draw(st.integers(1, 25))):
        mail = data.draw(mails)
        event: Event
        match data.draw(st.sampled_from(driven.possible())):
            case "answer":
                planned = tuple(data.draw(st.lists(calls, max_size=4)))
                event = ModelAnswered(text=f"said {number}", calls=planned)
            case "fail":
                event = ModelFailed(message="busy", recovery=data.draw(st.sampled_from(["retry", "block", "give_up"])))
            case "call ended":
                assert isinstance(driven.effect, RunCall)
                event = CallEnded(index=driven.effect.index, ok=data.draw(st.booleans()), result=f"result {number}")
            case "tool changed":
                assert isinstance(driven.effect, RunCall) and driven.turn.plan is not None
                run = driven.effect
                # A tool that needs approval keeps needing it, and keeps its effect.
                gated = driven.turn.plan.calls[run.index].needs_approval or data.draw(st.booleans())
                event = ToolRulesChanged(index=run.index, effect="unsafe", needs_approval=gated, is_retry=run.is_retry)
            case "decide":
                event = ApprovalDecided(data.draw(st.booleans()))
            case "cut":
                event = Interrupted(partial_text=f"cut {number}", service=data.draw(st.sampled_from(["", "main"])))
            case "stop":
                event = Stopped(data.draw(st.sampled_from(["", "partly"])))
            case _:
                event = data.draw(recoveries)
        driven.apply(event, mail)
    if driven.state not in ("idle", "wait_retry", "blocked"):
        driven.apply(data.draw(endings), ())
        assert driven.turn.plan is None and driven.state in ("idle", "terminated")
