"""Trying a service out: one real question, and what came of it in words.

Which services were tried out, and how that went: a service that nobody tried is marked as such.

What could be set up without asking anybody for anything: keys in the environment, servers on this machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec

from coterie.clock import Clock, to_wire
from coterie.llm.config import ServiceEntry
from coterie.llm.gateway import MakeService
from coterie.llm.learned_limits import Notebook
from coterie.llm.service import Malformed, ServiceError, Terminal, Transient
from coterie.llm.types import Answer, Request, Text, UserSaid
from coterie.text import clean, one_line

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


class Trials:
    def __init__(self, file: Path) -> None:
        self._notes = Notebook(file, Trial)
        self._drafts: dict[ServiceEntry, Trial] = {}
        """Of entries that are not saved yet, with their keys: only in memory."""

    def note(self, entry: ServiceEntry, trial: Trial) -> None:
        self._notes.write(entry, trial)

    def note_draft(self, entry: ServiceEntry, trial: Trial) -> None:
        self._drafts = {entry: trial}

    def saved(self, entry: ServiceEntry, *, new_key: bool) -> None:
        """The entry is in the file now. A trial of just this draft is one of it; with a new key, no other counts."""
        if trial := self._drafts.pop(entry, None):
            self.note(entry, trial)
        elif new_key:
            self._notes.erase(entry)

    def of(self, entry: ServiceEntry) -> Trial | None:
        return self._notes.of(entry)


PATIENCE_OFFERS = 1.0
"""Seconds for a server on this machine to say which models it has."""
MAX_BYTES = 1_000_000
MAX_MODELS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    id: str
    name: str
    base_url: str
    key_name: str | None = None
    """The environment variable that holds the key; the key itself is nobody's business."""
    models: tuple[str, ...] = ()
    """What a local server says it has."""
    sees: bool = False
    """Most of its models take pictures and call tools; what a local one can do, its owner knows."""

    def to_wire(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "provider": "openai",
            "baseURL": self.base_url,
            "apiKey": self.key_name and f"${{{self.key_name}}}",
            "models": list(self.models),
            "capabilities": {
                "input": ["text", "vision"] if self.sees else ["text"],
                "output": ["text", "tool_calling"] if self.sees else ["text"],
            },
        }


WITH_KEYS = (
    Offer(id="openai", name="OpenAI", base_url="https://api.openai.com/v1", key_name="OPENAI_API_KEY", sees=True),
    Offer(
        id="anthropic",
        name="Anthropic",
        base_url="https://api.anthropic.com/v1",
        key_name="ANTHROPIC_API_KEY",
        sees=True,
    ),
    Offer(
        id="gemini",
        name="Google Gemini",
        base_url="https://generativelanguage.googleapis.com/v1beta/openai",
        key_name="GEMINI_API_KEY",
        sees=True,
    ),
)
LOCAL = (
    Offer(id="ollama", name="Ollama", base_url="http://127.0.0.1:11434/v1"),
    Offer(id="llama-cpp", name="llama.cpp", base_url="http://127.0.0.1:8080/v1"),
    Offer(id="lm-studio", name="LM Studio", base_url="http://127.0.0.1:1234/v1"),
)


def keys_found(environ: Mapping[str, str]) -> list[Offer]:
    return [offer for offer in WITH_KEYS if environ.get(offer.key_name or "", "").strip()]


async def servers_found(places: Sequence[Offer] = LOCAL) -> list[Offer]:
    """Those that answer. Only this machine is asked, and only for the names of models."""
    # No proxy: an address of this machine is meant as it stands.
    async with httpx.AsyncClient(timeout=PATIENCE_OFFERS, trust_env=False) as client:
        return [offer for offer in await asyncio.gather(*(_look(client, one) for one in places)) if offer]


async def _look(client: httpx.AsyncClient, place: Offer) -> Offer | None:
    try:
        async with asyncio.timeout(PATIENCE_OFFERS):
            listed = msgspec.json.decode(await _get(client, f"{place.base_url}/models"))
        names = [item["id"] for item in listed["data"]]
    except (httpx.HTTPError, TimeoutError, ValueError, TypeError, KeyError):
        return None  # nobody is there, or somebody else: any program may have such a port
    models = tuple(one_line(clean(name)) for name in names[:MAX_MODELS] if isinstance(name, str))
    return Offer(id=place.id, name=place.name, base_url=place.base_url, models=models)


async def _get(client: httpx.AsyncClient, url: str) -> bytes:
    data = bytearray()
    async with client.stream("GET", url, headers={"accept-encoding": "identity"}) as response:
        response.raise_for_status()
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > MAX_BYTES:
                raise ValueError("too long for a list of models")
    return bytes(data)
