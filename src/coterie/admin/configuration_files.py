"""The configuration of a society that leaves PostgreSQL for SQLite: from the database into its files.

With PostgreSQL agents, services and limits are a document in the database; with SQLite only files count. Comments and
other settings in existing files stay. Keys are not in the document, only their names.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from coterie.agent_definitions import edit_agents, toml_value
from coterie.config import ASSISTANT, CONFIG_FILE, SocietyFolder, parse_config, read_config
from coterie.configuration import SECTIONS, STORE_SETTINGS, TABLES, Document, document_of
from coterie.errors import ConfigError, Problem, StoreUnusable
from coterie.llm.config import SERVICES_FILE
from coterie.stores.sql.rows import Connection, get_meta

_KEY_NAME = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def take_configuration(db: Connection) -> Document | None:
    """Remove the configuration from a database and return it; None if there is none."""
    stored = get_meta(db, "configuration")
    db.execute("DELETE FROM meta WHERE key IN ('configuration', 'configuration_version')")
    return None if stored is None else json.loads(stored)


def key_names(document: Document) -> tuple[str, ...]:
    """Names of the keys that the services and remote agents of the document need."""
    text = json.dumps([document.get("services"), document.get("remote")])
    return tuple(sorted({*_KEY_NAME.findall(text)}))


def render_files(document: Document, folder: Path, remedy: str) -> dict[str, bytes]:
    """The files of `folder` that must change to be this configuration, by name.

    `StoreUnusable`: a file cannot be changed faithfully. `remedy`: what the error proposes.
    """
    files = dict[str, bytes]()
    try:
        before = _read_text(folder / CONFIG_FILE)
        after = _edit_config(before, document, folder)
        if after != before:
            files[CONFIG_FILE] = after.encode()
        services = _edit_services(folder / SERVICES_FILE, document)
        if services is not None:
            files[SERVICES_FILE] = services
    except ConfigError as error:
        raise StoreUnusable(
            f"the configuration in the database cannot be written to {folder / CONFIG_FILE} ({error}): {remedy}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise StoreUnusable(f"the files in {folder} cannot be read ({error}): {remedy}") from error
    return files


def _read_text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _edit_config(text: str, document: Document, folder: Path) -> str:
    """The text of a coterie.toml with the agents, remote agents and limits of the document."""
    wanted = _normalize(document, folder)
    if _document_in(text, folder) == wanted:
        return text
    changed = _edit_agents(text, document, wanted, folder)
    for name in ("remote", *SECTIONS):
        if _document_in(changed, folder).get(name) != wanted.get(name):
            changed = _edit_table(changed, name, document.get(name, {}))
    if _document_in(changed, folder).get("store") != wanted.get("store"):
        own = {
            key: value for key, value in tomllib.loads(changed).get("store", {}).items() if key not in STORE_SETTINGS
        }
        changed = _edit_table(changed, "store", own | wanted.get("store", {}))
    if _document_in(changed, folder) != wanted:
        raise _unchangeable("agents or limits")
    return changed


def _normalize(document: Document, folder: Path) -> Document:
    """The document without defaults and services."""
    tables = {name: document[name] for name in TABLES if name in document}
    return document_of(parse_config(tables, folder), SocietyFolder(folder))


def _document_in(text: str, folder: Path) -> Document:
    return document_of(read_config(folder, text, environ={}), SocietyFolder(folder))


def _edit_agents(text: str, document: Document, wanted: Document, folder: Path) -> str:
    present, current = tomllib.loads(text).get("agents") or {}, _document_in(text, folder).get("agents", {})
    tables = {
        agent_id: _keep_named_files(fields, present.get(agent_id, {}), current.get(agent_id, {}))
        for agent_id, fields in document.get("agents", {}).items()
    }
    if not wanted.get("agents") and present:
        tables = {ASSISTANT.id: {"name": ASSISTANT.name}}
    return edit_agents(text, tables) if tables else text


def _keep_named_files(fields: Mapping[str, Any], present: Mapping[str, Any], current: Mapping[str, Any]) -> Document:
    """The fields of an agent, with the names of the files that have the same prompt and schema.

    `present`: its table in the file. `current`: what the table stands for.
    """
    kept = dict(fields)
    if "prompt_file" in present and current.get("prompt") == fields.get("prompt"):
        del kept["prompt"]
        kept["prompt_file"] = present["prompt_file"]
    if "answer_schema" in present and current.get("answer_schema") == fields.get("answer_schema"):
        kept["answer_schema"] = present["answer_schema"]
    return kept


def _edit_table(text: str, name: str, table: Mapping[str, Any]) -> str:
    """The text with this table; everything else stays as it is."""
    before = tomllib.loads(text)
    try:
        if name in before:
            parsed = tomlkit.parse(text)
            target: Any = parsed[name]
            _update(target, before[name], table)
            changed = tomlkit.dumps(parsed)
        else:
            # The tables of `remote` have one level more.
            parts = {f"remote.{key}": value for key, value in table.items()} if name == "remote" else {name: table}
            lines = [text.rstrip()]
            for path, values in parts.items():
                lines += [
                    "",
                    f"[{path}]",
                    *(f"{key} = {toml_value(value).as_string()}" for key, value in values.items()),
                ]
            changed = "\n".join([*lines, ""]).lstrip()
        if tomllib.loads(changed) == before | {name: dict(table)}:
            return changed
    except (TOMLKitError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unchangeable(name) from error
    raise _unchangeable(name)


def _update(target: MutableMapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for key in before.keys() - after.keys():
        del target[key]
    for key, value in after.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            _update(target[key], before[key], value)
        elif key not in before or before[key] != value:
            target[key] = toml_value(value)


def _edit_services(file: Path, document: Document) -> bytes | None:
    """The content of llmservices.json with the services of the document; None if the file has them already."""
    if "services" not in document:
        return None
    try:
        content = json.loads(file.read_bytes()) if file.exists() else {}
    except ValueError:
        content = {}
    content = content if isinstance(content, dict) else {}
    if content.get("services") == document["services"]:
        return None
    return json.dumps(content | {"services": document["services"]}, indent=2, ensure_ascii=False).encode() + b"\n"


def _unchangeable(name: str) -> ConfigError:
    message = f"{name} is written in a way that a program cannot change: give each a table such as [limits]"
    return ConfigError([Problem(CONFIG_FILE, message, fatal=True)])
