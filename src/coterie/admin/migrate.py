"""Which schema a society's database has, and bringing it to the newest one before anybody starts."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from coterie.config import SQLITE, SocietyFolder, Storage, read_config, shown
from coterie.errors import StoreBroken, StoreUnusable
from coterie.stores.open import check_package
from coterie.stores.sqlite.connection import (
    DATABASE_ERRORS,
    FolderLock,
    check_filesystem,
    open_reader,
    open_writer,
    translate,
)
from coterie.stores.sqlite.engine import DATABASE
from coterie.stores.sqlite.migrate import check_version, migrate, migrations


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    engine: str
    where: str
    before: int
    """The number it has, or had. 0: there was nothing yet."""
    newest: int
    """That this program knows. A database beyond it is refused."""

    @property
    def is_current(self) -> bool:
        return self.before == self.newest


def find_schema(place: SocietyFolder) -> Schema:
    """Nothing is written."""
    store = read_config(place.path).store
    return _schema_of_file(place, change=False) if store.url == SQLITE else _schema_of_database(store, change=False)


def bring_up_to_date(place: SocietyFolder) -> Schema:
    """The database has the newest schema when this returns. However many do so at once, one of them does the work."""
    found = find_schema(place)
    if found.is_current:
        return found  # perhaps somebody runs it, which is no hindrance then
    store = read_config(place.path).store
    return _schema_of_file(place, change=True) if store.url == SQLITE else _schema_of_database(store, change=True)


def _schema_of_file(place: SocietyFolder, *, change: bool) -> Schema:
    path = place.data / DATABASE
    try:
        before = _migrate_file(place) if change else _version_of_file(place)
    except DATABASE_ERRORS as error:
        meaning = translate(error)
        if isinstance(meaning, StoreBroken):
            meaning = StoreUnusable(f"{path} is damaged ({error}): restore a backup with coterie restore FILE")
        raise meaning from error
    return Schema(engine="sqlite", where=str(path), before=before, newest=migrations()[-1][0])


def _version_of_file(place: SocietyFolder) -> int:
    if not (place.data / DATABASE).exists():
        return 0
    with closing(open_reader(place.data / DATABASE)) as db:
        return check_version(db)


def _migrate_file(place: SocietyFolder) -> int:
    place.make()
    check_filesystem(place.data)
    lock = FolderLock(place.data)
    try:
        with closing(open_writer(place.data / DATABASE, "full")) as db:
            (place.data / DATABASE).chmod(0o600)
            return migrate(db)
    finally:
        lock.release()


def _schema_of_database(store: Storage, *, change: bool) -> Schema:
    check_package(store)
    from coterie.stores.postgres import migrate as shared
    from coterie.stores.postgres.connection import errand

    with errand(store.url) as db:
        before = shared.migrate(db.raw) if change else shared.version_of(db.raw)
    return Schema(engine="postgresql", where=shown(store.url), before=before, newest=shared.migrations()[-1][0])
