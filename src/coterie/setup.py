"""Adding, changing, testing and removing model services while the society runs.

`ServicesDocument` edits one entry of llmservices.json and keeps the rest as the owner wrote it. `Setup` writes it to
the file, or with PostgreSQL to the database, writes the keys to data/secrets.json, and makes the society apply both.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.agent.service import AgentDirectory
from coterie.clock import Clock
from coterie.config import CONFIG_FILE, SocietyFolder
from coterie.configuration import Configuration
from coterie.errors import ConfigError, Problem, Refused, StoreError, StoreUnavailable
from coterie.llm.config import (
    SERVICES_FILE,
    SecretsFile,
    ServiceEntry,
    ServiceRegistry,
    key_lookup,
    parse_json,
    parse_services,
)
from coterie.llm.discovery import (
    DiscoveredService,
    HealthCheck,
    HealthChecks,
    ModelList,
    check_health,
    discover_keyed_services,
    discover_local_servers,
    list_models,
)
from coterie.llm.gateway import MakeService
from coterie.llm.json_node import UNKNOWN_KEY
from coterie.llm.service import UnknownService
from coterie.problem_texts import ProblemText
from coterie.tour.provider import TOUR

log = logging.getLogger(__name__)

# Keys that `ServiceView.to_dict` adds. A page may send them back; they do not belong in the file.
_VIEW_KEYS = ("problems", "trial", "usedBy", "tour")
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_ENTRY_LOCATION = re.compile(r"services\[(\d+)\](?:\.(.*))?$")
_INVALID_VALUE = "expected"
"""First word of the code of a problem that made the parser skip a value."""
_DEFAULT_CAPABILITIES = {"input": ["text"], "output": ["text"]}

Destination = tuple[str, str]
"""Provider and address: they decide who gets the key."""
Reload = Callable[[], Awaitable[None]]


class ServicesDocument:
    """llmservices.json, parsed for editing. `ConfigError` if it is not an object with an array of services."""

    def __init__(self, data: bytes | None) -> None:
        top = {} if data is None else parse_json(data)
        if not isinstance(top, dict):
            raise _unusable("", "repair_object")
        if top.get("services") is None:
            top["services"] = []
        if not isinstance(top["services"], list):
            raise _unusable("services", "repair_array")
        self._top: dict[str, Any] = top
        self._services: list[Any] = top["services"]

    def ids(self) -> list[str]:
        """The ids in order; an empty string for an entry without id."""
        return [str(item.get("id") or "").strip() if isinstance(item, dict) else "" for item in self._services]

    def entry(self, service_id: str) -> dict[str, Any] | None:
        """The first entry with this id, which is the one in use."""
        return next((item for item, id_ in zip(self._services, self.ids(), strict=True) if id_ == service_id), None)

    def put(self, service_id: str, fields: Mapping[str, Any]) -> None:
        """Set these fields of the entry, adding it if needed. None removes a field; other fields stay."""
        entry = self.entry(service_id)
        if entry is None:
            entry = {"id": service_id}
            self._services.append(entry)
        for name, value in fields.items():
            if name in _VIEW_KEYS or name == "id":
                continue
            if value is None:
                entry.pop(name, None)
            else:
                entry[name] = value

    def remove(self, service_id: str) -> bool:
        kept = [item for item, id_ in zip(self._services, self.ids(), strict=True) if id_ != service_id]
        removed = len(kept) < len(self._services)
        self._services[:] = kept
        return removed

    def key_name(self, service_id: str) -> str | None:
        """Name of the key that the entry refers to; None if it has no reference."""
        return reference_name((self.entry(service_id) or {}).get("apiKey"))

    def key_names(self) -> set[str]:
        """Names of all keys that entries refer to."""
        return {name for item in self._services if isinstance(item, dict) for name in references(item)}

    def destination(self, service_id: str) -> Destination | None:
        """Where requests of the service go; None if there is no such entry."""
        entry = self.entry(service_id)
        return None if entry is None else destination(entry)

    def destinations_of_key(self, name: str) -> set[Destination]:
        """Where the key with this name is sent."""
        items = [item for item in self._services if isinstance(item, dict)]
        return {destination(item) for item in items if name in references(item)}

    def to_bytes(self) -> bytes:
        try:
            text = json.dumps(self._top, ensure_ascii=False, indent=2, allow_nan=False)
        except ValueError:
            raise _unusable("", "contains a number too large to be written") from None
        # JSON can contain a lone surrogate only as an escape.
        return f"{text}\n".encode("utf-8", "backslashreplace")


def destination(entry: Mapping[str, Any]) -> Destination:
    """Normalised provider and address of an entry."""
    provider, url = (str(entry.get(name) or "").strip() for name in ("provider", "baseURL"))
    scheme, mark, rest = url.rstrip("/").partition("://")
    host, slash, path = rest.partition("/")
    return provider.lower() or "openai", f"{scheme.lower()}{mark}{host.lower()}{slash}{path}"


def reference_name(value: object) -> str | None:
    """`NAME` if the value is `${NAME}`, else None."""
    match = _REFERENCE.fullmatch(value.strip()) if isinstance(value, str) else None
    return match[1] if match else None


def references(entry: Mapping[str, Any]) -> set[str]:
    """Names of the keys in the key and the headers of an entry, or of changed fields of one."""
    headers = entry.get("headers")
    values = [entry.get("apiKey"), *(headers.values() if isinstance(headers, dict) else ())]
    return {found[1] for value in values if isinstance(value, str) for found in _REFERENCE.finditer(value)}


def strip_derived(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a listed entry that belong in the file: no masked key, no inferred capabilities."""
    stripped = dict(fields)
    key = stripped.get("apiKey")
    if isinstance(key, str) and key.startswith("…"):
        del stripped["apiKey"]
    headers = stripped.get("headers")
    if isinstance(headers, dict) and any(
        isinstance(value, str) and value.startswith("…") for value in headers.values()
    ):
        del stripped["headers"]
    capabilities = stripped.get("capabilities")
    if isinstance(capabilities, dict) and "source" in capabilities:
        given = {name: value for name, value in capabilities.items() if name != "source"}
        inferred = capabilities["source"] == "inferred" and given == _DEFAULT_CAPABILITIES
        stripped["capabilities"] = None if inferred else given
    return stripped


