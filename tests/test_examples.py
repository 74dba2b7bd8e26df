"""The examples run and print their expected output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "two_agents": ["grace: I asked Ada.", "grace: Ada says it is 42."],
    "reminders": ["ada: I will remind you.", "still delayed for you: 1", "ada: Time for tea!"],
    "blind_agent": ["reader gets: dot.png needs vision, ask ['seer']", "reader: The seer sees one red pixel."],
    "interruption": [
        "the second message is queued",
        "ada: All right, I wrote to nobody.",
        "the history has no trace of the plan: ['user', 'user', 'assistant']",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "stand_in"))
def test_an_example_prints_its_expected_output(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert [line for line in lines if line in SAYS[name]] == SAYS[name]
