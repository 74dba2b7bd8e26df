"""The tools of a society: which agent may use which tool, and calls that always return a result."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

from coterie.agent.builtins import SEND_MESSAGE
from coterie.agent.process_context import run_in_process
from coterie.agent.tools import (
    BadArguments,
    CallTimer,
    InProcess,
    InThread,
    NoToolResult,
    OnLoop,
    OnToolLoop,
    Tool,
    ToolContext,
    ToolProcessDied,
    ToolResult,
    encode_result,
    error_result,
    exception_result,
    fit_result,
    unknown_result,
)
from coterie.agent.user_tools import BLOCKED_AFTER, LoopCall, ToolLoops, bridge_context
from coterie.errors import Problem
from coterie.llm.service import ToolSpec
from coterie.problem_texts import ProblemText
from coterie.redaction import redact
from coterie.text import closest_match, one_line

log = logging.getLogger(__name__)

Patterns = Sequence[str | tuple[str, ...]]
"""Patterns of tool names, or several lists of patterns, each of which must allow a tool. See `is_allowed`."""
Encoded = str | bytes | ToolResult
Output = TypeVar("Output", str | bytes | ToolResult, ToolResult)

DEFAULT_DEADLINE = timedelta(seconds=120)
MAX_ABANDONED = 32
"""Unstoppable calls past their deadline. At this number, only tools with their own process are started."""
_RESERVED = frozenset({SEND_MESSAGE.name})
"""Tools that the runner executes itself."""
_MAX_FRAMES = 10
_GRACE_SECONDS = 0.5
"""Time for an async tool to end after its cancellation."""


BUILT_IN = "built-in"
"""Source of the tools that every agent has unless its patterns exclude them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTool:
    """A tool as people see it when they choose the tools of an agent."""

    name: str
    source: str
    """`built-in`, `tools` (the owner's) or the id of an MCP server."""
    description: str
    approval: bool = False
    """A person must approve each call."""


