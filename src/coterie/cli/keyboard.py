"""Where the person's lines come from: a terminal, key by key, or a pipe, line by line."""

from __future__ import annotations

import asyncio
import codecs
import os
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from coterie.cli.editor import Closed, Editor, Entered
from coterie.cli.screen import Screen

READ = 4096
_PASTE_ON, _PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
"""The terminal says where a paste begins and ends, so that its line ends send nothing."""


@contextmanager
def typing(screen: Screen, got: Callable[[Entered | Closed], None]) -> Iterator[None]:
    """Keys of the terminal on standard input are taken one by one, and shown on `screen`."""
    terminal, loop, editor = sys.stdin.fileno(), asyncio.get_running_loop(), Editor()
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def read() -> None:
        try:
            pressed = os.read(terminal, READ)
        except OSError:
            pressed = b""  # the terminal is gone
        if not pressed:
            loop.remove_reader(terminal)
            got(Closed())
            return
        finished = editor.feed(decode(pressed))
        screen.type(editor.text, editor.place)
        for one in finished:
            got(one)

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal, termios.TCSADRAIN)  # what was typed meanwhile is kept
    loop.add_reader(terminal, read)
    screen.type("", 0)
    _write(_PASTE_ON)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        _write(_PASTE_OFF)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _write(sequence: str) -> None:
    sys.stdout.write(sequence)
    sys.stdout.flush()


def piped(got: Callable[[Entered | Closed], None]) -> None:
    """Lines of standard input, read by a thread of their own: not every kind of file can be waited for."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        with suppress(RuntimeError):  # nobody listens any more
            for line in sys.stdin:
                loop.call_soon_threadsafe(got, Entered(line.rstrip("\n")))
            loop.call_soon_threadsafe(got, Closed())

    threading.Thread(target=read, name="coterie-stdin", daemon=True).start()
