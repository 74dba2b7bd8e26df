"""Who the agents of a stored society are, without running it."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.admin.inspect import Inspection
from coterie.agent.service import Directory, Registrar
from coterie.agent_runtime import load_services, read_profiles
from coterie.agents import Agent
from coterie.clock import SystemClock
from coterie.config import read_config
from coterie.llm.learned_limits import Refusals
from coterie.store import Store

PAGE = 200


async def directory_of(stored: Inspection) -> Directory:
    place = stored.place
    profiles, _ = read_profiles(read_config(place.path), place)
    directory = Directory(load_services(place), Refusals(SystemClock(), place.data / "refusals.json"), profiles)
    await Registrar(stored.store, directory).recall()
    return directory


async def all_agents(store: Store) -> Sequence[Agent]:
    """Without the person, by id."""
    found: list[Agent] = []
    while page := await store.agents(found[-1].id if found else "", PAGE):
        found += page
    return [agent for agent in found if agent.kind == "agent"]
