"""A society moved from one engine to the other: all of it or nothing, and nobody runs it meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from coterie.config import Storage, read_config
from coterie.errors import StoreUnusable
from coterie.folder import SocietyFolder
from coterie.inspection import require_society
from coterie.staging import move_in, refuse_data, staged
from coterie.storage import check_package
from coterie.store_url import SQLITE, is_shared_url, shown
from coterie.stores.sql.carrying import Carried, Source, Target, Tell, carry, check
from coterie.stores.sqlite.carrying import SqliteSource, SqliteTarget
from coterie.stores.sqlite.database import DATABASE
from coterie.stores.sqlite.lock import FolderLock


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
        from coterie.stores.postgres.carrying import PostgresSource

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
        from coterie.stores.postgres.carrying import PostgresTarget

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
