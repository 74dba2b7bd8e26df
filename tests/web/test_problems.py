from __future__ import annotations

import logging

import httpx
import pytest
from starlette.applications import Starlette

from coterie.errors import Refused, StoreBroken, StoreUnavailable
from coterie.web.routing import Router
from coterie.web.schemas import Schema


class Words(Schema):
    a: int = 0


SECRET = "the-detail-that-stays-inside"


@pytest.fixture
def app(app: Starlette) -> Starlette:
    """An app with routes that fail."""

    async def fail(kind: str) -> None:
        raise {
            "refused": Refused("already_answered", "another answer came first", answer={"messageId": "m", "option": 1}),
            "full": StoreUnavailable("the disk is full", full=True),
            "locked": StoreUnavailable("the database is locked"),
            "broken": StoreBroken(SECRET),
            "mailbox": Refused("mailbox_full", "the mailbox is full"),
        }.get(kind) or RuntimeError(SECRET)

    async def take(number: int, body: Words) -> None:
        pass

    router = Router()
    router.get("/fail/{kind}")(fail)
    router.post("/take")(take)
    app.router.routes.extend(router.routes)
    return app


async def test_a_refusal_becomes_problem_json_with_code_and_extra_fields(client: httpx.AsyncClient) -> None:
    answer = await client.get("/fail/refused")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json() == {
        "type": "about:blank",
        "title": "Conflict",
        "status": 409,
        "detail": "another answer came first",
        "code": "already_answered",
        "answer": {"messageId": "m", "option": 1},
    }


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [("full", 507, "store_full"), ("locked", 503, "store_unavailable"), ("mailbox", 429, "mailbox_full")],
)
async def test_a_temporary_error_has_retry_after(client: httpx.AsyncClient, kind: str, status: int, code: str) -> None:
    answer = await client.get(f"/fail/{kind}")
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("kind", ["unexpected", "broken"])
async def test_an_unexpected_error_shows_only_its_incident_id(
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


async def test_an_unknown_path_gets_404_and_a_wrong_method_405(client: httpx.AsyncClient) -> None:
    for answer, status, code in (
        (await client.get("/api/v1/nothing"), 404, "not_found"),
        (await client.delete("/metrics"), 405, "method_not_allowed"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (status, code)
        assert answer.headers["content-type"] == "application/problem+json"


async def test_an_invalid_request_names_the_invalid_fields(client: httpx.AsyncClient) -> None:
    for number, place in (("x", "query.number"), ("1", "body.a")):
        answer = await client.post(f"/take?number={number}", json={"a": SECRET})
        assert (answer.status_code, answer.json()["code"]) == (422, "request_invalid")
        assert [field["place"] for field in answer.json()["places"]] == [place]
        assert SECRET not in answer.text


async def test_a_body_that_cannot_be_parsed_is_refused_as_invalid_json(client: httpx.AsyncClient) -> None:
    headers = {"Content-Type": "application/json"}
    for body in (b"{", b"\xff\xfe", b"{'a': 1}"):
        answer = await client.post("/take?number=1", content=body, headers=headers)
        assert answer.status_code == 400, body
        assert answer.json()["code"] in ("json_invalid", "request_invalid")
