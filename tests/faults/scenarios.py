"""What forked children do, each in a folder that others may have died in before."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from coterie import failpoints
from coterie.clock import to_ms
from coterie.errors import Refused
from coterie.messages import Receipt
from coterie.runtime import Society
from coterie.testing import FakeClock

from .witness import Note, Witness

AGENTS = ("ada", "bob", "eve")
HOUR = 3_600_000
CLIENTS = 5


def make_home(folder: Path, *, delayed: str = "keep") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = "".join(f"[agents.{agent}]\n" for agent in AGENTS)
    (folder / "coterie.toml").write_text(f'[shutdown]\ndelayed = "{delayed}"\n{names}')


# Every door once: what the failpoint tests walk through


async def every_door(folder: Path, tries: int = 1) -> dict[str, Any]:
    """Open, send, put a file, delay, deliver, withdraw, close. What failed, and how often each failpoint was met."""
    walk = _Walk(folder, tries)
    await walk.all_the_way()
    return {"failures": walk.failures, "violations": walk.violations, "hits": dict(failpoints._hits)}


class _Walk:
    def __init__(self, folder: Path, tries: int) -> None:
        self._folder, self._tries, self._clock = folder, tries, FakeClock()
        self._witness = Witness(folder.parent / "witness")
        self.failures: list[list[str]] = []
        self.violations: list[str] = []

    async def all_the_way(self) -> None:
        society = await self._insist(lambda: Society.start(self._folder, clock=self._clock))
        for step in (self._send, self._send_file, self._delay, self._deliver, self._withdraw):
            await self._insist(lambda step=step: step(society))
            self.violations += [violation async for violation in society.store.violations()]
        try:
            await society.stop()
        except failpoints.FailpointHit as error:  # it let go of everything all the same, as the next start shows
            self.failures.append([type(error).__name__, str(error)])

    async def _insist(self, step: Any) -> Any:
        for _ in range(self._tries - 1):
            try:
                return await step()
            except Exception as error:
                self.failures.append([type(error).__name__, str(error)])
        return await step()

    async def _send(self, society: Society) -> None:
        for name in ("first", "second"):
            self._ack(name, await society.send(to="ada", text=name, client_id=name))

    async def _send_file(self, society: Society) -> None:
        artifact = await society.artifacts.put(b"a few bytes", "note.txt", key="file")
        self._ack("file", await society.send(to="ada", text="file", client_id="file", attachments=[artifact.ref]))

    async def _delay(self, society: Society) -> None:
        self._ack("late", await society.send(to="ada", text="late", client_id="late", delay_ms=500))

    async def _deliver(self, society: Society) -> None:
        await self._clock.advance(seconds=3)
        if await society.bus.delayed_count("ada"):
            raise TimeoutError("the delayed message is overdue")

    async def _withdraw(self, society: Society) -> None:
        receipt = await society.send(to="bob", text="gone", client_id="gone", delay_ms=HOUR)
        self._ack("gone", receipt)
        await society.bus.withdraw(receipt.message_id)
        self._witness.note(withdrawn="gone")

    def _ack(self, name: str, receipt: Receipt) -> None:
        self._witness.note(acked=name, id=receipt.message_id)


# Clients that never stop: what random kills hit


async def hammer(folder: Path, seed: int, name: str, owed: list[Note], witness: Witness, ready: int) -> None:
    """Check what the last kill left, then send, retry, delay and withdraw until killed."""
    society = await Society.start(folder)
    witness.note(opened=name, violations=[f"{name}: {v}" async for v in society.store.violations()])
    os.write(ready, b"r")
    async with society.bus.watch(queue=100_000) as watcher, asyncio.TaskGroup() as group:
        group.create_task(_note_deliveries(watcher, witness))
        for number in range(CLIENTS):
            client = _Client(society, random.Random(f"{seed}/{name}/{number}"), f"{name}.{number}", witness)
            group.create_task(client.work(owed[number::CLIENTS]))


class _Client:
    def __init__(self, society: Society, rng: random.Random, name: str, witness: Witness) -> None:
        self._society, self._rng, self._name, self._witness = society, rng, name, witness
        self._count = 0
        self._late: list[tuple[str, str]] = []
        self._sent: list[Note] = []

    async def work(self, owed: list[Note]) -> None:
        for note in owed:
            await self._send(note, again=True)
        while True:
            await self._rng.choices((self._say, self._delay, self._repeat, self._take_back), (5, 5, 1, 1))[0]()

    async def _say(self) -> None:
        await self._send(self._new(0))

    async def _delay(self) -> None:
        note = self._new(self._rng.choice((1, 2, 3, 5, 8, 20, 100)))
        receipt = await self._send(note)
        self._late.append((note["wanted"], receipt.message_id))

    async def _repeat(self) -> None:
        if self._sent:
            await self._send(self._rng.choice(self._sent), again=True)

    async def _take_back(self) -> None:
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
        self._witness.note(**note)
        self._sent.append(note)
        return note

    async def _send(self, note: Note, *, again: bool = False) -> Receipt:
        client_id = note["wanted"]
        receipt = await self._society.send(
            to=note["to"], text=client_id, client_id=client_id, delay_ms=note["delay"] or None
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


async def drain(folder: Path, wait: bool = True) -> int:
    """Open, let everything delayed fall due (or stop at once), stop in order. How many went out early."""
    society = await Society.start(folder)
    if wait:
        async with asyncio.timeout(10), society.bus.watch(queue=100_000) as watcher:
            while await society.bus.delayed_count():
                await anext(watcher)
    return await society.stop()


# Small ones


async def open_and_close(folder: Path) -> dict[str, Any]:
    society = await Society.start(folder)
    violations = [violation async for violation in society.store.violations()]
    unclean = society.store.info.unclean
    await society.stop()
    return {"unclean": unclean, "violations": violations}


async def send(folder: Path, text: str) -> str:
    society = await Society.start(folder)
    receipt = await society.send(to="ada", text=text)
    await society.stop()
    return receipt.message_id


async def hold(folder: Path, pipe: int) -> None:
    """Own the society and send to it, until killed."""
    society = await Society.start(folder)
    await society.send(to="ada", text="from the owner")
    os.write(pipe, b"open")
    await asyncio.sleep(timedelta(minutes=5).total_seconds())
