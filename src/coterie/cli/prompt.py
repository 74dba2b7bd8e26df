"""The prompt of a chat on a terminal, below the growing reply and the agent's status."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import in_terminal
from prompt_toolkit.data_structures import Size
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output
from rich.cells import cell_len, chop_cells

from coterie.cli.chat import Screen, printable_lines
from coterie.cli.output import escape_controls

PROMPT = "> "


class _KeyboardInput(Vt100Input):
    """Keeps raw mode while output is written: otherwise the terminal echoes and translates keys typed meanwhile."""

    keeps_raw_mode = False

    def cooked_mode(self) -> AbstractContextManager[None]:
        return nullcontext() if self.keeps_raw_mode else super().cooked_mode()


class PromptScreen(Screen):
    """A screen with a line to type in at its bottom.

    `on_line` gets each line that was entered. `on_interrupt` is called for Ctrl-C, `on_close` for Ctrl-D and for a
    terminal that is gone.
    """

    shows_status = True

    def __init__(
        self,
        keyboard: TextIO,
        out: TextIO,
        *,
        on_line: Callable[[str], None],
        on_interrupt: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(out)
        self._on_line, self._on_interrupt, self._on_close = on_line, on_interrupt, on_close
        self._draft = self._status = self._unwritten = ""
        self._writing: asyncio.Task[None] | None = None
        self._input = _KeyboardInput(keyboard)
        self._session: PromptSession[str] = PromptSession(
            self._prompt,
            key_bindings=self._key_bindings(),
            enable_suspend=True,
            erase_when_done=True,
            reserve_space_for_menu=0,
            input=self._input,
            # Not every terminal answers cursor position requests, and a prompt without menus needs no answer.
            output=Vt100_Output(out, _terminal_size, term=os.environ.get("TERM"), enable_cpr=False),
        )

    def _key_bindings(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("c-c")
        def interrupt(event: KeyPressEvent) -> None:
            self._on_interrupt()

        @keys.add("escape", "enter")
        def insert_line_break(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        return keys

    async def run(self) -> None:
        """Read lines until Ctrl-D."""
        loop = asyncio.get_running_loop()
        # Ctrl-C is a key in raw mode; other programs send the signal.
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        try:
            with self._input.raw_mode():  # also between two lines
                while True:
                    self._on_line(await self._session.prompt_async(handle_sigint=False, set_exception_handler=False))
        except EOFError:
            self._on_close()
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def flush(self) -> None:
        """Write what is left, after the prompt has ended."""
        self.end_draft()
        if self._writing:
            await self._writing

    def append_draft(self, text: str) -> None:
        # The last column stays free: terminals differ in when they wrap.
        *rows, self._draft = _wrap(self._draft + text, max(20, _terminal_size().columns - 1))
        self._write("".join(f"{row}\n" for row in rows))

    def end_draft(self) -> None:
        if self._draft:
            row, self._draft = self._draft, ""
            self._write(f"{row}\n")

    def show_status(self, text: str) -> None:
        self._status = text
        self._session.app.invalidate()

    def _prompt(self) -> StyleAndTextTuples:
        rows: StyleAndTextTuples = []
        if self._draft:
            rows.append(("", f"{self._draft}\n"))
        if self._status:
            rows.append(("dim", f"{escape_controls(self._status)}\n"))
        return [*rows, ("", PROMPT)]

    def _write(self, text: str) -> None:
        """Write above the prompt, soon and in order. `patch_stdout` would do so five times a second only."""
        self._unwritten += text
        if not text:
            self._session.app.invalidate()
        elif self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_above_prompt(), name="coterie-screen")

    async def _write_above_prompt(self) -> None:
        self._input.keeps_raw_mode = True
        try:
            async with in_terminal():
                text, self._unwritten = self._unwritten, ""
                super()._write(text)
        finally:
            self._input.keeps_raw_mode = False


def _terminal_size() -> Size:
    columns, rows = shutil.get_terminal_size()
    return Size(rows=rows, columns=columns)


def _wrap(text: str, width: int) -> list[str]:
    """`text` in rows of at most `width` cells, broken between words where possible."""
    rows: list[str] = []
    for line in printable_lines(text):
        while cell_len(line) > width:
            head = chop_cells(line, width)[0]
            end = head.rfind(" ") + 1 or len(head)
            rows.append(line[:end].rstrip())
            line = line[end:]
        rows.append(line)
    return rows
