"""llmservices.json as text: what it says, and everything that is wrong with it.

An entry that cannot be used is reported with its place and left out; a part of one that cannot be used is reported and
takes its default. Only a file that cannot be read at all is fatal.

Keys of model services: a type that never shows one, and the file where the setup page puts them.

One service of llmservices.json.

A value in one of the owner's JSON files, with its place in it.

Which model services there are and what each can do.
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
from coterie.files import readable_by_others, write_private
from coterie.llm.service import INFERRED, STANDARD, Capabilities, Direction, UnknownService
from coterie.text import clean, nearest, one_line

FindKey = Callable[[str], "str | None"]
"""The key of that name, wherever keys are kept."""
MAX_BYTES_SECRETS = 1 << 20
_SHOWN = 4


class Secret:
    """A key. Nothing that prints, logs or encodes it sees it; who needs it says `reveal()`."""

    __slots__ = ("_value", "name")

    def __init__(self, value: str, name: str = "") -> None:
        self._value = value
        self.name = name
        """Where it came from: an error about the key can say what to set."""

    def reveal(self) -> str:
        return self._value

    @property
    def masked(self) -> str:
        """For people who compare it with the one they hold: the last four characters, none of a short one."""
        return "…" + (self._value[-_SHOWN:] if len(self._value) >= 4 * _SHOWN else "")

    def __repr__(self) -> str:
        return "Secret(…)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


class SecretsFile:
    """`data/secrets.json`: names and keys, for its owner's eyes only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[dict[str, str], list[Problem]]:
        """The keys by name, and what is wrong with the file. Problems never quote its content."""
        try:
            if self.path.stat().st_size > MAX_BYTES_SECRETS:
                return {}, [self._wrong(f"more than {MAX_BYTES_SECRETS:,} bytes; not read")]
            found = json.loads(self.path.read_bytes())
            exposed = readable_by_others(self.path)
        except FileNotFoundError:
            return {}, []
        except OSError as error:
            return {}, [self._wrong(f"cannot be read: {error.strerror}")]
        except (ValueError, RecursionError):
            return {}, [self._wrong("is no JSON; delete it and enter the keys again")]
        if not isinstance(found, dict):
            return {}, [self._wrong('expected an object such as {"NAME": "key"}')]
        keys = {name: key for name, key in found.items() if isinstance(key, str)}
        problems = [self._wrong("expected a string", f": {name}") for name in found if name not in keys]
        if exposed:
            problems.append(self._wrong(f"others can read it; run: chmod 600 {self.path.name}"))
        return keys, problems

    def put(self, name: str, key: str) -> None:
        self._write(self._whole() | {name: key})

    def remove(self, name: str) -> None:
        keys = self._whole()
        if keys.pop(name, None) is not None:
            self._write(keys)

    def _whole(self) -> dict[str, str]:
        keys, problems = self.read()
        # Writing over a file that could not be read would lose the keys that are still in it.
        if problems and not keys:
            raise ConfigError(problems)
        return keys

    def _write(self, keys: Mapping[str, str]) -> None:
        write_private(self.path, json.dumps(keys, indent=2).encode())

    def _wrong(self, message: str, inside: str = "") -> Problem:
        return Problem(f"{self.path.parent.name}/{self.path.name}{inside}", message)


def keys_from(environ: Mapping[str, str], stored: Mapping[str, str]) -> FindKey:
    """The environment first: what is set for one start wins over what was kept. Blank is not set."""

    def find(name: str) -> str | None:
        return environ.get(name, "").strip() or stored.get(name, "").strip() or None

    return find


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimits:
    """The largest attachment of each type that is sent to the service as it is, in bytes."""

    image: int = 10_000_000
    audio: int = 20_000_000
    file: int = 20_000_000

    def of(self, kind: ArtifactType) -> int:
        return {"image": self.image, "audio": self.audio, "file": self.file}[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceEntry:
    id: str
    base_url: str
    model: str
    name: str = ""
    provider: str = "openai"
    """`openai`: any server that speaks OpenAI's chat completions."""
    api_key: Secret | None = None
    missing_key: str | None = None
    """The name of the key it wants and nobody has: it cannot be asked until that is mended."""
    capabilities: Capabilities = INFERRED
    capability_tags: tuple[str, ...] = ()
    description: str = ""
    max_concurrent_requests: int = 8
    timeout: timedelta = timedelta(seconds=120)
    max_tokens: int | None = None
    context_tokens: int | None = None
    limits: SizeLimits = SizeLimits()
    fallback: tuple[str, ...] = ()
    """Services to ask instead, in this order, when this one cannot answer."""

    @property
    def digest(self) -> str:
        """Another one after any change of the entry but its key, which must leave no trace."""
        told = {key: value for key, value in self.to_wire().items() if key != "apiKey"}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]

    def to_wire(self) -> dict[str, Any]:
        """As in the file, for reading back; the key is masked."""
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


