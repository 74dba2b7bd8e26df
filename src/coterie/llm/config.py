"""Configuration of model services: llmservices.json, its keys, and the registry of its entries.

An unusable entry is reported as a `Problem` and skipped; an unusable field is reported and takes its default. Only a
file that cannot be parsed raises `ConfigError`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from coterie.artifacts import ArtifactType
from coterie.errors import ConfigError, Problem
from coterie.files import is_readable_by_others, write_private
from coterie.llm.json_node import JsonNode, describe_value, find_typo
from coterie.llm.price import Price, read_price
from coterie.llm.service import (
    DEFAULT_TIMEOUT,
    DEFAULT_TOTAL_TIMEOUT,
    INFERRED,
    MAX_TEMPERATURE,
    STANDARD_CAPABILITIES,
    Capabilities,
    Deadlines,
    Direction,
    Sampling,
    UnknownService,
    check_effort,
    check_extra_body,
)
from coterie.problem_texts import ProblemText, name_json_error
from coterie.redaction import mask
from coterie.text import closest_match, one_line, to_storable

SERVICES_FILE = "llmservices.json"
REMOTE_AGENT = "a2a"
"""Provider of an agent elsewhere, which `[remote]` of coterie.toml names."""
MAX_SERVICES_BYTES = 4_000_000
MAX_SECRETS_BYTES = 1 << 20
MAX_ID_LENGTH = 64
KeyLookup = Callable[[str], "str | None"]
"""Returns the key with that name."""

_TOP_KEYS = ("services", "examples", "about")
"""`examples` and `about` are for people and are not read."""
_ENTRY_KEYS = (
    *("id", "name", "provider", "baseURL", "model", "apiKey", "capabilities", "capabilityTags", "description"),
    *("maxConcurrentRequests", "timeout", "firstTokenTimeout", "totalTimeout", "contextTokens", "limits", "fallback"),
    *("temperature", "topP", "maxTokens", "reasoningEffort", "extraBody", "headers", "price"),
)
_KEY_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_OWN_HEADERS = ("host", "content-length", "content-type", "transfer-encoding", "connection", "accept-encoding")
_TEXT_ONLY = frozenset({"text"})
_MS = timedelta(milliseconds=1)
_OTHER_NAMES = {
    **dict.fromkeys(("image", "images", "image_input", "picture", "pictures"), "vision"),
    **dict.fromkeys(("sound", "speech", "voice"), "audio"),
    **dict.fromkeys(("pdf", "document", "documents"), "file"),
    **dict.fromkeys(("tools", "tool_use", "tool_calls", "functions", "function_calling"), "tool_calling"),
    **dict.fromkeys(("json", "json_mode", "json_schema", "structured_outputs"), "structured_output"),
}
"""What other products call the standard capabilities."""


class Secret:
    """A key that cannot be printed, logged or encoded by accident. `reveal()` returns it."""

    __slots__ = ("_value", "name")

    def __init__(self, value: str, name: str = "") -> None:
        self._value = value
        self.name = name
        """Environment variable of the key, for error messages."""

    def reveal(self) -> str:
        return self._value

    @property
    def masked(self) -> str:
        return mask(self._value)

    def __repr__(self) -> str:
        return "Secret(…)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


class SecretsFile:
    """`data/secrets.json`: keys by name, readable by its owner only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[dict[str, str], list[Problem]]:
        """Return the keys by name and the problems of the file. Problems never quote its content."""
        try:
            if self.path.stat().st_size > MAX_SECRETS_BYTES:
                return {}, [self._problem(ProblemText("too_large", most=f"{MAX_SECRETS_BYTES:,}"))]
            content = json.loads(self.path.read_bytes())
            is_exposed = is_readable_by_others(self.path)
        except FileNotFoundError:
            return {}, []
        except OSError as error:
            return {}, [self._problem(ProblemText("unreadable", why=error.strerror))]
        except (ValueError, RecursionError):
            return {}, [self._problem(ProblemText("secrets_not_json"))]
        if not isinstance(content, dict):
            return {}, [self._problem(ProblemText("expected_secrets"))]
        keys = {name: key for name, key in content.items() if isinstance(key, str)}
        problems = [self._problem(ProblemText("expected_string"), f": {name}") for name in content if name not in keys]
        if is_exposed:
            problems.append(self._problem(ProblemText("secrets_readable", name=self.path.name)))
        return keys, problems

    def put(self, name: str, key: str) -> None:
        self._write(self._read_all() | {name: key})

    def remove(self, name: str) -> None:
        keys = self._read_all()
        if keys.pop(name, None) is not None:
            self._write(keys)

    def _read_all(self) -> dict[str, str]:
        keys, problems = self.read()
        # Overwriting an unreadable file would lose the keys in it.
        if problems and not keys:
            raise ConfigError(problems)
        return keys

    def _write(self, keys: Mapping[str, str]) -> None:
        write_private(self.path, json.dumps(keys, indent=2).encode())

    def _problem(self, message: str, location: str = "") -> Problem:
        return Problem(f"{self.path.parent.name}/{self.path.name}{location}", message)


