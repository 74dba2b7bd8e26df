"""Health checks of services, and discovery of services that could be set up.

A health check sends one real request and explains the result. Discovery looks for keys in the environment and for model
servers on this machine.
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

from coterie.clock import Clock, to_rfc3339
from coterie.llm.config import ServiceEntry
from coterie.llm.gateway import MakeService
from coterie.llm.learned_limits import ServiceRecords
from coterie.llm.service import MalformedResponse, PermanentError, ServiceError, TransientError
from coterie.llm.types import Completion, ModelRequest, TextPart, UserMessage
from coterie.text import one_line, to_storable

HEALTH_CHECK_TIMEOUT = timedelta(seconds=40)
"""Half of it is for the first byte: a local server may have to load its model."""
HEALTH_CHECK_PROMPT = "Answer with the single word: ok"

HealthCode = Literal["ok", "auth", "unreachable", "no_model", "quota", "refused", "timeout", "malformed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """Result of one health check."""

    ok: bool
    code: HealthCode
    message: str
    """Meaning and remedy, in one sentence."""
    detail: str
    """The service's error in one sentence, empty on success. Never contains a key."""
    ms: int
    at: datetime

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"at": to_rfc3339(self.at)}


async def check_health(entry: ServiceEntry, make_service: MakeService, clock: Clock) -> HealthCheck:
    """Send one request to the service, without queue and circuit breaker."""
    started = time.monotonic()  # network time, not the time of `clock`
    error: ServiceError | None
    if entry.missing_key:
        error = PermanentError(f'service "{entry.id}" has no key: {entry.missing_key} is not set', category="auth")
    else:
        error = await _send_prompt(replace(entry, timeout=min(entry.timeout, HEALTH_CHECK_TIMEOUT)), make_service)
    ms = round((time.monotonic() - started) * 1000)
    code = _code(error)
    return HealthCheck(
        ok=error is None,
        code=code,
        message=_message(code, entry, ms),
        detail="" if error is None else str(error),
        ms=ms,
        at=clock.now(),
    )


async def _send_prompt(entry: ServiceEntry, make_service: MakeService) -> ServiceError | None:
    service = make_service(entry)
    pieces = service.generate(ModelRequest(messages=(UserMessage((TextPart(HEALTH_CHECK_PROMPT),)),)))
    try:
        async for piece in pieces:
            if isinstance(piece, Completion):
                return None
    except ServiceError as error:
        return error
    finally:
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()
        await service.close()
    return MalformedResponse(f'service "{entry.id}" ended its stream without an answer')


def _code(error: ServiceError | None) -> HealthCode:
    match error:
        case None:
            return "ok"
        case PermanentError(category="auth"):
            return "auth"
        case PermanentError(category="model"):
            return "no_model"
        case PermanentError(category="quota"):
            return "quota"
        case TransientError(reason="unreachable"):
            return "unreachable"
        case TransientError(reason="timeout"):
            return "timeout"
        case TransientError(reason="truncated") | MalformedResponse():
            return "malformed"
    return "refused"


def _message(code: HealthCode, entry: ServiceEntry, ms: int) -> str:
    match code:
        case "ok":
            return f"It answered in {ms / 1000:.1f} s."
        case "auth" if entry.api_key:
            return "The key was not accepted: copy it again, or make a new one where you got it."
        case "auth":
            return "It needs a key: enter one."
        case "unreachable":
            return f"No server answers at {entry.base_url}: check the address, and that the server runs."
        case "no_model":
            return f'There is no model "{entry.model}" at {entry.base_url}: check the name and the address.'
        case "quota":
            return "The account has no quota left: check its plan and billing."
        case "timeout":
            return "It did not answer in time: try again, or choose a smaller model."
        case "malformed":
            return f"The server at {entry.base_url} is not OpenAI-compatible: check the address."
    return "It refused the request: see its error below; try again later, or change its settings."


