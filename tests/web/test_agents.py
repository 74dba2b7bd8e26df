"""Agents and services over HTTP, in a running society."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coterie.agents import Agent
from coterie.clock import SystemClock
from coterie.society import Society
from coterie.store import worker_name
from coterie.testing import Calls, ModelServer, Says
from coterie.web.app import build_app, openapi_document
from coterie.web.auth import Access
from coterie.web.schemas import AgentStatus
from tests.web.conftest import BASE, TOKEN

API = "/api/v1"


def service(id_: str, url: str, **more: Any) -> dict[str, Any]:
    return {"id": id_, "baseURL": url, "model": "m", "provider": "openai", **more}


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    async with ModelServer() as server:
        server.default = Says("An answer.")
        yield server


@pytest.fixture
async def society(tmp_path: Path, model: ModelServer) -> AsyncIterator[Society]:
    """A society in which ada has vision and bob has not."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "coterie.toml").write_text('[agents.ada]\nname = "Ada"\nservice = "eyes"\n[agents.bob]\n')
    eyes = {"input": ["text", "vision"], "output": ["text", "tool_calling"]}
    services = [service("main", model.base_url), service("eyes", model.base_url, capabilities=eyes)]
    (folder / "llmservices.json").write_text(json.dumps({"services": services}))
    async with Society.open(folder) as opened:
        yield opened


@pytest.fixture
async def client(society: Society) -> AsyncIterator[httpx.AsyncClient]:
    clock = SystemClock()
    app = build_app(society, Access(TOKEN, society.store.info.log_id, clock), clock=clock)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE, headers=headers) as client:
        yield client


async def ask(client: httpx.AsyncClient, society: Society, text: str, to: str = "ada") -> str:
    """Send a message and return the agent's answer."""
    answer = await client.post(f"{API}/messages", json={"to": to, "payload": {"text": text}})
    assert answer.status_code == 202
    async for message in society.inbox():
        if message.sender == to:
            return str(message.payload["text"])
    raise AssertionError("no answer came")


async def test_agents_are_listed_with_their_capabilities(client: httpx.AsyncClient) -> None:
    shown = (await client.get(f"{API}/agents")).json()
    ada, bob = shown["items"]
    assert (ada["id"], ada["name"], ada["state"], ada["service"]) == ("ada", "Ada", "idle", "eyes")
    assert ada["capabilities"] == {"input": ["text", "vision"], "output": ["text", "tool_calling"], "inferred": False}
    assert bob["service"] == "main" and bob["capabilities"]["inferred"] and shown["next"] is None


async def test_a_list_tells_what_is_unread_and_which_process_works(
    client: httpx.AsyncClient, society: Society, model: ModelServer
) -> None:
    gate = asyncio.Event()
    await ask(client, society, "hello", "bob")
    model.script(Says("done", gate=gate))
    await client.post(f"{API}/messages", json={"to": "ada", "payload": {"text": "hello"}})
    await model.wait_for_request(2)

    items = (await client.get(f"{API}/agents")).json()["items"]

    gate.set()
    assert [(agent["unread"], agent["worker"]) for agent in items] == [(0, worker_name()), (1, None)]
    # One process has the file, so there is nobody to share with.
    assert (await client.get(f"{API}/workers")).json() == {"items": [], "next": None}


async def test_agents_are_found_by_capability_and_direction(client: httpx.AsyncClient) -> None:
    async def able(**params: str) -> list[str]:
        return [agent["id"] for agent in (await client.get(f"{API}/agents", params=params)).json()["items"]]

    assert await able(capability="vision") == ["ada"]
    assert await able(capability="vision", direction="output") == []
    assert await able(capability="text", limit="1") == ["ada"]
    assert await able(capability="text", after="ada") == ["bob"]
    assert (await client.get(f"{API}/agents", params={"direction": "up"})).status_code == 422


async def test_a_wrong_position_in_a_list_is_refused_with_its_parameter(client: httpx.AsyncClient) -> None:
    for path, name in ((f"{API}/agents/ada/history", "after"), (f"{API}/runs", "before"), (f"{API}/tasks", "cursor")):
        answer = await client.get(path, params={name: "x"})
        assert [place["place"] for place in answer.json()["places"]] == [f"query.{name}"]


async def test_the_list_of_agents_is_paged(client: httpx.AsyncClient) -> None:
    first = (await client.get(f"{API}/agents", params={"limit": 1})).json()
    second = (await client.get(f"{API}/agents", params={"limit": 1, "after": first["next"]})).json()
    assert [first["items"][0]["id"], second["items"][0]["id"]] == ["ada", "bob"]