def key_lookup(environ: Mapping[str, str], stored: Mapping[str, str]) -> KeyLookup:
    """Return a lookup that prefers the environment to stored keys. Blank values count as unset."""

    def find(name: str) -> str | None:
        return environ.get(name, "").strip() or stored.get(name, "").strip() or None

    return find


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimits:
    """The largest attachment of each type that is sent as bytes; in bytes."""

    image: int = 10_000_000
    audio: int = 20_000_000
    file: int = 20_000_000

    def for_type(self, kind: ArtifactType) -> int:
        return {"image": self.image, "audio": self.audio, "file": self.file}[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """An HTTP header of every request to a service. Its value may hold secrets and is shown masked."""

    name: str
    value: Secret
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """The values of the references in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceEntry:
    """One service of llmservices.json."""

    id: str
    base_url: str
    model: str
    name: str = ""
    provider: str = "openai"
    """`openai`: any server with OpenAI's chat completions API."""
    api_key: Secret | None = None
    missing_key: str | None = None
    """Name of a key that is required but not set; the service cannot be used without it."""
    capabilities: Capabilities = INFERRED
    capability_tags: tuple[str, ...] = ()
    description: str = ""
    max_concurrent_requests: int = 8
    timeout: timedelta = DEFAULT_TIMEOUT
    """Longest silence within an answer."""
    first_token_timeout: timedelta | None = None
    """Longest silence before an answer. None: derived from `timeout`."""
    total_timeout: timedelta = DEFAULT_TOTAL_TIMEOUT
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    reasoning_effort: str | None = None
    extra_body: str = ""
    """A JSON object with more keys of each request."""
    headers: tuple[Header, ...] = ()
    context_tokens: int | None = None
    limits: SizeLimits = SizeLimits()
    fallback: tuple[str, ...] = ()
    """Ids of the services to try in this order if this one fails."""
    price: Price | None = None
    """None: the cost of requests is unknown."""

    def __hash__(self) -> int:
        return hash(self.id)  # entries are keys that every request looks up; hashing all fields takes much longer

    @property
    def is_remote_agent(self) -> bool:
        """True if it is an agent elsewhere instead of a model: it uses no tokens of ours."""
        return self.provider == REMOTE_AGENT

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            reasoning_effort=self.reasoning_effort,
            extra_body=self.extra_body,
        )

    @property
    def deadlines(self) -> Deadlines:
        first = self.first_token_timeout
        if first is None and self.fallback:
            first = self.timeout / 2  # another service can answer instead
        return Deadlines.from_timeout(self.timeout, first_byte=first, total=self.total_timeout)

    @property
    def digest(self) -> str:
        """Hash of all fields except the price, and the key and the values of headers, of which no trace may be stored.

        A price changes nothing that a test of the service found.
        """
        fields = {key: value for key, value in self.to_dict().items() if key not in ("apiKey", "price")}
        fields["headers"] = sorted(header.name for header in self.headers)
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

    def to_dict(self) -> dict[str, Any]:
        """Return the entry in the format of the file, with the key masked."""
        return {
            "id": self.id,
            "name": self.name or self.id,
            "provider": self.provider,
            "baseURL": self.base_url,
            "model": self.model,
            "apiKey": self.api_key and self.api_key.masked,
            "capabilities": {
                "input": sorted(self.capabilities.input),
                "output": sorted(self.capabilities.output),
                "source": "inferred" if self.capabilities.inferred else "declared",
            },
            "capabilityTags": list(self.capability_tags),
            "description": self.description,
            "maxConcurrentRequests": self.max_concurrent_requests,
            "timeout": self.timeout // _MS,
            "firstTokenTimeout": self.first_token_timeout and self.first_token_timeout // _MS,
            "totalTimeout": self.total_timeout // _MS,
            "temperature": self.temperature,
            "topP": self.top_p,
            "maxTokens": self.max_tokens,
            "reasoningEffort": self.reasoning_effort,
            "extraBody": self.sampling.extra_fields(),
            "headers": {header.name: header.value.masked for header in self.headers},
            "contextTokens": self.context_tokens,
            "limits": {
                "imageBytes": self.limits.image,
                "audioBytes": self.limits.audio,
                "fileBytes": self.limits.file,
            },
            "fallback": list(self.fallback),
            "price": self.price and self.price.to_dict(),
        }


