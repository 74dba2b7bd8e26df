"""Which engine keeps a society: `store.url` says so, and nobody else needs to know."""

from __future__ import annotations

from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

from coterie.artifacts import Bytes
from coterie.clock import Clock
from coterie.config import FILE, Config
from coterie.errors import ConfigError, Problem
from coterie.folder import SocietyFolder
from coterie.store import Limits
from coterie.stores.folder import FolderBytes
from coterie.stores.sql.store import SqlStore
from coterie.stores.sqlite import SqliteStore

SQLITE = "sqlite"


def is_shared(config: Config) -> bool:
    """Whether several processes may run the society at once."""
    return config.store.url != SQLITE


def check_engine(config: Config) -> None:
    if is_shared(config) and find_spec("psycopg") is None:
        sentence = 'PostgreSQL needs a package that is not installed: run pip install "coterie[postgres]"'
        raise ConfigError([Problem(f"{FILE}: store.url", sentence, fatal=True)])


def limits_of(config: Config) -> Limits:
    return Limits(max_hops=config.limits.max_hops, mailbox=config.limits.mailbox)


async def open_store(place: SocietyFolder, config: Config, clock: Clock) -> tuple[SqlStore, Bytes]:
    """The store, and the keeper of artifact bytes."""
    check_engine(config)
    if not is_shared(config):
        file = await SqliteStore.open(place.data, clock, limits=limits_of(config), durability=config.store.durability)
        return file, await _folder(file, place.artifacts)
    from coterie.stores.postgres import PostgresStore

    lease = timedelta(seconds=config.store.lease_seconds)
    shared = await PostgresStore.open(config.store.url, clock, limits=limits_of(config), lease=lease)
    if config.store.artifacts:
        return shared, await _folder(shared, place.path / config.store.artifacts)
    return shared, shared.kept()


async def _folder(store: SqlStore, folder: Path) -> Bytes:
    try:
        return FolderBytes(folder)
    except BaseException:
        await store.close()
        raise


async def open_to_look(place: SocietyFolder, config: Config, clock: Clock) -> SqlStore:
    """Beside whoever runs it; every write is refused."""
    check_engine(config)
    if not is_shared(config):
        return await SqliteStore.open_read_only(place.data, clock)
    from coterie.stores.postgres import PostgresStore

    return await PostgresStore.open_read_only(config.store.url, clock)