@pytest.mark.parametrize(
    ("stored", "state", "phase"),
    [
        ("idle", "idle", None),
        ("ready", "active", "starting"),
        ("llm", "active", "thinking"),
        ("tools", "active", "tool"),
        ("wait_approval", "active", "approval"),
        ("wait_retry", "active", "retry"),
        ("blocked", "blocked", None),
        ("paused", "paused", None),
        ("terminated", "terminated", None),
    ],
)
def test_stored_states_map_to_a_state_and_a_phase(stored: Any, state: str, phase: str | None) -> None:
    status = AgentStatus.of(Agent(id="a", name="A", state=stored))
    assert (status.state, status.phase or None) == (state, phase)


async def test_an_agent_can_be_created_and_terminated(client: httpx.AsyncClient) -> None:
    made = await client.post(f"{API}/agents", json={"id": "eve", "prompt": "You are Eve.", "parent": "ada"})
    assert made.status_code == 201 and (made.json()["id"], made.json()["parent"]) == ("eve", "ada")

    again = await client.post(f"{API}/agents", json={"id": "eve", "prompt": "x"})
    assert (again.status_code, again.json()["code"]) == (409, "id_taken")
    assert (await client.delete(f"{API}/agents/eve")).status_code == 204
    assert (await client.get(f"{API}/agents/eve")).json()["state"] == "terminated"
    late = await client.post(f"{API}/agents/eve/pause")
    assert (late.status_code, late.json()["code"]) == (410, "recipient_terminated")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 422, "request_invalid"),
        ({"prompt": "x", "id": "user"}, 422, "payload_invalid"),
        ({"prompt": "x", "id": "No Way"}, 422, "payload_invalid"),
        ({"prompt": "x", "service": "none"}, 404, "unknown_service"),
        ({"prompt": "x", "parent": "nobody"}, 404, "unknown_agent"),
    ],
)
async def test_an_invalid_agent_is_refused_with_status_and_code(
    client: httpx.AsyncClient, body: dict[str, str], status: int, code: str
) -> None:
    answer = await client.post(f"{API}/agents", json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("GET", "/history"),
        ("POST", "/stop"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("DELETE", ""),
    ],
)
@pytest.mark.parametrize("who", ["nobody", "user"])
async def test_requests_about_an_unknown_agent_get_404(
    client: httpx.AsyncClient, method: str, path: str, who: str
) -> None:
    answer = await client.request(method, f"{API}/agents/{who}{path}")
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_agent")


async def test_an_agent_can_be_paused_and_resumed(client: httpx.AsyncClient) -> None:
    assert (await client.post(f"{API}/agents/ada/pause")).json()["state"] == "paused"
    assert (await client.post(f"{API}/agents/ada/resume")).json()["state"] == "idle"
    assert (await client.post(f"{API}/agents/ada/stop")).status_code == 200


async def test_the_history_is_shown_with_the_roles_of_the_model_and_is_paged(
    client: httpx.AsyncClient, society: Society, model: ModelServer
) -> None:
    model.script(Says(calls=(Calls("list_agents"),)), Says("Two of us."))
    assert await ask(client, society, "Who is there?") == "Two of us."

    shown = (await client.get(f"{API}/agents/ada/history")).json()

    assert [item["role"] for item in shown["items"]] == ["system", "user", "assistant", "tool", "assistant"]
    system, user, planned, result, said = shown["items"]
    assert "You are Ada" in system["content"] and (user["content"], user["from"]) == ("Who is there?", "user")
    assert planned["calls"][0]["name"] == "list_agents" and result["callId"] == planned["calls"][0]["id"]
    assert said["content"] == "Two of us."
    pages: list[list[str]] = []
    after: dict[str, Any] = {}
    for _ in range(5):
        page = (await client.get(f"{API}/agents/ada/history", params={"limit": 1, **after})).json()
        pages.append([item["role"] for item in page["items"]])
        after = {"after": page["next"]}
    assert pages == [["system"], ["user"], ["assistant"], ["tool"], ["assistant"]] and after == {"after": None}


async def test_runs_and_usage_show_tool_calls_and_request_counts(
    client: httpx.AsyncClient, society: Society, model: ModelServer
) -> None:
    model.script(Says(calls=(Calls("list_agents"),)), Says("Two of us."))
    await ask(client, society, "Who is there?")

    (run,) = (await client.get(f"{API}/runs", params={"agent": "ada"})).json()["items"]
    assert run["outcome"] == "closed" and [(c["name"], c["state"]) for c in run["calls"]] == [("list_agents", "done")]
    (usage,) = (await client.get(f"{API}/usage")).json()["items"]
    assert (usage["agent"], usage["service"], usage["requests"]) == ("ada", "eyes", 2)
    assert (await client.get(f"{API}/runs", params={"agent": "bob"})).json()["items"] == []


# Services


async def test_services_are_shown_with_masked_keys(client: httpx.AsyncClient, model: ModelServer) -> None:
    put = await client.put(
        f"{API}/services/third", json={"baseURL": model.base_url, "model": "m", "key": "sk-secret-1234"}
    )
    assert put.status_code == 200, put.text
    shown = await client.get(f"{API}/services")
    assert [item["id"] for item in shown.json()["items"]] == ["main", "eyes", "third"]
    assert "sk-secret" not in shown.text + put.text
    assert shown.json()["items"][0]["capabilities"]["source"] == "inferred"


