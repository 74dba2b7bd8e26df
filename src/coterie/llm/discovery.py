"""Health checks of services, and discovery of services that could be set up.

A health check sends one real request and explains the result; it also finds out whether the model calls tools and reads
pictures. Discovery looks for keys in the environment and for model servers on this machine.
"""

from __future__ import annotations

import asyncio
import struct
import time
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, cast

import httpx
import msgspec

from coterie.clock import Clock, to_rfc3339
from coterie.llm.config import ServiceEntry
from coterie.llm.gateway import MakeService
from coterie.llm.learned_limits import ServiceRecords
from coterie.llm.service import (
    Completion,
    InlineFile,
    LLMService,
    MalformedResponse,
    ModelRequest,
    PermanentError,
    ServiceError,
    TextDelta,
    TextPart,
    ToolSpec,
    TransientError,
    UnsupportedCapability,
    UserMessage,
)
from coterie.text import one_line, to_storable

HEALTH_CHECK_TIMEOUT = timedelta(seconds=40)
"""Longest silence: a local server may have to load its model."""
HEALTH_CHECK_MAX_TOKENS = 256
"""Enough for short reasoning before the word."""
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
    """Of the first request."""
    at: datetime
    capabilities: dict[str, bool] = field(default_factory=dict)
    """Which of `tool_calling` and `vision` were tried, and whether they work."""

    def declared_capabilities(self) -> dict[str, list[str]] | None:
        """Return `capabilities` for the entry, as far as they are known; None if none is known."""
        if not self.capabilities:
            return None
        return {
            "input": ["text", "vision"] if self.capabilities.get("vision") else ["text"],
            "output": ["text", "tool_calling"] if self.capabilities.get("tool_calling", True) else ["text"],
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"at": to_rfc3339(self.at)}


async def check_health(
    entry: ServiceEntry, make_service: MakeService, clock: Clock, *, try_capabilities: bool = True
) -> HealthCheck:
    """Send one request to the service, without queue and circuit breaker.

    `try_capabilities`: if it answers, also send one tool and one picture.
    """
    started = time.monotonic()  # network time, not the time of `clock`
    error: ServiceError | None = None
    found: dict[str, bool] = {}
    ms = 0
    if entry.missing_key:
        error = PermanentError(f'service "{entry.id}" has no key: {entry.missing_key} is not set', category="auth")
    else:
        service = make_service(_with_limits(entry))
        try:
            error = await _find_error(service, ModelRequest(messages=(_user_message(HEALTH_CHECK_PROMPT),)))
            ms = round((time.monotonic() - started) * 1000)
            if error is None and try_capabilities:
                found = await _find_capabilities(service)
        finally:
            await service.close()
    code = _code(error)
    return HealthCheck(
        ok=error is None,
        code=code,
        message=" ".join([_message(code, entry, ms), *_describe(found)]),
        detail="" if error is None else str(error),
        ms=ms,
        at=clock.now(),
        capabilities=found,
    )


def _with_limits(entry: ServiceEntry) -> ServiceEntry:
    """Return the entry with the time and token limits of a health check: the owner waits, and tokens cost money."""
    return replace(
        entry,
        timeout=min(entry.timeout, HEALTH_CHECK_TIMEOUT),
        first_token_timeout=min(entry.deadlines.first_byte, HEALTH_CHECK_TIMEOUT),
        total_timeout=min(entry.total_timeout, HEALTH_CHECK_TIMEOUT),
        max_tokens=min(entry.max_tokens or HEALTH_CHECK_MAX_TOKENS, HEALTH_CHECK_MAX_TOKENS),
    )


async def _ask(service: LLMService, request: ModelRequest) -> Completion:
    async with aclosing(cast(AsyncGenerator[TextDelta | Completion, None], service.generate(request))) as pieces:
        async for piece in pieces:
            if isinstance(piece, Completion):
                return piece
    raise MalformedResponse(f'service "{service.id}" ended its stream without an answer')


async def _find_error(service: LLMService, request: ModelRequest) -> ServiceError | None:
    try:
        await _ask(service, request)
    except ServiceError as error:
        return error
    return None


# Capabilities of the model: one tool and one picture are tried


async def _find_capabilities(service: LLMService) -> dict[str, bool]:
    """Return whether each tried capability works. A capability without a clear result is left out."""
    found: dict[str, bool] = {}
    for capability, request, is_proved in (
        ("tool_calling", _TOOL_REQUEST, _calls_the_tool),
        ("vision", _PICTURE_REQUEST, _sees_the_picture),
    ):
        try:
            answer = await _ask(service, request)
        except (UnsupportedCapability, PermanentError) as error:
            if isinstance(error, UnsupportedCapability) or error.category in ("request", "content"):
                found[capability] = False
        except ServiceError:
            pass  # no result: the service is too slow or too busy
        else:
            if is_proved(answer) or answer.finish_reason != "length":  # reasoning up to the token limit is no answer
                found[capability] = is_proved(answer)
    return found


def _calls_the_tool(answer: Completion) -> bool:
    return any(call.name == _TOOL.name and call.invalid_arguments is None for call in answer.calls)


def _sees_the_picture(answer: Completion) -> bool:
    return any(word in answer.text.lower() for word in ("yellow", "gold", "黄"))


def _user_message(text: str, *files: InlineFile) -> UserMessage:
    return UserMessage((TextPart(text), *files))


