"""Creating, changing and retiring agents while the society runs, with a history of changes that can be undone.

`AgentsFile` holds the definitions in coterie.toml: it edits the tables of the agents and keeps the rest as the owner
wrote it. `AgentsInDatabase` holds them with PostgreSQL. `AgentDefinitions` checks changes, makes them effective and
records them.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import re
import tomllib
import unicodedata
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Comment, Item, Key, Table

from coterie.clock import Clock
from coterie.config import ASSISTANT, CONFIG_FILE, Config, SocietyFolder, check_id, read_config
from coterie.configuration import Configuration, Document
from coterie.errors import ConfigError, Problem, Refused, StoreUnavailable
from coterie.files import replace_file, write_private
from coterie.ids import new_id
from coterie.llm.config import ServiceRegistry
from coterie.problem_texts import ProblemText
from coterie.text import one_line, to_storable

log = logging.getLogger(__name__)

EDITABLE = ("name", "role", "description", "prompt", "service", "tools", "parent", "colour", "initials")
"""Keys of an agent that a definition has. All other keys of its table stay as they are."""
CHANGES_FILE = "agent_changes.json"
MAX_CHANGES = 200
MAX_HISTORY_BYTES = 2 << 20
MAX_SLUG = 40
_ONLY_ASSISTANT: Mapping[str, Mapping[str, Any]] = {ASSISTANT.id: {"name": ASSISTANT.name}}
"""The definitions of a society that describes no agent."""

Fields = Mapping[str, Any]
"""Keys of an agent's table. The text of a `prompt_file` is under `prompt`."""
Reload = Callable[[], Awaitable[object]]
IsTaken = Callable[[str], Awaitable[bool]]
ChangeKind = Literal["created", "changed", "retired", "undone"]


@dataclass(frozen=True, slots=True)
class DefinitionSet:
    """The definitions of all agents at one moment."""

    agents: Mapping[str, Fields]
    """By id, in the owner's order."""
    version: str
    """Changes with every change of a definition, also with one by hand."""


class DefinitionStore(Protocol):
    """Where the definitions of agents are kept."""

    async def read(self) -> DefinitionSet:
        """`ConfigError`: they cannot be read."""
        ...

    async def replace(self, agents: Mapping[str, Fields | None], version: str) -> Mapping[str, Fields | None]:
        """Replace these definitions, all or none; None removes one. Returns them as they are now.

        A prompt file of an agent that had no definition is kept: its text replaces the prompt.

        `Refused`: `definitions_changed` if `version` is not the current one, `agent_invalid`. `ConfigError`: a file of
        the owner cannot be read.
        """
        ...


# coterie.toml


