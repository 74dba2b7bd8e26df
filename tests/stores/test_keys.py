"""Contract of every storage engine: keys of programs, and messages that come through them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import Refused
from coterie.keys import KeyStore, make_key, token_digest
from coterie.testing import FakeClock
from coterie.testing.clock import START
from tests.conftest import PEOPLE
from tests.engines import Engine

from .processes import Opener
from .steps import call, message_to, says
from .task_steps import Society, claim, message, newest, press, questions, run_send, said, send, step, task_of


@pytest.fixture
async def store(engine: Engine, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Any]:
    opened = await engine.open(tmp_path / "data", clock)
    await opened.add_agents(PEOPLE)
    yield opened
    assert [violation async for violation in opened.violations()] == []
    await opened.close()


async def add(store: KeyStore, name: str, agents: Any = None, doors: Any = None) -> str:
    key, token = make_key(name, agents, doors)
    await store.add_key(key)
    return token


async def replies(store: Any) -> list[tuple[str, str | None, str]]:
    """Text, question and task of each message to the person."""
    found = [one for one in await store.thread("ada") if one.to == "user"]
    return [(one.payload["text"], one.in_reply_to, one.task) for one in found]


async def test_a_key_is_found_by_its_token_until_it_is_revoked(store: Any, clock: FakeClock) -> None:
    token = await add(store, "webui", ["ada"], ["mcp", "openai"])
    key = await store.find_key(token_digest(token))
    assert (key.name, key.agents, key.doors) == ("webui", ("ada",), ("openai", "mcp"))
    assert (key.created_at, key.used_at, key.revoked_at) == (START, None, None)
    assert await store.find_key(token_digest("cot_wrong")) is None

    await clock.advance(minutes=5)
    await store.mark_key_used("webui")
    (used,) = await store.keys()
    assert (used.used_at - START).total_seconds() == 300
    with pytest.raises(Refused, match="revoke it first"):
        await add(store, "webui")

    await store.revoke_key("webui")
    first = await store.revoke_key("webui")
    assert await store.find_key(token_digest(token)) is None
    assert first.revoked_at is not None

    fresh = await add(store, "webui")
    (replaced,) = await store.keys()
    assert (replaced.agents, replaced.used_at, replaced.revoked_at) == (None, None, None)
    assert await store.find_key(token_digest(token)) is None
    assert await store.find_key(token_digest(fresh)) == replaced


async def test_a_key_for_an_agent_or_door_that_does_not_exist_is_refused(store: Any) -> None:
    for agents, doors, code in (
        (["ada", "nobody"], None, "unknown_agent"),
        (["user"], None, "unknown_agent"),
        ([], None, "key_invalid"),
        ("ada", None, "key_invalid"),
        (None, ["opnai"], "key_invalid"),
        (None, [], "key_invalid"),
    ):
        with pytest.raises(Refused) as refused:
            await add(store, "webui", agents, doors)
        assert refused.value.code == code
    for name in ("", "Web UI", "-x", None, "x" * 65):
        with pytest.raises(Refused):
            make_key(name, None, None)
    with pytest.raises(Refused) as refused:
        await store.revoke_key("webui")
    assert (refused.value.code, await store.keys()) == ("unknown_key", [])


async def test_a_key_that_another_process_revokes_is_refused_at_once(process: Opener) -> None:
    one, other = await process(), await process()
    digest = token_digest(await add(one, "webui"))
    assert await other.find_key(digest)
    await other.revoke_key("webui")
    assert await one.find_key(digest) is None


async def test_each_program_has_its_own_task_and_gets_its_own_answer(store: Society) -> None:
    first = await send(store, text="from webui", via="webui")
    claimed = await claim(store)
    again = await send(store, text="more from webui", via="webui")
    other = await send(store, text="from llm", via="llm")
    mine = await send(store, text="from me")
    assert [one.task for one in (again, other, mine)] == [first.task, other.message_id, mine.message_id]
    assert (await message(store, other.message_id)).via == "llm"
    assert (await message(store, mine.message_id)).via is None

    claimed = await step(store, claimed, said("not read"))  # takes the waiting messages
    await step(store, claimed, said("for all"))
    answers = {question: task for text, question, task in await replies(store) if text == "for all"}
    assert answers == {again.message_id: first.task, other.message_id: other.task, mine.message_id: mine.task}
    for task in (first.task, other.task, mine.task):
        assert (await task_of(store, task)).state == "done"


async def test_a_program_answers_only_questions_of_its_own_tasks(store: Society) -> None:
    task = (await send(store, via="webui")).task
    claimed = await step(store, await claim(store), says("", message_to("user", "Which?", quickReplies=["A", "B"])))
    await step(store, await run_send(store, claimed), said("I asked"))
    (asked,) = await questions(store)

    strange = await send(store, text="something else", via="llm")
    assert strange.task == strange.message_id
    for option in (0, None):
        with pytest.raises(Refused) as refused:
            await send(store, text="A", via="llm", in_reply_to=asked.id, option=option)
        assert refused.value.code == "inReplyTo_unknown"
    assert await questions(store) == [asked]
    answer = await send(store, text="B", via="webui", in_reply_to=asked.id, option=1)
    assert (answer.task, await questions(store)) == (task, [])


async def test_only_the_owner_approves_a_call(store: Society) -> None:
    await send(store, via="webui")
    await step(store, await claim(store), says("", call("pay", needs_approval=True)))
    (asked,) = await questions(store)
    with pytest.raises(Refused) as refused:
        await send(store, text="Approve", via="webui", in_reply_to=asked.id, option=0)
    assert refused.value.code == "not_yours"
    await press(store, asked, 0)
    assert (await newest(store, "ada")).via is None


async def test_the_message_of_a_program_to_an_agent_that_waits_for_an_approval_ends_the_wait(store: Society) -> None:
    await send(store)
    await step(store, await claim(store), says("", call("pay", needs_approval=True)))
    other = await send(store, text="hello", via="webui")
    await step(store, await claim(store), said("hi"))
    assert ("hi", other.message_id, other.task) in await replies(store)


async def test_the_messages_of_a_task_with_the_person_are_read_in_order_and_from_a_position(store: Any) -> None:
    asked = await send(store, via="webui")
    claimed = await step(store, await claim(store), says("", message_to("bob"), message_to("user", "one moment")))
    await step(store, await run_send(store, await run_send(store, claimed)), said("done"))
    await send(store, "bob", "another task")
    task, (first, *rest) = await store.task_with_messages(asked.task)
    assert (task.id, task.state) == (asked.task, "working")  # bob has not answered
    assert [(one.sender, one.payload["text"]) for one in (first, *rest)] == [("ada", "one moment"), ("ada", "done")]
    assert await store.task_with_messages(asked.task, after=first.seq) == (task, rest)
    assert await store.task_with_messages("nothing") == (None, [])
