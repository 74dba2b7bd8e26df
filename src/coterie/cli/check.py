"""Checks of `coterie check`: mistakes in the owner's files, and with --deep unreachable servers and services.

`check_files` reads coterie.toml, llmservices.json, tools.py and the stored society, and starts nothing. It connects to
a PostgreSQL that stores the society.
`try_connections` starts each MCP server and sends each service one small request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from coterie import __version__
from coterie.admin.inspect import storage_problems
from coterie.config import CONFIG_FILE, Config, McpEntry, SocietyFolder, StoreSettings, read_config, unknown_service
from coterie.configuration import Document, list_differences, read_files
from coterie.errors import ConfigError, Problem, StoreError
from coterie.llm.config import (
    SERVICES_FILE,
    SecretsFile,
    ServiceEntry,
    ServiceRegistry,
    find_unknown_keys,
    key_lookup,
    read_services_file,
    service_paths,
)
from coterie.llm.service import PermanentError, ServiceError
from coterie.redaction import find_secrets, redact
from coterie.stores.open import is_shared, owner_pid, require_driver
from coterie.stores.sql.migrations import postgres_version, schema_scripts
from coterie.stores.sql.rows import get_meta
from coterie.stores.sqlite.connection import version_warnings
from coterie.text import closest_match, one_line
from coterie.web.addresses import addresses

if TYPE_CHECKING:
    from coterie.clock import Clock

MCP_SEPARATOR = "__"
_WILDCARDS = "*?["
_MAY_CREATE = "SELECT has_schema_privilege(current_schema(), 'CREATE')"
MAX_USUAL_PRICE, MIN_USUAL_PRICE = 1_000, 0.001
"""Per million tokens. A price outside these limits is probably meant for another number of tokens."""
_SMALL_UNITS = frozenset({"IDR", "JPY", "KRW", "VND"})
"""Currencies in which usual prices are above `MAX_USUAL_PRICE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionResult:
    """The result of one attempt to connect to an MCP server, model service or remote agent."""

    kind: Literal["mcp", "service", "remote"]
    id: str
    ok: bool
    message: str
    tools: tuple[str, ...] = ()
    """The tools that an MCP server lists."""
    left_out: tuple[str, ...] = ()
    """Tools of an MCP server that agents do not get, because they must run as tasks."""

    def to_dict(self) -> dict[str, Any]:
        listed = {"tools": list(self.tools), "notOffered": list(self.left_out)} if self.kind == "mcp" else {}
        return {"kind": self.kind, "id": self.id, "ok": self.ok, "message": self.message} | listed


@dataclass(slots=True, kw_only=True)
class CheckReport:
    """What a check found. `None` for agents or services: their file cannot be read."""

    engine: str = "sqlite"
    engine_version: str = sqlite3.sqlite_version
    running_pid: int | None = None
    agents: list[str] | None = None
    services: list[str] | None = None
    tools: list[str] = field(default_factory=list)
    """Names of the owner's tools."""
    fixed_tokens: Mapping[str, int] | None = None
    """Estimated tokens of prompt and tools by agent. None: a file cannot be read."""
    warnings: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    connections: list[ConnectionResult] | None = None
    """None: not tried."""

    def to_dict(self) -> dict[str, Any]:
        tried = {} if self.connections is None else {"connections": [one.to_dict() for one in self.connections]}
        return {
            "version": __version__,
            "engine": self.engine,
            "engineVersion": self.engine_version,
            "agents": self.agents,
            "services": self.services,
            "tools": self.tools,
            "fixedTokens": self.fixed_tokens,
            "problems": [{"place": p.location, "message": p.message, "fatal": p.fatal} for p in self.problems],
            "warnings": self.warnings,
            "runningPid": self.running_pid,
        } | tried


class SocietyCheck:
    """One check of one folder. `report` grows with each step."""

    def __init__(self, folder: SocietyFolder) -> None:
        self._folder = folder
        self._config: Config | None = None
        self._services: ServiceRegistry | None = None
        self._tool_names: set[str] = set()
        self._are_tools_complete = True
        """False: a tool file cannot be loaded, so the names of its tools are unknown."""
        self.report = CheckReport(warnings=list(version_warnings()), running_pid=owner_pid(folder))

    def check_files(self) -> None:
        self._check_config()
        self._check_services()
        self._check_tool_files()
        if self._config:
            self.report.problems += _missing_programs(self._config.mcp)
            self.report.problems += self._remote_services(self._config).problems
            if self._config.remote and find_spec("a2a") is None:
                message = "remote agents need a package that is not installed: pip install 'coterie[a2a]'"
                self.report.problems.append(Problem(f"{CONFIG_FILE}: remote", message))
            self.report.problems += self._unmatched_patterns(self._config, listed={})
            self._estimate_fixed_tokens(self._config)
        if self._config and is_shared(self._config):
            self._check_database(self._config.store)
        elif self.report.engine == "sqlite":
            self.report.problems += storage_problems(self._folder)

    async def try_connections(self, clock: Clock) -> None:
        """Start every MCP server and ask every service, all at the same time. Adds a problem for each that fails."""
        servers = self._config.mcp if self._config else ()
        results = await asyncio.gather(
            *(_try_server(entry, clock) for entry in servers),
            *(_try_service(entry, clock) for entry in self._services or ()),
            *(_try_remote(entry, clock) for entry in (self._remote_services(self._config) if self._config else ())),
        )
        reported = {problem.location for problem in self.report.problems}
        paths = self._service_paths()
        for result in results:
            if result.kind == "service":
                path = paths[result.id]
            else:  # the id of a remote agent begins with the name of its table
                path = f"{CONFIG_FILE}: {'mcp.' if result.kind == 'mcp' else ''}{result.id}"
            # A missing program and a missing key were found in the files already.
            if not result.ok and not reported & {f"{path}.command", f"{path}.apiKey", *_header_paths(reported, path)}:
                self.report.problems.append(Problem(path, result.message))
            if names := one_line(", ".join(result.left_out), 500):
                self.report.warnings.append(
                    f"{result.id}: tools are not offered, because they must run as tasks: {names}"
                )
        self.report.connections = results
        if self._config:
            listed = {result.id: result.tools for result in results if result.kind == "mcp" and result.ok}
            unmatched = self._unmatched_patterns(self._config, listed)
            self.report.problems += [problem for problem in unmatched if problem not in self.report.problems]

    def _remote_services(self, config: Config) -> ServiceRegistry:
        """The agents elsewhere as services, with the problems of their headers."""
        from coterie.agent_runtime import with_remote_agents

        stored, _ = SecretsFile(self._folder.data / "secrets.json").read()
        return with_remote_agents(ServiceRegistry(), config, key_lookup(os.environ, stored))

    # The files

    def _estimate_fixed_tokens(self, config: Config) -> None:
        """Report the tokens that every request of an agent has, and warn if they fill its model's context window."""
        if self._services is None:
            return
        from coterie.agent_runtime import fixed_costs
        from coterie.clock import SystemClock

        with contextlib.redirect_stdout(sys.stderr):  # a tool file may print; our output may be JSON
            costs = fixed_costs(self._folder, config, SystemClock())
        self.report.fixed_tokens = {agent_id: tokens for agent_id, (tokens, _) in costs.items()}
        for agent_id, (tokens, service) in costs.items():
            if service.context_tokens and tokens * 2 > service.context_tokens:
                window = f"the {service.context_tokens:,} tokens that {service.id} reads (contextTokens)"
                advice = "shorten its prompt, or allow it fewer tools"
                self.report.warnings.append(f"{agent_id}: prompt and tools take about {tokens:,} of {window}: {advice}")

    def _check_config(self) -> None:
        try:
            config = read_config(self._folder.path)
            require_driver(config.store)
            addresses(config.server.host, config.server.port, config.server.public_url)
        except ConfigError as error:
            self.report.problems += error.problems
            return
        if is_shared(config):
            self.report.engine, self.report.engine_version, self.report.warnings = "postgresql", "", []
        self._config = config
        self.report.problems += config.problems
        self.report.agents = [agent.id for agent in config.all_agents]

    def _check_database(self, store: StoreSettings) -> None:
        """Connect to the PostgreSQL. Changes nothing there."""
        from coterie.stores.postgres.connection import owner_connection

        place = f"{CONFIG_FILE}: store.url"
        try:
            with owner_connection(store.url) as db:
                self.report.engine_version = db.raw.info.parameter_status("server_version") or ""
                version, newest = postgres_version(db.raw), schema_scripts("postgres").newest
                if version == 0 and not db.execute(_MAY_CREATE).fetchone()[0]:
                    message = "the user may not create tables there: run GRANT CREATE ON SCHEMA public TO that user"
                    self.report.problems.append(Problem(place, message, fatal=True))
                elif version and version < newest:
                    self.report.warnings.append(
                        f"the database has schema {version}: the next start brings it to {newest}"
                    )
                stored = get_meta(db, "configuration") if version else None
        except StoreError as error:
            self.report.problems.append(Problem(place, str(error), fatal=True))
            return
        if stored is not None:
            self._compare_configuration(json.loads(stored))

    def _compare_configuration(self, stored: Document) -> None:
        try:
            files, _ = read_files(self._folder)
        except ConfigError as error:
            self.report.problems += [one for one in error.problems if one not in self.report.problems]
            return
        if files and (found := list(list_differences(stored, files))):
            count = f"{len(found):,} setting" + ("" if len(found) == 1 else "s")
            self.report.warnings.append(
                f"the database has another configuration than these files, in {count}, and it counts: see which with"
                " coterie apply --dry-run"
            )

    def _check_services(self) -> None:
        try:
            services = ServiceRegistry.load(self._folder.path)
        except ConfigError as error:
            self.report.problems += error.problems
            return
        self._services = services
        self.report.problems += services.problems
        unknown = find_unknown_keys(self._services_json())
        self.report.problems += [problem for problem in unknown if problem not in services.problems]
        paths = self._service_paths()
        for entry in services:
            if wrong := _wrong_provider(entry.provider):
                self.report.problems.append(Problem(f"{paths[entry.id]}.provider", wrong))
        wrong_prices = {
            name
            for name, path in paths.items()
            if any(problem.location.startswith(f"{path}.price") for problem in services.problems)
        }
        self.report.warnings += _price_warnings(services, wrong_prices)
        self.report.services = names = [service.id for service in services]
        for agent in self._config.agents if self._config else ():
            if agent.service is not None and agent.service not in services:
                self.report.problems.append(unknown_service(agent.id, agent.service, names))

    def _services_json(self) -> bytes:
        return read_services_file(self._folder.path / SERVICES_FILE) or b"{}"

    def _service_paths(self) -> dict[str, str]:
        """Where each service is in its file: `llmservices.json: services[0]`."""
        if self._services is None:
            return {}
        return {name: f"{SERVICES_FILE}: {path}" for name, path in service_paths(self._services_json()).items()}

    def _check_tool_files(self) -> None:
        from coterie.agent.builtins import built_in_names
        from coterie.agent.user_tools import load_user_tools

        built_in = built_in_names()
        with contextlib.redirect_stdout(sys.stderr):  # a file may print; our output may be JSON
            loaded = load_user_tools(self._folder.path, reserved_names=built_in)
        keys = [entry.api_key.reveal() for entry in self._services or () if entry.api_key]
        secrets = (*find_secrets(os.environ), *keys)  # an error message of a tool file may quote one
        self.report.problems += [Problem(one.location, redact(one.message, secrets)) for one in loaded.problems]
        self.report.tools = [tool.name for tool in loaded.tools]
        self._tool_names = {*built_in, *self.report.tools}
        self._are_tools_complete = not loaded.problems

    def _unmatched_patterns(self, config: Config, listed: Mapping[str, Sequence[str]]) -> list[Problem]:
        """One problem for each entry of an agent's `tools` that names no tool. `listed`: tools by MCP server."""
        names = self._tool_names.union(*listed.values())
        unlisted = [server.id for server in config.mcp if server.id not in listed]
        servers = {server.id for server in config.mcp}
        problems = []
        for agent in config.agents:
            for pattern in agent.tools:
                wanted = pattern.lstrip("!-")  # a mark of exclusion
                is_found = any(fnmatchcase(name, wanted) for name in names)
                if is_found or any(_may_match_server(wanted, server) for server in unlisted):
                    continue
                if not self._are_tools_complete and MCP_SEPARATOR not in wanted:
                    continue  # the tool may be in the file that cannot be loaded
                hint = _suggest_pattern(wanted, names, servers)
                message = f'"{one_line(pattern, 80)}" matches no tool{hint}'
                problems.append(Problem(f"{CONFIG_FILE}: agents.{agent.id}.tools", message))
        return problems


def _may_match_server(pattern: str, server: str) -> bool:
    """True if the pattern could match a tool of that MCP server, whose tools are unknown."""
    prefix = f"{server}{MCP_SEPARATOR}"
    if pattern.startswith(prefix):
        return True
    wildcard = next((place for place, letter in enumerate(pattern) if letter in _WILDCARDS), None)
    if wildcard is None:
        return False
    literal = pattern[:wildcard]
    return prefix.startswith(literal) or literal.startswith(prefix)


def _suggest_pattern(pattern: str, names: Collection[str], servers: Collection[str]) -> str:
    server, separator, rest = pattern.partition(MCP_SEPARATOR)
    if separator and server not in servers:
        meant = closest_match(server, set(servers))
        if meant:
            return f', did you mean "{meant}{separator}{rest}"?'
        return f": there is no MCP server [mcp.{one_line(server, 40)}]"
    meant = closest_match(pattern, set(names))
    return f', did you mean "{meant}"?' if meant else ""


def _missing_programs(servers: Iterable[McpEntry]) -> Iterator[Problem]:
    for server in servers:
        if not server.command or shutil.which(server.command, path=(server.env or {}).get("PATH")):
            continue
        hint = "install Node.js, which brings it" if server.command in ("npx", "node", "npm") else "install it"
        command = one_line(server.command, 80)
        message = f'there is no program "{command}" on the PATH: {hint}, or write its whole path'
        yield Problem(f"{CONFIG_FILE}: mcp.{server.id}.command", message)


def _wrong_provider(provider: str) -> str | None:
    """Why there is no provider of that name; None if there is one."""
    if provider in ("openai", "tour"):
        return None
    if find_spec("any_llm") is None:
        return (
            f'the provider "{one_line(provider, 40)}" needs a package: pip install "coterie[providers]";'
            ' or use "openai" for a server with that API'
        )
    from any_llm import AnyLLM  # the import takes a second

    known = set(AnyLLM.get_supported_providers())
    if provider in known:
        return None
    meant = closest_match(provider, known)
    hint = f'; did you mean "{meant}"?' if meant else '; use "openai" for a server with that API'
    return f'there is no provider "{one_line(provider, 40)}"{hint}'


def _price_warnings(services: Iterable[ServiceEntry], wrong: Collection[str]) -> Iterator[str]:
    """Prices that are probably mistakes, and missing ones. `wrong`: services whose price is reported as a problem."""
    entries = [entry for entry in services if entry.provider != "tour"]
    has_prices = any(entry.price for entry in entries)
    for entry in entries:
        price = entry.price
        if price is None:
            if has_prices and entry.id not in wrong:
                yield f"{entry.id}: it has no price, so the cost of its requests is unknown"
            continue
        for key, amount in (("input", price.input), ("output", price.output)):
            given = f"{entry.id}: price.{key} is {_decimal(amount)} {price.currency} for a million tokens"
            if amount > MAX_USUAL_PRICE and price.currency not in _SMALL_UNITS:
                yield f"{given}: is it for more than a million tokens?"
            elif 0 < amount < MIN_USUAL_PRICE:
                yield f"{given}: is it for a single token, or for a thousand?"
        if price.cached_input > price.input:
            yield f"{entry.id}: price.cachedInput is higher than price.input; a cache usually makes input cheaper"


def _decimal(number: float) -> str:
    """The number without an exponent: `0.000002`, not `2e-06`."""
    return f"{number:,.12f}".rstrip("0").rstrip(".")


# Real connections


async def _try_server(entry: McpEntry, clock: Clock) -> ConnectionResult:
    from coterie.agent.mcp import McpServers

    listed: list[str] = []

    def adopt(_: str, tools: Iterable[Any]) -> None:
        listed[:] = [tool.name for tool in tools]

    servers = McpServers([entry], clock, adopt)
    try:
        problems = await servers.connect()
    finally:
        await servers.close()
    if problems:
        return ConnectionResult(kind="mcp", id=entry.id, ok=False, message=problems[0].message)
    message = f"lists {len(listed)} tool" + ("" if len(listed) == 1 else "s")
    left_out = tuple(servers.left_out)
    return ConnectionResult(kind="mcp", id=entry.id, ok=True, message=message, tools=tuple(listed), left_out=left_out)


async def _try_service(entry: ServiceEntry, clock: Clock) -> ConnectionResult:
    from coterie.agent_runtime import make_service
    from coterie.llm.discovery import check_health

    health = await check_health(entry, lambda one: make_service(one, clock), clock, try_capabilities=False)
    message = f"{health.message} ({health.detail})" if health.detail else health.message
    return ConnectionResult(kind="service", id=entry.id, ok=health.ok, message=message)


def _header_paths(reported: Iterable[str], path: str) -> Iterator[str]:
    return (place for place in reported if place.startswith(f"{path}.headers."))


async def _try_remote(entry: ServiceEntry, clock: Clock) -> ConnectionResult:
    """Read the card of an agent elsewhere. Sends it no message."""
    from coterie.agent_runtime import make_service

    try:
        if entry.missing_key:
            raise PermanentError(f"its key {entry.missing_key} is not set", category="auth")
        service: Any = make_service(entry, clock)
        try:
            card = await service.read_card()
        finally:
            await service.close()
    except ServiceError as error:
        return ConnectionResult(kind="remote", id=entry.id, ok=False, message=str(error))
    return ConnectionResult(kind="remote", id=entry.id, ok=True, message=f"is {one_line(card.name, 80)}")
