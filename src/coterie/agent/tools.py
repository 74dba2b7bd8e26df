"""The `@tool` decorator, `Tool`, `ToolContext` and `ToolResult`.

A tool is a Python function. Its signature and docstring become the JSON Schema for the model, and the model's arguments
are converted to the types of its parameters.

The module also converts return values and exceptions of tools to results for the model. Long results become artifacts.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
import sys
import typing
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Protocol, TypeVar, get_args, overload

import msgspec

from coterie.artifact_service import AgentArtifacts, ArtifactService
from coterie.artifacts import Artifact
from coterie.errors import CoterieError, Refused
from coterie.llm.routing import CapabilityRouter
from coterie.llm.service import Capabilities, Completion, ModelRequest, ToolSpec
from coterie.messages import Payload, Receipt
from coterie.plan import Effect
from coterie.text import closest_match, one_line, to_storable


class SendFunction(Protocol):
    async def __call__(
        self,
        to: str,
        payload: Payload,
        *,
        delay_ms: float | None = None,
        quick_replies: list[str] | None = None,
        every: str | None = None,
        time_zone: str | None = None,
        unless_answered: str | None = None,
    ) -> Receipt:
        """Send a message from the agent. `Refused`: the message is invalid and was not sent.

        `every`: send it again and again, such as "weekdays 08:00", in `time_zone`. The receipt has the schedule's id.
        `unless_answered`: a message of the agent; an answer to it withdraws this delayed one.
        """
        ...


class AskFunction(Protocol):
    async def __call__(self, text: str, quick_replies: list[str]) -> str | None:
        """Ask the person and wait for the answer. None: there was none. The deadline of the call is suspended."""
        ...


class ProgressFunction(Protocol):
    async def __call__(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Show the person how far the call is. The deadline of the call starts again."""
        ...


async def ignore_progress(progress: float, total: float | None = None, message: str | None = None) -> None:
    """Drop the report. The default of `ToolContext.report_progress`, for calls outside a turn."""


class SampleFunction(Protocol):
    async def __call__(self, request: ModelRequest) -> Completion:
        """Ask the agent's model, outside of its conversation. Raises `ServiceError` or `SocietyPaused`.

        The tokens count as the agent's. The deadline of the call is suspended.
        """
        ...


MAX_WITH_PROGRESS = timedelta(hours=1)
"""Total time of a call that keeps reporting progress, unless its deadline is longer."""


class CallTimer:
    """Measures how long a call works. The time in which it waits for the person or a model does not count."""

    def __init__(self, max_with_progress: timedelta = MAX_WITH_PROGRESS) -> None:
        self._pauses = 0
        self._woken: asyncio.Future[None] | None = None
        """Set while `wait` waits; done when `wait` must compute its timeout again."""
        self._max_seconds = max_with_progress.total_seconds()
        self._is_restarted = False
        self.has_progressed = False
        """The call has reported progress at least once."""

    def restart(self) -> None:
        """Measure from now on: the call has reported progress."""
        self._is_restarted = self.has_progressed = True
        self._recompute()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._pauses += 1
        self._recompute()
        try:
            yield
        finally:
            self._pauses -= 1
            self._recompute()

    def _recompute(self) -> None:
        if self._woken:
            _wake(self._woken)

    async def wait(self, call: asyncio.Future[Any], seconds: float) -> None:
        """Wait until the call is done or has worked for `seconds` without progress."""
        loop = asyncio.get_running_loop()
        left, total = seconds, max(seconds, self._max_seconds)
        while not call.done() and left > 0:
            began, is_paused = loop.time(), self._pauses > 0
            self._is_restarted = False
            woken = self._woken = loop.create_future()
            timeout = None if is_paused else loop.call_later(left, _wake, woken)
            on_done = partial(_wake, woken)
            call.add_done_callback(on_done)
            try:
                await woken
            finally:
                call.remove_done_callback(on_done)
                if timeout:
                    timeout.cancel()
            worked = 0.0 if is_paused else loop.time() - began
            total -= worked
            left = min(seconds if self._is_restarted else left - worked, total)


