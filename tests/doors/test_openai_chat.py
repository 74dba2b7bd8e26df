"""Chat completions: the `openai` package and plain HTTP talk to agents of a running society."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from coterie.testing import Calls, Says, Status
from coterie.testing.model_server import ReceivedRequest
from tests.agent.held_answer import HeldAnswer
from tests.agent.stage import each
from tests.web.conftest import TOKEN

from .conftest import Door, open_door

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


def user(text: Any) -> Any:
    return {"role": "user", "content": text}


def said(text: str) -> Any:
    return {"role": "assistant", "content": text}


async def sent_to(door: Door, agent: str = "ada") -> list[str]:
    """The texts that the agent was sent by the person."""
    found = await door.here.society.store.thread(agent)
    return [one.payload["text"] for one in found if one.sender == "user"]


async def test_the_sdk_asks_and_streams_with_a_key_and_the_owner_sees_it(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        door.here.server.default = lambda request: Says("It is  4.\nSure.", token_size=3)
        key = await door.key("webui", agents=["ada"], doors=["openai"])

        def ask_sync() -> Any:
            with OpenAI(base_url=f"{door.url}/v1", api_key=key, max_retries=0) as client:
                assert [model.id for model in client.models.list()] == ["ada"]
                assert client.models.retrieve("ada").owned_by == "coterie"
                whole = client.chat.completions.create(model="ada", messages=[user("2+2?")])
                with pytest.raises(openai.NotFoundError):
                    client.chat.completions.create(model="bob", messages=[user("hi")])
                chunks = list(
                    client.chat.completions.create(
                        model="ada", messages=[user("3+1?")], stream=True, stream_options={"include_usage": True}
                    )
                )
                return whole, chunks

        whole, chunks = await asyncio.to_thread(ask_sync)
        assert whole.choices[0].message.content == "It is  4.\nSure."
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage.prompt_tokens > 0 and whole.usage.completion_tokens > 0
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(texts) == "It is  4.\nSure."
        assert chunks[-1].usage.total_tokens > 0

        async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=TOKEN, max_retries=0) as client:
            ids = [model.id async for model in client.models.list()]
            assert ids == ["ada", "bob"]
            held, parts = HeldAnswer("It is  "), list[str]()
            door.here.server.default = held
            async for chunk in await client.chat.completions.create(model="bob", messages=[user("hi")], stream=True):
                parts.append(chunk.choices[0].delta.content or "")
                if parts[-1]:
                    held.may_end.set()  # the first text came before the model had ended
            assert parts == ["", "It is  ", " and ends.", ""]
            door.here.server.default = lambda request: "Yes."
            answer = await client.chat.completions.create(model="ada", messages=[user("again")])
        task = (await door.here.society.task(answer.coterie["task"])).task  # type: ignore[attr-defined]
        assert (task.state, answer.usage and answer.usage.prompt_tokens) == ("done", task.input_tokens)
        thread = await door.here.society.store.thread("ada")
        asked = [(one.payload["text"], one.via) for one in thread if one.sender == "user"]
        assert asked == [("2+2?", "webui"), ("3+1?", "webui"), ("again", None)]


async def test_only_what_is_new_in_the_clients_list_is_sent_on(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        numbers = iter(range(1, 100))
        door.here.server.default = lambda request: f"This is answer number {next(numbers)}."
        async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=TOKEN, max_retries=0) as client:

            async def ask(messages: list[Any], **more: Any) -> str:
                answer = await client.chat.completions.create(model="ada", messages=messages, **more)
                return answer.choices[0].message.content or ""

            talk = [{"role": "system", "content": "Be brief."}, user("one")]
            talk += [said(await ask(talk)), user("two")]
            talk += [said((await ask(talk)).upper()), user("three")]  # the client changed the answer
            talk[0] = {"role": "system", "content": "Be long."}
            last = await ask(talk)
            # The client has dropped the beginning.
            await ask([user("something else"), said(last), user("four")])
            # An unknown conversation comes as a whole.
            await ask([user("from elsewhere"), said("an answer of another model"), user("five")])
            await ask([user("dropped"), said("by name"), user("six")], extra_body={"metadata": {"conversation": "c"}})
        assert await sent_to(door) == [
            "Instructions from the program:\nBe brief.\n\none",
            "two",
            "Instructions from the program:\nBe long.\n\nthree",
            "four",
            "The program brings an earlier conversation:\n\nuser: from elsewhere\n\n"
            "assistant: an answer of another model\n\nfive",
            "six",
        ]


async def test_a_retry_asks_once_and_a_later_request_asks_again(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        gate = asyncio.Event()
        door.here.server.default = lambda request: Says("slow", gate=gate)
        body = {"model": "ada", "messages": [user("hello")]}
        async with httpx.AsyncClient(base_url=door.url, headers={"Authorization": f"Bearer {TOKEN}"}) as client:

            async def ask(**headers: str) -> str:
                answer = await client.post("/v1/chat/completions", json=body, headers=headers, timeout=60)
                return str(answer.json()["id"])

            first = asyncio.create_task(ask())
            await door.here.state("ada", "llm")
            # The client goes away and tries again: the task goes on.
            first.cancel()
            async with AsyncExitStack() as open_streams:
                retries = [
                    await open_streams.enter_async_context(
                        client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}, timeout=60)
                    )
                    for _ in range(2)
                ]
                gate.set()  # both answers have begun, so both found the task
                chunks = [json.loads((await anext(one.aiter_lines())).removeprefix("data: ")) for one in retries]
            again = await ask()
            assert [chunk["id"] for chunk in chunks] == [again, again]
            assert await sent_to(door) == ["hello"]
            keyed = await ask(**{"Idempotency-Key": "a"})
            assert keyed == await ask(**{"Idempotency-Key": "a"}) != again
            assert await ask(**{"Idempotency-Key": "b"}) != keyed
            assert await sent_to(door) == ["hello"] * 3


async def test_an_idempotency_key_is_for_one_request_and_conversations_with_keys_go_on(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        door.here.server.default = lambda request: "Yes."
        async with httpx.AsyncClient(base_url=door.url, headers={"Authorization": f"Bearer {TOKEN}"}) as client:

            async def ask(key: str, *messages: Any, model: str = "ada") -> httpx.Response:
                body = {"model": model, "messages": messages}
                headers = {"Idempotency-Key": key}
                return await client.post("/v1/chat/completions", json=body, headers=headers, timeout=60)

            first = await ask("k1", user("Pay 5"))
            for messages, model in (((user("Pay 15"),), "ada"), ((user("Pay 5 "),), "ada"), ((user("Pay 5"),), "bob")):
                reused = await ask("k1", *messages, model=model)
                assert (reused.status_code, reused.json()["error"]["code"]) == (400, "idempotency_key_reused")
            assert (await ask("k1", user("Pay 5"))).json()["id"] == first.json()["id"]
            talk = [user("Pay 5"), said("Yes."), user("And 6")]
            again = await ask("k2", *talk)
            assert again.status_code == 200 and (await ask("k2", *talk)).json()["id"] == again.json()["id"]
        assert (await sent_to(door), await sent_to(door, "bob")) == (["Pay 5", "And 6"], [])


async def test_the_same_question_with_other_instructions_is_asked_again(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        door.here.server.default = lambda request: "4"
        async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=TOKEN, max_retries=0) as client:
            french, german = ({"role": "system", "content": f"Answer in {name}."} for name in ("French", "German"))
            for instructions in ([], [french], [french], [german], []):
                messages: list[Any] = [*instructions, user("2+2?")]
                await client.chat.completions.create(model="ada", messages=messages)
        assert await sent_to(door) == [
            "2+2?",
            "Instructions from the program:\nAnswer in French.\n\n2+2?",
            "Instructions from the program:\nAnswer in German.\n\n2+2?",
            "2+2?",
        ]


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
async def test_a_text_that_was_cut_inside_a_character_is_sent(tmp_path: Path, path: str) -> None:
    async with open_door(tmp_path) as door:
        door.here.server.default = lambda request: "Yes."
        async with httpx.AsyncClient(base_url=door.url, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            given = r'[{"role": "user", "content": "cut \ud83d and \u0000"}]'
            name = "input" if path == "responses" else "messages"
            body = rf'{{"model": "ada", "{name}": {given}, "metadata": {{"a": "\ud83d"}}, "user": "\udc00"}}'
            headers = {"Content-Type": "application/json"}
            answer = await client.post(f"/v1/{path}", content=body, headers=headers, timeout=60)
            assert answer.status_code == 200
        assert await sent_to(door) == ["cut \ufffd and \ufffd"]


async def test_the_stream_shows_other_agents_at_work_and_the_answer_after_theirs(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        ask_bob = Says("Let me ask.", calls=(Calls("send_message", {"to": "bob", "payload": {"text": "?"}}),))
        door.here.server.default = each(ada=[ask_bob, "I have asked bob.", "Bob says 42."], bob=["42"])
        async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=TOKEN, max_retries=0) as client:
            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(
                    model="ada", messages=[user("What does bob say?")], stream=True
                )
            ]
            whole = await client.chat.completions.create(model="ada", messages=[user("What does bob say?")])
        content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        # The text before the tool call is no message. It comes only if the stream was there while it was written.
        assert content.removeprefix("Let me ask.\n\n") == "I have asked bob.\n\nBob says 42."
        assert whole.choices[0].message.content == "I have asked bob.\n\nBob says 42."
        assert whole.id == chunks[0].id and len(await sent_to(door)) == 1


async def test_quick_replies_are_a_numbered_list_and_the_number_chooses_one(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        question = Calls("send_message", {"to": "user", "payload": {"text": "Which?"}, "quickReplies": ["Red", "Blue"]})
        replies: list[Any] = [Says("", calls=(question,)), Says("I asked."), "Blue it is."]
        door.here.server.default = lambda request: replies.pop(0)
        key = await door.key()
        async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=key, max_retries=0) as client:
            talk = [user("Paint it")]
            asked = await client.chat.completions.create(model="ada", messages=talk)
            content = asked.choices[0].message.content or ""
            extra = asked.coterie  # type: ignore[attr-defined]
            assert content.startswith("Which?\n\n1. Red\n2. Blue")
            assert extra["state"] == "waiting"
            chosen = await client.chat.completions.create(model="ada", messages=[*talk, said(content), user("2")])
        assert chosen.choices[0].message.content == "Blue it is."
        assert chosen.coterie["task"] == extra["task"]  # type: ignore[attr-defined]
        (asked_message,) = [m for m in await door.here.society.store.thread("ada") if m.payload.get("quickReplies")]
        assert asked_message.answer is not None and asked_message.answer.option == 1


async def test_pictures_and_files_become_artifacts_and_addresses_are_not_loaded(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        door.here.server.default = lambda request: "seen"
        picture = f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"
        parts = [
            {"type": "text", "text": "Look"},
            {"type": "image_url", "image_url": {"url": picture}},
            {"type": "file", "file": {"filename": "notes.txt", "file_data": "data:text/plain;base64,aGVsbG8="}},
        ]
        async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=TOKEN, max_retries=0) as client:
            await client.chat.completions.create(model="ada", messages=[user(parts)])
            for url in ("http://127.0.0.1:1/x.png", "data:image/png;base64,???"):
                bad = [user([{"type": "image_url", "image_url": {"url": url}}])]
                with pytest.raises(openai.BadRequestError) as refused:
                    await client.chat.completions.create(model="ada", messages=bad)
                assert refused.value.param == "messages[0].content[0].image_url"
        (message,) = [m for m in await door.here.society.store.thread("ada") if m.sender == "user"]
        files = [(one["filename"], one["mimeType"]) for one in message.payload["attachments"]]
        assert files == [("picture-1.png", "image/png"), ("notes.txt", "text/plain")]
        assert await door.here.society.artifacts.read(message.payload["attachments"][0]["artifactRef"]) == PIXEL


async def test_tools_of_the_client_are_ignored_and_what_an_agent_cannot_do_is_refused(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        door.here.server.default = lambda request: "no tools here"
        tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=TOKEN, max_retries=0) as client:
            answer = await client.chat.completions.create(model="ada", messages=[user("x")], tools=tools)
            assert answer.coterie["ignored"] == ["tools"]  # type: ignore[attr-defined]
            assert answer.choices[0].message.tool_calls is None
            wrong: tuple[dict[str, Any], ...] = (
                {"tools": tools, "tool_choice": "required"},
                {"n": 2},
                {"response_format": {"type": "json_object"}},
                {"extra_body": {"coterie": {"on_disconnect": "explode"}}},
                {"extra_body": {"messages": []}},
                {"extra_body": {"messages": "x"}},
                {"extra_body": {"messages": [{"role": "robot", "content": "x"}]}},
            )
            for more in wrong:
                with pytest.raises(openai.BadRequestError) as refused:
                    await client.chat.completions.create(model="ada", messages=[user("y")], **more)
                assert refused.value.type == "invalid_request_error"
        assert await sent_to(door) == ["x"]


async def test_a_failure_is_an_error_that_the_sdk_does_not_repeat(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        door.here.server.default = lambda request: Status(400, "no such model")
        async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=TOKEN) as client:
            with pytest.raises(openai.InternalServerError) as failed:
                await client.chat.completions.create(model="ada", messages=[user("x")])
            assert (failed.value.status_code, failed.value.code) == (502, "agent_failed")
            with pytest.raises(openai.APIError, match="no such model"):
                async for _ in await client.chat.completions.create(model="ada", messages=[user("y")], stream=True):
                    pass
            assert await sent_to(door) == ["x", "y"]
            await door.here.society.pause("bob")
            with pytest.raises(openai.InternalServerError, match="bob is paused"):
                await client.chat.completions.create(model="bob", messages=[user("x")])
            assert await sent_to(door, "bob") == []
            # ada is blocked. Her next message lets her try again, and the client does not wait in vain.
            with pytest.raises(openai.InternalServerError, match="no such model"):
                await client.chat.completions.create(model="ada", messages=[user("z")])


async def test_a_retry_gets_the_answer_of_an_agent_that_was_paused_since_then(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        door.here.server.default = lambda request: "Yes."
        async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=TOKEN, max_retries=0) as client:
            first = await client.chat.completions.create(model="ada", messages=[user("x")])
            await door.here.society.pause("ada")
            assert (await client.chat.completions.create(model="ada", messages=[user("x")])).id == first.id
            with pytest.raises(openai.InternalServerError, match="ada is paused"):
                await client.chat.completions.create(model="ada", messages=[user("y")])
        assert await sent_to(door) == ["x"]


async def test_requests_at_once_to_one_agent_are_all_answered(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        door.here.server.default = lambda request: "Yes."
        async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=TOKEN, max_retries=0) as client:

            async def ask(text: str) -> str | None:
                answer = await client.chat.completions.create(model="ada", messages=[user(text)])
                later = await client.responses.retrieve(answer.id.replace("chatcmpl-", "resp_"))
                # A turn that reads another request after its answer answers both again.
                said = [part.text for item in later.output for part in item.content]  # type: ignore[union-attr]
                assert (later.status, "\n\n".join(said)) == ("completed", answer.choices[0].message.content)
                return answer.choices[0].message.content

            texts = [f"question {number}" for number in range(6)]
            answers = await asyncio.wait_for(asyncio.gather(*map(ask, texts)), 60)
        assert all(answer and "Yes." in answer for answer in answers)
        assert sorted(await sent_to(door)) == texts


async def test_an_unknown_model_gets_neither_messages_nor_files(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        file = {"type": "file", "file": {"filename": "n.txt", "file_data": "data:text/plain;base64,aGVsbG8="}}
        await door.here.society.terminate_agent("bob")
        async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=TOKEN, max_retries=0) as client:
            for model in ("nobody", "user", "system", "bob", ""):
                for content in ("hi", [file]):
                    with pytest.raises(openai.NotFoundError) as refused:
                        await client.chat.completions.create(model=model, messages=[user(content)])
                    assert (refused.value.code, refused.value.param) == ("unknown_agent", "model")
        assert await door.here.society.store.artifacts_before(None, 1) == []


async def test_a_client_that_asks_for_it_stops_the_task_when_it_goes_away(tmp_path: Path) -> None:
    async with open_door(tmp_path) as door:
        gate = asyncio.Event()

        def answer(request: ReceivedRequest) -> Says:
            return Says("never", gate=gate)

        door.here.server.default = answer
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for stream in (False, True):
            text = f"stream {stream}"
            body = {"model": "ada", "messages": [user(text)], "stream": stream, "coterie": {"on_disconnect": "stop"}}

            async def ask(body: Any = body) -> None:
                async with httpx.AsyncClient(base_url=door.url, headers=headers) as client:
                    await client.post("/v1/chat/completions", json=body, timeout=60)

            asking = asyncio.create_task(ask())
            await door.here.state("ada", "llm")
            asking.cancel()
            await door.here.state("ada", "idle")
            (task,) = [one for one in await door.here.society.tasks() if one.text == text]
            assert task.state == "stopped"
        gate.set()
