"""Push notifications of A2A: only to allowed addresses, at least once, also after a restart."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from a2a.types import a2a_pb2 as a2a
from a2a.utils.errors import InvalidParamsError, PushNotificationNotSupportedError, TaskNotFoundError
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from coterie.push_configs import is_allowed
from coterie.store_url import replace_store_url
from coterie.web.a2a import push
from tests.agent.held_answer import HeldAnswer
from tests.engines import Engine, Postgres
from tests.web.mcp_stage import mcp_stage
from tests.web.test_a2a import both, client_of, request, sent


class Receiver:
    """An address that keeps what it gets. It answers with `statuses`, then with 200."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.got: asyncio.Queue[tuple[str, dict[str, Any], dict[str, str]]] = asyncio.Queue()
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = Request(scope, receive)
        self.got.put_nowait((scope["path"], json.loads(await given.body()), dict(given.headers)))
        status = self.statuses.pop(0) if self.statuses else 200
        answer = RedirectResponse(f"{self.url}/other", status) if status in (302, 307) else Response(status_code=status)
        await answer(scope, receive, send)

    async def state(self) -> str:
        _, body, _ = await self.got.get()
        return str(body["task"]["status"]["state"])


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    listener = socket.create_server(("127.0.0.1", 0))
    receiver.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(receiver, log_level="critical", lifespan="off"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield receiver
    finally:
        server.should_exit = True
        await serving


def settings(url: str) -> str:
    return f'[doors]\npush = ["{url}/hooks"]\n[agents.ada]\n[agents.bob]\n'


@both
async def test_a_program_is_told_when_its_task_ends(tmp_path: Path, binding: str) -> None:
    async with (
        receiving() as receiver,
        asyncio.timeout(300),
        mcp_stage(tmp_path, agents=settings(receiver.url)) as here,
        client_of(here, binding) as client,
    ):
        held = HeldAnswer("It is", " 42.")
        here.stage.server.script(held)
        sending = asyncio.create_task(sent(client, "What is it?", "m1"))
        await here.stage.server.wait_for_request()
        (task,) = await here.stage.society.tasks()
        config = a2a.TaskPushNotificationConfig(
            task_id=task.id,
            url=f"{receiver.url}/hooks/1",
            token="t-1",
            authentication=a2a.AuthenticationInfo(scheme="Bearer", credentials="c-1"),
        )
        made = await client.create_task_push_notification_config(config)
        wanted = a2a.GetTaskPushNotificationConfigRequest(task_id=task.id, id=made.id)
        assert (await client.get_task_push_notification_config(wanted)).url == config.url
        other = a2a.TaskPushNotificationConfig(task_id=task.id, id="two", url=f"{receiver.url}/hooks/2")
        await client.create_task_push_notification_config(other)
        listing = a2a.ListTaskPushNotificationConfigsRequest(task_id=task.id)
        listed = await client.list_task_push_notification_configs(listing)
        assert {one.id for one in listed.configs} == {made.id, "two"}
        gone = a2a.DeleteTaskPushNotificationConfigRequest(task_id=task.id, id="two")
        await client.delete_task_push_notification_config(gone)
        with pytest.raises(TaskNotFoundError):
            await client.get_task_push_notification_config(
                a2a.GetTaskPushNotificationConfigRequest(task_id=task.id, id="two")
            )
        held.may_end.set()
        await sending
        path, body, headers = await receiver.got.get()
        assert path == "/hooks/1"
        assert (headers["x-a2a-notification-token"], headers["authorization"]) == ("t-1", "Bearer c-1")
        assert body["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
        assert body["task"]["artifacts"][0]["parts"][0]["text"] == "It is 42."
        assert receiver.got.empty()


async def test_a_failed_notification_is_sent_again_after_a_restart(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The society may end while it sends; the next one waits for the end of that claim.
    monkeypatch.setattr(push, "CLAIM_TIME", timedelta(seconds=1))
    async with receiving() as receiver, asyncio.timeout(300):
        agents = settings(receiver.url)
        if isinstance(engine, Postgres):
            agents = replace_store_url(agents, engine.url(tmp_path / "data"))
        receiver.statuses = [500, 307]
        async with mcp_stage(tmp_path, agents=agents) as here, client_of(here, streaming=False) as client:
            here.stage.server.default = "Hello."
            asked = request("Hi", "m1")
            asked.configuration.task_push_notification_config.url = f"{receiver.url}/hooks"
            _ = [event async for event in client.send_message(asked)]
            assert await receiver.state() == "TASK_STATE_COMPLETED"
        async with mcp_stage(tmp_path, agents=agents):
            # The redirect counts as a failure, too, and is not followed.
            for _ in range(2):
                path, body, _ = await receiver.got.get()
                assert (path, body["task"]["status"]["state"]) == ("/hooks", "TASK_STATE_COMPLETED")


async def test_only_addresses_that_the_owner_allows_are_taken(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path, agents=settings("http://127.0.0.1:9")) as here, client_of(here) as client:
        here.stage.server.default = "Hello."
        task = (await sent(client, "Hi", "m1"))[0].task.id
        for url in ("http://127.0.0.1:9/hook", "http://127.0.0.1:9/hooks/../x", "http://localhost:9/hooks"):
            with pytest.raises(InvalidParamsError, match="does not allow"):
                await client.create_task_push_notification_config(a2a.TaskPushNotificationConfig(task_id=task, url=url))
        asked = request("Hi", "m2")
        asked.configuration.task_push_notification_config.url = "http://127.0.0.1:9"
        with pytest.raises(InvalidParamsError):
            await anext(client.send_message(asked))
        assert await here.asked() == ["Hi"]  # it was refused before it was sent


async def test_without_allowed_addresses_the_card_says_that_there_are_none(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path) as here, client_of(here) as client:
        here.stage.server.default = "Hello."
        card = await client.get_extended_agent_card(a2a.GetExtendedAgentCardRequest())
        assert not card.capabilities.push_notifications
        task = (await sent(client, "Hi", "m1"))[0].task.id
        with pytest.raises(PushNotificationNotSupportedError):
            await client.create_task_push_notification_config(
                a2a.TaskPushNotificationConfig(task_id=task, url="http://127.0.0.1:9")
            )


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org.evil.example/hooks",
        "https://example.org@evil.example/hooks",
        "https://example.org:444/hooks",
        "http://example.org/hooks",
        "https://example.org/hooksmore",
        "https://example.org/hooks/%2e%2e/admin",
        "https://example.org\\@evil.example/hooks",
        "https://example.org/hooks/\n",
        "file:///hooks",
        "",
    ],
)
def test_an_address_that_only_looks_allowed_is_not(url: str) -> None:
    assert not is_allowed(url, ["https://example.org/hooks"])
    assert is_allowed("https://example.org:443/hooks/a?b=c", ["https://example.org/hooks"])


async def test_a_program_cannot_reach_the_configs_of_tasks_that_it_did_not_start(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path, agents=settings("http://127.0.0.1:9")) as here, client_of(here) as owner:
        here.stage.server.default = "Hello."
        task = (await sent(owner, "Hi", "m1"))[0].task.id
        config = a2a.TaskPushNotificationConfig(task_id=task, id="one", url="http://127.0.0.1:9/hooks", token="secret")
        await owner.create_task_push_notification_config(config)
        token = await here.make_key("other", agents=["ada"], doors=["a2a"])
        async with client_of(here, token=token) as other:
            with pytest.raises(TaskNotFoundError):
                await other.get_task_push_notification_config(
                    a2a.GetTaskPushNotificationConfigRequest(task_id=task, id="one")
                )
            with pytest.raises(TaskNotFoundError):
                await other.list_task_push_notification_configs(
                    a2a.ListTaskPushNotificationConfigsRequest(task_id=task)
                )
            with pytest.raises(TaskNotFoundError):
                await other.delete_task_push_notification_config(
                    a2a.DeleteTaskPushNotificationConfigRequest(task_id=task, id="one")
                )
            with pytest.raises(TaskNotFoundError):
                await other.create_task_push_notification_config(config)
        listed = await owner.list_task_push_notification_configs(
            a2a.ListTaskPushNotificationConfigsRequest(task_id=task)
        )
        assert [one.id for one in listed.configs] == ["one"]
