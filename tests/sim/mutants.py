"""Wrong designs, each a small patch. The simulator must detect every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import msgspec

from coterie import turn
from coterie.agent.context import Conversation, HistoryCache
from coterie.llm.service import ToolCall
from coterie.messages import PERSON, Envelope, Message
from coterie.plan import INTERRUPTED_RESULT, Plan, PlannedCall
from coterie.stores.sql import commands, reminders, replies, task_budgets, task_control, turn_transaction
from coterie.stores.sql.inbox import Inbox
from coterie.stores.sql.replies import send_replies
from coterie.stores.sql.rows import StoredMessage, find_message, insert
from coterie.stores.sql.turn_transaction import TurnTransaction
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import AppendText, Event, Interrupted, RunCall, SetState, Step, Turn, WaitingMessage
from coterie.turn_store import Claim, ReplyTarget, StaleClaim

from .simulation import Simulation
from .world import World

_HISTORY = "history (agent_id, seq, turn_no, role, message_id, content, calls, call_id)"
Later = Callable[[Callable[[World], None]], None]
"""Defers a function to a second transaction, which a crash may prevent."""


def no_fence(later: Later) -> Iterator[Any]:
    """A worker whose agent was taken over goes on writing."""
    yield mock.patch.object(TurnTransaction, "check_fence", lambda transaction, claim: None)


def no_step_compare(later: Later) -> Iterator[Any]:
    """The fence compares only the epoch: a step can be written twice."""

    def fence(transaction: TurnTransaction, claim: Claim) -> None:
        if transaction.mailbox.epoch != claim.epoch:
            raise StaleClaim("taken over")

    yield mock.patch.object(TurnTransaction, "check_fence", fence)


def ack_first(later: Later) -> Iterator[Any]:
    """Messages are marked as taken, and appended to the history in a second transaction."""
    take_messages = TurnTransaction._take_messages

    def take(transaction: TurnTransaction) -> None:
        before = len(transaction._history_rows)
        take_messages(transaction)
        taken, transaction._history_rows = transaction._history_rows[before:], transaction._history_rows[:before]
        later(lambda world: world.transaction(lambda db: insert(db, _HISTORY, taken)))

    yield mock.patch.object(TurnTransaction, "_take_messages", take)


def append_first(later: Later) -> Iterator[Any]:
    """Messages are appended to the history, and marked as taken in a second transaction."""

    def take(transaction: TurnTransaction) -> None:
        waiting = transaction._inbox.messages_to_take()
        for message in waiting:
            transaction._append_history("user", message=find_message(transaction._db, message.id))
        later(lambda world: world.transaction(lambda db: mark(world, transaction._agent_id, waiting)))

    def mark(world: World, agent_id: str, messages: tuple[WaitingMessage, ...]) -> None:
        world.db.executemany(
            "UPDATE messages SET state = 'taken', taken_at = ? WHERE id = ?", [(world.now, one.id) for one in messages]
        )
        world.db.execute(
            "UPDATE agents SET waiting = waiting - ?, taken_seq = max(taken_seq, ?) WHERE id = ?",
            (len(messages), max((one.position for one in messages), default=0), agent_id),
        )

    yield mock.patch.object(TurnTransaction, "_take_messages", take)


def rerun_unsafe(later: Later) -> Iterator[Any]:
    """After a crash the running call is run again, even if it is unsafe."""
    resume = turn._resume

    def again(one: Turn) -> Step:
        index = one.plan.started_index() if one.plan else None
        return resume(one) if index is None else Step((SetState(state="tools"),), RunCall(index))

    yield mock.patch.object(turn, "_resume", again)


def resume_without_look(later: Later) -> Iterator[Any]:
    """After a crash a call runs again although messages have arrived."""
    resume = turn._resume
    yield mock.patch.object(turn, "_resume", lambda one: resume(msgspec.structs.replace(one, mail=())))


def forget_the_rest(later: Later) -> Iterator[Any]:
    """Of a burst only the part that fits is taken, and the rest counts as taken."""
    take_part = Inbox.take

    def take(inbox: Inbox) -> list[Message]:
        taken = take_part(inbox)
        inbox._mailbox.taken_seq = inbox._last_position
        return taken

    yield mock.patch.object(Inbox, "take", take)


def open_history(later: Later) -> Iterator[Any]:
    """The assistant's message is appended when its calls begin, their results when they have ended."""
    open_plan, close = TurnTransaction._open_plan, TurnTransaction._close_plan

    def opened(transaction: TurnTransaction, plan: Plan) -> None:
        open_plan(transaction, plan)
        assert transaction._plan
        transaction._append_history("assistant", content=plan.text, calls=[one.call for one in transaction._plan.calls])

    def closed(transaction: TurnTransaction, plan: Plan, by: str | None) -> None:
        before = len(transaction._history_rows)
        close(transaction, plan, by)
        del transaction._history_rows[before]
        transaction._history_rows[before:] = [
            (row[0], row[1] - 1, *row[2:]) for row in transaction._history_rows[before:]
        ]
        transaction.mailbox.next_hist_seq -= 1

    yield mock.patch.object(TurnTransaction, "_open_plan", opened)
    yield mock.patch.object(TurnTransaction, "_close_plan", closed)