def _wake(woken: asyncio.Future[None], _: object = None) -> None:
    if not woken.done():
        woken.set_result(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    agent_id: str
    capabilities: Capabilities
    """Input and output types of the agent's model; none if its service was removed from the configuration."""
    router: CapabilityRouter
    """Decides how attachments reach a service."""
    send: SendFunction
    artifacts: ArtifactService | AgentArtifacts
    """Files that the agent may read. It owns the files that the tool puts there."""
    idempotency_key: str
    """Stable when this call runs again after a crash."""
    ask: AskFunction | None = None
    """Asks the person. None: the person cannot be asked."""
    report_progress: ProgressFunction = ignore_progress
    """Shows the person how far the call is: `await ctx.report_progress(3, 10, "copying")`."""
    sample: SampleFunction | None = None
    """Asks the agent's model for an MCP server. None: it cannot be asked."""
    timer: CallTimer = field(default_factory=CallTimer)
    tools: frozenset[str] = frozenset()
    """Names of the tools that the agent's model is given. A result should mention no other."""


_CONTEXT_PARAMETER = "ctx"
_SECTION = re.compile(r"(args|arguments|parameters|params|returns?|raises|yields|examples?|notes?):", re.IGNORECASE)
_ITEM = re.compile(r"(?::param\s+(?:[^:]*\s)?)?\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


class BadTool(CoterieError):
    """A function cannot be a tool; the message says what to change."""


class BadArguments(CoterieError):
    """The arguments of a call do not fit the parameters; the message names every mistake."""


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    type: Any
    required: bool
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    items: tuple[Parameter, ...]
    takes_context: bool
    """The function has a parameter `ctx`, which is not in the schema."""

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the arguments object. Every request contains it, so it has no optional keywords."""
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {parameter.name: parameter.schema for parameter in self.items},
        }
        if required := [parameter.name for parameter in self.items if parameter.required]:
            schema["required"] = required
        return schema

    def convert(self, arguments: Mapping[str, Any], ctx: ToolContext | None) -> dict[str, Any]:
        """Return the keyword arguments for the function. `BadArguments`: a value is missing, unknown or invalid."""
        mistakes = [self._unknown(name) for name in arguments if name not in {p.name for p in self.items}]
        converted: dict[str, Any] = {_CONTEXT_PARAMETER: ctx} if self.takes_context else {}
        for parameter in self.items:
            if parameter.name not in arguments:
                if parameter.required:
                    mistakes.append(f"{parameter.name}: is missing")
                continue
            value = arguments[parameter.name]
            try:
                converted[parameter.name] = _convert(value, parameter.type)
            except msgspec.ValidationError as error:
                # Models write null for parameters that they leave out.
                if value is not None or parameter.required:
                    mistakes.append(_describe_mistake(parameter, error))
        if mistakes:
            raise BadArguments("; ".join(mistakes))
        return converted

    def _unknown(self, name: str) -> str:
        known = [parameter.name for parameter in self.items]
        meant = closest_match(name, set(known))
        there = f"there are: {', '.join(known)}" if known else "there are none"
        return f"{one_line(name)}: no such parameter, {f'did you mean {meant}? ' if meant else ''}{there}"


def read_parameters(function: Callable[..., object], docs: Mapping[str, str]) -> Parameters:
    """Return the parameters of `function`. `docs`: descriptions of parameters that are not `Annotated`."""
    hints = _hints(function)
    known, takes_context = [], False
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name, parameter.empty)
        if parameter.name == _CONTEXT_PARAMETER:
            if hint not in (ToolContext, parameter.empty):
                raise BadTool(
                    f'parameter "{_CONTEXT_PARAMETER}" is the ToolContext: give the tool\'s own parameter another name'
                )
            takes_context = True
        else:
            known.append(_read_parameter(parameter, hint, docs.get(parameter.name)))
    return Parameters(items=tuple(known), takes_context=takes_context)


def read_docstring(function: Callable[..., object]) -> tuple[str, dict[str, str]]:
    """Return the description, and those of parameters (`Args:` with `name: text`, or `:param name: text`)."""
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
    except Exception as error:  # an annotation is user code
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
        raise BadTool(f'parameter "{parameter.name}" is a ToolContext: it must be called "{_CONTEXT_PARAMETER}"')
    schema = _schema(parameter.name, hint)
    if description := _annotated_text(hint) or described:
        schema = {"description": description} | schema
    required = parameter.default is parameter.empty
    if parameter.default is None:
        schema = _without_null(schema)
    if not required and isinstance(parameter.default, str | int | float | bool):
        schema["default"] = parameter.default
    return Parameter(parameter.name, hint, required, schema)


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an optional parameter without null: the model leaves the parameter out instead."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    return rest | kinds[0] if len(kinds) == 1 else schema


def _annotated_text(hint: Any) -> str | None:
    """The text in `Annotated[..., "text"]`."""
    extras = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    return next((extra for extra in extras if isinstance(extra, str)), None)


def _schema(name: str, hint: Any) -> dict[str, Any]:
    try:
        (schema,), parts = msgspec.json.schema_components([hint])
    except (TypeError, ValueError, NameError) as error:
        what = one_line(getattr(hint, "__name__", None) or str(hint))
        raise BadTool(f'parameter "{name}" has the type {what}, which JSON cannot represent') from error
    return _resolve_refs(schema, parts, ())


def _resolve_refs(schema: Mapping[str, Any], parts: Mapping[str, Any], inside: tuple[str, ...]) -> dict[str, Any]:
    """Return `schema` with references resolved: not every service supports them."""
    if "$ref" in schema:
        part = schema["$ref"].removeprefix("#/$defs/")
        if part in inside:
            raise BadTool(f"{part} contains itself, which not every model service supports")
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _resolve_refs(parts[part], parts, (*inside, part)) | rest
    resolved: dict[str, Any] = {}
    for key, value in schema.items():
        match key:
            case "title":
                continue
            case "properties":
                resolved[key] = {name: _resolve_refs(item, parts, inside) for name, item in value.items()}
            case "anyOf" | "prefixItems":
                resolved[key] = [_resolve_refs(item, parts, inside) for item in value]
            case "items" | "additionalProperties" if isinstance(value, Mapping):
                resolved[key] = _resolve_refs(value, parts, inside)
            case _:
                resolved[key] = value
    return resolved


def _convert(given: object, kind: Any) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError:
        # JSON has one number type: 3.0 is a valid integer.
        if isinstance(given, float) and given.is_integer():
            return msgspec.convert(int(given), kind)
        raise


def _describe_mistake(parameter: Parameter, error: msgspec.ValidationError) -> str:
    what, _, location = str(error).partition(" - at `$")
    choices = parameter.schema.get("enum")
    allowed = f" (one of: {', '.join(map(str, choices))})" if choices else ""
    return f"{parameter.name}{location.rstrip('`')}: {what[:1].lower()}{what[1:]}{allowed}".replace("`", "")


NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
Function = TypeVar("Function", bound=Callable[..., object])
_TOOL_ATTRIBUTE = "__coterie_tool__"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a call. A failure is `ok=False` with the reason as text, not an exception."""

    ok: bool
    text: str
    """Plain text or JSON for the model."""
    artifact_ref: str | None = None
    """Artifact with the whole result, if `text` is only a part of it."""
    is_outcome_unknown: bool = False
    """The call started, but it may or may not have taken effect."""
    attachments: tuple[Artifact, ...] = ()
    """Files for the model to see, if it can; else it gets their descriptions."""


@dataclass(frozen=True, slots=True)
class OnLoop:
    """An async function of Coterie, which never blocks: runs on the society's event loop."""

    function: Callable[..., Awaitable[object]]


@dataclass(frozen=True, slots=True)
class OnToolLoop:
    """An async user function, which may block: runs on an event loop in another thread."""

    function: Callable[..., Awaitable[object]]


@dataclass(frozen=True, slots=True)
class InThread:
    """A sync function, which may block: runs in its own thread."""

    function: Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess:
    """A function that runs in its own process, which can be killed. The process finds it by module, file and name."""

    module: str
    file: str
    name: str
    memory_mb: int | None = None
    """Limit of the address space."""
    takes_context: bool = False
    """The function has a parameter `ctx`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    spec: ToolSpec
    effect: Effect = "unsafe"
    approval: bool = False
    """A person must approve each call."""
    deadline: timedelta | None = None
    """None: the society's deadline."""
    max_result_bytes: int = 32 << 10
    """Longer results are stored as an artifact."""
    convert_arguments: Callable[[Mapping[str, Any], ToolContext], dict[str, Any]]
    """Converts the model's arguments to keyword arguments. `BadArguments`: they do not fit."""
    takes_context: bool = True
    """False: the function has no parameter `ctx`."""
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
    """Declare a function as a tool and return it unchanged. `BadTool`: the declaration is invalid.

    `effect`: after a crash, `pure` and `idempotent` calls run again with the same key; `unsafe` calls do not.
    `approval`: a person must approve each call. `seconds`: deadline. `process`: run in a separate process, which is
    killed at the deadline; `ctx` works there too, except `ctx.router`, and its environment has COTERIE_AGENT_ID and
    COTERIE_IDEMPOTENCY_KEY. `memory_mb`: limit of that process.
    """

    def declare(declared: Callable[..., object]) -> Callable[..., object]:
        made = _build_tool(
            declared, effect=effect, approval=approval, process=process, name=name, seconds=seconds, memory_mb=memory_mb
        )
        setattr(declared, _TOOL_ATTRIBUTE, made)
        return declared

    return declare if function is None else declare(function)


def get_tool(value: object) -> Tool | None:
    """Return the tool that `@tool` attached to a function."""
    found = getattr(value, _TOOL_ATTRIBUTE, None) if inspect.isfunction(value) else None
    return found if isinstance(found, Tool) else None


def parameters_of(function: Callable[..., object]) -> Parameters:
    """Return the parameters of a function. `BadTool`: JSON Schema cannot represent one of them."""
    return read_parameters(function, read_docstring(function)[1])


def unknown_result(error: str, message: str) -> ToolResult:
    """Return the error result of a call that may have taken effect."""
    message = f"{message}. It may or may not have happened: verify before repeating it"
    text = msgspec.json.encode({"status": "unknown", "error": error, "message": message}).decode()
    return ToolResult(ok=False, text=text, is_outcome_unknown=True)


def error_result(error: str, message: str) -> ToolResult:
    """Return an error result. `error`: a short code; `message`: what the model can do."""
    return ToolResult(ok=False, text=msgspec.json.encode({"error": error, "message": message}).decode())


def _build_tool(
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
        run = _choose_executor(function, parameters, process=process, memory_mb=memory_mb)
    except BadTool as error:
        raise BadTool(f"tool {called}: {error}") from error.__cause__
    return Tool(
        name=called,
        spec=ToolSpec(name=called, description=read_docstring(function)[0], parameters=parameters.schema()),
        effect=effect,
        approval=approval,
        deadline=timedelta(seconds=seconds) if seconds else None,
        convert_arguments=parameters.convert,
        takes_context=parameters.takes_context,
        run=run,
    )


def _check(function: Callable[..., object], name: str, effect: str, seconds: float | None) -> None:
    if not inspect.isfunction(function):
        raise BadTool(f"@tool decorates a function, got {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise BadTool("it yields, but a tool returns its result once: return a list")
    if not NAME.fullmatch(name):
        raise BadTool("a name is 1 to 64 of a-z, A-Z, 0-9, _ and -")
    if effect not in get_args(Effect):
        raise BadTool(f"effect is {', '.join(get_args(Effect))}, got {effect!r}")
    if seconds is not None and not 0 < seconds <= 86_400:
        raise BadTool(f"seconds must be more than 0 and at most a day, got {seconds}")


def _choose_executor(
    function: Callable[..., Any], parameters: Parameters, *, process: bool, memory_mb: int | None
) -> OnLoop | InThread | InProcess:
    if memory_mb is not None and (memory_mb < 1 or not process):
        raise BadTool("memory_mb is a number above 0, and needs process=True")
    if not process:
        return OnLoop(function) if inspect.iscoroutinefunction(function) else InThread(function)
    if function.__qualname__ != function.__name__:
        raise BadTool("with process=True it must be at the top level of its file, where the process finds it")
    file = getattr(sys.modules.get(function.__module__), "__file__", None) or function.__code__.co_filename
    return InProcess(
        module=function.__module__,
        file=file,
        name=function.__name__,
        memory_mb=memory_mb,
        takes_context=parameters.takes_context,
    )


HEAD_CHARACTERS, TAIL_CHARACTERS = 8 << 10, 4 << 10
"""Parts of a long result that the model sees."""
MAX_ERROR_CHARACTERS = 4_000


class NoToolResult(CoterieError):
    """A tool returned a value that cannot be encoded."""


class ToolProcessDied(NoToolResult):
    """The process of a tool ended during the call."""


def encode_result(value: object) -> str | bytes | ToolResult:
    """Return text and bytes unchanged, other values as JSON. `NoToolResult`: JSON cannot represent the value."""
    try:
        match value:
            case str() | ToolResult():
                return value
            case bytes() | bytearray() | memoryview():
                return bytes(value)
        return json.dumps(msgspec.to_builtins(value, str_keys=True), ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise NoToolResult("it returned something that contains itself, or is nested too deeply for JSON") from error
    except BaseException as error:  # the value's class is user code, which may raise even SystemExit
        message = safe_message(error)
        what = "NaN or an infinity" if "float" in message else f"a {type(value).__name__} ({message})"
        raise NoToolResult(f"it returned {what}, which JSON cannot represent") from None


async def fit_result(tool: Tool, encoded: str | bytes | ToolResult, ctx: ToolContext) -> ToolResult:
    """Return a result of bounded, storable text; the whole of a long text becomes an artifact."""
    if isinstance(encoded, bytes):
        return await _fit_bytes(tool.name, encoded, ctx)
    result = encoded if isinstance(encoded, ToolResult) else ToolResult(ok=True, text=encoded)
    # Some services reject an empty tool message.
    text = to_storable(result.text) or '""'
    if len(text) <= tool.max_result_bytes // 4 or len(data := text.encode()) <= tool.max_result_bytes:
        return result if text == result.text else replace(result, text=text)
    shown: dict[str, Any] = {
        "tooLong": True,
        "size": len(data),
        "head": text[:HEAD_CHARACTERS],
        "tail": text[-TAIL_CHARACTERS:],
    }
    try:
        artifact = await ctx.artifacts.put(data, f"{tool.name}.txt", key=ctx.idempotency_key)
    except (CoterieError, OSError) as error:
        return _join(result, shown, {"notKept": to_storable(str(error))})
    return _join(result, shown, artifact.to_dict())


def exception_result(name: str, error: BaseException) -> ToolResult:
    """Return the result that reports an exception."""
    if isinstance(error, Refused) and hasattr(error, "code"):
        return error_result(error.code, error.message)
    message, kind = safe_message(error), type(error).__name__
    return error_result(
        "tool_failed", f"{name} failed: {to_storable(f'{kind}: {message}' if message else kind)[:MAX_ERROR_CHARACTERS]}"
    )


def safe_message(error: BaseException) -> str:
    """Return the exception's message; empty if its `__str__` fails."""
    try:
        return str(error)
    except BaseException:  # user code, which may raise even SystemExit
        return ""


async def _fit_bytes(name: str, data: bytes, ctx: ToolContext) -> ToolResult:
    try:
        artifact = await ctx.artifacts.put(data, name, key=ctx.idempotency_key)
    except (CoterieError, OSError) as error:
        return error_result(
            "artifact_failed", f"{name} returned {len(data):,} bytes, which could not be stored: {error}"
        )
    return file_result(artifact)


def file_result(artifact: Artifact) -> ToolResult:
    """Return the result that describes a file. Pictures and sound are attached to it."""
    text = json.dumps(artifact.to_dict(), ensure_ascii=False)
    attachments = () if artifact.type == "file" else (artifact,)
    return ToolResult(ok=True, text=text, artifact_ref=artifact.ref, attachments=attachments)


def _join(result: ToolResult, shown: Mapping[str, Any], more: Mapping[str, Any]) -> ToolResult:
    text = json.dumps({**more, **shown}, ensure_ascii=False)
    return replace(result, text=text, artifact_ref=more.get("artifactRef"))
