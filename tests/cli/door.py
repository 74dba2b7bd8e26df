"""The command line as these tests use it: in this process for single commands, as a process of its own for `serve`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from typer.testing import CliRunner

from coterie.cli import app

PATIENCE = 60
"""Seconds. Nothing waits that long; it only keeps a hanging process from hanging the tests."""


class Outcome:
    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)

    @property
    def failure(self) -> str:
        """The one sentence of a command that failed as it should."""
        assert self.code == 1, (self.code, self.stdout, self.stderr)
        *progress, line = self.stderr.splitlines()
        assert all(one.endswith(" …") for one in progress), progress  # what takes a second says so
        assert line.startswith("Error: ")
        return line.removeprefix("Error: ")


def coterie(*args: str | Path, env: Mapping[str, str] | None = None) -> Outcome:
    result = CliRunner().invoke(app, [str(arg) for arg in args], env=dict(env or {}))
    return Outcome(result.exit_code, result.stdout, result.stderr)


def coterie_process(*args: str | Path, env: Mapping[str, str] | None = None) -> Outcome:
    command = [sys.executable, "-m", "coterie", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | dict(env or {}))
    return Outcome(done.returncode, done.stdout, done.stderr)


class Serving(AbstractContextManager["Serving"]):
    """`coterie serve` as a process, ready when entered; killed on the way out if it still runs."""

    def __init__(self, folder: Path, patience: float = PATIENCE, *, prefix: Sequence[str] = ()) -> None:
        """`prefix`: a command that runs the one behind it."""
        self.banner: list[str] = []
        self.log: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "coterie", "serve", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._watchdog = threading.Timer(patience, self.process.kill)
        self._watchdog.start()
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()

    def __enter__(self) -> Self:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.banner.append(line)
            if line.startswith("Ready"):
                return self
        self.__exit__(None, None, None)
        raise AssertionError(f"never got ready: {self.log}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.tell(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        self._watchdog.cancel()
        self._reader.join(PATIENCE)
        return code

    def wait_for_log(self, text: str) -> str:
        with self._news:
            found = self._news.wait_for(lambda: next((m for m in self.messages if text in m), None), PATIENCE)
        assert found, f"{text!r} was never logged: {self.messages}"
        return found

    @property
    def messages(self) -> list[str]:
        return [line["message"] for line in self.log]

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                with self._news:
                    self.log.append(json.loads(line))
                    self._news.notify_all()