LARGEST = 2**53 - 1
"""The largest whole number that every JSON reader understands alike."""


@dataclass(frozen=True, slots=True)
class Node:
    """What is wrong with the value goes into `problems`, and reading goes on. null is the same as absent."""

    value: object
    file: str
    path: str
    problems: list[Problem]

    def at(self, key: str) -> Node:
        value = self.value.get(key) if isinstance(self.value, dict) else None
        return Node(value, self.file, f"{self.path}.{key}" if self.path else key, self.problems)

    def items(self) -> list[Node]:
        if self.value is None:
            return []
        if not isinstance(self.value, list):
            self.expected("an array")
            return []
        return [Node(item, self.file, f"{self.path}[{i}]", self.problems) for i, item in enumerate(self.value)]

    def is_object(self, known: Collection[str]) -> bool:
        """Whether it is one. A key one slip of the pen away from a `known` one is reported, any other is let be."""
        if not isinstance(self.value, dict):
            self.expected("an object")
            return False
        missing = [key for key in known if key not in self.value]
        for key in self.value:
            if key not in known and (meant := slip_of(key, missing)):
                self.at(one_line(key, 40)).wrong(f'is not known; did you mean "{meant}"?')
        return True

    def text(self) -> str | None:
        """None when there is none, or none that can be used."""
        return None if self.value is None else self.needed_text()

    def needed_text(self) -> str | None:
        if isinstance(self.value, str) and (text := clean(self.value).strip()):
            return text
        self.expected("a non-empty string")
        return None

    def words(self) -> str:
        """Any text, also none."""
        if self.value is None or isinstance(self.value, str):
            return clean(self.value or "").strip()
        self.expected("a string")
        return ""

    def texts(self) -> tuple[str, ...]:
        return tuple(text for item in self.items() if (text := item.needed_text()))

    def whole(self, default: int, *, least: int = 1) -> int:
        number = self.maybe_whole(least)
        return default if number is None else number

    def maybe_whole(self, least: int = 1) -> int | None:
        number = self.value
        if isinstance(number, int) and not isinstance(number, bool) and least <= number <= LARGEST:
            return number
        if number is not None:
            self.expected(f"a whole number of at least {least}")
        return None

    def expected(self, what: str) -> None:
        self.wrong(f"expected {what}, got {shown(self.value)}")

    def wrong(self, message: str) -> None:
        self.problems.append(Problem(f"{self.file}: {self.path}" if self.path else self.file, message))


def shown(value: object) -> str:
    """A value from a file as an error message may quote it."""
    match value:
        case None:
            return "nothing"
        case dict():
            return "an object"
        case list():
            return "an array"
        case int() if not isinstance(value, bool) and abs(value) > LARGEST:
            return "a number too large"
    return one_line(json.dumps(value, ensure_ascii=False), 40)


def slip_of(word: str, known: Collection[str]) -> str | None:
    """The known word that differs from `word` by one slip of the pen, or only in capitals."""
    return next((other for other in known if _one_slip(word.lower(), other.lower())), None)


def _one_slip(a: str, b: str) -> bool:
    """At most one letter added, left out or changed, or two neighbours swapped."""
    a, b = _without_common_start(a, b)
    a, b = _without_common_start(a[::-1], b[::-1])
    return max(len(a), len(b)) <= 1 or (len(a) == 2 and a == b[::-1])


def _without_common_start(a: str, b: str) -> tuple[str, str]:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[same:], b[same:]


FILE = "llmservices.json"
MAX_BYTES = 4_000_000
MAX_NAME = 64

_TOP = ("services", "examples", "about")
"""`examples` and `about` are for people; nothing in them is read."""
_KEYS = (
    *("id", "name", "provider", "baseURL", "model", "apiKey", "capabilities", "capabilityTags", "description"),
    *("maxConcurrentRequests", "timeout", "maxTokens", "contextTokens", "limits", "fallback"),
)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_TEXT_ONLY = frozenset({"text"})


