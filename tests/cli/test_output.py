from __future__ import annotations

import contextlib
import os
import time

import pytest

from coterie.cli.output import Progress

from .commands import TIMEOUT_SECONDS


def test_progress_of_a_long_operation_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    end = time.monotonic() + TIMEOUT_SECONDS
    with Progress.show("Packing", delay_seconds=0) as progress:
        while not (shown := capsys.readouterr().err):
            assert time.monotonic() < end
        progress.update("Sending")

    assert shown + capsys.readouterr().err == "Packing …\nSending …\n"


def test_progress_of_a_short_operation_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress.show("Packing") as progress:
        progress.update("Sending")

    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal_is_erased_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, screen = os.openpty()
    shown = ""
    with os.fdopen(screen, "w") as terminal:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("sys.stderr", terminal)
        with Progress.show("Packing", delay_seconds=0):
            while "Packing" not in shown:
                shown += os.read(keyboard, 10_000).decode()
    shown += _read_rest(keyboard)

    assert shown.endswith("\x1b[2K")  # the line is erased


def _read_rest(terminal: int) -> str:
    chunks = []
    with contextlib.suppress(OSError):  # Linux reports the closed other side as an error
        while chunk := os.read(terminal, 10_000):
            chunks.append(chunk)
    os.close(terminal)
    return b"".join(chunks).decode(errors="replace")
