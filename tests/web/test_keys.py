"""Keys of programs over HTTP: making, listing and revoking them, and what a key allows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
from starlette.applications import Starlette

from coterie.config import DoorSettings
from coterie.society import Society
from coterie.testing import FakeClock
from coterie.web.middleware import DOOR_PATHS

from .conftest import BASE
from .test_matrix import PUBLIC, calls, code_in

KEYS = "/api/v1/keys"


async def make(client: httpx.AsyncClient, name: str, **more: Any) -> str:
    answer = await client.post(KEYS, json={"name": name, **more})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["token"])


@asynccontextmanager
async def program(app: Starlette, token: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE, headers=headers) as client:
        yield client


async def test_a_key_is_made_listed_and_revoked(client: httpx.AsyncClient, clock: FakeClock, app: Starlette) -> None:
    token = await make(client, "webui", agents=["ada"], doors=["openai"])
    listing = await client.get(KEYS)
    assert token not in listing.text
    (key,) = listing.json()["items"]
    assert (key["name"], key["agents"], key["doors"], key["usedAt"]) == ("webui", ["ada"], ["openai"], None)

    async with program(app, token) as webui:
        await webui.get("/v1/nothing")
        used = (await client.get(KEYS)).json()["items"][0]["usedAt"]
        assert used is not None
        await clock.advance(seconds=59)
        await webui.get("/v1/nothing")
        assert (await client.get(KEYS)).json()["items"][0]["usedAt"] == used
        await clock.advance(seconds=1)
        await webui.get("/v1/nothing")
        assert (await client.get(KEYS)).json()["items"][0]["usedAt"] > used

        assert (await client.delete(f"{KEYS}/webui")).json()["revokedAt"]
        assert (await webui.get("/v1/nothing")).status_code == 401
    assert (await client.delete(f"{KEYS}/nobody")).json()["code"] == "unknown_key"
    assert (await client.post(KEYS, json={"name": "x", "doors": ["opnai"]})).json()["detail"] == (
        'there is no door "opnai", did you mean "openai"?'
    )


async def test_a_key_opens_only_its_doors(app: Starlette, client: httpx.AsyncClient) -> None:
    async with (
        program(app, await make(client, "all")) as webui,
        program(app, await make(client, "x", doors=["a2a"])) as x,
    ):
        for method, path, template in calls(app):
            if template in PUBLIC or path == "/session":
                continue
            is_door = any(path.startswith(beginnings) for beginnings in DOOR_PATHS.values())
            for one in (x,) if is_door and not path.startswith(DOOR_PATHS["a2a"]) else () if is_door else (webui, x):
                answer = await one.request(method, path)
                assert answer.status_code == 403, (method, path)
                if method != "HEAD":
                    assert code_in(answer) == "key_not_allowed"


async def test_a_revoked_key_opens_nothing(app: Starlette, client: httpx.AsyncClient) -> None:
    token = await make(client, "webui")
    await client.delete(f"{KEYS}/webui")
    for method, path, template in calls(app):
        if template in PUBLIC:
            continue
        # A client per request: wrong secrets are rate limited.
        async with program(app, token) as webui:
            answer = await webui.request(method, path)
            assert answer.status_code in (401, 429), (method, path)


async def test_a_door_that_is_switched_off_is_closed_for_the_owner_too(
    society: Society, client: httpx.AsyncClient
) -> None:
    society.configuration.config = replace(society.config, doors=DoorSettings(openai=False))
    answer = await client.get("/v1/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "door_closed")


async def test_errors_below_v1_have_the_form_of_openai(anonymous: httpx.AsyncClient, client: httpx.AsyncClient) -> None:
    answer = await anonymous.get("/v1/models")
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    answer = await client.get("/v1/nothing")
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (404, "invalid_request_error", "not_found")
    assert {*error} == {"message", "type", "param", "code"}
