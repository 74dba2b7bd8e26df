"""What commands talk to: models whose answers a test holds in its hand, a server, a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
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

from coterie.cli.front_door import FrontDoor
from coterie.society import Society
from coterie.testing import ModelServer
from coterie.testing.replies import Reply, Says

T = TypeVar("T")

PATIENCE = 30
"""Seconds. Nothing waits that long; it only keeps what hangs from hanging the tests."""
AGENTS = '[agents.ada]\nname = "Ada"\n[agents.bob]\nname = "Bob"\nparent = "ada"\n'


class Stage(AbstractContextManager["Stage"]):
    """A folder with `ada` and her child `bob`, whose model runs in a thread of its own; `serve` runs a server there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = ModelServer()
        self.society: Society | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stage")
        self._front: FrontDoor | None = None

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
            self._thread.join(PATIENCE)
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """On the stage's own thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def call(self, function: Callable[..., object], *args: object) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def serve(self, token: str | None = None) -> None:
        async def begin() -> None:
            self._front = FrontDoor.bound(self.folder, host=None, port=0, token=token)
            self.society = await Society.start(self.folder)
            await self._front.open(self.society)

        self.run(begin())

    def stop_serving(self) -> None:
        front, society = self._front, self.society
        self._front = self.society = None
        if front and society:
            self.run(front.close(society))

    def refuse(self) -> None:
        """The server takes no more requests, as at the beginning of a stop."""
        assert self._front is not None
        self._front._app.state.health.draining = True

    def until(self, kind: str) -> None:
        """Something of that kind has happened in the society that is served."""

        async def look() -> None:
            assert self.society is not None
            async with self.society.bus.watch(after=0) as watcher:
                async for event in watcher:
                    if event.kind == kind:
                        return

        self.run(look())

    def gated(self, text: str = "", **more: Any) -> tuple[Says, Callable[[], None]]:
        """An answer that begins when the function is called."""

        async def make() -> asyncio.Event:
            return asyncio.Event()

        gate = self.run(make())
        return Says(text, gate=gate, **more), lambda: self.call(gate.set)

    def script(self, *replies: Reply) -> None:
        self.model.script(*replies)

    def asked(self, count: int = 1) -> None:
        """Until the model got its request of that number."""
        self.run(self.model.wait_for_request(count))


def _as_in_a_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Tests that a shell runs in the background hand on that Ctrl-C is not for them; it is for this one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal(AbstractContextManager["Terminal"]):
    """`coterie` as somebody has it before them: keys go in, `screen` is everything that was ever written."""

    def __init__(self, *args: str | Path) -> None:
        self._keyboard, inner = os.openpty()
        termios.tcsetwinsize(inner, (24, 80))
        self.raw = ""
        self._seen = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "coterie", *map(str, args)],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            preexec_fn=_as_in_a_terminal,
            env=os.environ | {"TERM": "xterm"},
        )
        os.close(inner)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE)
        os.close(self._keyboard)

    def type(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def enter(self, text: str) -> None:
        self.type(f"{text}\r")

    def sees(self, text: str) -> None:
        """Behind what was seen before."""
        end = time.monotonic() + PATIENCE
        while text not in (rest := self.raw[self._seen :]):
            assert self._read(end), f"{text!r} never came, but: {rest!r}"
        self._seen += rest.index(text) + len(text)

    def rests(self) -> None:
        """Nothing but the line to type in is left to move: nobody is at work."""
        self.sees("\x1b[J> ")

    def ends(self) -> int:
        end = time.monotonic() + PATIENCE
        while self._read(end):
            pass
        return self.process.wait(PATIENCE)

    @contextlib.contextmanager
    def read_on(self) -> Iterator[None]:
        """Whatever is written while a test is busy elsewhere, to the end of the process."""
        reading = threading.Thread(target=self._read_all, name="terminal")
        reading.start()
        yield
        reading.join(PATIENCE)

    def _read_all(self) -> None:
        while self.process.poll() is None or self._read(0):
            self._read(time.monotonic() + 0.1)

    def _read(self, end: float) -> bool:
        ready, _, _ = select.select([self._keyboard], [], [], max(0, end - time.monotonic()))
        try:
            more = os.read(self._keyboard, 65536) if ready else b""
        except OSError:  # the other side is closed
            more = b""
        self.raw += more.decode(errors="replace")
        return bool(more)
