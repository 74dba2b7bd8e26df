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
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from coterie.artifacts import ArtifactType
from coterie.errors import ConfigError, Problem
from coterie.files import is_readable_by_others, write_private
from coterie.llm.service import INFERRED, STANDARD_CAPABILITIES, Capabilities, Direction, UnknownService
from coterie.redaction import mask
from coterie.text import closest_match, one_line, to_storable

SERVICES_FILE = "llmservices.json"
MAX_SERVICES_BYTES = 4_000_000
MAX_SECRETS_BYTES = 1 << 20
MAX_ID_LENGTH = 64
MAX_SAFE_INTEGER = 2**53 - 1
"""The largest integer that every JSON parser reads exactly."""
KeyLookup = Callable[[str], "str | None"]
"""Returns the key with that name."""

_TOP_KEYS = ("services", "examples", "about")
"""`examples` and `about` are for people and are not read."""
_ENTRY_KEYS = (
    *("id", "name", "provider", "baseURL", "model", "apiKey", "capabilities", "capabilityTags", "description"),
    *("maxConcurrentRequests", "timeout", "maxTokens", "contextTokens", "limits", "fallback"),
)
_KEY_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_TEXT_ONLY = frozenset({"text"})


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
                return {}, [self._problem(f"more than {MAX_SECRETS_BYTES:,} bytes; not read")]
            content = json.loads(self.path.read_bytes())
            is_exposed = is_readable_by_others(self.path)
        except FileNotFoundError:
            return {}, []
        except OSError as error:
            return {}, [self._problem(f"cannot be read: {error.strerror}")]
        except (ValueError, RecursionError):
            return {}, [self._problem("is no JSON; delete it and enter the keys again")]
        if not isinstance(content, dict):
            return {}, [self._problem('expected an object such as {"NAME": "key"}')]
        keys = {name: key for name, key in content.items() if isinstance(key, str)}
        problems = [self._problem("expected a string", f": {name}") for name in content if name not in keys]
        if is_exposed:
            problems.append(self._problem(f"others can read it; run: chmod 600 {self.path.name}"))
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
    timeout: timedelta = timedelta(seconds=120)
    max_tokens: int | None = None
    context_tokens: int | None = None
    limits: SizeLimits = SizeLimits()
    fallback: tuple[str, ...] = ()
    """Ids of the services to try in this order if this one fails."""

    @property
    def digest(self) -> str:
        """Hash of all fields except the key, of which no trace may be stored."""
        fields = {key: value for key, value in self.to_json().items() if key != "apiKey"}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
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
            "timeout": self.timeout // timedelta(milliseconds=1),
            "maxTokens": self.max_tokens,
            "contextTokens": self.context_tokens,
            "limits": {
                "imageBytes": self.limits.image,
                "audioBytes": self.limits.audio,
                "fileBytes": self.limits.file,
            },
            "fallback": list(self.fallback),
        }


