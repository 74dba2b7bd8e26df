"""The society's folder and its settings: coterie.toml, reloading, `store.url`, the address of a running server.

A wrong setting of the society itself prevents the start; every such problem is reported at once. A wrong agent or MCP
server is reported and skipped. An unknown key is reported with the known key that was probably meant.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from importlib.resources import files
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal, get_args

from coterie import __version__
from coterie.agents import AGENT_ID, MAX_DESCRIPTION, MAX_INITIALS, MAX_ROLE, AgentColour
from coterie.answer_schema import WrongSchema, is_schema_text, read_answer_schema
from coterie.errors import ConfigError, Problem, StoreUnusable
from coterie.files import write_private
from coterie.llm.json_node import is_number
from coterie.llm.service import MAX_TEMPERATURE, check_effort, check_extra_body
from coterie.messages import RESERVED_IDS
from coterie.problem_texts import ProblemText
from coterie.push_configs import is_allowed
from coterie.store_url import SQLITE, is_postgres_url
from coterie.tasks import Budget
from coterie.text import closest_match, to_storable

CONFIG_FILE = "coterie.toml"
STORE_VARIABLE = "COTERIE_STORE"
"""Environment variable with the address of the database, for processes without a coterie.toml."""

# Settings and their checks

Check = Callable[[Any], ProblemText | None]
"""Returns what was expected if the value is wrong, else None."""


def _boolean(value: Any) -> ProblemText | None:
    return None if type(value) is bool else ProblemText("expected_boolean")


def _integer(least: int, most: int = 2**53) -> Check:
    def check(value: Any) -> ProblemText | None:
        if type(value) is int and least <= value <= most:
            return None
        if most < 2**53:
            return ProblemText("expected_integer_between", least=least, most=most)
        return ProblemText("expected_integer", least=least)

    return check


def _number(most: float) -> Check:
    def check(value: Any) -> ProblemText | None:
        return None if is_number(value, most) else ProblemText("expected_number", most=f"{most:g}")

    return check


def _extra_body(value: Any) -> ProblemText | None:
    return check_extra_body(value) if isinstance(value, dict) else ProblemText("expected_table")


def _one_of(*choices: str) -> Check:
    quoted = (f'"{choice}"' for choice in choices)
    names = reduce(lambda first, second: ProblemText("either", first=first, second=second), quoted)
    return lambda value: None if value in choices else ProblemText("expected_choice", choices=names)


def _strings(value: Any) -> ProblemText | None:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return None
    return ProblemText("expected_strings")


def _networks(value: Any) -> ProblemText | None:
    try:
        if isinstance(value, list) and all(isinstance(item, str) and ip_network(item, strict=False) for item in value):
            return None
    except ValueError:
        pass
    return ProblemText("expected_networks")


def _addresses(value: Any) -> ProblemText | None:
    if isinstance(value, list) and all(isinstance(item, str) and is_allowed(item, [item]) for item in value):
        return None
    return ProblemText("expected_addresses")


def _table_of_strings(value: Any) -> ProblemText | None:
    if isinstance(value, dict) and all(isinstance(item, str) for item in value.values()):
        return None
    return ProblemText("expected_string_table")


def _card_url(value: Any) -> ProblemText | None:
    if isinstance(value, str) and re.fullmatch(r"https?://[^\s/?#@]+[^\s?#@]*", value):
        return None
    return ProblemText("expected_card")


def _mcp_url(value: Any) -> ProblemText | None:
    if isinstance(value, str) and (re.match(r"https?://[^\s/?#]", value) or "${" in value):
        return None
    return ProblemText("expected_mcp_url")


def _store_url(value: Any) -> ProblemText | None:
    if value == SQLITE or (isinstance(value, str) and is_postgres_url(value)):
        return None
    return ProblemText("expected_store")


def _string(value: Any) -> ProblemText | None:
    return None if type(value) is str else ProblemText("expected_string")


def _text(most: int) -> Check:
    def check(value: Any) -> ProblemText | None:
        is_short = isinstance(value, str) and len(value) <= most
        return None if is_short else ProblemText("expected_short_string", most=most)

    return check


_colour = _one_of(*get_args(AgentColour))


def _setting(default: Any, check: Check) -> Any:
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    host: str = _setting("127.0.0.1", _string)
    port: int = _setting(8642, _integer(1, 65535))
    public_url: str = _setting("", _string)
    allowed_hosts: tuple[str, ...] = _setting((), _strings)
    trusted_proxies: tuple[str, ...] = _setting((), _networks)
    """Peers whose X-Forwarded-For or Forwarded header is trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    url: str = _setting(SQLITE, _store_url)
    durability: Literal["full", "relaxed"] = _setting("full", _one_of("full", "relaxed"))
    keep_days: int = _setting(0, _integer(0, 36500))
    keep_gb: float = _setting(0.0, _number(1e6))
    """Size of database and files together at which the oldest messages are deleted; 0: no limit."""
    artifacts: str = _setting("", _string)
    """With PostgreSQL: a folder shared by all machines, instead of the database."""
    lease_seconds: int = _setting(30, _integer(1, 3600))
    """With PostgreSQL: time after which others take over the turns of a dead process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownSettings:
    delayed: Literal["deliver", "keep"] = _setting("deliver", _one_of("deliver", "keep"))
    drain_seconds: int = _setting(25, _integer(0, 3600))


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionSettings:
    interrupt: Literal["step", "stream"] = _setting("step", _one_of("step", "stream"))
    """When a person's message is read: at the end of the step, or at once, which cuts the model's answer."""
    max_cuts: int = _setting(3, _integer(1))
    """Answers per turn that a person's messages may cut."""
    max_withdrawals: int = _setting(3, _integer(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimitSettings:
    """What one task may use before the person is asked whether it may go on; 0: no limit."""

    turns: int = _setting(100, _integer(0))
    tokens: int = _setting(0, _integer(0))
    cost: float = _setting(0.0, _number(1e9))
    """In the currency of the prices in llmservices.json."""
    minutes: float = _setting(0.0, _number(1e6))
    """Of model time."""

    @property
    def budget(self) -> Budget:
        return Budget(turns=self.turns, tokens=self.tokens, cost=self.cost, minutes=self.minutes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    max_hops: int = _setting(256, _integer(1))
    max_rounds: int = _setting(50, _integer(1))
    tool_seconds: int = _setting(120, _integer(1))
    mailbox: int = _setting(10_000, _integer(1))
    upload_mb: int = _setting(100, _integer(1))
    tokens_per_day: int = _setting(0, _integer(0))
    task: TaskLimitSettings = field(default=TaskLimitSettings(), metadata={"section": TaskLimitSettings})


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactSettings:
    shared: bool = _setting(False, _boolean)
    """Every agent may read every file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorSettings:
    """Protocols that programs may use to reach agents, with the owner's token or a key of their own."""

    openai: bool = _setting(True, _boolean)
    """OpenAI's API under /v1."""
    mcp: bool = _setting(True, _boolean)
    """The MCP server at /mcp."""
    a2a: bool = _setting(True, _boolean)
    """Agent cards and A2A under /a2a."""
    push: tuple[str, ...] = _setting((), _addresses)
    """Addresses to which push notifications of A2A may go, and all below them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEntry:
    id: str
    name: str = _setting("", _string)
    role: str = _setting("", _text(MAX_ROLE))
    """Its part in the society in a few words, for people."""
    description: str = _setting("", _text(MAX_DESCRIPTION))
    """What it is for, in a sentence; other agents and people see it."""
    colour: AgentColour | None = _setting(None, _colour)  # noqa: RUF009
    """Of its initials in the panel. None: chosen by the id."""
    initials: str = _setting("", _text(MAX_INITIALS))
    """Shown in the panel. Empty: the first letters of its name."""
    service: str | None = _setting(None, _string)
    prompt: str = _setting("", _string)
    prompt_file: str | None = _setting(None, _string)
    tools: tuple[str, ...] = _setting(("*",), _strings)
    services: tuple[str, ...] = _setting((), _strings)
    """Services that agents it creates may use, besides its own."""
    parent: str | None = _setting(None, _string)
    answer_schema: str | None = _setting(None, _string)
    """The JSON schema of its answers, or a file with it."""
    temperature: float | None = _setting(None, _number(MAX_TEMPERATURE))
    """This and the following override the values of its service."""
    top_p: float | None = _setting(None, _number(1))
    max_tokens: int | None = _setting(None, _integer(1))
    reasoning_effort: str | None = _setting(None, check_effort)
    extra_body: Mapping[str, Any] | None = _setting(None, _extra_body)
    interrupt: Literal["step", "stream"] | None = _setting(None, _one_of("step", "stream"))
    """None: as `interruption.interrupt` says."""

    @property
    def named_files(self) -> list[str]:
        """The files that the entry names, relative to the society's folder."""
        schema = self.answer_schema if self.answer_schema and not is_schema_text(self.answer_schema) else None
        return [name for name in (self.prompt_file, schema) if name]


ASSISTANT = AgentEntry(id="assistant", name="Assistant")
"""The only agent if coterie.toml describes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpEntry:
    id: str
    command: str | None = _setting(None, _string)
    args: tuple[str, ...] = _setting((), _strings)
    env: Mapping[str, str] | None = _setting(None, _table_of_strings)
    url: str | None = _setting(None, _mcp_url)
    headers: Mapping[str, str] | None = _setting(None, _table_of_strings)
    """HTTP headers. `${NAME}` in args, env, url and headers stands for a key of the environment or secrets.json."""
    start_seconds: int = _setting(30, _integer(1, 3600))
    """Time to connect and list tools. The first start of a server may download a package."""
    approve: tuple[str, ...] = _setting((), _strings)
    """Patterns of tools whose calls a person must approve."""
    roots: tuple[str, ...] = _setting((), _strings)
    """Folders that the server is asked to work in (MCP roots)."""
    sampling: bool = _setting(False, _boolean)
    """The server may ask the model of an agent that calls it. The tokens count as the agent's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEntry:
    """An agent elsewhere, which A2A reaches."""

    id: str
    card: str = _setting("", _card_url)
    """Address of its agent card."""
    headers: Mapping[str, str] | None = _setting(None, _table_of_strings)
    """HTTP headers. `${NAME}` stands for a key of the environment or secrets.json."""
    name: str = _setting("", _string)
    role: str = _setting("", _text(MAX_ROLE))
    description: str = _setting("", _text(MAX_DESCRIPTION))
    colour: AgentColour | None = _setting(None, _colour)  # noqa: RUF009
    initials: str = _setting("", _text(MAX_INITIALS))

    @property
    def service(self) -> str:
        """Id of the service that stands for it."""
        return f"remote.{self.id}"

    @property
    def agent(self) -> AgentEntry:
        return AgentEntry(
            **{name: getattr(self, name) for name in ("id", "name", "role", "description", "colour", "initials")},
            service=self.service,
            tools=(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    server: ServerSettings = ServerSettings()
    store: StoreSettings = StoreSettings()
    shutdown: ShutdownSettings = ShutdownSettings()
    interruption: InterruptionSettings = InterruptionSettings()
    limits: LimitSettings = LimitSettings()
    artifacts: ArtifactSettings = ArtifactSettings()
    doors: DoorSettings = DoorSettings()
    agents: tuple[AgentEntry, ...] = (ASSISTANT,)
    mcp: tuple[McpEntry, ...] = ()
    remote: tuple[RemoteEntry, ...] = ()
    problems: tuple[Problem, ...] = ()
    """Non-fatal problems; the entries they name were skipped."""

    @property
    def all_agents(self) -> tuple[AgentEntry, ...]:
        """The agents here, then those elsewhere."""
        return (*self.agents, *(entry.agent for entry in self.remote))


_SECTIONS: dict[str, type] = {
    "server": ServerSettings,
    "store": StoreSettings,
    "shutdown": ShutdownSettings,
    "interruption": InterruptionSettings,
    "limits": LimitSettings,
    "artifacts": ArtifactSettings,
    "doors": DoorSettings,
}


def read_config(folder: Path, text: str | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """The society's configuration, with defaults. `ConfigError` lists every problem that prevents a start.

    `text`: what coterie.toml shall be; its content if None. `COTERIE_STORE` in the environment replaces `store.url`.
    """
    table = _parse(folder / CONFIG_FILE, text)
    if (url := environ.get(STORE_VARIABLE)) and isinstance(store := table.get("store", {}), dict):
        if wrong := _store_url(url):
            raise ConfigError([Problem(STORE_VARIABLE, wrong.with_got(_got("store.url", url)), fatal=True)])
        table["store"] = store | {"url": url}
    return parse_config(table, folder)


def parse_config(table: Mapping[str, Any], folder: Path) -> Config:
    """The configuration in the tables of a coterie.toml. Files that it names are in `folder`."""
    problems = list[Problem]()
    sections: dict[str, Any] = {}
    for name, value in table.items():
        if name in _SECTIONS:
            sections[name] = _read_section(_SECTIONS[name], name, value, problems, fatal=True)
        elif name not in ("agents", "mcp", "remote"):
            problems.append(_unknown_key(name, name, {*_SECTIONS, "agents", "mcp", "remote"}))
    agents = _read_agents(table.get("agents", {}), folder, problems)
    mcp = _read_mcp(table.get("mcp", {}), problems)
    taken = {agent.id for agent in agents} if table.get("agents") else {ASSISTANT.id}
    remote = _read_remote(table.get("remote", {}), taken, problems)
    if any(problem.fatal for problem in problems):
        raise ConfigError(problems)
    if table.get("agents"):
        sections["agents"] = agents
    return Config(**sections, mcp=tuple(mcp), remote=tuple(remote), problems=tuple(problems))


def _parse(path: Path, text: str | None) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8") if text is None else text)
    except (FileNotFoundError, NotADirectoryError):  # a file instead of the folder: `SocietyFolder.create` says so
        return {}
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(CONFIG_FILE, ProblemText("not_utf8_at", byte=error.start), fatal=True)]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([Problem(CONFIG_FILE, ProblemText("unreadable", why=error), fatal=True)]) from error
    except OSError as error:
        raise ConfigError([Problem(CONFIG_FILE, ProblemText("unreadable", why=error.strerror), fatal=True)]) from error


def _read_section(kind: type, path: str, table: Any, problems: list[Problem], *, fatal: bool, **known: Any) -> Any:
    """An instance of `kind` from the valid keys of `table`. Adds a problem for each invalid key."""
    if not isinstance(table, dict):
        problems.append(_problem(path, ProblemText("expected_table_of", path=path, got=_got(path, table)), fatal))
        return kind(**known)
    checks = {f.name: f.metadata["check"] for f in fields(kind) if "check" in f.metadata}
    sections = {f.name: f.metadata["section"] for f in fields(kind) if "section" in f.metadata}
    for key, value in table.items():
        if key in sections:
            known[key] = _read_section(sections[key], f"{path}.{key}", value, problems, fatal=fatal)
        elif key not in checks:
            problems.append(_unknown_key(f"{path}.{key}", key, {*checks, *sections}))
        elif wrong := checks[key](value):
            problems.append(_problem(f"{path}.{key}", wrong.with_got(_got(f"{path}.{key}", value)), fatal))
        else:
            known[key] = _to_setting(value)
    return kind(**known)


def _read_entries(kind: type, path: str, table: Any, problems: list[Problem]) -> list[Any]:
    """The named tables under `path`. Skips an entry with a problem other than an unknown key."""
    if not isinstance(table, dict):
        problems.append(_problem(path, ProblemText("expected_tables", path=path, got=_got(path, table)), True))
        return []
    entries = []
    for name, value in table.items():
        own: list[Problem] = []
        if wrong := check_id(name):
            own.append(_problem(f"{path}.{name}", wrong, False))
        entry = _read_section(kind, f"{path}.{name}", value, own, fatal=False, id=name)
        problems += own
        if all(problem.code == "unknown_key" for problem in own):
            entries.append(entry)
    return entries


def _read_agents(table: Any, folder: Path, problems: list[Problem]) -> tuple[AgentEntry, ...]:
    agents = []
    for entry in _read_entries(AgentEntry, "agents", table, problems):
        if entry.prompt_file and not (folder / entry.prompt_file).is_file():
            missing = ProblemText("missing_file", name=entry.prompt_file)
            problems.append(_problem(f"agents.{entry.id}.prompt_file", missing, False))
            continue
        if entry.answer_schema and (wrong := check_schema(entry.answer_schema, folder)):
            problems.append(_problem(f"agents.{entry.id}.answer_schema", wrong, False))
            continue
        agents.append(entry)
    known = {agent.id for agent in agents}
    for agent in agents:
        if agent.parent and agent.parent not in known:
            unknown = ProblemText("unknown_agent", name=agent.parent, meant=closest_match(agent.parent, known))
            problems.append(_problem(f"agents.{agent.id}.parent", unknown, False))
    return tuple(agents)


def check_schema(value: str, folder: Path) -> ProblemText | None:
    """What is wrong with the value of `answer_schema`; None if it can be used."""
    try:
        read_answer_schema(value, folder)
    except OSError as error:
        return ProblemText("unreadable_file", name=value, why=error.strerror)
    except WrongSchema as error:
        return error.text
    return None


def _read_mcp(table: Any, problems: list[Problem]) -> list[McpEntry]:
    servers = []
    for entry in _read_entries(McpEntry, "mcp", table, problems):
        if bool(entry.command) == bool(entry.url):
            wrong = ProblemText("expected_command_or_url_only" if entry.url else "expected_command_or_url")
            problems.append(_problem(f"mcp.{entry.id}", wrong, False))
            continue
        if entry.headers and not entry.url:
            problems.append(_problem(f"mcp.{entry.id}.headers", ProblemText("headers_without_url"), False))
        servers.append(entry)
    return servers


def _read_remote(table: Any, taken: set[str], problems: list[Problem]) -> Iterator[RemoteEntry]:
    for entry in _read_entries(RemoteEntry, "remote", table, problems):
        if entry.id in taken:
            problems.append(_problem(f"remote.{entry.id}", ProblemText("taken_id"), False))
        elif not entry.card:
            problems.append(_problem(f"remote.{entry.id}.card", ProblemText("expected_some_card"), False))
        else:
            yield entry


def check_id(name: str) -> ProblemText | None:
    """What is wrong with the id of an agent or MCP server; None if nothing is."""
    if name in RESERVED_IDS:
        return ProblemText("reserved_id", name=name)
    if not AGENT_ID.fullmatch(name):
        return ProblemText("wrong_id")
    return None


def _unknown_key(path: str, key: str, known: set[str]) -> Problem:
    return _problem(path, ProblemText("unknown_key", meant=closest_match(key, known)), False)


def _problem(path: str, text: ProblemText, fatal: bool) -> Problem:
    return Problem(f"{CONFIG_FILE}: {path}", text, fatal)


def _to_setting(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return to_storable(value) if isinstance(value, str) else value


def _got(path: str, value: Any) -> str | None:
    """The wrong value for the message, without secrets: fields of MCP and remote and `store.url` may hold one."""
    if path.split(".")[0] in ("mcp", "remote"):
        return None
    if path == "store.url" and isinstance(value, str):
        value = re.sub(r":(?!//).*@", ":***@", value.partition("?")[0])
    return _quote(value)


def _quote(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value[:60]}"'
        case dict():
            return ProblemText("got_table")
        case list():
            return ProblemText("got_list")
    return str(value)


# Reloading


def merge_reloaded(current: Config, read: Config) -> Config:
    """`read`, but with the current address, engine and MCP servers, which need a restart to change."""
    store = replace(current.store, keep_days=read.store.keep_days, keep_gb=read.store.keep_gb)
    return replace(read, server=current.server, store=store, mcp=current.mcp)


def changes_needing_restart(current: Config, read: Config) -> list[Problem]:
    """One problem for each section whose change takes effect only at the next start."""
    merged = merge_reloaded(current, read)
    changed = [name for name in ("server", "store", "mcp") if getattr(merged, name) != getattr(read, name)]
    return [Problem(f"{CONFIG_FILE}: {name}", ProblemText("next_start")) for name in changed]


def unknown_service(agent: str, service: str, known: Sequence[str]) -> Problem:
    text = ProblemText("unknown_service_of_agent", name=service, meant=closest_match(service, set(known)))
    return Problem(f"{CONFIG_FILE}: agents.{agent}.service", text)


# The society's folder

TEMPLATE_FILES = ("coterie.toml", "llmservices.json")
"""A folder that contains one of these is a society's folder."""
TOOLS_FILE = "tools.py"


@dataclass(frozen=True, slots=True)
class SocietyFolder:
    path: Path

    @property
    def data(self) -> Path:
        """Files of the runtime. Mode 0700."""
        return self.path / "data"

    @property
    def artifacts(self) -> Path:
        return self.data / "artifacts"

    @property
    def exists(self) -> bool:
        return self.data.is_dir() or any((self.path / name).exists() for name in TEMPLATE_FILES)

    def create(self) -> list[Path]:
        """Create the folder if needed, with commented templates; return the files written."""
        try:
            if self.exists:
                self.data.mkdir(mode=0o700, exist_ok=True)
                return []
            self.data.mkdir(mode=0o700, parents=True)
            return [self._write(name) for name in (*TEMPLATE_FILES, TOOLS_FILE) if not (self.path / name).exists()]
        except OSError as error:
            raise StoreUnusable(
                f"{self.path} cannot be created or written ({error.strerror}): choose another folder with --dir"
            ) from error

    def _write(self, name: str) -> Path:
        target = self.path / name
        target.write_bytes((files("coterie") / "templates" / name).read_bytes())
        return target


# The address of a running server, for commands on the same machine

ADDRESS_FILE = "server.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    url: str
    """Without a trailing slash: `http://127.0.0.1:8642`."""
    pid: int
    """The process that listens. The folder's lock shows whether it still runs the society."""
    version: str = __version__
    token: str | None = field(default=None, repr=False)
    """The token, if it was given to the server, which then keeps none in its folder."""


def write_address(data: Path, address: ServerAddress) -> None:
    """Call it once the server listens, not before."""
    write_private(data / ADDRESS_FILE, json.dumps(asdict(address)).encode())


def remove_address(data: Path) -> None:
    with suppress(FileNotFoundError):
        (data / ADDRESS_FILE).unlink()


def read_address(data: Path) -> ServerAddress | None:
    """The address written last; None if there is no valid one."""
    try:
        entry = json.loads((data / ADDRESS_FILE).read_bytes())
        token = entry.get("token")
        return ServerAddress(
            url=str(entry["url"]), pid=int(entry["pid"]), version=str(entry["version"]), token=token and str(token)
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
