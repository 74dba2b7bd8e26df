"""Which engine keeps a society: `store.url` says so, and nobody else needs to know."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

from coterie.artifacts import Bytes
from coterie.clock import Clock
from coterie.config import FILE, SQLITE, Config, SocietyFolder, Storage
from coterie.errors import ConfigError, Problem
from coterie.store import Limits
from coterie.stores.blobs import FolderBytes, SharedFolderBytes
from coterie.stores.sql.store import SqlStore
from coterie.stores.sqlite import SqliteStore


def is_shared(config: Config) -> bool:
    """Whether several processes may run the society at once."""
    return config.store.url != SQLITE


def check_engine(config: Config) -> None:
    check_package(config.store)


def check_package(store: Storage) -> None:
    if store.url != SQLITE and find_spec("psycopg") is None:
        sentence = 'PostgreSQL needs a package that is not installed: run pip install "coterie[postgres]"'
        raise ConfigError([Problem(f"{FILE}: store.url", sentence, fatal=True)])


def limits_of(config: Config) -> Limits:
    return Limits(
        max_hops=config.limits.max_hops, mailbox=config.limits.mailbox, shared_artifacts=config.artifacts.shared
    )


def filled_by(place: SocietyFolder, config: Config) -> Path | None:
    """The folder that grows with the society; None where the database's server alone knows its disk."""
    if not is_shared(config):
        return place.data
    return place.path / config.store.artifacts if config.store.artifacts else None


async def open_store(place: SocietyFolder, config: Config, clock: Clock) -> tuple[SqlStore, Bytes]:
    """The store, and the keeper of artifact bytes."""
    check_engine(config)
    if not is_shared(config):
        file = await SqliteStore.open(place.data, clock, limits=limits_of(config), durability=config.store.durability)
        return file, await _folder(file, lambda: FolderBytes(place.artifacts))
    from coterie.stores.postgres import PostgresStore

    lease = timedelta(seconds=config.store.lease_seconds)
    shared = await PostgresStore.open(config.store.url, clock, limits=limits_of(config), lease=lease)
    if config.store.artifacts:
        return shared, await _folder(shared, lambda: SharedFolderBytes(place.path / config.store.artifacts))
    return shared, shared.kept()


async def _folder(store: SqlStore, opened: Callable[[], Bytes]) -> Bytes:
    try:
        return opened()
    except BaseException:
        await store.close()
        raise


async def open_to_look(place: SocietyFolder, config: Config, clock: Clock) -> tuple[SqlStore, Bytes]:
    """Beside whoever runs it; nothing is written, neither to the store nor among the bytes."""
    check_engine(config)
    if not is_shared(config):
        return await SqliteStore.open_read_only(place.data, clock), FolderBytes.beside(place.artifacts)
    from coterie.stores.postgres import PostgresStore

    lease = timedelta(seconds=config.store.lease_seconds)
    shared = await PostgresStore.open_read_only(config.store.url, clock, lease=lease)
    if config.store.artifacts:
        return shared, FolderBytes.beside(place.path / config.store.artifacts)
    return shared, shared.kept()
