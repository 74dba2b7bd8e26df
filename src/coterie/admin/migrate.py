"""Read the schema version of a society's database, and migrate it to the newest."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from coterie.config import SocietyFolder, StoreSettings, read_config
from coterie.store_url import SQLITE, redact_url
from coterie.stores.open import require_driver
from coterie.stores.sql.migrations import (
    migrate_postgres,
    migrate_sqlite,
    postgres_version,
    schema_scripts,
    sqlite_version,
)
from coterie.stores.sqlite.connection import FolderLock, check_filesystem, open_reader, open_writer, sqlite_errors
from coterie.stores.sqlite.engine import DATABASE


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    engine: str
    location: str
    version: int
    """Version before a migration; 0 for an empty or missing database."""
    newest: int
    """Newest version that this program knows."""

    @property
    def is_current(self) -> bool:
        return self.version == self.newest


def read_schema(folder: SocietyFolder) -> Schema:
    """Read the version; write nothing."""
    store = read_config(folder.path).store
    return _sqlite_schema(folder, apply=False) if store.url == SQLITE else _postgres_schema(store, apply=False)


def migrate_society(folder: SocietyFolder) -> Schema:
    """Migrate the database to the newest schema. Several processes may do so at once."""
    schema = read_schema(folder)
    if schema.is_current:
        return schema  # the society may be running, so do not lock it
    store = read_config(folder.path).store
    return _sqlite_schema(folder, apply=True) if store.url == SQLITE else _postgres_schema(store, apply=True)


def _sqlite_schema(folder: SocietyFolder, *, apply: bool) -> Schema:
    path = folder.data / DATABASE
    with sqlite_errors(path):
        version = _migrate_file(folder) if apply else _read_file_version(folder)
    return Schema(engine="sqlite", location=str(path), version=version, newest=schema_scripts("sqlite").newest)


def _read_file_version(folder: SocietyFolder) -> int:
    if not (folder.data / DATABASE).exists():
        return 0
    with closing(open_reader(folder.data / DATABASE)) as db:
        return sqlite_version(db)


def _migrate_file(folder: SocietyFolder) -> int:
    folder.create()
    check_filesystem(folder.data)
    lock = FolderLock(folder.data)
    try:
        with closing(open_writer(folder.data / DATABASE, "full")) as db:
            (folder.data / DATABASE).chmod(0o600)
            return migrate_sqlite(db)
    finally:
        lock.release()


def _postgres_schema(store: StoreSettings, *, apply: bool) -> Schema:
    require_driver(store)
    from coterie.stores.postgres.connection import owner_connection

    with owner_connection(store.url) as db:
        version = migrate_postgres(db.raw) if apply else postgres_version(db.raw)
    newest = schema_scripts("postgres").newest
    return Schema(engine="postgresql", location=redact_url(store.url), version=version, newest=newest)
