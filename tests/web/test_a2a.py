"""A2A under /a2a, with the SDK's own client, over JSON-RPC and over HTTP+JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.types import a2a_pb2 as a2a
from a2a.utils.errors import (
    A2AError,
    InvalidParamsError,
    PushNotificationNotSupportedError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
)
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.struct_pb2 import Value

from coterie.testing import Calls, Says
from coterie.testing.model_server import Status
from tests.agent.held_answer import HeldAnswer
from tests.agent.stage import Bell, each
from tests.web.conftest import TOKEN
from tests.web.mcp_stage import McpStage, mcp_stage

both = pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON"])
ASKS = Calls("send_message", {"to": "user", "payload": {"text": "Which colour?"}, "quickReplies": ["red", "blue"]})


@asynccontextmanager
async def client_of(
    here: McpStage, binding: str = "JSONRPC", *, agent: str = "ada", token: str = TOKEN, streaming: bool = True
) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(headers=headers, timeout=120) as http:
        card = await A2ACardResolver(http, f"{here.base}/a2a/{agent}").get_agent_card()
        config = ClientConfig(
            httpx_client=http, streaming=streaming, supported_protocol_bindings=[binding], use_client_preference=True
        )
        yield ClientFactory(config).create(card)


def request(text: str, message_id: str, *parts: a2a.Part, task: str = "", now: bool = False) -> a2a.SendMessageRequest:
    message = a2a.Message(message_id=message_id, role=a2a.ROLE_USER, task_id=task)
    message.parts.extend([a2a.Part(text=text), *parts])
    return a2a.SendMessageRequest(
        message=message, configuration=a2a.SendMessageConfiguration(return_immediately=now)
    )  # fmt: skip


async def sent(client: Client, *args: Any, **more: Any) -> list[a2a.StreamResponse]:
    return [event async for event in client.send_message(request(*args, **more))]


async def task_of(client: Client, task_id: str) -> a2a.Task:
    return await client.get_task(a2a.GetTaskRequest(id=task_id))


def last_status(events: list[a2a.StreamResponse]) -> a2a.TaskStatus:
    """The last status. A task that ends at once is the only event."""
    last = events[-1]
    return last.status_update.status if last.HasField("status_update") else last.task.status


def texts(task: a2a.Task) -> list[str]:
    return [part.text for artifact in task.artifacts for part in artifact.parts if part.text]


@both
async def test_every_state_of_a_task_is_reached(tmp_path: Path, binding: str) -> None:
    async with mcp_stage(tmp_path) as here, asyncio.timeout(120), client_of(here, binding) as client:
        held, began = HeldAnswer("It is", " 42."), asyncio.Event()
        here.stage.server.script(held)
        here.stage.society.live.subscribe(lambda _: began.set())
        sending = asyncio.create_task(sent(client, "What is it?", "m1"))
        await here.stage.server.wait_for_request()
        (task,) = await here.stage.society.tasks()
        assert (await task_of(client, task.id)).status.state == a2a.TASK_STATE_WORKING

        await began.wait()
        subscription = client.subscribe(a2a.SubscribeToTaskRequest(id=task.id))
        first = await anext(subscription)
        # What was written before is shown, too.
        assert (await anext(subscription)).status_update.status.message.parts[0].text == "ada: It is"
        held.may_end.set()
        for events in (await sending, [first, *[event async for event in subscription]]):
            assert events[0].task.id == task.id
            (artifact,) = [event.artifact_update.artifact for event in events if event.HasField("artifact_update")]
            assert artifact.parts[0].text == "It is 42."
            assert last_status(events).state == a2a.TASK_STATE_COMPLETED
        # The same message again is not sent again.
        (again,) = await sent(client, "What is it?", "m1")
        assert texts(again.task) == ["It is 42."]
        assert await here.asked() == ["What is it?"]

        here.stage.server.default = each(ada=[Says(calls=(ASKS,)), "", "Blue it is."])
        events = await sent(client, "Paint", "m2")
        asked, painting = last_status(events), events[0].task.id
        assert asked.state == a2a.TASK_STATE_INPUT_REQUIRED
        assert MessageToDict(asked.message.metadata)["quickReplies"] == ["red", "blue"]
        answered = await sent(client, "blue", "m3", task=painting)
        assert last_status(answered).state == a2a.TASK_STATE_COMPLETED
        assert texts(await task_of(client, painting))[-1] == "Blue it is."
        with pytest.raises(UnsupportedOperationError, match="has ended"):
            await sent(client, "green", "m4", task=painting)

        Bell.may_end.clear()
        here.stage.server.default = each(ada=[Says(calls=(Calls("ring", {"name": "a"}),))])
        async with client_of(here, binding, streaming=False) as other:
            (started,) = await sent(other, "Ring", "m6", now=True)
        await Bell.rang.wait()
        cancelled = await client.cancel_task(a2a.CancelTaskRequest(id=started.task.id))
        assert cancelled.status.state == a2a.TASK_STATE_CANCELED
        with pytest.raises(TaskNotCancelableError):
            await client.cancel_task(a2a.CancelTaskRequest(id=started.task.id))
        with pytest.raises(UnsupportedOperationError):
            await anext(client.subscribe(a2a.SubscribeToTaskRequest(id=started.task.id)))
        with pytest.raises(TaskNotFoundError):
            await task_of(client, "nothing")

        here.stage.server.default = Status(401, "no such key")
        failed = last_status(await sent(client, "Fail", "m5"))
        assert failed.state == a2a.TASK_STATE_FAILED
        assert "wants a key" in failed.message.parts[0].text

        listed = await client.list_tasks(a2a.ListTasksRequest(page_size=3))
        assert (len(listed.tasks), listed.total_size) == (3, 4)
        rest = await client.list_tasks(a2a.ListTasksRequest(page_size=3, page_token=listed.next_page_token))
        assert [one.id for one in rest.tasks] == [task.id]
        waiting = await client.list_tasks(a2a.ListTasksRequest(status=a2a.TASK_STATE_CANCELED))
        assert [one.id for one in waiting.tasks] == [started.task.id]


async def test_tasks_that_one_turn_answers_have_its_answer(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path) as here, asyncio.timeout(120), client_of(here) as client:
        here.stage.server.default = lambda request: "For both."
        await here.stage.society.pause("ada")
        tasks = [(await sent(client, text, text, now=True))[0].task.id for text in ("one", "two")]
        await here.stage.society.resume("ada")
        for task in tasks:
            await here.stage.ended(task)
            assert texts(await task_of(client, task)) == ["For both."]
        assert len(here.stage.server.requests) == 1


@both
@pytest.mark.parametrize("wrong", [{"historyLength": -1}, {"pageToken": "9" * 5000}, {"pageToken": "x"}])
async def test_a_wrong_parameter_of_a_list_is_the_clients_error(
    tmp_path: Path, binding: str, wrong: dict[str, Any]
) -> None:
    async with mcp_stage(tmp_path) as here, client_of(here, binding) as client:
        with pytest.raises(InvalidParamsError, match=next(iter(wrong))):
            await client.list_tasks(ParseDict(wrong, a2a.ListTasksRequest()))


@pytest.mark.parametrize("path", ["", "/message:send"])
async def test_a_body_that_is_too_large_is_refused(tmp_path: Path, path: str) -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(33):
            yield b"x" * (1 << 20)

    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", "A2A-Version": "1.0"}
    async with mcp_stage(tmp_path) as here, httpx.AsyncClient(headers=headers, timeout=120) as http:
        answer = await http.post(f"{here.base}/a2a/ada{path}", content=body())
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


@both
async def test_files_and_data_go_both_ways(tmp_path: Path, binding: str) -> None:
    async with mcp_stage(tmp_path) as here, client_of(here, binding, streaming=False) as client:
        here.stage.server.default = '{"sum": 3}'
        parts = [
            a2a.Part(raw=b"A map", filename="map.txt", media_type="text/plain"),
            a2a.Part(data=ParseDict({"a": 1, "b": 2}, Value())),
            a2a.Part(url="https://example.org/x.png", filename="x.png"),
        ]
        (answer,) = await sent(client, "Add", "m1", *parts)
        (artifact,) = answer.task.artifacts
        assert MessageToDict(artifact.parts[1].data) == {"sum": 3}
        (message,) = [one for one in answer.task.history if one.role == a2a.ROLE_USER]
        assert [part.raw for part in message.parts if part.raw] == [b"A map"]
        assert message.parts[0].text == 'Add\n\n{"a": 1, "b": 2}\n\nx.png: https://example.org/x.png'
        with pytest.raises(A2AError, match="no part with content"):
            await anext(client.send_message(a2a.SendMessageRequest(message=a2a.Message(
                message_id="m2", role=a2a.ROLE_USER, parts=[a2a.Part(filename="nothing")]
            ))))  # fmt: skip


@both
async def test_a_file_without_its_bytes_does_not_hide_the_tasks_of_the_agent(tmp_path: Path, binding: str) -> None:
    async with mcp_stage(tmp_path) as here, client_of(here, binding, streaming=False) as client:
        here.stage.server.default = "Seen."
        (answer,) = await sent(client, "See", "m1", a2a.Part(raw=b"hello", filename="note.txt"))
        for file in (path for path in (tmp_path / "data" / "artifacts").rglob("*") if path.is_file()):
            file.unlink()
        (task,) = (await client.list_tasks(a2a.ListTasksRequest())).tasks
        (part,) = (part for part in task.history[0].parts if part.filename)
        assert task.id == answer.task.id and part.url.startswith(f"{here.base}/api/v1/artifacts/")
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
            gone = await http.get(part.url)
        assert (gone.status_code, gone.json()["code"]) == (404, "unknown_artifact")
        assert gone.json()["detail"].startswith("the bytes of note.txt are gone")


@pytest.mark.parametrize(
    "text",
    ['{"a": NaN}', '{"a": 1e999}', f'{{"a": {"9" * 400}}}', '{"a":' * 120 + "1" + "}" * 120, '{"a":' * 100_000],
    ids=["not a number", "infinite", "huge", "deep", "very deep"],
)
async def test_a_text_that_is_no_data_of_the_protocol_is_sent_as_text(tmp_path: Path, text: str) -> None:
    async with mcp_stage(tmp_path) as here, client_of(here, streaming=False) as client:
        here.stage.server.default = text
        (answer,) = await sent(client, text, "m1")
        assert texts(await task_of(client, answer.task.id)) == [text]
        assert len((await client.list_tasks(a2a.ListTasksRequest())).tasks) == 1


async def test_equal_message_ids_do_not_share_files(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path) as here:
        here.stage.server.default = "Seen."
        for agent, data in (("ada", b"one"), ("bob", b"two")):
            async with client_of(here, agent=agent, streaming=False) as client:
                (answer,) = await sent(client, "Look", "m1", a2a.Part(raw=data, filename="a.txt"))
                (message,) = [one for one in answer.task.history if one.role == a2a.ROLE_USER]
                assert [part.raw for part in message.parts if part.raw] == [data]


async def test_an_answer_of_a_program_does_not_go_to_an_approval(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path) as here, asyncio.timeout(120):
        here.stage.server.default = each(ada=[Says(calls=(ASKS, Calls("dangerous", {"name": "a"}))), "", ""])
        token = await here.make_key("one", agents=["ada", "bob"], doors=["a2a"])
        async with client_of(here, token=token) as client:
            task = (await sent(client, "Paint and ring", "m1"))[0].task.id
            questions = await here.stage.society.store.open_questions("ada")
            assert sorted("approval" in one.payload for one in questions) == [False, True]
            async with client_of(here, agent="bob", token=token) as other:
                with pytest.raises(TaskNotFoundError):
                    await sent(other, "red", "m2", task=task)
            await sent(client, "red", "m3", task=task)
            said = [one for one in await here.stage.society.store.thread("ada") if one.sender == "user"]
            (question,) = [one.id for one in questions if "approval" not in one.payload]
            assert (said[-1].in_reply_to, said[-1].option) == (question, 0)


async def test_cards_say_what_agents_are_for(tmp_path: Path) -> None:
    agents = '[agents.ada]\nname = "Ada"\ndescription = "Draws maps"\n[agents.bob]\n'
    async with mcp_stage(tmp_path, agents=agents) as here, client_of(here) as client:
        card = await client.get_extended_agent_card(a2a.GetExtendedAgentCardRequest())
        assert (card.name, card.description) == ("Ada", "Draws maps")
        assert {one.protocol_binding for one in card.supported_interfaces} == {"JSONRPC", "HTTP+JSON"}
        assert {one.url for one in card.supported_interfaces} == {f"{here.base}/a2a/ada"}
        token = await here.make_key("one", agents=["bob"])
        for sender, skills in ((TOKEN, ["ada", "bob"]), (token, ["bob"])):
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {sender}"}) as http:
                society = await A2ACardResolver(http, here.base).get_agent_card()
                assert [skill.id for skill in society.skills] == skills
                assert society.supported_interfaces[0].url == f"{here.base}/a2a/{skills[0]}"
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}) as http:
            hidden = await http.get(f"{here.base}/a2a/ada/.well-known/agent-card.json")
            assert (hidden.status_code, hidden.json()["code"]) == (404, "unknown_agent")


@both
async def test_a_program_sees_its_agents_and_what_it_started(tmp_path: Path, binding: str) -> None:
    async with mcp_stage(tmp_path) as here:
        here.stage.server.default = "Hello."
        token = await here.make_key("one", agents=["ada"], doors=["a2a"])
        async with client_of(here, binding) as owner, client_of(here, binding, token=token) as one:
            mine = (await sent(owner, "Mine", "m1"))[0].task.id
            theirs = (await sent(one, "Theirs", "m1"))[0].task.id
            assert mine != theirs
            listed = await one.list_tasks(a2a.ListTasksRequest())
            assert [task.id for task in listed.tasks] == [theirs]
            with pytest.raises(TaskNotFoundError):
                await task_of(one, mine)
            with pytest.raises(TaskNotFoundError):
                await one.cancel_task(a2a.CancelTaskRequest(id=mine))
            with pytest.raises(A2AError, match="there is no task"):
                await sent(one, "x", "m2", task=mine)
            with pytest.raises(PushNotificationNotSupportedError):
                await owner.create_task_push_notification_config(
                    a2a.TaskPushNotificationConfig(task_id=mine, url="http://127.0.0.1:1")
                )
        async with client_of(here, binding, agent="bob") as other:
            with pytest.raises(TaskNotFoundError):
                await task_of(other, mine)
        headers = {"Authorization": f"Bearer {token}", "A2A-Version": "1.0"}
        async with httpx.AsyncClient(headers=headers) as http:
            body = {"message": {"messageId": "m9", "role": "ROLE_USER", "parts": [{"text": "x"}]}}
            refused = await http.post(f"{here.base}/a2a/bob/message:send", json=body)
            assert refused.status_code == 400
            assert "there is no agent" in refused.text
