"""`coterie.toml`: what the owner says about agents, limits, storage and server.

A wrong value where a society as a whole is described refuses the start, because running with another store or another
address than the owner meant would be a lie. A wrong agent is left out and reported; the others run. An unknown key is
reported, with the known one that was probably meant.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal

from coterie.agents import ID
from coterie.errors import ConfigError, Problem
from coterie.messages import RESERVED
from coterie.store_url import SQLITE, is_shared_url
from coterie.text import clean, nearest

FILE = "coterie.toml"
Check = Callable[[Any], str | None]
"""What was expected instead of a value, or None."""


def _is(kind: type, words: str) -> Check:
    return lambda value: None if type(value) is kind else f"expected {words}"


def _whole(least: int, most: int = 2**53) -> Check:
    def check(value: Any) -> str | None:
        if type(value) is not int or not least <= value <= most:
            upper = f" to {most}" if most < 2**53 else " or more"
            return f"expected a whole number, {least}{upper}"
        return None

    return check


def _one_of(*choices: str) -> Check:
    words = " or ".join(f'"{choice}"' for choice in choices)
    return lambda value: None if value in choices else f"expected {words}"


def _strings(value: Any) -> str | None:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return None
    return "expected a list of strings"


def _networks(value: Any) -> str | None:
    try:
        if isinstance(value, list) and all(isinstance(item, str) and ip_network(item, strict=False) for item in value):
            return None
    except ValueError:
        pass
    return 'expected a list of addresses or networks such as "127.0.0.1" or "10.0.0.0/8"'


def _table_of_strings(value: Any) -> str | None:
    if isinstance(value, dict) and all(isinstance(item, str) for item in value.values()):
        return None
    return "expected a table of strings"


def _store_url(value: Any) -> str | None:
    if value == SQLITE or (isinstance(value, str) and is_shared_url(value)):
        return None
    return 'expected "sqlite" or "postgresql://user@host/name"'


_text = _is(str, "a string")


def _setting(default: Any, check: Check) -> Any:
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    host: str = _setting("127.0.0.1", _text)
    port: int = _setting(8642, _whole(1, 65535))
    public_url: str = _setting("", _text)
    allowed_hosts: tuple[str, ...] = _setting((), _strings)
    trusted_proxies: tuple[str, ...] = _setting((), _networks)
    """Peers whose X-Forwarded-For or Forwarded header names the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    url: str = _setting(SQLITE, _store_url)
    durability: Literal["full", "relaxed"] = _setting("full", _one_of("full", "relaxed"))
    keep_days: int = _setting(0, _whole(0, 36500))
    artifacts: str = _setting("", _text)
    """With PostgreSQL: a folder that all machines share, instead of the database."""
    lease_seconds: int = _setting(30, _whole(1, 3600))
    """With PostgreSQL: how soon others take over what a process that is gone was working on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    delayed: Literal["deliver", "keep"] = _setting("deliver", _one_of("deliver", "keep"))
    drain_seconds: int = _setting(25, _whole(0, 3600))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    max_withdrawals: int = _setting(3, _whole(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    max_hops: int = _setting(32, _whole(1))
    max_rounds: int = _setting(50, _whole(1))
    tool_seconds: int = _setting(120, _whole(1))
    mailbox: int = _setting(10_000, _whole(1))
    upload_mb: int = _setting(100, _whole(1))
    tokens_per_day: int = _setting(0, _whole(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifacts:
    shared: bool = _setting(False, _is(bool, "true or false"))
    """Every agent may read every file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEntry:
    id: str
    name: str = _setting("", _text)
    service: str | None = _setting(None, _text)
    prompt: str = _setting("", _text)
    prompt_file: str | None = _setting(None, _text)
    tools: tuple[str, ...] = _setting(("*",), _strings)
    services: tuple[str, ...] = _setting((), _strings)
    """What agents that it makes may think with, besides its own service."""
    parent: str | None = _setting(None, _text)


