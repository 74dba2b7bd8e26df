"""Fixtures of the fault tests: a fork server, and a folder in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import ForkServer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    """A folder in memory if possible, for tests that do not depend on flushes."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    yield folder
    shutil.rmtree(folder)