def drop_executed(later: Later) -> Iterator[Any]:
    """A plan that is interrupted is withdrawn, even when some of its calls have run."""
    close = TurnTransaction._close_plan

    def drop(transaction: TurnTransaction, plan: Plan, by: str | None) -> None:
        if any(one.result == INTERRUPTED_RESULT for one in plan.calls):
            transaction._plan = None
            transaction._db.execute(
                "UPDATE plans SET outcome = 'withdrawn' WHERE outcome = 'open' AND agent_id = ?",
                (transaction._agent_id,),
            )
        else:
            close(transaction, plan, by)

    yield mock.patch.object(TurnTransaction, "_close_plan", drop)


def no_interruption_check(later: Later) -> Iterator[Any]:
    """Calls run although messages have arrived."""
    yield mock.patch.object(turn, "is_interrupted", lambda one: False)


def early_promote(later: Later) -> Iterator[Any]:
    """Delayed messages are delivered a second before they are due."""
    promote = commands.promote_due

    def early(db: Any, uow: UnitOfWork, limit: int, early: bool) -> Any:
        uow.now += 1_000
        return promote(db, uow, limit, early)

    yield mock.patch.object(commands, "promote_due", early)


def unfenced_read(later: Later) -> Iterator[Any]:
    """A worker reads its next action from the database without checking its claim."""

    def look(simulation: Simulation, claim: Claim) -> Claim:
        started = simulation.world.rows(
            "SELECT turn_no, step_no, idx, name FROM calls WHERE agent_id = ? AND state = 'started'", claim.agent_id
        )
        if not started:
            return claim
        turn_no, step_no, index, name = started[0]
        call = PlannedCall(call=ToolCall(id="", name=str(name), arguments={}))
        return msgspec.structs.replace(
            claim, plan_key=(int(str(turn_no)), int(str(step_no))), action=RunCall(int(str(index))), call=call
        )

    yield mock.patch.object(Simulation, "effect_of", look)


def non_atomic_idle(later: Later) -> Iterator[Any]:
    """One transaction finds that no message waits; a second one makes the agent idle."""
    change_state = TurnTransaction._change_state

    def lazily(transaction: TurnTransaction, write: SetState) -> None:
        if write.state != "idle":
            return change_state(transaction, write)
        change_state(transaction, SetState(state="llm"))
        return later(lambda world: set_idle(world, transaction._agent_id))

    def set_idle(world: World, agent_id: str) -> None:
        world.db.execute("UPDATE agents SET state = 'idle', runnable_at = NULL WHERE id = ?", (agent_id,))
        world.session.invalidate()

    yield mock.patch.object(TurnTransaction, "_change_state", lazily)


def two_phase_reply(later: Later) -> Iterator[Any]:
    """The turn ends, and a second transaction sends its answer."""

    def send(db: Any, uow: UnitOfWork, *turn: Any, **more: Any) -> tuple[str, ...]:
        later(lambda world: void(world.transact(lambda db, uow: send_replies(db, uow, *turn, **more))))
        return ()

    def void(_: object) -> None: ...

    yield mock.patch.object(turn_transaction, "send_replies", send)


