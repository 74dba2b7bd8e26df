"""The bus compared with a model: random sends, delays, withdrawals, reschedules, restarts and time steps."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from coterie.agents import Agent
from coterie.bus import MessageBus
from coterie.errors import Refused
from coterie.store import Limits
from coterie.stores.sqlite import SqliteStore
from coterie.testing import FakeClock

T = TypeVar("T")
AGENTS = ["ada", "bob"]
MAILBOX = 6


@dataclass
class Expected:
    """A message as the model knows it."""

    id: str
    to: str
    order: int
    state: str
    deliver_at: datetime | None
    position: int | None = None
    early: bool = False


class BusMachine(RuleBasedStateMachine):
    messages = Bundle("messages")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        # In memory if possible: the time of a flush does not matter here.
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.clock = FakeClock()
        self.expected: dict[str, Expected] = {}
        self.positions = dict.fromkeys([*AGENTS, "user"], 0)
        self.terminated: set[str] = set()
        self.clients: dict[str, str] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @initialize()
    def open(self) -> None:
        async def work() -> None:
            path = Path(self.folder.name) / "data"
            self.store = await SqliteStore.open(path, self.clock, limits=Limits(mailbox=MAILBOX), durability="relaxed")
            people = [Agent(id="user", name="You", kind="person")]
            await self.store.add_agents(people + [Agent(id=name, name=name) for name in AGENTS])
            self.bus = MessageBus(self.store, self.clock)
            self.bus.start()

        self.run(work())

    # The model

    def deliver(self, message: Expected, *, early: bool = False) -> None:
        if message.to in self.terminated:
            message.state = "dead"
            return
        self.positions[message.to] += 1
        message.state, message.position, message.early = "pending", self.positions[message.to], early

    def due(self, until: datetime | None) -> list[Expected]:
        delayed = [m for m in self.expected.values() if m.state == "delayed" and m.deliver_at]
        chosen = [m for m in delayed if until is None or (m.deliver_at and m.deliver_at <= until)]
        return sorted(chosen, key=lambda m: (m.deliver_at, m.order))

    def pending(self, name: str) -> list[Expected]:
        waiting = [m for m in self.expected.values() if m.to == name and m.state == "pending"]
        return sorted(waiting, key=lambda m: m.position or 0)

    # Actions

    @rule(target=messages, to=st.sampled_from(AGENTS), delay=st.sampled_from([None, 0, 1, 40, 1000, 20_000]))
    def send(self, to: str, delay: int | None) -> str:
        return self.send_as(None, to, delay)

    @rule(target=messages, client=st.sampled_from("xyz"), to=st.sampled_from(AGENTS))
    def send_again(self, client: str, to: str) -> str:
        return self.send_as(client, to, None)

    def send_as(self, client: str | None, to: str, delay: int | None) -> str:
        call = self.bus.send(sender="user", to=to, payload={"text": "x"}, delay_ms=delay, client_id=client)
        if client in self.clients:
            receipt = self.run(call)
            assert receipt.message_id == self.clients[client]
            return receipt.message_id
        full = len(self.pending(to)) >= MAILBOX
        try:
            receipt = self.run(call)
        except Refused as refusal:
            assert (refusal.code == "recipient_terminated") == (to in self.terminated)
            assert (refusal.code == "mailbox_full") == (to not in self.terminated and full)
            return ""
        assert to not in self.terminated and not full
        deliver_at = self.clock.now() + timedelta(milliseconds=delay) if delay else None
        message = Expected(receipt.message_id, to, len(self.expected), "delayed", deliver_at)
        self.expected[message.id] = message
        if client:
            self.clients[client] = message.id
        if not delay:
            self.deliver(message)
        return message.id

    @rule(milliseconds=st.sampled_from([1, 39, 999, 1000, 20_000]))
    def time_passes(self, milliseconds: int) -> None:
        until = self.clock.now() + timedelta(milliseconds=milliseconds)
        self.run(self.clock.advance(milliseconds=milliseconds))
        for message in self.due(until):
            self.deliver(message)

    @rule(message_id=consumes(messages))
    def withdraw(self, message_id: str) -> None:
        if not (message := self.expected.get(message_id)):
            return
        try:
            self.run(self.bus.withdraw(message_id))
        except Refused as refusal:
            assert refusal.code == "already_taken" and message.state in ("taken", "dead")
            return
        assert message.state in ("delayed", "pending", "withdrawn")
        message.state = "withdrawn"

    @rule(message_id=messages, delay=st.sampled_from([1, 500, 40_000]))
    def reschedule(self, message_id: str, delay: int) -> None:
        if not (message := self.expected.get(message_id)):
            return
        try:
            self.run(self.bus.reschedule(message_id, delay))
        except Refused as refusal:
            assert refusal.code == "already_delivered" and message.state != "delayed"
            return
        assert message.state == "delayed"
        message.deliver_at = self.clock.now() + timedelta(milliseconds=delay)

    @rule(name=st.sampled_from(AGENTS), sure=st.integers(0, 9))
    def terminate(self, name: str, sure: int) -> None:
        if sure:  # rarely, or no agent would be left
            return
        self.run(self.store.terminate(name))
        self.terminated.add(name)
        for message in self.pending(name):
            message.state = "dead"

    @rule(deliver=st.booleans())
    def stop_and_start(self, deliver: bool) -> None:
        async def work() -> None:
            await self.bus.stop(deliver_delayed=deliver)
            await self.store.close()

        self.run(work())
        for message in self.due(None) if deliver else []:
            self.deliver(message, early=True)
        self.open()

    # Invariants after each action

    @invariant()
    def mailboxes_hold_what_they_should_in_order(self) -> None:
        for name in AGENTS if hasattr(self, "store") else ():
            waiting = self.run(self.store.waiting(name))
            assert [message.id for message in waiting] == [message.id for message in self.pending(name)]
            assert [message.early for message in waiting] == [message.early for message in self.pending(name)]

    @invariant()
    def delayed_messages_are_counted_and_listed_by_due_time(self) -> None:
        if hasattr(self, "store"):
            listed = [message.id for message in self.run(self.store.delayed(limit=500))]
            assert listed == [message.id for message in self.due(None)]
            assert self.run(self.bus.delayed_count()) == len(listed)

    def teardown(self) -> None:
        async def work() -> None:
            assert [violation async for violation in self.store.violations()] == []
            for message in self.expected.values():
                stored = await self.store.message(message.id)
                assert stored is not None and stored.state == message.state
            await self.bus.stop(deliver_delayed=False)
            await self.store.close()

        if hasattr(self, "store"):
            self.run(work())
        self.runner.close()
        self.folder.cleanup()


def machine_settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def test_the_bus_does_what_its_model_says() -> None:
    run_state_machine_as_test(BusMachine, settings=machine_settings(15, 30))


@pytest.mark.full
def test_the_bus_does_what_its_model_says_over_many_long_histories() -> None:
    run_state_machine_as_test(BusMachine, settings=machine_settings(300, 50))