def parse_services(data: bytes, find_key: KeyLookup) -> tuple[Sequence[ServiceEntry], Sequence[Problem]]:
    """Return the usable entries in file order and all problems. Raise `ConfigError` if `data` is no JSON."""
    top = JsonNode(parse_json(data), SERVICES_FILE, "", [])
    if not top.is_object(_TOP_KEYS):
        return [], top.problems
    by_id: dict[str, tuple[ServiceEntry, JsonNode]] = {}
    for node in top.child("services").items():
        entry = _entry(node, find_key)
        if entry and entry.id in by_id:
            node.child("id").report(ProblemText("repeated_id", name=entry.id, where=by_id[entry.id][1].path))
        elif entry:
            by_id[entry.id] = entry, node
    first_priced = next((entry for entry, _ in by_id.values() if entry.price), None)
    entries = [
        replace(
            entry,
            fallback=_fallback(entry.id, node.child("fallback"), by_id),
            price=_same_currency(entry.price, node, first_priced),
        )
        for entry, node in by_id.values()
    ]
    return entries, top.problems


def service_paths(data: bytes) -> dict[str, str]:
    """The path of each service in the file, by its id: `services[0]`. Of two equal ids the first counts."""
    paths: dict[str, str] = {}
    for node in JsonNode(parse_json(data), SERVICES_FILE, "", []).child("services").items():
        service_id = node.child("id").value
        if isinstance(service_id, str):
            paths.setdefault(to_storable(service_id).strip(), node.path)
    return paths


def find_unknown_keys(data: bytes) -> list[Problem]:
    """A problem for each key that loading ignores. Keys that look like a typo are reported by `parse_services`."""
    top = JsonNode(parse_json(data), SERVICES_FILE, "", [])
    _report_unknown(top, _TOP_KEYS)
    for node in top.child("services").items():
        _report_unknown(node, _ENTRY_KEYS)
        _report_unknown(node.child("capabilities"), ("input", "output"))
        _report_unknown(node.child("limits"), ("imageBytes", "audioBytes", "fileBytes"))
    return top.problems


def _report_unknown(node: JsonNode, known: Collection[str]) -> None:
    given = node.value if isinstance(node.value, dict) else {}
    missing = [key for key in known if key not in given]
    for key in given:
        # Keys such as "_comment", "$schema" and "//" are notes of the owner.
        if key not in known and key[:1].isalpha() and not find_typo(key, missing):
            meant = closest_match(key, set(missing))
            hint = f'; did you mean "{meant}"?' if meant else "; remove it, or start its name with _"
            node.child(one_line(key, 40)).report(f"is not known and has no effect{hint}")


