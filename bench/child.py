"""Runs measurements in new processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
Environment = Mapping[str, str]


def seconds(*arguments: str, env: Environment) -> float:
    """Duration of a Python process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, env=env, cwd=ROOT, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def seconds_to_first_line(*arguments: str, env: Environment, kill: bool = False) -> float:
    """Time from the start of Python to its first output. Then the process ends by itself, or is killed."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, *arguments], env=env, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"{' '.join(arguments)} ended without a word")
        took = time.perf_counter() - start
        if kill:
            process.kill()
    return took


def figure(*arguments: str) -> float:
    """The number that a Python process prints."""
    done = subprocess.run([sys.executable, *arguments], check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def with_bytecode(folder: Path) -> Environment:
    """An environment that caches bytecode in `folder`."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return env | {"PYTHONPYCACHEPREFIX": str(folder)}


def without_bytecode(empty: Path) -> Environment:
    """An environment in which each start compiles all modules, including the standard library."""
    return dict(os.environ) | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(empty)}