class Toolbox:
    def __init__(
        self,
        tools: Iterable[Tool] = (),
        *,
        built_ins: Iterable[Tool] = (),
        deadline: timedelta = DEFAULT_DEADLINE,
        max_abandoned: int = MAX_ABANDONED,
        blocked_after: timedelta = BLOCKED_AFTER,
        secrets: Sequence[str] = (),
    ) -> None:
        """`built_ins`: allowed unless an agent's patterns exclude them. `deadline`: for tools that declare none.

        `secrets`: redacted from all results and logs of tools. `blocked_after`: an event loop that runs nothing new
        for this long is blocked.
        """
        self._deadline, self._max_abandoned, self._secrets = deadline, max_abandoned, secrets
        self._sources: dict[str, tuple[Tool, ...]] = {BUILT_IN: tuple(built_ins), "given": tuple(tools)}
        self._built_ins = frozenset(tool.name for tool in self._sources[BUILT_IN])
        self._tools: dict[str, Tool] = {}
        self._allowed_tools: dict[Patterns, dict[str, Tool]] = {}
        self._model_specs: dict[Patterns, tuple[ToolSpec, ...]] = {}
        self._given_names: dict[Patterns, frozenset[str]] = {}
        self._abandoned: set[asyncio.Future[Any]] = set()
        self._loops = ToolLoops(blocked_after)
        self._rebuild()

    # Configuration

    def set_deadline(self, deadline: timedelta) -> None:
        self._deadline = deadline

    def set_secrets(self, secrets: Sequence[str]) -> None:
        self._secrets = secrets

    def replace_tools(self, source: str, tools: Iterable[Tool]) -> list[Problem]:
        """Replace all tools of `source`. Returns a problem for each name that an earlier source uses."""
        self._sources[source] = tuple(tools)
        return [problem for problem in self._rebuild() if problem.location == source]

    def find(self, name: str, patterns: Patterns) -> Tool | None:
        return self._allowed(patterns).get(name)

    def specs(self, patterns: Patterns) -> tuple[ToolSpec, ...]:
        """Return the specifications of the allowed tools, without `send_message`."""
        return tuple(tool.spec for tool in self._allowed(patterns).values())

    def model_specs(self, patterns: tuple[str | tuple[str, ...], ...]) -> tuple[ToolSpec, ...]:
        """Return the specifications that the model sees: `send_message` and the allowed tools."""
        if patterns not in self._model_specs:
            first = (SEND_MESSAGE,) if self.may_send(patterns) else ()
            self._model_specs[patterns] = (*first, *self.specs(patterns))
        return self._model_specs[patterns]

    def may_send(self, patterns: Patterns) -> bool:
        """True unless a list excludes `send_message`. An empty list does not."""
        return all(not is_excluded(SEND_MESSAGE.name, one) for one in _lists(patterns))

    def given_names(self, patterns: Patterns) -> frozenset[str]:
        """Return the names of the tools that the model sees."""
        key = tuple(patterns)
        if key not in self._given_names:
            sending = _RESERVED if self.may_send(patterns) else frozenset[str]()
            self._given_names[key] = sending.union(self._allowed(patterns))
        return self._given_names[key]

    def listed(self) -> Sequence[ListedTool]:
        """All tools, `send_message` first, in the order of their sources."""
        known = [(source, tool) for source, tools in self._sources.items() for tool in tools]
        return (
            ListedTool(name=SEND_MESSAGE.name, source=BUILT_IN, description=SEND_MESSAGE.description),
            *(
                ListedTool(name=tool.name, source=source, description=tool.spec.description, approval=tool.approval)
                for source, tool in known
                if self._tools.get(tool.name) is tool
            ),
        )

    def _rebuild(self) -> list[Problem]:
        self._tools, problems = {}, list[Problem]()
        for source, tools in self._sources.items():
            for tool in tools:
                if tool.name in _RESERVED or self._tools.setdefault(tool.name, tool) is not tool:
                    problems.append(Problem(source, ProblemText("tool_exists", name=tool.name)))
        self._allowed_tools.clear()
        self._model_specs.clear()
        self._given_names.clear()
        return problems

    def _allowed(self, patterns: Patterns) -> dict[str, Tool]:
        key = tuple(patterns)
        if key not in self._allowed_tools:
            lists = _lists(key)
            self._allowed_tools[key] = {
                name: tool
                for name, tool in self._tools.items()
                if all(is_allowed(name, one, is_built_in=name in self._built_ins) for one in lists)
            }
        return self._allowed_tools[key]

    # Calls

    @property
    def abandoned_calls(self) -> int:
        """Number of running calls that are past their deadline and cannot be stopped."""
        return len(self._abandoned)

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        ctx: ToolContext,
        deadline: timedelta | None = None,
        *,
        patterns: Patterns,
    ) -> ToolResult:
        """Run a tool. Failures become results; only the cancellation of the calling task is raised.

        `deadline`: for a tool without its own deadline. It is measured in real time, not by the society's clock.
        """
        tool = self.find(name, patterns)
        if tool is None:
            return _unknown_tool(name, self._allowed(patterns))
        if self.abandoned_calls >= self._max_abandoned and not isinstance(tool.run, InProcess):
            return error_result("tools_stuck", f"{self.abandoned_calls} earlier calls never ended: restart the society")
        allowed = tool.deadline or deadline or self._deadline
        try:
            return await fit_result(
                tool, self._redact(await self._run(tool, arguments, ctx, allowed.total_seconds())), ctx
            )
        except BadArguments as error:
            return error_result("bad_arguments", f"{name} was not called: {error}")
        except ToolProcessDied as error:
            return _no_result(tool, "no_result", f"{name}: {error}")
        except NoToolResult as error:
            return error_result("no_result", f"{name}: {error}")
        except _DeadlineExceeded as late:
            log.warning(
                "the tool %s, called by %s, did not end within %s; it was %s", name, ctx.agent_id, allowed, late
            )
            what = "made no further progress" if ctx.timer.has_progressed else "did not end"
            message = f"{name} {what} within {allowed.total_seconds():g} s and was {late}"
            return _no_result(tool, "tool_timeout", message)
        except _Raised as error:
            result = self._redact(exception_result(name, error.cause))
            frames = "".join(traceback.format_tb(error.cause.__traceback__, limit=-_MAX_FRAMES))
            log.warning("%s\n%s", result.text, frames)
            return result
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # SystemExit from a user class would end the event loop
            log.exception("the tool %s could not be run", name)
            return self._redact(exception_result(name, error))

    def redact_text(self, text: str) -> str:
        """Remove the secrets from the text of a tool."""
        return redact(text, self._secrets)

    def _redact(self, output: Output) -> Output:
        match output:
            case str():
                return self.redact_text(output)
            case ToolResult():
                text = redact(output.text, self._secrets)
                return output if text == output.text else replace(output, text=text)
        return output

    @property
    def blocked_loops(self) -> int:
        """How often an async tool has blocked its event loop."""
        return self._loops.blocked_count

    def watch_loop(self) -> None:
        """Log from now on when the running loop is blocked."""
        self._loops.watch_running_loop()

    async def close(self) -> None:
        """Cancel abandoned calls and stop the tool loops. Blocked threads end with the process."""
        abandoned = tuple(self._abandoned)
        for call in abandoned:
            call.cancel()
        if abandoned:
            await asyncio.wait(abandoned, timeout=_GRACE_SECONDS)
        await self._loops.close(_GRACE_SECONDS)

    async def _run(self, tool: Tool, arguments: Mapping[str, Any], ctx: ToolContext, seconds: float) -> Encoded:
        match tool.run:
            case OnLoop(function):
                converted = _convert_arguments(tool, arguments, ctx)
                task = asyncio.ensure_future(_wrap_errors(function(**converted)))
                return encode_result(await self._await_until_deadline(task, seconds, ctx.timer))
            # User code must not run on this loop; converting arguments and results may run user code too.
            case OnToolLoop() as run:
                bridged = bridge_context(ctx, asyncio.get_running_loop()) if tool.takes_context else ctx

                async def work() -> Encoded:
                    converted = _convert_arguments(tool, arguments, bridged)
                    return encode_result(await _wrap_errors(run.function(**converted)))

                call = self._loops.start(tool.name, ctx.agent_id, lambda: _wrap_conversion_errors(work()))
                return cast(Encoded, await self._await_until_deadline(call, seconds, ctx.timer))
            case InThread(function):

                def run_in_thread() -> Encoded:
                    converted = _convert_arguments(tool, arguments, ctx)
                    try:
                        value = function(**converted)
                    except BaseException as error:  # SystemExit too
                        raise _Raised(error) from None
                    return encode_result(value)

                return cast(Encoded, await self._await_until_deadline(_start_thread(run_in_thread), seconds))
            case InProcess() as process:
                converting = _start_thread(lambda: _convert_arguments(tool, arguments, ctx))
                await self._await_until_deadline(converting, seconds)
                running = asyncio.ensure_future(run_in_process(process, arguments, ctx))
                try:
                    await ctx.timer.wait(running, seconds)
                finally:
                    if is_late := not running.done():
                        running.cancel()
                        await asyncio.wait({running})
                if is_late and running.cancelled():
                    raise _DeadlineExceeded("killed")
                return running.result()

    async def _await_until_deadline(
        self, call: asyncio.Future[Any], seconds: float, timer: CallTimer | None = None
    ) -> Any:
        try:
            if isinstance(call, asyncio.Task):
                await asyncio.sleep(0)  # on this loop many calls end in one step and need no timer
            if not call.done() and timer:
                await timer.wait(call, seconds)
            elif not call.done():
                await asyncio.wait({call}, timeout=seconds)
        except asyncio.CancelledError:
            await self._stop(call)
            raise
        if not call.done():
            raise _DeadlineExceeded(await self._stop(call))
        if call.cancelled():
            raise NoToolResult("the tool cancelled itself")
        if error := call.exception():
            raise error if isinstance(error, _CALL_ERRORS) else _Raised(error)
        return call.result()

    async def _stop(self, call: asyncio.Future[Any]) -> str:
        """Cancel the call. If it does not end, count it as abandoned until it does. Returns what happened."""
        self._abandoned.add(call)
        call.add_done_callback(self._on_end)
        if isinstance(call, asyncio.Task | LoopCall):
            call.cancel()
            await asyncio.wait({call}, timeout=_GRACE_SECONDS)
        return "stopped" if call.done() else "abandoned, because it cannot be stopped"

    def _on_end(self, call: asyncio.Future[Any]) -> None:
        self._abandoned.discard(call)
        if not call.cancelled():
            call.exception()  # retrieved, so that asyncio logs no warning


