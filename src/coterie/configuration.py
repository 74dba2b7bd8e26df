"""Where the society's agents, services and limits come from: the owner's files, or with PostgreSQL the database.

With SQLite the files are read again at each start and reload (`FileConfiguration`). With PostgreSQL they are a document
in the database with a version (`DatabaseConfiguration`), so that all processes of the society agree. Keys stay with
each process: the document has only their names. `server`, `shutdown`, `mcp` and the rest
of `store` are always read from files.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Protocol

from coterie.agents import Agent
from coterie.answer_schema import WrongSchema, read_answer_schema
from coterie.config import CONFIG_FILE, AgentEntry, Config, SocietyFolder, parse_config, read_config
from coterie.errors import ConfigError, Problem, Refused
from coterie.files import replace_file, write_private
from coterie.llm.config import SERVICES_FILE, ServiceRegistry, parse_json, parse_services, read_services_file
from coterie.messages import PERSON
from coterie.problem_texts import ProblemText
from coterie.store import Store
from coterie.text import one_line

log = logging.getLogger(__name__)

Document = dict[str, Any]
"""The configuration as JSON values, without defaults.

`agents`: by id, the fields of its table in coterie.toml; prompts and schemas are text, not names of files. `limits`,
`interruption`, `artifacts`: the tables of coterie.toml. `store`: how long data is kept.
`remote`: by id, agents elsewhere.
`services`, only in a database: the entries of llmservices.json, with keys only as `${NAME}`.
"""
Change = Callable[[Document], None]
"""Changes the document in place."""
SECTIONS = ("limits", "interruption", "artifacts")
"""Tables of coterie.toml in the document, besides the agents."""
TABLES = ("agents", "remote", "store", *SECTIONS)
STORE_SETTINGS = ("keep_days", "keep_gb")
"""Keys of the table `store` in the document."""
FilesRole = Literal["write", "first", "never"]
"""Whether a process takes over what the owner changes in its folder: always, only as the first version, or not."""
APPLIED_FILE = "applied.json"
MAX_NAMED_DIFFERENCES = 5
MAX_SHOWN_CHARACTERS = 60
_KEY_REFERENCE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
_SECRET_HEADER = re.compile(r"auth|cookie|key|token|secret", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a process runs with."""

    version: str
    """Of the configuration; changes with every change of it."""
    config: Config
    services: ServiceRegistry
    """With the keys of this process."""


class Configuration(Protocol):
    async def synchronize(self) -> Sequence[Problem]:
        """Take over what the owner changed in the files, where they are not the configuration themselves.

        Returns the problems of the files, and one more if they differ from the configuration and were not taken over.
        """
        ...

    async def find_file_problems(self) -> Sequence[Problem]:
        """Return what `synchronize` would return now. Takes nothing over."""
        ...

    async def load(self) -> Settings:
        """Read the configuration as it is now. `ConfigError`: it cannot be read.

        With a database, a coterie.toml that became unreadable is one of its problems instead.
        """
        ...

    async def read(self) -> tuple[str, Document]:
        """The version and a copy of the document."""
        ...

    async def write(self, change: Change, expected_version: str | None = None) -> None:
        """Change the configuration. `RunningConfiguration.change` calls it and applies the change in this process.

        `Refused("config_changed")`: it has another version than `expected_version`. `ConfigError`: the change would
        add these problems. In both cases nothing was written.
        """
        ...

    def services_json(self) -> bytes | None:
        """The services in the format of llmservices.json, as of the last `load`; None: there never were any."""
        ...

    async def write_services(self, data: bytes) -> None:
        """Replace the services. `Refused("config_changed")`: another process changed the configuration meanwhile."""
        ...


class FileConfiguration:
    """coterie.toml and llmservices.json, for a society in SQLite, which one process runs."""

    def __init__(self, folder: SocietyFolder) -> None:
        self._folder = folder

    async def synchronize(self) -> Sequence[Problem]:
        return ()

    async def find_file_problems(self) -> Sequence[Problem]:
        return ()

    async def load(self) -> Settings:
        config = read_config(self._folder.path)
        return Settings(version=self._version(), config=config, services=ServiceRegistry.load(self._folder.path))

    async def read(self) -> tuple[str, Document]:
        return self._version(), document_of(read_config(self._folder.path), self._folder)

    async def write(self, change: Change, expected_version: str | None = None) -> None:
        raise ConfigError([Problem(CONFIG_FILE, ProblemText("edited_by_hand"), fatal=True)])

    def services_json(self) -> bytes | None:
        return read_services_file(self._folder.path / SERVICES_FILE)

    async def write_services(self, data: bytes) -> None:
        await asyncio.to_thread(replace_file, self._folder.path / SERVICES_FILE, data)

    def _version(self) -> str:
        digest = hashlib.sha256()
        for name in (CONFIG_FILE, SERVICES_FILE):
            path = self._folder.path / name
            digest.update(path.read_bytes() if path.is_file() else b"")
        return digest.hexdigest()[:16]