@dataclass(frozen=True, slots=True)
class JsonNode:
    """A JSON value with its path. Invalid values are added to `problems`; null counts as absent."""

    value: object
    file: str
    path: str
    problems: list[Problem]

    def child(self, key: str) -> JsonNode:
        value = self.value.get(key) if isinstance(self.value, dict) else None
        return JsonNode(value, self.file, f"{self.path}.{key}" if self.path else key, self.problems)

    def items(self) -> list[JsonNode]:
        if self.value is None:
            return []
        if not isinstance(self.value, list):
            self.report_expected("an array")
            return []
        return [JsonNode(item, self.file, f"{self.path}[{i}]", self.problems) for i, item in enumerate(self.value)]

    def is_object(self, known: Collection[str]) -> bool:
        """True for an object. Reports keys that look like a typo of a `known` key; other unknown keys are ignored."""
        if not isinstance(self.value, dict):
            self.report_expected("an object")
            return False
        missing = [key for key in known if key not in self.value]
        for key in self.value:
            if key not in known and (suggestion := find_typo(key, missing)):
                self.child(one_line(key, 40)).report(f'is not known; did you mean "{suggestion}"?')
        return True

    def required_text(self) -> str | None:
        if isinstance(self.value, str) and (text := to_storable(self.value).strip()):
            return text
        self.report_expected("a non-empty string")
        return None

    def optional_text(self) -> str:
        """Return the text, empty if absent."""
        if self.value is None or isinstance(self.value, str):
            return to_storable(self.value or "").strip()
        self.report_expected("a string")
        return ""

    def text_items(self) -> tuple[str, ...]:
        return tuple(text for item in self.items() if (text := item.required_text()))

    def integer(self, default: int, *, least: int = 1) -> int:
        number = self.optional_integer(least)
        return default if number is None else number

    def optional_integer(self, least: int = 1) -> int | None:
        number = self.value
        if isinstance(number, int) and not isinstance(number, bool) and least <= number <= MAX_SAFE_INTEGER:
            return number
        if number is not None:
            self.report_expected(f"a whole number of at least {least}")
        return None

    def report_expected(self, what: str) -> None:
        self.report(f"expected {what}, got {describe_value(self.value)}")

    def report(self, message: str) -> None:
        self.problems.append(Problem(f"{self.file}: {self.path}" if self.path else self.file, message))


def describe_value(value: object) -> str:
    """Describe a value for an error message."""
    match value:
        case None:
            return "nothing"
        case dict():
            return "an object"
        case list():
            return "an array"
        case int() if not isinstance(value, bool) and abs(value) > MAX_SAFE_INTEGER:
            return "a number too large"
    return one_line(json.dumps(value, ensure_ascii=False), 40)


def find_typo(word: str, known: Collection[str]) -> str | None:
    """Return the known word that differs from `word` by one edit or only in case."""
    return next((other for other in known if _is_one_edit(word.lower(), other.lower())), None)


def _is_one_edit(a: str, b: str) -> bool:
    """True for at most one letter added, removed or changed, or two neighbours swapped."""
    a, b = _without_common_prefix(a, b)
    a, b = _without_common_prefix(a[::-1], b[::-1])
    return max(len(a), len(b)) <= 1 or (len(a) == 2 and a == b[::-1])


def _without_common_prefix(a: str, b: str) -> tuple[str, str]:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[same:], b[same:]


def parse_services(data: bytes, find_key: KeyLookup) -> tuple[Sequence[ServiceEntry], Sequence[Problem]]:
    """Return the usable entries in file order and all problems. Raise `ConfigError` if `data` is no JSON."""
    top = JsonNode(parse_json(data), SERVICES_FILE, "", [])
    if not top.is_object(_TOP_KEYS):
        return [], top.problems
    by_id: dict[str, tuple[ServiceEntry, JsonNode]] = {}
    for node in top.child("services").items():
        entry = _entry(node, find_key)
        if entry and entry.id in by_id:
            node.child("id").report(
                f'"{entry.id}" is the id of {by_id[entry.id][1].path} already; the first one counts'
            )
        elif entry:
            by_id[entry.id] = entry, node
    entries = [
        replace(entry, fallback=_fallback(entry.id, node.child("fallback"), by_id)) for entry, node in by_id.values()
    ]
    return entries, top.problems


def parse_json(data: bytes) -> object:
    if len(data) > MAX_SERVICES_BYTES:
        _fatal(SERVICES_FILE, f"more than {MAX_SERVICES_BYTES:,} bytes; not read")
    try:
        # Editors on Windows add a byte order mark.
        return json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        _fatal(f"{SERVICES_FILE}: line {line} column {column}", "is not UTF-8 text")
    except json.JSONDecodeError as error:
        _fatal(f"{SERVICES_FILE}: line {error.lineno} column {error.colno}", f"is no JSON: {error.msg}")
    except RecursionError:
        _fatal(SERVICES_FILE, "is nested too deeply")
    except ValueError as error:
        _fatal(SERVICES_FILE, f"holds a number that cannot be read: {one_line(str(error))}")


