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
from coterie.llm.types import Call
from coterie.turn import (
    DENIED,
    MAX_SHOWN,
    NOT_EXECUTED,
    OVER,
    STOPPED,
    UNKNOWN,
    Answered,
    ArgumentsFile,
    Ask,
    AskApproval,
    Become,
    Change,
    CloseGroup,
    Count,
    Dismissed,
    DropPlan,
    Effect,
    Event,
    Judged,
    Letter,
    ModelFailed,
    NextTurn,
    OpenPlan,
    Plan,
    PlannedCall,
    Poisoned,
    Quarantine,
    Ran,
    Reclassify,
    Reply,
    Rest,
    Resumed,
    Rules,
    Run,
    Say,
    Step,
    Stopped,
    TakeMail,
    ToolChanged,
    Turn,
    Write,
    reduce,
)

W = TypeVar("W", bound=Write)

FROM_AGENT = Letter(id="a", in_seq=1)
FROM_PERSON = Letter(id="p", in_seq=2, from_person=True)
ECHO = Letter(id="e", in_seq=3, echo=True)


def call(name: str = "look", **changed: Any) -> PlannedCall:
    return PlannedCall(**{"call": Call(id=f"id-{name}", name=name, arguments={})} | changed)


def plan(*calls: PlannedCall) -> Plan:
    return Plan(text="let me see", calls=calls)


def answered(*calls: PlannedCall) -> Answered:
    return Answered(text="let me see", calls=calls)


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
    step = reduce(Turn(), Answered(text="42"))
    assert step == Step((Say("42"), Reply("42"), Become(state="idle")), Rest())


def test_a_text_goes_to_its_askers_before_the_mail_that_came_meanwhile_begins_the_next_turn() -> None:
    step = reduce(Turn(mail=(FROM_AGENT, FROM_PERSON)), Answered(text="42"))
    assert step == Step((Say("42"), Reply("42"), NextTurn(), TakeMail(), Become(state="llm")), Ask())


def test_even_an_echo_is_read_before_the_agent_rests() -> None:
    assert reduce(Turn(mail=(ECHO,)), Answered(text="42")).effect == Ask()


def test_a_plan_nobody_objects_to_begins_with_its_first_call() -> None:
    step = reduce(Turn(rounds=2), answered(call("a"), call("b")))
    assert step.effect == Run(0)
    assert only(step, OpenPlan).plan == plan(call("a"), call("b"))
    assert only(step, Change) == Change(0, "started")
    assert only(step, Count) == Count(withdrawals=0, rounds=3)
    assert only(step, Become).state == "tools"


def test_before_the_first_call_a_message_withdraws_the_whole_plan_and_the_model_is_asked_again() -> None:
    step = reduce(Turn(mail=(FROM_AGENT,)), answered(call()))
    assert step == Step((DropPlan(plan(call()), by=FROM_AGENT.id), TakeMail(), Count(withdrawals=1, rounds=1)), Ask())


def test_a_withdrawn_plan_is_a_record_and_never_said() -> None:
    step = reduce(Turn(mail=(FROM_PERSON,)), answered(call()))
    assert has(step, DropPlan)
    assert not has(step, Say) and not has(step, CloseGroup) and not has(step, OpenPlan)


def test_several_messages_are_taken_at_once() -> None:
    step = reduce(Turn(mail=(FROM_AGENT, FROM_PERSON, ECHO)), answered(call()))
    assert [write for write in step.writes if isinstance(write, TakeMail)] == [TakeMail()]


# A call has run


def test_after_a_call_the_next_begins() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED)), Ran(index=1, ok=True, result="two"))
    assert step == Step((Change(1, "done", "two"), Change(2, "started"), Become(state="tools")), Run(2))


def test_after_the_last_call_the_group_is_closed_whole_and_the_model_is_asked() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING)), Ran(index=1, ok=False, result="broken"))
    assert results(only(step, CloseGroup).plan) == [("done", "one"), ("failed", "broken")]
    assert (step.effect, only(step, Become).state, has(step, TakeMail)) == (Ask(), "llm", False)