class DatabaseConfiguration:
    """The configuration in a database that several processes share."""

    def __init__(self, folder: SocietyFolder, store: Store, *, files: FilesRole = "write") -> None:
        self._folder, self._store, self._files_role = folder, store, files
        self._applied = AppliedFiles(folder, store.info.log_id)
        self._version, self._document = 0, Document()
        """As of the last `load`."""
        self._own: Config | None = None
        """coterie.toml when it could last be read."""

    async def synchronize(self) -> Sequence[Problem]:
        files, problems = read_files(self._folder)
        while True:
            version, stored = await self._read()
            verdict = _decide(version, stored, files, self._applied.read(), self._files_role)
            if verdict == "write":
                try:
                    version = await self._write(files, version, stored)
                except Refused:
                    continue  # another process wrote at the same moment: decide again
                log.info("the agents, services and limits of the folder are version %d of the configuration", version)
            if verdict in ("write", "same") and self._files_role != "never":
                self._applied.write(version, files)
            return [*problems, difference_problem(version, stored, files)] if verdict == "differ" else problems

    async def find_file_problems(self) -> Sequence[Problem]:
        try:
            files, problems = read_files(self._folder)
        except ConfigError:
            return ()  # `load` has it among its problems
        version, stored = await self._read()
        verdict = _decide(version, stored, files, self._applied.read(), self._files_role)
        return [*problems, difference_problem(version, stored, files)] if verdict == "differ" else problems

    async def apply_files(self, *, dry_run: bool = False) -> tuple[int, Sequence[str]]:
        """Make the files the configuration, whatever it was. Return its version and what differed before.

        `ConfigError`: the files have problems, and nothing was written.
        """
        files, problems = read_files(self._folder, strict=True)
        if problems:
            raise ConfigError(problems)
        while True:
            version, stored = await self._read()
            differences = list(list_differences(stored, files))
            if dry_run:
                return version, differences
            if differences or not version:
                try:
                    version = await self._write(files, version, stored)
                except Refused:
                    continue
            self._applied.write(version, files)
            return version, differences

    async def load(self) -> Settings:
        self._version, self._document = await self._read()
        files, stored = self._read_own(), self._parse(self._document)
        own_problems = [one for one in files.problems if one.fatal or not _is_in_document(one)]
        return Settings(
            version=str(self._version),
            config=replace(
                files,
                store=replace(files.store, **{name: getattr(stored.store, name) for name in STORE_SETTINGS}),
                agents=stored.agents if self._version else (),  # no agents until a server writes the first version
                remote=stored.remote,
                limits=stored.limits,
                interruption=stored.interruption,
                artifacts=stored.artifacts,
                problems=(*own_problems, *stored.problems),
            ),
            services=ServiceRegistry.parse(self.services_json(), self._folder.path),
        )

    def _read_own(self) -> Config:
        """coterie.toml of this machine. If it cannot be read any more: as it was before, with the problem.

        The agents are in the database, so an error in the file must not keep this process from following them.
        """
        try:
            self._own = read_config(self._folder.path)
        except ConfigError as error:
            if self._own is None:
                raise
            log.warning("%s; this process goes on with what it read there before", error)
            return replace(self._own, problems=error.problems)
        return self._own

    async def read(self) -> tuple[str, Document]:
        version, document = await self._read()
        return str(version), document

    async def write(self, change: Change, expected_version: str | None = None) -> None:
        while True:
            version, stored = await self._read()
            if expected_version not in (None, str(version)):
                raise Refused(
                    "config_changed", "the configuration was changed meanwhile: load it, then change it again"
                )
            document = copy.deepcopy(stored)
            change(document)
            known = self._parse(stored).problems
            if added := [problem for problem in self._parse(document).problems if problem not in known]:
                raise ConfigError(added)
            try:
                await self._write(document, version, stored)
            except Refused:
                continue
            return

    def services_json(self) -> bytes | None:
        services = self._document.get("services")
        return None if services is None else json.dumps({"services": services}).encode()

    async def write_services(self, data: bytes) -> None:
        services, problems = _services_of(data)
        if problems:
            raise ConfigError(problems)
        await self._write(self._document | {"services": services}, self._version, self._document)

    async def _read(self) -> tuple[int, Document]:
        stored = await self._store.configuration()
        return stored.version, json.loads(stored.document)

    async def _write(self, document: Document, version: int, before: Document) -> int:
        """Replace the configuration of that version, and return the new version."""
        known = {entry.id: entry for entry in self._parse(before).all_agents} if version else {}
        changed = [entry for entry in self._parse(document).all_agents if known.pop(entry.id, None) != entry]
        # Those left in `known` are removed. Their rows stay as they are, but pages must show them in another way.
        rows = [agent_of(entry) for entry in (*changed, *known.values())]
        people = [] if version else [Agent(id=PERSON, name="You", kind="person")]
        return await self._store.write_configuration(_encode(document), version, [*people, *rows])

    def _parse(self, document: Document) -> Config:
        tables = {name: document[name] for name in TABLES if name in document}
        return parse_config(tables, self._folder.path)


