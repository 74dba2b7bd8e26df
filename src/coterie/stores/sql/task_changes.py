"""Changes of the counters of tasks within one transaction.

Every message that is stored, taken or withdrawn, every turn and every model request changes the counters of its task in
its own transaction. A transaction never reads a counter to change it: it adds to it, and the state follows in SQL. So a
process remembers nothing of a task, and transactions of several processes need no lock before they commit.

A task has no row while it consists only of a first message that waits for an agent. The row is written when the
message leaves the mailbox (`UnitOfWork.leave_queue`), so a send costs no more than its message.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec
from msgspec.structs import astuple

from coterie.llm.service import TokenUsage
from coterie.messages import PERSON
from coterie.stores.sql.rows import Connection, insert

IS_WAITING_TASK = """
messages.task IS NULL AND messages.state = 'pending' AND messages.deliver_at IS NULL AND messages.recipient <> 'user'
"""
"""True for a message that is the only part of its task so far: the task has no row yet."""


def starts_with_row(recipient: str, deliver_at: int | None) -> bool:
    """True if a task has a row as soon as its first message is stored, or due."""
    return recipient == PERSON or deliver_at is not None


class TaskChange(msgspec.Struct, gc=False):
    """What is added to the counters of one task. Most fields are columns of `tasks`."""

    queued: int = 0
    active: int = 0
    questions: int = 0
    messages: int = 0
    turns: int = 0
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    tool_calls: int = 0
    model_ms: int = 0
    cost: int = 0
    unpriced: int = 0
    budgets: int = 0
    budget_asks: int = 0
    failed: int = -1
    """Whether the last message to the person reported a failure; -1: none was sent."""
    budget_question: str | None = None
    """The question that is opened now."""
    closes_question: int = 0
    """1: the budget question is answered."""
    adds_later: int = 0
    """1: a message was scheduled that starts a task of its own. A stopped task may not do that either."""
    stops: int = 0
    """1: the task is stopped, and what it scheduled in the same batch is withdrawn."""

    def open_question(self, question: str) -> None:
        self.budget_question, self.closes_question = question, 0

    def close_question(self) -> None:
        self.budget_question, self.closes_question = None, 1

    def add_usage(self, usage: TokenUsage) -> None:
        self.requests += 1
        self.input_tokens += usage.input_tokens
        self.output_tokens += usage.output_tokens
        self.cached_tokens += usage.cached_tokens
        self.model_ms += usage.model_ms
        if usage.cost is None:
            self.unpriced += 1
        else:
            self.cost += usage.cost

    def merge(self, later: TaskChange) -> None:
        """Add a change that was made after this one."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        if later.failed >= 0:
            self.failed = later.failed
        self.adds_later = later.adds_later if later.stops else self.adds_later | later.adds_later
        if later.budget_question:
            self.open_question(later.budget_question)
        elif later.closes_question:
            self.close_question()

    @property
    def is_visible(self) -> bool:
        """True if the change is worth an event. Tokens, cost and tool calls alone are not: another change follows."""
        return (
            any(astuple(self)[:VISIBLE])
            or bool(self.budgets or self.budget_asks or self.budget_question or self.closes_question)
            or self.failed >= 0
        )

    def to_assignments(self, at: int) -> tuple[str, dict[str, Any]]:
        """Return the SET list of the changed columns, and its parameters. Writing all costs three times as much."""
        parameters = {name: value for name, value in zip(_SUMMED, astuple(self), strict=False) if value}
        summed = tuple(parameters)
        parameters["at"] = at
        # A turn of the batch may have begun before a job of the same batch stopped the task.
        begins_turn = self.turns > 0 and not self.stops
        adds_work = self.queued > 0 or self.active > 0 or begins_turn or self.adds_later == 1
        if self.failed >= 0:
            parameters["failed"] = self.failed
        if self.budget_question:
            parameters["budget_question"] = self.budget_question
        changes_question = self.closes_question == 1 or self.budget_question is not None
        sets = _assignments(summed, self.failed >= 0, adds_work, changes_question, self.closes_question == 1)
        return sets, parameters


@cache
def _assignments(
    summed: tuple[str, ...], sets_failed: bool, adds_work: bool, changes_question: bool, closes_question: bool
) -> str:
    assigned = ["last_at = :at", *(f"{name} = {name} + :{name}" for name in summed)]
    if sets_failed:
        assigned.append("failed = :failed")
    if changes_question:
        assigned.append("budget_question = NULL" if closes_question else "budget_question = :budget_question")
    if sets_failed or adds_work or {"queued", "active", "questions"} & {*summed}:
        queued, active, questions = (
            f"{name} + :{name}" if name in summed else name for name in ("queued", "active", "questions")
        )
        # A stopped task gets no more work. If it was stopped since this transaction looked, its state becomes NULL,
        # which the table refuses: the transaction is run again, and then refuses the message.
        assigned.append(
            f"state = CASE WHEN stopped_at IS NOT NULL THEN {'NULL' if adds_work else repr('stopped')}"
            f" WHEN {queued} + {active} > 0 THEN 'working' WHEN {questions} > 0 THEN 'waiting'"
            f" WHEN {':failed' if sets_failed else 'failed'} = 1 THEN 'failed' ELSE 'done' END"
        )
    return ", ".join(assigned)


