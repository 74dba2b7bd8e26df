"""Checks of every route of the application, so that a new route is included."""

from __future__ import annotations

import re

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from coterie.web.middleware import EVENTS, STREAMS

from .conftest import BASE, TOKEN

PUBLIC = {"/", "/healthz", "/readyz", "/static/{path:path}", "/sw.js"}
UNKNOWN_HOSTS = [
    "evil.example",
    "127.0.0.1.nip.io:8642",
    "127.0.0.1.:8642",
    "127.0.0.1",
    "127.0.0.1:8643",
    "localhost.:8642",
    "evil.example:8642",
    "localhost:8642@evil.example",
    "",
]


def calls(app: Starlette) -> list[tuple[str, str, str]]:
    """Method, path with parameters filled in, and template of each route."""
    found = []
    for route in app.routes:
        assert isinstance(route, Route)
        path = re.sub(r"\{[^}]+\}", "x", route.path)
        found += [(method, path, route.path) for method in sorted(route.methods or ())]
    return found


def code_in(answer: httpx.Response) -> str:
    """The code of an error: of a problem document, or in the form of OpenAI's API."""
    shown = answer.json()
    return str((shown.get("error") or shown)["code"])


def test_the_routes_of_the_application_are_found(app: Starlette) -> None:
    assert {template for *_, template in calls(app)} >= PUBLIC | {
        "/api/v1/artifacts",
        "/metrics",
        "/mcp",
        "/a2a/{path:path}",
        "/openapi.json",
    }


async def test_every_route_but_the_public_ones_requires_a_token(app: Starlette, anonymous: httpx.AsyncClient) -> None:
    for method, path, template in calls(app):
        answer = await anonymous.request(method, path)
        if template in PUBLIC:
            assert answer.status_code in (200, 404), (method, path)
        else:
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert code_in(answer) in ("unauthorized", "code_invalid")


@pytest.mark.parametrize("host", UNKNOWN_HOSTS)
async def test_no_route_answers_to_an_unknown_host(app: Starlette, client: httpx.AsyncClient, host: str) -> None:
    for method, path, _ in calls(app):
        answer = await client.request(method, path, headers={"Host": host})
        assert answer.status_code == 421, (method, path, host)


async def test_foreign_origins_can_neither_write_nor_stream(app: Starlette, client: httpx.AsyncClient) -> None:
    for method, path, _ in calls(app):
        if method in ("GET", "HEAD"):
            continue
        for origin in ("https://evil.example", "null", f"{BASE}.evil.example", "http://127.0.0.1:3000"):
            answer = await client.request(method, path, headers={"Origin": origin})
            assert (answer.status_code, code_in(answer)) == (403, "foreign_origin"), (method, path, origin)
    for path in STREAMS:
        assert (await client.get(path, headers={"Origin": "null"})).status_code == 403, path


async def test_no_response_has_cors_headers(app: Starlette, client: httpx.AsyncClient) -> None:
    for method, path, _ in calls(app):
        for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            for each in {method, "OPTIONS"}:
                if path == EVENTS and each == "GET":
                    continue  # an endless response
                answer = await client.request(each, path, headers=headers)
                assert not [name for name in answer.headers if name.startswith("access-control-")], (each, path)


async def test_the_token_gives_access_to_protected_routes(client: httpx.AsyncClient) -> None:
    assert TOKEN not in (await client.get("/openapi.json")).text
    assert (await client.get("/openapi.json")).status_code == 200
    assert (await client.get("/metrics")).status_code == 200
