"""Agents that do not answer before the owner acts: every door says so, and returns what was said until then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from coterie.testing import Calls, Says
from coterie.testing.model_server import Reply
from tests.agent.stage import each
from tests.web.conftest import TOKEN

from .conftest import Door, open_door

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
HINT = "bob is paused: its owner resumes it in the panel, or with coterie resume bob"


def asks_bob(door: Door, bob: Reply = "Yes.") -> None:
    """Ada asks Bob, says so, and reports his answer."""
    question = Calls("send_message", {"to": "bob", "payload": {"text": "Really?"}})
    door.here.server.default = each(ada=[Says(calls=(question,)), "I asked Bob.", "Bob says yes."], bob=[bob])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_ends_with_what_was_said_if_another_agent_is_paused(tmp_path: Path, stream: bool) -> None:
    async with open_door(tmp_path) as door, httpx.AsyncClient(base_url=door.url, headers=HEADERS, timeout=60) as client:
        asks_bob(door)
        await door.here.society.pause("bob")
        body = {"model": "ada", "messages": [{"role": "user", "content": "Is it so?"}], "stream": stream}
        async with asyncio.timeout(60):
            answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert "I asked Bob." in answer.text and HINT in answer.text and '"state":"working"' in answer.text

        await door.here.society.resume("bob")
        again = (await client.post("/v1/chat/completions", json=body | {"stream": False})).json()
        assert again["choices"][0]["message"]["content"] == "I asked Bob.\n\nBob says yes."
        assert again["coterie"]["state"] == "done" and "problem" not in again["coterie"]


async def test_an_agent_that_is_paused_while_a_program_waits_ends_the_wait(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door, httpx.AsyncClient(base_url=door.url, headers=HEADERS, timeout=60) as client:
        gate = asyncio.Event()
        asks_bob(door, Says("Yes.", gate=gate))
        await door.here.society.send(to="bob", text="first")
        await door.here.state("bob", "llm")
        body = {"model": "ada", "input": "Is it so?"}
        asking = asyncio.create_task(client.post("/v1/responses", json=body))
        assert [one.payload["text"] for one in await door.here.heard(1)] == ["I asked Bob."]
        await door.here.society.pause("bob")
        gate.set()  # his turn ends, and he does not read the question
        async with asyncio.timeout(60):
            answer = (await asking).json()
        assert answer["output"][0]["content"][0]["text"] == "I asked Bob."
        assert answer["coterie"]["problem"] == HINT


async def test_a_message_over_a2a_returns_if_another_agent_is_paused(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door, httpx.AsyncClient(base_url=door.url, headers=HEADERS, timeout=60) as client:
        asks_bob(door)
        await door.here.society.pause("bob")
        message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "Is it so?"}]}
        async with asyncio.timeout(60):
            answer = await client.post(
                "/a2a/ada/message:send", json={"message": message}, headers={"A2A-Version": "1.0"}
            )
        status = answer.json()["task"]["status"]
        assert status["state"] == "TASK_STATE_WORKING"
        assert status["message"]["parts"][0]["text"] == HINT


async def test_a_retired_agent_is_not_offered(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door, httpx.AsyncClient(base_url=door.url, headers=HEADERS, timeout=60) as client:
        await client.delete("/api/v1/definitions/bob")
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["ada"]
        card = (await client.get("/.well-known/agent-card.json")).json()
        assert [skill["id"] for skill in card["skills"]] == ["ada"]
