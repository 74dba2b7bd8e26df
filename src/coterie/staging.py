"""A society put together beside its place, and moved in only when all of it is there and sound."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from coterie.errors import StoreUnusable
from coterie.folder import TEMPLATES, TOOLS, SocietyFolder
from coterie.stores.sqlite.lock import FolderLock

MARK = ".restoring-"


def refuse_data(place: SocietyFolder) -> None:
    if any(place.data.glob("coterie.db*")) or place.artifacts.exists():
        raise StoreUnusable(
            f"{place.path} holds a society with data already: choose another folder with --dir, or move it away first"
        )


@contextmanager
def staged(place: SocietyFolder) -> Iterator[Path]:
    """A folder inside the target, so that moving in is renaming; afterwards nothing is left that was not moved."""
    missing = [path for path in (place.data, place.path, *place.path.parents) if not path.exists()]
    try:
        _make(place)
        lock = FolderLock(place.data)
        try:
            yield from _scratch(place)
        finally:
            lock.release()
    except BaseException:
        if missing:
            shutil.rmtree(missing[-1], ignore_errors=True)
        raise


def move_in(stage: Path, place: SocietyFolder) -> None:
    moves = [(path, place.path / path.name) for path in sorted(stage.iterdir()) if path.name != "data"]
    for source, goal in moves:
        _refuse_loss(source, goal)
    # The database last: with it the society is there.
    for name in ("artifacts", "coterie.db"):
        if (stage / "data" / name).exists():
            moves.append((stage / "data" / name, place.data / name))
    moved: list[tuple[Path, Path]] = []
    try:
        for source, goal in moves:
            source.rename(goal)
            moved.append((source, goal))
    except BaseException:
        for source, goal in reversed(moved):
            goal.rename(source)
        raise
    for folder in (place.data, place.path, place.path.parent):
        flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """Names in `folder` are durable, too."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make(place: SocietyFolder) -> None:
    try:
        place.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnusable(
            f"{place.path} cannot be made or written ({error.strerror}): choose another folder with --dir"
        ) from error


def _scratch(place: SocietyFolder) -> Iterator[Path]:
    for left in place.path.glob(f"{MARK}*"):  # by a restore that was killed
        shutil.rmtree(left, ignore_errors=True)
    stage = Path(tempfile.mkdtemp(prefix=MARK, dir=place.path))
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _refuse_loss(source: Path, goal: Path) -> None:
    """What `coterie init` wrote may be replaced, the owner's own work may not."""
    if not goal.exists():
        return
    if source.is_file() and goal.is_file():
        present = goal.read_bytes()
        if present == source.read_bytes():
            return
        if goal.name in (*TEMPLATES, TOOLS) and present == (files("coterie") / "templates" / goal.name).read_bytes():
            return
    raise StoreUnusable(f"{goal} exists and differs from the backup's: move it away first, or choose another --dir")
