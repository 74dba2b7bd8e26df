"""The way to an agent: through the server that runs the society, or by running it here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.admin.inspect import Inspection
from coterie.cli.conversation import Conversation
from coterie.cli.finding import find_server
from coterie.cli.recipients import check_agent

if TYPE_CHECKING:
    from coterie.society import Society


@asynccontextmanager
async def open_conversation(folder: Path, agent_id: str, token: str | None = None) -> AsyncIterator[Conversation]:
    client = find_server(folder, token)
    if client is None:
        from coterie.cli.in_process import OwnConversation

        async with _running_here(folder) as society:
            await check_agent(society.store, agent_id)
            async with OwnConversation.open(society, agent_id) as own:
                yield own
        return
    from coterie.cli.over_http import HttpConversation

    async with client:
        async with Inspection.open(folder) as stored:
            await check_agent(stored.store, agent_id)
        async with HttpConversation.open(client, agent_id) as conversation:
            yield conversation


@asynccontextmanager
async def _running_here(folder: Path) -> AsyncIterator[Society]:
    """Leaving is not the owner's wish to stop: whatever is delayed keeps its time."""
    from coterie.society import Society

    society = await Society.start(folder)
    try:
        yield society
    finally:
        await society.stop(quick=True)
