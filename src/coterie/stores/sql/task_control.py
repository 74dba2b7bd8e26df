"""Stop and continue of a whole task, each in one transaction."""

from __future__ import annotations

from coterie.errors import Refused
from coterie.messages import PERSON
from coterie.stores.sql import reminders, schedules, task_budgets
from coterie.stores.sql.mailbox import reopen_questions
from coterie.stores.sql.rows import STORED_MESSAGE_COLUMNS, Connection, StoredMessage
from coterie.stores.sql.task_changes import IS_WAITING_TASK
from coterie.stores.sql.turn_transaction import TurnTransaction
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.tasks import StoppedTask
from coterie.turn import Rules

_SELECT_STOPPED = "SELECT stopped_at FROM tasks WHERE id = :id"
_SELECT_WAITING = f"SELECT seq FROM messages WHERE id = :id AND {IS_WAITING_TASK}"
_STOP_TASK = "UPDATE tasks SET stopped_at = :at, state = 'stopped', budget_question = NULL WHERE id = :id"
# A paused schedule has no delayed message. Its sender took the message that caused it.
_PAUSED_SCHEDULES = """
FROM messages JOIN schedules ON schedules.sender = messages.recipient AND schedules.cause = messages.id
WHERE (messages.id = :task OR messages.task = :task) AND schedules.state <> 'ended' AND schedules.state = 'paused'
"""
SELECT_INVOLVED = f"""
SELECT id FROM agents WHERE task = :task
 UNION
SELECT id FROM agents WHERE other_tasks IS NOT NULL AND replace(other_tasks, :task, '') <> other_tasks
 UNION
SELECT recipient FROM messages
 WHERE (id = :task OR task = :task OR parent_task = :task) AND state IN ('pending', 'delayed')
 UNION
SELECT schedules.recipient {_PAUSED_SCHEDULES}
"""
"""Agents whose rows the stop of a task changes."""
_SELECT_TURNS = "SELECT id FROM agents WHERE task = :task ORDER BY id"
_SELECT_SHARED_TURNS = """
SELECT id FROM agents WHERE other_tasks IS NOT NULL AND replace(other_tasks, :task, '') <> other_tasks ORDER BY id
"""
_SELECT_QUEUED = f"""
SELECT {STORED_MESSAGE_COLUMNS} FROM messages
 WHERE (id = :task OR task = :task OR parent_task = :task)
   AND (state = 'delayed' OR (state = 'pending' AND recipient <> 'user')) ORDER BY recipient, seq
"""
_SELECT_PAUSED_SCHEDULES = f"""
SELECT schedules.id, schedules.recipient {_PAUSED_SCHEDULES} ORDER BY schedules.recipient, schedules.id
"""
_SELECT_QUESTIONS = """
SELECT id FROM messages
 WHERE (id = :task OR task = :task) AND question = 1 AND answered_by IS NULL AND state IN ('pending', 'taken')
 ORDER BY seq
"""


def stop_task(db: Connection, uow: UnitOfWork, task_id: str) -> StoppedTask:
    """End everything of the task that runs or would run. What tools have done stays done. Idempotent."""
    uow.flush_messages()
    uow.write_tasks()  # a task that this transaction started must be in the database
    if _stop_waiting(db, uow, task_id):
        return StoppedTask(messages=1)
    # Locked before its messages are read: a transaction that adds one waits, and then finds the task stopped.
    uow.lock_tasks([task_id])
    row = db.execute(_SELECT_STOPPED, {"id": task_id}).fetchone()
    if row is None:
        raise unknown_task(task_id)
    if row[0] is not None:
        return StoppedTask()
    db.execute(_STOP_TASK, {"id": task_id, "at": uow.timestamp})
    change = uow.tasks.of(task_id)
    change.stops = 1
    change.close_question()  # an earlier job of the batch may have opened one that is not written yet
    questions = [question for (question,) in db.execute(_SELECT_QUESTIONS, {"task": task_id}).fetchall()]
    closed = sum(uow.close_question(question, stopped=True) for question in questions)
    agent_ids = _stop_turns(db, uow, task_id)
    messages = _withdraw_messages(db, uow, task_id)
    uow.record_event("task.changed", task_id)
    return StoppedTask(turns=len(agent_ids), messages=messages, questions=closed, agent_ids=agent_ids)


