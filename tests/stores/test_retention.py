"""Contract of every storage engine: what is deleted when it is old, and what stays."""

from __future__ import annotations

from base64 import b64encode
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

from coterie.artifacts import Artifact
from coterie.messages import make_envelope
from coterie.plan import PlannedCall
from coterie.retention_store import Pruned, Retention, StorageFigures
from coterie.store import Page
from coterie.stores.sql import retention
from coterie.stores.sql.store import SqlStore
from coterie.testing import FakeClock
from coterie.turn import CallEnded, ModelFailed
from coterie.turn_store import Claim
from tests.conftest import PEOPLE
from tests.engines import Engine, Postgres
from tests.pruning import pruned

from .steps import call, done, history_lines, message_to, says
from .task_steps import Society, claim, press, questions, run_send, said, send, step, task_of

MONTH = timedelta(days=30)


CALL_COLUMNS = "input_tokens, output_tokens, outcome, estimated, task, cached_tokens, cost, model_ms"
COPY_MODEL_CALLS = f"""
INSERT INTO llm_calls (agent_id, turn_no, step_no, call_no, service, at, {CALL_COLUMNS})
WITH RECURSIVE numbers (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < 9999)
SELECT agent_id, turn_no, step_no, number, service, at + number, {CALL_COLUMNS} FROM llm_calls, numbers
"""


async def converse(store: Society, text: str, *calls: PlannedCall, to: str = "ada") -> str:
    """Send a message and let the agent answer it, after the calls; return the id of the task."""
    sent = await send(store, to, text)
    claimed = await claim(store, to)
    if calls:
        claimed = await step(store, claimed, says("", *calls), *(done(index) for index in range(len(calls))))
    await step(store, claimed, said(f"answer to {text}"))
    return sent.message_id


async def summarised(store: Society, upto: int, to: str = "ada") -> Claim:
    """Begin a turn and let a summary stand for the rows up to `upto`."""
    await send(store, to, "next")
    return await store.summarise(await claim(store, to), upto, "what was said")


async def stored_ids(store: Society) -> tuple[list[str], list[str]]:
    """Ids of all messages and tasks."""
    page = Page(limit=200)
    return [message.id for message in await store.messages(page)], [task.id for task in await store.tasks(page)]


async def test_an_old_turn_is_deleted_with_all_that_belongs_to_it(store: Society, clock: FakeClock) -> None:
    task = await converse(store, "old", call(), call(name="other"))
    await clock.advance(days=31)
    claimed = await summarised(store, 5)

    expected = await pruned(store, dry_run=True, messages=MONTH)
    assert await task_of(store, task), "a dry run deletes nothing"
    deleted = await pruned(store, messages=MONTH)

    assert deleted == expected
    assert deleted == Pruned(
        messages=2, history=5, plans=1, calls=2, model_calls=2, tasks=1, turns=1, events=deleted.events
    )
    assert await store.tasks_by_id([task]) == {} and await store.task_tree(task) is None
    assert await history_lines(store) == ["user: next"]
    assert await pruned(store, messages=MONTH) == Pruned(), "there is nothing left to delete"
    await step(store, claimed, said("still here"))
    assert (await store.thread("ada"))[-1].payload["text"] == "still here"