def test_after_a_call_has_run_a_message_closes_the_others_as_not_executed_and_keeps_the_result() -> None:
    step = reduce(Turn(plan=plan(RUNNING, PLANNED, PLANNED), mail=(FROM_PERSON,)), Ran(index=0, ok=True, result="one"))
    assert results(only(step, CloseGroup).plan) == [
        ("done", "one"),
        ("cancelled", NOT_EXECUTED),
        ("cancelled", NOT_EXECUTED),
    ]
    kinds = [type(write) for write in step.writes]
    assert kinds.index(CloseGroup) < kinds.index(TakeMail)
    assert step.effect == Ask() and not has(step, DropPlan)


def test_mail_that_came_during_the_last_call_stands_behind_its_group() -> None:
    step = reduce(Turn(plan=plan(RUNNING), mail=(FROM_AGENT,)), Ran(index=0, ok=True, result="one"))
    kinds = [type(write) for write in step.writes]
    assert kinds.index(CloseGroup) < kinds.index(TakeMail)
    assert results(only(step, CloseGroup).plan) == [("done", "one")]


# Who interrupts


def test_a_plan_is_not_interrupted_by_its_own_echo() -> None:
    assert reduce(Turn(mail=(ECHO,)), answered(call())).effect == Run(0)
    step = reduce(Turn(plan=plan(RUNNING, PLANNED), mail=(ECHO,)), Ran(index=0, ok=True, result="one"))
    assert step.effect == Run(1) and not has(step, TakeMail)


def test_an_echo_is_taken_with_whatever_does_interrupt() -> None:
    step = reduce(Turn(mail=(ECHO, FROM_AGENT)), answered(call()))
    assert has(step, DropPlan) and has(step, TakeMail)


def test_after_so_many_withdrawn_plans_the_next_runs_whatever_agents_say() -> None:
    rules = Rules(max_withdrawals=3)
    assert has(reduce(Turn(mail=(FROM_AGENT,), withdrawals=2, rules=rules), answered(call())), DropPlan)
    patient = Turn(mail=(FROM_AGENT,), withdrawals=3, rules=rules)
    step = reduce(patient, answered(call(), call()))
    assert step.effect == Run(0) and not has(step, TakeMail)
    assert only(step, Count).withdrawals == 3  # so that the plan's later calls run as well
    going_on = replace(patient, plan=plan(RUNNING, PLANNED))
    assert reduce(going_on, Ran(index=0, ok=True, result="")).effect == Run(1)


def test_when_the_plan_that_had_to_run_is_done_the_mail_follows_and_counting_begins_anew() -> None:
    step = reduce(Turn(mail=(FROM_AGENT,), withdrawals=3, plan=plan(RUNNING)), Ran(index=0, ok=True, result=""))
    assert has(step, TakeMail)
    assert only(step, Count).withdrawals == 0


def test_without_a_limit_agents_can_interrupt_for_ever() -> None:
    turn = Turn(mail=(FROM_AGENT,), withdrawals=99, rules=Rules(max_withdrawals=0))
    assert has(reduce(turn, answered(call())), DropPlan)


def test_a_person_always_withdraws_the_plan_and_is_not_counted() -> None:
    step = reduce(Turn(mail=(FROM_AGENT, FROM_PERSON), withdrawals=3), answered(call()))
    assert has(step, DropPlan)
    assert only(step, Count).withdrawals == 0


def test_rounds_without_an_end_are_ended_with_a_question_to_whoever_asked() -> None:
    step = reduce(Turn(rounds=4, rules=Rules(max_rounds=5)), answered(call()))
    assert has(step, DropPlan) and not has(step, OpenPlan)
    assert "5 rounds" in only(step, Reply).text and only(step, Say).text == only(step, Reply).text
    assert only(step, Become).state == "idle"
    assert reduce(Turn(rounds=3, rules=Rules(max_rounds=5)), answered(call())).effect == Run(0)


# Approval


