from __future__ import annotations

import contextlib
import os

import pytest

from coterie.cli import output
from coterie.cli.output import Progress


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PROGRESS_AFTER", 0)


def test_what_takes_a_second_says_what_it_is_doing(at_once: None, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress.shown("Packing") as progress:
        progress._timer.join()
        progress.tell("Sending")

    assert capsys.readouterr().err == "Packing …\nSending …\n"


def test_what_is_done_sooner_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress.shown("Packing") as progress:
        progress.tell("Sending")

    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_progress_moves_and_leaves_no_trace(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, screen = os.openpty()
    with os.fdopen(screen, "w") as terminal:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("sys.stderr", terminal)
        with Progress.shown("Packing") as progress:
            progress._timer.join()
    shown = _all_of(keyboard)

    assert "Packing" in shown
    assert shown.endswith("\x1b[2K")  # the line is wiped


def _all_of(terminal: int) -> str:
    """Whatever was written to it, now that nobody writes any more."""
    pieces = []
    with contextlib.suppress(OSError):  # how Linux tells that the other end is closed
        while piece := os.read(terminal, 10_000):
            pieces.append(piece)
    os.close(terminal)
    return b"".join(pieces).decode()