@pytest.mark.parametrize(
    "what",
    ["a delayed message", "a schedule", "a paused schedule", "a task at work", "a blocked task", "a blocked turn"],
)
async def test_the_message_that_caused_what_is_still_to_come_stays(store: Society, clock: FakeClock, what: str) -> None:
    task = (await send(store, "ada", "ask bob, later")).task
    scheduled: dict[str, object] = {"delayMs": MONTH * 2 // timedelta(milliseconds=1)}
    if "schedule" in what:
        scheduled = {"every": "1 day"}
    elif what == "a blocked turn":
        scheduled = {}
    claimed = await step(store, await claim(store), says("", message_to("bob", "news?", **scheduled)))
    await step(store, await run_send(store, claimed), said("I will"))
    if what == "a paused schedule":
        (schedule,) = await store.schedules()
        await store.change_schedule(schedule.id, "user", paused=True)
    starts_a_task = what in ("a task at work", "a blocked task")
    if starts_a_task:
        await clock.advance(days=61)
        await store.promote_due(10)
    if starts_a_task or what == "a blocked turn":
        begun = await claim(store, "bob")
        if what != "a task at work":
            await step(store, begun, ModelFailed(message="no such model", recovery="block"))
            await step(store, await claim(store), said("bob is blocked"))  # ada was told
    if what != "a task at work":
        await clock.advance(days=31)
    await summarised(store, 5)
    await pruned(store, messages=MONTH)
    assert await store.message(task) is not None
    # A task that has begun by itself goes on; everything else ends with the task that scheduled it.
    waits = what in ("a delayed message", "a schedule")
    assert (await store.stop_task(task)).messages == int(waits)
    assert ([one.state for one in await store.schedules()], await store.delayed()) == ([], [])


async def test_what_the_model_is_still_shown_stays_with_its_messages(store: Society, clock: FakeClock) -> None:
    await converse(store, "summarised")
    task = await converse(store, "shown", call())
    await clock.advance(days=400)
    await step(store, await summarised(store, 3), said())  # the summary ends within the second turn
    shown = await store.history_view("ada")

    deleted = await pruned(store, messages=MONTH)

    assert (deleted.history, deleted.plans) == (2, 0)
    assert await store.history_view("ada") == shown
    assert "user: shown" in await history_lines(store) and "user: summarised" not in await history_lines(store)
    assert (await task_of(store, task)).text == "shown"


async def test_what_is_not_done_stays_at_any_age(store: Society, clock: FakeClock) -> None:
    question = (await send(store, "user", "well?", "bob", quick_replies=["Yes"])).message_id
    of_its_task = (await send(store, "user", "please answer", "bob", cause=question)).message_id
    asked = (await send(store, "bob", "will you?", "ada")).message_id
    await send(store, "bob", "reminder", "ada", delay_ms=500 * 86_400_000, unless_answered=asked)
    await send(store, "ada", "daily", every="8h")
    waiting = (await send(store, "ada", "waits")).message_id
    await clock.advance(days=400)
    before = await stored_ids(store)

    deleted = await pruned(store, messages=MONTH)

    assert deleted == Pruned(events=deleted.events)
    assert await stored_ids(store) == before
    needed = [question, of_its_task, asked, waiting]
    assert {*needed} == set(await store.messages_by_id(needed))
    (open_question,) = await questions(store)
    await press(store, open_question, 0)


async def test_unread_messages_to_the_person_do_not_stay_for_ever(store: Society, clock: FakeClock) -> None:
    await send(store, "user", "news", "ada")
    await clock.advance(days=31)
    await send(store, "user", "fresh", "ada")
    assert (await pruned(store, messages=MONTH)).messages == 1
    assert (await store.unread(["ada"])) == {"ada": 1}
    person = await store.agent("user")
    assert person is not None and person.waiting == 1


async def test_a_question_may_outlast_the_button_that_answered_it(store: Society, clock: FakeClock) -> None:
    question = (await send(store, "user", "well?", "bob", quick_replies=["Yes"])).message_id
    pressed = await press(store, (await questions(store))[0], 0)
    await step(store, await claim(store, "bob"), said())
    await store.terminate("bob")
    await clock.advance(days=25)
    await store.mark_read("bob", question)
    await clock.advance(days=6)
    await pruned(store, messages=MONTH)
    assert set(await store.messages_by_id([question, pressed.message_id])) == {question}
    assert [violation async for violation in store.violations()] == []


@pytest.mark.parametrize("how", ["a long delay", "a paused agent"])
async def test_a_dead_letter_stays_for_a_month_after_the_message_died(
    store: Society, clock: FakeClock, how: str
) -> None:
    await store.pause("ada")
    lost = (await send(store, "ada", delay_ms=60 * 86_400_000 if how == "a long delay" else None)).message_id
    if how == "a long delay":
        await store.terminate("ada")
    await clock.advance(days=60)
    if how == "a long delay":
        assert (await store.promote_due(10)).dead == 1
    await store.terminate("ada")
    await clock.advance(days=29)
    assert (await pruned(store, messages=MONTH)).messages == 0
    assert [message.id for message in await store.messages(Page(), state="dead")] == [lost]
    await clock.advance(days=2)
    expected = await pruned(store, dry_run=True)
    assert (await pruned(store)).messages == expected.messages == 1
    assert await store.message(lost) is None


async def test_the_whole_history_of_a_terminated_agent_gets_old(store: Society, clock: FakeClock) -> None:
    await converse(store, "last words", to="bob")
    await store.terminate("bob")
    await clock.advance(days=31)
    assert (await pruned(store, messages=MONTH)).history == 2
    assert await history_lines(store, "bob") == []


async def test_a_file_stays_as_long_as_a_history_shows_it(store: Society, clock: FakeClock) -> None:
    for ref in ("shown", "waits", "loose"):
        picture = Artifact(
            ref=ref, filename="a", type="image", mime_type="image/png", size=1, sha256=ref, created_at=clock.now()
        )
        await store.add_artifact(picture, "ada")
    await send(store, "ada", "draw")
    claimed = await step(store, await claim(store), says("", call()))
    shows = CallEnded(index=0, ok=True, result="drawn", attachments=({"artifactRef": "shown"},))
    await step(store, claimed, shows, said())
    await send(store, "bob", "draw")
    claimed = await step(store, await claim(store, "bob"), says("", call(), call(name="delete", needs_approval=True)))
    waits = CallEnded(index=0, ok=True, result="drawn", attachments=({"artifactRef": "waits"},))
    await step(store, claimed, waits)
    await clock.advance(days=40)
    assert (await store.unused_artifacts(timedelta(days=1))).refs == ["loose"]
    assert await store.delete_artifacts(["shown", "waits", "loose"], timedelta(days=1)) == (1, ["loose"])

    await step(store, await summarised(store, 4), said())
    await pruned(store, messages=MONTH)
    assert (await store.unused_artifacts(timedelta(days=1))).refs == ["shown"]


async def test_a_file_stays_as_long_as_a_paused_schedule_names_it(store: Society, clock: FakeClock) -> None:
    for ref in ("named", "loose"):
        picture = Artifact(
            ref=ref, filename="a", type="image", mime_type="image/png", size=1, sha256=ref, created_at=clock.now()
        )
        await store.add_artifact(picture)
    payload = {"attachments": [{"artifactRef": "named"}]}
    sent = await store.send(make_envelope(sender="user", to="ada", payload=payload, every="8h"))
    assert sent.schedule_id is not None
    await store.change_schedule(sent.schedule_id, "user", paused=True)
    await clock.advance(days=31)
    await pruned(store, messages=MONTH)
    assert await store.message(sent.message_id) is None, "the withdrawn message carries the file no more"
    assert (await store.unused_artifacts(timedelta(days=1))).refs == ["loose"]
    assert await store.delete_artifacts(["named", "loose"], timedelta(days=1)) == (1, ["loose"])

    await store.change_schedule(sent.schedule_id, "user", paused=False)
    ((attached,),) = [message.payload["attachments"] for message in await store.delayed()]
    assert attached["artifactRef"] == "named"
    await store.end_schedule(sent.schedule_id, "user")
    await clock.advance(days=31)
    await pruned(store, messages=MONTH)
    assert (await store.unused_artifacts(timedelta(days=1))).refs == ["named"]


async def test_a_run_continues_where_the_last_one_ended_and_begins_anew_once_a_day(
    store: Society, clock: FakeClock
) -> None:
    question = await send(store, "user", "well?", "ada", quick_replies=["Yes"])
    await clock.advance(days=31)
    assert (await pruned(store, full=False, messages=MONTH)).messages == 0
    (asked,) = await questions(store)
    await press(store, asked, 0)
    await step(store, await claim(store), said())
    await clock.advance(days=30, hours=23)
    await pruned(store, messages=MONTH, dry_run=True)
    await clock.advance(hours=2)
    assert (await pruned(store, full=False, messages=MONTH)).messages > 0
    assert await store.message(question.message_id) is None


async def test_each_step_deletes_a_bounded_number_of_rows_and_keeps_every_invariant(
    store: Society, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, rows in (("READ_ROWS", 7), ("DELETED_ROWS", 4), ("DELETED_EVENTS", 5)):
        monkeypatch.setattr(retention, name, rows)
    for number in range(12):
        await converse(store, f"turn {number}", call())
    await clock.advance(days=31)
    await step(store, await summarised(store, 40), said())

    total, steps = Pruned(), 0
    async for deleted in store.prune(Retention(messages=MONTH)):
        assert [violation async for violation in store.violations()] == []
        total, steps = total + (deleted or Pruned()), steps + 1
        assert (deleted or Pruned()).messages <= 4 and (deleted or Pruned()).events <= 5
    assert (total.history, total.plans, total.messages) == (40, 10, 22)
    assert steps > 12


async def test_a_full_pass_over_many_rows_that_stay_takes_few_reads(
    engine: Engine, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await engine.open(tmp_path / "data", clock)
    await store.add_agents(PEOPLE)
    await converse(store, "its history shows it, so its requests stay")
    await store.close()
    with engine.behind(tmp_path / "data") as db:
        db.execute(COPY_MODEL_CALLS)
    await clock.advance(days=31)
    store, reads = await engine.open(tmp_path / "data", clock), 0
    execute = retention.Pruner.execute

    def count_reads(pruner: Any, read: Any, write: Any) -> Any:
        async def counted(run: Any) -> Any:
            nonlocal reads
            reads += 1
            return await read(run)

        return execute(pruner, counted, write)

    monkeypatch.setattr(retention.Pruner, "execute", count_reads)
    assert (await pruned(store, messages=MONTH)).model_calls == 0
    figures = await store.storage()
    await store.close()
    assert reads <= 30 and (engine.name == "postgres" or figures.rows["llm_calls"] == 10_000)


def test_a_transaction_that_took_long_is_followed_by_smaller_ones() -> None:
    sizes = retention.StepSize()
    for _ in range(20):
        sizes.record("messages", 0.0001)
        sizes.record("events", 0.0001)
    assert (sizes["messages"], sizes["events"]) == (retention.DELETED_ROWS, retention.DELETED_EVENTS)
    sizes.record("messages", retention.STEP_SECONDS)
    assert sizes["messages"] == retention.DELETED_ROWS
    for _ in range(20):
        sizes.record("messages", 0.1)
    assert (sizes["messages"], sizes["events"]) == (retention.FEWEST_ROWS, retention.DELETED_EVENTS)


async def test_only_transactions_of_callers_count_as_writes(store: Society, clock: FakeClock) -> None:
    await converse(store, "an old message")
    await clock.advance(days=31)
    before = store.write_count
    await pruned(store, messages=MONTH)
    while await store.index_messages() or await store.release_space():
        pass
    assert store.write_count == before
    await send(store, "ada", "a new message")
    assert store.write_count > before


async def test_backup_and_figures_after_a_deletion(
    store: Society, clock: FakeClock, tmp_path: Path, engine: Engine
) -> None:
    for number in range(3):
        await converse(store, f"turn {number}")
    await clock.advance(days=31)
    await step(store, await summarised(store, 6), said())
    deleted = await pruned(store, messages=MONTH)
    await store.record_prune(deleted)

    figures = await store.storage()
    assert figures.last_prune is not None and figures.last_prune.deleted == deleted
    assert figures.oldest == clock.now()
    assert 0 < figures.used_bytes <= figures.file_bytes
    assert await store.age_beyond(0.5) == timedelta(0)
    assert [message.payload["text"] for message in await store.messages(Page())][-1] == "next"
    await store.backup(tmp_path / "copy.db")
    assert (tmp_path / "copy.db").stat().st_size > 0


async def test_long_texts_count_in_the_size_on_postgresql(shared: Postgres, tmp_path: Path, clock: FakeClock) -> None:
    store = await shared.open(tmp_path, clock)
    await store.add_agents(PEOPLE)
    random = Random(1)
    for _ in range(500):
        await send(store, "user", b64encode(random.randbytes(22_500)).decode(), "ada")
    full = await measured(store, shared, tmp_path, clock)
    assert full.file_bytes > 10_000_000
    assert 0.6 * full.file_bytes <= full.used_bytes <= full.file_bytes

    await clock.advance(days=31)
    store = await shared.open(tmp_path, clock)
    assert (await pruned(store, messages=MONTH)).messages == 500
    empty = await measured(store, shared, tmp_path, clock)
    assert empty.used_bytes <= 0.3 * full.used_bytes


async def measured(store: SqlStore, shared: Postgres, folder: Path, clock: FakeClock) -> StorageFigures:
    """Close the store, so that the server has its statistics; return the figures after ANALYZE."""
    await store.close()
    with shared.behind(folder) as db:
        db.execute("ANALYZE")
    store = await shared.open(folder, clock)
    figures = await store.storage()
    await store.close()
    return figures
