"""Model-based tests of interruptions and delays: a list is the expected history, another one the expected mailbox."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from coterie.clock import from_ms
from coterie.errors import Refused
from coterie.llm.service import ToolCall
from coterie.messages import make_envelope
from coterie.plan import INTERRUPTED_RESULT, UNKNOWN_RESULT, PlannedCall
from coterie.stores.sql import commands
from coterie.turn import AskModel, CallEnded, Event, Interrupted, ModelAnswered, Rest, RunCall
from coterie.turn_store import Claim, StaleClaim
from tests.test_bus_model import machine_settings

from .world import LIMITS, RULES, World

Row = tuple[str, str]


class InterruptionMachine(RuleBasedStateMachine):
    """Agent ada gets messages of the person and of an agent, and crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.claim: Claim | None = None
        self.history: list[Row] = []
        self.mail: list[tuple[str, str]] = []
        self.plan: list[str] | None = None
        """The results so far of the calls of the open plan."""
        self.calls = self.rounds = self.withdrawals = self.cuts = self.count = 0
        self.checked = 0
        self.progress = False

    # The model

    def take_mail(self) -> None:
        self.history += [("user", text) for _, text in self.mail]
        self.mail = []

    def interrupted(self) -> bool:
        if any(sender == "user" for sender, _ in self.mail):
            return True
        return bool(self.mail) and self.withdrawals < RULES.max_withdrawals

    def finish(self, text: str) -> None:
        self.history.append(("assistant", text))
        self.rounds = self.withdrawals = self.cuts = 0
        self.take_mail()

    def result(self, text: str) -> None:
        """A call has ended: the plan goes on, or is closed."""
        assert self.plan is not None
        self.plan.append(text)
        if len(self.plan) < self.calls and not self.interrupted():
            return
        rest = [INTERRUPTED_RESULT] * (self.calls - len(self.plan))
        self.history += [("assistant", ""), *(("tool", one) for one in self.plan + rest)]
        self.plan, self.withdrawals = None, 0
        self.take_mail()

    # Rules

    @precondition(lambda self: len(self.mail) < LIMITS.mailbox)
    @rule(sender=st.sampled_from(["user", "bob", "bob"]))
    def speak(self, sender: str) -> None:
        self.count += 1
        text = f"{sender} says {self.count}"
        self.world.send(make_envelope(sender=sender, to="ada", payload={"text": text}))
        self.mail.append((sender, text))

    @precondition(lambda self: self.claim is None and self.mail)
    @rule()
    def begin(self) -> None:
        self.take_mail()
        self.rounds = self.withdrawals = self.cuts = 0
        self.claim = self.claimed()
        assert self.claim.action == AskModel()

    @precondition(lambda self: self.claim and self.plan is None)
    @rule()
    def answer(self) -> None:
        self.count += 1
        more = bool(self.mail)
        self.finish(f"answer {self.count}")
        self.advance(ModelAnswered(text=f"answer {self.count}"), AskModel() if more else Rest())

    @precondition(lambda self: self.claim and self.plan is None and self.cuts < RULES.max_cuts)
    @rule()
    def cut(self) -> None:
        self.count += 1
        self.cuts += 1
        self.take_mail()
        self.advance(Interrupted(partial_text=f"cut {self.count}", service="main"), AskModel())

    @precondition(lambda self: self.claim and self.plan is None)
    @rule(calls=st.integers(1, 3))
    def make_a_plan(self, calls: int) -> None:
        planned = tuple(PlannedCall(call=ToolCall(id="c", name="fire", arguments={})) for _ in range(calls))
        effect: AskModel | RunCall | Rest = AskModel()
        if self.interrupted():
            by_person = any(sender == "user" for sender, _ in self.mail)
            self.withdrawals = 0 if by_person else self.withdrawals + 1
            self.rounds += not by_person
            self.take_mail()
        elif self.rounds + 1 >= RULES.max_rounds:
            effect = AskModel() if self.mail else Rest()
            self.finish(f"I stopped after {RULES.max_rounds} rounds without coming to an end. Shall I go on?")
        else:
            self.plan, self.calls, self.rounds, effect = [], calls, self.rounds + 1, RunCall(0)
        self.advance(ModelAnswered(text="", calls=planned), effect)

    @precondition(lambda self: self.claim and self.plan is not None)
    @rule(ok=st.booleans())
    def a_call_ends(self, ok: bool) -> None:
        assert self.plan is not None
        index = len(self.plan)
        self.result(f"result {index}")
        self.advance(CallEnded(index=index, ok=ok, result=f"result {index}"), self.next_effect())

    @precondition(lambda self: self.claim and self.progress)
    @rule()
    def crash(self) -> None:
        stale, self.progress = self.claim, False
        assert stale
        self.world.restart()
        if self.plan is None:
            self.take_mail()
        else:
            self.result(UNKNOWN_RESULT)
        self.claim = self.claimed()
        assert self.claim.action == self.next_effect()
        with pytest.raises(StaleClaim):
            self.world.advance(stale, ModelAnswered(text="from the grave"), None)

    def next_effect(self) -> AskModel | RunCall:
        return AskModel() if self.plan is None else RunCall(len(self.plan))

    def advance(self, event: Event, expected: AskModel | RunCall | Rest) -> None:
        assert self.claim
        self.claim = self.world.advance(self.claim, event, None)
        assert self.claim.action == expected
        self.progress = True
        if isinstance(expected, Rest):
            self.claim = None

    def claimed(self) -> Claim:
        """Return the claim of ada. The other agents end their turns silently."""
        claims = {claim.agent_id: claim for claim in self.world.claim("w", 5)}
        ada = claims.pop("ada")
        for claim in claims.values():
            self.world.advance(claim, ModelAnswered(text=""), None)
        return ada

    # Invariants

    @invariant()
    def the_history_equals_the_model(self) -> None:
        self.check_history(after=self.checked)
        self.checked = len(self.history)

    @invariant()
    def the_mailbox_has_the_unread_messages(self) -> None:
        rows = self.world.rows("SELECT id FROM messages WHERE recipient = 'ada' AND state = 'pending'")
        assert len(rows) == len(self.mail)

    def check_history(self, after: int) -> None:
        rows = self.world.history("ada", after)
        said = [(row.role, row.message.payload["text"] if row.message else row.text) for row in rows]
        assert said == self.history[after:]

    def teardown(self) -> None:
        self.check_history(after=0)
        assert self.world.violations() == []
        self.world.close()