def _stop_waiting(db: Connection, uow: UnitOfWork, task_id: str) -> bool:
    """Stop a task that consists only of a first message that waits. False: it is not such a task."""
    seq = db.execute(_SELECT_WAITING, {"id": task_id}).fetchone()
    if seq is None:
        return False
    uow.mailbox(uow.read_stored(*seq).recipient)  # locked: no other process takes the message now
    if db.execute(_SELECT_WAITING, {"id": task_id}).fetchone() is None:
        return False
    uow.withdraw(uow.read_stored(*seq))
    uow.write_tasks()
    db.execute(_STOP_TASK, {"id": task_id, "at": uow.timestamp})
    uow.record_event("task.changed", task_id)
    return True


def _stop_turns(db: Connection, uow: UnitOfWork, task_id: str) -> list[str]:
    """End the turns of the task. A turn with messages of other tasks goes on for those."""
    agent_ids = [agent_id for (agent_id,) in db.execute(_SELECT_TURNS, {"task": task_id}).fetchall()]
    for agent_id in agent_ids:
        mailbox = uow.mailbox(agent_id)
        turn = TurnTransaction(db, uow, agent_id, Rules())
        if mailbox.other_tasks:
            turn.drop_task(task_id)
        else:
            turn.stop()
        uow.ended_epochs[agent_id] = mailbox.epoch
    for (agent_id,) in db.execute(_SELECT_SHARED_TURNS, {"task": task_id}).fetchall():
        mailbox = uow.mailbox(agent_id)
        others = [other for other in (mailbox.other_tasks or "").split() if other != task_id]
        mailbox.other_tasks = " ".join(others) or None
    return agent_ids


def _withdraw_messages(db: Connection, uow: UnitOfWork, task_id: str) -> int:
    uow.flush_messages()
    rows = [StoredMessage._make(row) for row in db.execute(_SELECT_QUEUED, {"task": task_id}).fetchall()]
    for row in rows:
        if row.schedule_id and row.state == "delayed":
            schedules.end_schedule(db, uow, row.schedule_id, PERSON)
        else:
            uow.withdraw(row)
    for row in rows:
        _undo_answer(db, uow, row, task_id)
    for schedule_id, recipient in db.execute(_SELECT_PAUSED_SCHEDULES, {"task": task_id}).fetchall():
        uow.mailbox(recipient)
        schedules.end_schedule(db, uow, schedule_id, PERSON)
    return len(rows)


def _undo_answer(db: Connection, uow: UnitOfWork, withdrawn: StoredMessage, task_id: str) -> None:
    """Reopen questions of other tasks that the withdrawn message answered."""
    if withdrawn.sender == PERSON:
        uow.lock_questions()
    reopened = reopen_questions(db, uow.tasks, withdrawn.id) if withdrawn.sender == PERSON else []
    for question, task in reopened:
        if task == task_id:
            uow.close_question(question, stopped=True)
        else:
            task_budgets.reopen_budget_question(db, uow, question)
            uow.record_event("quick_replies.changed", question)
    reminders.restore_reminders(db, uow, withdrawn.id)


def grant_budget(db: Connection, uow: UnitOfWork, task_id: str) -> None:
    """Add one more budget and let the agents go on that are blocked by the last one."""
    uow.tasks.of(task_id).budgets += 1
    retry_blocked(db, uow, task_id)


def retry_blocked(db: Connection, uow: UnitOfWork, task_id: str) -> None:
    """Let the agents try again that are blocked by the budget. Those that are still over it ask the person again."""
    for (agent_id,) in db.execute(_SELECT_TURNS, {"task": task_id}).fetchall():
        mailbox = uow.mailbox(agent_id)
        if mailbox.state == "blocked" and mailbox.over_budget and not mailbox.hold:
            mailbox.runnable_at = uow.now
            uow.record_event("agent.state", agent_id)


def continue_task(db: Connection, uow: UnitOfWork, task_id: str) -> None:
    """Answer the budget question with Continue, or grant a budget ahead. `Refused` if the task was stopped."""
    if db.execute(_SELECT_WAITING, {"id": task_id}).fetchone():
        return  # nothing of it has run: it has its whole budget
    row = db.execute("SELECT stopped_at, budget_question FROM tasks WHERE id = :id", {"id": task_id}).fetchone()
    if row is None:
        raise unknown_task(task_id)
    stopped_at, question = row
    if stopped_at is not None:
        raise Refused("task_stopped", "this task was stopped: send a new message instead")
    if question and uow.close_question(question):
        uow.tasks.of(task_id).close_question()
    grant_budget(db, uow, task_id)


def unknown_task(task_id: str) -> Refused:
    return Refused("unknown_task", f"there is no task {task_id!r}")
