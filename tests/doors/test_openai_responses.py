"""Responses: the `openai` package and the `llm` program talk to agents of a running society."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from coterie.testing import Calls, Says
from tests.agent.held_answer import HeldAnswer
from tests.agent.stage import each
from tests.web.conftest import TOKEN

from .conftest import open_door
from .test_openai_chat import sent_to


async def test_the_sdk_asks_continues_and_retrieves(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        numbers = iter(range(1, 100))
        door.here.server.default = lambda request: f"answer {next(numbers)}"
        key = await door.key("program", agents=["ada"])

        def ask_sync() -> Any:
            with OpenAI(base_url=f"{door.url}/v1", api_key=key, max_retries=0) as client:
                first = client.responses.create(model="ada", input="one", instructions="Be brief.")
                second = client.responses.create(
                    model="ada",
                    input=[{"role": "user", "content": [{"type": "input_text", "text": "two"}]}],
                    previous_response_id=first.id,
                    instructions="Be brief.",
                    metadata={"topic": "x"},
                )
                return first, second, client.responses.retrieve(first.id)

        first, second, again = await asyncio.to_thread(ask_sync)
        assert (first.output_text, first.status, second.output_text) == ("answer 1", "completed", "answer 2")
        assert first.usage.input_tokens > 0 and first.usage.total_tokens > first.usage.input_tokens
        assert (second.previous_response_id, second.metadata) == (first.id, {"topic": "x"})
        assert (again.output_text, again.status, again.id) == ("answer 1", "completed", first.id)
        assert await sent_to(door) == ["Instructions from the program:\nBe brief.\n\none", "two"]

        other = await door.key("other")
        async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=other, max_retries=0) as stranger:
            with pytest.raises(openai.NotFoundError):
                await stranger.responses.retrieve(first.id)
            with pytest.raises(openai.NotFoundError):
                await stranger.responses.cancel(first.id)
            with pytest.raises(openai.NotFoundError):
                await stranger.responses.create(model="ada", input="x", previous_response_id=first.id)


async def test_the_sdk_streams_events_and_superseded_text_is_not_in_the_final_output(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        ask_bob = Says("Let me ask.", calls=(Calls("send_message", {"to": "bob", "payload": {"text": "?"}}),))
        held = HeldAnswer("Bob", " says forty-two.")
        script = each(ada=[ask_bob, "I have asked bob."], bob=["forty-two"])
        door.here.server.default = lambda request: (
            held(request)
            if "forty-two" in str(request.body["messages"]) and "(id: ada)" in str(request.body)
            else script(request)
        )
        async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=TOKEN, max_retries=0) as client:
            kinds, deltas = list[str](), list[str]()
            async with client.responses.stream(model="ada", input="What does bob say?") as stream:
                async for event in stream:
                    kinds.append(event.type)
                    if event.type == "response.output_text.delta":
                        deltas.append(event.delta)
                        if event.delta == "Bob":
                            held.may_end.set()
                final = await stream.get_final_response()
            assert final.output_text == "I have asked bob.Bob says forty-two."
            assert "".join(deltas).endswith("Bob says forty-two.") and deltas[-2:] == ["Bob", " says forty-two."]
            assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
            assert final.usage and final.usage.total_tokens > 0
            replayed = [event async for event in await client.responses.retrieve(final.id, stream=True)]
            assert replayed[-1].type == "response.completed"
            assert replayed[-1].response.output_text == final.output_text


async def test_a_response_in_the_background_is_retrieved_and_cancelled(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        held = HeldAnswer("It", " is done.")
        door.here.server.default = held
        async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=TOKEN, max_retries=0) as client:
            begun = await client.responses.create(model="ada", input="work", background=True)
            assert begun.status in ("queued", "in_progress") and begun.background
            await door.here.state("ada", "llm")
            assert (await client.responses.retrieve(begun.id)).status == "in_progress"
            held.may_end.set()
            await door.here.ended(begun.id.removeprefix("resp_"))
            done = await client.responses.retrieve(begun.id)
            assert (done.status, done.output_text) == ("completed", "It is done.")
            assert (await client.responses.cancel(begun.id)).status == "completed"

            door.here.server.default = HeldAnswer("Never")
            second = await client.responses.create(model="ada", input="more work", background=True)
            await door.here.state("ada", "llm")
            for _ in range(2):
                assert (await client.responses.cancel(second.id)).status == "cancelled"
            assert (await client.responses.retrieve(second.id)).status == "cancelled"


async def test_a_wrong_request_is_refused_with_its_field(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        async with httpx.AsyncClient(base_url=door.url, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            for body, param in (
                ({"input": 7}, "input"),
                ({"input": "x", "tool_choice": "required"}, "tool_choice"),
                ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "response_format"),
                ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].type"),
                ({"input": "x", "conversation": 7}, "conversation"),
                ({"input": []}, "messages"),
                ({"input": [{"type": ["message"], "role": "user", "content": "x"}]}, "input[0].type"),
                ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role"),
                ({"input": "x", "previous_response_id": "resp_x"}, "previous_response_id"),
                ({"input": "x", "previous_response_id": "resp_\0"}, "previous_response_id"),
            ):
                answer = await client.post("/v1/responses", json={"model": "ada"} | body)
                assert answer.status_code == (404 if param.startswith("prev") else 400)
                assert answer.json()["error"]["param"] == param
            answer = await client.get("/v1/responses/resp_x?starting_after=3")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")
        assert await sent_to(door) == []


async def test_a_response_of_one_agent_cannot_be_continued_with_another(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        door.here.server.default = lambda request: "A long story."
        async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=TOKEN, max_retries=0) as client:
            first = await client.responses.create(model="ada", input="Tell a story")
            with pytest.raises(openai.BadRequestError, match="another model"):
                await client.responses.create(model="bob", input="Shorten it", previous_response_id=first.id)
        assert await sent_to(door, "bob") == []


async def test_the_llm_program_asks_and_continues_a_conversation(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        numbers = iter(range(1, 100))
        door.here.server.default = lambda request: f"answer number {next(numbers)}"
        key = await door.key("llm", agents=["ada"], doors=["openai"])
        settings = tmp_path / "llm"
        settings.mkdir()
        (settings / "extra-openai-models.yaml").write_text(
            f"- model_id: ada\n  model_name: ada\n  api_base: {door.url}/v1\n  api_key_name: coterie\n"
        )
        (settings / "keys.json").write_text(json.dumps({"coterie": key}))

        def llm(*arguments: str) -> str:
            env = os.environ | {"LLM_USER_PATH": str(settings)}
            command = [sys.executable, "-m", "llm", *arguments]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        assert await asyncio.to_thread(llm, "-m", "ada", "-s", "Be brief.", "one") == "answer number 1"
        assert await asyncio.to_thread(llm, "-m", "ada", "-c", "--no-stream", "two") == "answer number 2"
        assert await sent_to(door) == ["Instructions from the program:\nBe brief.\n\none", "two"]


async def test_a_key_reaches_no_other_agent_through_any_route(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        door.here.server.default = lambda request: "the secret of bob"
        owner, key = {"Authorization": f"Bearer {TOKEN}"}, await door.key("program", agents=["ada"])
        async with httpx.AsyncClient(base_url=door.url, timeout=60) as client:
            made = await client.post("/v1/responses", json={"model": "bob", "input": "x"}, headers=owner)
            response_id = made.json()["id"]
            asked = {"model": "bob", "messages": [{"role": "user", "content": "x"}]}
            for method, path, body in (
                ("GET", "/v1/models/bob", None),
                ("POST", "/v1/chat/completions", asked),
                ("POST", "/v1/chat/completions", asked | {"stream": True}),
                ("POST", "/v1/responses", {"model": "bob", "input": "x"}),
                ("POST", "/v1/responses", {"model": "ada", "input": "x", "previous_response_id": response_id}),
                ("GET", f"/v1/responses/{response_id}", None),
                ("GET", f"/v1/responses/{response_id}?stream=true", None),
                ("POST", f"/v1/responses/{response_id}/cancel", None),
            ):
                answer = await client.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})
                assert answer.status_code == 404, (method, path)
                assert "secret" not in answer.text
                unknown = await client.request(
                    method,
                    path.replace("bob", "nobody").replace(response_id, "resp_x"),
                    json=json.loads(json.dumps(body).replace("bob", "nobody").replace(response_id, "resp_x")),
                    headers={"Authorization": f"Bearer {key}"},
                )
                assert unknown.content == answer.content  # it does not even say whether there is a bob
            listed = await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert [model["id"] for model in listed.json()["data"]] == ["ada"]