def agent_of(entry: AgentEntry) -> Agent:
    return Agent(id=entry.id, name=entry.name or entry.id, parent=entry.parent)


# The files as a document


def read_files(folder: SocietyFolder, *, strict: bool = False) -> tuple[Document, Sequence[Problem]]:
    """The document of the files in `folder`, and their problems.

    `ConfigError`: a file cannot be read, or has a key where the name of one belongs. `strict`: report also
    the problems of services, but not missing keys: other processes have their own.
    """
    config = read_config(folder.path)
    problems = [problem for problem in config.problems if _is_in_document(problem)]
    document = document_of(config, folder)
    secrets = [
        _key_written_out(f"{CONFIG_FILE}: remote.{entry.id}.{name}")
        for entry in config.remote
        for name, value in _secrets_of({"headers": entry.headers})
        if _is_written_out(value)
    ]
    if secrets:
        raise ConfigError(secrets)
    data = read_services_file(folder.path / SERVICES_FILE)
    if data is not None:
        services, secrets = _services_of(data)
        if secrets:
            raise ConfigError(secrets)
        document |= {"services": services} if services else {}
        if strict:  # every key counts as set: other processes have theirs
            problems += parse_services(data, lambda _: "a-key")[1]
    return document, problems


def document_of(config: Config, folder: SocietyFolder) -> Document:
    """The configuration as a document, without services and defaults. Files that it names are in `folder`."""
    # The agent of a coterie.toml without agents is a default, too.
    agents = {} if config.agents == Config().agents else {entry.id: _entry_of(entry, folder) for entry in config.agents}
    sections = {name: _changed_values(getattr(config, name)) for name in ("store", *SECTIONS)}
    sections["store"] = {name: value for name, value in sections["store"].items() if name in STORE_SETTINGS}
    remote = {entry.id: _changed_values(entry) for entry in config.remote}
    for table in remote.values():
        del table["id"]
    return {name: table for name, table in {"agents": agents, "remote": remote, **sections}.items() if table}


def _entry_of(entry: AgentEntry, folder: SocietyFolder) -> Document:
    table = _changed_values(entry)
    del table["id"]
    try:
        if name := table.pop("prompt_file", None):
            table["prompt"] = (folder.path / name).read_text(encoding="utf-8", errors="replace")
        if entry.answer_schema:
            table["answer_schema"] = read_answer_schema(entry.answer_schema, folder.path)
    except (OSError, WrongSchema) as error:  # it was readable a moment ago
        raise ConfigError([Problem(f"{CONFIG_FILE}: agents.{entry.id}", str(error), fatal=True)]) from error
    return table


def _changed_values(settings: Any) -> Document:
    """The fields that differ from their defaults, as JSON values."""
    changed = Document()
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            if inner := _changed_values(value):
                changed[field.name] = inner
        elif field.default is MISSING or value != field.default:
            changed[field.name] = list(value) if isinstance(value, tuple) else value
    return changed


def _services_of(data: bytes) -> tuple[list[Any], list[Problem]]:
    """The entries of an llmservices.json, and a problem for each key that is written out in them."""
    top = parse_json(data)
    services = top.get("services") if isinstance(top, dict) else None
    if not isinstance(services, list):
        return [], []
    problems = []
    for index, entry in enumerate(services):
        for name, value in _secrets_of(entry) if isinstance(entry, dict) else ():
            if _is_written_out(value):
                problems.append(_key_written_out(f"{SERVICES_FILE}: services[{index}].{name}"))
    return services, problems


