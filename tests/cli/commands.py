"""Run commands in this process or as processes, and `coterie serve` as a process."""

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

TIMEOUT_SECONDS = 300
"""Ends a test whose process hangs."""


class Result:
    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)

    @property
    def failure(self) -> str:
        """The error message of a command that failed with exit code 1."""
        assert self.code == 1, (self.code, self.stdout, self.stderr)
        *progress, line = self.stderr.splitlines()
        assert all(title.endswith(" …") for title in progress), progress
        assert line.startswith("Error: ")
        return line.removeprefix("Error: ")


def coterie(*args: str | Path, env: Mapping[str, str] | None = None) -> Result:
    result = CliRunner().invoke(app, [str(arg) for arg in args], env=dict(env or {}))
    return Result(result.exit_code, result.stdout, result.stderr)


def coterie_process(*args: str | Path, env: Mapping[str, str] | None = None) -> Result:
    command = [sys.executable, "-m", "coterie", *map(str, args)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=os.environ | dict(env or {})
    )
    return Result(done.returncode, done.stdout, done.stderr)


class ServeProcess(AbstractContextManager["ServeProcess"]):
    """`coterie serve` as a process, ready when entered and killed at the exit of the context."""

    def __init__(self, folder: Path, timeout: float = TIMEOUT_SECONDS, *, prefix: Sequence[str] = ()) -> None:
        """`prefix`: a command that runs the rest of its arguments, such as `env`."""
        self.banner: list[str] = []
        self.log: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "coterie", "serve", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._watchdog = threading.Timer(timeout, self.process.kill)
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

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(TIMEOUT_SECONDS)
        self._watchdog.cancel()
        self._reader.join(TIMEOUT_SECONDS)
        return code

    def wait_for_log(self, text: str) -> str:
        with self._changed:
            found = self._changed.wait_for(lambda: next((m for m in self.messages if text in m), None), TIMEOUT_SECONDS)
        assert found, f"{text!r} was never logged: {self.messages}"
        return found

    @property
    def messages(self) -> list[str]:
        return [line["message"] for line in self.log]

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                with self._changed:
                    self.log.append(json.loads(line))
                    self._changed.notify_all()
