"""Trying a service out: one real question, and what came of it in words."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from coterie.clock import Clock, to_wire
from coterie.llm.chat import Answer, Request, Text, UserSaid
from coterie.llm.models import MakeService
from coterie.llm.service import Malformed, ServiceError, Terminal, Transient
from coterie.llm.service_entry import ServiceEntry

PATIENCE = timedelta(seconds=40)
"""Half of it is for the first word: a local server may have to load its model first."""
QUESTION = "Answer with the single word: ok"

Code = Literal["ok", "auth", "unreachable", "no_model", "quota", "refused", "timeout", "malformed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    ok: bool
    code: Code
    message: str
    """What it means and what to do, in one sentence."""
    detail: str
    """What the service said, in one sentence; empty when all is well. Never holds a key."""
    ms: int
    at: datetime

    def to_wire(self) -> dict[str, Any]:
        return asdict(self) | {"at": to_wire(self.at)}


async def try_out(entry: ServiceEntry, make: MakeService, clock: Clock) -> Trial:
    """Ask the service one thing, past queue and breaker. Whatever comes of it is a `Trial`."""
    began = time.monotonic()  # a wire lives in real time, whatever the clock says
    error: ServiceError | None = None
    if entry.missing_key:
        error = Terminal(f'service "{entry.id}" has no key: {entry.missing_key} is not set', category="auth")
    else:
        error = await _ask(_hurried(entry), make)
    ms = round((time.monotonic() - began) * 1000)
    code = _code(error)
    detail = "" if error is None else str(error)
    return Trial(ok=error is None, code=code, message=_told(code, entry, ms), detail=detail, ms=ms, at=clock.now())


async def _ask(entry: ServiceEntry, make: MakeService) -> ServiceError | None:
    service = make(entry)
    pieces = service.generate(Request(said=(UserSaid((Text(QUESTION),)),)))
    try:
        async for piece in pieces:
            if isinstance(piece, Answer):
                return None
    except ServiceError as error:
        return error
    finally:
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()
        await service.close()
    return Malformed(f'service "{entry.id}" ended its stream without an answer')


def _hurried(entry: ServiceEntry) -> ServiceEntry:
    return replace(entry, timeout=min(entry.timeout, PATIENCE))


def _code(error: ServiceError | None) -> Code:
    match error:
        case None:
            return "ok"
        case Terminal(category="auth"):
            return "auth"
        case Terminal(category="model"):
            return "no_model"
        case Terminal(category="quota"):
            return "quota"
        case Transient(why="unreachable"):
            return "unreachable"
        case Transient(why="late"):
            return "timeout"
        case Transient(why="cut") | Malformed():
            return "malformed"
    return "refused"


def _told(code: Code, entry: ServiceEntry, ms: int) -> str:
    match code:
        case "ok":
            return f"It answered in {ms / 1000:.1f} s."
        case "auth" if entry.api_key:
            return "The key was not accepted: copy it again, or make a new one where you got it."
        case "auth":
            return "It wants a key: enter one."
        case "unreachable":
            return f"Nobody answers at {entry.base_url}: check the address, and that the server runs."
        case "no_model":
            return f'There is no model "{entry.model}" at {entry.base_url}: check the name and the address.'
        case "quota":
            return "The account has nothing left to spend: check its plan and billing."
        case "timeout":
            return "It did not answer in time: try again, or choose a smaller model."
        case "malformed":
            return f"What answers at {entry.base_url} speaks no OpenAI-compatible language: check the address."
    return "It is there but would not answer: what it said is below; try again later, or change its settings."