def unversioned_memory(later: Later) -> Iterator[Any]:
    """A worker uses its cached conversation without comparing versions."""

    added = HistoryCache.apply_claim

    def recall(memory: HistoryCache, agent_id: str, version: int) -> Conversation | None:
        return memory._conversations.get(agent_id)

    def add(memory: HistoryCache, claim: Claim) -> None:
        if claim.added_rows is None or claim.added_rows:
            added(memory, claim)

    yield mock.patch.object(HistoryCache, "get", recall)
    yield mock.patch.object(HistoryCache, "apply_claim", add)


def keep_cut_text(later: Later) -> Iterator[Any]:
    """What the model said before it was cut stays in its history."""
    cut = turn._cut

    def keep(one: Turn, event: Interrupted) -> Step:
        step = cut(one, event)
        return Step((AppendText(event.partial_text), *step.writes), step.action)

    yield mock.patch.object(turn, "_cut", keep)


def cut_out_of_order(later: Later) -> Iterator[Any]:
    """After a cut the newest message is shown to the model first."""
    advance, append = TurnTransaction.advance, TurnTransaction._flush_history

    def note(transaction: TurnTransaction, event: Event, sends: Any = None) -> Claim:
        transaction._is_cut = isinstance(event, Interrupted)  # type: ignore[attr-defined]
        return advance(transaction, event, sends)

    def reverse(transaction: TurnTransaction) -> None:
        rows = transaction._history_rows
        if transaction._is_cut:  # type: ignore[attr-defined]
            seqs = [row[1] for row in rows]
            transaction._history_rows = [(row[0], seq, *row[2:]) for seq, row in zip(seqs, reversed(rows), strict=True)]
        append(transaction)

    yield mock.patch.object(TurnTransaction, "advance", note)
    yield mock.patch.object(TurnTransaction, "_flush_history", reverse)
    yield mock.patch.object(World, "compare", lambda world, claim: None)


def forget_cut_text(later: Later) -> Iterator[Any]:
    """No record of a cut answer is kept."""
    cut = turn._cut
    yield mock.patch.object(turn, "_cut", lambda one, event: cut(one, msgspec.structs.replace(event, service="")))


# Tasks


def counter_not_undone(later: Later) -> Iterator[Any]:
    """A withdrawn message still keeps its task at work."""
    withdraw = UnitOfWork.withdraw

    def without_count(uow: UnitOfWork, row: StoredMessage) -> None:
        withdraw(uow, row)
        if row.is_queued:
            uow.tasks.of(row.task_id).queued += 1

    yield mock.patch.object(UnitOfWork, "withdraw", without_count)


def budget_not_checked(later: Later) -> Iterator[Any]:
    """The model is asked whatever the task has used."""
    yield mock.patch.object(TurnTransaction, "_is_within_budget", lambda transaction: True)


def budget_asked_twice(later: Later) -> Iterator[Any]:
    """Every agent that comes to the limit asks the person."""
    read = task_budgets._read
    yield mock.patch.object(task_budgets, "_read", lambda *where: read(*where)._replace(budget_question=None))


def budget_checked_once(later: Later) -> Iterator[Any]:
    """A turn that was blocked by the budget goes on when anything wakes it."""
    make = TurnTransaction.__init__

    def forget(transaction: TurnTransaction, *what: Any, **more: Any) -> None:
        make(transaction, *what, **more)
        transaction._is_new_work = False

    yield mock.patch.object(TurnTransaction, "__init__", forget)


def other_task_for_free(later: Later) -> Iterator[Any]:
    """A turn over the budget goes on for another task, whose turns are not counted."""
    find = task_budgets.find_exceeded

    def without_turn(*where: Any, with_turn: bool = False) -> Any:
        return find(*where)

    yield mock.patch.object(task_budgets, "find_exceeded", without_turn)


def continue_wakes_nobody(later: Later) -> Iterator[Any]:
    """A granted budget leaves the agents blocked that wait for it."""
    yield mock.patch.object(task_control, "retry_blocked", lambda db, uow, task_id: None)


def stop_leaves_a_delayed_message(later: Later) -> Iterator[Any]:
    """A stop withdraws only messages that wait in a mailbox."""
    pending = task_control._SELECT_QUEUED.replace("state = 'delayed' OR ", "")
    assert pending != task_control._SELECT_QUEUED
    yield mock.patch.object(task_control, "_SELECT_QUEUED", pending)


