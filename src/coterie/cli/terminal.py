"""How messages appear on standard output, and lines read from a pipe."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO

from coterie.cli.conversation import ChatEvent, ChatMessage, DraftEnded, DraftText, MessageArrived
from coterie.cli.output import escape_controls
from coterie.messages import PERSON

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
