"""Cost, cached tokens and duration of every request, as they reach the store and /metrics."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from coterie import Society
from coterie.llm.service import Completion, TokenUsage
from coterie.testing import FakeClock, ModelServer, Status
from coterie.testing.model_server import ReceivedRequest, Says, usage
from coterie.web.metrics import Metrics
from tests.agent.stage import stage

PRICE = {"input": 0.25, "cachedInput": 0.025, "output": 2}
WITHOUT_USAGE = frozenset({"stream_options"})
"""A service that refuses this key reports no usage."""


def billionths(used: TokenUsage) -> int:
    """The cost at `PRICE`."""
    return (used.input_tokens - used.cached_tokens) * 250 + used.cached_tokens * 25 + used.output_tokens * 2_000


def stored_usage(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, TokenUsage]]:
    """Service and usage of each request, in the order in which the store gets them."""
    found: list[tuple[str, TokenUsage]] = []
    advance, summarise = store.advance, store.summarise

    async def advancing(claim: Any, event: Any, *more: Any, **named: Any) -> Any:
        if getattr(event, "service", ""):
            found.append((event.service, event.usage))
        return await advance(claim, event, *more, **named)

    async def summarising(claim: Any, upto: int, text: str, answer: Completion | None) -> Any:
        if answer:
            found.append((f"summary of {answer.service}", answer.usage))
        return await summarise(claim, upto, text, answer)

    monkeypatch.setattr(store, "advance", advancing)
    monkeypatch.setattr(store, "summarise", summarising)
    return found


async def metric(society: Society, line: str) -> float | None:
    text = (await Metrics(society, lambda: 0).render()).decode()
    values = [float(one.rpartition(" ")[2]) for one in text.splitlines() if one.startswith(f"{line} ")]
    return values[0] if values else None


async def test_the_cost_of_an_answer_counts_cached_tokens_at_their_own_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Says("one two three four", cached_tokens=64)
    async with stage(tmp_path, price=PRICE) as here:
        found = stored_usage(here.society.store, monkeypatch)
        here.server.script(said)
        await here.say("hello")
        await here.heard()
        counted = usage(said, here.server.requests[0])
        ((service, used),) = found
        assert (service, used.estimated, used.cached_tokens) == ("main", False, 64)
        assert (used.input_tokens, used.output_tokens) == (counted["prompt_tokens"], counted["completion_tokens"])
        assert used.cost == billionths(used)
        cost = await metric(here.society, 'coterie_cost_total{currency="USD",service="main"}')
        assert cost == pytest.approx(billionths(used) / 1e9, rel=1e-12)
        for kind, tokens in (("input", used.input_tokens), ("cached", 64), ("output", used.output_tokens)):
            assert await metric(here.society, f'coterie_tokens_total{{kind="{kind}",service="main"}}') == tokens
        assert await metric(here.society, 'coterie_unpriced_requests_total{service="main"}') is None


async def test_without_a_price_the_cost_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(tmp_path) as here:
        found = stored_usage(here.society.store, monkeypatch)
        await here.say("hello")
        await here.heard()
        assert [used.cost for _, used in found] == [None]
        assert await metric(here.society, 'coterie_unpriced_requests_total{service="main"}') == 1
        assert await metric(here.society, 'coterie_cost_total{currency="USD",service="main"}') is None


async def test_a_free_service_costs_nothing_and_its_cost_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path, price={"input": 0, "output": 0}) as here:
        found = stored_usage(here.society.store, monkeypatch)
        await here.say("hello")
        await here.heard()
        assert [used.cost for _, used in found] == [0]


async def test_the_price_is_that_of_the_fallback_that_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ModelServer() as main, ModelServer() as spare:
        main.default = Status(401, "wrong key")
        services: list[dict[str, Any]] = [
            {"id": "main", "baseURL": main.base_url, "model": "m", "price": {"input": 9, "output": 9}},
            {"id": "spare", "baseURL": spare.base_url, "model": "m", "price": PRICE},
        ]
        services[0]["fallback"] = ["spare"]
        (tmp_path / "coterie.toml").write_text('[agents.ada]\nservice = "main"\n')
        (tmp_path / "llmservices.json").write_text(json.dumps({"services": services}))
        async with Society.open(tmp_path) as society:
            found = stored_usage(society.store, monkeypatch)
            await society.send(to="ada", text="hello")
            async with aclosing(society.inbox()) as inbox:
                await anext(inbox)
            ((service, used),) = found
            assert (service, used.cost) == ("spare", billionths(used))
            assert await metric(society, 'coterie_tokens_total{kind="input",service="spare"}') == used.input_tokens


async def test_an_answer_without_reported_usage_has_an_estimated_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path, unknown_keys=WITHOUT_USAGE, price=PRICE) as here:
        found = stored_usage(here.society.store, monkeypatch)
        await here.say("hello")
        await here.heard()
        ((_, used),) = found
        assert used.estimated and used.input_tokens > 0 and used.output_tokens > 0
        assert used.cost == billionths(used)
        here.server.refused.clear()  # it refused the unknown key, as expected


async def test_a_stopped_request_has_an_estimated_cost_and_the_time_until_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, gate = FakeClock(), asyncio.Event()
    async with stage(tmp_path, clock=clock, price=PRICE) as here:
        found = stored_usage(here.society.store, monkeypatch)
        here.server.script(Says("too late", gate=gate))
        await here.say("hello")
        await here.server.wait_for_request()
        await clock.advance(seconds=2.5)
        assert here.society.stop_turn("ada")
        await here.state("ada", "idle")
        ((service, used),) = found
        assert service == "main" and used.estimated and used.input_tokens > 0
        assert (used.cost, used.model_ms) == (billionths(used), 2_500)
        cost = await metric(here.society, 'coterie_cost_total{currency="USD",service="main"}')
        assert cost == pytest.approx(billionths(used) / 1e9, rel=1e-12)
        gate.set()


async def test_model_time_is_that_from_sending_a_request_to_the_end_of_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, gate, second = FakeClock(), asyncio.Event(), asyncio.Event()
    async with stage(tmp_path, clock=clock, maxConcurrentRequests=1) as here:
        found = stored_usage(here.society.store, monkeypatch)
        here.server.script(Says("first", gate=gate), Says("second", gate=second))
        await here.say("hello", to="ada")
        await here.server.wait_for_request()
        await here.say("hello", to="bob")
        await clock.advance(seconds=1.5)
        gate.set()
        await here.server.wait_for_request(2)
        await clock.advance(seconds=0.25)
        second.set()
        await here.heard(2)
        assert [used.model_ms for _, used in found] == [1_500, 250], "the time in the queue is no model time"


async def test_summaries_have_their_cost_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_summary(request: ReceivedRequest) -> bool:
        return str(request.body["messages"][0]["content"]).startswith("Summarise")

    async with stage(tmp_path, window=4_000, contextTokens=4_000, price=PRICE) as here:
        found = stored_usage(here.society.store, monkeypatch)
        sent = 0
        while not any(map(is_summary, here.server.requests)):
            sent += 1
            await here.say(f"{sent} " + "x" * 1_500)
            await here.heard(sent)
        await here.state("ada", "idle")
        assert "summary of main" in [service for service, _ in found]
        assert all(used.cost == billionths(used) > 0 for _, used in found)
        cost = await metric(here.society, 'coterie_cost_total{currency="USD",service="main"}')
        assert cost == pytest.approx(sum(billionths(used) for _, used in found) / 1e9, rel=1e-9)


async def test_a_new_price_counts_from_the_next_request_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    async with stage(tmp_path, price=PRICE) as here:
        found = stored_usage(here.society.store, monkeypatch)
        here.server.script(Says("first", gate=gate))
        await here.say("hello")
        await here.server.wait_for_request()
        await here.society.setup.put("main", {"price": {"input": 0, "output": 0}})
        gate.set()
        await here.heard()
        await here.say("again")
        await here.heard(2)
        first, second = (used for _, used in found)
        assert (first.cost, second.cost) == (billionths(first), 0)
