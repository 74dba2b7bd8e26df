"""The tools of a society: who reaches which, and calls that always come to a result."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

from coterie.agent.builtins import SEND_MESSAGE
from coterie.agent.tool_output import Died, NoResult, encode, fit, raised
from coterie.agent.tools import (
    BadArguments,
    InProcess,
    InThread,
    OnLoop,
    OnToolLoop,
    Tool,
    ToolContext,
    ToolResult,
    failed,
    unknown,
)
from coterie.agent.user_tools import BLOCKED_AFTER, LoopCall, ToolLoops, across, run_in_process
from coterie.errors import Problem
from coterie.llm.types import ToolSpec
from coterie.redaction import redact
from coterie.text import nearest, one_line

log = logging.getLogger(__name__)

Patterns = Sequence[str | tuple[str, ...]]
"""Patterns of tool names, of which one must match; or several such lists, each of which must have one that matches."""
Encoded = str | bytes | ToolResult
Said = TypeVar("Said", str | bytes | ToolResult, ToolResult)

DEADLINE = timedelta(seconds=120)
MAX_ABANDONED = 32
"""Calls that never came back and could not be stopped; past that no more are started that might join them."""
_RESERVED = frozenset({SEND_MESSAGE.name})
"""What the runtime does itself, in the transaction of the result."""
_MAX_FRAMES = 10
_GRACE = 0.5
"""Seconds that an async tool has to end once it is cancelled."""


class Toolbox:
    def __init__(
        self,
        tools: Iterable[Tool] = (),
        *,
        deadline: timedelta = DEADLINE,
        max_abandoned: int = MAX_ABANDONED,
        blocked_after: timedelta = BLOCKED_AFTER,
    ) -> None:
        """`blocked_after`: an event loop that runs nothing new for this long is blocked."""
        self.deadline, self._max_abandoned = deadline, max_abandoned
        """For a tool that names none of its own."""
        self.secrets: Sequence[str] = ()
        """Keys that no model needs to see, and no log: taken out of whatever tools say."""
        self._sources: dict[str, tuple[Tool, ...]] = {"built-in": tuple(tools)}
        self._tools: dict[str, Tool] = {}
        self._reach: dict[Patterns, dict[str, Tool]] = {}
        self._offers: dict[Patterns, tuple[ToolSpec, ...]] = {}
        self._abandoned: set[asyncio.Future[Any]] = set()
        self._loops = ToolLoops(blocked_after)
        self._sort()

    # Which tools there are

    def adopt(self, source: str, tools: Iterable[Tool]) -> list[Problem]:
        """`source` offers these from now on, and no others. A name that an earlier source has stays that one's."""
        self._sources[source] = tuple(tools)
        return [problem for problem in self._sort() if problem.place == source]

    def find(self, name: str, patterns: Patterns) -> Tool | None:
        return self._within(patterns).get(name)

    def specs(self, patterns: Patterns) -> tuple[ToolSpec, ...]:
        """What an agent with that list can be offered."""
        return tuple(tool.spec for tool in self._within(patterns).values())

    def offered(self, patterns: tuple[str | tuple[str, ...], ...]) -> tuple[ToolSpec, ...]:
        """All that its model is told of: the same, and `send_message`, which the runtime does itself."""
        if patterns not in self._offers:
            self._offers[patterns] = (SEND_MESSAGE, *self.specs(patterns))
        return self._offers[patterns]

    def _sort(self) -> list[Problem]:
        self._tools, problems = {}, list[Problem]()
        for source, tools in self._sources.items():
            for tool in tools:
                if tool.name in _RESERVED or self._tools.setdefault(tool.name, tool) is not tool:
                    problems.append(Problem(source, f"the tool {tool.name} is left out: there is one of that name"))
        self._reach.clear()
        self._offers.clear()
        return problems

    def _within(self, patterns: Patterns) -> dict[str, Tool]:
        key = tuple(patterns)
        if key not in self._reach:
            own = tuple(one for one in key if isinstance(one, str))
            lists = [one for one in key if not isinstance(one, str)]
            if own or not lists:
                lists.append(own)
            self._reach[key] = {
                name: tool for name, tool in self._tools.items() if all(_matches(name, patterns) for patterns in lists)
            }
        return self._reach[key]

    # Calling one

    @property
    def abandoned(self) -> int:
        """Calls that are past their deadline, cannot be stopped and are still running."""
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
        """Always a result, whatever the tool does; only the cancellation of the calling task passes through.

        `deadline`: the society's, which a tool's own replaces. It is real time, since tools live in it.
        """
        tool = self.find(name, patterns)
        if tool is None:
            return _unknown(name, self._within(patterns))
        if self.abandoned >= self._max_abandoned and not isinstance(tool.run, InProcess):
            return failed("tools_stuck", f"{self.abandoned} earlier calls never came back: the society needs a restart")
        allowed = tool.deadline or deadline or self.deadline
        try:
            return await fit(tool, self._redacted(await self._run(tool, arguments, ctx, allowed.total_seconds())), ctx)
        except BadArguments as error:
            return failed("bad_arguments", f"{name} was not called: {error}")
        except Died as error:
            return _ended_without(tool, "no_result", f"{name}: {error}")
        except NoResult as error:
            return failed("no_result", f"{name}: {error}")
        except _Late as late:
            log.warning(
                "the tool %s, called by %s, did not end within %s; it was %s", name, ctx.agent_id, allowed, late
            )
            words = f"{name} did not end within {allowed.total_seconds():g} s and was {late}"
            return _ended_without(tool, "tool_timeout", words)
        except _Raised as error:
            result = self._redacted(raised(name, error.cause))
            frames = "".join(traceback.format_tb(error.cause.__traceback__, limit=-_MAX_FRAMES))
            log.warning("%s\n%s", result.text, frames)
            return result
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # SystemExit out of an owner's class would end the event loop
            log.exception("the tool %s could not be run", name)
            return self._redacted(raised(name, error))

    def _redacted(self, said: Said) -> Said:
        match said:
            case str():
                return redact(said, self.secrets)
            case ToolResult():
                return replace(said, text=redact(said.text, self.secrets))
        return said

    @property
    def blocked_loops(self) -> int:
        """How often an async tool has blocked the event loop of the tools."""
        return self._loops.blocked

    def watch_loop(self) -> None:
        """From now on it is logged when the running loop is blocked."""
        self._loops.watch_running_loop()

    async def close(self) -> None:
        """Tell what was left behind to stop, once more. Threads cannot be told; they end with the process."""
        left = tuple(self._abandoned)
        for call in left:
            call.cancel()
        if left:
            await asyncio.wait(left, timeout=_GRACE)
        await self._loops.close(_GRACE)

    async def _run(self, tool: Tool, arguments: Mapping[str, Any], ctx: ToolContext, seconds: float) -> Encoded:
        match tool.run:
            case OnLoop(function):
                accepted = _accepted(tool, arguments, ctx)
                return encode(await self._within_time(asyncio.ensure_future(_guarded(function(**accepted))), seconds))
            # What the owner wrote stays off this loop: arguments and results may hold code of theirs, too.
            case OnToolLoop() as apart:
                bridged = across(ctx, asyncio.get_running_loop())

                async def work() -> Encoded:
                    return encode(await _guarded(apart.function(**_accepted(tool, arguments, bridged))))

                call = self._loops.start(tool.name, ctx.agent_id, lambda: _kept_apart(work()))
                return cast(Encoded, await self._within_time(call, seconds))
            case InThread(function):

                def run_in_thread() -> Encoded:
                    accepted = _accepted(tool, arguments, ctx)
                    try:
                        value = function(**accepted)
                    except BaseException as error:  # SystemExit is an answer like any other
                        raise _Raised(error) from None
                    return encode(value)

                return cast(Encoded, await self._within_time(_in_thread(run_in_thread), seconds))
            case InProcess() as run:
                await self._within_time(_in_thread(lambda: _accepted(tool, arguments, ctx)), seconds)
                timer = asyncio.timeout(seconds)
                try:
                    async with timer:
                        return await run_in_process(run, arguments, ctx)
                except TimeoutError:
                    if timer.expired():
                        raise _Late("killed") from None
                    raise

    async def _within_time(self, call: asyncio.Future[Any], seconds: float) -> Any:
        try:
            await asyncio.sleep(0)  # many have nothing to wait for, and need no timer
            if not call.done():
                await asyncio.wait({call}, timeout=seconds)
        except asyncio.CancelledError:
            await self._stop(call)
            raise
        if not call.done():
            raise _Late(await self._stop(call))
        if call.cancelled():
            raise NoResult("it was cancelled from within")
        if error := call.exception():
            raise error if isinstance(error, _OURS) else _Raised(error)
        return call.result()

    async def _stop(self, call: asyncio.Future[Any]) -> str:
        """Cancel it; what does not listen is left behind, and counted until it ends after all."""
        self._abandoned.add(call)
        call.add_done_callback(self._ended)
        if isinstance(call, asyncio.Task | LoopCall):
            call.cancel()
            await asyncio.wait({call}, timeout=_GRACE)
        return "stopped" if call.done() else "left behind, for it cannot be stopped"

    def _ended(self, call: asyncio.Future[Any]) -> None:
        self._abandoned.discard(call)
        if not call.cancelled():
            call.exception()  # looked at, so that nobody warns of it