class HealthChecks:
    """The last health check of each service, in a file."""

    def __init__(self, file: Path) -> None:
        self._records = ServiceRecords(file, HealthCheck)
        self._drafts: dict[ServiceEntry, HealthCheck] = {}
        """Checks of unsaved entries; in memory only, because these entries contain keys."""

    def record(self, entry: ServiceEntry, check: HealthCheck) -> None:
        self._records.put(entry, check)

    def record_draft(self, entry: ServiceEntry, check: HealthCheck) -> None:
        self._drafts = {entry: check}

    def on_entry_saved(self, entry: ServiceEntry, *, new_key: bool) -> None:
        """Keep the check of this draft, if any. Otherwise a new key voids the earlier check."""
        if check := self._drafts.pop(entry, None):
            self.record(entry, check)
        elif new_key:
            self._records.remove(entry)

    def get(self, entry: ServiceEntry) -> HealthCheck | None:
        return self._records.get(entry)


LOCAL_SERVER_TIMEOUT_SECONDS = 1.0
"""For a server on this machine to list its models."""
MAX_MODEL_LIST_BYTES = 1_000_000
MAX_MODELS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredService:
    """A service that could be set up."""

    id: str
    name: str
    base_url: str
    key_name: str | None = None
    """Environment variable of the key. The key itself is never returned."""
    models: tuple[str, ...] = ()
    """Models that a local server lists."""
    has_vision: bool = False
    """Most of its models read images and call tools. Unknown for local servers."""

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "provider": "openai",
            "baseURL": self.base_url,
            "apiKey": self.key_name and f"${{{self.key_name}}}",
            "models": list(self.models),
            "capabilities": {
                "input": ["text", "vision"] if self.has_vision else ["text"],
                "output": ["text", "tool_calling"] if self.has_vision else ["text"],
            },
        }


KEYED_SERVICES = (
    DiscoveredService(
        id="openai",
        name="OpenAI",
        base_url="https://api.openai.com/v1",
        key_name="OPENAI_API_KEY",
        has_vision=True,
    ),
    DiscoveredService(
        id="anthropic",
        name="Anthropic",
        base_url="https://api.anthropic.com/v1",
        key_name="ANTHROPIC_API_KEY",
        has_vision=True,
    ),
    DiscoveredService(
        id="gemini",
        name="Google Gemini",
        base_url="https://generativelanguage.googleapis.com/v1beta/openai",
        key_name="GEMINI_API_KEY",
        has_vision=True,
    ),
)
LOCAL_SERVERS = (
    DiscoveredService(id="ollama", name="Ollama", base_url="http://127.0.0.1:11434/v1"),
    DiscoveredService(id="llama-cpp", name="llama.cpp", base_url="http://127.0.0.1:8080/v1"),
    DiscoveredService(id="lm-studio", name="LM Studio", base_url="http://127.0.0.1:1234/v1"),
)


def discover_keyed_services(environ: Mapping[str, str]) -> list[DiscoveredService]:
    """Return the services whose key is set in the environment."""
    return [service for service in KEYED_SERVICES if environ.get(service.key_name or "", "").strip()]


async def discover_local_servers(candidates: Sequence[DiscoveredService] = LOCAL_SERVERS) -> list[DiscoveredService]:
    """Return the candidates that answer, with their models."""
    # No proxy: these addresses are on this machine.
    async with httpx.AsyncClient(timeout=LOCAL_SERVER_TIMEOUT_SECONDS, trust_env=False) as client:
        probes = await asyncio.gather(*(_probe(client, candidate) for candidate in candidates))
    return [server for server in probes if server]


async def _probe(client: httpx.AsyncClient, candidate: DiscoveredService) -> DiscoveredService | None:
    try:
        async with asyncio.timeout(LOCAL_SERVER_TIMEOUT_SECONDS):
            listed = msgspec.json.decode(await _get(client, f"{candidate.base_url}/models"))
        names = [item["id"] for item in listed["data"]]
    except (httpx.HTTPError, TimeoutError, ValueError, TypeError, KeyError):
        return None  # no server, or another program uses the port
    models = tuple(one_line(to_storable(name)) for name in names[:MAX_MODELS] if isinstance(name, str))
    return replace(candidate, models=models)


async def _get(client: httpx.AsyncClient, url: str) -> bytes:
    data = bytearray()
    async with client.stream("GET", url, headers={"accept-encoding": "identity"}) as response:
        response.raise_for_status()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > MAX_MODEL_LIST_BYTES:
                raise ValueError("too long for a list of models")
    return bytes(data)
