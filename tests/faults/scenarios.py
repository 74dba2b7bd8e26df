"""Scenarios that forked children run, in folders in which earlier children may have been killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import time
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from coterie import failpoints
from coterie.clock import to_ms
from coterie.errors import Refused
from coterie.llm.service import Completion, ModelRequest, ToolCall, UserMessage
from coterie.messages import PERSON, Receipt
from coterie.society import Society
from coterie.testing import FakeClock

from .fake_model import TOOLS, FakeModel, ToolEffects, agent_of, fake_models, last_text
from .harness import scaled_timeout
from .requests import compared
from .witness import Note, Witness

AGENTS = ("ada", "bob", "eve")
HOUR = 3_600_000
CLIENTS = 5


def make_home(folder: Path, *, delayed: str = "keep", agents: Sequence[str] = AGENTS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = "".join(f"[agents.{agent}]\n" for agent in agents)
    (folder / "coterie.toml").write_text(f'[shutdown]\ndelayed = "{delayed}"\n{names}')
    (folder / "tools.py").write_text(TOOLS)


# Every operation once, for the failpoint tests


async def run_all_operations(folder: Path, tries: int = 1) -> dict[str, Any]:
    """Open, send, upload, delay, deliver, run a turn with calls, withdraw, close.

    Return the failures and how often each failpoint was hit.
    """
    operations = _Operations(folder, tries)
    with (
        compared(folder, ToolEffects.witness) as comparing,
        fake_models(lambda service: comparing(FakeModel(service, _answer_or_work))),
    ):
        await operations.run()
    return {"failures": operations.failures, "violations": operations.violations, "hits": dict(failpoints.hits())}


def _answer_or_work(request: ModelRequest) -> Completion:
    """Call tools if the message contains "work"; otherwise answer."""
    if "work" not in last_text(request) or not isinstance(request.messages[-1], UserMessage):
        return Completion(text="yes")
    message = {"to": "eve", "payload": {"text": "help, please"}}
    calls = [ToolCall(id=name, name=name, arguments={"n": 0}) for name in ("look", "fire")]
    return Completion(text="", calls=(*calls, ToolCall(id="message", name="send_message", arguments=message)))


class _Operations:
    def __init__(self, folder: Path, tries: int) -> None:
        self._folder, self._tries, self._clock = folder, tries, FakeClock()
        self._witness = ToolEffects.witness = Witness(folder.parent / "witness")
        self.failures: list[list[str]] = []
        self.violations: list[str] = []

    async def run(self) -> None:
        society = await self._retry(lambda: Society.start(self._folder, clock=self._clock))
        steps = (self._first, self._second, self._send_file, self._delay, self._deliver, self._work, self._withdraw)
        for step in steps:
            await self._retry(lambda step=step: step(society))
            await self._wait_until_idle(society)
            self.violations += [violation async for violation in society.store.violations()]
        try:
            await society.stop()
        except failpoints.FailpointHit as error:  # it released everything nevertheless, as the next start shows
            self.failures.append([type(error).__name__, str(error)])

    async def _retry(self, step: Any) -> Any:
        for _ in range(self._tries - 1):
            try:
                return await step()
            except Exception as error:
                self.failures.append([type(error).__name__, str(error)])
        return await step()

    async def _first(self, society: Society) -> None:
        self._ack("first", await society.send(to="ada", text="first", client_id="first"))

    async def _second(self, society: Society) -> None:
        self._ack("second", await society.send(to="ada", text="second", client_id="second"))

    async def _send_file(self, society: Society) -> None:
        artifact = await society.artifacts.put(b"a few bytes", "note.txt", key="file")
        self._ack("file", await society.send(to="ada", text="file", client_id="file", attachments=[artifact.ref]))

    async def _delay(self, society: Society) -> None:
        self._ack("late", await society.send(to="ada", text="late", client_id="late", delay_ms=500))

    async def _deliver(self, society: Society) -> None:
        await self._clock.jump(minutes=2)  # the clock of an earlier child may be ahead of this one
        if await society.bus.delayed_count("ada"):
            raise TimeoutError("the delayed message is overdue")

    async def _work(self, society: Society) -> None:
        self._ack("work", await society.send(to="bob", text="work", client_id="work"))

    async def _wait_until_idle(self, society: Society) -> None:
        """Wait until all agents are idle, also after an error."""
        async with asyncio.timeout(scaled_timeout()):
            while any(agent.state != "idle" for agent in await society.store.agents()):
                await self._clock.advance(milliseconds=20)

    async def _withdraw(self, society: Society) -> None:
        receipt = await society.send(to="bob", text="gone", client_id="gone", delay_ms=HOUR)
        self._ack("gone", receipt)
        await society.bus.withdraw(receipt.message_id)
        self._witness.note(withdrawn="gone")

    def _ack(self, name: str, receipt: Receipt) -> None:
        self._witness.note(acked=name, id=receipt.message_id)


# Endless clients, for random kills


async def send_until_killed(
    folder: Path, seed: int, name: str, to_repeat: list[Note], witness: Witness, ready: int
) -> None:
    """Check the invariants after the last kill, then send, retry, delay and withdraw until killed."""
    society = await Society.start(folder, work=False)
    witness.note(opened=name, violations=[f"{name}: {v}" async for v in society.store.violations()])
    os.write(ready, b"r")
    async with society.bus.watch(queue=100_000) as watcher, asyncio.TaskGroup() as group:
        group.create_task(_note_deliveries(watcher, witness))
        for number in range(CLIENTS):
            client = Client(society, random.Random(f"{seed}/{name}/{number}"), f"{name}.{number}", witness)
            group.create_task(client.work(to_repeat[number::CLIENTS]))


class Client:
    """Sends to agents without end, and notes each send and each receipt with the witness."""

    def __init__(
        self,
        society: Society,
        rng: random.Random,
        name: str,
        witness: Witness,
        *,
        pause: float = 0,
        anonymous_share: float = 0,
    ) -> None:
        """`pause`: most seconds between two messages. `anonymous_share`: share of messages without a client id."""
        self._society, self._rng, self._name, self._witness = society, rng, name, witness
        self._pause, self._anonymous_share = pause, anonymous_share
        self._count = 0
        self._late: list[tuple[str, str]] = []
        self._sent: list[Note] = []

    async def work(self, to_repeat: list[Note]) -> None:
        for note in to_repeat:
            with contextlib.suppress(Refused):  # the question may be closed already
                await self._send(note, again=True)
        while True:
            await self._rng.choices((self._send_now, self._delay, self._repeat, self._withdraw_one), (5, 5, 1, 1))[0]()
            if self._pause:
                await asyncio.sleep(self._rng.uniform(0, self._pause))

    async def send_late(self, delay_ms: int) -> None:
        await self._send(self._new(delay_ms))

    async def _send_now(self) -> None:
        await self._send(self._new(0))

    async def _delay(self) -> None:
        note = self._new(self._rng.choice((1, 2, 3, 5, 8, 20, 100)))
        receipt = await self._send(note)
        self._late.append((note["wanted"], receipt.message_id))

    async def _repeat(self) -> None:
        if named := [note for note in self._sent if "anonymous" not in note]:
            await self._send(self._rng.choice(named), again=True)

    async def _withdraw_one(self) -> None:
        if not self._late:
            return
        client_id, message_id = self._late.pop()
        self._witness.note(withdrawing=client_id)
        with contextlib.suppress(Refused):
            await self._society.bus.withdraw(message_id)
            self._witness.note(withdrawn=client_id)

    def _new(self, delay: int) -> Note:
        self._count += 1
        note = {"wanted": f"{self._name}.{self._count}", "to": self._rng.choice(AGENTS), "delay": delay}
        note["at"] = time.time_ns() // 1_000_000
        if self._rng.random() < self._anonymous_share:
            note["anonymous"] = True
        self._witness.note(**note)
        self._sent.append(note)
        return note

    async def _send(self, note: Note, *, again: bool = False) -> Receipt:
        client_id = note["wanted"]
        receipt = await self._society.send(
            to=note["to"],
            text=note.get("text", client_id),
            in_reply_to=note.get("question"),
            option=note.get("option"),
            client_id=None if "anonymous" in note else client_id,
            delay_ms=note["delay"] or None,
        )
        due = receipt.scheduled_delivery_time
        self._witness.note(
            acked=client_id, id=receipt.message_id, due=due and to_ms(due), client=self._name, again=again
        )
        return receipt


async def _note_deliveries(watcher: AsyncIterator[Any], witness: Witness) -> None:
    async for event in watcher:
        if event.kind == "delayed.delivered":
            witness.note(delivery=event.subject, at=time.time_ns() // 1_000_000)


async def drain(folder: Path, wait: bool = True, witness: Witness | None = None, name: str = "") -> int:
    """Open, wait until nothing is delayed (or not), stop gracefully. Return how many were delivered early.

    With `witness`, a client `name` first sends a message due in an hour.
    """
    society = await Society.start(folder, work=False)
    if witness:
        await Client(society, random.Random(name), name, witness).send_late(HOUR)
    if wait:
        async with asyncio.timeout(scaled_timeout()), society.bus.watch(queue=100_000) as watcher:
            while await society.bus.delayed_count():
                await anext(watcher)
    return await society.stop()


# Conversations with scripted agents


async def converse(
    folder: Path, said: list[list[str]], calls: dict[str, list[Any]], slow: tuple[str, ...] = ()
) -> list[list[str]]:
    """Send each `[to, text]` once, even if this runs again, and wait until all agents are idle.

    Return what the person got. A model that gets a word of `calls` makes that call, `[tool, arguments]`; one that gets
    "deadly" ends the process. The models of `slow` agents take an hour.
    """

    def answer(request: ModelRequest) -> Completion:
        text = last_text(request)
        if "deadly" in text:
            os._exit(3)
        planned = [(tool, arguments) for word, (tool, arguments) in calls.items() if word in text]
        if not planned or not isinstance(request.messages[-1], UserMessage):
            return Completion(text=f"heard by {agent_of(request)}")
        return Completion(
            text="", calls=tuple(ToolCall(id=tool, name=tool, arguments=given) for tool, given in planned)
        )

    with fake_models(
        lambda service: FakeModel(service, answer, lambda request: HOUR if agent_of(request) in slow else 0)
    ):
        society = await Society.start(folder)
        for to, text in said:
            await society.send(to=to, text=text, client_id=text)
        async with asyncio.timeout(scaled_timeout()):
            await wait_until_idle(society)
        received = [[message.sender, message.payload["text"]] for message in await society.waiting(PERSON)]
        await society.stop()
    return received


async def stop_in_the_middle(folder: Path) -> str:
    """Stop without a drain while ada's model thinks. Return the state of ada."""
    asked = asyncio.Event()

    def think(_: ModelRequest) -> float:
        asked.set()
        return HOUR

    with fake_models(lambda service: FakeModel(service, _answer_or_work, seconds=think)):
        society = await Society.start(folder)
        await society.send(to="ada", text="take your time", client_id="only once")
        await asked.wait()
        await society.abandon()
    async with Society.open_offline(folder) as offline:
        ada = await offline.store.agent("ada")
    return ada.state if ada else "gone"


