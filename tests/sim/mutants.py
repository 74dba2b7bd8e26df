"""Thirteen ways to build it wrong, each a small patch. A simulator that does not notice one of them proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import msgspec

from coterie import turn
from coterie.agent.history_cache import Conversation, Memory
from coterie.llm.types import Call
from coterie.stores.sql import commands, turn_transaction
from coterie.stores.sql.connection import insert
from coterie.stores.sql.replies import answer
from coterie.stores.sql.rows import find_message
from coterie.stores.sql.turn_transaction import TurnTransaction
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import Become, Letter, Plan, PlannedCall, Run, Step, Turn
from coterie.turn_store import Claim, StaleOwner

from .simulation import Simulation
from .world import World

_HISTORY = "history (agent_id, seq, turn_no, role, message_id, content, calls, call_id)"
Later = Callable[[Callable[[World], None]], None]
"""Leaves something for a second transaction, which a crash may prevent."""


def no_fence(later: Later) -> Iterator[Any]:
    """Whoever was taken over goes on writing."""
    yield mock.patch.object(TurnTransaction, "fence", lambda desk, claim: None)


def no_step_compare(later: Later) -> Iterator[Any]:
    """The fence looks at the epoch only: the same step can be written twice."""

    def fence(desk: TurnTransaction, claim: Claim) -> None:
        if desk.row.epoch != claim.epoch:
            raise StaleOwner("taken over")

    yield mock.patch.object(TurnTransaction, "fence", fence)


def ack_first(later: Later) -> Iterator[Any]:
    """Mail is marked as taken, and appended to the history in a transaction of its own."""
    take_mail = TurnTransaction._take_mail

    def take(desk: TurnTransaction) -> None:
        before = len(desk._rows)
        take_mail(desk)
        taken, desk._rows = desk._rows[before:], desk._rows[:before]
        later(lambda world: world.transaction(lambda db: insert(db, _HISTORY, taken)))

    yield mock.patch.object(TurnTransaction, "_take_mail", take)


def append_first(later: Later) -> Iterator[Any]:
    """Mail is appended to the history, and marked as taken in a transaction of its own."""

    def take(desk: TurnTransaction) -> None:
        waiting = desk._turn().mail
        for letter in waiting:
            desk._append("user", message=find_message(desk._db, letter.id))
        later(lambda world: world.transaction(lambda db: mark(world, desk._agent, waiting)))

    def mark(world: World, agent_id: str, letters: tuple[Letter, ...]) -> None:
        world.db.executemany(
            "UPDATE messages SET state = 'taken', taken_at = ? WHERE id = ?", [(world.now, one.id) for one in letters]
        )
        world.db.execute(
            "UPDATE agents SET waiting = waiting - ?, taken_seq = max(taken_seq, ?) WHERE id = ?",
            (len(letters), max((one.in_seq for one in letters), default=0), agent_id),
        )

    yield mock.patch.object(TurnTransaction, "_take_mail", take)


def rerun_unsafe(later: Later) -> Iterator[Any]:
    """After a crash the call that was running is run again, whatever it does."""
    resume = turn._resume

    def again(one: Turn) -> Step:
        index = one.plan.started() if one.plan else None
        return resume(one) if index is None else Step((Become(state="tools"),), Run(index))

    yield mock.patch.object(turn, "_resume", again)


def open_history(later: Later) -> Iterator[Any]:
    """The assistant's message is appended when its calls begin, their results when they have ended."""
    open_plan, close = TurnTransaction._open, TurnTransaction._close

    def opened(desk: TurnTransaction, plan: Plan) -> None:
        open_plan(desk, plan)
        assert desk._plan
        desk._append("assistant", content=plan.text, calls=[one.call for one in desk._plan.calls])

    def closed(desk: TurnTransaction, plan: Plan, by: str | None) -> None:
        before = len(desk._rows)
        close(desk, plan, by)
        del desk._rows[before]
        desk._rows[before:] = [(row[0], row[1] - 1, *row[2:]) for row in desk._rows[before:]]
        desk.row.next_hist_seq -= 1

    yield mock.patch.object(TurnTransaction, "_open", opened)
    yield mock.patch.object(TurnTransaction, "_close", closed)


