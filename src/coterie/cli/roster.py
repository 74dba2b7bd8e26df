"""Who the agents of a stored society are, without running it."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.admin.inspect import Inspection
from coterie.agent.service import AgentDirectory, AgentService
from coterie.agent_runtime import load_services, read_profiles
from coterie.agents import Agent
from coterie.clock import SystemClock
from coterie.config import read_config
from coterie.llm.learned_limits import LearnedLimits
from coterie.store import Store

PAGE = 200


async def directory_of(stored: Inspection) -> AgentDirectory:
    place = stored.folder
    profiles, _ = read_profiles(read_config(place.path), place)
    directory = AgentDirectory(
        load_services(place), LearnedLimits(SystemClock(), place.data / "refusals.json"), profiles
    )
    await AgentService(stored.store, directory).refresh_directory()
    return directory


async def all_agents(store: Store) -> Sequence[Agent]:
    """Without the person, by id."""
    found: list[Agent] = []
    while page := await store.agents(found[-1].id if found else "", PAGE):
        found += page
    return [agent for agent in found if agent.kind == "agent"]
