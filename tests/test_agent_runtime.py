"""Agents that the person creates, stops and terminates while the society runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from coterie import Refused, Society
from coterie.errors import CoterieError
from coterie.messages import MAX_PAYLOAD_BYTES
from coterie.testing import Calls, Says
from coterie.testing.model_faults import stall
from coterie.testing.model_server import CustomReply, ServerConnection
from tests.agent.stage import stage
from tests.faults.harness import scaled_timeout


async def refused(call: Any) -> tuple[str, int]:
    with pytest.raises(Refused) as refusal:
        await call
    return refusal.value.code, refusal.value.status


async def test_an_agent_made_by_the_person_answers_and_is_still_there_after_a_restart(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        made = await here.society.create_agent(
            id="zoe", name=" Zoe ", prompt="You draw.", service="main", tools=["look"], parent="ada"
        )
        assert (made.id, made.name, made.parent) == ("zoe", "Zoe", "ada")
        await here.say("hello", to="zoe")
        assert await here.texts() == ["ok"]
        await here.society.stop()
        async with Society.open(tmp_path) as again:
            here.society = again
            assert again.agents.profile("zoe") == made
            await here.say("again", to="zoe")
            assert await here.texts(2) == ["ok", "ok"]
            asked = here.server.requests[-1].body
            assert "You draw." in asked["messages"][0]["content"]
            offered = {tool["function"]["name"] for tool in asked["tools"]}
            assert {"send_message", "look"} <= offered and "ring" not in offered


async def test_a_missing_id_is_generated_and_a_missing_name_is_the_id(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        first, second = await here.society.create_agent(), await here.society.create_agent(name="Sam")
        assert first.id != second.id and first.name == first.id and second.name == "Sam"


async def test_an_invalid_agent_is_refused_with_its_code_and_nothing_is_created(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        create = here.society.create_agent
        await here.society.terminate_agent("bob")
        assert await refused(create(id="ada")) == ("id_taken", 409)
        assert await refused(create(id="bob")) == ("id_taken", 409)
        assert await refused(create(id="user")) == ("payload_invalid", 422)
        assert await refused(create(id="No Way")) == ("payload_invalid", 422)
        assert await refused(create(service="nowhere")) == ("unknown_service", 404)
        assert await refused(create(parent="nobody")) == ("unknown_agent", 404)
        assert await refused(create(parent="bob")) == ("recipient_terminated", 410)
        assert [agent.id for agent in await here.society.store.agents()] == ["ada", "bob", "user"]


async def test_of_two_concurrent_creations_with_one_id_one_succeeds(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        both = await asyncio.gather(
            here.society.create_agent(id="zoe", prompt="one"),
            here.society.create_agent(id="zoe", prompt="two"),
            return_exceptions=True,
        )
        assert [getattr(one, "code", "made") for one in both] == ["made", "id_taken"]
        assert here.society.agents.profile("zoe").prompt == "one"


async def test_terminating_an_agent_ends_its_children_and_its_turn(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        await here.society.create_agent(id="child", parent="ada")
        await here.society.create_agent(id="grandchild", parent="child")
        here.server.script(stall())
        await here.say("hello", to="child")
        await here.server.wait_for_request()
        assert await here.society.terminate_agent("ada") == ["grandchild", "child", "ada"]
        for gone in ("ada", "child", "grandchild"):
            stored = await here.society.store.agent(gone)
            assert stored is not None and stored.state == "terminated"
            assert await refused(here.society.terminate_agent(gone)) == ("recipient_terminated", 410)
            assert await refused(here.society.send(to=gone, text="hello?")) == ("recipient_terminated", 410)
        assert list(here.society.agents) == ["bob"]
        await asyncio.wait_for(here.society.stop(), scaled_timeout(10))  # there is no turn left to wait for


async def test_an_agent_that_terminates_its_child_ends_the_request_of_the_child(tmp_path: Path) -> None:
    closed = asyncio.Event()

    async def silent(wire: ServerConnection) -> None:
        await wire.wait_for_close()
        closed.set()

    async with stage(tmp_path) as here:
        await here.society.create_agent(id="child", parent="ada")
        here.server.script(CustomReply(silent), Says(calls=(Calls("terminate_agent", {"id": "child"}),)), "done")
        await here.say("hello", to="child")
        await here.server.wait_for_request()
        await here.say("end your child")
        async with asyncio.timeout(scaled_timeout(10)):
            await closed.wait()


async def test_a_terminated_agent_of_the_file_stays_terminated_after_a_restart(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        await here.society.terminate_agent("bob")
    async with Society.open(tmp_path) as society:
        assert list(society.agents) == ["ada"]
        with pytest.raises(Refused) as refusal:
            society.stop_turn("bob")
        assert refusal.value.code == "recipient_terminated"


async def test_an_agent_removed_from_the_file_can_be_terminated(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        (tmp_path / "coterie.toml").write_text("[agents.ada]\n")
        await here.society.reload()
        assert await here.society.terminate_agent("bob") == ["bob"]


async def test_stop_pause_and_resume_refuse_unknown_and_terminated_agents(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        society = here.society
        await society.terminate_agent("bob")
        for act in (society.pause, society.resume, society.terminate_agent):
            assert await refused(act("nobody")) == ("unknown_agent", 404)
            assert await refused(act("user")) == ("unknown_agent", 404)
            assert await refused(act("bob")) == ("recipient_terminated", 410)
        for agent, code in (("nobody", "unknown_agent"), ("user", "unknown_agent"), ("bob", "recipient_terminated")):
            with pytest.raises(Refused) as refusal:
                society.stop_turn(agent)
            assert refusal.value.code == code
        assert society.stop_turn("ada") is False


async def test_an_agent_may_not_terminate_an_agent_of_the_person(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        await here.society.create_agent(id="zoe")
        here.server.script(Says(calls=(Calls("terminate_agent", {"id": "zoe"}),)), "I could not")
        await here.say("end zoe")
        assert await here.texts() == ["I could not"]
        assert "not_yours" in here.server.requests[-1].body["messages"][-1]["content"]
        stored = await here.society.store.agent("zoe")
        assert stored is not None and stored.state == "idle"


async def test_a_society_opened_without_agents_raises_a_clear_error(tmp_path: Path) -> None:
    async with Society.open(tmp_path, work=False) as society:
        for call in (society.create_agent(), society.reload(), society.terminate_agent("assistant")):
            with pytest.raises(CoterieError, match="work=False"):
                await call
        with pytest.raises(CoterieError, match="work=False"):
            _ = society.setup


CONTEXT_TOOL = """
from coterie import ToolContext, tool
from coterie.llm.config import ServiceEntry
from coterie.llm.service import Attachment, ModelRequest, UserMessage

