"""Payloads of events about agents, tool runs and problems."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from coterie.clock import SystemClock
from coterie.testing import Calls, Says, model_faults
from coterie.testing.model_server import Status
from coterie.web.sse import Hub
from tests.agent.stage import Stage, stage

from .test_stream import StreamReader, listening


@asynccontextmanager
async def watched(folder: Path, **entry: Any) -> AsyncIterator[tuple[Stage, StreamReader]]:
    async with stage(folder, **entry) as here:
        hub = Hub(here.society, here.society.live, SystemClock())
        async with listening(hub) as reader:
            yield here, reader
        await hub.shut_down(0)


async def test_agent_upsert_has_role_parent_and_unread(tmp_path: Path) -> None:
    made = (
        Calls("create_role", {"name": "scout", "prompt": "You look around."}),
        Calls("spawn_agent", {"role": "scout", "id": "sam", "name": "Sam"}),
    )
    async with watched(tmp_path) as (here, reader):
        here.server.script(Says(calls=made), "done")
        await here.say("go")
        sam = (await reader.next("agent.upsert")).data
        await here.heard()
        hub = Hub(here.society, here.society.live, SystemClock())
        async with listening(hub, f"{hub.epoch}.0") as again:
            while (ada := (await again.next("agent.upsert")).data)["id"] != "ada":
                pass
        await hub.shut_down(0)

    assert (sam["id"], sam["name"], sam["role"], sam["parent"], sam["unread"]) == ("sam", "Sam", "scout", "ada", 0)
    assert sam["capabilities"] == {"input": ["text"], "output": ["text"], "inferred": True}
    assert (ada["role"], ada["unread"]) == (None, 1)


async def test_a_tool_run_has_events_when_it_starts_and_ends(tmp_path: Path) -> None:
    async with watched(tmp_path) as (here, reader):
        here.server.script(Says(calls=(Calls("ring", {"name": "bell"}),)), "done")
        await here.say("go")
        started, ended = await reader.next("tool.started"), await reader.next("tool.ended")

    assert (started.data["agent"], started.data["name"], started.data["args"]) == ("ada", "ring", '{"name":"bell"}')
    assert started.data["startedAt"] and started.data["callId"] == ended.data["callId"]
    assert ended.data["ok"] is True and ended.data["ms"] >= 0
    assert not {"artifactRef", "error"} & ended.data.keys()


async def test_tool_ended_names_the_artifact_of_a_long_result(tmp_path: Path) -> None:
    async with watched(tmp_path) as (here, reader):
        here.server.script(Says(calls=(Calls("ring", {"name": "x" * 200_000}),)), "done")
        await here.say("go")
        ref = (await reader.next("tool.ended")).data["artifactRef"]
        (artifact,) = (await here.society.store.artifacts([ref])).values()

    assert artifact.size == len("x" * 200_000 + " rang")


async def test_tool_ended_has_the_error_of_a_failed_call(tmp_path: Path) -> None:
    async with watched(tmp_path) as (here, reader):
        here.server.script(Says(calls=(Calls("ring", {"nome": "bell"}),)), "done")
        await here.say("go")
        ended = await reader.next("tool.ended")

    assert (ended.data["ok"], ended.data["state"]) == (False, "failed")
    assert "bad_arguments" in ended.data["error"]


async def test_a_problem_event_has_category_and_retryable(tmp_path: Path) -> None:
    async with watched(tmp_path) as (here, reader):
        here.server.script(Status(401))
        await here.say("go")
        event = await reader.next("problem")

    assert (event.data["agent"], event.data["category"], event.data["retryable"]) == ("ada", "auth", False)
    assert event.data["message"]


async def test_the_problem_of_a_silent_model_is_a_timeout(tmp_path: Path) -> None:
    async with watched(tmp_path, timeout=300) as (here, reader):
        here.server.script(model_faults.stall())
        await here.say("go")
        event = await reader.next("problem")

    assert (event.data["category"], event.data["retryable"]) == ("timeout", True)
    assert "fell silent for 0.3 s" in event.data["message"]
