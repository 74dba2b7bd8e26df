"""Tools: what an agent can do besides speaking. An owner's tool is a Python function under `@tool`.

What a tool is given of the agent that calls it.

The parameters of a tool, read from a function's signature: a JSON Schema for the model, and values for the call.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal, Protocol, TypeVar, get_args, overload

import msgspec

from coterie.artifact_service import AgentLibrary, Library
from coterie.errors import CoterieError
from coterie.llm.routing import CapabilityRouter
from coterie.llm.service import Capabilities
from coterie.llm.types import ToolSpec
from coterie.messages import Payload, Receipt
from coterie.text import nearest, one_line


class Send(Protocol):
    async def __call__(
        self, to: str, payload: Payload, *, delay_ms: float | None = None, quick_replies: list[str] | None = None
    ) -> Receipt:
        """A message from the agent itself; `Refused` and nothing sent when something about it is wrong."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    agent_id: str
    capabilities: Capabilities
    """What the agent's model can take in and give out."""
    router: CapabilityRouter
    """How attachments would reach a service."""
    send: Send
    artifacts: Library | AgentLibrary
    """The files that the agent may read; what is put there is the agent's."""
    idempotency_key: str
    """The same when this very call runs again after a crash."""


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


Effect = Literal["pure", "idempotent", "unsafe"]
"""After a crash `pure` and `idempotent` calls run again under the same key; an `unsafe` one never does by itself."""

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
Function = TypeVar("Function", bound=Callable[..., object])
_MARK = "__coterie_tool__"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a call came to. A tool that fails is no exception: it is `ok=False`, and the model reads why."""

    ok: bool
    text: str
    """For the model: plain text, or JSON."""
    artifact_ref: str | None = None
    """Where all of it is kept, when that is more than `text` says."""
    unknown: bool = False
    """The call began and its outcome was not learned: it may or may not have taken effect."""


@dataclass(frozen=True, slots=True)
class OnLoop:
    """An async function of ours, which never blocks: awaited on the event loop of the society."""

    function: Callable[..., Awaitable[object]]


@dataclass(frozen=True, slots=True)
class OnToolLoop:
    """An async function of the owner's: it may block, so it is awaited on an event loop in another thread."""

    function: Callable[..., Awaitable[object]]


@dataclass(frozen=True, slots=True)
class InThread:
    """A sync function: it may block, so it gets a thread."""

    function: Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess:
    """A function that gets a process of its own, which can be killed. Found there by file, or by module, and name."""

    module: str
    file: str
    name: str
    memory_mb: int | None = None
    """The most address space it may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    spec: ToolSpec
    effect: Effect = "unsafe"
    approval: bool = False
    """The person is asked before each call."""
    deadline: timedelta | None = None
    """Its own; None: the society's."""
    max_text: int = 32 << 10
    """Bytes of a result that the model is shown; what is longer is kept as an artifact."""
    accept: Callable[[Mapping[str, Any], ToolContext], dict[str, Any]]
    """The model's arguments as the function's; `BadArguments` when they do not fit."""
    run: OnLoop | OnToolLoop | InThread | InProcess


@overload
def tool(function: Function, /) -> Function: ...
@overload
def tool(
    *,
    effect: Effect = "unsafe",
    approval: bool = False,
    process: bool = False,
    name: str | None = None,
    seconds: float | None = None,
    memory_mb: int | None = None,
) -> Callable[[Function], Function]: ...
def tool(
    function: Callable[..., object] | None = None,
    /,
    *,
    effect: Effect = "unsafe",
    approval: bool = False,
    process: bool = False,
    name: str | None = None,
    seconds: float | None = None,
    memory_mb: int | None = None,
) -> Any:
    """Make a tool of a function; it stays the function it is. `BadTool` says what is wrong with a declaration.

    `seconds`: its own deadline. `process`: run it in a process of its own, which is killed at the deadline; the
    environment there holds COTERIE_AGENT_ID and COTERIE_IDEMPOTENCY_KEY. `memory_mb`: the most that process may use.
    """

    def declare(declared: Callable[..., object]) -> Callable[..., object]:
        made = _make(
            declared, effect=effect, approval=approval, process=process, name=name, seconds=seconds, memory_mb=memory_mb
        )
        setattr(declared, _MARK, made)
        return declared

    return declare if function is None else declare(function)


def tool_of(value: object) -> Tool | None:
    """The tool that a function was declared to be."""
    found = getattr(value, _MARK, None) if inspect.isfunction(value) else None
    return found if isinstance(found, Tool) else None


def parameters_of(function: Callable[..., object]) -> Parameters:
    """`BadTool` when they cannot be put to a model."""
    return read_parameters(function, read_docstring(function)[1])


def unknown(error: str, message: str) -> ToolResult:
    """The failure `error` of a call that may have taken effect all the same."""
    words = f"{message}. It may or may not have happened: verify before repeating it"
    text = msgspec.json.encode({"status": "unknown", "error": error, "message": words}).decode()
    return ToolResult(ok=False, text=text, unknown=True)


def failed(error: str, message: str) -> ToolResult:
    """The failure `error`, a short code, in words that the model can act on."""
    return ToolResult(ok=False, text=msgspec.json.encode({"error": error, "message": message}).decode())


def _make(
    function: Callable[..., object],
    *,
    effect: Effect,
    approval: bool,
    process: bool,
    name: str | None,
    seconds: float | None,
    memory_mb: int | None,
) -> Tool:
    called: str = getattr(function, "__name__", "?") if name is None else name
    try:
        _check(function, called, effect, seconds)
        parameters = parameters_of(function)
        run = _how(function, parameters, process=process, memory_mb=memory_mb)
    except BadTool as error:
        raise BadTool(f"tool {called}: {error}") from error.__cause__
    return Tool(
        name=called,
        spec=ToolSpec(name=called, description=read_docstring(function)[0], parameters=parameters.schema()),
        effect=effect,
        approval=approval,
        deadline=timedelta(seconds=seconds) if seconds else None,
        accept=parameters.accept,
        run=run,
    )


def _check(function: Callable[..., object], name: str, effect: str, seconds: float | None) -> None:
    if not inspect.isfunction(function):
        raise BadTool(f"@tool stands on a function, got {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise BadTool("it yields, but a tool returns its result once: return a list")
    if not NAME.fullmatch(name):
        raise BadTool("a name is 1 to 64 of a-z, A-Z, 0-9, _ and -")
    if effect not in get_args(Effect):
        raise BadTool(f"effect is {', '.join(get_args(Effect))}, got {effect!r}")
    if seconds is not None and not 0 < seconds <= 86_400:
        raise BadTool(f"seconds must be more than 0 and at most a day, got {seconds}")


def _how(
    function: Callable[..., Any], parameters: Parameters, *, process: bool, memory_mb: int | None
) -> OnLoop | InThread | InProcess:
    if memory_mb is not None and (memory_mb < 1 or not process):
        raise BadTool("memory_mb is a number above 0, and needs process=True")
    if not process:
        return OnLoop(function) if inspect.iscoroutinefunction(function) else InThread(function)
    if parameters.takes_context:
        raise BadTool(
            "ctx does not reach another process: take it out, or process=True."
            " COTERIE_AGENT_ID and COTERIE_IDEMPOTENCY_KEY are in the environment there"
        )
    if function.__qualname__ != function.__name__:
        raise BadTool("with process=True it must stand at the top level of its file, so that it is found there")
    file = getattr(sys.modules.get(function.__module__), "__file__", None) or function.__code__.co_filename
    return InProcess(module=function.__module__, file=file, name=function.__name__, memory_mb=memory_mb)
