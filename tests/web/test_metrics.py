from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from coterie.society import Society
from coterie.store import worker_name
from coterie.testing import FakeClock, Says, Status
from coterie.web.metrics import Metrics
from tests.agent.stage import stage


async def test_metrics_count_messages_and_requests(client: httpx.AsyncClient, society: Society) -> None:
    await society.send(to="ada", text="now")
    await society.send(to="ada", text="later", delay_ms=60_000)
    await client.get("/healthz")
    await client.get("/api/v1/artifacts/x/meta")

    text = ""
    for _ in range(2):  # a second scrape counts nothing twice
        text = (await client.get("/metrics")).text
        assert 'coterie_messages_accepted_total{kind="immediate"} 1.0' in text
        assert 'coterie_messages_accepted_total{kind="delayed"} 1.0' in text
        assert "coterie_delayed_messages 1.0" in text
        assert "coterie_mailbox_messages 1.0" in text
        assert "coterie_store_healthy 1.0" in text
    count = "coterie_http_request_duration_seconds_count"
    assert f'{count}{{method="GET",route="/healthz",status="200"}} 1.0' in text
    assert f'{count}{{method="GET",route="/api/v1/artifacts/{{ref}}/meta",status="404"}} 1.0' in text


async def test_unknown_paths_and_methods_create_no_new_series(client: httpx.AsyncClient) -> None:
    for number in range(30):
        await client.request(f"METHOD{number}", f"/nothing/{number}")
    text = (await client.get("/metrics")).text
    assert text.count("_duration_seconds_count") == 1
    assert 'method="other",route="unmatched",status="404"' in text


async def test_a_store_that_cannot_write_is_not_ready(
    client: httpx.AsyncClient, society: Society, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(society.store), "is_healthy", property(lambda _: False))
    answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
    assert (await client.get("/healthz")).status_code == 200


async def test_a_worker_has_metrics_with_its_name(tmp_path: Path, clock: FakeClock) -> None:
    async with Society.open(tmp_path, clock=clock) as society:
        numbers = (await Metrics(society, lambda: 0).render()).decode()
    for name in ("claims", "heartbeats_total", "fenced_writes_total", "lease_takeovers_total"):
        assert f'coterie_worker_{name}{{worker="{worker_name()}"}} 0.0' in numbers


async def test_a_process_without_a_worker_has_no_worker_metrics(client: httpx.AsyncClient) -> None:
    assert "coterie_worker_claims{" not in (await client.get("/metrics")).text


@pytest.mark.slow
async def test_metrics_count_model_requests_failures_and_retries_by_service(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Status(503, "loading"), "Hello!", Status(401, "no"))
        await here.say("hello")
        await here.heard()
        await here.say("again")
        await here.state("ada", "blocked")
        metrics = Metrics(here.society, lambda: 0)
        first, text = (await metrics.render()).decode(), (await metrics.render()).decode()

    for line in (
        'coterie_model_failures_total{reason="busy",service="main"} 1.0',
        'coterie_model_failures_total{reason="auth",service="main"} 1.0',
        'coterie_model_retries_total{reason="busy",service="main"} 1.0',
        'coterie_model_request_duration_seconds_count{outcome="ok",service="main"} 1.0',
        'coterie_model_request_duration_seconds_count{outcome="failed",service="main"} 2.0',
        'coterie_model_time_to_first_token_seconds_count{service="main"} 1.0',
        'coterie_model_tokens_count{direction="output",service="main"} 1.0',
    ):
        assert line in text and line in first, "a second scrape counts nothing twice"
    (tokens,) = (
        line
        for line in text.splitlines()
        if line.startswith('coterie_model_tokens_sum{direction="input",service="main"}')
    )
    assert float(tokens.rpartition(" ")[2]) > 0


async def test_a_cancelled_model_request_is_no_failure(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(Says("never", gate=asyncio.Event()))
        await here.say("hello")
        await here.server.wait_for_request()
        here.society.stop_turn("ada")
        await here.state("ada", "idle")
        text = (await Metrics(here.society, lambda: 0).render()).decode()
    assert 'coterie_model_request_duration_seconds_count{outcome="cancelled",service="main"} 1.0' in text
    assert "coterie_model_failures_total{" not in text