def read_services(data: bytes, find_key: FindKey) -> tuple[Sequence[ServiceEntry], Sequence[Problem]]:
    """The usable entries in their order, and every problem. `ConfigError` when it is no JSON."""
    top = Node(parse(data), FILE, "", [])
    if not top.is_object(_TOP):
        return [], top.problems
    found: dict[str, tuple[ServiceEntry, Node]] = {}
    for node in top.at("services").items():
        entry = _entry(node, find_key)
        if entry and entry.id in found:
            node.at("id").wrong(f'"{entry.id}" is the id of {found[entry.id][1].path} already; the first one counts')
        elif entry:
            found[entry.id] = entry, node
    entries = [
        replace(entry, fallback=_fallback(entry.id, node.at("fallback"), found)) for entry, node in found.values()
    ]
    return entries, top.problems


def parse(data: bytes) -> object:
    if len(data) > MAX_BYTES:
        _fatal(FILE, f"more than {MAX_BYTES:,} bytes, which cannot be meant")
    try:
        # Editors on Windows put a byte order mark in front.
        return json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        _fatal(f"{FILE}: line {line} column {column}", "is not UTF-8 text")
    except json.JSONDecodeError as error:
        _fatal(f"{FILE}: line {error.lineno} column {error.colno}", f"is no JSON: {error.msg}")
    except RecursionError:
        _fatal(FILE, "is nested too deeply")
    except ValueError as error:
        _fatal(FILE, f"holds a number that cannot be read: {one_line(str(error))}")


def _fatal(place: str, message: str) -> NoReturn:
    raise ConfigError([Problem(place, message, fatal=True)]) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _entry(node: Node, find_key: FindKey) -> ServiceEntry | None:
    if not node.is_object(_KEYS):
        return None
    service_id = _id(node.at("id"))
    base_url = _base_url(node.at("baseURL"))
    model = node.at("model").needed_text()
    key, missing = _key(node.at("apiKey"), find_key)
    entry = ServiceEntry(
        id=service_id or "",
        name=node.at("name").words(),
        provider=node.at("provider").words().lower() or "openai",
        base_url=base_url or "",
        model=model or "",
        api_key=key,
        missing_key=missing,
        capabilities=_capabilities(node.at("capabilities")),
        capability_tags=node.at("capabilityTags").texts(),
        description=node.at("description").words(),
        max_concurrent_requests=node.at("maxConcurrentRequests").whole(8),
        timeout=timedelta(milliseconds=node.at("timeout").whole(120_000)),
        max_tokens=node.at("maxTokens").maybe_whole(),
        context_tokens=node.at("contextTokens").maybe_whole(),
        limits=_limits(node.at("limits")),
    )
    return entry if service_id and base_url and model else None


def _id(node: Node) -> str | None:
    text = node.needed_text()
    if text and (len(text) > MAX_NAME or not text.isprintable()):
        node.expected(f"at most {MAX_NAME} characters on one line")
        return None
    return text


def _base_url(node: Node) -> str | None:
    text = node.needed_text()
    if text is None:
        return None
    # What is wrong with an address is said without quoting it: people paste keys into addresses.
    if not _is_web_address(text):
        node.wrong("expected an address such as http://127.0.0.1:1234/v1")
        return None
    if any(mark in text for mark in "@?#"):
        node.wrong('expected an address alone, without a name, a password or a query; a key belongs into "apiKey"')
        return None
    return text.rstrip("/")


