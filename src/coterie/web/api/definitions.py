"""Definitions of agents: create, change, retire, undo; tools and templates to choose from. With their JSON bodies."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import UNSET, Meta, UnsetType

from coterie import agent_definitions as definitions
from coterie.agent.toolbox import BUILT_IN, ListedTool
from coterie.agents import MAX_DESCRIPTION, MAX_INITIALS, MAX_ROLE, AgentColour
from coterie.clock import to_rfc3339
from coterie.errors import CoterieError
from coterie.society import Society
from coterie.web.api.agents import find_agent
from coterie.web.api.services import config_errors
from coterie.web.openapi import COMMON_PROBLEMS, problems
from coterie.web.routing import API, Id, Router, SocietyDep
from coterie.web.schemas import Schema, ShortText, Time

Language = Literal["en", "zh"]
FOR_PEOPLE = "In a few words, for people."
PURPOSE = "What it is for; other agents see it too."
LETTERS = "Empty: the first letters of its name."
Role = Annotated[str, Meta(max_length=MAX_ROLE, description=FOR_PEOPLE)]
Description = Annotated[str, Meta(max_length=MAX_DESCRIPTION, description=PURPOSE)]
Prompt = Annotated[str, Meta(max_length=200_000)]
Initials = Annotated[str, Meta(max_length=MAX_INITIALS, description=LETTERS)]
Tools = Annotated[
    list[str],
    Meta(description='Patterns: `["*"]` all tools, `[]` none, `"!name"` excludes. Built-in tools need no pattern.'),
]
Version = Annotated[
    str, Meta(description="Of the definitions that the person saw; with a newer one nothing is changed.")
]


class Definition(Schema):
    """An agent of the configuration, as its owner describes it."""

    id: str
    name: str
    role: Annotated[str, Meta(description=FOR_PEOPLE)]
    description: Annotated[str, Meta(description=PURPOSE)]
    prompt: str
    service: Annotated[str | None, Meta(description="null: the first service.")]
    tools: Tools
    given: Annotated[list[str], Meta(description="The tools that these patterns give it now.")]
    parent: str | None
    colour: AgentColour | None
    initials: Annotated[str, Meta(description=LETTERS)]

    @classmethod
    def of(cls, society: Society, agent_id: str, fields: definitions.Fields) -> Self:
        """The definition; a key that the owner wrote with a wrong value is as if it were absent."""
        try:
            given = sorted(society.tools_of(agent_id))
        except CoterieError:  # the definition is not in effect
            given = []
        types = {one.name: one.type for one in msgspec.structs.fields(cls)}
        known = dict[str, Any]()
        for key in definitions.EDITABLE:
            with suppress(KeyError, msgspec.ValidationError):
                known[key] = msgspec.convert(fields[key], types[key])
        empty = {"role": "", "description": "", "prompt": "", "service": None, "tools": ["*"], "parent": None}
        empty |= {"colour": None, "initials": "", "name": agent_id}
        return cls(**empty | known | {"id": agent_id, "given": given})


class DefinitionList(Schema):
    items: Annotated[list[Definition], Meta(description="In the owner's order.")]
    next: None
    version: Annotated[str, Meta(description="Changes with every change of a definition.")]

    @classmethod
    async def read(cls, society: Society) -> Self:
        found = await society.definitions.read()
        items = [Definition.of(society, agent_id, fields) for agent_id, fields in found.agents.items()]
        return cls(items=items, next=None, version=found.version)


class NewDefinition(Schema, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    id: Annotated[str, Meta(max_length=64, description="Default: made of the name.")] | UnsetType = UNSET
    key: Annotated[str, Meta(description="What `parent` of another agent here may refer to.")] | UnsetType = UNSET
    role: Role | UnsetType = UNSET
    description: Description | UnsetType = UNSET
    prompt: Prompt | UnsetType = UNSET
    service: str | UnsetType | None = UNSET
    tools: Tools | UnsetType = UNSET
    parent: str | UnsetType | None = UNSET
    colour: AgentColour | UnsetType | None = UNSET
    initials: Initials | UnsetType = UNSET


class NewDefinitions(Schema, kw_only=True):
    agents: Annotated[list[NewDefinition], Meta(min_length=1, max_length=50, description="All or none are created.")]
    version: Version | UnsetType = UNSET


class CreatedDefinitions(Schema):
    ids: Annotated[list[str], Meta(description="In the order of the request.")]
    version: str


class DefinitionChange(Schema, kw_only=True):
    """Fields left out stay as they are; null and empty text remove a field."""

    version: Version | UnsetType = UNSET
    name: ShortText | UnsetType = UNSET
    role: Role | UnsetType | None = UNSET
    description: Description | UnsetType | None = UNSET
    prompt: Prompt | UnsetType | None = UNSET
    service: str | UnsetType | None = UNSET
    tools: Tools | UnsetType | None = UNSET
    parent: str | UnsetType | None = UNSET
    colour: AgentColour | UnsetType | None = UNSET
    initials: Initials | UnsetType | None = UNSET


class ChangedField(Schema):
    name: str
    before: str | list[str] | None
    after: str | list[str] | None


class ChangedAgent(Schema):
    id: str
    name: str
    fields: list[ChangedField]


class Change(Schema, kw_only=True):
    id: str
    at: Time
    kind: definitions.ChangeKind
    agents: list[ChangedAgent]
    undoes: Annotated[str, Meta(description="The change that this one took back.")] | UnsetType = UNSET
    can_undo: Annotated[bool, Meta(description="No agent of it was changed again since.")]

    @classmethod
    def of(cls, change: definitions.AgentChange, current: Mapping[str, definitions.Fields]) -> Self:
        return cls(
            id=change.id,
            at=to_rfc3339(change.at) or "",
            kind=change.kind,
            agents=[_changed_agent(change, agent_id) for agent_id in change.after],
            undoes=change.undoes or UNSET,
            can_undo=all(current.get(agent_id) == fields for agent_id, fields in change.after.items()),
        )


def _changed_agent(change: definitions.AgentChange, agent_id: str) -> ChangedAgent:
    before, after = change.before.get(agent_id) or {}, change.after.get(agent_id) or {}
    names = change.changed_fields(agent_id)
    fields = [ChangedField(name=name, before=before.get(name), after=after.get(name)) for name in names]
    return ChangedAgent(id=agent_id, name=change.name_of(agent_id), fields=fields)


class ChangePage(Schema):
    items: list[Change]
    next: None


class Tool(Schema):
    name: str
    source: Annotated[str, Meta(description="`built-in`, `tools` (the owner's) or `mcp.<id>`.")]
    built_in: Annotated[bool, Meta(description="An agent has it unless its patterns exclude it.")]
    description: Annotated[str, Meta(description="As the model sees it.")]
    approval: Annotated[bool, Meta(description="A person must approve each call.")]

    @classmethod
    def of(cls, tool: ListedTool) -> Self:
        return cls(
            name=tool.name,
            source=tool.source,
            built_in=tool.source == BUILT_IN,
            description=tool.description,
            approval=tool.approval,
        )


class ToolPage(Schema):
    items: list[Tool]
    next: None


class Template(Schema):
    id: str
    name: str
    about: str
    agents: list[NewDefinition]


class TemplatePage(Schema):
    items: list[Template]
    next: None


router = Router(prefix=API, tags=["definitions"], responses=COMMON_PROBLEMS)

_CONFIG = "`config_invalid`"
_INVALID = problems(_422=f"`request_invalid`, {_CONFIG}")
_WRITE = problems("definitions_changed", "agent_invalid", _422=f"`request_invalid`, {_CONFIG}")


@router.get("/definitions", summary="List the agents of the configuration as they are described", responses=_INVALID)
async def list_definitions(society: SocietyDep) -> DefinitionList:
    """Agents that were made by other agents or by `POST /agents` have no definition."""
    with config_errors():
        return await DefinitionList.read(society)


@router.post(
    "/definitions",
    status_code=201,
    summary="Create agents in the configuration",
    responses=_WRITE | problems("id_taken", "definitions_changed") | problems("unknown_agent", "unknown_service"),
)
async def create_definitions(body: NewDefinitions, society: SocietyDep) -> CreatedDefinitions:
    """They can be talked to at once."""
    new = [
        definitions.NewAgent(
            fields=_fields(one), id=None if one.id is UNSET else one.id, key=None if one.key is UNSET else one.key
        )
        for one in body.agents
    ]
    for one in new:
        society.agents.check_service(one.fields.get("service"))
    with config_errors():
        ids = await society.definitions.create(new, _version(body))
        return CreatedDefinitions(ids=ids, version=(await society.definitions.read()).version)


@router.patch(
    "/definitions/{agent_id}",
    summary="Change the definition of an agent",
    responses=_WRITE | problems("unknown_agent", "unknown_service"),
)
async def change_definition(agent_id: str, body: DefinitionChange, society: SocietyDep) -> DefinitionList:
    """The agent's next request uses it. Keys of its table that are not named here stay as they are."""
    fields = _fields(body)
    society.agents.check_service(fields.get("service"))
    with config_errors():
        await society.definitions.change(agent_id, fields, _version(body))
        return await DefinitionList.read(society)