@tool
async def examine(ref: str, *, ctx: ToolContext) -> dict:
    blind = ServiceEntry(id="blind", base_url="http://127.0.0.1:1/v1", model="m")
    picture = Attachment(artifact_ref=ref, type="image", filename="a.png", mime_type="image/png", size=1)
    fitted = await ctx.router.fit(ModelRequest(messages=(UserMessage((picture,)),)), blind, agent_id=ctx.agent_id)
    return {
        "agent": ctx.agent_id,
        "input": sorted(ctx.capabilities.input),
        "output": sorted(ctx.capabilities.output),
        "fitted": fitted.messages[0].parts[0].text,
    }
"""


async def test_a_tool_finds_its_agents_capabilities_and_the_societys_router_in_its_context(tmp_path: Path) -> None:
    """003-4.3, 003-6.3"""
    capabilities = {"input": ["text", "vision"], "output": ["text", "tool_calling"]}
    async with stage(tmp_path, tools=CONTEXT_TOOL, capabilities=capabilities) as here:
        picture = await here.society.artifacts.put(b"\x89PNG\r\n\x1a\n" + bytes(100), "a.png")
        here.server.script(Says(calls=(Calls("examine", {"ref": picture.ref}),)), "done")
        await here.say("look")
        await here.texts()
        result = json.loads(here.server.requests[1].body["messages"][-1]["content"])

    assert (result["agent"], result["input"], result["output"]) == ("ada", ["text", "vision"], ["text", "tool_calling"])
    described = json.loads(result["fitted"])["attachment"]
    assert (described["artifactRef"], described["capableAgents"]) == (picture.ref, ["bob"])


REMINDERS = """
from coterie import Refused, ToolContext, tool

async def remind(name, ctx):
    try:
        await ctx.send(ctx.agent_id, {"text": "x"}, every="now and then")
    except Refused as refusal:
        receipt = await ctx.send("bob", {"text": name}, every="weekdays 08:00", time_zone="Europe/Berlin")
        return {"refused": refusal.code} | receipt.to_dict()

@tool
async def remind_here(*, ctx: ToolContext) -> dict:
    return await remind("here", ctx)

@tool(process=True)
async def remind_in_a_process(*, ctx: ToolContext) -> dict:
    return await remind("in a process", ctx)
"""


@pytest.mark.parametrize(("tool", "text"), [("remind_here", "here"), ("remind_in_a_process", "in a process")])
async def test_a_tool_sends_recurring_messages(tmp_path: Path, tool: str, text: str) -> None:
    async with stage(tmp_path, tools=REMINDERS) as here:
        here.server.script(Says(calls=(Calls(tool, {}),)), "done")
        await here.say("remind bob")
        await here.texts()
        result = json.loads(here.server.requests[1].body["messages"][-1]["content"])
        (schedule,) = await here.society.store.schedules()

    assert (result["refused"], result["state"], result["scheduleId"]) == ("every_invalid", "delayed", schedule.id)
    assert (schedule.sender, schedule.to, schedule.payload) == ("ada", "bob", {"text": text})
    assert schedule.every == "weekdays 08:00 Europe/Berlin"


async def test_a_spawned_agent_is_named_although_its_task_could_not_be_sent(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.server.script(
            Says(calls=(Calls("create_role", {"name": "helper", "prompt": "You help."}),)),
            Says(calls=(Calls("spawn_agent", {"role": "helper", "id": "zoe", "task": "x" * (MAX_PAYLOAD_BYTES + 1)}),)),
            "done",
        )
        await here.say("get help")
        await here.heard()
        _, spawned = [json.loads(row.text) for row in await here.society.store.history("ada") if row.role == "tool"]

        assert "zoe" in list(here.society.agents)
        assert spawned["id"] == "zoe" and spawned["taskNotSent"]["error"] == "payload_too_large"


async def test_no_agent_is_made_below_an_agent_that_is_terminated_meanwhile(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        society = here.society
        for number in range(5):
            top, below = f"top{number}", f"below{number}"
            await society.create_agent(id=top)
            await asyncio.gather(
                society.terminate_agent(top), society.create_agent(id=below, parent=top), return_exceptions=True
            )
            made = await society.store.agent(below)
            assert made is None or made.state == "terminated"
