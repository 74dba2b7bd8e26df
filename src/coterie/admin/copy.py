"""A society moved from one engine to the other: all of it or nothing, and nobody runs it meanwhile.

A society put together beside its place, and moved in only when all of it is there and sound.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.resources import files
from pathlib import Path

from coterie.admin.inspect import require_society
from coterie.config import SQLITE, TEMPLATES, TOOLS, SocietyFolder, Storage, is_shared_url, read_config, shown
from coterie.errors import StoreUnusable
from coterie.stores.open import check_package
from coterie.stores.sqlite.connection import FolderLock
from coterie.stores.sqlite.engine import DATABASE
from coterie.stores.transfer import Carried, Source, SqliteSource, SqliteTarget, Target, Tell, carry, check

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


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a society is kept, or shall be."""

    store: Storage
    place: SocietyFolder | None = None
    """None: only its database is known."""

    @classmethod
    def of(cls, text: str) -> Whereabouts:
        """`text`: a folder, whose coterie.toml says the rest, or the address of a PostgreSQL."""
        if is_shared_url(text):
            return cls(Storage(url=text))
        return whereabouts(SocietyFolder(Path(text)))

    @property
    def artifacts(self) -> Path | None:
        """The folder that keeps the bytes; None: the database does."""
        if self.store.url == SQLITE and self.place:
            return self.place.artifacts
        return self.place.path / self.store.artifacts if self.place and self.store.artifacts else None

    def __str__(self) -> str:
        return str(self.place.path) if self.store.url == SQLITE and self.place else shown(self.store.url)


def whereabouts(place: SocietyFolder) -> Whereabouts:
    return Whereabouts(read_config(place.path).store, place)


def copy_society(source: Whereabouts, target: Whereabouts, tell: Tell) -> Carried:
    """The society of `source` is in `target`, too, as it is. It blocks, like `back_up`."""
    for end in (source, target):
        check_package(end.store)
    with reading(source) as origin, writing(target) as goal:
        if not origin.count("agents"):
            raise StoreUnusable(f"there is no society in {source} yet: there is nothing to copy")
        carried = carry(origin, goal, tell)
        check(goal.db, carried, tell)
        tell("Putting it in place")
    return carried


@contextmanager
def reading(where: Whereabouts) -> Iterator[Source]:
    """While it is read, nobody runs it."""
    if where.store.url != SQLITE:
        from coterie.stores.postgres.transfer import PostgresSource

        alone = timedelta(seconds=where.store.lease_seconds)
        with PostgresSource.open(where.store.url, where.artifacts, alone=alone) as shared:
            yield shared
        return
    place = require_society(where.place.path) if where.place else None
    if place is None or not (place.data / DATABASE).exists():
        raise StoreUnusable(f"the society in {where} has not run yet: there is nothing to copy")
    lock = FolderLock(place.data)
    try:
        with SqliteSource.open(place.data / DATABASE, place.artifacts) as file:
            yield file
    finally:
        lock.release()


@contextmanager
def writing(where: Whereabouts, remedy: str = "name a database that is empty") -> Iterator[Target]:
    """Nothing is there before all of it is. `remedy`: for whoever names a place that is taken."""
    if where.store.url != SQLITE:
        from coterie.stores.postgres.transfer import PostgresTarget

        with PostgresTarget.make(
            where.store.url, where.artifacts, f"{where} holds a society already: {remedy}"
        ) as shared:
            yield shared
        return
    assert where.place  # noqa: S101 - SQLite is always in a folder
    refuse_data(where.place)
    with staged(where.place) as stage:
        (stage / "data").mkdir(mode=0o700)
        with SqliteTarget.make(stage / "data" / DATABASE, stage / "data" / "artifacts") as file:
            yield file
        move_in(stage, where.place)