class _Late(Exception):
    """The deadline has passed; the message says what became of the call."""


class _Raised(Exception):
    """The tool's own exception, kept apart from ours: one of them might end the event loop, or pose as a timeout."""

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause
        super().__init__()


_OURS = (_Raised, BadArguments, NoResult)
"""What a call raises besides cancellations. The tool's own exceptions are all `_Raised`."""


async def _guarded(work: Awaitable[object]) -> object:
    try:
        return await work
    except (asyncio.CancelledError, GeneratorExit, _Raised):
        raise
    except BaseException as error:  # SystemExit in a task would end the event loop
        raise _Raised(error) from None


async def _kept_apart(work: Awaitable[object]) -> object:
    """Arguments are made and results encoded beside the tool itself; what these raise must not end its loop either."""
    try:
        return await work
    except (asyncio.CancelledError, GeneratorExit, *_OURS):
        raise
    except BaseException as error:
        raise _Raised(error) from None


def _in_thread(work: Callable[[], object]) -> asyncio.Future[object]:
    """A thread of its own, that nobody waits for at exit: one that hangs takes no place in a pool from others."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()

    def settle(value: object, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error if isinstance(error, _OURS) else _Raised(error))

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as raised:  # SystemExit is an answer like any other
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever asked
            loop.call_soon_threadsafe(settle, value, error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="coterie-tool", daemon=True).start()
    return future


def _accepted(tool: Tool, arguments: Mapping[str, Any], ctx: ToolContext) -> dict[str, Any]:
    try:
        return tool.accept(arguments, ctx)
    except BadArguments:
        raise
    except BaseException as error:  # parameters may be of the owner's classes, whose code may raise anything
        raise _Raised(error) from None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _ended_without(tool: Tool, error: str, words: str) -> ToolResult:
    """The call began and gave no result: of an unsafe one nobody knows whether it took effect."""
    return unknown(error, words) if tool.effect == "unsafe" else failed(error, words)


def _unknown(name: str, reached: Mapping[str, Tool]) -> ToolResult:
    meant = nearest(name, set(reached))
    hint = f", did you mean {meant}?" if meant else ""
    return failed("unknown_tool", f'you have no tool "{one_line(name)}"{hint}')
