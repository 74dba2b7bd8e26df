"""What the fault tests share: a fork server for what is to be killed."""

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
    """In memory where there is such a place: for files whose flushes are not what a test is about."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    yield folder
    shutil.rmtree(folder)
