"""What people and programs see: text that cannot harm a terminal, JSON, tables, progress."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.status import Status
    from rich.table import Table

PROGRESS_AFTER = 1.0
"""Seconds. Whatever is done by then needs no explanation."""


def harmless(text: str) -> str:
    """`text` with control characters shown as escapes: it can neither forge a line nor steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(text: str = "") -> None:
    typer.echo(harmless(text))


def say_aside(text: str) -> None:
    """To people, on standard error; a program reading the result does not see it."""
    typer.echo(harmless(text), err=True)


def say_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))


def say_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console

    # A pipe has no width: there a row is as long as it needs to be, so that whatever reads it finds whole words.
    Console(width=None if sys.stdout.isatty() else 10_000, highlight=False).print(table_of(columns, rows))


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # The last is the long one: where the terminal is narrow, it alone is wrapped.
        table.add_column(column, no_wrap=column != columns[-1], overflow="fold")
    for row in rows:
        table.add_row(*(Text(harmless(cell)) for cell in row))
    return table


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def moment(instant: datetime) -> str:
    """In the time zone of whoever reads it."""
    return instant.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z").strip()


class Progress:
    """Says what is going on once it has taken a second: moving on a terminal, line by line elsewhere."""

    def __init__(self, title: str) -> None:
        self._title, self._shown = title, False
        self._status: Status | None = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(PROGRESS_AFTER, self._show)
        self._timer.daemon = True

    def tell(self, title: str) -> None:
        with self._lock:
            self._title = title
            if self._status:
                self._status.update(title)
            elif self._shown:
                say_aside(f"{title} …")

    def _show(self) -> None:
        with self._lock:
            self._shown = True
            if not sys.stderr.isatty():
                say_aside(f"{self._title} …")
                return
            from rich.console import Console

            self._status = Console(stderr=True).status(self._title)
            self._status.start()

    def _end(self) -> None:
        self._timer.cancel()
        with self._lock:
            if self._status:
                self._status.stop()

    @classmethod
    @contextmanager
    def shown(cls, title: str) -> Iterator[Progress]:
        progress = cls(title)
        progress._timer.start()
        try:
            yield progress
        finally:
            progress._end()


def forgiving_streams() -> None:
    """Neither a closed stream nor a character that its encoding lacks is a reason to fail."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - for the life of the process
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
