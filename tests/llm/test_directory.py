"""Agents by what their models can do."""

from __future__ import annotations

import pytest

from coterie.agent.tools import ToolContext
from coterie.agents import Profile
from coterie.artifact_service import Library
from coterie.errors import Refused
from coterie.llm.config import Services, SizeLimits
from coterie.llm.service import Capabilities, UnknownService
from coterie.messages import Payload, Receipt

from .room import PNG, Room, description, parts_of, said, service


def room() -> Room:
    return Room(
        service("plain", [], gives=["text"]),
        service("seeing", ["vision"], limits=SizeLimits(image=100_000)),
        service("painting", [], gives=["text", "vision", "tool_calling"]),
        agents={"ada": None, "seer": "seeing", "grace": "plain", "argus": "seeing", "pablo": "painting"},
    )


async def test_agents_can_be_asked_for_by_capability() -> None:
    """003-4.1, 003-4.2"""
    directory = room().directory

    assert await directory.with_capability("vision") == ["seer", "argus"]
    assert await directory.with_capability("text") == ["ada", "seer", "grace", "argus", "pablo"]
    assert await directory.with_capability("audio") == []
    assert await directory.with_capability("telepathy") == []


async def test_what_an_agent_takes_and_what_it_gives_are_asked_for_apart() -> None:
    """003-6.4"""
    directory = room().directory

    assert await directory.with_capability("vision", "output") == ["pablo"]
    assert await directory.with_capability("tool_calling", "input") == ["seer", "argus", "pablo"]


async def test_a_terminated_agent_is_found_no_more() -> None:
    directory = room().directory
    directory.remove("seer")

    assert await directory.with_capability("vision") == ["argus"]
    with pytest.raises(Refused, match="seer"):
        directory.capabilities_of("seer")


async def test_an_agent_added_while_it_runs_is_found() -> None:
    directory = room().directory
    directory.add(Profile(id="newcomer", service="seeing"))

    assert "newcomer" in await directory.with_capability("vision")


def test_an_agent_without_a_service_of_its_own_uses_the_first() -> None:
    assert room().directory.service_of("ada").id == "plain"


async def test_an_agent_whose_service_does_not_exist_is_in_nobodys_way() -> None:
    here = room()
    here.directory.add(Profile(id="lost", service="nowhere"))

    assert "lost" not in await here.directory.with_capability("text")
    with pytest.raises(UnknownService, match="nowhere"):
        here.directory.capabilities_of("lost")


async def test_without_any_service_nobody_can_do_anything() -> None:
    here = Room(agents={"ada": None})

    assert await here.directory.with_capability("text") == []
    with pytest.raises(UnknownService):
        here.directory.service_of("ada")


async def test_a_reload_changes_who_can_see() -> None:
    here = room()
    here.services.adopt(Services([service("plain", ["vision"]), service("seeing", [])]))

    assert await here.directory.with_capability("vision") == ["ada", "grace"]


async def test_those_who_can_read_a_file_are_those_whose_limits_admit_it() -> None:
    """003-4.4"""
    directory = room().directory

    assert await directory.readers_of("image", 100_000) == ["seer", "argus"]
    assert await directory.readers_of("image", 100_001) == []
    assert await directory.readers_of("file", 1) == []


async def test_a_refusal_by_the_provider_counts_here_too() -> None:
    here = room()
    here.refusals.note(here.services.entry("seeing"), "vision", "no images here")

    assert await here.directory.with_capability("vision") == []
    assert "vision" not in here.directory.capabilities_of("seer").input


async def test_descriptions_and_queries_name_the_same_agents() -> None:
    """003-4.4"""
    here = room()
    [part] = parts_of(await here.fit(said(here.shelf.keep(PNG, "a.png")), "plain", reader="ada"))

    assert description(part)["capableAgents"] == await here.directory.with_capability("vision")


async def no_send(
    to: str, payload: Payload, *, delay_ms: float | None = None, quick_replies: list[str] | None = None
) -> Receipt:
    raise NotImplementedError


async def test_a_tool_finds_the_agents_capabilities_and_the_router_in_its_context() -> None:
    """003-4.3, 003-6.3"""
    here = room()
    context = ToolContext(
        agent_id="seer",
        capabilities=here.directory.capabilities_of("seer"),
        router=here.router,
        send=no_send,
        artifacts=Library(here.shelf, here.shelf.bytes, here.clock, limit=1000),  # type: ignore[arg-type]
        idempotency_key="k1",
    )

    assert context.capabilities == Capabilities(
        input=frozenset({"text", "vision"}), output=frozenset({"text", "tool_calling"})
    )
    assert context.capabilities.has("vision", "input")
    assert context.router.takes_tools(here.services.entry("seeing"))
    request = said(here.shelf.keep(PNG, "a.png"))
    assert await context.router.fit(request, here.services.entry("seeing"), reader="seer") != request
