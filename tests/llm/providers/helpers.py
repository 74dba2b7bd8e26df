"""Helpers that send requests to a provider."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from coterie.llm.providers.openai import OpenAIService
from coterie.llm.service import (
    Completion,
    Deadlines,
    LLMService,
    ModelRequest,
    ServiceError,
    SystemMessage,
    TextDelta,
    TextPart,
    ToolCall,
    ToolSpec,
    UserMessage,
)

KEY = "sk-canary-0123456789abcdef"
LOOK_UP = ToolSpec(name="look_up", description="Weather.", parameters={"type": "object"})
HELLO = ModelRequest(messages=(SystemMessage("Be brief."), UserMessage((TextPart("Hello"),))), tools=(LOOK_UP,))
SHORT = Deadlines(
    connect=timedelta(milliseconds=400),
    first_byte=timedelta(milliseconds=600),
    idle=timedelta(milliseconds=450),
    total=timedelta(milliseconds=900),
)
LONG = Deadlines.from_timeout(timedelta(seconds=2), total=timedelta(seconds=8))
"""For tests that do not depend on time."""
GRACE_SECONDS = 10.0
"""After its deadline and this time, a request counts as hung. Long enough for a loaded machine."""


@dataclass(frozen=True)
class Outcome:
    answer: Completion | None
    error: ServiceError | None
    deltas: tuple[str, ...]
    seconds: float


def service(base_url: str, **more: Any) -> OpenAIService:
    given: dict[str, Any] = {"id": "main", "model": "m", "api_key": KEY, "key_name": "MAIN_API_KEY"}
    return OpenAIService(base_url=base_url, **(given | more))


async def ask(one: LLMService, request: ModelRequest = HELLO) -> Outcome:
    """Send one request and return its outcome."""
    started, deltas, answer, error = time.monotonic(), [], None, None
    pieces: AsyncIterator[TextDelta | Completion] = one.generate(request)
    try:
        async for piece in pieces:
            assert answer is None, "nothing comes after the answer"
            if isinstance(piece, TextDelta):
                deltas.append(piece.text)
            else:
                answer = piece
    except ServiceError as failed:
        error = failed
    return Outcome(answer, error, tuple(deltas), time.monotonic() - started)


async def say(one: LLMService, request: ModelRequest = HELLO) -> Completion:
    outcome = await ask(one, request)
    assert outcome.answer, outcome.error
    return outcome.answer


def user(*texts: str) -> UserMessage:
    return UserMessage(tuple(map(TextPart, texts)))


def call(call_id: str, name: str = "look_up", **arguments: Any) -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)
