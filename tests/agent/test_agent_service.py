"""Agent service: roles, spawning, limits and termination."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie import Society
from coterie.agent.service import MAX_CHILDREN, AgentDirectory, AgentService
from coterie.agents import Profile
from coterie.errors import Refused
from coterie.llm.config import ServiceEntry, ServiceRegistry
from coterie.llm.service import UnknownService
from coterie.store import Store
from coterie.testing import Calls, Says
from coterie.testing.model_server import CustomReply, Reply
from tests.agent.held_answer import HeldAnswer
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


async def test_a_spawned_agent_has_the_prompt_of_its_role_and_a_parent(
    service: AgentService, directory: AgentDirectory, store: Store
) -> None:
    made = await service.spawn("ada", "scout", name="Scout", key="k1")
    assert (made.prompt, made.parent, directory.profile(made.id)) == ("You look around.", "ada", made)
    stored = await store.agent(made.id)
    assert stored is not None and (stored.name, stored.parent, stored.state) == ("Scout", "ada", "idle")


async def test_a_repeated_spawn_creates_one_agent(service: AgentService, store: Store) -> None:
    first = await service.spawn("ada", "scout", key="k1")
    assert await service.spawn("ada", "scout", key="k1") == first
    named = await service.spawn("ada", "scout", id="sam", key="k2")
    assert await service.spawn("ada", "scout", id="sam", key="k2") == named
    assert len(await store.agents()) == 5


async def test_an_id_in_use_an_invalid_id_and_an_unknown_role_are_refused(service: AgentService) -> None:
    assert await code(service.spawn("ada", "scout", id="bob", key="k")) == "id_taken"
    assert await code(service.spawn("ada", "scout", id="user", key="k")) == "payload_invalid"
    assert await code(service.spawn("ada", "scout", id="No Way", key="k")) == "payload_invalid"
    assert await code(service.spawn("ada", "scuot", key="k")) == "unknown_role"
    assert await code(service.create_role("Bad Name", "x")) == "payload_invalid"
    with pytest.raises(UnknownService):
        await service.create_role("fine", "x", service="nowhere")


async def test_only_the_parent_terminates_an_agent_and_its_descendants_with_it(
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


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)  # the limit does not depend on the engine
async def test_the_number_of_children_is_limited(service: AgentService) -> None:
    for n in range(MAX_CHILDREN):
        await service.spawn("ada", "scout", key=str(n))
    assert await code(service.spawn("ada", "scout", key="one more")) == "too_many_children"
    await service.spawn("bob", "scout", key="bob's first")


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)  # the limit does not depend on the engine
async def test_the_number_of_descendants_is_limited(service: AgentService, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 30
    monkeypatch.setattr("coterie.agent.service.MAX_DESCENDANTS", most)
    family = ["ada"]
    for parent in family:
        if len(family) > most:
            break
        family += [(await service.spawn(parent, "scout", key=f"{parent}/{n}")).id for n in range(2)]

    assert len(family) == most + 1
    assert {await code(service.spawn(one, "scout", key=f"{one}/more")) for one in family[-3:]} == {"too_many_children"}
    await service.spawn("bob", "scout", key="bob's first")


async def test_an_agent_spawned_with_a_tool_exists_after_a_restart(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        role = Calls("create_role", {"name": "scout", "prompt": "You look around."})
        spawn = Calls("spawn_agent", {"role": "scout", "id": "sam", "task": "what do you see?"})
        ada: list[Reply] = [Says(calls=(role, spawn)), "I sent a scout", "the scout sees a tree"]
        seen = HeldAnswer("a", " tree")
        here.server.default = each(ada=ada, sam=[CustomReply(seen.stream), "still a tree"])
        await here.say("look around")
        assert await here.texts() == ["I sent a scout"]
        seen.may_end.set()
        assert await here.texts(2) == ["I sent a scout", "the scout sees a tree"]
        assert await here.history("sam") == [("user", "what do you see?"), ("assistant", "a tree")]
        prompts = [json.dumps(request.body["messages"][0]) for request in here.server.requests]
        assert any("You look around." in prompt and "(id: sam)" in prompt for prompt in prompts)
        await here.society.stop()
        async with Society.open(tmp_path) as again:
            here.society = again
            await here.say("still there?", to="sam")
            assert (await here.texts(3))[-1] == "still a tree"


async def test_an_agent_has_the_description_of_its_role_unless_its_maker_gives_another(
    service: AgentService, directory: AgentDirectory
) -> None:
    await service.create_role("guard", "You watch.", description="Watches\nthe door.")
    first = await service.spawn("ada", "guard", key="1")
    second = await service.spawn("ada", "guard", description="Watches the roof.", key="2")
    await service.refresh_directory()  # as after a restart
    assert [directory.description_of(agent.id) for agent in (first, second)] == [
        "Watches the door.",
        "Watches the roof.",
    ]
    assert await code(service.create_role("wordy", "x", description="x" * 501)) == "payload_invalid"
    assert await code(service.spawn("ada", "guard", description="x" * 501, key="3")) == "payload_invalid"
