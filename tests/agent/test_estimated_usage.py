"""Usage that a service does not report is estimated, counted and marked as estimated."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from coterie.clock import UNIX_EPOCH
from coterie.errors import StoreUnavailable
from coterie.store import Usage
from coterie.testing.model_server import Calls, CustomReply, ReceivedRequest, Says, ServerConnection, Status, chunk
from coterie.turn_store import StaleClaim
from tests.agent.stage import Stage, stage

WITHOUT_USAGE = frozenset({"stream_options"})
"""A service that refuses this key reports no usage."""


async def used(here: Stage) -> list[Usage]:
    return list(await here.society.store.usage(UNIX_EPOCH))


async def interrupted(wire: ServerConnection) -> None:
    await wire.begin()
    await wire.event(chunk({"role": "assistant", "content": "The beginning of an answer, and then"}))


async def test_the_daily_token_limit_holds_for_a_service_that_reports_no_usage(tmp_path: Path) -> None:
    agents = "[limits]\ntokens_per_day = 50\n[agents.ada]\n"
    async with stage(tmp_path, agents=agents, unknown_keys=WITHOUT_USAGE) as here:
        await here.say("first")
        assert await here.texts() == ["ok"]
        await here.say("second")
        assert "limits.tokens_per_day" in (await here.texts(2))[1]
        await here.state("ada", "blocked")
        (row,) = await used(here)
        assert row.requests == 1
        assert row.input_tokens > 50 and row.output_tokens > 0
        assert row.estimated_tokens == row.input_tokens + row.output_tokens
        here.server.refused.clear()  # it refused the unknown key, as expected


async def test_reported_usage_is_not_counted_as_estimated(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        await here.say("first")
        await here.heard()
        (row,) = await used(here)
        assert row.input_tokens and row.estimated_tokens == 0


async def test_tokens_of_an_interrupted_answer_count_and_those_of_a_refused_request_do_not(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Status(401, "wrong key"))
        await here.say("refused")
        await here.state("ada", "blocked")
        assert await used(here) == []
        here.server.script(CustomReply(interrupted), Status(401, "wrong key"))
        await here.say("broken off")
        await here.server.wait_for_request(2)
        await here.until(lambda: is_counted(here))
        (row,) = await used(here)
        assert (row.service, row.requests) == ("main", 1)
        assert row.input_tokens > 0 and row.estimated_tokens == row.input_tokens + row.output_tokens


async def is_counted(here: Stage) -> bool:
    return bool(await used(here))


async def test_tokens_of_a_stopped_request_count(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with stage(tmp_path) as here:
        here.server.script(Says("too late", gate=gate))
        await here.say("count")
        await here.server.wait_for_request(1)
        assert here.society.stop_turn("ada")
        await here.state("ada", "idle")
        (row,) = await used(here)
        assert row.input_tokens > 0 and row.estimated_tokens == row.input_tokens + row.output_tokens
        gate.set()


async def test_tokens_of_a_withdrawn_answer_count_as_estimated(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with stage(tmp_path, unknown_keys=WITHOUT_USAGE) as here:
        await here.say("warm up")
        await here.heard(1)
        here.server.script(Says(calls=(Calls("ring", {"name": "x"}),), gate=gate), "then this")
        before = len(here.server.requests)
        await here.say("ring")
        await here.server.wait_for_request(before + 1)
        await here.say("no, wait")
        gate.set()
        assert (await here.texts(2))[1] == "then this"
        (row,) = await used(here)
        assert (row.requests, row.withdrawn) == (3, 1)
        assert row.estimated_tokens == row.input_tokens + row.output_tokens
        here.server.refused.clear()


async def test_tokens_of_an_interrupted_summary_count_as_estimated(tmp_path: Path) -> None:
    def answer(request: ReceivedRequest) -> Says | CustomReply:
        summary = str(request.body["messages"][0]["content"]).startswith("Summarise")
        return CustomReply(interrupted) if summary else Says("yes")

    async with stage(tmp_path, window=4_000, contextTokens=4_000, unknown_keys=WITHOUT_USAGE) as here:
        here.server.default = answer
        sent = 0
        while sum(1 for one in here.server.requests if "Summarise" in str(one.body["messages"][0])) < 1:
            sent += 1
            await here.say(f"{sent} " + "x" * 1_500)
            await here.heard(sent)
        await here.state("ada", "idle")
        (row,) = await used(here)
        assert row.requests == sent + 1
        assert row.estimated_tokens == row.input_tokens + row.output_tokens
        here.server.refused.clear()


LIMITED = "[limits]\ntokens_per_day = 1000000\n[agents.ada]\n[agents.bob]\n"
"""With a limit, the estimated tokens of a request are reserved before it is sent."""


async def end_turn(here: Stage, by: str, task: str) -> None:
    match by:
        case "stop":
            assert here.society.stop_turn("ada")
        case "stop of the task":
            await here.society.stop_task(task)
        case "termination":
            await here.society.terminate_agent("ada")


async def requests_of(here: Stage, agent_id: str) -> int:
    return sum(row.requests for row in await used(here) if row.agent_id == agent_id)


ENDS = pytest.mark.parametrize("by", ["stop", "stop of the task", "termination"])


@ENDS
async def test_a_request_that_was_ended_before_it_was_sent_reserves_no_tokens(tmp_path: Path, by: str) -> None:
    gate = asyncio.Event()
    async with stage(tmp_path, agents=LIMITED, maxConcurrentRequests=1) as here, asyncio.timeout(30):
        here.server.script(Says("done", gate=gate))
        await here.say("first", to="bob")
        await here.server.wait_for_request(1)
        task = await here.say("second")
        while not await requests_of(here, "ada"):  # it waits for the slot of bob's request
            pass
        await end_turn(here, by, task)
        while await requests_of(here, "ada"):
            pass
        gate.set()
        await here.state("bob", "idle")
        assert len(here.server.requests) == 1


@ENDS
async def test_a_request_that_was_ended_while_it_ran_counts_once(tmp_path: Path, by: str) -> None:
    gate = asyncio.Event()
    async with stage(tmp_path, agents=LIMITED) as here, asyncio.timeout(30):
        here.server.script(Says("too late", gate=gate))
        task = await here.say("count")
        await here.server.wait_for_request(1)
        await end_turn(here, by, task)
        while not (await here.society.task(task)).task.requests:
            pass
        assert await requests_of(here, "ada") == 1
        gate.set()


async def test_an_answer_that_was_stored_is_not_counted_again_when_the_next_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    async with stage(tmp_path, agents=LIMITED) as here, asyncio.timeout(30):
        here.server.script(Says("first", gate=gate), "second")
        await here.say("one")
        await here.server.wait_for_request(1)
        await here.say("two")
        reserve, refused = here.society.store.reserve_tokens, asyncio.Event()

        async def refuse_once(*args: Any, **named: Any) -> bool:
            if not refused.is_set():
                refused.set()
                raise StaleClaim("another worker has the turn")
            return await reserve(*args, **named)

        monkeypatch.setattr(here.society.store, "reserve_tokens", refuse_once)
        gate.set()
        assert await here.texts(2) == ["first", "second"]
        assert refused.is_set() and await requests_of(here, "ada") == 2


async def test_a_limit_that_is_switched_off_while_the_store_is_unavailable_blocks_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path, agents=LIMITED) as here, asyncio.timeout(30):
        reserve, failed = here.society.store.reserve_tokens, asyncio.Event()

        async def fail_once(*args: Any, **named: Any) -> bool:
            if not failed.is_set():
                failed.set()
                (tmp_path / "coterie.toml").write_text("[agents.ada]\n[agents.bob]\n")
                await here.society.reload()
                raise StoreUnavailable("the database restarts")
            return await reserve(*args, **named)

        monkeypatch.setattr(here.society.store, "reserve_tokens", fail_once)
        await here.say("hello")
        assert await here.texts() == ["ok"]
        assert failed.is_set()
