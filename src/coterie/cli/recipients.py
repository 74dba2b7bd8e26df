"""Names of agents as people type them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie.errors import Refused
from coterie.text import nearest, one_line

if TYPE_CHECKING:
    from coterie.store import Store

SHOWN = 10


async def check_recipient(store: Store, name: str) -> None:
    """There is somebody of that name; otherwise `Refused` says who was probably meant, or who there is."""
    if await store.agent(name):
        return
    known = [agent.id for agent in await store.agents()]
    meant = nearest(name, set(known))
    if meant:
        hint = f'did you mean "{meant}"?'
    else:
        hint = f"choose one of {', '.join(known[:SHOWN])}{' and others' if len(known) > SHOWN else ''}"
    raise Refused("unknown_recipient", f'there is no agent "{one_line(name)}": {hint}')
