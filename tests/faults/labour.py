"""What forked children do with agents at work: clients that never stop, and in the end a rest for everybody."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

from coterie.agent.context import build_request, said
from coterie.agent.send_message import SEND_MESSAGE
from coterie.llm.providers.openai_dialect import Dialect
from coterie.runtime import Society
from coterie.testing.dialects import (
    anthropic_body,
    check_anthropic,
    check_openai_chat,
    check_openai_responses,
    check_strict_alternation,
    responses_input,
)

from .mind import Deeds, Whim, minds
from .scenarios import AGENTS, Client, at_rest
from .witness import Note, Witness

CLIENTS = 3
PAUSE = 0.04
NAMELESS = 0.3
LOOKS = 0.4
"""How many children look at everything that is committed; it takes as long as a third of a life."""
REST = 15.0
"""Seconds within which agents that nobody speaks to any more must have come to rest."""


async def labour(folder: Path, seed: int, name: str, owed: list[Note], witness: Witness, ready: int) -> None:
    """Go on where the last one was killed, with more and more to do, until killed."""
    Deeds.witness = witness
    whim = Whim(random.Random(f"{seed}/{name}"), AGENTS, witness)
    with minds(lambda _: whim):
        society = await Society.start(folder)
        os.write(ready, b"r")
        async with asyncio.TaskGroup() as group:
            if random.Random(f"{seed}/{name}/look").random() < LOOKS:
                group.create_task(_look(society, name, witness))
            for number in range(CLIENTS):
                client = Client(
                    society,
                    random.Random(f"{seed}/{name}/{number}"),
                    f"{name}.{number}",
                    witness,
                    pause=PAUSE,
                    nameless=NAMELESS,
                )
                group.create_task(client.work(owed[number::CLIENTS]))


async def _look(society: Society, name: str, witness: Witness) -> None:
    """Whatever is committed holds, in the middle of a recovery too."""
    witness.note(opened=name, violations=[f"{name}: {v}" async for v in society.store.violations()])


async def come_to_rest(folder: Path, seed: int, name: str, witness: Witness) -> None:
    """Let all that was asked be answered, and all that is delayed fall due; then look at what models are shown."""
    Deeds.witness = witness
    whim = Whim(random.Random(f"{seed}/{name}"), AGENTS, witness, calm=True)
    with minds(lambda _: whim):
        society = await Society.start(folder)
        async with asyncio.timeout(REST):
            await at_rest(society)
        wrong = [violation async for violation in society.store.violations()]
        wrong += [complaint for agent in AGENTS for complaint in await unfit(society, agent)]
        await society.stop()
    witness.note(rested=name, violations=[f"{name}: {one}" for one in wrong])


async def unfit(society: Society, agent: str) -> list[str]:
    """What the strictest services would say against the agent's history."""
    view = await society.store.view(agent)
    request = build_request("You are an agent.", view.summary, map(said, view.rows), (SEND_MESSAGE,))
    body = Dialect().body(request, "m", None, stream=False)
    strict = Dialect(alternate=True).messages(request)
    found = {
        "chat": check_openai_chat(body["messages"], body["tools"]),
        "alternation": check_strict_alternation(strict),
        "responses": check_openai_responses(responses_input(body["messages"])),
        "anthropic": check_anthropic(anthropic_body(body["messages"], body["tools"])),
    }
    return [f"{agent}, {dialect}: {complaint}" for dialect, complaint in found.items() if complaint]