class AgentsFile:
    """The definitions of agents in coterie.toml."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / CONFIG_FILE

    async def read(self) -> DefinitionSet:
        return await asyncio.to_thread(self._read)

    async def replace(self, agents: Mapping[str, Fields | None], version: str) -> Mapping[str, Fields | None]:
        try:
            return await asyncio.to_thread(self._replace, agents, version)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free some space" if full else "let the society's owner write to its folder"
            changed = f"only {error.changed} changed" if isinstance(error, _PartlyWritten) else "nothing was changed"
            message = f"{changed} ({error.strerror}): {remedy}, then try again"
            raise StoreUnavailable(message, full=full) from error

    def _read(self) -> DefinitionSet:
        read_config(self._folder)  # raises what makes the file unusable
        text = self._text()
        agents = self._with_prompts(_tables(text))
        digest = hashlib.sha256(text.encode())
        for fields in agents.values():
            if "prompt_file" in fields:
                digest.update(str(fields.get("prompt", "")).encode("utf-8", "replace"))
        return DefinitionSet(agents, digest.hexdigest()[:32])

    def _text(self) -> str:
        try:
            return self._file.read_bytes().decode()  # with its line ends
        except FileNotFoundError:
            return ""

    def _with_prompts(self, tables: Mapping[str, Fields]) -> dict[str, Fields]:
        """The tables with the texts of their prompt files, without values that are no tables."""
        agents: dict[str, Fields] = {name: fields for name, fields in tables.items() if isinstance(fields, dict)}
        for agent_id, fields in agents.items():
            file = self._prompt_file(fields)
            if file and file.is_file():
                agents[agent_id] = {**fields, "prompt": _read_prompt(file)}
        return agents

    def _prompt_file(self, fields: Fields) -> Path | None:
        name = fields.get("prompt_file")
        return self._folder / name if isinstance(name, str) and name else None

    def _replace(self, agents: Mapping[str, Fields | None], version: str) -> Mapping[str, Fields | None]:
        current = self._read()
        if version != current.version:
            raise Refused(
                "definitions_changed",
                f"{CONFIG_FILE} was changed meanwhile, nothing was written: look at it as it is now, then try again",
            )
        _require_one_left(current, agents)
        ServiceRegistry.load(self._folder)  # raises what would keep the change from becoming effective
        text = self._text()
        tables, changed_files = _tables(text), dict[Path, bytes]()
        written: dict[str, Fields | None] = {}
        for agent_id, fields in agents.items():
            if fields is None:
                tables.pop(agent_id, None)
                written[agent_id] = None
                continue
            table = dict(fields)
            file = self._prompt_file(table)
            if file and file.is_file():
                prompt = str(table.pop("prompt", "")).replace("\r\n", "\n")
                present = _read_prompt(file)
                if agent_id not in current.agents:
                    prompt = present  # changed by hand or for another agent while this one was retired
                elif prompt != present:
                    crlf = has_crlf(file.read_bytes().decode(errors="replace"))
                    changed_files[file] = (prompt.replace("\n", "\r\n") if crlf else prompt).encode()
                written[agent_id] = table | {"prompt": prompt}
            else:
                table.pop("prompt_file", None)  # the file was deleted: the prompt itself is kept
                written[agent_id] = table
            tables[agent_id] = table
        changed = edit_agents(text, tables)
        self._check(changed, [agent_id for agent_id, fields in agents.items() if fields is not None])
        if changed != text:
            changed_files[self._file] = changed.encode()
        _replace_files(changed_files)
        return written

    def _check(self, text: str, agents: Sequence[str]) -> Config:
        """The configuration that the text would give; `Refused` if one of these agents has a problem."""
        config = read_config(self._folder, text)
        prefixes = tuple(f"{CONFIG_FILE}: agents.{agent_id}" for agent_id in agents)
        wrong = [problem for problem in config.problems if _is_under(problem, prefixes)]
        if wrong:
            raise _invalid(wrong)
        return config


class AgentsInDatabase:
    """The definitions of agents in the configuration of a society in PostgreSQL."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration

    async def read(self) -> DefinitionSet:
        version, document = await self._configuration.read()
        return DefinitionSet(document.get("agents") or _ONLY_ASSISTANT, version)

    async def replace(self, agents: Mapping[str, Fields | None], version: str) -> Mapping[str, Fields | None]:
        def change(document: Document) -> None:
            known: Mapping[str, Fields] = document.get("agents") or _ONLY_ASSISTANT
            _require_one_left(DefinitionSet(known, version), agents)
            document["agents"] = {
                agent_id: dict(fields) for agent_id, fields in {**known, **agents}.items() if fields is not None
            }

        try:
            await self._configuration.write(change, version)
        except ConfigError as error:
            raise _invalid(error.problems) from error
        except Refused as error:
            if error.code == "config_changed":
                raise Refused("definitions_changed", error.message) from error
            raise
        return agents


def _require_one_left(current: DefinitionSet, agents: Mapping[str, Fields | None]) -> None:
    """Raise `Refused` if the change `agents` would leave no agent."""
    if all(fields is None for fields in {**current.agents, **agents}.values()):
        raise Refused("last_agent", "it is the last agent: create another one first")


def _is_under(problem: Problem, prefixes: Sequence[str]) -> bool:
    where = problem.location
    return any(where == prefix or where.startswith(f"{prefix}.") for prefix in prefixes)


def _invalid(problems: Sequence[Problem]) -> Refused:
    """`agent_invalid` with the problems, whose places are without the file."""
    places = [problem.to_dict(problem.location.removeprefix(f"{CONFIG_FILE}: agents.")) for problem in problems]
    return Refused("agent_invalid", "; ".join(f"{one['place']}: {one['message']}" for one in places), problems=places)


class _PartlyWritten(OSError):
    def __init__(self, changed: str, error: OSError) -> None:
        self.changed = changed
        super().__init__(error.errno, error.strerror)


def _replace_files(changed: Mapping[Path, bytes]) -> None:
    """Replace these files, all or none. `_PartlyWritten` if a write failed and the others could not be restored."""
    before: dict[Path, bytes | None] = {}
    try:
        for file, data in changed.items():
            before[file] = file.read_bytes() if file.exists() else None
            replace_file(file, data)
    except OSError as error:
        left = [file.name for file, data in before.items() if not _is_restored(file, data)]
        if left:
            raise _PartlyWritten(" and ".join(left), error) from error
        raise


