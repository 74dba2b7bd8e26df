"""Thirteen wrong designs, each a small patch. The simulator must detect every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import msgspec

from coterie import turn
from coterie.agent.history_cache import Conversation, HistoryCache
from coterie.llm.types import ToolCall
from coterie.stores.sql import commands, turn_transaction
from coterie.stores.sql.replies import send_replies
from coterie.stores.sql.rows import find_message, insert
from coterie.stores.sql.turn_transaction import TurnTransaction
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import Plan, PlannedCall, RunCall, SetState, Step, Turn, WaitingMessage
from coterie.turn_store import Claim, StaleClaim

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
        waiting = transaction._build_turn().mail
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
        if any(one.result == turn.INTERRUPTED_RESULT for one in plan.calls):
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


MUTANTS: tuple[Callable[[Later], Iterator[Any]], ...] = (
    no_fence,
    ack_first,
    append_first,
    rerun_unsafe,
    open_history,
    drop_executed,
    no_interruption_check,
    no_step_compare,
    early_promote,
    unfenced_read,
    non_atomic_idle,
    two_phase_reply,
    unversioned_memory,
)


@contextmanager
def mutated(simulation: Simulation, mutant: Callable[[Later], Iterator[Any]]) -> Iterator[None]:
    with ExitStack() as patches:
        for patch in mutant(simulation.deferred.append):
            patches.enter_context(patch)
        yield
