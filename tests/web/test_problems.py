from __future__ import annotations

import httpx


async def test_an_unknown_address_is_a_problem_document(client: httpx.AsyncClient) -> None:
    answer = await client.get("/api/v1/nothing")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "not_found"
