from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette

from coterie.files import LOW_SPACE_BYTES, MIN_SPACE_BYTES
from coterie.society import Society
from coterie.testing import FakeClock
from coterie.web.app import build_app
from coterie.web.auth import Access
from coterie.web.middleware import EVENTS, MAX_BODY_BYTES, POLICY

from .conftest import BASE, TOKEN

LINK = "/api/v1/links"
SNAPSHOT = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "media-src 'self' blob:; manifest-src 'self'; connect-src 'self'; frame-src 'none'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'self'; require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


@pytest.mark.parametrize("path", ["/healthz", "/openapi.json", "/metrics", "/api/v1/nothing", "/api/v1/artifacts/x"])
async def test_every_response_has_the_security_headers(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert {name: answer.headers[name] for name in SNAPSHOT} == SNAPSHOT
    assert SNAPSHOT["content-security-policy"] == POLICY


async def test_refused_requests_get_the_security_headers_too(anonymous: httpx.AsyncClient) -> None:
    for headers in ({}, {"Host": "evil.example"}):
        answer = await anonymous.get("/metrics", headers=headers)
        assert {name: answer.headers[name] for name in SNAPSHOT} == SNAPSHOT


@pytest.fixture
def cookie(access: Access) -> dict[str, str]:
    line = access.redeem(access.new_code())
    assert line is not None
    return {"Cookie": line.partition(";")[0]}


BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    ("method", "secret", "origin", "site", "status"),
    [
        # A program sends the token and no origin.
        ("POST", "bearer", None, None, 201),
        ("POST", "bearer", BASE, None, 201),
        ("POST", "bearer", None, "none", 201),
        ("POST", "bearer", BASE, "same-origin", 201),
        ("POST", "bearer", "https://evil.example", None, 403),
        ("POST", "bearer", "null", None, 403),
        ("POST", "bearer", None, "cross-site", 403),
        ("POST", "bearer", None, "same-site", 403),
        # A browser sends the cookie with every request, so the origin must be ours.
        ("POST", "cookie", BASE, None, 201),
        ("POST", "cookie", "http://localhost:8642", "same-origin", 201),
        ("POST", "cookie", None, "same-origin", 201),
        ("POST", "cookie", None, None, 403),
        ("POST", "cookie", None, "none", 403),
        ("POST", "cookie", "null", "same-origin", 403),
        ("POST", "cookie", BASE, "cross-site", 403),
        ("POST", "cookie", "http://127.0.0.1:3000", "same-site", 403),
        # The event stream is read-only, but foreign pages must not read it.
        ("GET", "bearer", "https://evil.example", None, 403),
        ("GET", "cookie", None, None, 403),
        ("GET", "cookie", None, "cross-site", 403),
        ("GET", "cookie", "null", None, 403),
    ],
)
async def test_writes_and_streams_are_allowed_by_secret_and_origin(
    anonymous: httpx.AsyncClient,
    cookie: dict[str, str],
    method: str,
    secret: str,
    origin: str | None,
    site: str | None,
    status: int,
) -> None:
    headers = dict(BEARER if secret == "bearer" else cookie)
    headers |= {"Origin": origin} if origin else {}
    headers |= {"Sec-Fetch-Site": site} if site else {}
    answer = await anonymous.request(method, LINK if method == "POST" else EVENTS, headers=headers)
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["code"] == "foreign_origin"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_a_write_with_a_form_content_type_gets_415(client: httpx.AsyncClient, kind: str) -> None:
    answer = await client.post(LINK, content=b'{"a": 1}', headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")


async def test_an_upload_of_json_gets_415(client: httpx.AsyncClient) -> None:
    assert (await client.post("/api/v1/artifacts", json={})).status_code == 415


async def test_a_body_over_the_limit_gets_413(client: httpx.AsyncClient) -> None:
    answer = await client.post(LINK, content=b" " * (MAX_BODY_BYTES + 1), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


async def test_unauthenticated_requests_are_rate_limited_and_authenticated_ones_are_not(
    app: Starlette, anonymous: httpx.AsyncClient, client: httpx.AsyncClient, clock: FakeClock
) -> None:
    statuses = [(await anonymous.get("/healthz")).status_code for _ in range(1_001)]
    assert statuses.count(200) == 1_000
    answer = await anonymous.get("/metrics")
    assert (answer.status_code, answer.json()["code"]) == (429, "too_many_requests")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await client.get("/metrics")).status_code == 200

    await clock.advance(seconds=1)
    assert (await anonymous.get("/healthz")).status_code == 200


async def test_a_stopping_server_refuses_new_requests_and_closes_the_connection(
    app: Starlette, client: httpx.AsyncClient
) -> None:
    app.state.health.draining = True
    answer = await client.post(LINK)
    assert (answer.status_code, answer.json()["code"]) == (503, "stopping")
    assert answer.headers["connection"] == "close"
    assert "retry-after" in answer.headers
    assert (await client.get("/healthz")).status_code == 200
    ready = await client.get("/readyz")
    assert (ready.status_code, ready.json()["code"]) == (503, "stopping")


async def test_sends_and_uploads_get_507_while_the_disk_is_nearly_full(
    society: Society, access: Access, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = build_app(society, access, clock=clock)
    free = [LOW_SPACE_BYTES]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free[0]))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    message = {"to": "ada", "payload": {"text": "hello"}}

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE, headers=headers) as client:
        sent = await client.post("/api/v1/messages", json=message)
        free[0] -= 1
        await clock.advance(seconds=1)
        refused = [
            await client.post("/api/v1/messages", json=message),
            await client.post("/api/v1/artifacts", files={"file": ("a", b"x")}),
        ]
        withdrawn = await client.delete(f"/api/v1/messages/{sent.json()['messageId']}")
        free[0] += 1
        await clock.advance(seconds=1)
        again = await client.post("/api/v1/messages", json=message)

    assert [(answer.status_code, answer.json()["code"]) for answer in refused] == [(507, "store_full")] * 2
    assert refused[0].headers["retry-after"]
    assert (sent.status_code, withdrawn.status_code, again.status_code) == (202, 204, 202)


async def test_a_server_with_too_little_disk_space_is_not_ready(
    client: httpx.AsyncClient, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for free in (MIN_SPACE_BYTES, MIN_SPACE_BYTES - 1, MIN_SPACE_BYTES):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        await clock.advance(seconds=1)
        answer = await client.get("/readyz")
        found.append((answer.status_code, answer.json().get("code")))
    assert found == [(200, None), (503, "store_full"), (200, None)]


async def test_only_the_exact_token_is_accepted(access: Access) -> None:
    assert access.is_token(TOKEN.encode())
    for wrong in (TOKEN[:-1].encode(), TOKEN.upper().encode(), b"", "ä".encode()):
        assert not access.is_token(wrong)
