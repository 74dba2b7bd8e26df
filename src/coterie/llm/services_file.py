"""llmservices.json as text: what it says, and everything that is wrong with it.

An entry that cannot be used is reported with its place and left out; a part of one that cannot be used is reported and
takes its default. Only a file that cannot be read at all is fatal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn
from urllib.parse import urlsplit

from coterie.errors import ConfigError, Problem
from coterie.llm.node import Node, slip_of
from coterie.llm.secrets import FindKey, Secret
from coterie.llm.service import INFERRED, STANDARD, Capabilities
from coterie.llm.service_entry import ServiceEntry, SizeLimits
from coterie.text import nearest, one_line

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
