"""Checks after every step, and after all agents are idle.

The oracle keeps its own copy of histories, owners and acknowledged messages, and compares them with the database.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.agent.context import build_request, render_row
from coterie.llm.providers.openai import Dialect
from coterie.llm.types import ToolSpec
from coterie.messages import PERSON, SYSTEM
from coterie.testing.dialects import (
    anthropic_body,
    check_anthropic,
    check_openai_chat,
    check_openai_responses,
    check_strict_alternation,
    responses_input,
)
from coterie.turn import RunCall
from coterie.turn_store import Claim, HistoryRow

from .fake_model import TOOLS
from .world import AGENTS, World

_STRICT = Dialect(system_role=False, strict_alternation=True)
_RESTING = ("idle", "terminated")


class Violation(AssertionError):
    """A guarantee does not hold."""


class Oracle:
    def __init__(self, world: World) -> None:
        self._world = world
        self._owners: dict[str, Claim] = {}
        self._histories: dict[str, list[HistoryRow]] = {name: [] for name in AGENTS}
        self._numbers: dict[str, tuple[int, int]] = {}
        self.acknowledged: dict[str, str] = {}
        """Recipients of acknowledged messages, by id."""
        self.withdrawn: set[str] = set()

    # Ownership

    def claimed(self, claim: Claim) -> None:
        self._owners[claim.agent_id] = claim

    def advanced(self, before: Claim, after: Claim, *, checked: bool) -> None:
        if self.is_stale(before):
            raise Violation(f"{before.agent_id}: a step was written although another worker had taken over")
        self._owners[before.agent_id] = after
        if checked and isinstance(after.action, RunCall):
            self._was_silent(after)

    def fenced(self, claim: Claim) -> None:
        if not self.is_stale(claim):
            raise Violation(f"{claim.agent_id}: a valid claim was rejected")

    def terminated(self, agent_id: str) -> None:
        self._owners.pop(agent_id, None)

    def is_stale(self, claim: Claim) -> bool:
        return self._owners.get(claim.agent_id) is not claim

    def _was_silent(self, claim: Claim) -> None:
        """A message of the person must stop the next call, unless it answers the approval question."""
        spoken = self._world.rows(
            "SELECT id FROM messages WHERE recipient = ? AND sender = ? AND state = 'pending' AND option IS NULL",
            claim.agent_id,
            PERSON,
        )
        if spoken:
            raise Violation(f"{claim.agent_id}: a call was started although the person had spoken: {spoken[0][0]}")

    # After every step

    def check_step(self) -> None:
        rows = self._world.rows(
            "SELECT id, state, runnable_at, waiting, epoch, step_no, next_hist_seq,"
            " EXISTS (SELECT 1 FROM plans WHERE agent_id = id AND outcome = 'open') FROM agents WHERE kind = 'agent'"
        )
        for agent_id, state, runnable_at, waiting, epoch, step_no, next_hist, planning in rows:
            before = self._numbers.get(str(agent_id), (0, 0))
            self._numbers[str(agent_id)] = now = (int(str(epoch)), int(str(step_no)))
            if now[0] < before[0] or now[1] < before[1]:
                raise Violation(f"A3: {agent_id} went back from {before} to {now}")
            if state in _RESTING and (waiting or planning or runnable_at is not None):
                raise Violation(f"A1: {agent_id} is {state} with {waiting} waiting and {planning} plans open")
            if bool(planning) != (state in ("tools", "wait_approval")):
                raise Violation(f"A2: {agent_id} is {state} with {planning} plans open")
            if int(str(next_hist)) != len(self._histories[str(agent_id)]) + 1:
                self._read_on(str(agent_id))

    def _read_on(self, agent_id: str) -> None:
        """Check the new rows of a history. After every commit it ends with a closed call group."""
        known = self._histories[agent_id]
        new = self._world.history(agent_id, len(known))
        open_calls: list[str] = []
        for number, row in enumerate(new, len(known) + 1):
            if row.seq != number:
                raise Violation(f"H6: row {number} of {agent_id}'s history has the number {row.seq}")
            if row.role == "tool":
                if not open_calls or open_calls.pop(0) != row.call_id:
                    raise Violation(f"H3: {agent_id} has a result of {row.call_id} that nobody waited for")
                continue
            if open_calls:
                raise Violation(f"H2: {agent_id} has calls without results: {open_calls}")
            open_calls = [call.id for call in row.calls]
        if open_calls:
            raise Violation(f"H5: {agent_id}'s history ends inside a group: {open_calls}")
        known += new

    # At the end

    def check_final_state(self, witness: Mapping[str, int]) -> None:
        """Check the database after all agents are idle."""
        found = self._world.violations()
        if found:
            raise Violation("; ".join(found[:3]))
        for name in AGENTS:
            self._examine_history(name)
        self._examine_messages()
        self._examine_effects(witness)
        self._examine_answers()

    def _examine_history(self, agent_id: str) -> None:
        now = self._world.history(agent_id)
        kept = [(row.seq, row.role, row.text, row.calls, row.call_id) for row in self._histories[agent_id]]
        if kept != [(row.seq, row.role, row.text, row.calls, row.call_id) for row in now]:
            raise Violation(f"H6: {agent_id}'s history was changed after it was written")
        if complaint := complaints(now):
            raise Violation(f"H11: {agent_id}: {complaint}")

    def _examine_messages(self) -> None:
        rows = self._world.rows(
            "SELECT m.id, m.state, m.recipient, (SELECT count(*) FROM history WHERE message_id = m.id),"
            " (SELECT state FROM agents WHERE id = m.recipient) FROM messages m"
        )
        stored = {str(row[0]): row[1:] for row in rows}
        for message_id, recipient in self.acknowledged.items():
            if message_id not in stored:
                raise Violation(f"M6: {message_id} was acknowledged and is not stored")
            state, to, times, recipient_state = stored[message_id]
            gone = message_id in self.withdrawn or (state == "dead" and recipient_state == "terminated")
            if to != recipient or times != (0 if gone else 1):
                raise Violation(f"{message_id} to {to} is {state} and stands {times} times in the history")

    def _examine_effects(self, witness: Mapping[str, int]) -> None:
        rows = self._world.rows("SELECT agent_id, turn_no, step_no, idx, name, effect, state, result FROM calls")
        for agent_id, turn_no, step_no, idx, name, effect, state, result in rows:
            key = f"{agent_id}/{turn_no}/{step_no}/{idx}"
            times = witness.get(key, 0)
            if effect == "unsafe" and times > 1:
                raise Violation(f"A5: the unsafe call {key} happened {times} times")
            if state in ("done", "failed") and not times and name != "send_message":
                raise Violation(f"{key} is {state} and never happened")
            if state == "cancelled" and times:
                raise Violation(f"{key} happened, and the model was told that it did not: {result}")

    def _examine_answers(self) -> None:
        """The text that ended a turn was sent once to each asker of the turn."""
        turns: dict[tuple[str, int], list[HistoryRow]] = {}
        for name in AGENTS:
            for row in self._world.history(name):
                turns.setdefault((name, row.turn_no), []).append(row)
        automatic = {str(row[0]) for row in self._world.rows("SELECT id FROM messages WHERE automatic = 1")}
        sent = Counter(
            (str(sender), str(to), json.loads(str(payload)).get("text"))
            for sender, to, payload in self._world.rows("SELECT sender, recipient, payload FROM messages")
        )
        for (name, turn_no), rows in turns.items():
            last = rows[-1]
            if last.role != "assistant" or last.calls or last.text.startswith("["):
                continue
            askers = {row.message.sender for row in rows if row.message and row.message.id not in automatic}
            for asker in askers - {name, SYSTEM}:
                if (times := sent[name, asker, last.text]) != 1:
                    raise Violation(f"{name}'s answer {last.text!r} of turn {turn_no} reached {asker} {times} times")


def complaints(history: Sequence[HistoryRow], tools: Sequence[ToolSpec] = TOOLS) -> str | None:
    """Return the first error that any model API would report for this history."""
    if not history:
        return None
    request = build_request("You are an agent.", "", map(render_row, history), tuple(tools))
    body: dict[str, Any] = Dialect().body(request, "m", None, stream=False)
    messages = body["messages"]
    checks = (
        ("chat", check_openai_chat(messages, body["tools"])),
        ("responses", check_openai_responses(responses_input(messages))),
        ("anthropic", check_anthropic(anthropic_body(messages, body["tools"]))),
        ("local", check_strict_alternation(_STRICT.messages(request))),
    )
    return next((f"{name}: {complaint}" for name, complaint in checks if complaint), None)
