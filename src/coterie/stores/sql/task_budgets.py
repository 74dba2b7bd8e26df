"""Budgets of tasks: whether a task may make one more request, and the one question to the person at its limit."""

from __future__ import annotations

from typing import NamedTuple

from coterie.messages import PERSON, Envelope, encode_payload, validate_payload
from coterie.stores.sql.rows import Connection, to_payload
from coterie.stores.sql.task_changes import is_stopped
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.tasks import MAX_TITLE, Budget, BudgetReason, TaskTotals, budget_payload, budget_question_id, exceeded

_SELECT_BUDGET = """
SELECT turns, input_tokens, output_tokens, cost, model_ms, budgets, budget_asks, budget_question FROM tasks
 WHERE id = :id
"""
_SELECT_ASKS = """
SELECT tasks.id, tasks.budget_asks FROM messages JOIN tasks ON tasks.id = messages.task
 WHERE messages.id = :id AND messages.question = 1
"""
# The row of the agent at the limit is not written yet.
_SELECT_WORKERS = """
SELECT agents.name
  FROM agents
  LEFT JOIN (SELECT agent_id, min(started_at) AS began FROM all_turns WHERE task = :task GROUP BY agent_id) AS worked
         ON worked.agent_id = agents.id
 WHERE worked.agent_id IS NOT NULL OR agents.id = :agent_id
 ORDER BY CASE WHEN worked.began IS NULL THEN 1 ELSE 0 END, worked.began, agents.id LIMIT 20
"""


class _BudgetRow(NamedTuple):
    """Columns of `_SELECT_BUDGET`."""

    turns: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: int = 0
    model_ms: int = 0
    budgets: int = 1
    budget_asks: int = 0
    budget_question: str | None = None

    @property
    def used(self) -> TaskTotals:
        return TaskTotals(
            turns=self.turns,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            cost=self.cost,
            model_ms=self.model_ms,
        )


def find_exceeded(
    db: Connection, uow: UnitOfWork, task_id: str, budget: Budget, *, with_turn: bool = False
) -> BudgetReason | None:
    """Return the limit that forbids one more request of the task. `with_turn`: the request takes one more turn."""
    row = _read(db, uow, task_id)
    return exceeded(budget, row.budgets, row._replace(turns=row.turns + with_turn).used)


def ask_about_budget(
    db: Connection, uow: UnitOfWork, task_id: str, budget: Budget, agent_id: str, cause: str | None
) -> None:
    """Ask the person whether the task may go on, unless that question is open already.

    If the person has granted more meanwhile, the agent tries again.
    """
    uow.mailbox(PERSON)  # locked: of two processes at the limit, the second finds the question of the first
    row = _read(db, uow, task_id)
    reason = exceeded(budget, row.budgets, row.used)
    if row.budget_question:
        return
    if reason is None:
        uow.mailbox(agent_id).runnable_at = uow.now
        return
    question = budget_question_id(task_id, row.budget_asks + 1)
    names = [name for (name,) in db.execute(_SELECT_WORKERS, {"task": task_id, "agent_id": agent_id})]
    payload = budget_payload(task_id, _read_text(db, task_id), names, reason, budget, row.budgets, row.used)
    uow.accept(
        Envelope(
            id=question,
            sender=agent_id,
            to=PERSON,
            payload_json=encode_payload(validate_payload(payload)),
            may_exist=True,
            is_question=True,
            cause=cause,
        ),
        hops=0,
        task=task_id,
        reply_checked=True,
    )
    change = uow.tasks.of(task_id)
    change.budget_asks += 1
    change.open_question(question)


def find_budget_task(db: Connection, question: str) -> str | None:
    """Return the task that `question` asks a budget for. None: it is no budget question."""
    row = db.execute(_SELECT_ASKS, {"id": question}).fetchone()
    # Agents can write any `budget` into their payloads; only our own ids count.
    is_ours = row and any(budget_question_id(row[0], number) == question for number in range(1, row[1] + 1))
    return row[0] if is_ours else None


def reopen_budget_question(db: Connection, uow: UnitOfWork, question: str) -> None:
    """Open a budget question again whose answer was withdrawn. Close it if it is no longer needed."""
    if (task_id := find_budget_task(db, question)) is None:
        return
    if _read(db, uow, task_id).budget_question or is_stopped(db, task_id):
        uow.close_question(question)
    else:
        uow.tasks.of(task_id).open_question(question)


def _read(db: Connection, uow: UnitOfWork, task_id: str) -> _BudgetRow:
    """Read what the task has used, with what this transaction and its batch add."""
    found = None if uow.tasks.is_new(task_id) else db.execute(_SELECT_BUDGET, {"id": task_id}).fetchone()
    row = _BudgetRow._make(found) if found else _BudgetRow()
    for change in uow.unwritten_changes(task_id):
        question = row.budget_question
        if change.budget_question:
            question = change.budget_question
        elif change.closes_question:
            question = None
        row = _BudgetRow(
            row.turns + change.turns,
            row.input_tokens + change.input_tokens,
            row.output_tokens + change.output_tokens,
            row.cost + change.cost,
            row.model_ms + change.model_ms,
            row.budgets + change.budgets,
            row.budget_asks + change.budget_asks,
            question,
        )
    return row


def _read_text(db: Connection, task_id: str) -> str:
    row = db.execute("SELECT CAST(payload AS BLOB) FROM messages WHERE id = :id", {"id": task_id}).fetchone()
    text = to_payload(task_id, row[0]).get("text") if row else None
    return text[:MAX_TITLE] if isinstance(text, str) else ""
