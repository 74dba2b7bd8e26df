"""A database from before tasks gets them from the causes of its messages, on both engines."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from coterie.agents import Agent
from coterie.store import Page
from coterie.stores.sql.migrations import APPLICATION_ID, migrate_sqlite
from coterie.stores.sqlite import SqliteStore
from coterie.stores.transfer import TABLES
from coterie.tasks import Task
from coterie.testing import FakeClock
from coterie.turn import AskModel, ModelFailed
from tests.conftest import PEOPLE
from tests.engines import Engine, Postgres
from tests.sim import simulation
from tests.sim.simulation import Simulation
from tests.sim.world import World

from .steps import call, done, message_to, says
from .task_steps import claim, claims, press, questions, run_send, said, send, step

OLD_SCHEMAS = Path(__file__).parent / "old_schemas"
LATER_TABLES = ("meta", "tasks", "turns", "history_artifacts", "keys", "push_configs")
OLD_TABLES = [table for table in TABLES if table not in LATER_TABLES]
OF_TASKS = (Simulation.stop_task, Simulation.decide_budget, Simulation.remind, Simulation.send_late)


def copy_rows(source: sqlite3.Connection, target: Any, mark: str) -> None:
    """Copy all rows into tables that lack some columns."""
    for table in OLD_TABLES:
        found = source.execute(f"SELECT * FROM {table}")
        have = [column[0] for column in found.description]
        wanted = target.execute(f"SELECT * FROM {table} LIMIT 0").description
        shared = [column[0] for column in wanted if column[0] in have]
        sql = f"INSERT INTO {table} ({', '.join(shared)}) VALUES ({', '.join([mark] * len(shared))})"
        for row in found.fetchall():
            target.execute(sql, [row[have.index(column)] for column in shared])


def make_old_sqlite(source: sqlite3.Connection, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        old.executescript((OLD_SCHEMAS / "sqlite_0012.sql").read_text())
        copy_rows(source, old, "?")
        old.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        old.execute("PRAGMA user_version = 12")


def make_old_postgres(source: sqlite3.Connection, url: str) -> None:
    with psycopg.connect(url) as old:
        old.execute((OLD_SCHEMAS / "postgres_0011.sql").read_bytes())
        old.execute("INSERT INTO meta (key, value) VALUES ('schema', '11')")
        copy_rows(source, old, "%s")
        old.execute("UPDATE log SET last = (SELECT coalesce(max(seq), 0) FROM events), last_at = 0")
        old.execute("SELECT setval('messages_seq_seq', (SELECT max(seq) FROM messages))")


async def busy_life(store: Any, clock: FakeClock) -> None:
    """Chains, questions, delayed and recurring messages, and open turns in several states."""
    await store.add_agents([*PEOPLE, *(Agent(id=name, name=name) for name in ("cyd", "dan", "eve"))])
    await send(store, text="done at once")
    await step(store, await claim(store), said())
    await send(store)
    plan = (
        message_to("bob", "you?"),
        message_to("user", "Which?", quickReplies=["A", "B"]),
        message_to("cyd", "soon", delayMs=5_000),
        message_to("cyd", "later", delayMs=3_600_000),
        message_to("cyd", "daily", every="daily 08:00 UTC"),
    )
    claimed = await step(store, await claim(store), says("", *plan))
    for _ in plan:
        claimed = await run_send(store, claimed)
    await step(store, claimed, said("please wait", tokens=12))
    await step(store, await claim(store, "bob"), said("me"))
    await step(store, await claim(store), said("he does"))
    (asked,) = await questions(store)
    await press(store, asked, 1)  # an answer that is taken
    await step(store, await claim(store), said("so be it"))
    await send(store, "user", "And now?", "ada", quick_replies=["Yes"])  # a question that stays open
    await clock.advance(seconds=5)
    await store.promote_due(10)
    await step(store, await claim(store, "cyd"), ModelFailed(message="no such model", recovery="give_up"))
    for name in ("bob", "cyd", "dan", "eve"):
        await send(store, name)
    found = await claims(store)
    await step(store, found["bob"], says("", call("look"), call("look")), done())
    await step(store, found["cyd"], says("", call("pay", needs_approval=True)))
    await step(store, found["dan"], ModelFailed(message="wrong key", recovery="block"))
    await step(store, found["eve"], ModelFailed(message="busy", recovery="retry", delay=timedelta(seconds=30)))
    await send(store, "dan", "and I?", "bob")
    await send(store, "eve", "two tasks", "bob")


def described(tasks: Any) -> dict[str, dict[str, Any]]:
    """Everything of the tasks that the old database knew."""

    def describe(task: Task) -> dict[str, Any]:
        shown = task.to_dict()
        return {key: value for key, value in shown.items() if key not in ("lastAt", "cachedTokens", "modelMs")}

    return {task.id: describe(task) for task in tasks}


async def test_a_migrated_society_has_the_tasks_that_it_would_have_had(
    engine: Engine, tmp_path: Path, clock: FakeClock
) -> None:
    store: Any = await SqliteStore.open(tmp_path / "new", clock)
    await busy_life(store, clock)
    expected = described(await store.tasks(Page(limit=100)))
    await store.close()
    with closing(sqlite3.connect(tmp_path / "new" / "coterie.db")) as source:
        if isinstance(engine, Postgres):
            make_old_postgres(source, engine.new_url(tmp_path / "old"))
        else:
            make_old_sqlite(source, tmp_path / "old" / "coterie.db")

    store = await engine.open(tmp_path / "old", clock)
    assert [violation async for violation in store.violations()] == []
    found = described(await store.tasks(Page(limit=100)))
    assert {key: found.get(key) for key in expected} == expected
    assert {*found} == {*expected}
    states = {task["state"] for task in expected.values()}
    assert states == {"working", "waiting", "done", "failed"}
    assert any(task["turns"] > 3 and task["toolCalls"] == 5 for task in expected.values())
    tree = await store.task_tree(max(expected, key=lambda key: expected[key]["turns"]))
    assert tree is not None and len(tree.nodes) == tree.task.messages + tree.task.turns
    # It goes on, and what it scheduled before becomes tasks of its task.
    await clock.advance(hours=1)
    await store.promote_due(10)
    assert tree.task.id in [task.parent for task in await store.tasks(Page())]
    going_on = await claims(store)
    assert {"bob", "eve"} <= {*going_on}
    for claimed in going_on.values():
        assert claimed.action == AskModel()
        await step(store, claimed, said())
    assert [violation async for violation in store.violations()] == []
    await store.close()


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_any_society_of_the_simulator_is_migrated_without_a_violation(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of its work, with crashed workers, approvals and cut answers."""

    class Halted(Exception):
        pass

    def halt(_: Simulation) -> None:
        raise Halted

    actions = [(action, weight) for action, weight in simulation._CHANCES.items() if action not in OF_TASKS]
    monkeypatch.setattr(simulation, "_ACTIONS", [action for action, _ in actions])
    monkeypatch.setattr(simulation, "_WEIGHTS", [weight for _, weight in actions])
    monkeypatch.setattr(Simulation, "_drain", halt)
    monkeypatch.setattr(World, "close", lambda _: None)
    one = Simulation(seed)
    with pytest.raises(Halted):
        one.run()
    make_old_sqlite(one.world.db, tmp_path / "coterie.db")
    one.world.db.close()

    one.world.db = sqlite3.connect(tmp_path / "coterie.db", isolation_level=None)
    assert migrate_sqlite(one.world.db) == 12
    assert one.world.violations() == []
    assert one.world.rows("SELECT count(*) FROM tasks")[0][0]
    one.world.db.close()