class _DeadlineExceeded(Exception):
    """The deadline has passed; the message says what happened to the call."""


class _Raised(Exception):
    """Wraps an exception of the tool, which could otherwise end the event loop or look like a timeout."""

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause
        super().__init__()


_CALL_ERRORS = (_Raised, BadArguments, NoToolResult)
"""Exceptions of a call besides cancellations."""


async def _wrap_errors(work: Awaitable[object]) -> object:
    try:
        return await work
    except (asyncio.CancelledError, GeneratorExit, _Raised):
        raise
    except BaseException as error:  # SystemExit in a task would end the event loop
        raise _Raised(error) from None


async def _wrap_conversion_errors(work: Awaitable[object]) -> object:
    """Wrap exceptions of converting arguments and results, which must not end the tool loop either."""
    try:
        return await work
    except (asyncio.CancelledError, GeneratorExit, *_CALL_ERRORS):
        raise
    except BaseException as error:
        raise _Raised(error) from None


def _start_thread(work: Callable[[], object]) -> asyncio.Future[object]:
    """Run `work` in a new daemon thread: a thread that hangs blocks neither a pool nor the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()

    def settle(value: object, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error if isinstance(error, _CALL_ERRORS) else _Raised(error))

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as raised:  # SystemExit too
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="coterie-tool", daemon=True).start()
    return future


def _convert_arguments(tool: Tool, arguments: Mapping[str, Any], ctx: ToolContext) -> dict[str, Any]:
    try:
        return tool.convert_arguments(arguments, ctx)
    except BadArguments:
        raise
    except BaseException as error:  # parameter types may be user classes, which may raise anything
        raise _Raised(error) from None


EXCLUDE = "!"
"""First character of a pattern that excludes tools."""


def is_allowed(name: str, patterns: Sequence[str], *, is_built_in: bool) -> bool:
    """True if a list of patterns allows the tool.

    An empty list allows none. A built-in tool is allowed unless it is excluded, any other if a pattern names it too. A
    list that only excludes allows all others.
    """
    if not patterns or is_excluded(name, patterns):
        return False
    included = [pattern for pattern in patterns if not pattern.startswith(EXCLUDE)]
    return is_built_in or not included or _matches(name, included)


def is_excluded(name: str, patterns: Iterable[str]) -> bool:
    return _matches(name, (pattern[1:] for pattern in patterns if pattern.startswith(EXCLUDE)))


def _lists(patterns: Patterns) -> list[tuple[str, ...]]:
    own = tuple(one for one in patterns if isinstance(one, str))
    lists = [one for one in patterns if not isinstance(one, str)]
    return [*lists, own] if own or not lists else lists


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _no_result(tool: Tool, error: str, message: str) -> ToolResult:
    """Return the result of a call that started and gave no result: unknown for an unsafe tool."""
    return unknown_result(error, message) if tool.effect == "unsafe" else error_result(error, message)


def _unknown_tool(name: str, allowed: Mapping[str, Tool]) -> ToolResult:
    meant = closest_match(name, set(allowed))
    hint = f", did you mean {meant}?" if meant else ""
    return error_result("unknown_tool", f'you have no tool "{one_line(name)}"{hint}')
