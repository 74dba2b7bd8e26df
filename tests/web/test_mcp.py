"""The MCP server at /mcp, with the SDK's own client, in the current and the previous revision of the protocol."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from mcp import MCPError
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.types import (
    BlobResourceContents,
    CallToolResult,
    ElicitResult,
    InputResponses,
    Request,
    RequestParams,
    Result,
    TextContent,
    TextResourceContents,
)

from coterie.testing import Calls, Says
from tests.agent.held_answer import HeldAnswer
from tests.agent.stage import Bell, each
from tests.web.conftest import TOKEN
from tests.web.mcp_stage import CURRENT, PREVIOUS, mcp_stage, said

both = pytest.mark.parametrize("mode", [PREVIOUS, CURRENT])
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@both
async def test_a_program_works_with_agents(tmp_path: Path, mode: str) -> None:
    ask_bob = Says(calls=(Calls("send_message", {"to": "bob", "payload": {"text": "Which sea?"}}),))
    async with mcp_stage(tmp_path) as here, here.client(mode) as client:
        here.stage.server.default = each(ada=[ask_bob, "I asked bob.", "The North Sea.", "Again?"], bob=["North Sea"])
        assert {tool.name for tool in (await client.list_tools()).tools} >= {"send", "list_agents", "stop_task"}
        found = (await client.call_tool("list_agents", {})).structured_content
        assert [agent["id"] for agent in found["agents"]] == ["ada", "bob"]
        able = await client.call_tool("find_agents", {"capability": "smell"})
        assert able.structured_content == {"agents": []}

        stored = (await client.call_tool("put_artifact", {"filename": "map.txt", "text": "A map"})).structured_content
        reports: list[str] = []

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            reports.append(message or "")

        arguments = {"agent": "ada", "text": "Look", "attachments": [stored["artifactRef"]]}
        result = await client.call_tool("send", arguments, progress_callback=on_progress)
        sent = result.structured_content
        assert (sent["state"], sent["answer"]) == ("done", "The North Sea.")
        assert [one["text"] for one in sent["messages"]] == ["I asked bob.", "The North Sea."]
        assert "The North Sea." in said(result)
        assert any("ada" in report for report in reports)

        status = await client.call_tool("task_status", {"task": sent["task"], "tree": True})
        shown = status.structured_content
        assert shown["task"]["agents"] == 2
        assert {node.get("agent") for node in shown["nodes"] if node["kind"] == "turn"} == {"ada", "bob"}
        tasks = (await client.call_tool("list_tasks", {"state": "done"})).structured_content["tasks"]
        assert [task["id"] for task in tasks] == [sent["task"]]

        # Its answer was returned, so the same text is a new message.
        again = await client.call_tool(
            "send", {"agent": "ada", "text": "Look", "attachments": arguments["attachments"]}
        )
        assert again.structured_content["answer"] == "Again?"
        assert await here.asked() == ["Look", "Look"]


@both
async def test_files_are_resources(tmp_path: Path, mode: str) -> None:
    async with mcp_stage(tmp_path) as here, here.client(mode) as client:
        texts = await client.call_tool("put_artifact", {"filename": "a.txt", "text": "grün"})
        picture = await client.call_tool(
            "put_artifact", {"filename": "b.png", "base64": base64.b64encode(PNG).decode()}
        )  # fmt: skip
        listed = (await client.list_resources()).resources
        assert [(one.name, one.mime_type) for one in listed] == [("b.png", "image/png"), ("a.txt", "text/plain")]
        (template,) = (await client.list_resource_templates()).resource_templates
        assert template.uri_template == "coterie://artifacts/{artifactRef}"

        (text,) = (await client.read_resource(texts.structured_content["uri"])).contents
        assert isinstance(text, TextResourceContents)
        assert text.text == "grün"
        (blob,) = (await client.read_resource(str(listed[0].uri))).contents
        assert isinstance(blob, BlobResourceContents)
        assert base64.b64decode(blob.blob) == PNG
        read = await client.call_tool("read_artifact", {"artifactRef": picture.structured_content["artifactRef"]})
        assert read.content[0].type == "image"
        with pytest.raises(MCPError, match="there is no artifact"):
            await client.read_resource("coterie://artifacts/nothing")


@both
async def test_each_agent_is_a_prompt(tmp_path: Path, mode: str) -> None:
    async with mcp_stage(tmp_path) as here, here.client(mode) as client:
        assert [prompt.name for prompt in (await client.list_prompts()).prompts] == ["ada", "bob"]
        (message,) = (await client.get_prompt("ada", {"text": "How are you?"})).messages
        assert isinstance(message.content, TextContent)
        assert "the agent ada" in message.content.text
        assert "How are you?" in message.content.text
        with pytest.raises(MCPError, match="there is no agent"):
            await client.get_prompt("nobody", {"text": "x"})
        with pytest.raises(MCPError, match="text is missing"):
            await client.get_prompt("ada", {"text": " "})


@both
async def test_wrong_calls_say_what_is_wrong(tmp_path: Path, mode: str) -> None:
    async with mcp_stage(tmp_path) as here, here.client(mode) as client:
        await client.list_tools()
        for tool, arguments, expected in (
            ("send", {"agent": "ada"}, "missing required field `text`"),
            ("send", {"agent": "ada", "text": "x", "wait": 1}, "unknown field `wait`"),
            ("send", {"agent": "nobody", "text": "x"}, 'there is no agent "nobody"'),
            ("send", {"agent": "user", "text": "x"}, 'there is no agent "user"'),
            ("send", {"agent": "ada", "text": "x", "waitSeconds": -1}, "waitSeconds"),
            ("send", {"agent": "ada", "text": "x", "attachments": ["?"]}, "there is no artifact"),
            ("answer_question", {"question": "?", "option": 0}, 'there is no question "?"'),
            ("task_status", {"task": "?"}, 'there is no task "?"'),
            ("put_artifact", {"filename": "x"}, "give either text or base64"),
            ("put_artifact", {"filename": "x", "base64": "*"}, "base64 cannot be decoded"),
        ):
            result = await client.call_tool(tool, arguments)
            assert result.is_error, (tool, arguments)
            assert expected in said(result), said(result)
        with pytest.raises(MCPError, match="there is no tool"):
            await client.call_tool("nothing", {})
        assert await here.asked() == []


@both
async def test_the_person_is_asked_through_the_client(tmp_path: Path, mode: str) -> None:
    asks = Calls("send_message", {"to": "user", "payload": {"text": "Which colour?"}, "quickReplies": ["red", "blue"]})
    asked: list[Any] = []

    async def choose(_: Any, params: Any) -> ElicitResult:
        asked.append((params.message, params.requested_schema["properties"]["choice"]["enum"]))
        return ElicitResult(action="accept", content={"choice": "blue"})

    async with mcp_stage(tmp_path) as here, here.client(mode, elicit=choose) as client:
        here.stage.server.default = each(ada=[Says(calls=(asks,)), "", "Blue it is."])
        result = await client.call_tool("send", {"agent": "ada", "text": "Paint"})
        assert asked == [("ada asks: Which colour?", ["red", "blue"])]
        assert result.structured_content["answer"] == "Blue it is."
        assert await here.asked() == ["Paint", "blue"]


@both
async def test_a_client_that_cannot_ask_gets_the_question(tmp_path: Path, mode: str) -> None:
    asks = Calls("send_message", {"to": "user", "payload": {"text": "Which colour?"}, "quickReplies": ["red", "blue"]})
    async with mcp_stage(tmp_path) as here, here.client(mode) as client:
        here.stage.server.default = each(ada=[Says(calls=(asks,)), "", "Red it is."])
        result = await client.call_tool("send", {"agent": "ada", "text": "Paint"})
        (question,) = result.structured_content["messages"]
        assert (result.structured_content["state"], question["options"]) == ("waiting", ["red", "blue"])
        inbox = (await client.call_tool("read_inbox", {"agent": "ada"})).structured_content
        assert [message["id"] for message in inbox["messages"]] == [question["id"]]
        answered = await client.call_tool("answer_question", {"question": question["id"], "option": 0})
        assert answered.structured_content["answer"] == "Red it is."
        # The same answer again is the same message; another one comes too late.
        again = await client.call_tool("answer_question", {"question": question["id"], "option": 0})
        assert again.structured_content["messageId"] == answered.structured_content["messageId"]
        late = await client.call_tool("answer_question", {"question": question["id"], "option": 1})
        assert late.is_error
        assert await here.asked() == ["Paint", "red"]


@both
async def test_a_cancelled_call_stops_the_task(tmp_path: Path, mode: str) -> None:
    async with mcp_stage(tmp_path) as here, here.client(mode) as client:
        Bell.may_end.clear()
        here.stage.server.default = each(ada=[Says(calls=(Calls("ring", {"name": "a"}),))])
        calling = asyncio.create_task(client.call_tool("send", {"agent": "ada", "text": "Ring"}))
        await Bell.rang.wait()
        calling.cancel()
        (task,) = await here.stage.society.tasks()
        async with asyncio.timeout(180):
            await here.stage.ended(task.id)
        assert (await here.stage.society.task(task.id)).task.state == "stopped"


@both
async def test_a_call_that_is_cancelled_while_it_sends_stops_the_task(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mcp_stage(tmp_path) as here, here.client(mode) as client, asyncio.timeout(180):
        held = HeldAnswer("The answer", " is 42.")
        here.stage.server.default = held
        bus, sent, may_return = here.stage.society.bus, asyncio.Event(), asyncio.Event()
        send = bus.send

        async def send_slowly(*args: Any, **more: Any) -> Any:
            receipt = await send(*args, **more)
            sent.set()
            await may_return.wait()
            return receipt

        monkeypatch.setattr(bus, "send", send_slowly)
        calling = asyncio.create_task(client.call_tool("send", {"agent": "ada", "text": "Tell"}))
        await sent.wait()
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        may_return.set()
        (task,) = await here.stage.society.tasks()
        await here.stage.ended(task.id)
        assert (await here.stage.society.task(task.id)).task.state == "stopped"


async def test_a_client_that_goes_away_stops_nothing_and_may_come_back(tmp_path: Path) -> None:
    held = HeldAnswer("The answer", " is 42.")
    async with mcp_stage(tmp_path) as here:
        here.stage.server.script(held)
        async with here.client(PREVIOUS) as client:
            calling = asyncio.create_task(client.session.call_tool("send", {"agent": "ada", "text": "Tell"}))
            await here.stage.server.wait_for_request()
            (task,) = await here.stage.society.tasks()
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        assert (await here.stage.society.task(task.id)).task.state == "working"
        async with here.client(CURRENT) as client:
            calling = asyncio.create_task(client.call_tool("send", {"agent": "ada", "text": "Tell"}))
            held.may_end.set()
            assert (await calling).structured_content["answer"] == "The answer is 42."
        assert await here.asked() == ["Tell"]
        assert len(here.stage.server.requests) == 1


async def test_work_goes_on_after_the_time_to_wait_is_over(tmp_path: Path) -> None:
    held = HeldAnswer("The answer", " is 42.")
    async with mcp_stage(tmp_path) as here, here.client() as client:
        here.stage.server.script(held)
        sent = await client.call_tool("send", {"agent": "ada", "text": "Tell", "waitSeconds": 0})
        assert (sent.structured_content["state"], sent.structured_content["answer"]) == ("working", None)
        task = sent.structured_content["task"]
        waiting = asyncio.create_task(client.call_tool("task_status", {"task": task, "waitSeconds": 30}))
        held.may_end.set()
        assert [one["text"] for one in (await waiting).structured_content["messages"]] == ["The answer is 42."]

        keyed = {"agent": "ada", "text": "Later", "delayMs": 600_000, "key": "k"}
        first, second = [await client.call_tool("send", keyed) for _ in range(2)]
        assert first.structured_content == second.structured_content
        assert first.structured_content["state"] == "delayed"
        await here.stage.society.pause("ada")
        paused = await client.call_tool("send", {"agent": "ada", "text": "Now"})
        assert "ada is paused" in paused.structured_content["problem"]
        stopped = await client.call_tool("stop_task", {"task": paused.structured_content["task"]})
        assert stopped.structured_content["messages"] == 1


async def test_messages_that_one_turn_reads_have_its_answer(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path) as here, here.client() as client:
        here.stage.server.default = lambda request: "For both."
        await here.stage.society.pause("ada")
        arguments = {"agent": "ada", "waitSeconds": 0}
        sent = [await client.call_tool("send", arguments | {"text": text}) for text in ("one", "two")]
        await here.stage.society.resume("ada")
        for task in [one.structured_content["task"] for one in sent]:
            found = (await client.call_tool("task_status", {"task": task, "waitSeconds": 30})).structured_content
            assert [one["text"] for one in found["messages"]] == ["For both."]
        assert len(here.stage.server.requests) == 1


# The tasks extension


class TaskHandle(Result):
    result_type: Literal["task"] = "task"
    task_id: str
    status: str


class TaskParams(RequestParams):
    task_id: str


class UpdateParams(TaskParams):
    input_responses: InputResponses


class GetTask(Request[TaskParams, Literal["tasks/get"]]):
    method: Literal["tasks/get"] = "tasks/get"
    params: TaskParams
    name_param = "taskId"


class UpdateTask(Request[UpdateParams, Literal["tasks/update"]]):
    method: Literal["tasks/update"] = "tasks/update"
    params: UpdateParams
    name_param = "taskId"


class CancelTask(Request[TaskParams, Literal["tasks/cancel"]]):
    method: Literal["tasks/cancel"] = "tasks/cancel"
    params: TaskParams
    name_param = "taskId"


class TaskState(Result):
    task_id: str = ""
    status: str = ""
    result: dict[str, Any] | None = None
    input_requests: dict[str, Any] | None = None


class Tasks(ClientExtension):
    """The client's side of the extension: asks until the task has ended, and answers its questions."""

    identifier = "io.modelcontextprotocol/tasks"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def claims(self) -> list[ResultClaim[Any]]:
        return [ResultClaim(result_type="task", model=TaskHandle, resolve=self.resolve)]

    async def resolve(self, handle: TaskHandle, context: ClaimContext) -> CallToolResult:
        self.seen.append(handle.status)
        params = TaskParams(task_id=handle.task_id)
        while True:
            state = await context.session.send_request(GetTask(params=params), TaskState)
            if state.status != self.seen[-1]:
                self.seen.append(state.status)
            if state.input_requests:
                answer = ElicitResult(action="accept", content={"text": "green"})
                update = UpdateParams(
                    task_id=handle.task_id, input_responses=dict.fromkeys(state.input_requests, answer)
                )
                await context.session.send_request(UpdateTask(params=update), Result)
            elif state.status != "working":
                return CallToolResult.model_validate(state.result or {"content": [], "isError": True})
            await asyncio.sleep(0.01)


