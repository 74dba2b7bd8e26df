"""What could be set up without asking anybody for anything: keys in the environment, servers on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from coterie.text import clean, one_line

PATIENCE = 1.0
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
    async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as client:
        return [offer for offer in await asyncio.gather(*(_look(client, one) for one in places)) if offer]


async def _look(client: httpx.AsyncClient, place: Offer) -> Offer | None:
    try:
        async with asyncio.timeout(PATIENCE):
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