async def wait_until_idle(society: Society) -> None:
    """Wait until all agents are idle and nothing is delayed."""
    async with society.bus.watch(queue=100_000) as watcher:
        while not await _is_idle(society):
            await anext(watcher)


async def _is_idle(society: Society) -> bool:
    agents = await society.store.agents()
    return all(agent.state == "idle" and not agent.delayed for agent in agents)


async def run_until_idle_or_blocked(folder: Path) -> None:
    async with Society.open(folder) as society, asyncio.timeout(scaled_timeout()):
        await wait_until_idle_or_blocked(society)


async def wait_until_idle_or_blocked(society: Society) -> None:
    async with society.bus.watch(queue=100_000) as watcher:
        while any(agent.state not in ("idle", "blocked") for agent in await society.store.agents()):
            await anext(watcher)


async def burst(folder: Path, count: int) -> dict[str, Any]:
    """Send `count` numbered messages to ada; the first starts a turn. Return figures when all are answered."""
    society = await Society.start(folder)
    before = _resident_mb()
    await society.send(to="ada", text="word 0")
    for start in range(1, count, 250):
        numbers = range(start, min(start + 250, count))
        await asyncio.gather(*(society.send(to="ada", text=f"word {number}") for number in numbers))
    async with asyncio.timeout(scaled_timeout()):
        await wait_until_idle(society)
    grown = _peak_mb() - before
    violations = [violation async for violation in society.store.violations()]
    answers = await society.store.agent(PERSON)
    await society.stop()
    return {"grown_mb": grown, "violations": violations, "answers": answers.waiting if answers else 0}


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


# Small scenarios


async def open_and_close(folder: Path) -> dict[str, Any]:
    society = await Society.start(folder, work=False)
    violations = [violation async for violation in society.store.violations()]
    unclean = society.store.info.unclean
    await society.stop()
    return {"unclean": unclean, "violations": violations}


async def send(folder: Path, text: str) -> str:
    society = await Society.start(folder, work=False)
    receipt = await society.send(to="ada", text=text)
    await society.stop()
    return receipt.message_id


async def hold(folder: Path, work: bool, pipe: int) -> None:
    """Run the society until killed, with agents or without."""
    society = await Society.start(folder, work=work)
    if not work:
        await society.send(to="ada", text="from the owner")
    os.write(pipe, b"open")
    await asyncio.sleep(timedelta(minutes=5).total_seconds())