async def test_a_call_is_a_task_of_the_protocol(tmp_path: Path) -> None:
    asks = Calls("send_message", {"to": "user", "payload": {"text": "Which colour?"}, "quickReplies": ["red", "blue"]})

    async def never(*_: Any) -> ElicitResult:
        raise AssertionError("the task's questions are answered by tasks/update")

    extension = Tasks()
    async with mcp_stage(tmp_path) as here, here.client(elicit=never, extensions=[extension]) as client:
        here.stage.server.default = each(
            ada=[Says(calls=(asks,)), "", "Green it is.", Says(calls=(Calls("ring", {"name": "a"}),))]
        )
        result = await client.call_tool("send", {"agent": "ada", "text": "Paint"})
        assert result.structured_content["answer"] == "Green it is."
        assert (extension.seen[0], extension.seen[-1]) == ("working", "completed")
        assert "input_required" in extension.seen

        Bell.may_end.clear()
        calling = asyncio.create_task(client.call_tool("send", {"agent": "ada", "text": "Ring"}))
        await Bell.rang.wait()
        (task,) = await here.stage.society.tasks(state="working")
        await client.session.send_request(CancelTask(params=TaskParams(task_id=task.id)), Result)
        await calling
        assert extension.seen[-1] == "cancelled"
        with pytest.raises(MCPError, match="no such task"):
            await client.session.send_request(GetTask(params=TaskParams(task_id="?")), TaskState)
    async with mcp_stage(tmp_path) as here, here.client() as client:
        with pytest.raises(MCPError, match="does not declare the extension"):
            await client.session.send_request(GetTask(params=TaskParams(task_id=task.id)), TaskState)