def _yellow_png(size: int = 32) -> bytes:
    """Return a picture of one colour. A model that reads no pictures is unlikely to guess it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\xff\xe0\x00" * size) * size
    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


_TOOL = ToolSpec(
    name="confirm",
    description="Confirm that you can call tools.",
    parameters={"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
)
_TOOL_REQUEST = ModelRequest(messages=(_user_message("Call the tool confirm with the word: ready"),), tools=(_TOOL,))
_PICTURE = InlineFile(type="image", filename="colour.png", mime_type="image/png", data=_yellow_png())
_PICTURE_REQUEST = ModelRequest(
    messages=(_user_message("Which colour has this picture? Answer with one word.", _PICTURE),)
)
_FOUND = {
    ("tool_calling", True): "It calls tools.",
    ("tool_calling", False): "It does not call tools.",
    ("vision", True): "It reads pictures.",
    ("vision", False): "It does not read pictures.",
}


def _describe(found: Mapping[str, bool]) -> list[str]:
    return [_FOUND[capability, works] for capability, works in found.items()]


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

    def get_draft(self, entry: ServiceEntry) -> HealthCheck | None:
        return self._drafts.get(entry)

    def on_entry_saved(self, entry: ServiceEntry, *, new_key: bool) -> None:
        """Keep the check of this draft, if any. Otherwise a new key voids the earlier check."""
        if check := self._drafts.pop(entry, None):
            self.record(entry, check)
        elif new_key:
            self._records.remove(entry)

    def get(self, entry: ServiceEntry) -> HealthCheck | None:
        return self._records.get(entry)


MODEL_LIST_TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelList:
    """The models that a service offers, or why they are not known."""

    code: HealthCode
    models: tuple[str, ...] = ()
    detail: str = ""
    """The service's error in one sentence, empty on success. Never contains a key."""


async def list_models(entry: ServiceEntry, *, timeout_seconds: float = MODEL_LIST_TIMEOUT_SECONDS) -> ModelList:
    """Ask the service for the names of its models. Redirects are not followed: the request has the key."""
    if entry.missing_key:
        return ModelList(code="auth", detail=f"{entry.missing_key} is not set")
    headers = {header.name: header.value.reveal() for header in entry.headers}
    key = entry.api_key.reveal() if entry.api_key else ""
    if key:
        headers["authorization"] = f"Bearer {key}"
        if httpx.URL(entry.base_url).host.endswith("anthropic.com"):  # its list takes no other header
            headers |= {"x-api-key": key, "anthropic-version": "2023-06-01"}
    try:
        async with asyncio.timeout(timeout_seconds), httpx.AsyncClient(timeout=timeout_seconds) as client:
            listed = msgspec.json.decode(await _get(client, f"{entry.base_url.rstrip('/')}/models", headers))
        names = {item["id"] for item in listed["data"] if isinstance(item["id"], str)}
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        return ModelList(code="auth" if status in (401, 403) else "refused", detail=f"status {status}")
    except (TimeoutError, httpx.TimeoutException):
        return ModelList(code="timeout")
    except (httpx.HTTPError, httpx.InvalidURL):
        return ModelList(code="unreachable")
    except (ValueError, TypeError, KeyError):
        return ModelList(code="malformed")
    clean = sorted(one_line(to_storable(name)).removeprefix("models/") for name in names)
    return ModelList(code="ok", models=tuple(clean[:MAX_MODELS]))


LOCAL_SERVER_TIMEOUT_SECONDS = 1.0
"""For a server on this machine to list its models."""
MAX_MODEL_LIST_BYTES = 1_000_000
MAX_MODELS = 500


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

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "provider": "openai",
            "baseURL": self.base_url,
            "apiKey": self.key_name and f"${{{self.key_name}}}",
            "models": list(self.models),
            # A health check finds out those of a local model.
            "capabilities": {"input": ["text", "vision"], "output": ["text", "tool_calling"]}
            if self.has_vision
            else None,
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
    DiscoveredService(id="vllm", name="vLLM", base_url="http://127.0.0.1:8000/v1"),
)


def discover_keyed_services(environ: Mapping[str, str]) -> list[DiscoveredService]:
    """Return the services whose key is set in the environment."""
    return [service for service in KEYED_SERVICES if environ.get(service.key_name or "", "").strip()]


async def discover_local_servers(
    candidates: Sequence[DiscoveredService] = LOCAL_SERVERS, *, timeout_seconds: float = LOCAL_SERVER_TIMEOUT_SECONDS
) -> list[DiscoveredService]:
    """Return the candidates that answer, with their models."""
    # No proxy: these addresses are on this machine.
    async with httpx.AsyncClient(timeout=timeout_seconds, trust_env=False) as client:
        probes = await asyncio.gather(*(_probe(client, candidate, timeout_seconds) for candidate in candidates))
    return [server for server in probes if server]


async def _probe(
    client: httpx.AsyncClient, candidate: DiscoveredService, timeout_seconds: float
) -> DiscoveredService | None:
    try:
        async with asyncio.timeout(timeout_seconds):
            listed = msgspec.json.decode(await _get(client, f"{candidate.base_url}/models"))
        names = [item["id"] for item in listed["data"]]
    except (httpx.HTTPError, TimeoutError, ValueError, TypeError, KeyError):
        return None  # no server, or another program uses the port
    models = tuple(one_line(to_storable(name)) for name in names[:MAX_MODELS] if isinstance(name, str))
    return replace(candidate, models=models)


async def _get(client: httpx.AsyncClient, url: str, headers: Mapping[str, str] | None = None) -> bytes:
    data = bytearray()
    async with client.stream("GET", url, headers={"accept-encoding": "identity", **(headers or {})}) as response:
        response.raise_for_status()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > MAX_MODEL_LIST_BYTES:
                raise ValueError("too long for a list of models")
    return bytes(data)
