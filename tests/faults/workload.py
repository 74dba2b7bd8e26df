"""Workload for forked children: clients and agents that work until killed, then a run until all are idle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from pathlib import Path

from coterie.agent.builtins import SEND_MESSAGE
from coterie.agent.context import build_request, render_row
from coterie.clock import SystemClock
from coterie.config import SocietyFolder
from coterie.errors import Refused
from coterie.llm.providers.openai import Dialect
from coterie.society import Society
from coterie.store import Page
from coterie.stores.sql.turn_rows import APPROVAL_OPTIONS
from coterie.testing.dialects import (
    anthropic_body,
    check_anthropic,
    check_openai_chat,
    check_openai_responses,
    check_strict_alternation,
    responses_input,
)

from .fake_model import RandomModel, ToolEffects, fake_models
from .harness import patience
from .requests import compared
from .scenarios import AGENTS, Client, wait_until_idle
from .witness import Note, Witness

CLIENTS = 3
PAUSE = 0.04
NAMELESS = 0.3
APPROVAL_DELAY_SECONDS = 0.015
"""How long the person takes at most to answer an approval."""
RESUMED = 0.2
"""Probability that the person resumes a blocked agent; otherwise the next message does."""
LOOKS = 0.4
"""Share of children that check all invariants; it takes a third of their lifetime."""
REST = 60.0
"""Seconds within which all agents become idle, on an idle machine."""


class Approver(Client):
    """The person: answers approvals and resumes blocked agents."""

    async def work(self, owed: list[Note]) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0, self._pause))
            for agent in await self._society.store.agents():
                if agent.state == "wait_approval":
                    await self._answer(agent.id)
                elif agent.state == "blocked" and self._rng.random() < RESUMED:
                    await self._society.resume(agent.id)
                    self._witness.note(resumed=agent.id)

    async def _answer(self, agent: str) -> None:
        said = await self._society.store.messages(Page(), agent=agent)
        question = next((one for one in said if one.sender == agent and "approval" in one.payload), None)
        if question is None:  # it was voided a while ago
            return
        option = self._rng.choice((0, 0, 1))
        self._name = f"verdict on {question.id}"
        note = {"wanted": self._name, "to": agent, "delay": 0, "at": time.time_ns() // 1_000_000}
        note |= {"question": question.id, "option": option, "text": APPROVAL_OPTIONS[option]}
        self._witness.note(**note)
        # Another message may have closed the question before; then the answer is refused.
        with contextlib.suppress(Refused):
            await self._send(note, again=True)


async def start_society(folder: Path, witness: Witness) -> Society:
    """Start the society and note the states of its agents."""
    place = SocietyFolder(folder)
    society = await Society._assemble(place, SystemClock())
    witness.note(found=[agent.state for agent in await society.store.agents()])
    await society._start(society._make_runtime())
    return society


async def run_workload(folder: Path, seed: int, name: str, owed: list[Note], witness: Witness, ready: int) -> None:
    """Continue where the last child was killed, and work until killed."""
    ToolEffects.witness = witness
    whim = RandomModel(random.Random(f"{seed}/{name}"), AGENTS, witness)
    with compared(folder, witness) as comparing, fake_models(lambda _: comparing(whim)):
        society = await start_society(folder, witness)
        os.write(ready, b"r")
        async with asyncio.TaskGroup() as group:
            approver = Approver(
                society, random.Random(f"{seed}/{name}/judge"), name, witness, pause=APPROVAL_DELAY_SECONDS
            )
            group.create_task(approver.work([]))
            if random.Random(f"{seed}/{name}/look").random() < LOOKS:
                group.create_task(_check_invariants(society, name, witness))
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


async def _check_invariants(society: Society, name: str, witness: Witness) -> None:
    """Invariants must hold at any time, even during recovery."""
    witness.note(opened=name, violations=[f"{name}: {v}" async for v in society.store.violations()])


async def run_until_idle(folder: Path, seed: int, name: str, witness: Witness) -> None:
    """Run until all messages are answered and delivered, then check what models would be sent."""
    ToolEffects.witness = witness
    whim = RandomModel(random.Random(f"{seed}/{name}"), AGENTS, witness, calm=True)
    with compared(folder, witness) as comparing, fake_models(lambda _: comparing(whim)):
        society = await start_society(folder, witness)
        approver = Approver(society, random.Random(f"{seed}/{name}/judge"), name, witness, pause=APPROVAL_DELAY_SECONDS)
        approving = asyncio.create_task(approver.work([]))
        async with asyncio.timeout(patience(REST)):
            await wait_until_idle(society)
        approving.cancel()
        await asyncio.gather(approving, return_exceptions=True)
        wrong = [violation async for violation in society.store.violations()]
        wrong += [complaint for agent in AGENTS for complaint in await history_errors(society, agent)]
        await society.stop()
    witness.note(rested=name, violations=[f"{name}: {one}" for one in wrong])


async def history_errors(society: Society, agent: str) -> list[str]:
    """Errors that strict model services would report about the agent's history."""
    view = await society.store.history_view(agent)
    request = build_request("You are an agent.", view.summary, map(render_row, view.rows), (SEND_MESSAGE,))
    body = Dialect().body(request, "m", None, stream=False)
    strict = Dialect(strict_alternation=True).messages(request)
    found = {
        "chat": check_openai_chat(body["messages"], body["tools"]),
        "alternation": check_strict_alternation(strict),
        "responses": check_openai_responses(responses_input(body["messages"])),
        "anthropic": check_anthropic(anthropic_body(body["messages"], body["tools"])),
    }
    return [f"{agent}, {dialect}: {complaint}" for dialect, complaint in found.items() if complaint]
