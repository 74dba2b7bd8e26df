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
from coterie.llm.service import ToolSpec
from coterie.messages import NEW_CHAIN_DELAY, PERSON, SYSTEM, Envelope, Receipt
from coterie.tasks import NANO, budget_question_id
from coterie.testing.dialects import (
    anthropic_body,
    check_anthropic,
    check_openai_chat,
    check_openai_responses,
    check_strict_alternation,
    responses_input,
)
from coterie.turn import AskModel, Interrupted, RunCall
from coterie.turn_store import Claim, HistoryRow

from .fake_model import TOOLS
from .world import AGENTS, World

_STRICT = Dialect(system_role=False, strict_alternation=True)
_RESTING = ("idle", "terminated")
_AT_WORK = ("llm", "tools", "wait_approval", "wait_retry")


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
        self._cuts: Counter[str] = Counter()
        """Texts of cut answers, each of which occurs once in a run."""
        self.moot: set[str] = set()
        """Reminders whose question was answered before they were sent."""
        self.rescheduled: set[str] = set()
        self._stopped: dict[str, tuple[object, ...]] = {}
        """Stopped tasks: how many turns, messages and messages in histories each had then."""
        self._working_turns: set[tuple[str, int]] = set()
        """Turns that have asked a model."""

    # Ownership

    def claimed(self, claim: Claim) -> None:
        self._owners[claim.agent_id] = claim
        if isinstance(claim.action, RunCall):
            self._check_interruption(claim)
        elif isinstance(claim.action, AskModel):
            self._check_budget(claim)

    def advanced(self, before: Claim, after: Claim, *, checked: bool) -> None:
        if self.is_stale(before):
            raise Violation(f"{before.agent_id}: a step was written although another worker had taken over")
        self._owners[before.agent_id] = after
        if checked and isinstance(after.action, RunCall):
            self._check_interruption(after)
        elif isinstance(after.action, AskModel):
            self._check_budget(after)

    def was_cut(self, after: Claim, cut: Interrupted) -> None:
        """The mail that fits is taken, the model is asked again, and the text is kept outside the history."""
        self._cuts[cut.partial_text] += 1
        waiting = self._world.rows("SELECT id FROM messages WHERE recipient = ? AND state = 'pending'", after.agent_id)
        is_left = bool(waiting) and not self._world.rules.mail_budget
        # A part of the mail without a message of the person may find the budget used up.
        ((is_blocked,),) = self._world.rows("SELECT over_budget FROM agents WHERE id = ?", after.agent_id)
        if is_left or not (isinstance(after.action, AskModel) or is_blocked):
            raise Violation(f"{after.agent_id}: after a cut {len(waiting)} messages wait, and {after.action} follows")

    def fenced(self, claim: Claim) -> None:
        if not self.is_stale(claim):
            raise Violation(f"{claim.agent_id}: a valid claim was rejected")

    def terminated(self, agent_id: str) -> None:
        self._owners.pop(agent_id, None)

    def is_stale(self, claim: Claim) -> bool:
        return self._owners.get(claim.agent_id) is not claim

    def _check_interruption(self, claim: Claim) -> None:
        """A message of the person must stop the next call, unless it answers the approval question."""
        spoken = self._world.rows(
            "SELECT id FROM messages WHERE recipient = ? AND sender = ? AND state = 'pending' AND option IS NULL",
            claim.agent_id,
            PERSON,
        )
        if spoken:
            raise Violation(f"{claim.agent_id}: a call was started although the person had spoken: {spoken[0][0]}")

    # Tasks

    def task_stopped(self, task: str) -> None:
        """The claims of its turns are stale from now on."""
        self._stopped.setdefault(task, self._extent(task))
        for agent_id, epoch in self._world.rows("SELECT id, epoch FROM agents"):
            owner = self._owners.get(str(agent_id))
            if owner and owner.epoch < int(str(epoch)):
                del self._owners[str(agent_id)]

    def _extent(self, task: str) -> tuple[object, ...]:
        return self._world.rows(
            "SELECT (SELECT count(*) FROM all_turns WHERE task = ?), (SELECT count(*) FROM messages WHERE task = ?),"
            " (SELECT count(*) FROM history JOIN messages ON messages.id = history.message_id"
            "   WHERE messages.id = ? OR messages.task = ?)",
            *(task,) * 4,
        )[0]

    def _check_budget(self, claim: Claim) -> None:
        """A model is asked only within the budget, or about the person's own message."""
        turn, budget = (claim.agent_id, claim.turn_no), self._world.rules.budget
        is_new = turn not in self._working_turns
        self._working_turns.add(turn)
        ((budgets,),) = self._world.rows("SELECT budgets FROM tasks WHERE id = ?", claim.task)
        granted = int(str(budgets))
        rows = self._world.rows("SELECT agent_id, turn_no FROM all_turns AS turns WHERE task = ?", claim.task)
        turns = len(self._working_turns & {(str(agent_id), int(str(turn_no))) for agent_id, turn_no in rows})
        ((tokens, cost, ms),) = self._world.rows(
            "SELECT coalesce(sum(input_tokens + output_tokens), 0), coalesce(sum(cost), 0), coalesce(sum(model_ms), 0)"
            " FROM llm_calls WHERE task = ?",
            claim.task,
        )
        is_over = (
            (is_new and budget.turns and turns > budget.turns * granted)
            or (budget.tokens and int(str(tokens)) >= budget.tokens * granted)
            or (budget.cost and int(str(cost)) >= budget.cost * NANO * granted)
            or (budget.minutes and int(str(ms)) >= budget.minutes * 60_000 * granted)
        )
        if is_over and not self._answers_person(claim.agent_id):
            raise Violation(f"{claim.agent_id} asks its model beyond the budget of {claim.task}")

    def _answers_person(self, agent_id: str) -> bool:
        last = self._world.rows(
            "SELECT messages.sender FROM history LEFT JOIN messages ON messages.id = history.message_id"
            " WHERE history.agent_id = ? ORDER BY history.seq DESC LIMIT 1",
            agent_id,
        )
        taken = self._world.rows(
            "SELECT messages.sender FROM history JOIN messages ON messages.id = history.message_id"
            " WHERE history.agent_id = ? AND messages.taken_at = ?",
            agent_id,
            self._world.now,
        )
        return (PERSON,) in (*last, *taken)

    def is_stopped(self, task: str) -> bool:
        return task in self._stopped

    def expected_task(self, envelope: Envelope) -> str | None:
        """The task that a message without cause joins. None: it starts one."""
        if envelope.sender != PERSON or envelope.every or envelope.delay >= NEW_CHAIN_DELAY:
            return None
        if envelope.delay and envelope.in_reply_to is None:
            return None  # it answers no question
        questions = self._world.rows(
            "SELECT coalesce(task, id) FROM messages WHERE sender = ? AND question = 1 AND answered_by IS NULL"
            " AND state IN ('pending', 'taken') ORDER BY seq",
            envelope.to,
        )
        if questions:
            return str(questions[-1][0])
        ((state, task),) = self._world.rows("SELECT state, task FROM agents WHERE id = ?", envelope.to)
        return str(task) if state in _AT_WORK and not envelope.delay else None

    def check_receipt(self, receipt: Receipt, expected: str | None) -> None:
        if receipt.task != (expected or receipt.message_id):
            raise Violation(f"{receipt.message_id} belongs to the task {receipt.task}, not to {expected}")

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
            # While the model answers a question about a call, that call waits for approval.
            if bool(planning) != (state in ("tools", "wait_approval")) and not (planning and state == "llm"):
                raise Violation(f"A2: {agent_id} is {state} with {planning} plans open")
            if int(str(next_hist)) != len(self._histories[str(agent_id)]) + 1:
                self._read_on(str(agent_id))

        forgotten = self._world.rows(
            "SELECT agents.id FROM agents JOIN tasks ON tasks.id = agents.task WHERE agents.over_budget = 1"
            " AND agents.runnable_at IS NULL AND agents.hold = 0 AND tasks.budget_question IS NULL"
        )
        if forgotten:
            raise Violation(f"{forgotten[0][0]} is blocked by a budget, and nobody is asked about it")
        unheard = self._world.rows(
            "SELECT agents.id FROM agents JOIN messages ON messages.recipient = agents.id AND messages.sender = ?"
            " WHERE agents.over_budget = 1 AND agents.runnable_at IS NULL AND agents.hold = 0"
            " AND messages.state = 'pending'",
            PERSON,
        )
        if unheard:
            raise Violation(f"{unheard[0][0]} is blocked by a budget, and does not hear the person")

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
                    raise Violation(f"H3: {agent_id} has a result of {row.call_id} without a call")
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
        self._examine_cuts()
        self._examine_messages()
        self._examine_effects(witness)
        self._examine_answers()
        self._examine_tasks()
        self._examine_reminders()

    def _examine_history(self, agent_id: str) -> None:
        now = self._world.history(agent_id)
        kept = [(row.seq, row.role, row.text, row.calls, row.call_id) for row in self._histories[agent_id]]
        if kept != [(row.seq, row.role, row.text, row.calls, row.call_id) for row in now]:
            raise Violation(f"H6: {agent_id}'s history was changed after it was written")
        if error := first_error(now) or first_error(self._world.view(agent_id).rows):
            raise Violation(f"H11: {agent_id}: {error}")

    def _examine_cuts(self) -> None:
        kept = Counter(str(text) for (text,) in self._world.rows("SELECT text FROM plans WHERE text LIKE 'cut%'"))
        if kept != self._cuts:
            raise Violation(f"cut answers {self._cuts} were written, {kept} are kept")
        sent = self._world.rows("SELECT content FROM history WHERE content LIKE 'cut%' AND role = 'assistant'")
        if sent or self._world.rows("SELECT 1 FROM messages WHERE payload LIKE '%\"cut%'"):
            raise Violation(f"H13: cut answers are in the history or were sent: {sent}")

    def _examine_messages(self) -> None:
        rows = self._world.rows(
            "SELECT m.id, m.state, m.recipient, (SELECT count(*) FROM history WHERE message_id = m.id),"
            " (SELECT state FROM agents WHERE id = m.recipient), coalesce(m.task, m.id), m.parent_task,"
            " m.unless_answered FROM messages m"
        )
        stored = {str(row[0]): row[1:] for row in rows}
        for message_id, recipient in self.acknowledged.items():
            if message_id not in stored:
                raise Violation(f"M6: {message_id} was acknowledged and is not stored")
            state, to, times, recipient_state, task, parent, unless_answered = stored[message_id]
            gone = message_id in self.withdrawn or (state == "dead" and recipient_state == "terminated")
            if state == "withdrawn" and (task in self._stopped or parent in self._stopped or unless_answered):
                gone = True
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
                raise Violation(f"{key} ran, but its result says that it did not: {result}")

    def _examine_answers(self) -> None:
        """The text that ended a turn was sent once to each asker of the turn."""
        turns: dict[tuple[str, int], list[HistoryRow]] = {}
        for name in AGENTS:
            for row in self._world.history(name):
                turns.setdefault((name, row.turn_no), []).append(row)
        stopped = {
            str(message_id)
            for task in self._stopped
            for (message_id,) in self._world.rows("SELECT id FROM messages WHERE id = ? OR task = ?", task, task)
        }
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
            # Messages of a stopped task may have been answered before the stop.
            hidden = {row.message.sender for row in rows if row.message and row.message.id in stopped}
            for asker in askers - {name, SYSTEM} - hidden:
                if (times := sent[name, asker, last.text]) != 1:
                    raise Violation(f"{name}'s answer {last.text!r} of turn {turn_no} reached {asker} {times} times")

    def _examine_tasks(self) -> None:
        """Every message has the task of its cause; a stopped task has not grown; no budget question was asked twice."""
        for task, extent in self._stopped.items():
            if (now := self._extent(task)) != extent:
                raise Violation(f"{task} was stopped with {extent} turns, messages and messages taken, and has {now}")
        wrong = self._world.rows(
            "SELECT m.id, m.task, m.parent_task, coalesce(c.task, c.id) FROM messages m"
            " JOIN messages c ON c.id = CASE WHEN m.automatic = 1 THEN m.in_reply_to ELSE m.cause END"
            # Approvals and budget questions belong to the task that the turn counts for.
            " WHERE m.payload NOT LIKE '%\"approval\"%' AND m.payload NOT LIKE '%\"budget\"%'"
            "   AND ((CASE WHEN m.schedule_id IS NOT NULL OR m.deliver_at - m.created_at >= 60000"
            "             THEN CASE WHEN m.task IS NULL THEN m.parent_task END ELSE m.task END) IS NULL"
            "    OR (CASE WHEN m.schedule_id IS NOT NULL OR m.deliver_at - m.created_at >= 60000"
            "             THEN m.parent_task ELSE m.task END) <> coalesce(c.task, c.id))"
        )
        for message_id, own, parent, expected in wrong:
            if not (message_id in self.rescheduled and own is None and parent == expected):
                raise Violation(f"{message_id} belongs to {own} (parent {parent}), but its cause to {expected}")
        for over_budget, asks in self._world.rows("SELECT id, budget_asks FROM tasks WHERE budget_asks > 0"):
            ids = [budget_question_id(str(over_budget), number) for number in range(1, int(str(asks)) + 2)]
            found = [
                question
                for question in ids
                if self._world.rows("SELECT 1 FROM messages WHERE id = ? AND answered_by IS NULL", question)
            ]
            if len(found) > 1:
                raise Violation(f"{over_budget} has {len(found)} open budget questions")

    def _examine_reminders(self) -> None:
        """A reminder fired if, and only if, its question had no answer."""
        rows = self._world.rows(
            "SELECT m.id, m.state, coalesce(m.task, m.id), m.parent_task, m.delivered_at, a.state, a.created_at"
            " FROM messages m JOIN messages q ON q.id = m.unless_answered LEFT JOIN messages a"
            " ON a.state <> 'withdrawn' AND a.recipient = m.sender"
            " AND (a.id = q.answered_by"
            " OR (a.in_reply_to = q.id AND a.sender = q.recipient AND coalesce(a.option, 0) >= 0)"
            # One answer is for all messages of the asker that its turn has read; it may have been sent by a tool.
            " OR (a.sender = q.recipient AND (a.id = m.withdrawn_by OR (a.automatic = 1 AND EXISTS ("
            "SELECT 1 FROM history asked JOIN history other ON other.agent_id = asked.agent_id"
            " AND other.turn_no = asked.turn_no JOIN messages taken ON taken.id = other.message_id"
            " WHERE asked.message_id = q.id AND taken.id = a.in_reply_to AND taken.sender = q.sender"
            " AND coalesce(taken.option, 0) >= 0)))))"
            " ORDER BY m.seq, a.seq"
        )
        for message_id, state, task, parent, delivered_at, answer_state, answered_at in rows:
            if state == "withdrawn":
                is_ended = task in self._stopped or parent in self._stopped
                if answer_state is None and not is_ended and message_id not in self.moot | self.withdrawn:
                    raise Violation(f"{message_id} was withdrawn, although nobody has answered")
            # An answer that became a dead letter has not arrived.
            elif answer_state in (None, "dead") or delivered_at is None:
                continue
            elif int(str(answered_at)) < int(str(delivered_at)):
                raise Violation(f"{message_id} was delivered after the answer to its question")


def first_error(history: Sequence[HistoryRow], tools: Sequence[ToolSpec] = TOOLS) -> str | None:
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
    return next((f"{name}: {error}" for name, error in checks if error), None)
