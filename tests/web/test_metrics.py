from __future__ import annotations

from pathlib import Path

import httpx

from coterie.society import Society
from coterie.store import worker_name
from coterie.stores.sqlite import SqliteStore
from coterie.testing import FakeClock
from coterie.web.metrics import Metrics


async def test_the_numbers_follow_what_happens(client: httpx.AsyncClient, society: Society) -> None:
    await society.send(to="ada", text="now")
    await society.send(to="ada", text="later", delay_ms=60_000)
    await client.get("/healthz")
    await client.get("/api/v1/artifacts/x/meta")

    text = ""
    for _ in range(2):  # what was counted once is not counted again
        text = (await client.get("/metrics")).text
        assert 'coterie_messages_accepted_total{kind="immediate"} 1.0' in text
        assert 'coterie_messages_accepted_total{kind="delayed"} 1.0' in text
        assert "coterie_delayed_messages 1.0" in text
        assert "coterie_mailbox_messages 1.0" in text
        assert "coterie_store_healthy 1.0" in text
    count = "coterie_http_request_duration_seconds_count"
    assert f'{count}{{method="GET",route="/healthz",status="200"}} 1.0' in text
    assert f'{count}{{method="GET",route="/api/v1/artifacts/{{ref}}/meta",status="404"}} 1.0' in text


async def test_strange_paths_and_methods_make_no_new_series(client: httpx.AsyncClient) -> None:
    for number in range(30):
        await client.request(f"METHOD{number}", f"/nothing/{number}")
    text = (await client.get("/metrics")).text
    assert text.count("_duration_seconds_count") == 1
    assert 'method="other",route="unmatched",status="404"' in text


async def test_a_store_that_cannot_write_is_not_ready(client: httpx.AsyncClient, society: Society) -> None:
    assert isinstance(society.store, SqliteStore) and society.store._writer is not None
    society.store._writer.is_healthy = False
    answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
    assert (await client.get("/healthz")).status_code == 200


async def test_whoever_works_here_is_counted_by_name(tmp_path: Path, clock: FakeClock) -> None:
    async with Society.open(tmp_path, clock=clock) as society:
        numbers = (await Metrics(society, lambda: 0).render()).decode()
    for name in ("claims", "heartbeats_total", "fenced_writes_total", "lease_takeovers_total"):
        assert f'coterie_worker_{name}{{worker="{worker_name()}"}} 0.0' in numbers


async def test_where_no_agent_works_there_is_no_worker(client: httpx.AsyncClient) -> None:
    assert "coterie_worker_claims{" not in (await client.get("/metrics")).text
