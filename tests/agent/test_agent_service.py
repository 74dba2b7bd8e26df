"""Agents that make agents: roles, children, and who may end whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie import Society
from coterie.agent.service import MAX_CHILDREN, MAX_DESCENDANTS, AgentDirectory, AgentService
from coterie.agents import Profile
from coterie.errors import Refused
from coterie.llm.config import ServiceEntry, ServiceRegistry
from coterie.llm.service import UnknownService
from coterie.store import Store
from coterie.testing import Calls, Says
from coterie.testing.model_server import Reply
from tests.agent.stage import each, stage
from tests.llm.harness import Harness


@pytest.fixture
def directory() -> AgentDirectory:
    entry = ServiceEntry(id="main", base_url="http://127.0.0.1:9", model="m")
    return AgentDirectory(ServiceRegistry([entry]), Harness().learned_limits, [Profile(id="ada"), Profile(id="bob")])


@pytest.fixture
async def service(store: Store, directory: AgentDirectory) -> AgentService:
    made = AgentService(store, directory)
    await made.create_role("scout", "You look around.")
    return made


async def code(call: Any) -> str:
    with pytest.raises(Refused) as refusal:
        await call
    return refusal.value.code


async def test_a_spawned_agent_has_its_roles_prompt_and_a_parent_and_can_be_written_to(
    service: AgentService, directory: AgentDirectory, store: Store
) -> None:
    made = await service.spawn("ada", "scout", name="Scout", key="k1")
    assert (made.prompt, made.parent, directory.profile(made.id)) == ("You look around.", "ada", made)
    stored = await store.agent(made.id)
    assert stored is not None and (stored.name, stored.parent, stored.state) == ("Scout", "ada", "idle")


async def test_the_same_call_run_again_makes_no_second_agent(service: AgentService, store: Store) -> None:
    first = await service.spawn("ada", "scout", key="k1")
    assert await service.spawn("ada", "scout", key="k1") == first
    named = await service.spawn("ada", "scout", id="sam", key="k2")
    assert await service.spawn("ada", "scout", id="sam", key="k2") == named
    assert len(await store.agents()) == 5


async def test_a_taken_or_impossible_id_and_an_unknown_role_are_refused(service: AgentService) -> None:
    assert await code(service.spawn("ada", "scout", id="bob", key="k")) == "id_taken"
    assert await code(service.spawn("ada", "scout", id="user", key="k")) == "payload_invalid"
    assert await code(service.spawn("ada", "scout", id="No Way", key="k")) == "payload_invalid"
    assert await code(service.spawn("ada", "scuot", key="k")) == "unknown_role"
    assert await code(service.create_role("Bad Name", "x")) == "payload_invalid"
    with pytest.raises(UnknownService):
        await service.create_role("fine", "x", service="nowhere")


async def test_only_the_parent_or_the_person_ends_an_agent_and_its_children_go_with_it(
    service: AgentService, directory: AgentDirectory, store: Store
) -> None:
    child = await service.spawn("ada", "scout", id="child", key="1")
    grandchild = await service.spawn("child", "scout", id="grandchild", key="2")
    assert await code(service.terminate("child", by="bob")) == "not_yours"
    assert await code(service.terminate("grandchild", by="ada")) == "not_yours"
    assert await service.terminate("child", by="ada") == ["grandchild", "child"]
    for gone in (child, grandchild):
        stored = await store.agent(gone.id)
        assert stored is not None and stored.state == "terminated"
        assert gone.id not in list(directory)
    assert await code(service.terminate("child", by="ada")) == "recipient_terminated"
    assert await code(service.terminate("nobody", by="ada")) == "unknown_agent"


async def test_an_agent_cannot_make_agents_without_end(service: AgentService) -> None:
    for n in range(MAX_CHILDREN):
        await service.spawn("ada", "scout", key=str(n))
    assert await code(service.spawn("ada", "scout", key="one more")) == "too_many_children"
    await service.spawn("bob", "scout", key="bob's first")


async def test_a_family_in_which_everybody_makes_two_more_has_an_end_and_others_make_theirs(
    service: AgentService,
) -> None:
    family = ["ada"]
    for parent in family:
        if len(family) > MAX_DESCENDANTS:
            break
        family += [(await service.spawn(parent, "scout", key=f"{parent}/{n}")).id for n in range(2)]

    assert len(family) == MAX_DESCENDANTS + 1
    assert {await code(service.spawn(one, "scout", key=f"{one}/more")) for one in family[-3:]} == {"too_many_children"}
    await service.spawn("bob", "scout", key="bob's first")


async def test_through_the_tools_an_agent_makes_another_and_it_is_still_there_after_a_restart(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        role = Calls("create_role", {"name": "scout", "prompt": "You look around."})
        spawn = Calls("spawn_agent", {"role": "scout", "id": "sam", "task": "what do you see?"})
        ada: list[Reply] = [Says(calls=(role, spawn)), "I sent a scout", "the scout sees a tree"]
        here.server.default = each(ada=ada, sam=["a tree", "still a tree"])
        await here.say("look around")
        assert await here.texts(2) == ["I sent a scout", "the scout sees a tree"]
        assert await here.history("sam") == [("user", "what do you see?"), ("assistant", "a tree")]
        prompts = [json.dumps(request.body["messages"][0]) for request in here.server.requests]
        assert any("You look around." in prompt and "(id: sam)" in prompt for prompt in prompts)
        await here.society.stop()
        async with Society.open(tmp_path) as again:
            here.society = again
            await here.say("still there?", to="sam")
            assert (await here.texts(3))[-1] == "still a tree"