async def test_the_price_of_a_service_is_shown_and_stays_when_another_field_changes(
    client: httpx.AsyncClient, model: ModelServer
) -> None:
    price = {"input": 0.25, "cachedInput": 0.025, "output": 2.0}
    put = await client.put(f"{API}/services/main", json={"price": price})
    assert put.status_code == 200, put.text
    assert put.json()["price"] == {**price, "currency": "USD"}
    await client.put(f"{API}/services/main", json={"description": "for every day"})
    main, eyes = (await client.get(f"{API}/services")).json()["items"]
    assert (main["description"], main["price"]) == ("for every day", {**price, "currency": "USD"})
    assert eyes["price"] is None


async def test_a_health_check_sends_one_real_request_to_the_service(
    client: httpx.AsyncClient, model: ModelServer
) -> None:
    result = (await client.post(f"{API}/services/main/test")).json()
    assert result["ok"] and result["code"] == "ok"
    draft = {"baseURL": "http://127.0.0.1:9/v1", "model": "m"}
    result = (await client.post(f"{API}/services/new/test", json=draft)).json()
    assert not result["ok"] and result["code"] == "unreachable"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/services/none/test", None, 404, "unknown_service"),
        ("DELETE", "/services/none", None, 404, "unknown_service"),
        ("DELETE", "/services/eyes", None, 409, "service_in_use"),
        ("PUT", "/services/x", {"model": 7}, 422, "service_invalid"),
        ("PUT", "/services/x", {"key": 7}, 422, "service_invalid"),
        ("PUT", "/services/main", {"price": {"input": -1, "output": 1}}, 422, "service_invalid"),
        ("PUT", "/services/x", [], 422, "request_invalid"),
    ],
)
async def test_an_invalid_change_of_a_service_is_refused_with_status_and_code(
    client: httpx.AsyncClient, method: str, path: str, body: Any, status: int, code: str
) -> None:
    answer = await client.request(method, API + path, json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


@pytest.mark.parametrize(("method", "door"), [("PUT", ""), ("POST", "/test"), ("POST", "/models")])
async def test_the_id_of_an_agent_elsewhere_is_taken_for_services(
    client: httpx.AsyncClient, model: ModelServer, tmp_path: Path, method: str, door: str
) -> None:
    file = tmp_path / "home" / "coterie.toml"
    file.write_text(f'{file.read_text()}\n[remote.anna]\ncard = "http://127.0.0.1:9/ada"\n')
    assert (await client.post(f"{API}/reload")).status_code == 200
    body = {"baseURL": model.base_url, "model": "m"}
    answer = await client.request(method, f"{API}/services/remote.anna{door}", json=body)
    assert (answer.status_code, answer.json()["code"]) == (409, "id_taken")
    path = openapi_document()["paths"][f"{API}/services/{{service_id}}{door}"]
    assert "id_taken" in path[method.lower()]["responses"]["409"]["description"]


async def test_an_unused_service_can_be_deleted(client: httpx.AsyncClient, model: ModelServer) -> None:
    await client.put(f"{API}/services/third", json={"baseURL": model.base_url, "model": "m"})
    assert (await client.delete(f"{API}/services/third")).status_code == 204
    assert len((await client.get(f"{API}/services")).json()["items"]) == 2


async def test_a_reload_of_an_invalid_file_is_refused_and_changes_nothing(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    file = tmp_path / "home" / "llmservices.json"
    assert (await client.post(f"{API}/reload")).json() == {"problems": []}

    file.write_text("{")
    answer = await client.post(f"{API}/reload")
    assert (answer.status_code, answer.json()["code"]) == (422, "config_invalid")
    assert len((await client.get(f"{API}/services")).json()["items"]) == 2


async def test_a_description_reaches_people_and_the_prompts_of_the_other_agents(
    client: httpx.AsyncClient, society: Society, model: ModelServer
) -> None:
    created = await client.post(f"{API}/agents", json={"id": "zoe", "prompt": "x", "description": "Knows\nzoos."})
    assert (created.status_code, created.json()["description"]) == (201, "Knows zoos.")
    shown = {agent["id"]: agent["description"] for agent in (await client.get(f"{API}/agents")).json()["items"]}
    assert shown == {"ada": "", "bob": "", "zoe": "Knows zoos."}
    await ask(client, society, "hello", "bob")
    assert "- zoe: Knows zoos.\n" in str(model.requests[-1].body["messages"][0]["content"])

    refused = await client.post(f"{API}/agents", json={"prompt": "x", "description": "x" * 501})
    assert (refused.status_code, refused.json()["code"]) == (422, "request_invalid")
