"""Rights of agents: tools, roles and services. A child has no right that its parent does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie import Society
from coterie.agent.service import AgentDirectory, AgentService
from coterie.agents import Agent, Profile
from coterie.errors import Refused
from coterie.llm.config import ServiceEntry, ServiceRegistry
from coterie.store import Store
from coterie.stores.sql.store import SqlStore
from coterie.testing import Calls, Says
from coterie.testing.model_server import CustomReply, ReceivedRequest, Reply
from tests.agent.held_answer import HeldAnswer
from tests.agent.stage import Bell, Stage, each, stage
from tests.llm.harness import Harness

BUILT_IN = {
    "send_message", "list_agents", "find_agents", "list_delayed", "withdraw_message", "put_artifact", "read_artifact",
    "list_artifacts", "create_role", "spawn_agent", "terminate_agent",
}  # fmt: skip
PARENT = '[agents.ada]\ntools = ["look", "create_role", "spawn_agent"]\n[agents.bob]\n'


def offered(request: ReceivedRequest) -> set[str]:
    return {tool["function"]["name"] for tool in request.body["tools"]}


def asked_by(here: Stage, agent: str) -> list[ReceivedRequest]:
    return [one for one in here.server.requests if f"(id: {agent})" in one.body["messages"][0]["content"]]


def results(request: ReceivedRequest) -> list[str]:
    return [message["content"] for message in request.body["messages"] if message["role"] == "tool"]


async def test_a_child_has_no_tool_that_its_parent_may_not_use(tmp_path: Path) -> None:
    async with stage(tmp_path, agents=PARENT) as here:
        role = Calls("create_role", {"name": "all", "prompt": "x", "tools": ["*"]})
        spawn = Calls("spawn_agent", {"role": "all", "id": "kid", "task": "go"})
        tries = Says(calls=(Calls("ring", {"name": "forbidden"}), Calls("look", {"name": "allowed"})))
        here.server.default = each(ada=[Says(calls=(role, spawn)), "made", "heard"], kid=[tries, "done"])
        await here.say("go")
        await here.texts(2)
        first, second = asked_by(here, "kid")
        assert offered(first) == BUILT_IN | {"look"}
        assert Bell.rings == ["allowed"]
        assert "unknown_tool" in results(second)[0]


async def test_an_empty_list_of_tools_leaves_only_send_message(tmp_path: Path) -> None:
    async with stage(tmp_path, agents="[agents.ada]\n[agents.eve]\ntools = []\n") as here:
        role = Calls("create_role", {"name": "toolless", "prompt": "x", "tools": []})
        spawn = Calls("spawn_agent", {"role": "toolless", "id": "kid", "task": "go"})
        done = HeldAnswer()
        kid: list[Reply] = [CustomReply(done.stream)]
        here.server.default = each(
            ada=[Says(calls=(role, spawn)), "made", "heard"], kid=kid, eve=["hello"], web=["hello"]
        )
        await here.society.create_agent(id="web", prompt="x", tools=[])
        await here.say("go")
        await here.say("go", to="eve")
        await here.say("go", to="web")
        await here.texts(3)
        done.may_end.set()
        await here.texts(4)
        assert {name: offered(asked_by(here, name)[0]) for name in ("kid", "eve", "web")} == {
            name: {"send_message"} for name in ("kid", "eve", "web")
        }


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["*"], BUILT_IN | {"look", "ring", "dangerous"}),
        (["look", "files__*"], BUILT_IN | {"look"}),
        (["look", "!spawn_agent", "!*_role"], BUILT_IN - {"spawn_agent", "create_role"} | {"look"}),
        (["!ring"], BUILT_IN | {"look", "dangerous"}),
        (["*", "!send_message"], BUILT_IN - {"send_message"} | {"look", "ring", "dangerous"}),
        (["!*", "look"], set()),
    ],
)
async def test_built_in_tools_stay_unless_a_list_excludes_them(
    tmp_path: Path, patterns: list[str], expected: set[str]
) -> None:
    async with stage(tmp_path, agents=f"[agents.ada]\ntools = {json.dumps(patterns)}\n") as here:
        here.server.default = each(ada=["hello"])
        await here.say("go")
        await here.texts(1)
        tools = here.server.requests[0].body.get("tools", [])
        assert {tool["function"]["name"] for tool in tools} == expected


async def test_an_excluded_tool_cannot_be_called_by_the_agent_or_its_children(tmp_path: Path) -> None:
    async with stage(tmp_path, agents='[agents.ada]\ntools = ["*", "!send_message", "!put_artifact"]\n') as here:
        role = Calls("create_role", {"name": "any", "prompt": "x", "tools": ["*"]})
        spawn = Calls("spawn_agent", {"role": "any", "id": "kid", "task": "go"})
        send = Calls("send_message", {"to": "user", "payload": {"text": "out"}})
        put = Calls("put_artifact", {"filename": "a.txt", "text": "x"})
        tries = Says(calls=(send, put))
        made = Says(calls=(role, spawn))
        here.server.default = each(ada=[tries, "done", made, "made", "heard"], kid=[tries, "done"])
        await here.say("go")
        await here.texts(1)
        await here.say("spawn")

        async def has_tried() -> bool:
            return len(asked_by(here, "kid")) == 2

        await here.until(has_tried)
        for agent in ("ada", "kid"):
            refused = results(asked_by(here, agent)[1])
            assert len(refused) == 2 and all("unknown_tool" in result for result in refused)
        assert "put_artifact" not in offered(asked_by(here, "kid")[0])


async def test_the_rights_of_a_child_follow_its_parent_over_reload_and_restart(tmp_path: Path) -> None:
    async with stage(tmp_path, agents='[agents.ada]\ntools = ["look", "ring", "create_role", "spawn_agent"]\n') as here:
        role = Calls("create_role", {"name": "any", "prompt": "x"})
        spawn = Calls("spawn_agent", {"role": "any", "id": "kid"})
        ring = Says(calls=(Calls("ring", {"name": "ding"}),))
        here.server.default = each(ada=[Says(calls=(role, spawn)), "made"], kid=[ring, "one", "two"])
        await here.say("go")
        await here.texts(1)
        await here.say("ring", to="kid")
        await here.texts(2)
        assert Bell.rings == ["ding"]

        (tmp_path / "coterie.toml").write_text('[agents.ada]\ntools = ["look"]\n')
        await here.society.reload()
        await here.say("again", to="kid")
        await here.texts(3)
        assert offered(asked_by(here, "kid")[-1]) == BUILT_IN | {"look"}

        await here.society.stop()
        (tmp_path / "coterie.toml").write_text("[agents.bob]\n")
        async with Society.open(tmp_path) as again:
            here.society = again
            await here.say("alone", to="kid")
            assert "ada, which made this agent, is no longer described" in (await here.texts(4))[-1]
            assert len(asked_by(here, "kid")) == 3


async def test_a_right_removed_during_a_plan_does_not_apply_to_its_next_call(tmp_path: Path) -> None:
    agents = '[agents.ada]\ntools = ["look", "ring", "create_role", "spawn_agent"]\n'
    async with stage(tmp_path, agents=agents) as here:
        Bell.may_end.clear()
        role = Calls("create_role", {"name": "any", "prompt": "x"})
        spawn = Calls("spawn_agent", {"role": "any", "id": "kid"})
        both = Says(calls=(Calls("look", {"name": "first"}), Calls("ring", {"name": "second"})))
        here.server.default = each(ada=[Says(calls=(role, spawn)), "made"], kid=[both, "done"])
        await here.say("go")
        await here.texts(1)
        await here.say("both", to="kid")
        await Bell.rang.wait()
        (tmp_path / "coterie.toml").write_text('[agents.ada]\ntools = ["look"]\n')
        await here.society.reload()
        Bell.may_end.set()
        await here.texts(2)
        assert Bell.rings == ["first"]


# Roles and services


ENTRIES = [ServiceEntry(id=name, base_url="http://127.0.0.1:9", model="m") for name in ("main", "dear", "cheap")]


@pytest.fixture
def directory() -> AgentDirectory:
    people = [Profile(id="ada", tools=("a*", "create_role")), Profile(id="bob", service="cheap", services=("d*",))]
    return AgentDirectory(ServiceRegistry(ENTRIES), Harness().learned_limits, people)


@pytest.fixture
def agent_service(store: Store, directory: AgentDirectory) -> AgentService:
    return AgentService(store, directory)


async def code(call: Any) -> str:
    with pytest.raises(Refused) as refusal:
        await call
    return refusal.value.code


async def test_only_its_maker_may_change_a_role(agent_service: AgentService, store: Store) -> None:
    await agent_service.create_role("scout", "ada's", maker="ada")
    assert await code(agent_service.create_role("scout", "bob's", maker="bob")) == "role_taken"
    await agent_service.create_role("scout", "ada's second", maker="ada")
    await agent_service.create_role("guard", "the owner's")
    assert await code(agent_service.create_role("guard", "bob's", maker="bob")) == "role_taken"
    assert {name: json.loads(one.profile)["prompt"] for name, one in (await store.roles()).items()} == {
        "guard": "the owner's", "scout": "ada's second"
    }  # fmt: skip


async def test_a_role_may_be_used_by_its_maker_and_its_descendants(agent_service: AgentService) -> None:
    await agent_service.create_role("scout", "x", maker="ada")
    await agent_service.create_role("guard", "x")
    assert await code(agent_service.spawn("bob", "scout", key="1")) == "unknown_role"
    child = await agent_service.spawn("ada", "scout", key="2")
    await agent_service.spawn(child.id, "scout", key="3")
    await agent_service.spawn("bob", "guard", key="4")


async def test_a_child_uses_a_service_that_its_parent_may_use(
    agent_service: AgentService, directory: AgentDirectory
) -> None:
    await agent_service.create_role("plain", "x", maker="bob")
    child = await agent_service.spawn("bob", "plain", key="1")
    assert directory.service_of(child.id).id == "cheap"
    assert await code(agent_service.create_role("bad", "x", service="main", maker="bob")) == "service_not_allowed"
    assert await code(agent_service.create_role("bad", "x", service="dear", maker="ada")) == "service_not_allowed"
    await agent_service.create_role("good", "x", service="dear", maker=child.id)
    assert directory.service_of((await agent_service.spawn(child.id, "good", key="2")).id).id == "dear"
    await agent_service.create_role("dear", "the owner's", service="dear")
    assert await code(agent_service.spawn("ada", "dear", key="3")) == "service_not_allowed"

    directory.add(Profile(id="bob", service="cheap"))
    good = next(one for one in directory.all_profiles() if one.role == "good")
    with pytest.raises(Refused, match="may not use"):
        directory.service_of(good.id)
    assert good.id not in list(directory)


async def test_agents_stored_without_a_maker_have_the_rights_of_their_parent(
    agent_service: AgentService, directory: AgentDirectory, store: SqlStore
) -> None:
    old = {"id": "old", "name": "Old", "service": None, "prompt": "", "tools": ["*"], "parent": "ada", "role": "r"}
    by_owner = old | {"id": "own", "role": None}
    for profile in (old, by_owner):
        agent = Agent(id=str(profile["id"]), name="x", parent="ada", profile=json.dumps(profile | {"made_by": "k"}))
        await store.add_agents([agent])
    await agent_service.refresh_directory()
    assert directory.tools_of("old") == (("*",), ("a*", "create_role"))
    assert directory.tools_of("own") == (("*",),)
