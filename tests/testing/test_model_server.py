"""The scripted model server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from coterie.testing.model_server import Calls, ModelServer, ReceivedRequest, Reply, Says, Status

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer() as opened:
        yield opened


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(verify=False) as opened:
        yield opened


async def post(client: httpx.AsyncClient, server: ModelServer, *messages: Any, **more: Any) -> httpx.Response:
    body = {"model": "m", "messages": list(messages) or [USER], **more}
    return await client.post(f"{server.base_url}/chat/completions", json=body)


async def test_scripted_replies_come_in_order_and_then_the_default(
    server: ModelServer, client: httpx.AsyncClient
) -> None:
    server.script("one", Status(503, "busy"), lambda request: f"got {request.last_text}")

    answers = [await post(client, server) for _ in range(4)]

    assert [answer.status_code for answer in answers] == [200, 503, 200, 200]
    assert [_said(answers[i]) for i in (0, 2, 3)] == ["one", "got Hi", "ok"]


@pytest.mark.parametrize(("reply", "words"), [(Calls("look_up"), "wrap it, as in Says"), (7, "not int"), (None, "not")])
async def test_a_script_with_something_that_is_no_reply_is_refused(server: ModelServer, reply: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        server.script("one", reply)


async def test_it_streams_tokens_calls_and_usage(server: ModelServer, client: httpx.AsyncClient) -> None:
    server.script(Says("One two", (Calls("look_up", {"city": "Oslo"}, "a"),)))

    answer = await post(client, server, tools=[TOOL], stream=True, stream_options={"include_usage": True})

    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    chunks = [json.loads(event) for event in events]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert done == "[DONE]"
    assert [delta["content"] for delta in deltas if delta.get("content")] == ["One", " two"]
    pieces = [delta["tool_calls"][0]["function"].get("arguments", "") for delta in deltas if "tool_calls" in delta]
    assert "".join(pieces) == '{"city": "Oslo"}'
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["completion_tokens"] > 0


async def test_a_gate_holds_the_answer_back(server: ModelServer, client: httpx.AsyncClient) -> None:
    gate = asyncio.Event()
    server.script(Says("at last", gate=gate))
    asking = asyncio.create_task(post(client, server))

    request = await server.wait_for_request()
    assert request.last_text == "Hi" and not asking.done()

    gate.set()
    assert _said(await asking) == "at last"


async def test_requests_are_recorded(server: ModelServer, client: httpx.AsyncClient) -> None:
    await post(client, server, temperature=0)

    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert request.body["temperature"] == 0 and request.headers["content-type"] == "application/json"


async def test_closing_the_server_ends_waiting_requests(client: httpx.AsyncClient) -> None:
    async with ModelServer() as server:
        server.script(Says("never", gate=asyncio.Event()))
        asking = asyncio.create_task(post(client, server))
        await server.wait_for_request()

    with pytest.raises(httpx.HTTPError):
        await asking


DANGLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("settings", "body", "status", "message"),
    [
        ({}, {"messages": [USER, DANGLING], "tools": [TOOL]}, 400, "did not have response messages"),
        ({}, {"messages": [{"role": "tool", "tool_call_id": "a", "content": ""}]}, 400, "must be a response"),
        ({}, {"messages": [USER], "tools": []}, 400, "Invalid 'tools'"),
        ({}, {"messages": [USER], "model": None}, 404, "does not exist"),
        ({"models": {"n"}}, {"messages": [USER]}, 404, "The model `m` does not exist"),
        ({"api_key": "k"}, {"messages": [USER]}, 401, "Incorrect API key"),
        ({"alternate": True}, {"messages": [USER, USER]}, 400, "must alternate"),
        (
            {"unknown_keys": {"stop"}},
            {"messages": [USER], "stop": "x"},
            400,
            "Unrecognized request argument supplied: stop",
        ),
        ({"context_tokens": 10}, {"messages": [USER]}, 400, "maximum context length is 10 tokens"),
        ({"capabilities": {"vision"}}, {"messages": [USER], "tools": [TOOL]}, 400, "does not support tools"),
        (
            {"capabilities": set()},
            {"messages": [{"role": "user", "content": [PICTURE]}]},
            400,
            "image_url is only supported",
        ),
    ],
)
async def test_invalid_requests_are_refused_whatever_the_script_says(
    settings: dict[str, Any], body: dict[str, Any], status: int, message: str, client: httpx.AsyncClient
) -> None:
    async with ModelServer(**settings) as server:
        server.script("never said")

        answer = await client.post(f"{server.base_url}/chat/completions", json={"model": "m", **body})

        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (status, "invalid_request_error")
        assert message in error["message"] and message in server.refused[0]


async def test_other_paths_are_not_found(server: ModelServer, client: httpx.AsyncClient) -> None:
    assert (await client.get(f"{server.base_url}/other")).status_code == 404
    assert (await client.post(f"{server.base_url}/chat/completions", content=b"{")).status_code == 400


async def test_a_connection_serves_many_requests(server: ModelServer, client: httpx.AsyncClient) -> None:
    for _ in range(3):
        await post(client, server)

    assert server.connections == 1 and len(server.requests) == 3


async def test_an_answer_may_depend_on_the_whole_request(server: ModelServer, client: httpx.AsyncClient) -> None:
    def count(request: ReceivedRequest) -> Reply:
        return f"{len(request.messages)} messages"

    server.default = count

    assert _said(await post(client, server, USER, {"role": "assistant", "content": "Yes?"}, USER)) == "3 messages"


def _said(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])
