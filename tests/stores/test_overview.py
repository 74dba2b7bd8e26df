"""Contract of every storage engine: threads, snapshot, runs, usage, search and artifacts."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, Protocol

import pytest

from coterie.agents import Agent
from coterie.artifacts import Artifact
from coterie.clock import UNIX_EPOCH
from coterie.errors import Refused
from coterie.llm.service import TokenUsage, ToolCall
from coterie.messages import make_envelope
from coterie.plan import PlannedCall
from coterie.store import MAX_LISTED, Overview, Page, Snapshot, Store, Thread
from coterie.testing import FakeClock
from coterie.turn import CallEnded, ModelAnswered, ModelFailed, Rules
from coterie.turn_store import Claim, TurnStore

RULES = Rules()


class Society(Store, TurnStore, Overview, Protocol):
    """A store with all three ports."""


async def say(store: Society, sender: str, to: str, text: str = "hello", **more: Any) -> str:
    payload = {"text": text} | more.pop("payload", {})
    return (await store.send(make_envelope(sender=sender, to=to, payload=payload, **more))).message_id


async def notice(store: Society, agent_id: str, text: str = "trouble") -> str:
    return await say(store, "system", "user", text, payload={"problem": {"agent": agent_id}})


async def work(store: Society, *events: ModelAnswered | CallEnded | ModelFailed, agent_id: str = "ada") -> Claim:
    (claim,) = [each for each in await store.claim_ready("w", RULES, 10) if each.agent_id == agent_id]
    return await advance(store, claim, *events)


async def advance(store: Society, claim: Claim, *events: ModelAnswered | CallEnded | ModelFailed) -> Claim:
    for event in events:
        claim = await store.advance(claim, event, RULES)
    return claim


def calls(*names: str, text: str = "let me see") -> ModelAnswered:
    planned = tuple(PlannedCall(call=ToolCall(id="c", name=name, arguments={"n": 1})) for name in names)
    return ModelAnswered(text=text, calls=planned, service="main")


def texts(messages: Any) -> list[str]:
    return [message.payload.get("text") for message in messages]


async def refusal(call: Any) -> str:
    with pytest.raises(Refused) as refused:
        await call
    return refused.value.code


async def agent(store: Society, agent_id: str = "ada") -> Agent:
    found = await store.agent(agent_id)
    assert found is not None
    return found


async def thread_of(store: Society, agent_id: str) -> Thread:
    (found,) = [each for each in (await store.snapshot()).threads if each.agent_id == agent_id]
    return found


# Threads


async def test_a_thread_has_the_messages_of_the_person_and_one_agent_and_notices_about_it(store: Society) -> None:
    await say(store, "user", "ada", "one")
    await say(store, "user", "bob", "another thread")
    await say(store, "ada", "user", "two")
    await say(store, "bob", "ada", "between agents")
    await notice(store, "ada", "three")
    await say(store, "system", "user", "about nobody")
    assert texts(await store.thread("ada")) == ["one", "two", "three"]
    assert texts(await store.thread("nobody")) == []


async def test_a_delayed_message_enters_the_thread_where_it_was_delivered(store: Society, clock: FakeClock) -> None:
    await say(store, "ada", "user", "reminder", delay_ms=1000)
    gone = await say(store, "user", "ada", "never sent", delay_ms=1000)
    await store.withdraw(gone, "user")
    await say(store, "user", "ada", "now")
    assert texts(await store.thread("ada")) == ["now"]
    await clock.advance(seconds=1)
    await store.promote_due(10)
    assert texts(await store.thread("ada")) == ["now", "reminder"]


async def test_a_thread_is_read_in_parts_from_its_end_or_from_any_message(store: Society, clock: FakeClock) -> None:
    ids = []
    for n in range(7):
        ids.append(await say(store, "ada", "user", str(n)))
        if n % 3 == 0:
            await clock.advance(seconds=1)
    assert texts(await store.thread("ada", limit=3)) == ["4", "5", "6"]
    assert texts(await store.thread("ada", before=ids[4], limit=2)) == ["2", "3"]
    assert texts(await store.thread("ada", before=ids[0])) == []
    assert texts(await store.thread("ada", after=ids[4])) == ["5", "6"]
    assert texts(await store.thread("ada", after=ids[0], limit=2)) == ["1", "2"]
    assert texts(await store.thread("ada", around=ids[3], limit=3)) == ["2", "3", "4"]
    assert texts(await store.thread("ada", around=ids[0], limit=4)) == ["0", "1", "2", "3"]
    assert texts(await store.thread("ada", around=ids[6], limit=4)) == ["3", "4", "5", "6"]
    assert texts(await store.thread("ada", around=ids[6])) == ["0", "1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize("side", ["before", "after", "around"])
async def test_a_part_next_to_a_message_of_another_thread_is_refused(store: Society, side: str) -> None:
    await say(store, "ada", "user")
    elsewhere = await say(store, "bob", "user")
    where: dict[str, Any] = {side: elsewhere}
    assert await refusal(store.thread("ada", **where)) == "unknown_message"


# Read marks


async def test_unread_messages_are_those_after_the_read_mark(store: Society) -> None:
    await say(store, "ada", "user", "one")
    mine = await say(store, "user", "ada", "two")
    trouble = await notice(store, "ada", "three")
    last = await say(store, "ada", "user", "four")
    assert (await thread_of(store, "ada")).unread == 3
    assert await store.mark_read("ada", mine) == 1  # up to a message of the person
    found = await thread_of(store, "ada")
    assert (found.unread, found.first_unread, found.last.id) == (2, trouble, last)
    assert await store.unread(["ada", "bob"]) == {"ada": 2, "bob": 0}
    assert await store.mark_read("ada", last) == 2
    found = await thread_of(store, "ada")
    assert (found.unread, found.first_unread) == (0, None)
    assert (await agent(store, "user")).waiting == 0


async def test_a_history_can_be_read_in_parts(store: Society) -> None:
    for text in ("one", "two", "three"):
        await say(store, "user", "ada", text)
    await work(store, ModelAnswered(text="done"))
    first, *rest = await store.history("ada")

    assert await store.history("ada", limit=1) == [first]
    assert await store.history("ada", first.seq, 2) == rest[:2]


async def test_a_message_delivered_before_the_read_mark_stays_unread(store: Society, clock: FakeClock) -> None:
    late = await say(store, "ada", "user", "sent first", delay_ms=1000)
    seen = await say(store, "ada", "user", "met first")
    await clock.advance(seconds=1)
    await store.promote_due(10)
    assert await store.mark_read("ada", seen) == 1
    assert (await thread_of(store, "ada")).first_unread == late


async def test_notices_about_no_agent_can_be_read_too(store: Society) -> None:
    notice_id = await say(store, "system", "user", "about nobody")
    assert await store.mark_read("system", notice_id) == 1
    assert await store.waiting("user") == []


# Everything at one glance


async def test_a_new_society_shows_its_agents_and_nothing_else(store: Society) -> None:
    shown = await store.snapshot()
    assert [each.id for each in shown.agents] == ["ada", "bob"]
    assert shown == Snapshot(
        seq=await store.last_event(), agents=shown.agents, agent_count=2, threads=[], thread_count=0, queues=[],
        queue_count=0, delayed=[], delayed_count=0, open_questions=[], question_count=0, tasks=[], task_count=0,
    )  # fmt: skip


async def test_a_snapshot_shows_threads_queues_delays_and_questions(store: Society) -> None:
    await say(store, "user", "bob", "b")
    await say(store, "user", "ada", "a1")
    await say(store, "bob", "ada", "a2")
    await say(store, "bob", "user", "asks", quick_replies=["Yes"])
    await say(store, "user", "ada", "later", delay_ms=1000)
    await say(store, "ada", "user", "sooner", delay_ms=10)
    shown = await store.snapshot()
    assert [(each.agent_id, texts([each.last]), each.unread) for each in shown.threads] == [
        ("bob", ["asks"], 1),
        ("ada", ["a1"], 0),
    ]
    assert texts(shown.queues) == ["a1", "a2", "b"]
    assert texts(shown.delayed) == ["sooner", "later"]
    assert texts(shown.open_questions) == ["asks"]
    counts = (shown.thread_count, shown.queue_count, shown.delayed_count, shown.question_count)
    assert counts == (2, 3, 2, 1)
    assert shown.seq == await store.last_event()


async def test_long_lists_are_cut_and_counted_and_terminated_agents_come_last(store: Society) -> None:
    await store.add_agents([Agent(id=f"x{n:03}", name="X") for n in range(MAX_LISTED)])
    await store.terminate("ada")
    await asyncio.gather(*(say(store, "user", "bob", delay_ms=n) for n in range(1, MAX_LISTED + 2)))
    shown = await store.snapshot()
    assert (len(shown.agents), shown.agent_count, len(shown.delayed), shown.delayed_count) == (200, 202, 200, 201)
    assert "ada" not in {each.id for each in shown.agents}


async def test_a_snapshot_is_consistent_during_concurrent_writes(store: Society) -> None:
    before = await store.last_event()

    async def send_messages() -> None:
        for n in range(150):
            await say(store, "ada", "user", str(n), quick_replies=["Yes"])

    sending = asyncio.create_task(send_messages())
    shots = []
    while not sending.done():
        shots.append(await store.snapshot())
    await sending
    log = [event for event in await store.events(before, 10_000) if event.kind == "message.created"]
    for shot in shots:
        sent = sum(event.seq <= shot.seq for event in log)
        assert (shot.question_count, sum(each.unread for each in shot.threads)) == (sent, sent)


async def test_an_agent_shows_the_call_it_is_at(store: Society) -> None:
    await say(store, "user", "ada")
    claim = await work(store, calls("look", "find"))
    shown = await agent(store)
    assert (shown.state, shown.tool, shown.tool_position) == ("tools", "look", (1, 2))
    claim = await advance(store, claim, CallEnded(index=0, ok=True, result="seen"))
    shown = (await store.snapshot()).agents[0]
    assert (shown.id, shown.tool, shown.tool_position) == ("ada", "find", (2, 2))
    await advance(store, claim, CallEnded(index=1, ok=True, result="found"), ModelAnswered(text="done"))
    assert ((await agent(store)).tool, (await agent(store)).tool_position) == (None, None)


# Clearing a conversation


async def test_clearing_a_conversation_deletes_its_messages_and_the_history(store: Society) -> None:
    await say(store, "user", "ada", "one")
    claim = await work(store, calls("look"))
    await advance(store, claim, CallEnded(index=0, ok=True, result="seen"), ModelAnswered(text="done"))
    start = await store.last_event()
    assert await store.clear_thread("ada") == 2
    assert [*await store.thread("ada"), *await store.history("ada"), *await store.runs(Page())] == []
    assert (await agent(store, "user")).waiting == 0
    assert [(event.kind, event.subject) for event in await store.events(start)] == [("thread.cleared", "ada")]
    assert await store.clear_thread("ada") == 0


async def test_waiting_delayed_and_other_agents_messages_survive_a_cleared_conversation(store: Society) -> None:
    await say(store, "bob", "ada", "from bob")
    await work(store, ModelAnswered(text="done"))
    await say(store, "user", "ada", "delayed", delay_ms=1000)
    await say(store, "user", "ada", "waits")
    await say(store, "bob", "user", "another thread")
    await store.clear_thread("ada")
    assert texts(await store.messages(Page(), agent="ada")) == ["waits", "delayed", "done", "from bob"]
    assert texts(await store.thread("bob")) == ["another thread"]
    await work(store, ModelAnswered(text="again"))
    assert [row.text or texts([row.message])[0] for row in await store.history("ada")] == ["waits", "again"]


async def test_a_conversation_is_not_cleared_under_an_agent_at_work(store: Society) -> None:
    await say(store, "user", "ada")
    claim = await work(store)
    assert await refusal(store.clear_thread("ada")) == "agent_busy"
    await advance(store, claim, calls("look"))
    assert await refusal(store.clear_thread("ada")) == "agent_busy"
    assert await refusal(store.clear_thread("user")) == "unknown_agent"
    assert await refusal(store.clear_thread("nobody")) == "unknown_agent"


@pytest.mark.parametrize(
    ("held", "mail", "then"), [(0, 0, "idle"), (0, 1, "ready"), (1, 0, "paused"), (1, 1, "paused")]
)
async def test_clearing_the_conversation_unblocks_the_agent(store: Society, held: int, mail: int, then: str) -> None:
    await say(store, "user", "ada")
    await work(store, ModelFailed(message="no key", recovery="block"))
    assert (await agent(store)).state == "blocked"
    if mail:
        await say(store, "bob", "ada", "waits")
    if held:
        await store.pause("ada")
    await store.clear_thread("ada")
    shown = await agent(store)
    assert (shown.state, shown.state_reason) == (then, None)


# Records


async def test_runs_are_plans_with_their_calls_newest_first(store: Society) -> None:
    await say(store, "user", "ada")
    claim = await work(store)
    await say(store, "user", "ada", "wait")
    claim = await advance(
        store, claim, calls("dropped"), calls("look", "find"), CallEnded(index=0, ok=False, result="blind")
    )
    shown = await store.runs(Page())
    assert [(plan.agent_id, plan.outcome, [(call.name, call.state) for call in plan.calls]) for plan in shown] == [
        ("ada", "open", [("look", "failed"), ("find", "started")]),
        ("ada", "withdrawn", [("dropped", "cancelled")]),
    ]
    look = shown[0].calls[0]
    assert (look.arguments, look.result) == ('{"n":1}', "blind")
    assert look.started_at is not None and look.ended_at is not None
    assert await store.runs(Page(limit=1)) == shown[:1]
    assert await store.runs(Page(before=shown[0].seq)) == shown[1:]
    assert await store.runs(Page(), "ada") == shown
    assert await store.runs(Page(before=shown[0].seq), "ada") == shown[1:]
    assert await store.runs(Page(), "bob") == []


async def test_runs_are_found_by_all_words_of_their_text_in_any_case(store: Society) -> None:
    await say(store, "user", "ada")
    claim = await work(store)
    for text in ("I look at ÄPFEL", "I look at pears", ""):
        claim = await advance(store, claim, calls("look", text=text), CallEnded(index=0, ok=True, result="1"))
    every = await store.runs(Page())
    [apples], end = await store.search_runs("LOOK äpfel", Page(), "ada")
    assert (apples.text, end) == ("I look at ÄPFEL", None)
    found, end = await store.search_runs("look", Page())
    assert (found, end) == ([plan for plan in every if plan.text], None)
    assert await store.search_runs("look", Page(limit=1), "ada") == (found[:1], found[0].seq)
    assert await store.search_runs("look", Page(before=found[0].seq), "ada") == (found[1:], None)
    assert await store.search_runs("look", Page(), "bob") == ([], None)


async def test_a_request_with_a_withdrawn_plan_counts_as_withdrawn(store: Society) -> None:
    await say(store, "user", "ada")
    claim = await work(store)
    await say(store, "user", "ada", "wait")
    await advance(store, claim, calls("dropped"), ModelAnswered(text="done", service="main"))
    (use,) = await store.usage(UNIX_EPOCH)
    assert (use.requests, use.withdrawn) == (2, 1)


async def test_usage_is_summed_by_day_agent_and_service(store: Society, clock: FakeClock) -> None:
    def cost(text: str, service: str = "main") -> ModelAnswered:
        return ModelAnswered(text=text, service=service, usage=TokenUsage(input_tokens=10, output_tokens=3))

    await say(store, "user", "ada")
    await work(store, cost("one"))
    await clock.advance(days=1)
    for service in ("main", "main", "spare"):
        await say(store, "user", "ada")
        await work(store, cost("more", service))
    shown = await store.usage(UNIX_EPOCH)
    today, yesterday = (clock.now() - timedelta(days=days) for days in (0, 1))
    assert [(use.day, use.service, use.requests, use.input_tokens, use.output_tokens) for use in shown] == [
        (f"{today:%Y-%m-%d}", "main", 2, 20, 6),
        (f"{today:%Y-%m-%d}", "spare", 1, 10, 3),
        (f"{yesterday:%Y-%m-%d}", "main", 1, 10, 3),
    ]
    assert {use.agent_id for use in shown} == {"ada"}
    assert await store.usage(today) == shown[:2]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("report", ["The REPORT is done", "a report, 50%_off"]),
        ("done report", ["The REPORT is done"]),
        ("50%", ["a report, 50%_off"]),
        ("5_%", []),
        ("%", ["a report, 50%_off"]),
        ("\\", ["back\\slash"]),
        ("报告", ["报告写好了"]),
        ("ÜBER", ["Über alles"]),
        ("über alles", ["Über alles"]),
        ("  ", []),
        ("x" * 100_000, []),
    ],
)
async def test_search_finds_the_messages_with_all_of_the_words(store: Society, words: str, found: list[str]) -> None:
    for text in ("Über alles", "报告写好了", "back\\slash", "a report, 50%_off", "The REPORT is done"):
        await say(store, "ada", "user", text)
    await say(store, "ada", "user", payload={"text": "", "other": "report"})
    assert texts(await store.search(words, Page())) == found


async def test_search_goes_page_by_page_and_for_one_agent(store: Society) -> None:
    for n, who in enumerate(("ada", "bob", "ada")):
        await say(store, who, "user", f"word {n}")
    newest = await store.search("word", Page(limit=2))
    assert texts(newest) == ["word 2", "word 1"]
    assert texts(await store.search("word", Page(before=newest[-1].seq))) == ["word 0"]
    assert texts(await store.search("word", Page(), "bob")) == ["word 1"]


async def test_artifacts_are_listed_newest_first_from_any_of_them_on(store: Society, clock: FakeClock) -> None:
    kind: dict[str, Any] = {"filename": "a.png", "type": "image", "mime_type": "image/png", "size": 1, "sha256": "00"}
    for ref in ("a", "c", "b"):
        await store.add_artifact(Artifact(ref=ref, created_at=clock.now(), **kind))
    await clock.advance(seconds=1)
    await store.add_artifact(Artifact(ref="0", created_at=clock.now(), **kind))
    assert [each.ref for each in await store.artifacts_before(None, 3)] == ["0", "c", "b"]
    assert [each.ref for each in await store.artifacts_before("c", 9)] == ["b", "a"]
    assert await refusal(store.artifacts_before("gone", 9)) == "unknown_artifact"