def parse_json(data: bytes) -> object:
    if len(data) > MAX_SERVICES_BYTES:
        _fatal(ProblemText("too_large", most=f"{MAX_SERVICES_BYTES:,}"))
    try:
        # Editors on Windows add a byte order mark.
        return json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        _fatal(ProblemText("not_utf8_in_line", line=line, column=column))
    except json.JSONDecodeError as error:
        why = name_json_error(error)
        _fatal(ProblemText("not_json_in_line", line=error.lineno, column=error.colno, why=why))
    except RecursionError:
        _fatal(ProblemText("too_deep"))
    except ValueError as error:
        why = error.args[0] if isinstance(error.args[0], ProblemText) else one_line(str(error))
        _fatal(ProblemText("unreadable_number", why=why))


def _fatal(text: ProblemText) -> NoReturn:
    raise ConfigError([Problem(SERVICES_FILE, text, fatal=True)]) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(ProblemText("no_constant", name=name))


def _entry(node: JsonNode, find_key: KeyLookup) -> ServiceEntry | None:
    if not node.is_object(_ENTRY_KEYS):
        return None
    service_id = _id(node.child("id"))
    base_url = _base_url(node.child("baseURL"))
    model = node.child("model").required_text()
    key, missing = _key(node.child("apiKey"), find_key)
    headers, missing_in_header = read_headers(node.child("headers"), find_key)
    entry = ServiceEntry(
        id=service_id or "",
        name=node.child("name").optional_text(),
        provider=node.child("provider").optional_text().lower() or "openai",
        base_url=base_url or "",
        model=model or "",
        api_key=key,
        missing_key=missing or missing_in_header,
        capabilities=_capabilities(node.child("capabilities")),
        capability_tags=node.child("capabilityTags").text_items(),
        description=node.child("description").optional_text(),
        max_concurrent_requests=node.child("maxConcurrentRequests").integer(8),
        timeout=node.child("timeout").milliseconds() or DEFAULT_TIMEOUT,
        first_token_timeout=node.child("firstTokenTimeout").milliseconds(),
        total_timeout=node.child("totalTimeout").milliseconds() or DEFAULT_TOTAL_TIMEOUT,
        temperature=node.child("temperature").optional_number(MAX_TEMPERATURE),
        top_p=node.child("topP").optional_number(1),
        max_tokens=node.child("maxTokens").optional_integer(),
        reasoning_effort=_effort(node.child("reasoningEffort")),
        extra_body=_extra_body(node.child("extraBody")),
        headers=headers,
        context_tokens=node.child("contextTokens").optional_integer(),
        limits=_limits(node.child("limits")),
        price=read_price(node.child("price")),
    )
    return entry if service_id and base_url and model else None


def _id(node: JsonNode) -> str | None:
    text = node.required_text()
    if text and (len(text) > MAX_ID_LENGTH or not text.isprintable()):
        node.report_expected("expected_line", most=MAX_ID_LENGTH)
        return None
    return text


def _base_url(node: JsonNode) -> str | None:
    text = node.required_text()
    if text is None:
        return None
    # Problems do not quote the address: it may contain a key.
    if not _is_http_url(text):
        node.report(ProblemText("expected_url"))
        return None
    if any(mark in text for mark in "@?#"):
        node.report(ProblemText("expected_plain_url"))
        return None
    return text.rstrip("/")


def _is_http_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0 and text.isprintable()
    except ValueError:
        return False


