"""User tools: loading `tools.py` and `tools/*.py`, and running them outside the society's event loop.

Loading: each file is loaded separately, so that a mistake in one affects no other. All files are modules of one package
that exists only in memory, so `from . import _helpers` finds `tools/_helpers.py`.

Async tools share one event loop in another thread. It lives long, so that calls can share loop-bound objects such as
HTTP clients. A watchdog logs a tool that blocks the loop and replaces the loop; calls that have not started move to the
new one. That tool gets its own loop from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import importlib.util
import inspect
import logging
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from coterie.agent.tools import (
    OnLoop,
    OnToolLoop,
    Tool,
    ToolContext,
    get_tool,
    safe_message,
)
from coterie.errors import Problem
from coterie.ids import id_for
from coterie.problem_texts import ProblemText
from coterie.text import one_line, to_storable

log = logging.getLogger(__name__)

_PACKAGE = "coterie_society_"
_TOP = "_tools"
"""Module name of `tools.py` in the package; `tools` may be a file in the folder."""


@dataclass(frozen=True, slots=True)
class UserTools:
    tools: tuple[Tool, ...]
    problems: tuple[Problem, ...]
    """Files and tools that were skipped, with the reason."""


def load_user_tools(folder: Path, reserved_names: Collection[str] = ()) -> UserTools:
    """Import the files and collect their tools. Tools with a reserved or repeated name are skipped."""
    package = _PACKAGE + id_for(str(folder.resolve()))[:12]
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]  # so that the files are read again
    found: dict[str, tuple[Tool, str]] = {}
    problems: list[Problem] = []
    for file in _files(folder):
        location = str(file.relative_to(folder))
        try:
            module = import_tool_file(f"{package}.{_TOP if file.parent == folder else file.stem}", file)
            tools = _tools_in(module)
        except BaseException as error:  # a file that raises SystemExit or KeyboardInterrupt must not end the server
            problems.append(_problem(file, location, error))
            continue
        problems += _collect_tools(tools, location, found, reserved_names)
    return UserTools(tuple(_off_the_loop(tool) for tool, _ in found.values()), tuple(problems))


def _off_the_loop(tool: Tool) -> Tool:
    """Move an async tool from the society's event loop to the tool loop, because user code may block."""
    return replace(tool, run=OnToolLoop(tool.run.function)) if isinstance(tool.run, OnLoop) else tool


def import_tool_file(module: str, file: Path) -> ModuleType:
    """Import the module that declares a tool: a user file, a program's main file or any other module."""
    if module in sys.modules and module != "__main__":
        return sys.modules[module]
    package, _, name = module.rpartition(".")
    if package.startswith(_PACKAGE):
        holder = sys.modules.setdefault(package, ModuleType(package))
        holder.__path__ = [str(file.parent / "tools" if name == _TOP else file.parent)]
    elif module == "__main__":
        module = "__coterie_main__"  # as "__main__" it would start the program again
    else:
        return importlib.import_module(module)
    spec = importlib.util.spec_from_file_location(module, file, loader=_UncachedLoader(module, str(file)))
    assert spec and spec.loader  # noqa: S101
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[module]
        raise
    return loaded


class _UncachedLoader(SourceFileLoader):
    """Loads without bytecode cache, so that a change counts at once and the folder gets no `__pycache__`."""

    def path_stats(self, path: Any) -> Mapping[str, Any]:
        raise OSError


def _files(folder: Path) -> list[Path]:
    """Return the tool files. Names with a leading underscore are helpers for the other files."""
    several = sorted(path for path in (folder / "tools").glob("*.py") if not path.name.startswith("_"))
    return [path for path in (folder / "tools.py", *several) if path.is_file()]


def _tools_in(module: ModuleType) -> Iterable[Tool]:
    return [tool for value in vars(module).values() if (tool := get_tool(value))]


def _collect_tools(
    tools: Iterable[Tool], location: str, found: dict[str, tuple[Tool, str]], reserved_names: Collection[str]
) -> Iterable[Problem]:
    for tool in tools:
        if tool.name in reserved_names:
            yield Problem(location, ProblemText("tool_is_built_in", name=tool.name))
            continue
        kept, where = found.setdefault(tool.name, (tool, location))
        if kept is not tool:  # a file that imports a tool of another file has the same object
            yield Problem(location, ProblemText("tool_is_in", name=tool.name, where=where))