@dataclass
class Late:
    id: str
    order: int
    deliver_at: int
    state: str = "delayed"
    early: bool = False


class DelayMachine(RuleBasedStateMachine):
    """Messages to ada that are delayed, moved, withdrawn, delivered on time or early, and read."""

    messages = Bundle("messages")

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.sent: dict[str, Late] = {}
        self.box: list[Late] = []
        """Those delivered and not yet read, in order."""

    def due(self, until: int | None) -> list[Late]:
        waiting = [one for one in self.sent.values() if one.state == "delayed"]
        return sorted(
            (one for one in waiting if until is None or one.deliver_at <= until),
            key=lambda one: (one.deliver_at, one.order),
        )

    def delivered(self, due: list[Late], *, early: bool) -> None:
        for one in due:
            one.state, one.early = "pending", early and one.deliver_at > self.world.now
            self.box.append(one)

    @initialize()
    def begin(self) -> None:
        self.world.promote()

    @rule(target=messages, delay=st.sampled_from([1, 2, 2, 50, 999, 1000, 60_000]))
    def send(self, delay: int) -> str:
        envelope = make_envelope(sender="user", to="ada", payload={"text": "x"}, delay_ms=delay)
        try:
            self.world.send(envelope)
        except Refused as refusal:
            assert refusal.code == "mailbox_full" and len(self.box) >= LIMITS.mailbox
            return ""
        assert len(self.box) < LIMITS.mailbox
        self.sent[envelope.id] = Late(envelope.id, len(self.sent), self.world.now + delay)
        return envelope.id

    @rule(milliseconds=st.sampled_from([1, 49, 998, 1000, 59_000]))
    def time_passes(self, milliseconds: int) -> None:
        self.world.tick(timedelta(milliseconds=milliseconds))

    @rule(early=st.sampled_from([False, False, False, True]))
    def promote(self, early: bool) -> None:
        due = self.due(None if early else self.world.now)
        promotion = self.world.promote(early=early)
        assert [one.message_id for one in promotion.delivered] == [one.id for one in due]
        self.delivered(due, early=early)
        left = self.due(None)
        soonest = from_ms(left[0].deliver_at) - from_ms(self.world.now) if left else None
        assert promotion.next_due == soonest

    @rule(message_id=messages, delay=st.sampled_from([1, 700, 90_000]))
    def move(self, message_id: str, delay: int) -> None:
        if (one := self.sent.get(message_id)) is None:
            return
        try:
            by = timedelta(milliseconds=delay)
            self.world.transact(lambda db, uow: commands.reschedule(db, uow, message_id, by, "user"))
        except Refused as refusal:
            assert refusal.code == "already_delivered" and one.state != "delayed"
        else:
            assert one.state == "delayed"
            one.deliver_at = self.world.now + delay

    @rule(message_id=consumes(messages))
    def withdraw(self, message_id: str) -> None:
        if (one := self.sent.get(message_id)) is None:
            return
        try:
            self.world.withdraw(message_id)
        except Refused as refusal:
            assert refusal.code == "already_taken" and one.state == "taken"
            return
        assert one.state in ("delayed", "pending", "withdrawn")
        one.state = "withdrawn"
        self.box = [other for other in self.box if other.id != message_id]

    @rule()
    def read(self) -> None:
        claims = self.world.claim("w", 1)
        assert len(claims) == bool(self.box)
        for claim in claims:
            self.world.advance(claim, ModelAnswered(text="read"), None)
        for one in self.box:
            one.state = "taken"
        self.box = []

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @invariant()
    def the_mailbox_is_in_order_and_early_messages_are_marked(self) -> None:
        rows = self.world.rows(
            "SELECT id, early FROM messages WHERE recipient = 'ada' AND state = 'pending' ORDER BY in_seq"
        )
        assert rows == [(one.id, one.early) for one in self.box]

    def teardown(self) -> None:
        assert self.world.violations() == []
        states = self.world.rows("SELECT id, state FROM messages WHERE recipient = 'ada'")
        assert sorted(states) == sorted((one.id, one.state) for one in self.sent.values())
        self.world.close()


MACHINES = [InterruptionMachine, DelayMachine]


@pytest.mark.parametrize("machine", MACHINES)
def test_turns_and_delays_follow_their_models(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=machine_settings(20, 30))


@pytest.mark.full
@pytest.mark.parametrize("machine", MACHINES)
def test_turns_and_delays_follow_their_models_over_many_long_histories(
    machine: type[RuleBasedStateMachine],
) -> None:
    run_state_machine_as_test(machine, settings=machine_settings(300, 50))
