"""Open the store and the blob store that `coterie.toml` names: SQLite by default, or PostgreSQL.

The engines are imported when they are needed: a command that only speaks HTTP starts in half the time without them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.agents import Agent
from coterie.artifacts import BlobStore
from coterie.clock import Clock
from coterie.config import CONFIG_FILE, Config, SocietyFolder, StoreSettings, parse_config
from coterie.errors import ConfigError, Problem, StoreUnusable
from coterie.store import Limits, worker_name
from coterie.store_url import SQLITE
from coterie.stores.blobs import FolderBlobStore, SharedFolderBlobStore

if TYPE_CHECKING:
    from coterie.stores.sql.store import SqlStore

log = logging.getLogger(__name__)

GONE = "gone"
"""Name of a worker whose process has ended."""


def is_shared(config: Config) -> bool:
    """True if several processes may run the society at once."""
    return config.store.url != SQLITE


def require_driver(store: StoreSettings) -> None:
    """Raise `ConfigError` if the store needs psycopg and it is not installed."""
    if store.url != SQLITE and find_spec("psycopg") is None:
        sentence = 'PostgreSQL needs a package that is not installed: run pip install "coterie[postgres]"'
        raise ConfigError([Problem(f"{CONFIG_FILE}: store.url", sentence, fatal=True)])


def store_limits(config: Config) -> Limits:
    return Limits(
        max_hops=config.limits.max_hops, mailbox=config.limits.mailbox, shared_artifacts=config.artifacts.shared
    )


def stored_limits(document: str) -> Limits:
    """The limits in a stored configuration; the defaults if it cannot be read."""
    try:
        content = json.loads(document)
        return store_limits(parse_config({name: content.get(name, {}) for name in ("limits", "artifacts")}, Path()))
    except (ValueError, AttributeError, ConfigError):
        log.error("the limits in the stored configuration cannot be read: the defaults count; run coterie apply")
        return Limits()


def growing_folder(folder: SocietyFolder, config: Config) -> Path | None:
    """Local folder that grows with the society; None if the database server stores everything."""
    if not is_shared(config):
        return folder.data
    return folder.path / config.store.artifacts if config.store.artifacts else None


async def open_store(folder: SocietyFolder, config: Config, clock: Clock) -> tuple[SqlStore, BlobStore]:
    require_driver(config.store)
    if not is_shared(config):
        from coterie.stores.sqlite import SqliteStore

        sqlite = await SqliteStore.open(
            folder.data, clock, limits=store_limits(config), durability=config.store.durability
        )
        return sqlite, await _open_blobs(sqlite, lambda: FolderBlobStore(folder.artifacts))
    from coterie.stores.postgres import PostgresStore

    lease = timedelta(seconds=config.store.lease_seconds)
    postgres = await PostgresStore.open(
        config.store.url, clock, limits=store_limits(config), lease=lease, read_limits=stored_limits
    )
    if config.store.artifacts:
        shared_folder = folder.path / config.store.artifacts
        return postgres, await _open_blobs(postgres, lambda: SharedFolderBlobStore(shared_folder))
    return postgres, postgres.blobs()


async def _open_blobs(store: SqlStore, open_blobs: Callable[[], BlobStore]) -> BlobStore:
    """Call `open_blobs`; close `store` if it fails."""
    try:
        return open_blobs()
    except BaseException:
        await store.close()
        raise


def require_database(folder: SocietyFolder, config: Config) -> None:
    """Raise `StoreUnusable` if the society has not run yet, so that there is nothing to read."""
    from coterie.stores.sqlite.engine import DATABASE

    if not is_shared(config) and not (folder.data / DATABASE).exists():
        raise StoreUnusable(f"the society in {folder.path} has not run yet: start it with coterie serve {folder.path}")


async def open_store_read_only(folder: SocietyFolder, config: Config, clock: Clock) -> tuple[SqlStore, BlobStore]:
    """Open both for reading only; other processes may run the society meanwhile."""
    require_driver(config.store)
    if not is_shared(config):
        from coterie.stores.sqlite import SqliteStore

        return await SqliteStore.open_read_only(folder.data, clock), FolderBlobStore.open_read_only(folder.artifacts)
    from coterie.stores.postgres import PostgresStore

    postgres = await PostgresStore.open_read_only(config.store.url, clock)
    if config.store.artifacts:
        return postgres, FolderBlobStore.open_read_only(folder.path / config.store.artifacts)
    return postgres, postgres.blobs()


def owner_pid(folder: SocietyFolder) -> int | None:
    """Pid of the process that runs the society; -1 if unknown, None if no process runs it. SQLite only."""
    from coterie.stores.sqlite.connection import lock_owner_pid

    return lock_owner_pid(folder.data)


async def worker_names(folder: SocietyFolder, config: Config, store: SqlStore) -> Callable[[Agent], str | None]:
    """Return a function from an agent to its worker's name, `host/pid`; `gone` if that process has ended."""
    if is_shared(config):
        names = {worker.id: worker.name for worker in await store.workers()}
        return lambda agent: names.get(agent.worker, GONE) if agent.worker else None
    pid = owner_pid(folder)
    name = worker_name(pid) if pid and pid > 0 else GONE
    return lambda agent: name if agent.worker else None


def require_society(folder: Path) -> SocietyFolder:
    society_folder = SocietyFolder(folder)
    if not society_folder.exists:
        raise StoreUnusable(
            f"there is no society in {folder}: name its folder with --dir, or make one with coterie init {folder}"
        )
    return society_folder
