"""How a conversation appears: as plain lines, or on a terminal with a prompt below the messages."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from coterie.cli.conversation import ChatEvent, ChatMessage, DraftEnded, DraftText, MessageArrived
from coterie.cli.output import escape_controls
from coterie.messages import PERSON

if TYPE_CHECKING:
    from prompt_toolkit.formatted_text import StyleAndTextTuples
    from prompt_toolkit.key_binding import KeyPressEvent

PROMPT = "> "
_BOLD, _DIM, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"


def printable_lines(text: str) -> list[str]:
    """The lines of a text, unable to control the terminal."""
    return [escape_controls(line.expandtabs(4)) for line in text.split("\n")]


class Screen:
    """Writes finished lines to `out`; on a terminal also the text of a reply as it grows."""

    def __init__(self, out: TextIO) -> None:
        self.is_terminal = out.isatty()
        self._out = out
        self._has_open_line = False

    def bold(self, text: str) -> str:
        return f"{_BOLD}{escape_controls(text)}{_RESET}" if self.is_terminal else escape_controls(text)

    def dim(self, text: str) -> str:
        return f"{_DIM}{escape_controls(text)}{_RESET}" if self.is_terminal else escape_controls(text)

    def print(self, *lines: str) -> None:
        """Write lines. They may be bold or dim; text from elsewhere must be escaped already."""
        self.end_draft()
        self._write("".join(f"{line}\n" for line in lines))

    def append_draft(self, text: str) -> None:
        """Write more of a growing reply."""
        self._write("\n".join(printable_lines(text)))
        self._has_open_line = not text.endswith("\n")

    def end_draft(self) -> None:
        if self._has_open_line:
            self._write("\n")
            self._has_open_line = False

    def show_status(self, text: str) -> None:
        """Show what the agent is doing; empty: nothing. Only a prompt has room for it."""

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class PromptScreen(Screen):
    """A screen with a line to type in at its bottom, below the growing reply and the status.

    `on_line` gets each line that was entered, `on_interrupt` Ctrl-C, `on_close` Ctrl-D and a terminal that is gone.
    """

    def __init__(
        self,
        out: TextIO,
        *,
        on_line: Callable[[str], None],
        on_interrupt: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(out)
        from prompt_toolkit import PromptSession
        from prompt_toolkit.data_structures import Size
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.output.vt100 import Vt100_Output

        self._on_line, self._on_interrupt, self._on_close = on_line, on_interrupt, on_close
        self._draft = self._status = self._unwritten = ""
        self._writing: asyncio.Task[None] | None = None
        keys = KeyBindings()

        @keys.add("c-c")
        def _(event: KeyPressEvent) -> None:
            on_interrupt()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        def size() -> Size:
            columns, rows = shutil.get_terminal_size()
            return Size(rows=rows, columns=columns)

        self._session: PromptSession[str] = PromptSession(
            self._prompt,
            key_bindings=keys,
            enable_suspend=True,
            erase_when_done=True,
            reserve_space_for_menu=0,
            # Not every terminal answers cursor position requests, and a prompt without menus needs no answer.
            output=Vt100_Output(out, size, term=os.environ.get("TERM"), enable_cpr=False),
        )

    async def run(self) -> None:
        """Read lines until Ctrl-D."""
        loop = asyncio.get_running_loop()
        # Ctrl-C is a key while the prompt reads, and a signal otherwise.
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        try:
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
        *rows, self._draft = _wrap(self._draft + text, max(20, shutil.get_terminal_size().columns - 1))
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
        from prompt_toolkit.application import in_terminal

        async with in_terminal():
            text, self._unwritten = self._unwritten, ""
            super()._write(text)


def _wrap(text: str, width: int) -> list[str]:
    """`text` in rows of at most `width` cells, broken between words where possible."""
    from rich.cells import cell_len, chop_cells

    rows: list[str] = []
    for line in printable_lines(text):
        while cell_len(line) > width:
            head = chop_cells(line, width)[0]
            end = head.rfind(" ") + 1 or len(head)
            rows.append(line[:end].rstrip())
            line = line[end:]
        rows.append(line)
    return rows


def read_stdin(on_line: Callable[[str | None], None]) -> None:
    """Pass each line of standard input to `on_line`, then None. A thread reads, because some files cannot be polled."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        with suppress(RuntimeError):  # the loop is closed
            for line in sys.stdin:
                loop.call_soon_threadsafe(on_line, line.rstrip("\n"))
            loop.call_soon_threadsafe(on_line, None)

    threading.Thread(target=read, name="coterie-stdin", daemon=True).start()


