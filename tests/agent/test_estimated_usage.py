"""What a service does not report counts all the same, as an estimate that is called one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from coterie.clock import UNIX_EPOCH
from coterie.store import Usage
from coterie.testing.model_server import Calls, CustomReply, Says, Status
from coterie.testing.replies import ReceivedRequest, ServerConnection, chunk
from tests.agent.stage import Stage, stage

SILENT = frozenset({"stream_options"})
"""A service that does not know this key is never asked for usage, and reports none."""


async def used(here: Stage) -> list[Usage]:
    return list(await here.society.store.usage(UNIX_EPOCH))


async def breaks_off(wire: ServerConnection) -> None:
    await wire.begin()
    await wire.event(chunk({"role": "assistant", "content": "The beginning of an answer, and then"}))


async def test_the_days_tokens_run_out_at_a_service_that_reports_no_usage(tmp_path: Path) -> None:
    agents = "[limits]\ntokens_per_day = 50\n[agents.ada]\n"
    async with stage(tmp_path, agents=agents, unknown_keys=SILENT) as here:
        await here.say("first")
        assert await here.texts() == ["ok"]
        await here.say("second")
        assert "limits.tokens_per_day" in (await here.texts(2))[1]
        await here.state("ada", "blocked")
        (row,) = await used(here)
        assert row.requests == 1
        assert row.input_tokens > 50 and row.output_tokens > 0
        assert row.estimated_tokens == row.input_tokens + row.output_tokens
        here.server.refused.clear()  # the key that it does not know


async def test_what_a_service_reports_is_no_estimate(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        await here.say("first")
        await here.heard()
        (row,) = await used(here)
        assert row.input_tokens and row.estimated_tokens == 0


async def test_an_answer_that_breaks_off_counts_and_a_refusal_does_not(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Status(401, "wrong key"))
        await here.say("refused")
        await here.state("ada", "blocked")
        assert await used(here) == []
        here.server.script(CustomReply(breaks_off), Status(401, "wrong key"))
        await here.say("broken off")
        await here.server.wait_for_request(2)
        await here.until(lambda: is_counted(here))
        (row,) = await used(here)
        assert (row.service, row.requests) == ("main", 1)
        assert row.input_tokens > 0 and row.estimated_tokens == row.input_tokens + row.output_tokens


async def is_counted(here: Stage) -> bool:
    return bool(await used(here))


async def test_a_request_that_is_stopped_counts(tmp_path: Path) -> None:
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


async def test_a_withdrawn_answer_counts_as_an_estimate_too(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with stage(tmp_path, unknown_keys=SILENT) as here:
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


async def test_summaries_count_as_estimates_even_when_they_break_off(tmp_path: Path) -> None:
    def answer(request: ReceivedRequest) -> Says | CustomReply:
        summary = str(request.body["messages"][0]["content"]).startswith("Summarise")
        return CustomReply(breaks_off) if summary else Says("yes")

    async with stage(tmp_path, window=4_000, contextTokens=4_000, unknown_keys=SILENT) as here:
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
