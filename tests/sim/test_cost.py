"""The cost of a step does not grow with the history. Measured in SQLite instructions, not in time."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TypeVar

from coterie.llm.types import ToolCall
from coterie.messages import make_envelope
from coterie.stores.sql.turn_transaction import TurnTransaction
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import CallEnded, Event, ModelAnswered, PlannedCall
from coterie.turn_store import Claim

from .world import RULES, World

T = TypeVar("T")
PLAN = ModelAnswered(
    text="", calls=tuple(PlannedCall(call=ToolCall(id="c", name="look", arguments={})) for _ in range(2))
)


def done(index: int) -> CallEnded:
    return CallEnded(index=index, ok=True, result="seen")


def having_talked(turns: int) -> World:
    world = World()
    for number in range(turns):
        world.send(make_envelope(sender="user", to="ada", payload={"text": str(number)}))
        (claim,) = world.claim("w", 1)
        for event in (PLAN, done(0), done(1), ModelAnswered(text=f"answer {number}")):
            claim = world.advance(claim, event, None)
    return world


def advance(world: World, claim: Claim, event: Event, costs: list[int]) -> Claim:
    return counted(world, lambda: world.advance(claim, event, None), costs)


def counted(world: World, run: Callable[[], T], costs: list[int]) -> T:
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    world.db.set_progress_handler(step, 1)
    try:
        return run()
    finally:
        world.db.set_progress_handler(None, 1)
        costs.append(steps)


def costs_after(turns: int) -> list[int]:
    """Costs of a send, a claim, a plan, its first and last call, and an answer with and without a waiting message."""
    world, costs = having_talked(turns), list[int]()
    counted(world, lambda: world.send(make_envelope(sender="user", to="ada", payload={"text": "x"})), costs)
    (claim,) = counted(world, lambda: world.claim("w", 1), costs)
    for event in (PLAN, done(0), done(1)):
        claim = advance(world, claim, event, costs)
    counted(world, lambda: world.send(make_envelope(sender="user", to="ada", payload={"text": "y"})), costs)
    for text in ("with mail", "without"):
        claim = advance(world, claim, ModelAnswered(text=text), costs)
    world.close()
    return costs


def test_queueing_checking_and_answering_take_the_same_work_after_one_turn_and_after_three_hundred() -> None:
    few, many = costs_after(1), costs_after(300)
    assert len(few) == len(many) == 8
    assert all(later <= first * 1.1 + 20 for first, later in zip(few, many, strict=True)), (few, many)


def test_the_check_for_interruptions_costs_the_same_after_any_history() -> None:
    few, many = checks_after(1), checks_after(300)
    assert len(few) == 2 and 0 < few[0] < few[1] < 300  # a handful of look-ups by key
    assert few == many


def checks_after(turns: int) -> list[int]:
    """Costs of a check during a plan, without and with a waiting message."""
    world, costs = having_talked(turns), list[int]()
    world.send(make_envelope(sender="user", to="ada", payload={"text": "x"}))
    (claim,) = world.claim("w", 1)
    world.advance(claim, PLAN, None)
    counted(world, lambda: world.transact(check), costs)
    world.send(make_envelope(sender="bob", to="ada", payload={"text": "y"}, cause=claim.cause))
    counted(world, lambda: world.transact(check), costs)
    world.close()
    return costs


def check(db: sqlite3.Connection, uow: UnitOfWork) -> None:
    TurnTransaction(db, uow, "ada", RULES)._build_turn()


def test_no_statement_of_a_turn_builds_a_temporary_table() -> None:
    world, said = having_talked(1), list[str]()
    world.db.set_trace_callback(said.append)
    world.send(make_envelope(sender="user", to="ada", payload={"text": "x", "quickReplies": ["y"]}))
    (claim,) = world.claim("w", 1)
    for event in (PLAN, done(0), done(1), ModelAnswered(text="an answer")):
        claim = world.advance(claim, event, None)
    world.db.set_trace_callback(None)
    written = [one for one in said if one.lstrip().startswith(("INSERT", "UPDATE"))]
    assert len(written) > 10
    for statement in written:
        assert "OpenEphemeral" not in {step[1] for step in world.db.execute(f"EXPLAIN {statement}")}, statement
    world.close()