GATED = call("pay", gated=True, state="gated")


def test_a_gated_call_waits_for_the_person_and_nobody_works_meanwhile() -> None:
    step = reduce(Turn(), answered(call("pay", gated=True)))
    assert [write for write in step.writes if isinstance(write, Change)] == [Change(0, "gated")]
    assert only(step, AskApproval) == AskApproval(0)
    assert (only(step, Become).state, step.effect) == ("wait_approval", Rest())


def test_an_approved_call_runs() -> None:
    step = reduce(Turn(plan=plan(DONE, GATED)), Judged(True))
    assert step == Step((Change(1, "started"), Become(state="tools")), Run(1))


def test_a_denied_call_does_not_run_and_the_plan_goes_on() -> None:
    step = reduce(Turn(plan=plan(GATED, PLANNED)), Judged(False))
    assert step.writes[0] == Change(0, "cancelled", DENIED)
    assert step.effect == Run(1)
    last = reduce(Turn(plan=plan(DONE, GATED)), Judged(False))
    assert results(only(last, CloseGroup).plan) == [("done", "one"), ("cancelled", DENIED)]


@pytest.mark.parametrize("event", [Resumed(), Judged(True), Judged(False)])
def test_another_message_makes_the_question_void(event: Event) -> None:
    step = reduce(Turn(plan=plan(DONE, GATED, PLANNED), mail=(FROM_PERSON,)), event)
    assert results(only(step, CloseGroup).plan)[1:] == [("cancelled", NOT_EXECUTED)] * 2
    assert step.effect == Ask() and has(step, TakeMail)


def test_the_word_itself_is_no_interruption() -> None:
    verdict = replace(FROM_PERSON, echo=True)
    assert reduce(Turn(plan=plan(GATED), mail=(verdict,)), Judged(True)).effect == Run(0)


def test_agents_that_talk_without_pause_cannot_keep_a_question_from_being_answered() -> None:
    step = reduce(Turn(plan=plan(GATED), mail=(FROM_AGENT,), withdrawals=1), Resumed())
    assert only(step, Count).withdrawals == 2
    patient = reduce(Turn(plan=plan(GATED), mail=(FROM_AGENT,), withdrawals=3), Resumed())
    assert (only(patient, Become).state, patient.effect) == ("wait_approval", Rest())


def test_a_question_made_void_after_a_call_has_run_is_progress() -> None:
    step = reduce(Turn(plan=plan(DONE, GATED), mail=(FROM_AGENT,), withdrawals=2), Resumed())
    assert only(step, Count).withdrawals == 0


def test_woken_for_nothing_it_asks_the_same_question_and_goes_on_waiting() -> None:
    step = reduce(Turn(plan=plan(GATED)), Resumed())
    assert only(step, AskApproval) == AskApproval(0)
    assert (only(step, Become).state, step.effect) == ("wait_approval", Rest())


# Stop


def test_stopped_in_the_middle_of_a_plan_the_rest_does_not_run_and_what_ran_is_unknown() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED)), Stopped())
    assert results(only(step, CloseGroup).plan) == [("done", "one"), ("unknown", UNKNOWN), ("cancelled", STOPPED)]
    assert (only(step, Become).state, step.effect) == ("idle", Rest())


def test_stopped_while_the_model_speaks_what_it_said_is_kept_and_marked() -> None:
    step = reduce(Turn(), Stopped("The answer is"))
    assert step == Step((Say("The answer is"), Reply("The answer is", stopped=True), Become(state="idle")), Rest())


def test_stopped_before_the_model_said_anything_the_turn_just_ends() -> None:
    assert reduce(Turn(), Stopped()) == Step((Become(state="idle"),), Rest())


def test_mail_that_waits_begins_the_next_turn_at_once_after_a_stop() -> None:
    for turn in (Turn(mail=(FROM_AGENT,)), Turn(mail=(FROM_AGENT,), plan=plan(RUNNING))):
        step = reduce(turn, Stopped())
        assert has(step, NextTurn) and has(step, TakeMail) and step.effect == Ask()