def _key(node: JsonNode, find_key: KeyLookup) -> tuple[Secret | None, str | None]:
    """Return the key, or the name of the missing key. Problems never quote the value."""
    value = node.value
    if value is None or value == "":
        return None, None
    if not isinstance(value, str) or ("${" in value and not _KEY_REFERENCE.fullmatch(value.strip())):
        node.report(ProblemText("expected_reference"))
        return None, "apiKey"
    reference = _KEY_REFERENCE.fullmatch(value.strip())
    name = reference[1] if reference else "apiKey"
    key = find_key(name) if reference else value.strip()
    if not key:
        node.report(ProblemText("missing_key", name=name))
        return None, name
    if not (key.isascii() and key.isprintable()):
        node.report(ProblemText("broken_key", name=name))
        return None, name
    return Secret(key, name if reference else ""), None


def read_headers(node: JsonNode, find_key: KeyLookup) -> tuple[tuple[Header, ...], str | None]:
    """Return the headers, and the name of a missing secret. Problems never quote a value."""
    if node.value is None:
        return (), None
    if not isinstance(node.value, dict):
        node.report_expected("expected_headers")
        return (), None
    headers, missing = list[Header](), None
    for name, value in node.value.items():
        header = node.child(one_line(name, 40))
        if not _HEADER_NAME.fullmatch(name) or name.lower() in _OWN_HEADERS:
            header.report(ProblemText("expected_header"))
            continue
        if not isinstance(value, str) or "${" in _KEY_REFERENCE.sub("", value):
            header.report(ProblemText("expected_header_value"))
            continue
        secrets = {reference[1]: find_key(reference[1]) or "" for reference in _KEY_REFERENCE.finditer(value)}
        if absent := next((secret for secret, found in secrets.items() if not found), None):
            header.report(ProblemText("missing_key", name=absent))
            missing = missing or absent
            continue
        text = _replace_references(value, secrets)
        if not (text.isascii() and text.isprintable()):
            header.report(ProblemText("broken_header"))
            continue
        headers.append(Header(name=name, value=Secret(text), secrets=tuple(secrets.values())))
    return tuple(headers), missing


def _replace_references(text: str, secrets: Mapping[str, str]) -> str:
    return _KEY_REFERENCE.sub(lambda reference: secrets[reference[1]], text).strip()


def _effort(node: JsonNode) -> str | None:
    wrong = None if node.value is None else check_effort(node.value)
    if wrong:
        node.report(wrong.with_got(describe_value(node.value)))
    return node.value if isinstance(node.value, str) and not wrong else None


def _extra_body(node: JsonNode) -> str:
    if node.value is None:
        return ""
    wrong = check_extra_body(node.value) if isinstance(node.value, dict) else ProblemText("expected_object")
    if wrong:
        node.report(wrong.with_got(describe_value(node.value)))
    return "" if wrong or not node.value else json.dumps(node.value, sort_keys=True)


def _capabilities(node: JsonNode) -> Capabilities:
    if node.value is None or not node.is_object(("input", "output")):
        return INFERRED
    inputs, outputs = _types(node.child("input")), _types(node.child("output"))
    if inputs is outputs is None:
        return INFERRED
    return Capabilities(
        input=_TEXT_ONLY if inputs is None else inputs,
        output=_TEXT_ONLY if outputs is None else outputs,
    )


def _types(node: JsonNode) -> frozenset[str] | None:
    """Return None if the value is absent or no array."""
    items = node.items()
    if not isinstance(node.value, list):
        return None
    return frozenset(name for item in items if (name := _type(item)))


def _type(node: JsonNode) -> str | None:
    name = node.required_text()
    if name is None or name in STANDARD_CAPABILITIES:
        return name
    suggestion = _OTHER_NAMES.get(name.lower()) or find_typo(name, STANDARD_CAPABILITIES)
    if name != name.lower() or len(name) > MAX_ID_LENGTH or not name.isprintable() or " " in name:
        node.report(ProblemText("expected_capability", got=f'"{one_line(name, 40)}"', meant=suggestion))
        return None
    if suggestion:
        node.report(ProblemText("custom_capability", name=name, meant=suggestion))
    return name


