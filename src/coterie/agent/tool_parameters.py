"""The parameters of a tool, read from a function's signature: a JSON Schema for the model, and values for the call."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from coterie.agent.tool_context import ToolContext
from coterie.errors import CoterieError
from coterie.text import nearest, one_line

_HIDDEN = "ctx"
_SECTION = re.compile(r"(args|arguments|parameters|params|returns?|raises|yields|examples?|notes?):", re.IGNORECASE)
_ITEM = re.compile(r"(?::param\s+(?:[^:]*\s)?)?\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


class BadTool(CoterieError):
    """A function that cannot be a tool as it is written; the message says what to change."""


class BadArguments(CoterieError):
    """A call that does not fit the tool's parameters; the message names every mistake in it."""


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    type: Any
    required: bool
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    known: tuple[Parameter, ...]
    takes_context: bool
    """The function wants `ctx`, which no model sees."""

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the arguments object."""
        return {
            "type": "object",
            "properties": {parameter.name: parameter.schema for parameter in self.known},
            "required": [parameter.name for parameter in self.known if parameter.required],
            "additionalProperties": False,
        }

    def accept(self, arguments: Mapping[str, Any], ctx: ToolContext | None) -> dict[str, Any]:
        """Keyword arguments for the function; `BadArguments` when something about the call is wrong."""
        wrong = [self._unknown(name) for name in arguments if name not in {p.name for p in self.known}]
        accepted: dict[str, Any] = {_HIDDEN: ctx} if self.takes_context else {}
        for parameter in self.known:
            if parameter.name not in arguments:
                if parameter.required:
                    wrong.append(f"{parameter.name}: is missing")
                continue
            given = arguments[parameter.name]
            try:
                accepted[parameter.name] = _convert(given, parameter.type)
            except msgspec.ValidationError as error:
                # Models write null for what they leave out.
                if given is not None or parameter.required:
                    wrong.append(_sentence(parameter, error))
        if wrong:
            raise BadArguments("; ".join(wrong))
        return accepted

    def _unknown(self, name: str) -> str:
        known = [parameter.name for parameter in self.known]
        meant = nearest(name, set(known))
        there = f"there are: {', '.join(known)}" if known else "there are none"
        return f"{one_line(name)}: no such parameter, {f'did you mean {meant}? ' if meant else ''}{there}"


def read_parameters(function: Callable[..., object], docs: Mapping[str, str]) -> Parameters:
    """What `function` takes, from its signature; `docs` describes parameters that are not `Annotated`."""
    hints = _hints(function)
    known, takes_context = [], False
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name, parameter.empty)
        if parameter.name == _HIDDEN:
            if hint not in (ToolContext, parameter.empty):
                raise BadTool(f'parameter "{_HIDDEN}" is the ToolContext: give the tool\'s own parameter another name')
            takes_context = True
        else:
            known.append(_read_parameter(parameter, hint, docs.get(parameter.name)))
    return Parameters(known=tuple(known), takes_context=takes_context)


def read_docstring(function: Callable[..., object]) -> tuple[str, dict[str, str]]:
    """The description, and what it says of single parameters (`Args:` with `name: text`, or `:param name: text`)."""
    description: list[str] = []
    docs: dict[str, str] = {}
    section, last = "", ""
    for line in (inspect.getdoc(function) or "").splitlines():
        text = line.strip()
        if text.startswith(":param "):
            section = "args"
        elif section and text and line == line.lstrip():
            section = ""  # back at the margin
        if heading := _SECTION.fullmatch(text):
            section = "args" if heading[1].lower() in ("args", "arguments", "parameters", "params") else "other"
        elif section == "args":
            if item := _ITEM.fullmatch(text):
                last, docs[item[1]] = item[1], item[2]
            elif last and text:
                docs[last] += f" {text}"
        elif not section:
            description.append(line)
    return "\n".join(description).strip(), docs


def _hints(function: Callable[..., object]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # an annotation is code of the owner's
        raise BadTool(f"its annotations cannot be read: {one_line(str(error), 200)}") from error


def _read_parameter(parameter: inspect.Parameter, hint: Any, described: str | None) -> Parameter:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise BadTool(f"{parameter} has no schema: name every parameter")
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise BadTool(
            f'parameter "{parameter.name}" is positional only, but tools are called by name: take out the "/"'
        )
    if hint is parameter.empty:
        raise BadTool(f'parameter "{parameter.name}" needs a type, such as {parameter.name}: str')
    if hint is ToolContext:
        raise BadTool(f'parameter "{parameter.name}" is a ToolContext: it must be called "{_HIDDEN}"')
    schema = _schema(parameter.name, hint)
    if description := _annotated(hint) or described:
        schema = {"description": description} | schema
    required = parameter.default is parameter.empty
    if not required and isinstance(parameter.default, str | int | float | bool):
        schema["default"] = parameter.default
    return Parameter(parameter.name, hint, required, schema)


def _annotated(hint: Any) -> str | None:
    """The text in `Annotated[..., "text"]`."""
    extras = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    return next((extra for extra in extras if isinstance(extra, str)), None)


def _schema(name: str, hint: Any) -> dict[str, Any]:
    try:
        (schema,), parts = msgspec.json.schema_components([hint])
    except (TypeError, ValueError, NameError) as error:
        what = one_line(getattr(hint, "__name__", None) or str(hint))
        raise BadTool(f'parameter "{name}" has the type {what}, which no JSON stands for') from error
    return _whole(schema, parts, ())


def _whole(schema: Mapping[str, Any], parts: Mapping[str, Any], inside: tuple[str, ...]) -> dict[str, Any]:
    """`schema` with references written out: not every service follows them."""
    if "$ref" in schema:
        part = schema["$ref"].removeprefix("#/$defs/")
        if part in inside:
            raise BadTool(f"{part} contains itself, which not every model service can be told")
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _whole(parts[part], parts, (*inside, part)) | rest
    whole: dict[str, Any] = {}
    for key, value in schema.items():
        match key:
            case "title":
                continue
            case "properties":
                whole[key] = {name: _whole(item, parts, inside) for name, item in value.items()}
            case "anyOf" | "prefixItems":
                whole[key] = [_whole(item, parts, inside) for item in value]
            case "items" | "additionalProperties" if isinstance(value, Mapping):
                whole[key] = _whole(value, parts, inside)
            case _:
                whole[key] = value
    return whole


def _convert(given: object, kind: Any) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError:
        # JSON has one kind of number: a model that writes 3.0 means the integer 3.
        if isinstance(given, float) and given.is_integer():
            return msgspec.convert(int(given), kind)
        raise


def _sentence(parameter: Parameter, error: msgspec.ValidationError) -> str:
    what, _, place = str(error).partition(" - at `$")
    choices = parameter.schema.get("enum")
    allowed = f" (one of: {', '.join(map(str, choices))})" if choices else ""
    return f"{parameter.name}{place.rstrip('`')}: {what[:1].lower()}{what[1:]}{allowed}".replace("`", "")