@router.delete(
    "/definitions/{agent_id}",
    summary="Retire an agent: remove its definition",
    responses=_WRITE | problems("unknown_agent") | problems("definitions_changed", "last_agent"),
)
async def retire_agent(agent_id: str, society: SocietyDep, version: Id | None = None) -> DefinitionList:
    """It ends its turn and answers no more. Its conversation and mail are kept; an undo brings it back.

    `version`: of the definitions that the person saw; with a newer one nothing is changed.
    """
    with config_errors():
        await society.retire_agent(agent_id, version)
        return await DefinitionList.read(society)


@router.get("/definitions/changes", summary="List changes of definitions, newest first", responses=_INVALID)
async def list_definition_changes(society: SocietyDep) -> ChangePage:
    """Those made by this API, at most 200. Changes by hand are not among them."""
    with config_errors():
        current = (await society.definitions.read()).agents
    return ChangePage(items=[Change.of(change, current) for change in await society.definitions.changes()], next=None)


@router.post(
    "/definitions/changes/{change_id}/undo",
    summary="Take back a change of definitions",
    responses=_WRITE | problems("unknown_change") | problems("change_superseded", "definitions_changed", "last_agent"),
)
async def undo_definition_change(change_id: str, society: SocietyDep) -> DefinitionList:
    """The undo is a change itself, and can be undone."""
    with config_errors():
        await society.definitions.undo(change_id)
        return await DefinitionList.read(society)