def _limits(node: JsonNode) -> SizeLimits:
    default = SizeLimits()
    if node.value is None or not node.is_object(("imageBytes", "audioBytes", "fileBytes")):
        return default
    return SizeLimits(
        image=node.child("imageBytes").integer(default.image, least=0),
        audio=node.child("audioBytes").integer(default.audio, least=0),
        file=node.child("fileBytes").integer(default.file, least=0),
    )


def _fallback(entry_id: str, node: JsonNode, known: Collection[str]) -> tuple[str, ...]:
    chosen: dict[str, None] = {}
    for item in node.items():
        name = item.required_text()
        if name is None:
            continue
        if name == entry_id:
            item.report(ProblemText("own_fallback"))
        elif name in known:
            chosen[name] = None
        else:
            item.report(ProblemText("unknown_service", name=one_line(name, 40), meant=closest_match(name, set(known))))
    return tuple(chosen)


def _same_currency(price: Price | None, node: JsonNode, first: ServiceEntry | None) -> Price | None:
    """Return the price if its currency is that of the `first` service with a price: only then costs can be added."""
    if price is None or first is None or first.price is None or price.currency == first.price.currency:
        return price
    wrong = ProblemText("expected_same_currency", currency=first.price.currency, service=first.id, given=price.currency)
    node.child("price").child("currency").report(wrong)
    return None


class ServiceRegistry:
    """The configured services in file order. `replace_with` applies a reload for all holders of this object."""

    def __init__(self, entries: Sequence[ServiceEntry] = (), problems: Sequence[Problem] = ()) -> None:
        self._entries = {entry.id: entry for entry in entries}
        self.problems = tuple(problems)
        self.version = 0
        """Number of reloads."""

    @classmethod
    def load(cls, folder: Path, environ: Mapping[str, str] = os.environ) -> ServiceRegistry:
        """Load the services of the society in `folder`. Raise `ConfigError` if the file cannot be parsed."""
        return cls.parse(read_services_file(folder / SERVICES_FILE), folder, environ)

    @classmethod
    def parse(cls, data: bytes | None, folder: Path, environ: Mapping[str, str] = os.environ) -> ServiceRegistry:
        """The services in the text of an llmservices.json, with keys of the environment and of `folder`."""
        stored, problems = SecretsFile(folder / "data" / "secrets.json").read()
        if data is None:
            return cls(problems=problems)
        entries, file_problems = parse_services(data, key_lookup(environ, stored))
        return cls(entries, [*file_problems, *problems])

    def replace_with(self, other: ServiceRegistry) -> None:
        self._entries, self.problems = other._entries, other.problems
        self.version += 1

    def __iter__(self) -> Iterator[ServiceEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, service_id: object) -> bool:
        return service_id in self._entries

    @property
    def currency(self) -> str | None:
        """The currency of all prices; None if no service has a price."""
        return next((entry.price.currency for entry in self if entry.price), None)

    def has_unchanged(self, entry: ServiceEntry) -> bool:
        """True if the registry contains exactly this entry."""
        return self._entries.get(entry.id) == entry

    def get(self, service_id: str | None = None) -> ServiceEntry:
        """Return the entry with that id, or the first one without an id. Raise `UnknownService` if there is none."""
        if service_id is None and self._entries:
            return next(iter(self._entries.values()))
        try:
            return self._entries[service_id or ""]
        except KeyError:
            raise UnknownService(service_id or "", self._entries) from None

    def has_capability(self, service_id: str, capability: str, direction: Direction) -> bool:
        return self.get_capabilities(service_id).has(capability, direction)

    def get_capabilities(self, service_id: str) -> Capabilities:
        """Return the declared capabilities, or the inferred ones if none are declared."""
        return self.get(service_id).capabilities


def read_services_file(path: Path) -> bytes | None:
    """Return the content, None if there is no file. Reads at most one byte more than the size limit."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_SERVICES_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            [Problem(SERVICES_FILE, ProblemText("unreadable", why=error.strerror), fatal=True)]
        ) from error