# The model fails


def test_a_failure_that_may_pass_is_waited_out_with_the_mail_left_where_it_is() -> None:
    step = reduce(Turn(mail=(FROM_PERSON,)), ModelFailed(words="busy", then="retry", after=timedelta(seconds=3)))
    assert step == Step(
        (Become(state="wait_retry", after=timedelta(seconds=3), why="busy", category="server"),), Rest()
    )


def test_a_failure_that_somebody_must_mend_blocks_the_agent_and_is_told_to_whoever_asked() -> None:
    step = reduce(Turn(), ModelFailed(words="no key", then="block"))
    assert step == Step(
        (Reply("no key", trouble=True), Become(state="blocked", why="no key", category="server")), Rest()
    )


def test_an_answer_that_is_not_to_be_had_ends_the_turn_in_words() -> None:
    step = reduce(Turn(mail=(FROM_AGENT,)), ModelFailed(words="refused", then="give_up"))
    assert only(step, Reply) == Reply("refused", trouble=True)
    assert "refused" in only(step, Say).text
    assert has(step, NextTurn) and step.effect == Ask()


# Recovery


def test_a_turn_found_without_a_plan_takes_its_mail_and_asks_the_model() -> None:
    assert reduce(Turn(), Resumed()) == Step((Become(state="llm"),), Ask())
    assert reduce(Turn(mail=(FROM_AGENT,)), Resumed()) == Step((TakeMail(), Become(state="llm")), Ask())


@pytest.mark.parametrize("effect", ["pure", "idempotent"])
def test_a_call_that_may_run_twice_is_run_again(effect: Effect) -> None:
    found = Turn(plan=plan(DONE, replace(RUNNING, effect=effect), PLANNED))
    assert reduce(found, Resumed()) == Step((Become(state="tools"),), Run(1, again=True))


def test_an_unsafe_call_found_running_is_never_run_again_and_the_model_is_told() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED)), Resumed())
    assert step.writes[0] == Change(1, "unknown", UNKNOWN)
    assert step.effect == Run(2)
    last = reduce(Turn(plan=plan(DONE, RUNNING)), Resumed())
    assert results(only(last, CloseGroup).plan) == [("done", "one"), ("unknown", UNKNOWN)]


def test_a_message_found_on_recovery_stops_what_has_not_run() -> None:
    step = reduce(Turn(plan=plan(RUNNING, PLANNED), mail=(FROM_PERSON,)), Resumed())
    assert results(only(step, CloseGroup).plan) == [("unknown", UNKNOWN), ("cancelled", NOT_EXECUTED)]


def test_a_turn_that_kills_the_runtime_is_set_aside_and_whoever_asked_is_told() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED)), Poisoned("three crashes"))
    assert [state for state, _ in results(only(step, CloseGroup).plan)] == ["done", "unknown", "cancelled"]
    assert only(step, Say).text == "[turn aborted: three crashes]"
    assert has(step, Quarantine)
    assert only(step, Reply) == Reply("three crashes", trouble=True)
    assert (only(step, Become).state, step.effect) == ("idle", Rest())


def test_a_terminated_agent_leaves_no_open_group_takes_no_mail_and_its_askers_are_told() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED), mail=(FROM_PERSON,)), Dismissed())
    assert [state for state, _ in results(only(step, CloseGroup).plan)] == ["done", "unknown", "cancelled"]
    assert only(step, Reply).trouble and not has(step, TakeMail)
    assert (only(step, Become).state, step.effect) == ("terminated", Rest())


# The tool's rules changed before the call ran

LONG = Call(id="id-long", name="long", arguments={"text": "x" * MAX_SHOWN})
FILE = ArgumentsFile("ref", "long-arguments.json", "text/plain", MAX_SHOWN, "00")


def changed(**rules: Any) -> ToolChanged:
    known: dict[str, Any] = {"index": 1, "effect": "unsafe", "gated": False}
    return ToolChanged(**known | rules)


