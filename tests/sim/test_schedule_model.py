"""Model-based test of recurring messages: whatever happens, an active one has exactly one next occurrence."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from coterie.errors import Refused
from coterie.messages import PERSON, make_envelope
from coterie.stores.sql import commands, schedules
from coterie.turn import ModelAnswered

from .world import World

EVERY = st.sampled_from(["1m", "7m", "1h", "* * * * * UTC", "*/5 * * * * UTC", "daily 00:10 Europe/Berlin"])


class ScheduleMachine(RuleBasedStateMachine):
    known = Bundle("schedules")

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.state: dict[str, str] = {}
        """State of each schedule, by id."""
        self.terminated: set[str] = set()

    @rule(
        target=known, every=EVERY, to=st.sampled_from(["ada", "bob", PERSON]), sender=st.sampled_from(["cyd", PERSON])
    )
    def send(self, every: str, to: str, sender: str) -> str:
        envelope = make_envelope(sender=sender, to=to, payload={"text": "again"}, every=every)
        try:
            receipt = self.world.send(envelope)
        except Refused as refusal:
            assert refusal.code == "mailbox_full" or (refusal.code == "recipient_terminated" and to in self.terminated)
            return ""
        assert receipt.schedule_id is not None
        self.state[receipt.schedule_id] = "active"
        return receipt.schedule_id

    @rule(seconds=st.sampled_from([1, 59, 60, 61, 600, 86_400, 900_000]))
    def time_passes(self, seconds: int) -> None:
        self.world.tick(timedelta(seconds=seconds))

    @rule(early=st.sampled_from([False, False, False, True]))
    def promote(self, early: bool) -> None:
        before = self.world.now
        promotion = self.world.promote(early=early)
        assert not early or not promotion.delivered  # recurring messages are never early
        assert promotion.next_due is None or early or promotion.next_due > timedelta(0)
        assert self.world.now == before
        self._end_those_to_terminated_agents()

    def _end_those_to_terminated_agents(self) -> None:
        rows = self.world.rows("SELECT id FROM schedules WHERE state = 'ended'")
        recipients = {row[0]: row[1] for row in self.world.rows("SELECT id, recipient FROM schedules")}
        for (schedule_id,) in rows:
            assert self.state[str(schedule_id)] == "ended" or recipients[schedule_id] in self.terminated
            self.state[str(schedule_id)] = "ended"

    @rule(
        schedule=known,
        paused=st.sampled_from([None, True, False]),
        every=st.one_of(st.none(), EVERY),
        seconds=st.sampled_from([None, 0, 1, 3_000, 200_000]),
    )
    def change(self, schedule: str, paused: bool | None, every: str | None, seconds: int | None) -> None:
        delay = None if seconds is None else timedelta(seconds=seconds)
        if schedule not in self.state:
            return
        try:
            changed = self.world.transact(
                lambda db, uow: schedules.change_schedule(db, uow, schedule, PERSON, every, paused, delay)
            )
        except Refused as refusal:
            if refusal.code == "already_ended":
                assert self.state[schedule] == "ended"
            else:
                assert refusal.code == "recipient_terminated" and self.terminated
            return
        if paused is not None:
            self.state[schedule] = "paused" if paused else "active"
        assert changed.state == self.state[schedule]

    @rule(schedule=known)
    def end(self, schedule: str) -> None:
        if schedule in self.state:
            self.world.transact(lambda db, uow: schedules.end_schedule(db, uow, schedule, PERSON))
            self.state[schedule] = "ended"

    @rule(schedule=known)
    def skip_one(self, schedule: str) -> None:
        for (message_id,) in self._pending(schedule):
            self.world.withdraw(str(message_id))

    @rule(schedule=known, seconds=st.sampled_from([1, 3_000, 200_000]))
    def move_one(self, schedule: str, seconds: int) -> None:
        by = timedelta(seconds=seconds)
        if pending := self._pending(schedule):
            message_id = str(pending[0][0])
            self.world.transact(lambda db, uow: commands.reschedule(db, uow, message_id, by, PERSON))

    def _pending(self, schedule: str) -> list[tuple[object, ...]]:
        return list(self.world.rows("SELECT id FROM messages WHERE schedule_id = ? AND state = 'delayed'", schedule))

    @rule()
    def read(self) -> None:
        for claim in self.world.claim("w", 3):
            self.world.advance(claim, ModelAnswered(text=""), None)

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @rule(agent_id=st.sampled_from(["ada", "cyd"]), wanted=st.integers(0, 9))
    def terminate(self, agent_id: str, wanted: int) -> None:
        if wanted == 0 and agent_id not in self.terminated:
            self.world.terminate(agent_id)
            self.terminated.add(agent_id)
            for (schedule_id,) in self.world.rows("SELECT id FROM schedules WHERE sender = ?", agent_id):
                self.state[str(schedule_id)] = "ended"

    @invariant()
    def every_schedule_is_in_its_state_and_has_as_many_occurrences_as_it_should(self) -> None:
        assert self.world.violations() == []
        assert dict(self.world.rows("SELECT id, state FROM schedules")) == self.state  # type: ignore[arg-type]
        crowded = self.world.rows(
            "SELECT schedule_id FROM messages"
            " WHERE state = 'pending' AND schedule_id IS NOT NULL AND recipient <> 'user'"
            " GROUP BY schedule_id HAVING count(*) > 1"
        )
        assert not crowded, "an agent has two messages of one schedule to read"

    def teardown(self) -> None:
        self.world.close()


def machine_settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )


def test_recurring_messages_follow_their_model() -> None:
    run_state_machine_as_test(ScheduleMachine, settings=machine_settings(25, 30))


@pytest.mark.full
def test_recurring_messages_follow_their_model_over_many_long_histories() -> None:
    run_state_machine_as_test(ScheduleMachine, settings=machine_settings(400, 60))
