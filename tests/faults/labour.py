"""What forked children do with agents at work: clients that never stop, and in the end a rest for everybody."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from pathlib import Path

from coterie.agent.builtins import SEND_MESSAGE
from coterie.agent.context import build_request, said
from coterie.clock import SystemClock
from coterie.config import SocietyFolder
from coterie.errors import Refused
from coterie.llm.providers.openai import Dialect
from coterie.society import Society
from coterie.store import Page
from coterie.stores.sql.turn_rows import VERDICTS
from coterie.testing.dialects import (
    anthropic_body,
    check_anthropic,
    check_openai_chat,
    check_openai_responses,
    check_strict_alternation,
    responses_input,
)

from .harness import patience
from .mind import Deeds, Whim, minds
from .requests import compared
from .scenarios import AGENTS, Client, at_rest
from .witness import Note, Witness

CLIENTS = 3
PAUSE = 0.04
NAMELESS = 0.3
THOUGHT = 0.015
"""Seconds the person thinks over a question, at most."""
RESUMED = 0.2
"""How often the person has a blocked agent try again; otherwise the next message does it."""
LOOKS = 0.4
"""How many children look at everything that is committed; it takes as long as a third of a life."""
REST = 60.0
"""Seconds within which agents that nobody speaks to come to rest, on a machine with nothing else to do."""


class Judge(Client):
    """The person who says whether a call may run, and who has whoever is blocked try again."""

    async def work(self, owed: list[Note]) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0, self._pause))
            for agent in await self._society.store.agents():
                if agent.state == "wait_approval":
                    await self._judge(agent.id)
                elif agent.state == "blocked" and self._rng.random() < RESUMED:
                    await self._society.resume(agent.id)
                    self._witness.note(resumed=agent.id)

    async def _judge(self, agent: str) -> None:
        said = await self._society.store.messages(Page(), agent=agent)
        question = next((one for one in said if one.sender == agent and "approval" in one.payload), None)
        if question is None:  # it was voided a while ago
            return
        option = self._rng.choice((0, 0, 1))
        self._name = f"verdict on {question.id}"
        note = {"wanted": self._name, "to": agent, "delay": 0, "at": time.time_ns() // 1_000_000}
        note |= {"question": question.id, "option": option, "text": VERDICTS[option]}
        self._witness.note(**note)
        # Somebody's words may have come first: then the question is closed, and the button says so.
        with contextlib.suppress(Refused):
            await self._send(note, again=True)


async def start(folder: Path, witness: Witness) -> Society:
    """A society at work, and to the witness what its agents were in the middle of."""
    place = SocietyFolder(folder)
    society = await Society._put_together(place, SystemClock())
    witness.note(found=[agent.state for agent in await society.store.agents()])
    await society._begin(society._hire(place))
    return society


async def labour(folder: Path, seed: int, name: str, owed: list[Note], witness: Witness, ready: int) -> None:
    """Go on where the last one was killed, with more and more to do, until killed."""
    Deeds.witness = witness
    whim = Whim(random.Random(f"{seed}/{name}"), AGENTS, witness)
    with compared(folder, witness) as comparing, minds(lambda _: comparing(whim)):
        society = await start(folder, witness)
        os.write(ready, b"r")
        async with asyncio.TaskGroup() as group:
            judge = Judge(society, random.Random(f"{seed}/{name}/judge"), name, witness, pause=THOUGHT)
            group.create_task(judge.work([]))
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
    with compared(folder, witness) as comparing, minds(lambda _: comparing(whim)):
        society = await start(folder, witness)
        judge = Judge(society, random.Random(f"{seed}/{name}/judge"), name, witness, pause=THOUGHT)
        judging = asyncio.create_task(judge.work([]))
        async with asyncio.timeout(patience(REST)):
            await at_rest(society)
        judging.cancel()
        await asyncio.gather(judging, return_exceptions=True)
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
