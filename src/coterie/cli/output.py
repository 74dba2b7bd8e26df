"""What commands write: text that cannot control a terminal, JSON, tables, progress. And how they run coroutines."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.status import Status
    from rich.table import Table

T = TypeVar("T")

PROGRESS_DELAY_SECONDS = 1.0
SUGGESTED_AGENTS = 10
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def run_quietly(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine without a log, because the command itself says what went wrong."""
    import asyncio

    from coterie.cli import logs

    logs.silence()
    return asyncio.run(work)


def escape_controls(text: str) -> str:
    """`text` with control characters as escapes, so that it can neither forge a line nor control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_line(text: str = "") -> None:
    typer.echo(escape_controls(text))


def print_error(text: str) -> None:
    """Write a line to standard error, where a program that reads the result does not see it."""
    typer.echo(escape_controls(text), err=True)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console

    # A pipe has no width: rows are not wrapped there, so that a program finds whole words.
    Console(width=None if sys.stdout.isatty() else 10_000, highlight=False).print(build_table(columns, rows))


def build_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # Only the last column is wrapped on a narrow terminal.
        table.add_column(column, no_wrap=column != columns[-1], overflow="fold")
    for row in rows:
        table.add_row(*(Text(escape_controls(cell)) for cell in row))
    return table


def count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def local_time(instant: datetime) -> str:
    return instant.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z").strip()


def format_duration(duration: timedelta) -> str:
    """The two largest units, as in `2 h 5 min`; `now` when nothing is left."""
    seconds = -(-duration // timedelta(seconds=1))
    if seconds <= 0:
        return "now"
    parts = []
    for unit, size in _UNITS:
        count, seconds = divmod(seconds, size)
        parts.append(f"{count} {unit}" if count else "")
    first = next(index for index, part in enumerate(parts) if part)
    return " ".join(filter(None, parts[first : first + 2]))


def format_status(state: str, phase: str | None, tool: str | None) -> str:
    """What an agent is doing, as in `active, tool search`."""
    suffix = f" {tool}" if phase == "tool" and tool else ""
    return f"{state}, {phase}{suffix}" if phase else state


def format_progress(progress: float, total: float | None, message: str) -> str:
    """How far a tool call is, as in `40%, copying`; without a total its message, or the plain number."""
    if total:
        percent = f"{max(0, min(100, round(100 * progress / total)))}%"
        return f"{percent}, {message}" if message else percent
    return message or f"{progress:g}"


def no_such_agent(name: str, known: Collection[str]) -> str:
    """An error message that names the agent probably meant, or those that exist."""
    from coterie.text import closest_match, one_line

    if meant := closest_match(name, set(known)):
        hint = f'did you mean "{meant}"?'
    else:
        more = " and others" if len(known) > SUGGESTED_AGENTS else ""
        hint = f"choose one of {', '.join(list(known)[:SUGGESTED_AGENTS])}{more}"
    return f'there is no agent "{one_line(name)}": {hint}'


def sort_as_tree(items: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Each item after its parent, with its depth. Items whose `parent` is unknown are at the top."""
    ids = {item["id"] for item in items}
    children: dict[str | None, list[Mapping[str, Any]]] = {}
    for item in items:
        children.setdefault(item["parent"] if item["parent"] in ids else None, []).append(item)
    # Not recursive: a chain of messages may be longer than the interpreter's stack.
    for parent in (None, *children):  # after the top, cycles of parents, which coterie.toml can describe
        stack = [(item, 0) for item in reversed(children.pop(parent, []))]
        while stack:
            item, depth = stack.pop()
            yield item, depth
            stack += [(child, depth + 1) for child in reversed(children.pop(item["id"], []))]


class Progress:
    """Shows the progress of a command after a delay: animated on a terminal, line by line elsewhere."""

    def __init__(self, title: str, delay_seconds: float) -> None:
        self._title, self._is_shown = title, False
        self._status: Status | None = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(delay_seconds, self._show)
        self._timer.daemon = True

    @classmethod
    @contextmanager
    def show(cls, title: str, *, delay_seconds: float = PROGRESS_DELAY_SECONDS) -> Iterator[Progress]:
        progress = cls(title, delay_seconds)
        progress._timer.start()
        try:
            yield progress
        finally:
            progress._end()

    def update(self, title: str) -> None:
        with self._lock:
            self._title = title
            if self._status:
                self._status.update(title)
            elif self._is_shown:
                print_error(f"{title} …")

    def _show(self) -> None:
        with self._lock:
            self._is_shown = True
            if not sys.stderr.isatty():
                print_error(f"{self._title} …")
                return
            from rich.console import Console

            self._status = Console(stderr=True).status(self._title)
            self._status.start()

    def _end(self) -> None:
        self._timer.cancel()
        with self._lock:
            if self._status:
                self._status.stop()


def make_streams_tolerant() -> None:
    """Accept closed standard streams, escape characters that their encoding lacks, replace bytes that are no text."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - for the life of the process
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