ASSISTANT = AgentEntry(id="assistant", name="Assistant")
"""Who is there when the owner describes nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpEntry:
    id: str
    command: str | None = _setting(None, _text)
    args: tuple[str, ...] = _setting((), _strings)
    env: Mapping[str, str] | None = _setting(None, _table_of_strings)
    url: str | None = _setting(None, _text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    server: Server = Server()
    store: Storage = Storage()
    shutdown: Shutdown = Shutdown()
    interruption: Interruption = Interruption()
    limits: Bounds = Bounds()
    artifacts: Artifacts = Artifacts()
    agents: tuple[AgentEntry, ...] = (ASSISTANT,)
    mcp: tuple[McpEntry, ...] = ()
    problems: tuple[Problem, ...] = ()
    """What was reported and left out."""


_SECTIONS: dict[str, type] = {
    "server": Server,
    "store": Storage,
    "shutdown": Shutdown,
    "interruption": Interruption,
    "limits": Bounds,
    "artifacts": Artifacts,
}


def read_config(folder: Path) -> Config:
    """The society's configuration, with defaults. `ConfigError` names everything that stops a start."""
    table, problems = _parse(folder / FILE), list[Problem]()
    sections: dict[str, Any] = {}
    for name, value in table.items():
        if name in _SECTIONS:
            sections[name] = _read_section(_SECTIONS[name], name, value, problems, fatal=True)
        elif name not in ("agents", "mcp"):
            problems.append(_unknown(name, name, {*_SECTIONS, "agents", "mcp"}))
    agents = _read_agents(table.get("agents", {}), folder, problems)
    mcp = _read_mcp(table.get("mcp", {}), problems)
    if any(problem.fatal for problem in problems):
        raise ConfigError(problems)
    if table.get("agents"):
        sections["agents"] = agents
    return Config(**sections, mcp=tuple(mcp), problems=tuple(problems))


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(FILE, f"is not UTF-8 text (byte {error.start})", fatal=True)]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([Problem(FILE, f"cannot be read: {error}", fatal=True)]) from error
    except OSError as error:
        raise ConfigError([Problem(FILE, f"cannot be read: {error.strerror}", fatal=True)]) from error


def _read_section(kind: type, place: str, table: Any, problems: list[Problem], *, fatal: bool, **known: Any) -> Any:
    """An instance of `kind` from what is right in `table`; every wrong key is a problem."""
    if not isinstance(table, dict):
        problems.append(_problem(place, f"expected a table [{place}]{_got(place, table)}", fatal))
        return kind(**known)
    checks = {f.name: f.metadata["check"] for f in fields(kind) if "check" in f.metadata}
    for key, value in table.items():
        if key not in checks:
            problems.append(_unknown(f"{place}.{key}", key, set(checks)))
        elif wrong := checks[key](value):
            problems.append(_problem(f"{place}.{key}", wrong + _got(f"{place}.{key}", value), fatal))
        else:
            known[key] = _tidy(value)
    return kind(**known)


def _read_entries(kind: type, place: str, table: Any, problems: list[Problem]) -> list[Any]:
    """Named tables under `place`; an entry with a problem of its own is left out, the rest stands."""
    if not isinstance(table, dict):
        problems.append(_problem(place, f"expected tables such as [{place}.name]{_got(place, table)}", True))
        return []
    entries = []
    for name, value in table.items():
        found: list[Problem] = []
        if wrong := _check_id(name):
            found.append(_problem(f"{place}.{name}", wrong, False))
        entry = _read_section(kind, f"{place}.{name}", value, found, fatal=False, id=name)
        problems += found
        if all(problem.message.startswith("unknown key") for problem in found):
            entries.append(entry)
    return entries


def _read_agents(table: Any, folder: Path, problems: list[Problem]) -> tuple[AgentEntry, ...]:
    agents = []
    for entry in _read_entries(AgentEntry, "agents", table, problems):
        if entry.prompt_file and not (folder / entry.prompt_file).is_file():
            problems.append(
                _problem(
                    f"agents.{entry.id}.prompt_file", f"there is no file {entry.prompt_file!r} in the folder", False
                )
            )
            continue
        agents.append(entry)
    known = {agent.id for agent in agents}
    for agent in agents:
        if agent.parent and agent.parent not in known:
            meant = nearest(agent.parent, known)
            problems.append(
                _problem(f"agents.{agent.id}.parent", f"there is no agent {agent.parent!r}{_meant(meant)}", False)
            )
    return tuple(agents)


def _read_mcp(table: Any, problems: list[Problem]) -> list[McpEntry]:
    servers = []
    for entry in _read_entries(McpEntry, "mcp", table, problems):
        if bool(entry.command) == bool(entry.url):
            got = "both" if entry.url else "neither"
            problems.append(_problem(f"mcp.{entry.id}", f"expected a command or a url, got {got}", False))
            continue
        servers.append(entry)
    return servers


def _check_id(name: str) -> str | None:
    if name in RESERVED:
        return f'the id "{name}" is taken: choose another'
    if not ID.fullmatch(name):
        return "an id is 1 to 64 of a-z, 0-9, _ and -, beginning with a letter or digit"
    return None


def _unknown(place: str, key: str, known: set[str]) -> Problem:
    return _problem(place, f"unknown key{_meant(nearest(key, known))}", False)


def _problem(place: str, message: str, fatal: bool) -> Problem:
    return Problem(f"{FILE}: {place}", message, fatal)


def _meant(word: str | None) -> str:
    return f', did you mean "{word}"?' if word else ""


def _tidy(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return clean(value) if isinstance(value, str) else value


def _got(place: str, value: Any) -> str:
    """Without what may be a key: servers have them in every field, the store in its address."""
    if place.split(".")[0] == "mcp":
        return ""
    if place == "store.url" and isinstance(value, str):
        value = re.sub(r":(?!//).*@", ":***@", value.partition("?")[0])
    return f", got {_shown(value)}"


def _shown(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value[:60]}"'
        case dict():
            return "a table"
        case list():
            return "a list"
    return str(value)
