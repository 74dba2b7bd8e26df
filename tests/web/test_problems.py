from __future__ import annotations

import logging

import httpx
import pytest
from fastapi import FastAPI

from coterie.errors import Refused, StoreBroken, StoreUnavailable

SECRET = "the-detail-that-stays-inside"


@pytest.fixture
def app(app: FastAPI) -> FastAPI:
    """With routes that fail."""

    async def fail(kind: str) -> None:
        raise {
            "refused": Refused("already_answered", "somebody was faster", answer={"messageId": "m", "option": 1}),
            "full": StoreUnavailable("the disk is full", full=True),
            "locked": StoreUnavailable("the database is locked"),
            "broken": StoreBroken(SECRET),
            "mailbox": Refused("mailbox_full", "too much waits"),
        }.get(kind) or RuntimeError(SECRET)

    async def take(number: int, words: dict[str, int]) -> None:
        pass

    app.add_api_route("/fail/{kind}", fail)
    app.add_api_route("/take", take, methods=["POST"])
    return app


async def test_a_refusal_says_why_in_a_code_and_brings_what_it_knows(client: httpx.AsyncClient) -> None:
    answer = await client.get("/fail/refused")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json() == {
        "type": "about:blank",
        "title": "Conflict",
        "status": 409,
        "detail": "somebody was faster",
        "code": "already_answered",
        "answer": {"messageId": "m", "option": 1},
    }


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [("full", 507, "store_full"), ("locked", 503, "store_unavailable"), ("mailbox", 429, "mailbox_full")],
)
async def test_what_may_pass_later_says_when(client: httpx.AsyncClient, kind: str, status: int, code: str) -> None:
    answer = await client.get(f"/fail/{kind}")
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("kind", ["unexpected", "broken"])
async def test_what_nobody_planned_for_is_told_by_its_id_alone(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with caplog.at_level(logging.ERROR):
        answer = await client.get(f"/fail/{kind}")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert SECRET not in answer.text
    assert "Traceback" not in answer.text
    assert answer.json()["id"] in caplog.text
    assert SECRET in caplog.text
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_an_unknown_address_and_a_wrong_method(client: httpx.AsyncClient) -> None:
    for answer, status, code in (
        (await client.get("/api/v1/nothing"), 404, "not_found"),
        (await client.delete("/metrics"), 405, "method_not_allowed"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (status, code)
        assert answer.headers["content-type"] == "application/problem+json"


async def test_an_invalid_request_names_the_places(client: httpx.AsyncClient) -> None:
    answer = await client.post("/take?number=x", json={"a": SECRET})
    assert (answer.status_code, answer.json()["code"]) == (422, "request_invalid")
    assert [each["place"] for each in answer.json()["places"]] == ["query.number", "body.a"]
    assert SECRET not in answer.text


async def test_a_body_that_is_no_json_is_told_so(client: httpx.AsyncClient) -> None:
    headers = {"Content-Type": "application/json"}
    for body in (b"{", b"\xff\xfe", b"{'a': 1}"):
        answer = await client.post("/take?number=1", content=body, headers=headers)
        assert answer.status_code == 400, body
        assert answer.json()["code"] in ("json_invalid", "request_invalid")