def _problem(file: Path, location: str, error: BaseException) -> Problem:
    line = _line(file, error)
    words = error.msg if isinstance(error, SyntaxError) and isinstance(error.msg, str) else safe_message(error)
    sentence = f"{type(error).__name__}: {one_line(to_storable(words), 300)}" if words else type(error).__name__
    text = ProblemText("not_loaded_in_line" if line else "not_loaded", line=line, why=sentence)
    return Problem(location, text)


def _line(file: Path, error: BaseException) -> int | None:
    """Return the line of the error in `file`; for an error in an imported file, the line of the import."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(file)), None)


BLOCKED_AFTER = timedelta(seconds=5)
"""A loop that starts nothing for this long counts as blocked."""
PROBES_PER_PERIOD = 5
"""Probes of a loop in that time. A suspended process misses only one, however long it is suspended."""
_MAX_FRAMES = 5
_SHARED = ""
"""Key of the shared loop. Any other key is the name of a tool with its own loop."""
_END_OF_STREAM = object()

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, object]]


class LoopCallbacks:
    """Callbacks for an event loop, from any thread. Those that wait together wake the loop once.

    Each wake-up of another thread is a system call that hands the interpreter lock over.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_woken = False

    def put(self, callback: Callable[..., object], *arguments: Any) -> None:
        """`RuntimeError`: the loop is closed."""
        self._waiting.append((callback, arguments))
        if not self._is_woken:
            self._is_woken = True
            try:
                self.loop.call_soon_threadsafe(self._run)
            except RuntimeError:
                self._is_woken = False  # the next callback must not wait for a wake-up that never comes
                raise

    def _run(self) -> None:
        self._is_woken = False  # first: a callback that is added from now on wakes the loop again
        while self._waiting:
            callback, arguments = self._waiting.popleft()
            try:
                callback(*arguments)
            except Exception as error:  # the others must run
                self.loop.call_exception_handler({"message": "a callback of a tool call failed", "exception": error})


