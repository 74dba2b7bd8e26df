"""What a conversation looks like on a terminal: lines that stay, and below them what still changes.

The changing part is the end of a reply as it grows and the line that is being typed. It is drawn anew whenever
something is said, so that neither gets into the other's way. Elsewhere than on a terminal there are only lines.
"""

from __future__ import annotations

import shutil
from typing import TextIO

from rich.cells import cell_len, chop_cells

from coterie.cli.output import harmless

PROMPT = "> "
NEWLINE = "⏎"
"""Stands for the end of a line inside what is being typed."""
_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"


class Screen:
    def __init__(self, out: TextIO, *, typing: bool = False) -> None:
        """`typing`: somebody types below what is said."""
        self._out, self._typing = out, typing
        self.moves = out.isatty()
        self._tail = ""
        self._typed, self._place = "", 0
        self._status = ""
        self._rows_above = 0

    def bold(self, text: str) -> str:
        return f"{_BOLD}{harmless(text)}{_PLAIN}" if self.moves else harmless(text)

    def dim(self, text: str) -> str:
        return f"{_DIM}{harmless(text)}{_PLAIN}" if self.moves else harmless(text)

    def say(self, *lines: str) -> None:
        """Lines that stay. They may be bold or dim; whatever came from elsewhere must be harmless already."""
        self._erase()
        self._end_tail()
        self._out.writelines(f"{line}\n" for line in lines)
        self._draw()

    def grow(self, text: str) -> None:
        """More of a reply. What fills a row stays, the rest still moves."""
        self._erase()
        *finished, self._tail = _rows(self._tail + text, self._width)
        self._out.writelines(f"{row}\n" for row in finished)
        self._draw()

    def end_growing(self) -> None:
        self._erase()
        self._end_tail()
        self._draw()

    def type(self, text: str, place: int) -> None:
        """The line that is being typed, with the cursor before character `place`."""
        self._erase()
        self._typed, self._place = text, place
        self._draw()

    def tell(self, status: str) -> None:
        """What goes on, in a row above the line being typed; empty: nothing does."""
        self._erase()
        self._status = status
        self._draw()

    def close(self) -> None:
        """Nothing moves any more."""
        self._erase()
        self._end_tail()
        self._typing = False
        self._out.flush()

    def _end_tail(self) -> None:
        if self._tail:
            self._out.write(f"{self._tail}\n")
            self._tail = ""

    @property
    def _width(self) -> int:
        # The last column stays free: what a terminal does with a character there is its own affair.
        return max(20, shutil.get_terminal_size().columns - 1)

    def _erase(self) -> None:
        if self.moves:
            up = f"\x1b[{self._rows_above}A" if self._rows_above else ""
            self._out.write(f"{up}\r\x1b[J")
            self._rows_above = 0

    def _draw(self) -> None:
        if not self.moves:
            self._out.flush()
            return
        rows = [self._tail] if self._tail else []
        if self._typing:
            rows += [self.dim(_cut(self._status, self._width)[0])] if self._status else []
            typed = _cut(PROMPT + _visible(self._typed), self._width)
            self._out.write("\n".join([*rows, *typed]))
            self._rows_above = len(rows) + len(typed) - 1
            self._put_cursor(len(typed), PROMPT + _visible(self._typed[: self._place]))
        elif rows:
            self._out.write(rows[0])
        self._out.flush()

    def _put_cursor(self, rows: int, before: str) -> None:
        upto = _cut(before, self._width)
        up = rows - len(upto)
        self._rows_above -= up
        self._out.write((f"\x1b[{up}A" if up else "") + f"\r\x1b[{cell_len(upto[-1])}C")


def plain(text: str) -> list[str]:
    """The lines of a text that somebody else wrote, unable to steer the terminal."""
    return [harmless(line.expandtabs(4)) for line in text.split("\n")]


def _visible(text: str) -> str:
    return harmless(text.replace("\n", NEWLINE).replace("\t", " "))


def _cut(text: str, width: int) -> list[str]:
    """Rows of at most `width` cells."""
    return chop_cells(text, width) or [""]


def _rows(text: str, width: int) -> list[str]:
    """`text` in rows of at most `width` cells, broken between words where that is possible."""
    rows: list[str] = []
    for line in plain(text):
        while cell_len(line) > width:
            head = _cut(line, width)[0]
            space = head.rfind(" ")
            end = space + 1 if space > 0 else len(head)
            rows.append(line[:end].rstrip())
            line = line[end:]
        rows.append(line)
    return rows