# Programs with keys


async def test_a_program_sees_its_agents_and_what_it_started(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path) as here:
        here.stage.server.default = "Hello."
        token = await here.make_key("one", agents=["ada"], doors=["mcp"])
        other = await here.make_key("two")
        async with here.client(PREVIOUS) as owner:
            secret = await owner.call_tool("put_artifact", {"filename": "secret.txt", "text": "secret"})
            own = await owner.call_tool("send", {"agent": "ada", "text": "Mine"})
            await owner.call_tool(
                "send", {"agent": "bob", "text": "Mine", "attachments": [secret.structured_content["artifactRef"]]}
            )
        for mode in (PREVIOUS, CURRENT):
            async with here.client(mode, token=token) as one, here.client(mode, token=other) as two:
                found = (await one.call_tool("list_agents", {})).structured_content
                assert [agent["id"] for agent in found["agents"]] == ["ada"]
                sent = await one.call_tool("send", {"agent": "ada", "text": f"Theirs {mode}"})
                assert sent.structured_content["answer"] == "Hello."
                tasks = (await one.call_tool("list_tasks", {})).structured_content["tasks"]
                assert all(task["text"].startswith("Theirs") for task in tasks)
                assert tasks
                inbox = (await one.call_tool("read_inbox", {})).structured_content["messages"]
                assert {message["task"] for message in inbox} == {task["id"] for task in tasks}
                assert (await two.call_tool("list_tasks", {})).structured_content["tasks"] == []
                refused = (
                    (one, "send", {"agent": "bob", "text": "x"}),
                    (one, "task_status", {"task": own.structured_content["task"]}),
                    (one, "stop_task", {"task": own.structured_content["task"]}),
                    (one, "read_artifact", {"artifactRef": secret.structured_content["artifactRef"]}),
                    (one, "answer_question", {"question": own.structured_content["messages"][0]["id"], "text": "x"}),
                    (two, "task_status", {"task": sent.structured_content["task"]}),
                )
                for client, tool, arguments in refused:
                    result = await client.call_tool(tool, arguments)
                    assert result.is_error, (tool, arguments)
                    assert "there is no" in said(result)
                assert (await one.list_resources()).resources == []
        messages = await here.stage.society.store.thread("ada", limit=100)
        assert {message.via for message in messages if message.payload["text"].startswith("Theirs")} == {"one"}


