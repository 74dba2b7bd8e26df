"""Without a browser the tests of the panel fail; they are skipped only if that was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TEST = "tests/panel/test_screens.py::test_open_questions_can_be_answered_in_the_inbox"


@pytest.mark.parametrize(
    ("asked", "code", "outcome"), [(None, 1, "1 error"), ("0", 1, "1 error"), ("1", 0, "1 skipped")]
)
def test_a_missing_browser_is_a_failure_unless_skipping_is_asked_for(
    asked: str | None, code: int, outcome: str
) -> None:
    hidden = ("COTERIE_CHROMIUM", "COTERIE_SKIP_PANEL_TESTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST")
    env = {name: value for name, value in os.environ.items() if name not in hidden} | {"PATH": ""}
    env |= {"COTERIE_SKIP_PANEL_TESTS": asked} if asked else {}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", TEST],
        cwd=Path(__file__).parents[2],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, outcome in run.stdout.splitlines()[-1]) == (code, True), run.stdout
    assert "no browser found" in run.stdout
