"""`coterie.toml`: what the owner says about agents, limits, storage and server.

A wrong value where a society as a whole is described refuses the start, because running with another store or another
address than the owner meant would be a lie. A wrong agent is left out and reported; the others run. An unknown key is
reported, with the known one that was probably meant.

`store.url`: where a society is kept, as people may see it, and as it stands in coterie.toml.

Reading the owner's files again: what counts at once, what at the next start, what does not fit together.

The folder a society lives in.

Where a running society listens: a note in its folder, for whoever wants to talk to it from the same machine.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.resources import files
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal

from coterie import __version__
from coterie.agents import ID
from coterie.errors import ConfigError, Problem, StoreUnusable
from coterie.files import write_private
from coterie.messages import RESERVED
from coterie.text import clean, nearest

SQLITE = "sqlite"
SHARED = ("postgresql://", "postgres://")
_URL_LINE = re.compile(r"^[ \t]*(store\.)?url[ \t]*=.*$", re.MULTILINE)
_TABLE_LINE = re.compile(r"^[ \t]*\[[ \t]*store[ \t]*\].*$", re.MULTILINE)


def is_shared_url(text: str) -> bool:
    return text.startswith(SHARED)


def without_password(url: str) -> str:
    """The same place; who goes there brings the password from PGPASSWORD or ~/.pgpass."""
    # Put together from its own letters: PostgreSQL does not read every spelling that other URLs may have.
    place, _, settings = url.partition("?")
    scheme, _, rest = place.partition("://")
    authority, slash, name = rest.partition("/")
    user, at, host = authority.rpartition("@")
    kept = "&".join(one for one in settings.split("&") if one.partition("=")[0] != "password")
    return f"{scheme}://{user.partition(':')[0]}{at}{host}{slash}{name}" + (f"?{kept}" if kept else "")


def shown(url: str) -> str:
    """For messages: neither a password nor settings."""
    return without_password(url).partition("?")[0] if is_shared_url(url) else url


def written_in(text: str) -> str:
    """What a coterie.toml says; one that cannot be read says nothing."""
    try:
        url = tomllib.loads(text).get("store", {}).get("url", SQLITE)
    except (tomllib.TOMLDecodeError, AttributeError):
        return SQLITE
    return url if isinstance(url, str) else SQLITE


def with_store_url(text: str, url: str) -> str:
    """The text of a coterie.toml that names another store, and is otherwise what it was to the letter."""
    before = _parsed(text)
    if before is not None and isinstance(table := before.get("store", {}), dict):
        wanted = before | {"store": table | {"url": url}}
        for changed in _attempts(text, url):
            if _parsed(changed) == wanted:
                return changed
    raise StoreUnusable("coterie.toml cannot be read or changed by machine: write store.url on a line of its own in it")


def _attempts(text: str, url: str) -> Iterator[str]:
    """Wherever it may have to stand; only the right one means what is wanted."""
    line = f"url = {json.dumps(url)}"
    for found in _URL_LINE.finditer(text):
        yield f"{text[: found.start()]}{found[1] or ''}{line}{text[found.end() :]}"
    for found in _TABLE_LINE.finditer(text):
        yield f"{text[: found.end()]}\n{line}{text[found.end() :]}"
    yield f"{text.rstrip()}\n\n[store]\n{line}\n".lstrip()


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


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


def running(now: Config, read: Config) -> Config:
    """`read`, but for what is in use since the start: the address, the engine, the tool servers."""
    store = replace(now.store, keep_days=read.store.keep_days)
    return replace(read, server=now.server, store=store, mcp=now.mcp)


def after_restart(now: Config, read: Config) -> list[Problem]:
    """What was changed and does not count yet."""
    kept = running(now, read)
    changed = [name for name in ("server", "store", "mcp") if getattr(kept, name) != getattr(read, name)]
    return [Problem(f"{FILE}: {name}", "the change takes effect at the next start") for name in changed]


def unknown_service(agent: str, service: str, known: Sequence[str]) -> Problem:
    meant = nearest(service, set(known))
    hint = f', did you mean "{meant}"?' if meant else ""
    return Problem(f"{FILE}: agents.{agent}.service", f'there is no service "{service}" in llmservices.json{hint}')


TEMPLATES = ("coterie.toml", "llmservices.json")
"""Files that nobody else has: where one is, a society is."""
TOOLS = "tools.py"


@dataclass(frozen=True, slots=True)
class SocietyFolder:
    path: Path

    @property
    def data(self) -> Path:
        """What the runtime keeps; nobody else's business, so mode 0700."""
        return self.path / "data"

    @property
    def artifacts(self) -> Path:
        return self.data / "artifacts"

    @property
    def exists(self) -> bool:
        return self.data.is_dir() or any((self.path / name).exists() for name in TEMPLATES)

    def make(self) -> list[Path]:
        """See that the folder is there; a new one gets commented templates. What was written."""
        try:
            if self.exists:
                self.data.mkdir(mode=0o700, exist_ok=True)
                return []
            self.data.mkdir(mode=0o700, parents=True)
            return [self._write(name) for name in (*TEMPLATES, TOOLS) if not (self.path / name).exists()]
        except OSError as error:
            raise StoreUnusable(
                f"{self.path} cannot be made or written ({error.strerror}): choose another folder with --dir"
            ) from error

    def _write(self, name: str) -> Path:
        target = self.path / name
        target.write_bytes((files("coterie") / "templates" / name).read_bytes())
        return target


FILE_ADDRESS = "server.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    url: str
    """Without a stroke at its end: `http://127.0.0.1:8642`."""
    pid: int
    """Who listens there. The folder's lock says whether that process still runs the society."""
    version: str = __version__
    token: str | None = field(default=None, repr=False)
    """One that was given to the server, which keeps none in its folder; it lies here for as long as it listens."""


def leave_address(data: Path, address: Address) -> None:
    """Once it listens there, and not before."""
    write_private(data / FILE_ADDRESS, json.dumps(asdict(address)).encode())


def take_address_back(data: Path) -> None:
    with suppress(FileNotFoundError):
        (data / FILE_ADDRESS).unlink()


def find_address(data: Path) -> Address | None:
    """What was left last. Half a note, or one of another kind, is none."""
    try:
        note = json.loads((data / FILE_ADDRESS).read_bytes())
        token = note.get("token")
        return Address(
            url=str(note["url"]), pid=int(note["pid"]), version=str(note["version"]), token=token and str(token)
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