def _unusable(path: str, code: str) -> ConfigError:
    return ConfigError([Problem(f"{SERVICES_FILE}: {path}" if path else SERVICES_FILE, ProblemText(code), fatal=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceView:
    """A service as shown to the owner."""

    entry: ServiceEntry
    problems: Sequence[Problem]
    health: HealthCheck | None
    """Last health check of the entry as it is now; None if there was none."""
    used_by: Sequence[str]
    """Ids of the agents that use it."""

    def to_dict(self) -> dict[str, Any]:
        return self.entry.to_dict() | {
            "problems": [problem.to_dict() for problem in self.problems],
            "trial": self.health and self.health.to_dict(),
            "usedBy": list(self.used_by),
            "tour": self.entry.provider == TOUR,
        }


class Setup:
    def __init__(
        self,
        folder: SocietyFolder,
        *,
        configuration: Configuration,
        services: ServiceRegistry,
        directory: AgentDirectory,
        follow: Reload,
        reload: Reload,
        make_service: MakeService,
        clock: Clock,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`follow`: applies what other processes changed. `reload`: applies the services after a write."""
        self._configuration = configuration
        self._secrets = SecretsFile(folder.data / "secrets.json")
        self._health_checks = HealthChecks(folder.data / "trials.json")
        self._services, self._directory, self._follow, self._reload = services, directory, follow, reload
        self._make_service, self._clock, self._environ = make_service, clock, environ
        self._write_lock = asyncio.Lock()

    @property
    def problems(self) -> Sequence[Problem]:
        """Problems of the file and the keys, also of entries that are not listed."""
        return self._services.problems

    def list(self) -> Sequence[ServiceView]:
        """The model services in use, in order; those of the tour if there are no others."""
        try:
            indexes = {id_: index for index, id_ in reversed([*enumerate(self._read_document().ids())])}
        except ConfigError:
            indexes = {}  # the file was damaged after it was read
        return [self._view(entry, indexes.get(entry.id)) for entry in self._services if not entry.is_remote_agent]

    def view(self, service_id: str) -> ServiceView:
        self._own_entry(service_id)
        return next(view for view in self.list() if view.entry.id == service_id)

    def _own_entry(self, service_id: str) -> ServiceEntry:
        """The entry of a model service. `UnknownService`: there is none, or the id is of an agent elsewhere."""
        entry = self._services.get(service_id)
        if entry.is_remote_agent:  # coterie.toml describes it
            raise UnknownService(service_id, [one.id for one in self._services if not one.is_remote_agent])
        return entry

    async def discover(self, *, probe: bool = False) -> Sequence[DiscoveredService]:
        """Services that could be added: those with a key in the environment; with `probe` also local servers."""
        return [*discover_keyed_services(self._environ), *(await discover_local_servers() if probe else [])]

    async def put(self, service_id: str, fields: Mapping[str, Any], key: str | None = None) -> ServiceView:
        """Add or change a service in the file and in the running society. Fields not given stay as they are.

        Capabilities that are not declared are those that `test_entry` found out for the same entry.
        `key`: stored in data/secrets.json, the file gets a reference; empty: none is needed; None: unchanged.
        A key is never sent to another address than it was entered for: with a new address, `key` is required.
        `Refused`: `service_invalid` (the entry is wrong), `id_taken`. Nothing was written.
        """
        async with self._write_lock:
            await self._follow()
            change = self._prepare(service_id, fields, key)
            check = self._health_checks.get_draft(change.entry)
            if check and change.entry.capabilities.inferred and (found := check.declared_capabilities()):
                change = self._prepare(service_id, {**fields, "capabilities": found}, key)
                self._health_checks.record_draft(change.entry, check)
            if change.new_key_name:
                name, value = change.new_key_name, change.key
                await _write(lambda: asyncio.to_thread(self._secrets.put, name, value))
            try:
                # A crash before this write leaves an unused key and the old services.
                await _write(lambda: self._configuration.write_services(change.document.to_bytes()))
            except (StoreError, ConfigError, Refused):
                await self._delete_unused_key(change.new_key_name, self._read_document())
                raise
            await self._delete_unused_key(change.old_key_name, change.document)
            self._health_checks.on_entry_saved(change.entry, new_key=self._has_new_key(change.entry))
            await self._reload()
        return self.view(change.entry.id)

    async def delete(self, service_id: str) -> None:
        """Remove a service and its key. Agents without a named service use the first remaining one, or the tour."""
        async with self._write_lock:
            await self._follow()
            document = self._read_document()
            key_name = document.key_name(service_id)
            if not document.remove(service_id):
                raise UnknownService(service_id, [id_ for id_ in document.ids() if id_])
            if users := [profile.id for profile in self._directory.all_profiles() if profile.service == service_id]:
                names = ", ".join(users[:5]) + (" and others" if len(users) > 5 else "")
                raise Refused("service_in_use", f"the service is used by {names}: give them another service first")
            await _write(lambda: self._configuration.write_services(document.to_bytes()))
            await self._delete_unused_key(key_name, document)
            await self._reload()

    async def test(self, service_id: str) -> HealthCheck:
        """Send real requests to the service. The result is kept until the entry changes."""
        entry = self._own_entry(service_id)
        check = await self._check(entry)
        self._health_checks.record(entry, check)
        return check

    async def test_entry(self, service_id: str, fields: Mapping[str, Any], key: str | None = None) -> HealthCheck:
        """Send real requests to the service that `put` would create from the same arguments. Saves nothing."""
        change = self._prepare(service_id, fields, key)
        check = await self._check(change.entry)
        self._health_checks.record_draft(change.entry, check)
        return check

    async def models(self, service_id: str, fields: Mapping[str, Any], key: str | None = None) -> ModelList:
        """The models that a service offers: as it is, or with `fields` as `put` would create it. Saves nothing."""
        if not fields and key is None:
            return await list_models(self._own_entry(service_id))
        # The model is what the owner wants to know.
        return await list_models(self._prepare(service_id, {**fields, "model": fields.get("model") or "?"}, key).entry)

    async def _check(self, entry: ServiceEntry) -> HealthCheck:
        is_scripted = entry.provider == TOUR  # its script does not answer the requests that try capabilities
        return await check_health(entry, self._make_service, self._clock, try_capabilities=not is_scripted)

    def _view(self, entry: ServiceEntry, index: int | None) -> ServiceView:
        problems = [] if index is None else [p for p in self._services.problems if _is_in_entry(p, index)]
        return ServiceView(
            entry=entry,
            problems=problems,
            health=self._health_checks.get(entry),
            used_by=[agent_id for agent_id in self._directory if self._directory.service_of(agent_id).id == entry.id],
        )

    def _read_document(self) -> ServicesDocument:
        return ServicesDocument(self._configuration.services_json())

    def _prepare(self, service_id: str, fields: Mapping[str, Any], key: str | None) -> _ServiceChange:
        """Validate a change without writing anything. `Refused("id_taken")`: the id is of an agent elsewhere."""
        service_id = service_id.strip()
        if not service_id:
            raise _invalid(Problem("id", ProblemText("expected_text")))
        if service_id in self._services and self._services.get(service_id).is_remote_agent:
            message = f"{CONFIG_FILE} describes an agent elsewhere with this id, {service_id}: choose another"
            raise Refused("id_taken", message)
        document, new_fields = self._read_document(), strip_derived(fields)
        old_key_name = document.key_name(service_id)
        given = new_fields.get("apiKey")
        if key is None and isinstance(given, str) and given.strip() and "${" not in given:
            key = given  # the key itself instead of a reference
        key_name = self._choose_key_name(service_id, document, key.strip()) if key else None
        if key is not None:
            new_fields["apiKey"] = f"${{{key_name}}}" if key_name else None
        before = document.destination(service_id)
        allowed = self._allowed_destinations({"apiKey": new_fields.get("apiKey")}, document)
        allowed_headers = self._allowed_destinations({"headers": new_fields.get("headers")}, document)
        document.put(service_id, new_fields)
        after = document.destination(service_id)
        in_headers = references({"headers": (document.entry(service_id) or {}).get("headers")})
        keeps_headers = before not in (None, after) and "headers" not in new_fields and in_headers
        if keeps_headers or (allowed_headers is not None and after not in allowed_headers):
            raise _invalid(Problem("headers", ProblemText("headers_elsewhere")))
        keeps_key = (
            before is not None and "apiKey" not in new_fields and (document.entry(service_id) or {}).get("apiKey")
        )
        if key is None and ((keeps_key and after != before) or (allowed is not None and after not in allowed)):
            raise _invalid(Problem("key", ProblemText("key_elsewhere")))
        value = (key or "").strip()
        return _ServiceChange(
            document=document,
            entry=self._parse_entry(document, service_id, {key_name: value} if key_name else {}),
            new_key_name=key_name if key_name != old_key_name else None,
            key=value,
            old_key_name=old_key_name,
        )

    def _allowed_destinations(self, fields: Mapping[str, Any], document: ServicesDocument) -> set[Destination] | None:
        """Where the stored keys that `fields` refer to may be sent; None if none is in data/secrets.json."""
        names = references(fields) & self._secrets.read()[0].keys()
        return set.intersection(*map(document.destinations_of_key, names)) if names else None

    def _choose_key_name(self, service_id: str, document: ServicesDocument, key: str) -> str:
        """The current name if the key is unchanged; otherwise one that neither files nor the environment use."""
        stored, _ = self._secrets.read()
        current = document.key_name(service_id)
        if current and stored.get(current) == key and current not in self._environ:
            return current
        base = re.sub(r"[^A-Z0-9]+", "_", service_id.upper()).strip("_")
        first = f"{base if base[:1].isalpha() else f'SERVICE_{base}'.strip('_')}_API_KEY"
        taken = {*stored, *document.key_names(), *self._environ}
        names = itertools.chain([first], (f"{first}_{number}" for number in itertools.count(2)))
        return next(name for name in names if name not in taken)

    def _has_new_key(self, entry: ServiceEntry) -> bool:
        return entry.id not in self._services or self._services.get(entry.id).api_key != entry.api_key

    def _parse_entry(self, document: ServicesDocument, service_id: str, new_keys: Mapping[str, str]) -> ServiceEntry:
        """Parse the entry as the society will; `Refused` if it is invalid."""
        stored, _ = self._secrets.read()
        entries, problems = parse_services(document.to_bytes(), key_lookup(self._environ, {**stored, **new_keys}))
        index = document.ids().index(service_id)
        own = [problem for problem in problems if _is_in_entry(problem, index)]
        own = [problem for problem in own if problem.code != UNKNOWN_KEY]
        wrong = own if new_keys else [problem for problem in own if problem.code.startswith(_INVALID_VALUE)]
        entry = next((entry for entry in entries if entry.id == service_id), None)
        if wrong or entry is None:
            raise _invalid(*wrong)
        return entry

    async def _delete_unused_key(self, name: str | None, document: ServicesDocument) -> None:
        if name is None or name in document.key_names():
            return
        try:
            await asyncio.to_thread(self._secrets.remove, name)
        except (OSError, ConfigError) as error:
            log.warning("the key %s is no longer used, but could not be deleted: %s", name, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServiceChange:
    """A validated change: the new document and the key to store with it."""

    document: ServicesDocument
    entry: ServiceEntry
    new_key_name: str | None
    """Name for the new key. None: no key is to be stored."""
    key: str = field(repr=False)
    old_key_name: str | None


async def _write(write: Callable[[], Awaitable[None]]) -> None:
    """Run `write`; turn an `OSError` into `StoreUnavailable`."""
    try:
        await write()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space" if full else "let the society's owner write to its folder"
        message = f"nothing was changed ({error.strerror}): {remedy}, then try again"
        raise StoreUnavailable(message, full=full) from error


def _is_in_entry(problem: Problem, index: int) -> bool:
    match = _ENTRY_LOCATION.search(problem.location)
    return match is not None and int(match[1]) == index


def _invalid(*problems: Problem) -> Refused:
    """`service_invalid` with the problems, whose places are the names of fields."""
    places = [problem.to_dict(_field_of(problem.location)) for problem in problems]
    named = [": ".join(filter(None, (one["place"], one["message"]))) for one in places]
    return Refused("service_invalid", "; ".join(named) or "it cannot be used", problems=places)


def _field_of(location: str) -> str:
    """The name of the field without file and entry; empty for the entry itself."""
    match = _ENTRY_LOCATION.search(location)
    return (match[2] or "") if match else location