def _is_web_address(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0 and text.isprintable()
    except ValueError:
        return False


def _key(node: Node, find_key: FindKey) -> tuple[Secret | None, str | None]:
    """The key, or the name of the one that is missing. Whatever is wrong, its value is not quoted."""
    value = node.value
    if value is None or value == "":
        return None, None
    if not isinstance(value, str) or ("${" in value and not _REFERENCE.fullmatch(value.strip())):
        node.wrong('expected a reference such as "${MAIN_API_KEY}"')
        return None, "apiKey"
    reference = _REFERENCE.fullmatch(value.strip())
    name = reference[1] if reference else "apiKey"
    key = find_key(name) if reference else value.strip()
    if not key:
        node.wrong(f"{name} is set neither in the environment nor in data/secrets.json")
        return None, name
    if not (key.isascii() and key.isprintable()):
        node.wrong(f"the key in {name} holds characters that no key has; copy it again")
        return None, name
    return Secret(key, name if reference else ""), None


def _capabilities(node: Node) -> Capabilities:
    if node.value is None or not node.is_object(("input", "output")):
        return INFERRED
    takes, gives = _types(node.at("input")), _types(node.at("output"))
    if takes is gives is None:
        return INFERRED
    return Capabilities(
        input=_TEXT_ONLY if takes is None else takes,
        output=_TEXT_ONLY if gives is None else gives,
    )


def _types(node: Node) -> frozenset[str] | None:
    """None: the file does not say, or not in a way that can be read."""
    items = node.items()
    if not isinstance(node.value, list):
        return None
    return frozenset(name for item in items if (name := _type(item)))


def _type(node: Node) -> str | None:
    name = node.needed_text()
    if name is None or name in STANDARD:
        return name
    meant = slip_of(name, STANDARD)
    hint = f'; did you mean "{meant}"?' if meant else ""
    if name != name.lower() or len(name) > MAX_NAME or not name.isprintable() or " " in name:
        node.wrong(f'expected a lower-case name without spaces, got "{one_line(name, 40)}"{hint}')
        return None
    if meant:
        node.wrong(f'"{name}" is taken as a type of its own{hint}')
    return name


def _limits(node: Node) -> SizeLimits:
    usual = SizeLimits()
    if node.value is None or not node.is_object(("imageBytes", "audioBytes", "fileBytes")):
        return usual
    return SizeLimits(
        image=node.at("imageBytes").whole(usual.image, least=0),
        audio=node.at("audioBytes").whole(usual.audio, least=0),
        file=node.at("fileBytes").whole(usual.file, least=0),
    )


def _fallback(entry_id: str, node: Node, known: Collection[str]) -> tuple[str, ...]:
    chosen: dict[str, None] = {}
    for item in node.items():
        name = item.needed_text()
        if name is None:
            continue
        if name == entry_id:
            item.wrong("a service cannot stand in for itself")
        elif name in known:
            chosen[name] = None
        else:
            meant = nearest(name, set(known))
            hint = f'; did you mean "{meant}"?' if meant else ""
            item.wrong(f'there is no service "{one_line(name, 40)}"{hint}')
    return tuple(chosen)


class Services:
    """The services in the order of their file. `adopt` makes a reload visible to everyone who holds this object."""

    def __init__(self, entries: Sequence[ServiceEntry] = (), problems: Sequence[Problem] = ()) -> None:
        self._entries = {entry.id: entry for entry in entries}
        self.problems = tuple(problems)
        self.edition = 0
        """How often other entries were adopted."""

    @classmethod
    def load(cls, folder: Path, environ: Mapping[str, str] = os.environ) -> Services:
        """What the society in `folder` has; no file, no services. `ConfigError` when the file cannot be read at all."""
        stored, problems = SecretsFile(folder / "data" / "secrets.json").read()
        data = read_file(folder / FILE)
        if data is None:
            return cls(problems=problems)
        entries, more = read_services(data, keys_from(environ, stored))
        return cls(entries, [*more, *problems])

    def adopt(self, other: Services) -> None:
        self._entries, self.problems = other._entries, other.problems
        self.edition += 1

    def __iter__(self) -> Iterator[ServiceEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, service_id: object) -> bool:
        return service_id in self._entries

    def has(self, entry: ServiceEntry) -> bool:
        """Whether it is there as it is."""
        return self._entries.get(entry.id) == entry

    def entry(self, service_id: str | None = None) -> ServiceEntry:
        """The service of that id; without one, the first."""
        if service_id is None and self._entries:
            return next(iter(self))
        try:
            return self._entries[service_id or ""]
        except KeyError:
            raise UnknownService(service_id or "", self._entries) from None

    def has_capability(self, service_id: str, capability: str, direction: Direction) -> bool:
        return self.get_capabilities(service_id).has(capability, direction)

    def get_capabilities(self, service_id: str) -> Capabilities:
        """What its entry declares, or what is inferred where that says nothing."""
        return self.entry(service_id).capabilities


def read_file(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            # One byte more than allowed is enough to know that it is too long.
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError([Problem(FILE, f"cannot be read: {error.strerror}", fatal=True)]) from error
