"""What a page is told of tool runs and of trouble."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from coterie.clock import SystemClock
from coterie.testing import Calls, Says
from coterie.testing.replies import Status
from coterie.web.sse import Hub
from tests.agent.stage import Stage, stage

from .test_stream import Ear, listening


@asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[tuple[Stage, Ear]]:
    async with stage(folder) as here:
        hub = Hub(here.society, here.society.live, SystemClock())
        async with listening(hub) as ear:
            yield here, ear
        await hub.shut(0)


async def test_an_agent_is_told_with_its_role_its_parent_and_what_is_unread(tmp_path: Path) -> None:
    made = (
        Calls("create_role", {"name": "scout", "prompt": "You look around."}),
        Calls("spawn_agent", {"role": "scout", "id": "sam", "name": "Sam"}),
    )
    async with watched(tmp_path) as (here, ear):
        here.server.script(Says(calls=made), "done")
        await here.say("go")
        sam = (await ear.next("agent.upsert")).data
        await here.heard()
        hub = Hub(here.society, here.society.live, SystemClock())
        async with listening(hub, f"{hub.epoch}.0") as again:
            while (ada := (await again.next("agent.upsert")).data)["id"] != "ada":
                pass
        await hub.shut(0)

    assert (sam["id"], sam["name"], sam["role"], sam["parent"], sam["unread"]) == ("sam", "Sam", "scout", "ada", 0)
    assert sam["capabilities"] == {"input": ["text"], "output": ["text"], "inferred": True}
    assert (ada["role"], ada["unread"]) == (None, 1)


async def test_a_tool_run_is_told_when_it_begins_and_when_it_ends(tmp_path: Path) -> None:
    async with watched(tmp_path) as (here, ear):
        here.server.script(Says(calls=(Calls("ring", {"name": "bell"}),)), "done")
        await here.say("go")
        started, ended = await ear.next("tool.started"), await ear.next("tool.ended")

    assert (started.data["agent"], started.data["name"], started.data["args"]) == ("ada", "ring", '{"name":"bell"}')
    assert started.data["startedAt"] and started.data["callId"] == ended.data["callId"]
    assert ended.data["ok"] is True and ended.data["ms"] >= 0
    assert not {"artifactRef", "error"} & ended.data.keys()


async def test_a_result_that_was_too_long_is_told_with_the_artifact_that_has_all_of_it(tmp_path: Path) -> None:
    async with watched(tmp_path) as (here, ear):
        here.server.script(Says(calls=(Calls("ring", {"name": "x" * 200_000}),)), "done")
        await here.say("go")
        ref = (await ear.next("tool.ended")).data["artifactRef"]
        (artifact,) = (await here.society.store.artifacts([ref])).values()

    assert artifact.size == len("x" * 200_000 + " rang")


async def test_a_tool_that_fails_is_told_with_the_reason(tmp_path: Path) -> None:
    async with watched(tmp_path) as (here, ear):
        here.server.script(Says(calls=(Calls("ring", {"nome": "bell"}),)), "done")
        await here.say("go")
        ended = await ear.next("tool.ended")

    assert (ended.data["ok"], ended.data["state"]) == (False, "failed")
    assert "bad_arguments" in ended.data["error"]


async def test_trouble_with_a_model_is_told_with_its_kind_and_whether_it_passes(tmp_path: Path) -> None:
    async with watched(tmp_path) as (here, ear):
        here.server.script(Status(401))
        await here.say("go")
        told = await ear.next("problem")

    assert (told.data["agent"], told.data["category"], told.data["retryable"]) == ("ada", "auth", False)
    assert told.data["message"]
