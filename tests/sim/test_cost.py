"""The cost of a step grows neither with the history nor with the mailbox. Measured in SQLite instructions, not time."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TypeVar

import pytest
from msgspec.structs import replace

from coterie.llm.service import ToolCall
from coterie.messages import PERSON, make_envelope
from coterie.plan import PlannedCall
from coterie.store import Limits, Page
from coterie.stores.sql.commands import clear_thread
from coterie.stores.sql.inbox import MAX_EXAMINED, PAGE_SIZE
from coterie.stores.sql.queries import MAX_SEARCHED_PLANS, search_runs
from coterie.stores.sql.turn_transaction import TurnTransaction
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.turn import AskModel, CallEnded, Event, ModelAnswered, RunCall
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


def test_clearing_a_conversation_with_a_question_costs_the_same_with_any_number_of_other_tasks() -> None:
    few, many = cost_of_clearing_after(1), cost_of_clearing_after(300)
    assert many <= few * 1.1 + 20


def cost_of_clearing_after(turns: int) -> int:
    world, costs = having_talked(turns), list[int]()
    world.send(make_envelope(sender="bob", to=PERSON, payload={"text": "well?", "quickReplies": ["yes"]}))
    counted(world, lambda: world.transact(lambda db, uow: clear_thread(db, uow, "bob")), costs)
    assert world.rows("SELECT id FROM messages WHERE question = 1") == []
    world.close()
    return costs[0]


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
    turn = TurnTransaction(db, uow, "ada", RULES)
    turn._load_turn()
    turn._build_turn(done(0))


SENDERS = {"a person": PERSON, "an agent": "bob", "the agent itself": "ada"}
MANY = 5_000


@pytest.mark.parametrize("sender", SENDERS)
def test_the_check_for_interruptions_costs_the_same_with_one_and_with_five_thousand_waiting_messages(
    sender: str,
) -> None:
    few, many = (check_with(SENDERS[sender], waiting) for waiting in (1, MANY))
    assert 0 < few < 300
    assert many <= few + MAX_EXAMINED * 30


def check_with(sender: str, waiting: int) -> int:
    """Cost of a check during a plan, with so many waiting messages of `sender`."""
    world, _ = planning(waiting, sender)
    costs = list[int]()
    counted(world, lambda: world.transact(check), costs)
    world.close()
    return costs[0]


def planning(waiting: int, sender: str, cause: str | None = None) -> tuple[World, Claim]:
    """A world in which ada runs the first call of a plan, while messages wait for her."""
    world = having_talked(1)
    world.limits = Limits(max_hops=9, mailbox=2 * MANY)
    world.send(make_envelope(sender="user", to="ada", payload={"text": "x"}))
    (claim,) = world.claim("w", 1)
    claim = world.advance(claim, PLAN, None)
    deliver(world, waiting, sender, cause)
    return world, claim


def deliver(world: World, count: int, sender: str, cause: str | None = None) -> None:
    envelopes = [make_envelope(sender=sender, to="ada", payload={"text": "y"}, cause=cause) for _ in range(count)]
    world.transact(lambda _, uow: uow.accept_all(envelopes))


def test_queueing_withdrawing_and_taking_cost_the_same_with_one_and_with_five_thousand_waiting_messages() -> None:
    few, many = (queue_operations(waiting) for waiting in (1, MANY))
    assert all(later <= first + PAGE_SIZE * 40 for first, later in zip(few, many, strict=True)), (few, many)


def queue_operations(waiting: int) -> list[int]:
    """Costs of a send, a withdrawal, and a step that takes the first message, with so many waiting messages."""
    world, claim = planning(waiting, "bob")
    world.rules, costs = replace(RULES, mail_budget=lambda _: 300), list[int]()
    sent = counted(world, lambda: world.send(make_envelope(sender="bob", to="ada", payload={"text": "z"})), costs)
    counted(world, lambda: world.withdraw(sent.message_id), costs)
    claim = advance(world, claim, done(0), costs)
    assert claim.action == AskModel() and [row.role for row in claim.added_rows or ()][-2:] == ["tool", "user"]
    world.close()
    return costs


def test_a_step_at_the_limit_of_withdrawals_costs_the_same_with_any_number_of_waiting_messages() -> None:
    """Agents have withdrawn as many plans as they may, so the next plan runs although their messages wait."""
    few, many = (plan_at_limit(waiting) for waiting in (1, MANY))
    assert all(later <= first + 50 for first, later in zip(few, many, strict=True)), (few, many)


def plan_at_limit(waiting: int) -> list[int]:
    """Costs of the begin of a plan and of its first call."""
    world, costs = World(), list[int]()
    world.limits = Limits(mailbox=2 * MANY)
    world.rules = replace(RULES, mail_budget=lambda _: 300)
    deliver(world, 1, PERSON)
    (claim,) = world.claim("w", 1)
    for _ in range(RULES.max_withdrawals):
        deliver(world, 1, "bob")
        claim = world.advance(claim, PLAN, None)
    deliver(world, waiting, "bob")
    for event in (PLAN, done(0)):
        claim = advance(world, claim, event, costs)
    assert claim.action == RunCall(1)
    world.close()
    return costs


def test_the_check_examines_an_echo_once_and_a_bounded_number_each_time() -> None:
    """Messages that the plan itself has caused: the first check sees the first of them, later ones go on behind."""
    world = having_talked(1)
    world.limits = Limits(max_hops=9, mailbox=2 * MANY)
    world.send(make_envelope(sender="user", to="ada", payload={"text": "x"}))
    (claim,) = world.claim("w", 1)
    plan = ModelAnswered(
        text="",
        calls=(
            PlannedCall(call=ToolCall(id="c", name="send_message", arguments={}), effect="idempotent"),
            *(PlannedCall(call=ToolCall(id="c", name="look", arguments={})) for _ in range(5)),
        ),
    )
    claim = world.advance(claim, plan, None)
    question = make_envelope(sender="ada", to="bob", payload={"text": "?"}, client_id="q")
    claim = world.advance(claim, done(0), question)
    (sent,) = world.rows("SELECT id FROM messages WHERE recipient = 'bob'")
    deliver(world, MANY, "bob", str(sent[0]))
    costs, examined = list[int](), [claim.checked_seq]
    for index in (1, 2, 3):
        claim = advance(world, claim, done(index), costs)
        assert claim.action == RunCall(index + 1)
        examined.append(claim.checked_seq)
    assert [b - a for a, b in pairwise(examined[1:])] == [MAX_EXAMINED] * 2
    assert max(costs) < 5_000, costs
    deliver(world, 1, PERSON)
    claim = world.advance(claim, done(4), None)
    assert claim.action == AskModel(), "the person is heard behind any number of echoes"
    world.close()


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


def test_each_search_in_plans_costs_the_same_with_any_number_of_plans_and_however_deep() -> None:
    (few,), found = searches_in(MAX_SEARCHED_PLANS - 1, "needle")
    assert found == 1
    for agent in ("ada", None):
        costs, found = searches_in(2 * MAX_SEARCHED_PLANS + 1_000, "needle", agent)
        assert len(costs) == 3 and found == 1, "the first plan of all"
        assert all(cost <= few * 1.1 for cost in costs), (few, costs)


def searches_in(plans: int, words: str, agent: str | None = "ada") -> tuple[list[int], int]:
    """Costs of the reads of one search, and how many plans it found."""
    world, costs, found = World(), list[int](), 0
    world.db.execute(
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < ?)"
        " INSERT INTO plans (agent_id, turn_no, step_no, text, outcome, at)"
        " SELECT 'ada', i / 4, i % 4, CASE i WHEN 0 THEN 'needle' ELSE 'hay' END, 'closed', 0 FROM n",
        (plans,),
    )
    page: Page | None = Page()
    while page:
        runs, go_on = counted(world, partial(search_runs, world.db, words, page, agent), costs)
        found += len(runs)
        page = Page(before=go_on) if go_on else None
    world.close()
    return costs, found
