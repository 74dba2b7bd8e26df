"""The way to an agent: through the server that runs the society, or by running it here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from coterie.cli.client import find_server
from coterie.cli.conversation import Conversation
from coterie.cli.in_process import OwnConversation
from coterie.cli.over_http import HttpConversation
from coterie.cli.recipients import check_recipient
from coterie.inspection import Inspection
from coterie.runtime import Society


@asynccontextmanager
async def open_conversation(folder: Path, agent_id: str, token: str | None = None) -> AsyncIterator[Conversation]:
    client = find_server(folder, token)
    if client is None:
        async with _running_here(folder) as society:
            await check_recipient(society.store, agent_id)
            async with OwnConversation.open(society, agent_id) as own:
                yield own
        return
    async with client:
        async with Inspection.open(folder) as stored:
            await check_recipient(stored.store, agent_id)
        async with HttpConversation.open(client, agent_id) as conversation:
            yield conversation


@asynccontextmanager
async def _running_here(folder: Path) -> AsyncIterator[Society]:
    """Leaving is not the owner's wish to stop: whatever is delayed keeps its time."""
    society = await Society.start(folder)
    try:
        yield society
    finally:
        await society.stop(deliver_delayed=False)