_SUMMED = TaskChange.__struct_fields__[: TaskChange.__struct_fields__.index("failed")]
VISIBLE = 5
"""Number of first fields whose change is worth an event: all but usage."""
_EMPTY = TaskChange()


_COUNTED = _SUMMED[: _SUMMED.index("budgets")]
NEW_TASKS = f"tasks (id, parent, sender, agent, created_at, last_at, state, failed, {', '.join(_COUNTED)})"
"""Table and columns for `insert`."""
FirstMessage = tuple[str, str | None, str, str, int]
"""Id of the first message of a task, parent task, sender, recipient and time."""


def _new_row(first: FirstMessage, change: TaskChange, at: int) -> tuple[Any, ...]:
    state, failed = "working", max(change.failed, 0)
    if change.queued + change.active == 0:
        state = "waiting" if change.questions else "failed" if failed else "done"
    return (*first, at, state, failed, *astuple(change)[: len(_COUNTED)])


class TaskChanges:
    """The tasks that one transaction starts or changes."""

    def __init__(self) -> None:
        self._new: dict[str, FirstMessage] = {}
        self._changes: dict[str, TaskChange] = {}

    def start(self, task_id: str, parent: str | None, sender: str, agent: str, at: int) -> None:
        self._new[task_id] = (task_id, parent, sender, agent, at)

    def is_new(self, task_id: str) -> bool:
        """True if this transaction starts the task and has not written it yet."""
        return task_id in self._new

    def of(self, task_id: str) -> TaskChange:
        """Return what this transaction adds to the task; the caller adds to it."""
        change = self._changes.get(task_id)
        if change is None:
            change = self._changes[task_id] = TaskChange()
        return change

    def pending(self, task_id: str) -> TaskChange:
        """Return what is not written yet. Do not change it."""
        return self._changes.get(task_id, _EMPTY)

    def write_new(self, db: Connection, at: int) -> None:
        """Insert the tasks that start. Their changes so far are in the rows."""
        if self._new:
            changes = self._changes
            insert(db, NEW_TASKS, [_new_row(first, changes.pop(first[0], _EMPTY), at) for first in self._new.values()])
            self._new = {}

    def take_changes(self) -> dict[str, TaskChange]:
        """Return the changes of tasks that exist, and forget them."""
        changes, self._changes = self._changes, {}
        return {task_id: change for task_id, change in changes.items() if change != _EMPTY}


def merge_changes(changes: Iterable[tuple[str, TaskChange, int]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the UPDATEs for changes of several jobs, with their parameters: one for all tasks that change equally.

    Their parameter `tasks` has the ids. Tasks that change alone come in the order of ids.
    """
    merged: dict[str, tuple[TaskChange, int]] = {}
    for task_id, change, at in changes:
        if task_id in merged:
            before, earlier = merged[task_id]
            before.merge(change)
            merged[task_id] = (before, max(at, earlier))
        else:
            merged[task_id] = (msgspec.structs.replace(change), at)
    equal: dict[tuple[Any, ...], list[str]] = {}
    for task_id, (change, at) in sorted(merged.items()):
        sets, parameters = change.to_assignments(at)
        equal.setdefault((sets, *parameters.items()), []).append(task_id)
    return [
        (f"UPDATE tasks SET {sets} WHERE id = ANY (:tasks)", {**dict(parameters), "tasks": task_ids})
        for (sets, *parameters), task_ids in equal.items()
    ]


def is_stopped(db: Connection, task_id: str) -> bool:
    row = db.execute("SELECT stopped_at FROM tasks WHERE id = :id", {"id": task_id}).fetchone()
    return row is not None and row[0] is not None


def read_budget_question(db: Connection, task_id: str) -> str | None:
    """Return the id of the open question whether the task may go on."""
    row = db.execute("SELECT budget_question FROM tasks WHERE id = :id", {"id": task_id}).fetchone()
    return row[0] if row else None


def was_started_via(db: Connection, task_id: str | None, via: str | None) -> bool:
    """True if the task's first message came through the key `via`; None: from the person or an agent."""
    row = db.execute("SELECT via FROM messages WHERE id = :id", {"id": task_id}).fetchone()
    return (row[0] if row else None) == via
