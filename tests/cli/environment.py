"""Environment of CLI tests: a society with a scripted model, its server, and a terminal."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from coterie.cli.server import SocietyServer, stop_server
from coterie.config import ServerAddress, ServerSettings, SocietyFolder, write_address
from coterie.society import Society
from coterie.testing import ModelServer
from coterie.testing.model_server import Reply, Says
from coterie.web.auth import load_token

T = TypeVar("T")

TIMEOUT_SECONDS = 180
"""Ends a test that hangs."""
COLUMNS = 80
AGENTS = '[agents.ada]\nname = "Ada"\n[agents.bob]\nname = "Bob"\nparent = "ada"\n'


class Environment(AbstractContextManager["Environment"]):
    """A society folder with `ada` and her child `bob`. Their model, and the server after `serve`, run in a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = ModelServer()
        self.society: Society | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="environment")
        self._server: SocietyServer | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self.run(self.model.__aenter__())
        self.folder.mkdir(exist_ok=True)
        (self.folder / "coterie.toml").write_text(AGENTS)
        service = {
            "id": "main",
            "baseURL": self.model.base_url,
            "model": "m",
            "capabilities": {"input": ["text"], "output": ["text", "tool_calling"]},
        }
        (self.folder / "llmservices.json").write_text(json.dumps({"services": [service]}))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop_serving()
            self.run(self.model.__aexit__())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(TIMEOUT_SECONDS)
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread of the model and the server."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_SECONDS)

    def call(self, function: Callable[..., object], *args: object) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def serve(self, token: str | None = None) -> None:
        async def begin() -> None:
            self._server = SocietyServer.bind(ServerSettings(port=0), token)
            self.society = await Society.start(self.folder)
            data = SocietyFolder(self.folder).data
            await self._server.start(self.society, load_token(data, token))
            write_address(data, ServerAddress(url=self._server.addresses.local, pid=os.getpid(), token=token))

        self.run(begin())

    def stop_serving(self) -> None:
        server, society = self._server, self.society
        self._server = self.society = None
        if server and society:
            self.run(stop_server(server, society, SocietyFolder(self.folder)))

    def refuse(self) -> None:
        """Let the server refuse all requests, as at the beginning of a stop."""
        assert self._server is not None
        self._server.refuse_requests()

    def wait_for_event(self, kind: str) -> None:
        """Wait until the served society has logged an event of that kind."""

        async def watch() -> None:
            assert self.society is not None
            async with self.society.bus.watch(after=0) as watcher:
                async for event in watcher:
                    if event.kind == kind:
                        return

        self.run(watch())

    def gated(self, text: str = "", **more: Any) -> tuple[Says, Callable[[], None]]:
        """A scripted answer, and the function that releases it."""

        async def make() -> asyncio.Event:
            return asyncio.Event()

        gate = self.run(make())
        return Says(text, gate=gate, **more), lambda: self.call(gate.set)

    def script(self, *replies: Reply) -> None:
        self.model.script(*replies)

    def wait_for_request(self, count: int = 1) -> None:
        """Wait until the model has received `count` requests."""
        self.run(self.model.wait_for_request(count))


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # A shell starts background jobs with SIGINT ignored, and child processes inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal(AbstractContextManager["Terminal"]):
    """A `coterie` process on a pseudo-terminal: `raw` is its whole output, `screen` the visible part."""

    def __init__(self, *args: str | Path) -> None:
        self._keyboard, inner = os.openpty()
        termios.tcsetwinsize(inner, (24, COLUMNS))
        self.raw = ""
        self.screen = TerminalScreen()
        self._seen = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.process = subprocess.Popen(
            [sys.executable, "-m", "coterie", *map(str, args)],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env=os.environ | {"TERM": "xterm"},
        )
        os.close(inner)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(TIMEOUT_SECONDS)
        os.close(self._keyboard)

    def type(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def enter(self, text: str) -> None:
        self.type(f"{text}\r")

    def wait_for(self, text: str) -> None:
        """Wait until the output contains `text` after the last text that was waited for."""
        end = time.monotonic() + TIMEOUT_SECONDS
        while text not in (rest := self.raw[self._seen :]):
            assert self._read(end), f"{text!r} was not written, but: {rest!r}"
        self._seen += rest.index(text) + len(text)

    def wait_for_screen(self, text: str) -> None:
        """Wait until the screen shows `text`."""
        self._wait_until_screen(lambda rows: any(text in row for row in rows), text)

    def wait_until_idle(self) -> None:
        """Wait until the screen shows the prompt without a status line: the agent is idle."""
        self._wait_until_screen(
            lambda rows: rows[-1].startswith(">") and not any("ada: active" in row for row in rows[-2:]), "idle prompt"
        )

    def _wait_until_screen(self, is_reached: Callable[[list[str]], bool], what: str) -> None:
        end = time.monotonic() + TIMEOUT_SECONDS
        while not is_reached(self.screen.rows):
            assert self._read(end), f"{what!r} did not appear, but: {self.screen.rows}"

    def wait_for_exit(self) -> int:
        end = time.monotonic() + TIMEOUT_SECONDS
        while self._read(end):
            pass
        return self.process.wait(TIMEOUT_SECONDS)

    @contextlib.contextmanager
    def read_on(self) -> Iterator[None]:
        """Read the output during the block and until the process ends."""
        reading = threading.Thread(target=self._read_all, name="terminal")
        reading.start()
        yield
        reading.join(TIMEOUT_SECONDS)

    def _read_all(self) -> None:
        while self.process.poll() is None or self._read(0):
            self._read(time.monotonic() + 0.1)

    def _read(self, end: float) -> bool:
        ready, _, _ = select.select([self._keyboard], [], [], max(0, end - time.monotonic()))
        try:
            more = os.read(self._keyboard, 65536) if ready else b""
        except OSError:  # the process has closed its side
            more = b""
        text = self._decode(more)
        self.raw += text
        self.screen.feed(text)
        return bool(more)


class TerminalScreen:
    """The part of a VT100 that a prompt needs: cursor movement, erasing, wrapping. It never scrolls."""

    _TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[=>]|[\r\n\b]|[^\x1b\r\n\b]+")

    def __init__(self) -> None:
        self._lines = [""]
        self._row = self._column = 0
        self._unread = ""

    @property
    def rows(self) -> list[str]:
        """Rows down to the last that is not empty."""
        filled = [number for number, line in enumerate(self._lines) if line.strip()]
        return [line.rstrip() for line in self._lines[: filled[-1] + 1]] if filled else [""]

    def feed(self, text: str) -> None:
        text = self._unread + text
        position = 0
        while token := self._TOKEN.match(text, position):
            position = token.end()
            if token[2]:
                self._control(token[2], token[1])
            elif token[0] == "\r":
                self._column = 0
            elif token[0] == "\n":
                self._move_to(self._row + 1)
            elif token[0] == "\b":
                self._column = max(0, self._column - 1)
            elif token[0][0] != "\x1b":
                for character in token[0]:
                    self._put(character)
        self._unread = text[position:]

    def _control(self, name: str, parameters: str) -> None:
        count = int(parameters) if parameters.isdigit() else 1
        line = self._lines[self._row]
        match name:
            case "A":
                self._row = max(0, self._row - count)
            case "B":
                self._move_to(self._row + count)
            case "C":
                self._column = min(COLUMNS - 1, self._column + count)
            case "D":
                self._column = max(0, self._column - count)
            case "K":
                self._lines[self._row] = line[: self._column]
            case "J":
                self._lines[self._row :] = [line[: self._column]]

    def _move_to(self, row: int) -> None:
        self._row = row
        self._lines += [""] * (row + 1 - len(self._lines))

    def _put(self, character: str) -> None:
        if self._column == COLUMNS:
            self._column = 0
            self._move_to(self._row + 1)
        line = self._lines[self._row].ljust(self._column)
        self._lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
        self._column += 1
