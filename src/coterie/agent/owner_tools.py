"""The owner's own tools: `tools.py` and `tools/*.py` in the society's folder.

Each file is loaded by itself, so that one with a mistake keeps nobody else's tools away. All of them are modules of one
package that exists in memory only; so `from . import _helpers` finds `tools/_helpers.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from coterie.agent.tool_output import message_of
from coterie.agent.tools import OnLoop, OnToolLoop, Tool, tool_of
from coterie.errors import Problem
from coterie.ids import id_for
from coterie.text import clean, one_line

_PACKAGE = "coterie_society_"
_TOP = "_tools"
"""What `tools.py` is called inside the package, where `tools` may be a file of the folder."""


@dataclass(frozen=True, slots=True)
class OwnerTools:
    tools: tuple[Tool, ...]
    problems: tuple[Problem, ...]
    """Each file or tool that was left out, and why."""


def load_owner_tools(folder: Path, taken: Collection[str] = ()) -> OwnerTools:
    """Run the owner's files and collect what they declare. A name among `taken`, or met before, is left out."""
    package = _PACKAGE + id_for(str(folder.resolve()))[:12]
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]  # loaded before, and read again now
    found: dict[str, tuple[Tool, str]] = {}
    problems: list[Problem] = []
    for file in _files(folder):
        place = str(file.relative_to(folder))
        try:
            module = import_tool_file(f"{package}.{_TOP if file.parent == folder else file.stem}", file)
            tools = _tools_in(module)
        except BaseException as error:  # a file that raises SystemExit or KeyboardInterrupt must not end the server
            problems.append(_problem(file, place, error))
            continue
        problems += _collect(tools, place, found, taken)
    return OwnerTools(tuple(_off_the_loop(tool) for tool, _ in found.values()), tuple(problems))


def _off_the_loop(tool: Tool) -> Tool:
    """The owner's code may block, so none of it runs on the event loop of the society."""
    return replace(tool, run=OnToolLoop(tool.run.function)) if isinstance(tool.run, OnLoop) else tool


def import_tool_file(module: str, file: Path) -> ModuleType:
    """The module a tool was declared in: one of the owner's files, a program's main file, or any other module."""
    if module in sys.modules and module != "__main__":
        return sys.modules[module]
    package, _, name = module.rpartition(".")
    if package.startswith(_PACKAGE):
        holder = sys.modules.setdefault(package, ModuleType(package))
        holder.__path__ = [str(file.parent / "tools" if name == _TOP else file.parent)]
    elif module == "__main__":
        module = "__coterie_main__"  # under its own name it would start the program again
    else:
        return importlib.import_module(module)
    spec = importlib.util.spec_from_file_location(module, file, loader=_Source(module, str(file)))
    assert spec and spec.loader  # noqa: S101
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[module]
        raise
    return loaded


class _Source(SourceFileLoader):
    """Keeps no bytecode: the file as it is now is what runs, however soon after a change, and the folder stays tidy."""

    def path_stats(self, path: Any) -> Mapping[str, Any]:
        raise OSError


def _files(folder: Path) -> list[Path]:
    """Those that begin with an underscore are for the others to import."""
    several = sorted(path for path in (folder / "tools").glob("*.py") if not path.name.startswith("_"))
    return [path for path in (folder / "tools.py", *several) if path.is_file()]


def _tools_in(module: ModuleType) -> Iterable[Tool]:
    return [tool for value in vars(module).values() if (tool := tool_of(value))]


def _collect(
    tools: Iterable[Tool], place: str, found: dict[str, tuple[Tool, str]], taken: Collection[str]
) -> Iterable[Problem]:
    for tool in tools:
        if tool.name in taken:
            yield Problem(place, f"the tool {tool.name} is left out: a built-in tool has that name")
            continue
        kept, where = found.setdefault(tool.name, (tool, place))
        if kept is not tool:  # the same one comes again where another file imports it
            yield Problem(place, f"the tool {tool.name} is left out: {where} has one of that name")


def _problem(file: Path, place: str, error: BaseException) -> Problem:
    line = _line(file, error)
    words = error.msg if isinstance(error, SyntaxError) and isinstance(error.msg, str) else message_of(error)
    sentence = f"{type(error).__name__}: {one_line(clean(words), 300)}" if words else type(error).__name__
    return Problem(f"{place}: line {line}" if line else place, f"cannot be loaded: {sentence}")


def _line(file: Path, error: BaseException) -> int | None:
    """Where in the file it went wrong; for a mistake in a file it imports, the line of the import."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(file)), None)