@router.get("/tools", summary="List all tools that agents can be given", responses=problems("unknown_agent"))
async def list_tools(society: SocietyDep, agent: Id | None = None) -> ToolPage:
    """With `agent`: only those that this agent has."""
    if agent is not None:
        await find_agent(society.store, agent)
    given = None if agent is None else society.tools_of(agent)
    items = [Tool.of(tool) for tool in society.tools if given is None or tool.name in given]
    return ToolPage(items=items, next=None)


@router.get("/templates", summary="List templates of agents")
async def list_templates(language: Language = "en") -> TemplatePage:
    """The agents of one are a body for `POST /definitions`."""
    return _templates(language)


@cache
def _templates(language: Language) -> TemplatePage:
    table = tomllib.loads((files("coterie") / "templates" / "agents.toml").read_text(encoding="utf-8"))
    items = [{"id": one["id"], **one[language]} for one in table["templates"]]
    return TemplatePage(items=msgspec.convert(items, list[Template]), next=None)


def _fields(body: NewDefinition | DefinitionChange) -> dict[str, Any]:
    return {name: value for name in definitions.EDITABLE if (value := getattr(body, name)) is not UNSET}


def _version(body: NewDefinitions | DefinitionChange) -> str | None:
    return None if body.version is UNSET else body.version