def _is_written_out(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and not _KEY_REFERENCE.search(value)


def _key_written_out(location: str) -> Problem:
    return Problem(location, ProblemText("key_written_out"), fatal=True)


def _secrets_of(entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields of a service that must name a key instead of holding it."""
    yield "apiKey", entry.get("apiKey")
    headers = entry.get("headers")
    for name, value in headers.items() if isinstance(headers, dict) else ():
        if _SECRET_HEADER.search(name):
            yield f"headers.{one_line(name, 40)}", value


def _is_in_document(problem: Problem) -> bool:
    name = problem.location.removeprefix(f"{CONFIG_FILE}: ").partition(".")[0]
    return name in ("agents", "remote", *SECTIONS)


def _encode(document: Document) -> str:
    return json.dumps(document, sort_keys=True)


# Files and database compared


class AppliedFiles:
    """`data/applied.json`: which version of the configuration this folder's files last were, and their digest."""

    def __init__(self, folder: SocietyFolder, log_id: str) -> None:
        self._file, self._log_id = folder.data / APPLIED_FILE, log_id

    def read(self) -> tuple[int, str] | None:
        """Version and digest; None if the files were never the configuration of this database."""
        try:
            content = json.loads(self._file.read_bytes())
            return (int(content["version"]), str(content["digest"])) if content["database"] == self._log_id else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, version: int, files: Document) -> None:
        record = {"database": self._log_id, "version": version, "digest": digest_of(files)}
        if self.read() == (version, record["digest"]):
            return
        try:
            write_private(self._file, json.dumps(record).encode())
        except OSError as error:
            log.warning("%s cannot be written: %s", self._file, error.strerror)


def digest_of(document: Document) -> str:
    return hashlib.sha256(_encode(document).encode()).hexdigest()[:16]


def _decide(
    version: int, stored: Document, files: Document, applied: tuple[int, str] | None, role: FilesRole
) -> Literal["write", "same", "keep", "differ"]:
    """What a process does with its files, given the stored configuration and what the folder last applied."""
    if version == 0:
        return "keep" if role == "never" else "write"
    if files == stored:
        return "same"
    if not files or (applied and applied[1] == digest_of(files)):
        return "keep"  # the owner did not change this folder; the configuration was changed elsewhere
    return "write" if role == "write" and applied and applied[0] == version else "differ"


def list_differences(stored: Document, files: Document) -> Iterator[ProblemText]:
    """One line for each setting that differs, without long texts."""
    before, after = _by_id(stored), _by_id(files)
    yield from _differences(before, after, "")
    orders = [list(document.get("services", ())) for document in (before, after)]
    if orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]):
        yield ProblemText("another_order")


def _differences(stored: Mapping[str, Any], files: Mapping[str, Any], path: str) -> Iterator[ProblemText]:
    for name in sorted({*stored, *files}):
        location = f"{path}.{name}" if path else name
        before, after = stored.get(name), files.get(name)
        if before == after:
            continue
        is_table = location in ("services", *TABLES)
        is_table = is_table or (location.count(".") == 1 and bool(before and after))
        if is_table and isinstance(before or {}, dict) and isinstance(after or {}, dict):
            yield from _differences(before or {}, after or {}, location)
        elif before is None:
            yield ProblemText("only_in_files", path=location, value=_shown(after))
        elif after is None:
            yield ProblemText("only_in_database", path=location, value=_shown(before))
        else:
            before_text = _shown(before).strip() or ProblemText("one_text")
            after_text = _shown(after).strip() or ProblemText("another_text")
            yield ProblemText("differs", path=location, before=before_text, after=after_text)


def _shown(value: Any) -> str:
    """A space and a short value; empty for a long one or a table."""
    text = json.dumps(value, ensure_ascii=False)
    return f" {text}" if len(text) <= MAX_SHOWN_CHARACTERS and not isinstance(value, dict) else ""


def _by_id(document: Document) -> Document:
    """The document with its services by id instead of in a list."""
    services = {str(entry.get("id")): entry for entry in document.get("services", ()) if isinstance(entry, dict)}
    return document | ({"services": services} if services else {})


def difference_problem(version: int, stored: Document, files: Document) -> Problem:
    found = tuple(list_differences(stored, files))
    if len(found) > MAX_NAMED_DIFFERENCES:
        more = f"{len(found) - MAX_NAMED_DIFFERENCES:,}"
        found = (ProblemText("and_more", found=found[:MAX_NAMED_DIFFERENCES], n=more),)
    return Problem(f"{CONFIG_FILE}, {SERVICES_FILE}", ProblemText("files_differ", version=version, found=found))
