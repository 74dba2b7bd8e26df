"""Agent directory: agents by capability."""

from __future__ import annotations

import pytest

from coterie.agents import Profile
from coterie.errors import Refused
from coterie.llm.config import ServiceRegistry, SizeLimits
from coterie.llm.learned_limits import type_limit
from coterie.llm.service import UnknownService

from .harness import PNG, Harness, description, parts_of, service, user_request


def harness() -> Harness:
    return Harness(
        service("plain", [], gives=["text"]),
        service("seeing", ["vision"], limits=SizeLimits(image=100_000)),
        service("painting", [], gives=["text", "vision", "tool_calling"]),
        agents={"ada": None, "seer": "seeing", "grace": "plain", "argus": "seeing", "pablo": "painting"},
    )


async def test_agents_can_be_queried_by_capability() -> None:
    """003-4.1, 003-4.2"""
    directory = harness().directory

    assert await directory.with_capability("vision") == ["seer", "argus"]
    assert await directory.with_capability("text") == ["ada", "seer", "grace", "argus", "pablo"]
    assert await directory.with_capability("audio") == []
    assert await directory.with_capability("telepathy") == []


async def test_input_and_output_capabilities_are_queried_separately() -> None:
    """003-6.4"""
    directory = harness().directory

    assert await directory.with_capability("vision", "output") == ["pablo"]
    assert await directory.with_capability("tool_calling", "input") == ["seer", "argus", "pablo"]


async def test_a_terminated_agent_is_not_found() -> None:
    directory = harness().directory
    directory.mark_terminated("seer")

    assert await directory.with_capability("vision") == ["argus"]
    with pytest.raises(Refused, match="seer"):
        directory.capabilities_of("seer")


async def test_an_agent_added_while_it_runs_is_found() -> None:
    directory = harness().directory
    directory.add(Profile(id="newcomer", service="seeing"))

    assert "newcomer" in await directory.with_capability("vision")


def test_an_agent_without_a_service_of_its_own_uses_the_first() -> None:
    assert harness().directory.service_of("ada").id == "plain"


async def test_an_agent_with_an_unknown_service_does_not_affect_others() -> None:
    here = harness()
    here.directory.add(Profile(id="lost", service="nowhere"))

    assert "lost" not in await here.directory.with_capability("text")
    with pytest.raises(UnknownService, match="nowhere"):
        here.directory.capabilities_of("lost")


async def test_without_any_service_no_agent_has_a_capability() -> None:
    here = Harness(agents={"ada": None})

    assert await here.directory.with_capability("text") == []
    with pytest.raises(UnknownService):
        here.directory.service_of("ada")


async def test_a_reload_changes_the_agents_with_vision() -> None:
    here = harness()
    here.services.replace_with(ServiceRegistry([service("plain", ["vision"]), service("seeing", [])]))

    assert await here.directory.with_capability("vision") == ["ada", "grace"]


async def test_readers_of_a_file_are_the_agents_whose_limit_admits_its_size() -> None:
    """003-4.4"""
    directory = harness().directory

    assert await directory.readers_of("image", 100_000) == ["seer", "argus"]
    assert await directory.readers_of("image", 100_001) == []
    assert await directory.readers_of("file", 1) == []


async def test_an_agent_whose_service_refused_the_type_of_a_file_is_no_reader_of_it() -> None:
    here = harness()
    entry = here.directory.service_of("seer")
    here.learned_limits.record(entry, type_limit("vision", "image/gif"), "no moving pictures")

    assert "seer" not in await here.directory.readers_of("image", 1, "image/gif")
    assert "seer" in await here.directory.readers_of("image", 1, "image/png")


async def test_a_learned_limit_removes_the_agent_from_the_directory() -> None:
    here = harness()
    here.learned_limits.record(here.services.get("seeing"), "vision", "no images here")

    assert await here.directory.with_capability("vision") == []
    assert "vision" not in here.directory.capabilities_of("seer").input


async def test_descriptions_and_queries_name_the_same_agents() -> None:
    """003-4.4"""
    here = harness()
    [part] = parts_of(await here.fit(user_request(here.artifacts.keep(PNG, "a.png")), "plain", agent_id="ada"))

    assert description(part)["capableAgents"] == await here.directory.with_capability("vision")