def test_a_call_whose_tool_came_under_approval_waits_for_the_person() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED)), changed(gated=True))
    assert only(step, Reclassify) == Reclassify(1, "unsafe", gated=True)
    assert (only(step, Change), only(step, AskApproval)) == (Change(1, "gated"), AskApproval(1))
    assert (only(step, Become).state, step.effect) == ("wait_approval", Rest())


def test_a_call_that_the_person_approved_is_not_asked_about_again_when_its_effect_changes() -> None:
    approved = call("second", state="started", gated=True, effect="pure")
    step = reduce(Turn(plan=plan(DONE, approved)), changed(gated=True))
    assert step == Step((Reclassify(1, "unsafe", gated=True), Become(state="tools")), Run(1))


def test_a_call_that_may_have_run_under_the_old_rules_is_unknown_and_not_run_or_asked_about() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING)), changed(gated=True, again=True))
    assert results(only(step, CloseGroup).plan)[1] == ("unknown", UNKNOWN)
    assert step.effect == Ask()


def test_a_message_that_came_meanwhile_cancels_the_call_that_did_not_run() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING, PLANNED), mail=(FROM_PERSON,)), changed(gated=True))
    assert results(only(step, CloseGroup).plan)[1:] == [("cancelled", NOT_EXECUTED)] * 2
    assert has(step, TakeMail) and step.effect == Ask()


def test_arguments_too_long_for_a_question_go_to_the_handler_first_and_come_back_as_a_file() -> None:
    long = PlannedCall(call=LONG, gated=True)
    step = reduce(Turn(), answered(long))
    assert only(step, Reclassify) == Reclassify(0, "unsafe", gated=False)
    assert step.effect == Run(0) and not has(step, AskApproval)
    started = replace(long, gated=False, state="started")
    asked = reduce(Turn(plan=plan(started)), changed(index=0, gated=True, file=FILE))
    assert only(asked, AskApproval) == AskApproval(0, FILE)
    woken = reduce(Turn(plan=plan(replace(long, state="gated"))), Resumed())
    assert woken == Step((Become(state="wait_approval"),), Rest())


def test_a_call_whose_outcome_was_not_learned_is_unknown() -> None:
    step = reduce(Turn(plan=plan(DONE, RUNNING)), Ran(index=1, ok=False, result="late", unknown=True))
    assert results(only(step, CloseGroup).plan)[1] == ("unknown", "late")


# Where it is decided


def test_only_the_reducer_decides_on_interruptions_and_it_says_how() -> None:
    deciding = {"interrupts", "DropPlan", "CloseGroup", "TakeMail", "OpenPlan"}
    package = Path(turn_module.__file__).parents[1]
    deciders = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in deciding
    }
    assert deciders == {"agent/turn.py"}
    explained = turn_module.__doc__ or ""
    assert all(word in explained for word in ("interruption", "withdrawn", "in order", "echo", "person", "tool call"))


# Whatever happens, in any order


calls = st.builds(
    call,
    st.sampled_from(["look", "fire", "pay"]),
    effect=st.sampled_from(get_args(Effect)),
    gated=st.booleans(),
)
letters = st.lists(
    st.builds(Letter, id=st.just("m"), in_seq=st.just(1), from_person=st.booleans(), echo=st.booleans()), max_size=3
).map(tuple)

recoveries: st.SearchStrategy[Event] = st.sampled_from((Resumed(), Resumed(), Poisoned("crashes")))
endings: st.SearchStrategy[Event] = st.sampled_from((Stopped(), Poisoned("crashes"), Dismissed()))