def _is_restored(file: Path, data: bytes | None) -> bool:
    """Write the file's earlier content, None if it did not exist; True if it has it now."""
    try:
        if data is None:
            file.unlink(missing_ok=True)
        elif file.read_bytes() != data:
            replace_file(file, data)
    except OSError as error:
        log.warning("%s could not be restored: %s", file, error.strerror)
        return False
    return True


def _read_prompt(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _tables(text: str) -> dict[str, Fields]:
    """The tables of the agents; that of the assistant if the file describes none."""
    return tomllib.loads(text).get("agents") or dict(_ONLY_ASSISTANT)


def edit_agents(text: str, tables: Mapping[str, Fields]) -> str:
    """The text of a coterie.toml with these agents and no others; comments and everything else stay as they are."""
    if has_crlf(text):
        return edit_agents(text.replace("\r\n", "\n"), tables).replace("\n", "\r\n")
    present = tomllib.loads(text).get("agents") or {}
    try:
        changed = _edit_present(text, present, tables) if present else text
        for agent_id, fields in tables.items():
            if agent_id not in present:
                lines = [f"{key} = {toml_value(value).as_string()}" for key, value in fields.items()]
                changed = "\n".join([changed.rstrip(), "", f"[agents.{agent_id}]", *lines, ""]).lstrip()
        if tomllib.loads(changed) == tomllib.loads(text) | {"agents": dict(tables)}:
            return changed
    except (TOMLKitError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.debug("editing %s failed: %s", CONFIG_FILE, error)
    raise ConfigError([Problem(CONFIG_FILE, ProblemText("agents_not_editable"), fatal=True)])


def has_crlf(text: str) -> bool:
    """True if every line of the text ends with CR LF."""
    return 0 < text.count("\n") == text.count("\r\n")


def _edit_present(text: str, present: Mapping[str, Fields], tables: Mapping[str, Fields]) -> str:
    name = "rest"
    while name in text or name in str(tables):
        name += "-"
    document = _parse_with_separators(text, name)
    agents: Any = document["agents"]
    for agent_id, before in present.items():
        if agent_id not in tables:
            del agents[agent_id]
            continue
        if before == tables[agent_id]:
            continue  # it may be no table
        entry, fields = agents[agent_id], tables[agent_id]
        for key in before.keys() - fields.keys():
            del entry[key]
        for key, value in fields.items():
            if key not in before or before[key] != value:
                entry[key] = toml_value(value)
    return re.sub(rf"\[agents\.{name}\d+\]\n", "", tomlkit.dumps(document))


def _parse_with_separators(text: str, name: str) -> tomlkit.TOMLDocument:
    """The parsed text. Comments after the last key of an agent are in a table `agents.<name><number>` of their own.

    tomlkit takes them for a part of the agent: it would delete them with the agent, and add new keys below them.
    """
    document, count = tomlkit.parse(text), 0
    for key, item in document.body:
        if key is None or key.key != "agents" or not isinstance(item, Table):
            continue
        for _, agent in item.value.body:
            body = _last_body(agent)
            keys = [index for index, (one, _) in enumerate(body) if one is not None]
            after_keys = range(keys[-1] + 1 if keys else 0, len(body))
            first = next((index for index in after_keys if isinstance(body[index][1], Comment)), None)
            if first is not None:
                body.insert(first, (None, tomlkit.ws(f"[agents.{name}{count}]\n")))
                count += 1
    return tomlkit.parse(tomlkit.dumps(document))


def _last_body(item: Item) -> list[tuple[Key | None, Item]]:
    """The content of the last table inside `item`, which is where comments after it are."""
    if isinstance(item, AoT):
        return _last_body(item.body[-1])
    if not isinstance(item, Table):
        return []
    keyed = [value for key, value in item.value.body if key is not None]
    return _last_body(keyed[-1]) if keyed and isinstance(keyed[-1], (AoT, Table)) else item.value.body


def toml_value(value: Any) -> Item:
    """A TOML value; text of several lines as such, and a table on one line."""
    if isinstance(value, str) and "\n" in value:
        # The line break after the quotes does not belong to the text.
        lines = tomlkit.string(f"\n{value}", multiline=True)
        if tomllib.loads(f"x = {lines.as_string()}")["x"] == value:
            return lines
    if isinstance(value, dict):
        table = tomlkit.inline_table()
        table.update(value)
        return table
    plain: Item = tomlkit.item(value)
    return plain


# Changes


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentChange:
    """One change of definitions, as a person made it."""

    id: str
    at: datetime
    kind: ChangeKind
    before: dict[str, dict[str, Any] | None]
    """Each changed agent as it was; None: it did not exist."""
    after: dict[str, dict[str, Any] | None]
    undoes: str | None = None
    """The change that this one took back."""

    def name_of(self, agent_id: str) -> str:
        fields = self.after.get(agent_id) or self.before.get(agent_id) or {}
        return str(fields.get("name") or agent_id)

    def changed_fields(self, agent_id: str) -> list[str]:
        before, after = self.before.get(agent_id) or {}, self.after.get(agent_id) or {}
        return [key for key in EDITABLE if before.get(key) != after.get(key)]


class ChangeHistory:
    """The latest changes, oldest first, in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> list[AgentChange]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=list[AgentChange])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            log.warning("the history of agent changes cannot be read and starts empty: %s", error)
            return []

    def add(self, change: AgentChange) -> None:
        changes = [*self.read(), change][-MAX_CHANGES:]
        while len(data := msgspec.json.encode([asdict(one) for one in changes])) > MAX_HISTORY_BYTES and changes[1:]:
            changes = changes[1:]
        write_private(self._file, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAgent:
    """An agent to be created."""

    fields: Fields
    id: str | None = None
    """None: made of the name."""
    key: str | None = field(default=None)
    """What the `parent` of another new agent may refer to."""


class AgentDefinitions:
    def __init__(
        self, folder: SocietyFolder, store: DefinitionStore, *, reload: Reload, is_taken: IsTaken, clock: Clock
    ) -> None:
        """`reload`: makes written definitions effective. `is_taken`: whether any agent has or had this id."""
        self._store, self._reload, self._is_taken, self._clock = store, reload, is_taken, clock
        self._history = ChangeHistory(folder.data / CHANGES_FILE)
        self._lock = asyncio.Lock()

    async def read(self) -> DefinitionSet:
        return await self._store.read()

    async def create(self, agents: Sequence[NewAgent], version: str | None = None) -> list[str]:
        """Create agents, all or none; return their ids.

        `version`: of the definitions that the person saw; `Refused("definitions_changed")` if there is a newer one.
        `Refused`: also `id_taken`, `agent_invalid`, `unknown_agent` (a parent).
        """
        async with self._lock:
            current = await self._store.read()
            ids: list[str] = []
            for new in agents:
                ids.append(await self._choose_id(new, {*current.agents, *ids}))
            parents = {new.key: chosen for new, chosen in zip(agents, ids, strict=True) if new.key}
            after: dict[str, Fields | None] = {}
            for new, chosen in zip(agents, ids, strict=True):
                fields = _merged({}, new.fields)
                parent = fields.get("parent")
                if parent in parents:
                    fields["parent"] = parents[parent]
                elif parent is not None and parent not in current.agents and parent not in ids:
                    raise Refused(
                        "unknown_agent", f'there is no agent "{one_line(str(parent))}": choose another parent'
                    )
                after[chosen] = {"name": chosen} | fields
            if not after:
                raise Refused("agent_invalid", "there is no agent to create")
            await self._write("created", current, after, version)
        return ids

    async def change(self, agent_id: str, fields: Fields, version: str | None = None) -> None:
        """Change these fields of an agent; None removes one. The others stay as they are.

        `Refused`: `unknown_agent`, `definitions_changed`, `agent_invalid`.
        """
        async with self._lock:
            current = await self._store.read()
            before = _find(current, agent_id)
            if fields.get("parent") and agent_id in _ancestry(current, str(fields["parent"])):
                raise _invalid([Problem(f"{agent_id}.parent", ProblemText("below_itself"))])
            after = _merged(before, fields)
            if after != before:
                await self._write("changed", current, {agent_id: after}, version)

    async def retire(self, agent_id: str, version: str | None = None) -> None:
        """Remove the definition of an agent. It keeps its conversation and mail, and an undo brings it back.

        Agents below it move to its parent. `Refused`: `unknown_agent`, `definitions_changed`, `last_agent`.
        """
        async with self._lock:
            current = await self._store.read()
            _find(current, agent_id)
            await self._write("retired", current, {agent_id: None} | _moved_up(current, {agent_id}), version)

    async def changes(self) -> list[AgentChange]:
        """The latest changes, newest first."""
        return (await asyncio.to_thread(self._history.read))[::-1]

    async def undo(self, change_id: str) -> None:
        """Take back a change. Agents that were put below an agent that it created move up.

        `Refused`: `unknown_change`, `change_superseded` if an agent was changed again since, `last_agent`.
        """
        async with self._lock:
            change = next((one for one in await self.changes() if one.id == change_id), None)
            if change is None:
                raise Refused("unknown_change", f'there is no change "{one_line(change_id)}": only the latest are kept')
            current = await self._store.read()
            for agent_id, after in change.after.items():
                if current.agents.get(agent_id) != after:
                    name = one_line(change.name_of(agent_id))
                    raise Refused("change_superseded", f"{name} was changed again since: undo the later change first")
            removed = {agent_id for agent_id, before in change.before.items() if before is None}
            after = _moved_up(current, removed) | change.before
            await self._write("undone", current, after, None, undoes=change.id)

    async def _write(
        self,
        kind: ChangeKind,
        current: DefinitionSet,
        after: Mapping[str, Fields | None],
        version: str | None,
        undoes: str | None = None,
    ) -> None:
        if version is not None and version != current.version:
            raise Refused(
                "definitions_changed",
                "the agents were changed meanwhile, nothing was written: look at them as they are now, then try again",
            )
        written = await self._store.replace(after, current.version)
        change = AgentChange(
            id=new_id(),
            at=self._clock.now(),
            kind=kind,
            before={agent_id: _plain(current.agents.get(agent_id)) for agent_id in after},
            after={agent_id: _plain(fields) for agent_id, fields in written.items()},
            undoes=undoes,
        )
        try:
            await asyncio.to_thread(self._history.add, change)
        except OSError as error:
            log.warning("the change of agents is made, but not in the history: %s", error.strerror)
        await self._reload()

    async def _choose_id(self, new: NewAgent, taken: set[str]) -> str:
        if new.id:
            if new.id in taken or await self._is_taken(new.id):
                raise Refused("id_taken", f"the id {one_line(new.id)!r} is taken: choose another, or leave it out")
            if wrong := check_id(new.id):
                raise _invalid([Problem(one_line(new.id), wrong)])
            return new.id
        base = slug(str(new.fields.get("name") or ""))
        number = 1
        while (tried := base if number == 1 else f"{base}-{number}") in taken or await self._is_taken(tried):
            number += 1
        return tried


def slug(name: str) -> str:
    """An id made of a name; `agent` if the name has no letter of an id."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:MAX_SLUG].strip("-") or "agent"


def _find(current: DefinitionSet, agent_id: str) -> Fields:
    if agent_id not in current.agents:
        raise Refused("unknown_agent", f'no definition describes an agent "{one_line(agent_id)}"')
    return current.agents[agent_id]


def _ancestry(current: DefinitionSet, agent_id: str) -> list[str]:
    """The agent, its parent and so on."""
    path = [agent_id]
    while (parent := current.agents.get(path[-1], {}).get("parent")) and parent not in path:
        path.append(str(parent))
    return path


def _moved_up(current: DefinitionSet, removed: Set[str]) -> dict[str, Fields | None]:
    """The agents directly below removed ones, moved to the nearest parent that stays."""
    moved: dict[str, Fields | None] = {}
    for agent_id, fields in current.agents.items():
        if agent_id not in removed and fields.get("parent") in removed:
            staying = (one for one in _ancestry(current, agent_id)[1:] if one not in removed)
            moved[agent_id] = _merged(fields, {"parent": next(staying, None)})
    return moved


def _merged(before: Fields, fields: Fields) -> dict[str, Any]:
    """`before` with these fields. None, and empty text other than a prompt's, removes a key."""
    merged = dict(before)
    for key in EDITABLE:
        if key not in fields:
            continue
        value = fields[key]
        if value is None or (value == "" and key != "prompt"):
            merged.pop(key, None)
        else:
            merged[key] = to_storable(value) if isinstance(value, str) else value
    if merged.get("prompt") == "" and "prompt_file" not in merged:
        del merged["prompt"]
    return merged


def _plain(fields: Fields | None) -> dict[str, Any] | None:
    return None if fields is None else json.loads(json.dumps(fields, default=str))
