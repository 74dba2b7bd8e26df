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
from coterie.messages import Message
from coterie.society import Society
from coterie.store import Page
from coterie.stores.sql.turn_rows import APPROVAL_OPTIONS
from coterie.tasks import BUDGET_OPTIONS, CONTINUE
from coterie.testing.dialects import (
    anthropic_body,
    check_anthropic,
    check_openai_chat,
    check_openai_responses,
    check_strict_alternation,
    responses_input,
)

from .fake_model import RandomModel, ToolEffects, fake_models
from .harness import scaled_timeout
from .requests import compared
from .scenarios import AGENTS, Client, wait_until_idle
from .witness import Note, Witness

CLIENTS = 3
PAUSE = 0.04
ANONYMOUS_SHARE = 0.3
APPROVAL_DELAY_SECONDS = 0.015
"""How long the person takes at most to answer an approval."""
RESUMED = 0.2
"""Probability that the person resumes a blocked agent; otherwise the next message does."""
STOPS = 0.04
"""Probability that the person stops a task, each time they look."""
LOOKS = 0.4
"""Share of children that check all invariants; it takes a third of their lifetime."""
REST = 60.0
"""Seconds within which all agents become idle, on an idle machine."""


class Approver(Client):
    """The person: answers approvals and budget questions, resumes blocked agents, and stops tasks."""

    stops_tasks = True

    async def work(self, to_repeat: list[Note]) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0, self._pause))
            for agent in await self._society.store.agents():
                if agent.state == "wait_approval":
                    await self._answer(agent.id)
                elif agent.state == "blocked" and self._rng.random() < RESUMED:
                    await self._society.resume(agent.id)
                    self._witness.note(resumed=agent.id)
            for question in await self._society.store.open_questions():
                if budget := question.payload.get("budget"):
                    await self._decide(question, budget["task"])
            if self.stops_tasks and self._rng.random() < STOPS:
                tasks, _ = await self._society.store.open_tasks(10)
                if tasks:
                    await self._stop(self._rng.choice(tasks).id)

    async def _decide(self, question: Message, task: str) -> None:
        """Let a task go on by a button or through the store, or stop it."""
        luck = self._rng.random()
        self._witness.note(over_budget=question.id)
        if self.stops_tasks and luck < 0.2:
            await self._stop(task)
        elif luck < 0.5:
            with contextlib.suppress(Refused):  # a stop or a message came first
                await self._society.store.continue_task(task)
        else:
            await self._press(question, CONTINUE, BUDGET_OPTIONS[CONTINUE])

    async def _stop(self, task: str) -> None:
        self._witness.note(stopping=task)
        stopped = await self._society.store.stop_task(task)
        self._witness.note(stopped=task, turns=stopped.turns, messages=stopped.messages)

    async def _answer(self, agent: str) -> None:
        said = await self._society.store.messages(Page(), agent=agent)
        question = next((one for one in said if one.sender == agent and "approval" in one.payload), None)
        if question is None:  # it was voided
            return
        option = self._rng.choice((0, 0, 1))
        await self._press(question, option, APPROVAL_OPTIONS[option])

    async def _press(self, question: Message, option: int, text: str) -> None:
        self._name = f"answer to {question.id}"
        note = {"wanted": self._name, "to": question.sender, "delay": 0, "at": time.time_ns() // 1_000_000}
        note |= {"question": question.id, "option": option, "text": text}
        self._witness.note(**note)
        # Another message may have closed the question before; then the answer is refused.
        with contextlib.suppress(Refused):
            await self._send(note, again=True)


async def start_society(folder: Path, witness: Witness) -> Society:
    """Start the society and note the states of its agents."""
    society = await Society._assemble(SocietyFolder(folder), SystemClock())
    witness.note(found=[agent.state for agent in await society.store.agents()])
    await society._start(society._make_runtime())
    return society


async def run_workload(folder: Path, seed: int, name: str, to_repeat: list[Note], witness: Witness, ready: int) -> None:
    """Continue where the last child was killed, and work until killed."""
    ToolEffects.witness = witness
    model = RandomModel(random.Random(f"{seed}/{name}"), AGENTS, witness)
    with compared(folder, witness) as comparing, fake_models(lambda _: comparing(model)):
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
                    anonymous_share=ANONYMOUS_SHARE,
                )
                group.create_task(client.work(to_repeat[number::CLIENTS]))


async def _check_invariants(society: Society, name: str, witness: Witness) -> None:
    """Invariants must hold at any time, even during recovery."""
    witness.note(opened=name, violations=[f"{name}: {v}" async for v in society.store.violations()])


async def run_until_idle(folder: Path, seed: int, name: str, witness: Witness) -> None:
    """Run until all messages are answered and delivered, then check what models would be sent."""
    ToolEffects.witness = witness
    model = RandomModel(random.Random(f"{seed}/{name}"), AGENTS, witness, calm=True)
    with compared(folder, witness) as comparing, fake_models(lambda _: comparing(model)):
        society = await start_society(folder, witness)
        approver = Approver(society, random.Random(f"{seed}/{name}/judge"), name, witness, pause=APPROVAL_DELAY_SECONDS)
        approver.stops_tasks = False
        approving = asyncio.create_task(approver.work([]))
        async with asyncio.timeout(scaled_timeout(REST)):
            await wait_until_idle(society)
        approving.cancel()
        await asyncio.gather(approving, return_exceptions=True)
        wrong = [violation async for violation in society.store.violations()]
        wrong += [error for agent in AGENTS for error in await history_errors(society, agent)]
        await society.stop()
    witness.note(rested=name, violations=[f"{name}: {error}" for error in wrong])


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
    return [f"{agent}, {dialect}: {error}" for dialect, error in found.items() if error]