def stop_leaves_a_turn(later: Later) -> Iterator[Any]:
    """A stop withdraws the messages, and the turns go on."""
    yield mock.patch.object(task_control, "_stop_turns", lambda db, uow, task_id: [])


def stop_leaves_an_asker(later: Later) -> Iterator[Any]:
    """A turn that took messages of several tasks still counts for the stopped one."""
    drop = TurnTransaction.drop_task

    def keep(transaction: TurnTransaction, task: str) -> None:
        drop(transaction, task)
        transaction.mailbox.other_tasks = f"{transaction.mailbox.other_tasks or ''} {task}".strip()

    yield mock.patch.object(TurnTransaction, "drop_task", keep)


def stopped_task_sends(later: Later) -> Iterator[Any]:
    """A turn of a stopped task may still send."""
    read_cause = UnitOfWork._read_cause

    def unstopped(uow: UnitOfWork, message_id: str | None) -> Any:
        cause = read_cause(uow, message_id)
        return cause and cause._replace(state="working")

    yield mock.patch.object(UnitOfWork, "_read_cause", unstopped)


def answer_in_the_wrong_task(later: Later) -> Iterator[Any]:
    """Every automatic answer belongs to the task that the turn counts for."""
    send = replies._send

    def into_turn(uow: UnitOfWork, sender: str, target: ReplyTarget, payload: Any, **more: Any) -> tuple[str, bool]:
        agent = payload.get("problem", {}).get("agent", sender)
        task = uow.mailbox(agent).task or target.task
        return send(uow, sender, msgspec.structs.replace(target, task=task), payload, **more)

    yield mock.patch.object(replies, "_send", into_turn)


def interjection_forks(later: Later) -> Iterator[Any]:
    """The person's message to an agent at work starts a task of its own."""
    choose = UnitOfWork._choose_task

    def fork(uow: UnitOfWork, envelope: Envelope, mailbox: Any, task: str | None, questions: Any, replay: bool) -> Any:
        is_new = envelope.sender == PERSON and not questions
        return (None, None) if is_new else choose(uow, envelope, mailbox, task, questions, replay)

    yield mock.patch.object(UnitOfWork, "_choose_task", fork)


def reminder_keeps_the_task(later: Later) -> Iterator[Any]:
    """A message delayed by a minute or more stays in the task that scheduled it."""
    choose = UnitOfWork._choose_task

    def keep(uow: UnitOfWork, envelope: Envelope, mailbox: Any, task: str | None, questions: Any, replay: bool) -> Any:
        chosen, parent = choose(uow, envelope, mailbox, task, questions, replay)
        return chosen or parent, None

    yield mock.patch.object(UnitOfWork, "_choose_task", keep)


def unless_answered_ignored(later: Later) -> Iterator[Any]:
    """An answer leaves the reminders about its question."""
    yield mock.patch.object(reminders, "withdraw_answered", lambda *where: None)


def reminder_lost_with_its_answer(later: Later) -> Iterator[Any]:
    """A reminder stays withdrawn after the answer was withdrawn."""
    yield mock.patch.object(reminders, "restore_reminders", lambda *where: None)


MUTANTS: tuple[Callable[[Later], Iterator[Any]], ...] = (
    no_fence,
    ack_first,
    append_first,
    rerun_unsafe,
    resume_without_look,
    forget_the_rest,
    open_history,
    drop_executed,
    no_interruption_check,
    no_step_compare,
    early_promote,
    unfenced_read,
    non_atomic_idle,
    two_phase_reply,
    unversioned_memory,
    keep_cut_text,
    cut_out_of_order,
    forget_cut_text,
    counter_not_undone,
    budget_not_checked,
    budget_asked_twice,
    budget_checked_once,
    other_task_for_free,
    continue_wakes_nobody,
    stop_leaves_a_delayed_message,
    stop_leaves_a_turn,
    stop_leaves_an_asker,
    stopped_task_sends,
    answer_in_the_wrong_task,
    interjection_forks,
    reminder_keeps_the_task,
    unless_answered_ignored,
    reminder_lost_with_its_answer,
)


@contextmanager
def mutated(simulation: Simulation, mutant: Callable[[Later], Iterator[Any]]) -> Iterator[None]:
    with ExitStack() as patches:
        for patch in mutant(simulation.deferred.append):
            patches.enter_context(patch)
        yield