def drop_executed(later: Later) -> Iterator[Any]:
    """A plan that is interrupted is withdrawn, even when some of its calls have run."""
    close = TurnTransaction._close

    def drop(desk: TurnTransaction, plan: Plan, by: str | None) -> None:
        if any(one.result == turn.NOT_EXECUTED for one in plan.calls):
            desk._plan = None
            desk._db.execute(
                "UPDATE plans SET outcome = 'withdrawn' WHERE outcome = 'open' AND agent_id = ?",
                (desk._agent,),
            )
        else:
            close(desk, plan, by)

    yield mock.patch.object(TurnTransaction, "_close", drop)


def no_interruption_check(later: Later) -> Iterator[Any]:
    """Calls run whatever is said meanwhile."""
    yield mock.patch.object(turn, "interrupts", lambda one: False)


def early_promote(later: Later) -> Iterator[Any]:
    """Delayed messages are delivered a second before they are due."""
    promote = commands.promote

    def early(db: Any, post: UnitOfWork, limit: int, early: bool) -> Any:
        post.now += 1_000
        return promote(db, post, limit, early)

    yield mock.patch.object(commands, "promote", early)


def unfenced_read(later: Later) -> Iterator[Any]:
    """A worker asks the database what is to be done now, without asking whether it still owns the agent."""

    def look(simulation: Simulation, claim: Claim) -> Claim:
        started = simulation.world.rows(
            "SELECT turn_no, step_no, idx, name FROM calls WHERE agent_id = ? AND state = 'started'", claim.agent_id
        )
        if not started:
            return claim
        turn_no, step_no, index, name = started[0]
        call = PlannedCall(call=Call(id="", name=str(name), arguments={}))
        return msgspec.structs.replace(
            claim, plan_key=(int(str(turn_no)), int(str(step_no))), effect=Run(int(str(index))), call=call
        )

    yield mock.patch.object(Simulation, "effect_of", look)


def non_atomic_idle(later: Later) -> Iterator[Any]:
    """Nothing waits, says one transaction; then the agent is idle, says the next."""
    become = TurnTransaction._become

    def lazily(desk: TurnTransaction, write: Become) -> None:
        if write.state != "idle":
            return become(desk, write)
        become(desk, Become(state="llm"))
        return later(lambda world: set_idle(world, desk._agent))

    def set_idle(world: World, agent_id: str) -> None:
        world.db.execute("UPDATE agents SET state = 'idle', runnable_at = NULL WHERE id = ?", (agent_id,))
        world.ledger.read_anew()

    yield mock.patch.object(TurnTransaction, "_become", lazily)


def two_phase_reply(later: Later) -> Iterator[Any]:
    """The turn ends, and then its answer is sent."""

    def send(db: Any, post: UnitOfWork, *turn: Any, **more: Any) -> tuple[str, ...]:
        later(lambda world: void(world.post(lambda db, post: answer(db, post, *turn, **more))))
        return ()

    def void(_: object) -> None: ...

    yield mock.patch.object(turn_transaction, "answer", send)


def unversioned_memory(later: Later) -> Iterator[Any]:
    """A worker shows what it remembers of a conversation, and does not ask whether that is still all of it."""

    added = Memory.add

    def recall(memory: Memory, agent_id: str, version: int) -> Conversation | None:
        return memory._kept.get(agent_id)

    def add(memory: Memory, claim: Claim) -> None:
        if claim.added is None or claim.added:
            added(memory, claim)

    yield mock.patch.object(Memory, "recall", recall)
    yield mock.patch.object(Memory, "add", add)


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