class LoopCall(asyncio.Future[Any]):
    """A call on a tool loop, as a future of the caller's loop. It is done when the tool has ended."""

    def __init__(self, tool: str, agent: str, work: Work, home: LoopCallbacks) -> None:
        """`home`: callbacks for the caller's loop."""
        super().__init__()
        self.tool, self.agent = tool, agent
        self._work, self._home = work, home
        self._lock = threading.Lock()
        self._task: asyncio.Task[object] | None = None
        self._runs_on: asyncio.AbstractEventLoop | None = None
        self._is_cancelled = False

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the tool. A call that has not started never starts."""
        with self._lock:
            self._is_cancelled = True
            task, loop = self._task, self._runs_on
        if task is None or loop is None:
            return super().cancel(msg)
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the task has ended
            loop.call_soon_threadsafe(task.cancel)
        return True

    def begin(self) -> asyncio.Task[object] | None:
        """Start the tool on the running loop. None: it was cancelled, or another loop has started it."""
        with self._lock:
            if self._is_cancelled or self._task is not None:
                return None
            self._runs_on = asyncio.get_running_loop()
            self._task = self._runs_on.create_task(self._work())
        self._task.add_done_callback(self._on_done)
        return self._task

    def _on_done(self, task: asyncio.Task[object]) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed
            self._home.put(self._settle, task)

    def _settle(self, task: asyncio.Task[object]) -> None:
        if self.done():
            return
        if task.cancelled():
            super().cancel()
        elif error := task.exception():
            self.set_exception(error)
        else:
            self.set_result(task.result())


class ToolLoops:
    def __init__(self, blocked_after: timedelta = BLOCKED_AFTER) -> None:
        self._tick = blocked_after.total_seconds() / PROBES_PER_PERIOD
        self._blocked_after = blocked_after
        self._lock = threading.Lock()
        self._loops: dict[str, _ToolLoop] = {}
        """Loops that accept calls."""
        self._retired: list[_ToolLoop] = []
        self._isolated: set[str] = set()
        """Names of tools that have blocked a loop."""
        self._home: LoopCallbacks | None = None
        """For the loop of the last caller."""
        self._main: _LoopProbe | None = None
        self._watcher: threading.Thread | None = None
        self._ended = threading.Event()
        self.blocked_count = 0
        """How often a tool has blocked its loop."""

    def start(self, tool: str, agent: str, work: Work) -> LoopCall:
        """Run `work` on the loop of `tool`. The future belongs to the running loop."""
        loop = asyncio.get_running_loop()
        if self._home is None or self._home.loop is not loop:
            self._home = LoopCallbacks(loop)
        call = LoopCall(tool, agent, work, self._home)
        with self._lock:
            self._loop_for(tool).add(call, contextvars.copy_context())
            self._start_watcher()
        return call

    def watch_running_loop(self) -> None:
        """Log from now on, with a stack trace, when the running loop is blocked."""
        with self._lock:
            self._main = _LoopProbe(asyncio.get_running_loop())
            self._main_thread = threading.get_ident()
            self._start_watcher()

    async def close(self, grace: float) -> None:
        """Stop all loops. Blocked threads end with the process."""
        self._ended.set()
        with self._lock:
            loops = [*self._loops.values(), *self._retired]
            self._loops, self._retired = {}, []
        for loop in loops:
            loop.stop()
        if loops:
            await asyncio.gather(*(asyncio.to_thread(loop.thread.join, grace) for loop in loops))

    def _loop_for(self, tool: str) -> _ToolLoop:
        key = tool if tool in self._isolated else _SHARED
        if key not in self._loops:
            self._loops[key] = _ToolLoop()
        return self._loops[key]

    # The watchdog, in its own thread

    def _start_watcher(self) -> None:
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="coterie-watchdog", daemon=True)
            self._watcher.start()

    def _watch(self) -> None:
        while not self._ended.wait(self._tick):
            with self._lock:
                loops, main = tuple(self._loops.items()), self._main
                self._retired = [loop for loop in self._retired if loop.thread.is_alive()]
            for key, loop in loops:
                if loop.probe.missed_probes() == PROBES_PER_PERIOD:
                    self._replace(key, loop)
            if main and main.missed_probes() == PROBES_PER_PERIOD:
                where = _stack(self._main_thread)
                message = "the event loop of the society is blocked for more than %g s by %s:\n%s"
                log.warning(message, self._blocked_after.total_seconds(), _task_name(main.loop), where)

    def _replace(self, key: str, loop: _ToolLoop) -> None:
        at_fault = loop.calls_at_fault()
        names = " or ".join(f"{call.tool} (called by {call.agent})" for call in at_fault) or "unknown"
        log.warning(
            "an async tool blocks its event loop for more than %g s: %s. Other tools go on in a new loop. Make it a"
            " sync function, which runs in a thread, or use process=True\n%s",
            self._blocked_after.total_seconds(), names, _stack(loop.thread.ident),
        )  # fmt: skip
        with self._lock:
            if self._loops.get(key) is not loop:
                return
            self.blocked_count += 1
            del self._loops[key]
            self._retired.append(loop)
            if len(at_fault) == 1:
                self._isolated.add(at_fault[0].tool)
            for call, context in loop.retire():
                self._loop_for(call.tool).add(call, context)


class _LoopProbe:
    """Detects whether a loop still runs callbacks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._answered, self._missed = True, 0

    def missed_probes(self) -> int:
        """Return how many probes in a row the loop has missed. Call it once per tick."""
        if not self._answered:
            self._missed += 1
            return self._missed
        self._answered, self._missed = False, 0
        with contextlib.suppress(RuntimeError):  # closed
            self.loop.call_soon_threadsafe(self._answer)
        return 0

    def _answer(self) -> None:
        self._answered = True


_CALL: contextvars.ContextVar[LoopCall | None] = contextvars.ContextVar("coterie_tool_call", default=None)


