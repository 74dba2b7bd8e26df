"""Names of agents as people type them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie.errors import Refused
from coterie.text import closest_match, one_line, to_storable

if TYPE_CHECKING:
    from coterie.agents import Agent
    from coterie.store import Store

SHOWN = 10


async def check_recipient(store: Store, name: str) -> Agent:
    """Whoever is of that name; otherwise `Refused` says who was probably meant, or who there is."""
    if found := await store.agent(to_storable(name)):
        return found
    raise Refused("unknown_recipient", _nobody(name, [agent.id for agent in await store.agents()]))


async def check_agent(store: Store, name: str) -> Agent:
    """The same for agents alone: the person does not count."""
    found = await store.agent(to_storable(name))
    if found and found.kind == "agent":
        return found
    known = [agent.id for agent in await store.agents() if agent.kind == "agent"]
    raise Refused("unknown_agent", _nobody(name, known))


def _nobody(name: str, known: list[str]) -> str:
    if meant := closest_match(name, set(known)):
        hint = f'did you mean "{meant}"?'
    else:
        hint = f"choose one of {', '.join(known[:SHOWN])}{' and others' if len(known) > SHOWN else ''}"
    return f'there is no agent "{one_line(name)}": {hint}'
