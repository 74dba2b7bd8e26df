"""A remote agent on the server of a2a-sdk, which keeps no ids of messages: a retry finds the task that it started."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn
from a2a.helpers import new_task_from_user_message, new_text_message
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import a2a_pb2 as a2a
from starlette.applications import Starlette

from .test_remote_agents import open_here


class Executor(AgentExecutor):
    """Asks for a colour when it is told to paint, fails when told so, and waits for `may_end` otherwise."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_asked, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_end.set()

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        text = context.get_user_input()
        self.asked.append(text)
        self.is_asked.set()
        assert context.message is not None
        task = context.current_task
        if task is None:
            task = new_task_from_user_message(context.message)
            await event_queue.enqueue_event(task)
        updater = TaskUpdater(event_queue, task.id, task.context_id)
        await updater.start_work()
        await self.may_end.wait()
        match text:
            case "Paint":
                await updater.requires_input(new_text_message("Which colour?"))
            case "Fail":
                await updater.failed(new_text_message("no paint"))
            case _:
                await updater.add_artifact([a2a.Part(text=f"Did {text}.")])
                await updater.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        assert context.task_id and context.context_id
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


@asynccontextmanager
async def sdk_server() -> AsyncIterator[tuple[Executor, str]]:
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    card = a2a.AgentCard(
        name="Painter",
        description="Paints",
        version="1",
        supported_interfaces=[a2a.AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version="1.0")],
        capabilities=a2a.AgentCapabilities(streaming=True),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[a2a.AgentSkill(id="paint", name="Paint", description="Paints", tags=["paint"])],
    )
    executor = Executor()
    handler = DefaultRequestHandler(agent_executor=executor, task_store=InMemoryTaskStore(), agent_card=card)
    app = Starlette(routes=[*create_agent_card_routes(card), *create_jsonrpc_routes(handler, "/")])
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield executor, url
    finally:
        executor.may_end.set()
        server.should_exit = True
        await serving


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANNA_TOKEN", "a-key-of-the-tests-0123456789")


async def test_answers_questions_and_failures_come_back(tmp_path: Path) -> None:
    async with sdk_server() as (executor, url), open_here(tmp_path, url) as here, asyncio.timeout(300):
        await here.say("the dishes", "anna")
        assert await here.texts(1) == ["Did the dishes."]
        painting = await here.say("Paint", "anna")
        asked = (await here.heard(2))[1]
        assert (asked.payload["text"], asked.payload["quickReplies"]) == ("Which colour?", ["Cancel"])
        await here.say("blue", "anna", in_reply_to=asked.id)
        answer = (await here.heard(3))[2]
        assert (answer.payload["text"], answer.task) == ("Did blue.", painting)
        failing = await here.say("Fail", "anna")
        await here.ended(failing)
        assert "no paint" in (await here.texts(4))[3]
        assert (await here.society.task(failing)).task.state == "failed"
        assert executor.asked == ["the dishes", "Paint", "blue", "Fail"]


async def test_a_question_can_be_cancelled(tmp_path: Path) -> None:
    async with sdk_server() as (executor, url), open_here(tmp_path, url) as here, asyncio.timeout(300):
        await here.say("Paint", "anna")
        (asked,) = await here.heard()
        await here.say("Cancel", "anna", in_reply_to=asked.id, option=0)
        assert (await here.texts(2))[1] == "I asked to cancel the task."
        assert executor.asked == ["Paint"]


async def test_after_a_restart_the_task_is_followed_and_not_started_again(tmp_path: Path) -> None:
    async with sdk_server() as (executor, url), asyncio.timeout(300):
        executor.may_end.clear()
        async with open_here(tmp_path, url) as here:
            await here.say("the dishes", "anna")
            await executor.is_asked.wait()
            await here.society.abandon()
        executor.may_end.set()
        async with open_here(tmp_path, url) as here:
            assert await here.texts(1) == ["Did the dishes."]
        assert executor.asked == ["the dishes"]
