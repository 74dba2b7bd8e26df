"""Tools: what an agent can do besides speaking. An owner's tool is a Python function under `@tool`."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args, overload

import msgspec

from coterie.agent.tool_context import ToolContext
from coterie.agent.tool_parameters import BadTool, Parameters, read_docstring, read_parameters
from coterie.llm.chat import ToolSpec

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