class Driven:
    """What a store would hold, kept by the simplest means: it writes what the reducer says and nothing else."""

    def __init__(self) -> None:
        self.turn = Turn(rules=Rules(max_withdrawals=2, max_rounds=6))
        self.state = "llm"
        self.effect: Ask | Run | Rest = Ask()
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
            case Ask():
                return ["answer", "fail", *always]
            case Run():
                return ["ran", "tool changed", *always]
        return ["wake", "judge"] if self.state == "wait_approval" else ["wake"]

    def happens(self, event: Event, mail: tuple[Letter, ...]) -> None:
        self.turn = replace(self.turn, mail=mail)
        self.not_run = None
        if isinstance(event, ToolChanged) and not event.again:
            self.not_run = event.index
            self.runs.remove((self.plans, event.index))
            if event.gated:
                self.needs_approval.add((self.plans, event.index))
        step = reduce(self.turn, event)
        for write in step.writes:
            self.write(write)
        self.effect = step.effect
        if isinstance(step.effect, Run):
            assert self.turn.plan is not None
            one = self.turn.plan.calls[step.effect.index]
            assert one.state == "started"
            this = (self.plans, step.effect.index)
            if isinstance(event, Judged):
                self.approved.add(this)
            assert this not in self.needs_approval or this in self.approved, "a call was run without approval"
            if one.effect == "unsafe":
                assert (self.plans, step.effect.index) not in self.runs, "an unsafe call was run twice"
            self.runs.append((self.plans, step.effect.index))
        self.holds()

    def write(self, write: Write) -> None:
        match write:
            case OpenPlan(plan=opened):
                assert self.turn.plan is None
                self.turn = replace(self.turn, plan=opened)
                self.plans += 1
            case Change(index=index, state=state, result=result):
                assert self.turn.plan is not None
                assert self.turn.plan.calls[index].state not in OVER, "a call that was over changed"
                self.turn = replace(self.turn, plan=self.turn.plan.having(index, state, result))
            case Reclassify(index=index, effect=effect, gated=gated):
                assert self.turn.plan is not None
                self.turn = replace(self.turn, plan=self.turn.plan.reclassified(index, effect, gated))
            case CloseGroup(plan=closed):
                assert self.turn.plan is not None
                assert all(one.state in OVER and one.result for one in closed.calls)
                for index, (before, after) in enumerate(zip(self.turn.plan.calls, closed.calls, strict=True)):
                    assert before.state not in OVER or before == after, "a real result was replaced"
                    ran = before.state == "started" and index != self.not_run
                    assert after.state != "cancelled" or not ran, "it ran, and is said not to have"
                self.turn = replace(self.turn, plan=None)
                self.said.append("group")
            case DropPlan(plan=dropped):
                assert self.turn.plan is None and all(one.state == "planned" for one in dropped.calls)
                self.dropped.append(dropped)
            case TakeMail():
                self.turn = replace(self.turn, mail=())
                self.said.append("user")
            case Say(text=text):
                self.said.append(text)
            case Count(withdrawals=withdrawals, rounds=rounds):
                self.turn = replace(self.turn, withdrawals=withdrawals, rounds=rounds)
            case NextTurn():
                self.turn = replace(self.turn, withdrawals=0, rounds=0)
            case Become(state=state):
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
                event = Answered(text=f"said {number}", calls=planned)
            case "fail":
                event = ModelFailed(words="busy", then=data.draw(st.sampled_from(["retry", "block", "give_up"])))
            case "ran":
                assert isinstance(driven.effect, Run)
                event = Ran(index=driven.effect.index, ok=data.draw(st.booleans()), result=f"result {number}")
            case "tool changed":
                assert isinstance(driven.effect, Run) and driven.turn.plan is not None
                run = driven.effect
                # A tool that was put under approval stays so for this run of the test, and so does its effect.
                gated = driven.turn.plan.calls[run.index].gated or data.draw(st.booleans())
                event = ToolChanged(index=run.index, effect="unsafe", gated=gated, again=run.again)
            case "judge":
                event = Judged(data.draw(st.booleans()))
            case "stop":
                event = Stopped(data.draw(st.sampled_from(["", "partly"])))
            case _:
                event = data.draw(recoveries)
        driven.happens(event, mail)
    if driven.state not in ("idle", "wait_retry", "blocked"):
        driven.happens(data.draw(endings), ())
        assert driven.turn.plan is None and driven.state in ("idle", "terminated")
