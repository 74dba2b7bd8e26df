"""Every door of a society on PostgreSQL: a question, its answer, and its repetition, which is asked once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from a2a.types import a2a_pb2 as a2a
from openai import AsyncOpenAI

from coterie.store_url import replace_store_url
from coterie.testing import Says
from tests.agent.held_answer import HeldAnswer
from tests.agent.stage import each
from tests.engines import Postgres
from tests.web.conftest import TOKEN
from tests.web.mcp_stage import mcp_stage
from tests.web.test_a2a import ASKS, client_of, last_status, sent


def agents(shared: Postgres, folder: Path) -> str:
    return replace_store_url("[agents.ada]\n[agents.bob]\n", shared.url(folder / "data"))


async def test_chat_and_responses(shared: Postgres, tmp_path: Path) -> None:
    async with (
        mcp_stage(tmp_path, agents=agents(shared, tmp_path)) as here,
        AsyncOpenAI(base_url=f"{here.base}/v1", api_key=TOKEN, max_retries=0) as client,
        asyncio.timeout(300),
    ):
        here.stage.server.default = "It is 42."
        for _ in range(2):
            streamed = await client.chat.completions.create(
                model="ada", messages=[{"role": "user", "content": "What is it?"}], stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in streamed]
            assert "".join(pieces) == "It is 42."
        assert await here.asked() == ["What is it?"]
        held = HeldAnswer()
        here.stage.server.default = held
        job = await client.responses.create(model="ada", input="Work", background=True)
        assert job.status in ("queued", "in_progress")
        held.may_end.set()
        *_, ended = [event async for event in await client.responses.retrieve(job.id, stream=True)]
        assert ended.type == "response.completed"
        assert (await client.responses.retrieve(job.id)).output_text == "The answer begins and ends."


async def test_ids_that_postgresql_cannot_store_are_unknown(shared: Postgres, tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        mcp_stage(tmp_path, agents=agents(shared, tmp_path)) as here,
        httpx.AsyncClient(base_url=here.base, headers=headers) as client,
    ):
        for path in ("/api/v1/messages/%00", "/api/v1/agents/a%00", "/api/v1/tasks/%00", "/v1/responses/resp_%00"):
            assert (await client.get(path)).status_code == 404, path
        assert (await client.get("/api/v1/messages?agent=%00")).json()["items"] == []
        asked = await client.post(
            "/v1/responses", json={"model": "ada", "input": "x", "previous_response_id": "resp_\0"}
        )
        assert asked.status_code == 404
        read = await client.post("/api/v1/read", content=r'{"thread": "\ud83d", "upto": "\u0000"}')
        assert read.status_code in (404, 415, 422)


async def test_mcp(shared: Postgres, tmp_path: Path) -> None:
    async with mcp_stage(tmp_path, agents=agents(shared, tmp_path)) as here, asyncio.timeout(300):
        here.stage.server.default = each(ada=["It is 42.", Says(calls=(ASKS,)), ""])
        async with here.client() as client:
            answered = await client.call_tool("send", {"agent": "ada", "text": "What is it?", "waitSeconds": 30})
            assert answered.structured_content["answer"] == "It is 42."
            asked = await client.call_tool("send", {"agent": "ada", "text": "Paint", "waitSeconds": 30})
            assert asked.structured_content["state"] == "waiting"


async def test_a2a(shared: Postgres, tmp_path: Path) -> None:
    async with mcp_stage(tmp_path, agents=agents(shared, tmp_path)) as here, asyncio.timeout(300):
        here.stage.server.default = each(ada=[Says(calls=(ASKS,)), "", "Blue it is."])
        async with client_of(here) as client:
            events = await sent(client, "Paint", "m1")
            assert last_status(events).state == a2a.TASK_STATE_INPUT_REQUIRED
            answered = await sent(client, "blue", "m2", task=events[0].task.id)
            assert last_status(answered).state == a2a.TASK_STATE_COMPLETED
            again = await sent(client, "blue", "m2", task=events[0].task.id)
            assert last_status(again).state == a2a.TASK_STATE_COMPLETED
        assert await here.asked() == ["Paint", "blue"]


async def test_a_revoked_key_opens_no_door(shared: Postgres, tmp_path: Path) -> None:
    async with mcp_stage(tmp_path, agents=agents(shared, tmp_path)) as here, asyncio.timeout(300):
        token = await here.make_key("program")
        async with httpx.AsyncClient(base_url=here.base, headers={"Authorization": f"Bearer {token}"}) as client:
            paths = ("/v1/models", "/a2a/ada/.well-known/agent-card.json")
            assert [(await client.get(path)).status_code for path in paths] == [200, 200]
            await here.stage.society.store.revoke_key("program")
            assert [(await client.get(path)).status_code for path in paths] == [401, 401]
            assert (await client.post("/mcp", json={})).status_code == 401
