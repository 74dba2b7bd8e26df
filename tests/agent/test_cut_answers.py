"""With `interrupt = "stream"` a person's message ends the answer that the model is writing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coterie.clock import UNIX_EPOCH
from coterie.live import LiveReply
from coterie.store import Page
from coterie.testing import Calls, Says
from coterie.testing.model_server import CustomReply, ReceivedRequest, Reply
from coterie.turn_store import PlanRecord
from tests.agent.held_answer import HeldAnswer
from tests.agent.stage import Bell, Stage, each, stage
from tests.agent.tool_calls import wait_until
from tests.engines import Engine, Postgres

STREAM = '[interruption]\ninterrupt = "stream"\n'
AGENTS = "[agents.ada]\n[agents.bob]\n"


@contextlib.asynccontextmanager
async def drafts(here: Stage) -> AsyncIterator[asyncio.Queue[LiveReply]]:
    """The replies that models are writing, and their changes."""
    changes: asyncio.Queue[LiveReply] = asyncio.Queue()
    for reply in here.society.live.replies:
        changes.put_nowait(reply)
    end = here.society.live.subscribe(changes.put_nowait)
    yield changes
    end()


async def streamed(changes: asyncio.Queue[LiveReply], text: str) -> LiveReply:
    while not (reply := await changes.get()).text.endswith(text):
        pass
    return reply


async def cut_answers(here: Stage) -> list[PlanRecord]:
    return [run for run in await here.society.store.runs(Page(limit=50)) if run.outcome == "withdrawn"]


def said_by_user(request: ReceivedRequest) -> str:
    return "\n".join(str(message["content"]) for message in request.messages if message["role"] == "user")


def agents(engine: Engine, folder: Path, text: str = STREAM + AGENTS) -> str:
    """coterie.toml for a society on this engine."""
    return text + (f"[store]\nurl = {json.dumps(engine.url(folder))}\n" if isinstance(engine, Postgres) else "")


async def test_a_message_cuts_the_answer_and_the_next_request_has_it(engine: Engine, tmp_path: Path) -> None:
    async with stage(tmp_path, agents=agents(engine, tmp_path)) as here, drafts(here) as changes:
        held = HeldAnswer()
        here.server.script(held, "to both")
        await here.say("one")
        reply = await streamed(changes, held.said)
        second = await here.say("two")
        await held.closed.wait()
        (answer,) = await here.heard()
        assert (answer.payload["text"], answer.in_reply_to) == ("to both", second)
        assert reply.outcome == "withdrawn" and not reply.message_ids
        assert await here.history() == [("user", "one"), ("user", "two"), ("assistant", "to both")]
        assert len(here.server.requests) == 2
        assert held.said not in here.server.requests[1].raw.decode()
        asked = said_by_user(here.server.requests[1])
        assert asked.index("one") < asked.index("two")
        (cut,) = await cut_answers(here)
        assert (cut.text, cut.calls, cut.interrupted_by) == (held.said, [], second)


async def test_the_tokens_of_a_cut_answer_are_counted_as_withdrawn_and_estimated(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=STREAM + AGENTS) as here, drafts(here) as changes:
        here.server.script(HeldAnswer("words that cost tokens"), "to both")
        await here.say("one")
        await streamed(changes, "tokens")
        await here.say("two")
        await here.heard()
        (row,) = await here.society.store.usage(UNIX_EPOCH)
        assert (row.requests, row.withdrawn) == (2, 1)
        assert 0 < row.estimated_tokens < row.input_tokens + row.output_tokens


async def test_an_answer_is_cut_before_its_first_word(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=STREAM + AGENTS) as here:
        held = HeldAnswer(said="")
        here.server.script(held, "to both")
        await here.say("one")
        await here.server.wait_for_request(1)
        await here.say("two")
        await held.closed.wait()
        assert await here.texts() == ["to both"]
        (cut,) = await cut_answers(here)
        assert cut.text == ""


@pytest.mark.parametrize(
    "text",
    [AGENTS, '[interruption]\ninterrupt = "step"\n' + AGENTS, STREAM + '[agents.ada]\ninterrupt = "step"\n'],
    ids=["default", "society", "agent"],
)
async def test_with_step_a_message_waits_for_the_whole_answer(tmp_path: Path, text: str) -> None:
    async with stage(tmp_path, agents=text) as here, drafts(here) as changes:
        held = HeldAnswer()
        here.server.script(held, "second")
        await here.say("one")
        await streamed(changes, held.said)
        await here.say("two")
        held.may_end.set()
        assert await here.texts(2) == ["The answer begins and ends.", "second"]
        assert not held.closed.is_set() and await cut_answers(here) == []


async def test_an_agent_can_have_its_own_setting(tmp_path: Path) -> None:
    async with stage(tmp_path, agents='[agents.ada]\ninterrupt = "stream"\n') as here, drafts(here) as changes:
        here.server.script(HeldAnswer(), "to both")
        await here.say("one")
        await streamed(changes, "begins")
        await here.say("two")
        assert await here.texts() == ["to both"]


async def test_a_message_of_an_agent_does_not_cut_an_answer(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=STREAM + AGENTS) as here, drafts(here) as changes:
        held = HeldAnswer()
        here.server.script(held, "to bob")
        await here.say("one")
        await streamed(changes, held.said)
        await here.society.bus.send(sender="bob", to="ada", payload={"text": "psst"})
        held.may_end.set()
        assert await here.texts() == ["The answer begins and ends."]
        await here.state("ada", "idle")
        assert await cut_answers(here) == []


async def test_a_cut_takes_the_mail_of_agents_that_waits_before_it_in_order(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=STREAM + AGENTS) as here, drafts(here) as changes:
        here.server.script(HeldAnswer(), "to all")
        await here.say("one")
        await streamed(changes, "begins")
        await here.society.bus.send(sender="bob", to="ada", payload={"text": "psst"})
        await here.say("two")
        assert await here.texts() == ["to all"]
        assert await here.history() == [
            ("user", "one"), ("user", "psst"), ("user", "two"), ("assistant", "to all"),
        ]  # fmt: skip


async def test_a_delayed_message_that_falls_due_cuts_an_answer(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=STREAM + AGENTS) as here, drafts(here) as changes:
        here.server.script(HeldAnswer(), "to both")
        await here.say("one")
        await streamed(changes, "begins")
        await here.say("two", delay_ms=1)
        assert await here.texts() == ["to both"]


async def test_after_the_last_allowed_cut_the_answer_is_completed(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=STREAM + "max_cuts = 2\n" + AGENTS) as here, drafts(here) as changes:
        last = HeldAnswer("The third answer begins")
        here.server.script(HeldAnswer("The first"), HeldAnswer("The second"), last, "to four")
        await here.say("one")
        await streamed(changes, "first")
        await here.say("two")
        await streamed(changes, "second")
        await here.say("three")
        await streamed(changes, "third answer begins")
        await here.say("four")
        last.may_end.set()
        assert await here.texts(2) == ["The third answer begins and ends.", "to four"]
        assert [cut.text for cut in reversed(await cut_answers(here))] == ["The first", "The second"]
        assert [text for role, text in await here.history() if role == "user"] == ["one", "two", "three", "four"]


async def test_each_turn_has_its_own_limit_of_cuts(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=STREAM + "max_cuts = 1\n" + AGENTS) as here, drafts(here) as changes:
        for turn in (1, 2):
            here.server.script(HeldAnswer(f"cut {turn}"), f"answer {turn}")
            await here.say("hello")
            await streamed(changes, f"cut {turn}")
            await here.say("and more")
            assert (await here.texts(turn))[-1] == f"answer {turn}"
            await here.state("ada", "idle")


async def test_a_message_joins_a_request_that_was_not_sent_yet(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=STREAM + AGENTS, maxConcurrentRequests=1) as here, drafts(here) as changes:
        held = HeldAnswer("bob talks")
        here.server.default = each(bob=[CustomReply(held.stream)], ada=["to both"])
        await here.say("hello", to="bob")
        await streamed(changes, "bob talks")
        await here.say("one")
        await here.state("ada", "llm")
        await here.say("two")

        async def is_joined() -> bool:
            return len(await here.history()) == 2

        await here.until(is_joined)
        held.may_end.set()
        assert {*await here.texts(2)} == {"bob talks and ends.", "to both"}
        assert sum("(id: ada)" in request.messages[0]["content"] for request in here.server.requests) == 1
        assert await cut_answers(here) == []
        assert all(row.withdrawn == 0 for row in await here.society.store.usage(UNIX_EPOCH))


async def test_a_summary_is_not_cut_and_the_message_joins_the_request_after_it(tmp_path: Path) -> None:
    held, summaries, answers = HeldAnswer("A summary", " of it all"), list[Any](), list[Any]()

    def answer(request: ReceivedRequest) -> Reply:
        is_summary = str(request.messages[0]["content"]).startswith("Summarise")
        (summaries if is_summary else answers).append(request)
        return held(request) if is_summary else "yes"

    async with stage(tmp_path, agents=STREAM + AGENTS, window=4_000, contextTokens=4_000) as here:
        here.server.default = answer
        sent: list[str] = []
        while not summaries:
            if sent:
                await here.heard(len(sent))
            sent.append(await here.say("x" * 1_500))
            await wait_until(lambda: bool(summaries) or len(answers) == len(sent))
        await here.say("while it is summarised")
        held.may_end.set()
        assert (await here.texts(len(sent)))[-1] == "yes"
        await here.state("ada", "idle")
        assert not held.closed.is_set() and len(summaries) == 1
        assert "while it is summarised" in said_by_user(answers[-1])
        assert len(answers) == len(sent) and await cut_answers(here) == []


async def test_an_answer_that_is_complete_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(tmp_path, agents=STREAM + AGENTS) as here:
        writing, go_on = asyncio.Event(), asyncio.Event()
        advance = here.society.store.advance

        async def slow(*arguments: Any, **more: Any) -> Any:
            writing.set()
            await go_on.wait()
            return await advance(*arguments, **more)

        monkeypatch.setattr(here.society.store, "advance", slow)
        here.server.script("complete", "to two")
        await here.say("one")
        await writing.wait()
        await here.say("two")
        go_on.set()
        assert await here.texts(2) == ["complete", "to two"]
        assert await cut_answers(here) == []


async def test_a_stop_with_a_cut_leaves_one_outcome(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=STREAM + AGENTS) as here, drafts(here) as changes:
        here.server.script(HeldAnswer("cut or stopped"))
        await here.say("one")
        await streamed(changes, "stopped")
        await here.say("two")
        here.society.stop_turn("ada")
        await here.state("ada", "idle")
        in_history = ("assistant", "cut or stopped") in await here.history()
        assert in_history != bool(await cut_answers(here))
        assert [text for role, text in await here.history() if role == "user"] == ["one", "two"]


async def test_a_message_in_a_paused_society_does_not_cut_the_answer(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=STREAM + AGENTS) as here, drafts(here) as changes:
        held = HeldAnswer()
        here.server.script(held, "to two")
        await here.say("one")
        await streamed(changes, held.said)
        await here.society.pause_all()
        await here.say("two")
        held.may_end.set()
        assert await here.texts() == ["The answer begins and ends."]
        await here.society.resume_all()
        assert (await here.texts(2))[1] == "to two"


async def test_a_cut_keeps_the_results_of_calls_that_ran_before(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=STREAM + AGENTS) as here, drafts(here) as changes:
        here.server.script(Says(calls=(Calls("ring", {"name": "a"}),)), HeldAnswer(), "done")
        await here.say("ring")
        await streamed(changes, "begins")
        await here.say("thanks")
        assert await here.texts() == ["done"]
        assert Bell.rings == ["a"]
        assert await here.history() == [
            ("user", "ring"), ("assistant", "ring"), ("tool", "a rang"), ("user", "thanks"), ("assistant", "done"),
        ]  # fmt: skip


async def test_a_turn_that_was_cut_continues_after_a_restart(tmp_path: Path) -> None:
    """The limit of cuts counts those before the restart."""
    text = "[shutdown]\ndrain_seconds = 0\n" + STREAM + "max_cuts = 1\n" + AGENTS
    async with stage(tmp_path, agents=text) as here, drafts(here) as changes:
        here.server.script(HeldAnswer("cut"), HeldAnswer("lost"))
        await here.say("one")
        await streamed(changes, "cut")
        await here.say("two")
        await streamed(changes, "lost")
        await here.society.stop()
        last = HeldAnswer("kept")
        here.server.script(last, "to three")
        async with stage_again(here, tmp_path) as again, drafts(again) as later:
            await streamed(later, "kept")
            await again.say("three")
            last.may_end.set()
            assert await again.texts(2) == ["kept and ends.", "to three"]


@contextlib.asynccontextmanager
async def stage_again(here: Stage, folder: Path) -> AsyncIterator[Stage]:
    """The same society after a restart."""
    async with type(here.society).open(folder) as society:
        yield Stage(society, here.server)