async def test_a_session_belongs_to_the_key_that_opened_it(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path) as here:
        tokens = [await here.make_key("one"), await here.make_key("two"), TOKEN]
        hello = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "initialize",
            "params": {
                "protocolVersion": "2025-11-25",
                "capabilities": {},
                "clientInfo": {"name": "x", "version": "1"},
            },
        }
        async with httpx2.AsyncClient(headers={"Accept": "application/json, text/event-stream"}) as http:
            opened = await http.post(
                f"{here.base}/mcp", json=hello, headers={"Authorization": f"Bearer {tokens[0]}"}
            )  # fmt: skip
            assert opened.status_code == 200
            headers = {"Mcp-Session-Id": opened.headers["mcp-session-id"], "Mcp-Protocol-Version": "2025-11-25"}
            listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
            for token, status in zip(tokens, (200, 404, 404), strict=True):
                answer = await http.post(
                    f"{here.base}/mcp", json=listing, headers=headers | {"Authorization": f"Bearer {token}"}
                )
                assert answer.status_code == status


async def test_the_door_can_be_switched_off(tmp_path: Path) -> None:
    async with (
        mcp_stage(tmp_path, agents="[doors]\nmcp = false\n[agents.ada]\n") as here,
        httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
    ):
        answer = await http.post(f"{here.base}/mcp", json={})
        assert (answer.status_code, answer.json()["code"]) == (404, "door_closed")
