"""Models in Python and tools that report to the witness: agents work without a network."""

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

from coterie.agent.compaction import SUMMARY_PROMPT
from coterie.agent.context_window import estimate_tokens
from coterie.llm.service import (
    Completion,
    ContextTooLong,
    LLMService,
    ModelRequest,
    PermanentError,
    SystemMessage,
    TextDelta,
    TextPart,
    ToolCall,
    ToolMessage,
    TransientError,
    UserMessage,
)
from coterie.messages import PERSON

from .witness import Witness

TOOLS = f"""
from coterie import ToolContext, tool
from {__package__}.fake_model import ToolEffects

@tool(effect="pure")
async def look(n: int, ctx: ToolContext) -> str:
    "Look at something."
    return await ToolEffects.run("look", ctx.idempotency_key, n)

@tool(effect="idempotent")
async def put(n: int, ctx: ToolContext) -> str:
    "Put something in its place."
    return await ToolEffects.run("put", ctx.idempotency_key, n)

@tool
async def fire(n: int, ctx: ToolContext) -> str:
    "Do what cannot be undone."
    return await ToolEffects.run("fire", ctx.idempotency_key, n)

@tool(approval=True)
async def pay(n: int, ctx: ToolContext) -> str:
    "Do what the person must allow."
    return await ToolEffects.run("pay", ctx.idempotency_key, n)
"""
"""The owner's `tools.py`."""

Answer = Callable[[ModelRequest], Completion]
BLOCKING = ("no key",)
"""Beginnings of error messages that block an agent."""
REAL_WINDOW = 3_500
"""Context tokens of the model, fewer than its entry declares."""


class ToolEffects:
    """Reports to the witness, outside the database, which tools ran."""

    witness: Witness

    @classmethod
    async def run(cls, tool: str, key: str, milliseconds: int) -> str:
        cls.witness.note(did=tool, key=key)
        await asyncio.sleep(milliseconds / 1000)
        cls.witness.note(done=key)
        return f"{tool} {key}"


@dataclass(frozen=True)
class FakeModel:
    """Model service whose answers come from a function."""

    id: str
    answer: Answer
    seconds: Callable[[ModelRequest], float] = lambda _: 0
    """Delay before the answer."""

    async def generate(self, request: ModelRequest) -> AsyncIterator[TextDelta | Completion]:
        await asyncio.sleep(self.seconds(request))
        answer = self.answer(request)
        if answer.text:
            yield TextDelta(answer.text)
        yield answer

    async def close(self) -> None:
        pass


@contextmanager
def fake_models(make: Callable[[str], LLMService]) -> Iterator[None]:
    """Every society opened within asks `make(service_id)` instead of a provider."""
    with patch("coterie.agent_runtime.make_service", lambda entry, *_: make(entry.id)):
        yield


class RandomModel:
    """Random answers: text, one to three calls, messages to other agents, sometimes an error.

    A request for a summary gets a summary.
    """

    id = "whim"

    def __init__(self, rng: random.Random, agents: tuple[str, ...], witness: Witness, *, calm: bool = False) -> None:
        self._rng, self._agents, self._witness = rng, agents, witness
        self._calm = calm
        """Answer with text only, so that all turns end."""

    async def generate(self, request: ModelRequest) -> AsyncIterator[TextDelta | Completion]:
        ask, summary = f"{self._rng.random()}", is_summary(request)
        # An equal checksum identifies a repeated request.
        self._witness.note(asks=ask, summary=summary, seen=zlib.crc32(repr(request.messages).encode()))
        await asyncio.sleep(0 if self._calm else self._rng.uniform(0.001, 0.010))
        self._maybe_fail()
        if (size := estimate_tokens(request)) > REAL_WINDOW:
            raise ContextTooLong("too long", limit=REAL_WINDOW, sent=size)
        answer = Completion(text="Much was said.") if summary else self._say(agent_of(request))
        if answer.text:
            yield TextDelta(answer.text)
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
            raise TransientError("busy", retry_after=timedelta(milliseconds=self._rng.randrange(10)))
        if luck < 0.04:
            raise PermanentError("I would rather not", category="content")
        raise PermanentError(f"{BLOCKING[0]}, {word}", category="auth")

    def _say(self, who: str) -> Completion:
        # Texts are unique: a repeated answer is deduplicated and would look lost.
        text = f"{who} says {self._rng.randrange(1 << 60):x}"
        if self._calm or self._rng.random() < 0.45:
            return Completion(text=text)
        count = self._rng.choice((1, 1, 2, 2, 3))
        return Completion(text=self._rng.choice(("", text)), calls=tuple(self._call(n) for n in range(count)))

    def _call(self, n: int) -> ToolCall:
        name = self._rng.choices(("look", "put", "fire", "pay", "send_message"), (2, 2, 3, 3, 2))[0]
        arguments = self._message() if name == "send_message" else {"n": self._rng.randint(0, 8)}
        return ToolCall(id=f"c{n}", name=name, arguments=arguments)

    def _message(self) -> dict[str, object]:
        to = self._rng.choice((*self._agents, *self._agents, PERSON, "nobody"))
        message: dict[str, object] = {"to": to, "payload": {"text": f"m{self._rng.randrange(1 << 60):x}"}}
        if self._rng.random() < 0.3:
            message["delayMs"] = self._rng.choice((1, 5, 20))
        return message


def is_summary(request: ModelRequest) -> bool:
    first = request.messages[0]
    return isinstance(first, SystemMessage) and first.text.startswith(SUMMARY_PROMPT[:40])


def agent_of(request: ModelRequest) -> str:
    """Id of the agent that the request is for."""
    system = next(said.text for said in request.messages if isinstance(said, SystemMessage))
    found = re.search(r"\(id: ([a-z0-9_-]+)\)", system)
    assert found, system
    return found[1]


def last_text(request: ModelRequest) -> str:
    """Text of the last user or tool message."""
    said = request.messages[-1]
    match said:
        case UserMessage(parts):
            return "\n".join(part.text for part in parts if isinstance(part, TextPart))
        case ToolMessage(_, text):
            return text
    return ""
