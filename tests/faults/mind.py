"""A model that is a few lines of Python, and tools that tell the witness: agents at work without a network."""

from __future__ import annotations

import asyncio
import random
import re
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from unittest.mock import patch

from coterie.agent.compaction import ASK
from coterie.llm.service import LLMService, Terminal, TooLong, Transient
from coterie.llm.types import Answer, Call, Delta, Request, SystemSaid, Text, ToolSaid, UserSaid
from coterie.messages import PERSON

from .witness import Witness

TOOLS = f"""
from coterie import ToolContext, tool
from {__package__}.mind import Deeds

@tool(effect="pure")
async def look(n: int, ctx: ToolContext) -> str:
    "Look at something."
    return await Deeds.do("look", ctx.idempotency_key, n)

@tool(effect="idempotent")
async def put(n: int, ctx: ToolContext) -> str:
    "Put something in its place."
    return await Deeds.do("put", ctx.idempotency_key, n)

@tool
async def fire(n: int, ctx: ToolContext) -> str:
    "Do what cannot be undone."
    return await Deeds.do("fire", ctx.idempotency_key, n)

@tool(approval=True)
async def pay(n: int, ctx: ToolContext) -> str:
    "Do what the person must allow."
    return await Deeds.do("pay", ctx.idempotency_key, n)
"""
"""The owner's `tools.py`."""

Answering = Callable[[Request], Answer]
BLOCKING = ("no key", "too long")
"""How failures begin that block an agent."""


class Deeds:
    """What the tools really did, told to the witness; no database knows of it."""

    witness: Witness

    @classmethod
    async def do(cls, tool: str, key: str, milliseconds: int) -> str:
        cls.witness.note(did=tool, key=key)
        await asyncio.sleep(milliseconds / 1000)
        cls.witness.note(done=key)
        return f"{tool} {key}"


@dataclass(frozen=True)
class Mind:
    """Any service, answered by a function."""

    id: str
    answer: Answering
    seconds: Callable[[Request], float] = lambda _: 0
    """How long it thinks."""

    async def generate(self, request: Request) -> AsyncIterator[Delta | Answer]:
        await asyncio.sleep(self.seconds(request))
        answer = self.answer(request)
        if answer.text:
            yield Delta(answer.text)
        yield answer

    async def close(self) -> None:
        pass


@contextmanager
def minds(make: Callable[[str], LLMService]) -> Iterator[None]:
    """Every society opened within asks `make(service_id)` instead of a provider."""
    with patch("coterie.agent_runtime.make_service", lambda entry, clock: make(entry.id)):
        yield


class Whim:
    """Says whatever comes to it: text, one to three calls, letters to others, now and then nothing but an error.

    Asked for a summary, it makes one.
    """

    id = "whim"

    def __init__(self, rng: random.Random, agents: tuple[str, ...], witness: Witness, *, calm: bool = False) -> None:
        self._rng, self._agents, self._witness = rng, agents, witness
        self._calm = calm
        """Answer and do nothing more, so that everything comes to an end."""

    async def generate(self, request: Request) -> AsyncIterator[Delta | Answer]:
        ask, summary = f"{self._rng.random()}", is_summary(request)
        # The same request twice is one that was made again.
        self._witness.note(asks=ask, summary=summary, seen=zlib.crc32(repr(request.said).encode()))
        await asyncio.sleep(0 if self._calm else self._rng.uniform(0.001, 0.010))
        self._maybe_fail()
        answer = Answer(text="Much was said.") if summary else self._say(speaker(request))
        if answer.text:
            yield Delta(answer.text)
        self._witness.note(answered=ask)
        yield answer

    async def close(self) -> None:
        pass

    def _maybe_fail(self) -> None:
        luck, word = self._rng.random(), f"{self._rng.randrange(1 << 60):x}"
        if self._calm or luck > 0.07:
            return
        if luck < 0.03:
            self._witness.note(failed="for now")
            raise Transient("busy", retry_after=timedelta(milliseconds=self._rng.randrange(10)))
        if luck < 0.04:
            raise Terminal("I would rather not", category="content")
        if luck < 0.05:
            raise TooLong(f"{BLOCKING[1]}, {word}")
        raise Terminal(f"{BLOCKING[0]}, {word}", category="auth")

    def _say(self, who: str) -> Answer:
        # Never the same words twice: an answer that was sent already is not sent again, and would be missed.
        text = f"{who} says {self._rng.randrange(1 << 60):x}"
        if self._calm or self._rng.random() < 0.45:
            return Answer(text=text)
        count = self._rng.choice((1, 1, 2, 2, 3))
        return Answer(text=self._rng.choice(("", text)), calls=tuple(self._call(n) for n in range(count)))

    def _call(self, n: int) -> Call:
        name = self._rng.choices(("look", "put", "fire", "pay", "send_message"), (2, 2, 3, 3, 2))[0]
        arguments = self._letter() if name == "send_message" else {"n": self._rng.randint(0, 8)}
        return Call(id=f"c{n}", name=name, arguments=arguments)

    def _letter(self) -> dict[str, object]:
        to = self._rng.choice((*self._agents, *self._agents, PERSON, "nobody"))
        letter: dict[str, object] = {"to": to, "payload": {"text": f"m{self._rng.randrange(1 << 60):x}"}}
        if self._rng.random() < 0.3:
            letter["delayMs"] = self._rng.choice((1, 5, 20))
        return letter


def is_summary(request: Request) -> bool:
    return request.said[0] == SystemSaid(ASK)


def speaker(request: Request) -> str:
    """Whose request it is."""
    system = next(said.text for said in request.said if isinstance(said, SystemSaid))
    found = re.search(r"\(id: ([a-z0-9_-]+)\)", system)
    assert found, system
    return found[1]


def last_words(request: Request) -> str:
    """What was said last, by whoever speaks to the model: a message, several, or the result of a call."""
    said = request.said[-1]
    match said:
        case UserSaid(parts):
            return "\n".join(part.text for part in parts if isinstance(part, Text))
        case ToolSaid(_, text):
            return text
    return ""