class _ToolLoop:
    """A thread with an event loop. Public methods may be called from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._make_task)
        self._callbacks = LoopCallbacks(self._loop)
        self._calls: dict[LoopCall, contextvars.Context] = {}
        """Calls that have not ended."""
        self._begun: set[LoopCall] = set()
        self._tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], LoopCall] = weakref.WeakKeyDictionary()
        """The call of each task, including tasks that a tool created."""
        self._is_retired = self._is_stopped = False
        self.probe = _LoopProbe(self._loop)
        self.thread = threading.Thread(target=self._run, name="coterie-async-tools", daemon=True)
        self.thread.start()

    def add(self, call: LoopCall, context: contextvars.Context) -> None:
        self._calls[call] = context
        self._callbacks.put(context.run, self._begin, call)

    def retire(self) -> Iterator[tuple[LoopCall, contextvars.Context]]:
        """Accept no more calls and stop when the running ones end. Returns the calls that have not started."""
        self._is_retired = True
        waiting = [(call, context) for call, context in self._calls.items() if call not in self._begun]
        for call, _ in waiting:
            self._calls.pop(call, None)
        self._loop.call_soon_threadsafe(self._stop_if_done)
        return iter(waiting)

    def calls_at_fault(self) -> tuple[LoopCall, ...]:
        """Return the call whose task runs now; if there is none, all running calls."""
        task = asyncio.current_task(self._loop)
        if task is not None and (call := self._tasks.get(task)):
            return (call,)
        return tuple(self._begun)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stop)

    # In its own thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._run_until_stopped()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _run_until_stopped(self) -> None:
        while not self._is_stopped:
            # A task of a tool that raises one of these also ends `run_forever`. All other calls must go on.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    def _stop(self) -> None:
        self._is_stopped = True
        self._loop.stop()

    def _begin(self, call: LoopCall) -> None:
        _CALL.set(call)
        task = call.begin()
        if task is None:
            self._end(call)
        else:
            self._begun.add(call)
            task.add_done_callback(lambda _: self._end(call))

    def _end(self, call: LoopCall) -> None:
        self._calls.pop(call, None)
        self._begun.discard(call)
        self._stop_if_done()

    def _stop_if_done(self) -> None:
        if self._is_retired and not self._begun:
            self._stop()

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **options)
        context = options.get("context")
        if call := (_CALL.get() if context is None else context.get(_CALL)):
            self._tasks[task] = call
        return task


def _stack(thread: int | None) -> str:
    """Return the innermost frames of a thread."""
    frame = sys._current_frames().get(thread or 0)
    return "".join(traceback.format_stack(frame)[-_MAX_FRAMES:]) if frame else ""


def _task_name(loop: asyncio.AbstractEventLoop) -> str:
    task = asyncio.current_task(loop)
    return task.get_name() if task else "a callback"


# Objects of the society's loop, made usable on a tool loop


def bridge_context(ctx: ToolContext, home: asyncio.AbstractEventLoop) -> ToolContext:
    """Return `ctx` for use on another loop. Its async methods run on `home`."""
    return replace(
        ctx,
        send=_bridge_function(ctx.send, home),
        ask=_bridge_function(ctx.ask, home),
        report_progress=_bridge_function(ctx.report_progress, home),
        sample=None,
        artifacts=cast(Any, _Bridge(ctx.artifacts, home)),
        router=cast(Any, _Bridge(ctx.router, home)),
    )


class _Bridge:
    """Proxy whose async methods run on the loop of the target."""

    def __init__(self, target: object, home: asyncio.AbstractEventLoop) -> None:
        self._target, self._home = target, home

    def __getattr__(self, name: str) -> Any:
        return _bridge(getattr(self._target, name), self._home)


def _bridge(value: Any, home: asyncio.AbstractEventLoop) -> Any:
    if inspect.isasyncgenfunction(value):
        return lambda *args, **named: _iterate_on(value(*args, **named), home)
    return _bridge_function(value, home) if inspect.iscoroutinefunction(value) else value


def _bridge_function(value: Any, home: asyncio.AbstractEventLoop) -> Any:
    async def call(*args: Any, **named: Any) -> Any:
        here = asyncio.get_running_loop()
        named = {name: _bridge_argument(one, here) for name, one in named.items()}
        return await _run_on(home, value(*(_bridge_argument(one, here) for one in args), **named))

    return call


def _bridge_argument(value: Any, here: asyncio.AbstractEventLoop) -> Any:
    """Wrap a stream of the tool, so that it is read on the tool's loop."""
    return _iterate_on(value, here) if isinstance(value, AsyncIterable) else value


def _run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


async def _iterate_on(items: AsyncIterable[T], home: asyncio.AbstractEventLoop) -> AsyncIterator[T]:
    """Yield `items`, each fetched on `home`."""
    iterator = aiter(items)

    async def fetch() -> Any:
        return await anext(iterator, _END_OF_STREAM)

    async def close() -> None:
        if hasattr(iterator, "aclose"):
            await iterator.aclose()

    try:
        while (item := await _run_on(home, fetch())) is not _END_OF_STREAM:
            yield item
    finally:
        await _run_on(home, close())