def _fatal(location: str, message: str) -> NoReturn:
    raise ConfigError([Problem(location, message, fatal=True)]) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _entry(node: JsonNode, find_key: KeyLookup) -> ServiceEntry | None:
    if not node.is_object(_ENTRY_KEYS):
        return None
    service_id = _id(node.child("id"))
    base_url = _base_url(node.child("baseURL"))
    model = node.child("model").required_text()
    key, missing = _key(node.child("apiKey"), find_key)
    entry = ServiceEntry(
        id=service_id or "",
        name=node.child("name").optional_text(),
        provider=node.child("provider").optional_text().lower() or "openai",
        base_url=base_url or "",
        model=model or "",
        api_key=key,
        missing_key=missing,
        capabilities=_capabilities(node.child("capabilities")),
        capability_tags=node.child("capabilityTags").text_items(),
        description=node.child("description").optional_text(),
        max_concurrent_requests=node.child("maxConcurrentRequests").integer(8),
        timeout=timedelta(milliseconds=node.child("timeout").integer(120_000)),
        max_tokens=node.child("maxTokens").optional_integer(),
        context_tokens=node.child("contextTokens").optional_integer(),
        limits=_limits(node.child("limits")),
    )
    return entry if service_id and base_url and model else None


def _id(node: JsonNode) -> str | None:
    text = node.required_text()
    if text and (len(text) > MAX_ID_LENGTH or not text.isprintable()):
        node.report_expected(f"at most {MAX_ID_LENGTH} characters on one line")
        return None
    return text


def _base_url(node: JsonNode) -> str | None:
    text = node.required_text()
    if text is None:
        return None
    # Problems do not quote the address: it may contain a key.
    if not _is_http_url(text):
        node.report("expected an address such as http://127.0.0.1:1234/v1")
        return None
    if any(mark in text for mark in "@?#"):
        node.report('expected an address without user name, password or query; put the key into "apiKey"')
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
        node.report('expected a reference such as "${MAIN_API_KEY}"')
        return None, "apiKey"
    reference = _KEY_REFERENCE.fullmatch(value.strip())
    name = reference[1] if reference else "apiKey"
    key = find_key(name) if reference else value.strip()
    if not key:
        node.report(f"{name} is set neither in the environment nor in data/secrets.json")
        return None, name
    if not (key.isascii() and key.isprintable()):
        node.report(f"the key in {name} contains invalid characters; copy it again")
        return None, name
    return Secret(key, name if reference else ""), None


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
    suggestion = find_typo(name, STANDARD_CAPABILITIES)
    hint = f'; did you mean "{suggestion}"?' if suggestion else ""
    if name != name.lower() or len(name) > MAX_ID_LENGTH or not name.isprintable() or " " in name:
        node.report(f'expected a lower-case name without spaces, got "{one_line(name, 40)}"{hint}')
        return None
    if suggestion:
        node.report(f'"{name}" is treated as a custom type{hint}')
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
            item.report("a service cannot be its own fallback")
        elif name in known:
            chosen[name] = None
        else:
            suggestion = closest_match(name, set(known))
            hint = f'; did you mean "{suggestion}"?' if suggestion else ""
            item.report(f'there is no service "{one_line(name, 40)}"{hint}')
    return tuple(chosen)


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
        stored, problems = SecretsFile(folder / "data" / "secrets.json").read()
        data = read_services_file(folder / SERVICES_FILE)
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

    def has_unchanged(self, entry: ServiceEntry) -> bool:
        """True if the registry contains exactly this entry."""
        return self._entries.get(entry.id) == entry

    def get(self, service_id: str | None = None) -> ServiceEntry:
        """Return the entry with that id, or the first one without an id. Raise `UnknownService` if there is none."""
        if service_id is None and self._entries:
            return next(iter(self))
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
        raise ConfigError([Problem(SERVICES_FILE, f"cannot be read: {error.strerror}", fatal=True)]) from error
