"""Separate environments for the libraries that Coterie is compared with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def environment(folder: Path, *packages: str) -> str:
    """Create a virtual environment with these packages in `folder`; return its Python."""
    python = str(folder / "bin" / "python")
    subprocess.run([*uv(), "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    subprocess.run([*uv(), "pip", "install", "--quiet", "--python", python, *packages], check=True)
    return python


def uv() -> list[str]:
    if found := os.environ.get("UV") or shutil.which("uv"):
        return [found]
    command = [sys.executable, "-m", "uv"]
    if subprocess.run([*command, "--version"], capture_output=True).returncode:
        sys.exit("uv is needed to make an environment for a peer: install it with `pip install uv`")
    return command


def ask(python: str, module: str, *arguments: str) -> dict[str, Any]:
    """Run a module with that Python in a new process; return the JSON it prints."""
    command = [python, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]