class MessageView:
    """Shows each message once, whether its draft was shown before or not."""

    def __init__(self, screen: Screen, *, agent_id: str | None = None) -> None:
        """`agent_id`: the agent that writes drafts. None: messages are shown without their sender."""
        self._screen, self._agent_id = screen, agent_id
        self._draft_id: str | None = None
        self._draft_text = ""
        self._shown: set[str] = set()

    def handle(self, event: ChatEvent) -> None:
        match event:
            case DraftText() if self._screen.is_terminal:
                self._append(event)
            case DraftEnded(draft_id, outcome) if draft_id == self._draft_id and outcome != "stored":
                self._end_draft()
                self._screen.print(self._screen.dim(f"  ({outcome})"))
            case MessageArrived(message) if message.state != "delayed":
                self.show([message])

    def mark_shown(self, message_id: str) -> None:
        self._shown.add(message_id)

    def show(self, messages: Sequence[ChatMessage]) -> None:
        for message in messages:
            if message.id not in self._shown:
                self._shown.add(message.id)
                self._show(message)

    def _show(self, message: ChatMessage) -> None:
        seen = self._draft_text.strip()
        if self._draft_id is None or message.is_problem or not message.text.startswith(seen):
            self._screen.print(*format_message(message, self._screen, with_sender=self._agent_id is not None))
            return
        if rest := message.text[len(seen) :].rstrip():
            self._screen.append_draft(rest)
        self._end_draft()
        self._screen.print(*format_details(message, self._screen))

    def _append(self, draft: DraftText) -> None:
        if draft.draft_id != self._draft_id:
            self._end_draft()
            self._draft_id = draft.draft_id
            if self._agent_id is not None:
                self._screen.append_draft(f"{self._agent_id}: ")
        new = draft.text[max(0, len(self._draft_text) - draft.start) :]
        self._draft_text += new
        self._screen.append_draft(new)

    def _end_draft(self) -> None:
        self._draft_id, self._draft_text = None, ""
        self._screen.end_draft()


def format_message(message: ChatMessage, screen: Screen, *, with_sender: bool = True) -> list[str]:
    first, *more = printable_lines(message.text)
    sender = "You" if message.sender == PERSON else message.sender
    lines = [f"{screen.bold(f'{sender}:')} {first}" if with_sender else first, *more]
    return [*lines, *format_details(message, screen)]


def format_details(message: ChatMessage, screen: Screen) -> list[str]:
    """What belongs to a message besides its text: arguments to approve, files, an early end, quick replies."""
    lines = [f"  {line}" for line in _format_arguments(message.json["payload"].get("approval"))]
    lines += [screen.dim(f"  [file {name}]") for name in message.filenames]
    if message.is_stopped:
        lines.append(screen.dim("  (stopped here)"))
    if message.quick_replies and message.to == PERSON:
        for number, option in enumerate(message.quick_replies, 1):
            lines.append(f"  {screen.bold(f'{number})')} {printable_lines(option)[0]}")
        lines[-1] += screen.dim(" (answered)" if message.is_answered else "")
    return lines


def _format_arguments(approval: Any) -> list[str]:
    """All arguments of the tool call to approve: the person must see what they approve."""
    arguments = approval.get("arguments") if isinstance(approval, dict) else None
    if not isinstance(arguments, dict):
        return []
    lines = []
    for name, value in arguments.items():
        lines += printable_lines(
            f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        )
    return lines
